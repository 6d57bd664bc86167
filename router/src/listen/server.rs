//! Serves the connections of one thread over HTTP/1 and HTTP/2: the API, the pages for administrators, or gRPC.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::connection::{self, Activity, ConnectionLimits, ShutdownSignals};
use crate::admin::Pages;
use crate::app::App;
use crate::deferred::DeferredTasks;
use crate::proxy::{Body, Worker, serve};

/// Number of concurrent streams of an HTTP/2 connection.
///
/// If exceeded: the client must wait; any further stream is refused with `REFUSED_STREAM`.
const H2_STREAMS_MAX: u32 = 256;
/// The flow-control window of an HTTP/2 stream in bytes, and the size of its send buffer.
const H2_STREAM_BYTES: u32 = 256 * 1024;
/// The flow-control window of an HTTP/2 connection in bytes.
const H2_CONNECTION_BYTES: u32 = 1024 * 1024;
/// The smallest buffer that hyper accepts for an HTTP/1 connection, in bytes.
const H1_BUFFER_MIN: usize = 8192;
/// The interval at which requests that wait for an answer check their deadlines.
const TICK_INTERVAL: Duration = Duration::from_millis(500);
/// The time without traffic after which an HTTP/2 connection is probed with a ping.
const H2_PING_INTERVAL: Duration = Duration::from_secs(30);
/// Time within which an HTTP/2 client must answer a ping.
///
/// If exceeded: the connection is closed.
const H2_PING_TIMEOUT: Duration = Duration::from_secs(20);

/// The service that a port provides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    /// The API, the probes, the metrics, the debug pages and the console.
    Api,
    /// Only the probes and the metrics.
    Admin,
    /// The gRPC service for the operator.
    Grpc,
}

impl ListenerKind {
    /// The prefix of the names of the threads that serve the port.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Api => "serve",
            Self::Admin => "admin",
            Self::Grpc => "grpc",
        }
    }
}

/// Serves connections on the thread that created this value. Only this thread may call [`Self::serve`].
pub struct ConnectionServer {
    app: App,
    service: Service,
    shutdown: ShutdownSignals,
    _deferred: DeferredTasks,
    /// The periodic task, which runs until the last request is finished. Dropping it aborts the task.
    _ticking: JoinSet<()>,
}

impl ConnectionServer {
    /// Creates a server of the API that runs until `stop` is canceled. The current Tokio runtime must run tasks on this
    /// thread alone.
    ///
    /// # Panics
    /// If called outside of a Tokio runtime.
    #[must_use]
    pub fn new(app: &App, stop: CancellationToken) -> Self {
        Self::start(app.clone(), ListenerKind::Api, ShutdownSignals { stop, pressure: Arc::default() })
    }

    /// Creates a server of this `kind`, which runs until `shutdown`. The requirements of [`Self::new`] apply.
    pub(super) fn start(app: App, kind: ListenerKind, shutdown: ShutdownSignals) -> Self {
        let service = Service::new(app.clone(), kind);
        let mut ticking = JoinSet::new();
        if let Service::Api(worker) = &service {
            ticking.spawn(tick(Arc::clone(worker)));
        }
        Self { app, service, shutdown, _deferred: DeferredTasks::start(), _ticking: ticking }
    }

    /// Serves the connection of the client at this address until the connection ends.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection and frees all resources of its requests.
    pub async fn serve<C>(self: Arc<Self>, client: IpAddr, connection: C)
    where
        C: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let activity = Activity::new();
        let (server, activity_of_service) = (Arc::clone(&self), Arc::clone(&activity));
        let service = service_fn(move |request| {
            let (server, active_request) = (Arc::clone(&server), activity_of_service.begin());
            async move {
                let response = server.service.answer(client, request).await;
                Ok::<_, Infallible>(response.map(|body| active_request.answer(body)))
            }
        });
        let limits = ConnectionLimits::of(&self.app);
        let builder = builder(&self.app);
        let connection = builder.serve_connection(TokioIo::new(connection), service);
        connection::supervise(connection, &activity, limits, &self.shutdown).await;
    }

    /// Closes those connections to replicas that have been idle for too long.
    pub(super) fn sweep(&self) {
        if let Service::Api(worker) = &self.service {
            worker.pool.sweep();
        }
    }
}

/// The service that answers the requests of a thread.
enum Service {
    Api(Arc<Worker>),
    Pages(Pages),
}

impl Service {
    fn new(app: App, kind: ListenerKind) -> Self {
        match kind {
            ListenerKind::Api => Self::Api(Arc::new(Worker::new(app))),
            ListenerKind::Admin => Self::Pages(Pages::probes(app)),
            ListenerKind::Grpc => Self::Pages(Pages::grpc(app)),
        }
    }

    async fn answer(&self, client: IpAddr, request: Request<Incoming>) -> Response<Body> {
        match self {
            Self::Api(worker) => {
                let Ok(response) = serve(Arc::clone(worker), client, request).await;
                response
            }
            Self::Pages(pages) => pages.answer(request).await.map(Body::page),
        }
    }
}

/// The settings for a new connection.
fn builder(app: &App) -> auto::Builder<TokioExecutor> {
    let settings = app.settings();
    let head_bytes = usize::try_from(settings.max_header_bytes.0).unwrap_or(usize::MAX);
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(settings.read_timeout)
        .max_buf_size(head_bytes.max(H1_BUFFER_MIN));
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(H2_STREAMS_MAX)
        .initial_stream_window_size(H2_STREAM_BYTES)
        .initial_connection_window_size(H2_CONNECTION_BYTES)
        .max_send_buf_size(H2_STREAM_BYTES as usize)
        .max_header_list_size(u32::try_from(head_bytes).unwrap_or(u32::MAX))
        .keep_alive_interval(H2_PING_INTERVAL)
        .keep_alive_timeout(H2_PING_TIMEOUT);
    builder
}

/// Periodically wakes the requests that wait for an answer, because this is cheaper than one timer per request.
async fn tick(worker: Arc<Worker>) {
    let mut ticks = tokio::time::interval(TICK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        worker.tick.notify_waiters();
    }
}

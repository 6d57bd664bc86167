//! Accepts the connections of clients, and assigns each to the thread with the fewest connections.
//!
//! Each thread has its own runtime and its own connections to replicas, so that a request and its answer are handled by
//! one thread and wake no other thread.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use process::listen::ConnectionSlots;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::admin::Pages;
use crate::app::App;
use crate::deferred::DeferredTasks;
use crate::proxy::{Body, Worker, serve};

mod connection;

use connection::{Activity, ConnectionLimits, ShutdownSignals};

/// The number of accepted connections that wait for a thread.
const HANDOVER_MAX: usize = 256;
/// Number of concurrent streams of an HTTP/2 connection.
///
/// If exceeded: the client waits; a stream that it opens nevertheless is refused with `REFUSED_STREAM`.
const H2_STREAMS_MAX: u32 = 256;
/// The flow-control window of an HTTP/2 stream in bytes, and the size of its send buffer.
const H2_STREAM_BYTES: u32 = 256 * 1024;
/// The flow-control window of an HTTP/2 connection in bytes.
const H2_CONNECTION_BYTES: u32 = 1024 * 1024;
/// The smallest buffer that hyper accepts for HTTP/1.
const H1_BUFFER_MIN: usize = 8192;
/// The interval at which requests that wait for an answer check their deadlines.
const TICK_INTERVAL: Duration = Duration::from_millis(500);
/// The interval at which old idle connections to replicas are closed.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// The time without traffic after which an HTTP/2 connection is probed with a ping.
const H2_PING_INTERVAL: Duration = Duration::from_secs(30);
/// Time within which an HTTP/2 client must answer a ping.
///
/// If exceeded: the connection is closed.
const H2_PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Size of the kernel's buffer of a connection in each direction. By default, the buffer can grow to megabytes for each
/// client that does not read or that sends data ahead.
const SOCKET_BUFFER_BYTES: u32 = 256 * 1024;
/// Number of connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// A client connection, with its permit under `--max-connections`.
struct AcceptedConnection {
    stream: std::net::TcpStream,
    permit: OwnedSemaphorePermit,
}

/// The service that a port provides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    /// The API, the probes, the metrics and the console.
    Api,
    /// Only the probes and the metrics are served.
    Admin,
    /// The gRPC service for the operator.
    Grpc,
}

impl ListenerKind {
    fn name(self) -> &'static str {
        match self {
            Self::Api => "serve",
            Self::Admin => "admin",
            Self::Grpc => "grpc",
        }
    }
}

/// Listens on `port` of `host`.
///
/// # Errors
/// The port is in use, or the process is not permitted to use it.
pub(crate) fn bind(host: IpAddr, port: u16) -> anyhow::Result<TcpListener> {
    let address = SocketAddr::new(host, port);
    let listen = || {
        let socket = if host.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        // Accepted connections inherit these buffer sizes.
        socket.set_send_buffer_size(SOCKET_BUFFER_BYTES)?;
        socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().with_context(|| format!("failed to listen on {address}"))
}

/// The threads that serve connections.
pub(crate) struct Threads {
    threads: Vec<Thread>,
    /// Aborts the remaining requests.
    abort: CancellationToken,
    /// Notifies connections without a request to close, because other connections wait to be accepted.
    pressure: Arc<Notify>,
    /// Closes when the last thread ends. No message is ever sent.
    running: mpsc::Receiver<Infallible>,
}

struct Thread {
    inbox: mpsc::Sender<AcceptedConnection>,
    connections: Arc<AtomicUsize>,
    handle: JoinHandle<()>,
}

impl Threads {
    /// Starts `count` threads. They end when `stop` is canceled and their requests are finished.
    ///
    /// # Errors
    /// The operating system could not start a thread.
    pub(crate) fn start(
        app: &App,
        kind: ListenerKind,
        count: usize,
        stop: &CancellationToken,
    ) -> anyhow::Result<Self> {
        let pressure = Arc::new(Notify::new());
        let abort = CancellationToken::new();
        let (runs, running) = mpsc::channel(1);
        let start = |number| {
            let (inbox, connections_in) = mpsc::channel(HANDOVER_MAX);
            let connections = Arc::new(AtomicUsize::new(0));
            // The threads do not use signals and processes. Without these drivers, the runtime has less work per
            // wake-up.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
            let (app, count) = (app.clone(), Arc::clone(&connections));
            let (stop, abort, runs) = (stop.clone(), abort.clone(), runs.clone());
            let shutdown = ShutdownSignals { stop, pressure: Arc::clone(&pressure) };
            let name = format!("{}-{number}", kind.name());
            let handle = std::thread::Builder::new().name(name).spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        () = serve_connections(app, kind, connections_in, &count, shutdown) => {}
                        () = abort.cancelled() => {}
                    }
                });
                drop(runs);
            })?;
            Ok::<_, std::io::Error>(Thread { inbox, connections, handle })
        };
        let threads: Result<Vec<_>, _> = (0..count).map(start).collect();
        Ok(Self { threads: threads.context("failed to start a thread")?, abort, pressure, running })
    }

    /// Waits until all requests are finished after `stop`.
    pub(crate) async fn finished(&mut self) {
        let _ = self.running.recv().await;
    }

    /// Aborts the remaining requests, and waits for the threads to end.
    pub(crate) fn abort(self) {
        self.abort.cancel();
        for thread in self.threads {
            drop(thread.inbox);
            if thread.handle.join().is_err() {
                tracing::error!("a serving thread panicked");
            }
        }
    }

    /// Accepts connections and assigns them to threads until `stop`.
    pub(crate) async fn accept(
        &self,
        listener: TcpListener,
        max_connections: usize,
        stop: &CancellationToken,
    ) {
        let mut slots = ConnectionSlots::new(max_connections, Arc::clone(&self.pressure));
        loop {
            let (connection, permit) = tokio::select! {
                accepted = slots.accept(&listener) => accepted,
                () = stop.cancelled() => return,
            };
            let Ok(stream) = connection.into_std() else { continue };
            let least = self.threads.iter().min_by_key(|thread| thread.connections.load(Ordering::Relaxed));
            if let Some(thread) = least {
                thread.connections.fetch_add(1, Ordering::Relaxed);
                // Sending fails only if the thread has ended, which closes the connection.
                let _ = thread.inbox.send(AcceptedConnection { stream, permit }).await;
            }
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

/// Wakes the requests that wait for an answer periodically, which is cheaper than one timer per request.
async fn tick(worker: Arc<Worker>) {
    let mut ticks = tokio::time::interval(TICK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        worker.tick.notify_waiters();
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

/// Serves connections on the thread that created this value, which must also call [`Self::serve`].
pub struct ConnectionServer {
    app: App,
    service: Service,
    shutdown: ShutdownSignals,
    _deferred: DeferredTasks,
    /// The periodic task, which runs until the last request is finished. Dropping it aborts the task.
    _ticking: JoinSet<()>,
}

impl ConnectionServer {
    /// Creates a server of the API that runs until `stop` is canceled.
    ///
    /// # Panics
    /// The call is outside of a runtime. The runtime must belong to this thread alone.
    #[must_use]
    pub fn new(app: &App, stop: CancellationToken) -> Self {
        Self::start(app.clone(), ListenerKind::Api, ShutdownSignals { stop, pressure: Arc::default() })
    }

    fn start(app: App, kind: ListenerKind, shutdown: ShutdownSignals) -> Self {
        let service = Service::new(app.clone(), kind);
        let mut ticking = JoinSet::new();
        if let Service::Api(worker) = &service {
            ticking.spawn(tick(Arc::clone(worker)));
        }
        Self { app, service, shutdown, _deferred: DeferredTasks::start(), _ticking: ticking }
    }

    /// Serves the connection of the client at this address until it ends.
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

    /// Closes connections to replicas that have been idle for too long.
    fn sweep(&self) {
        if let Service::Api(worker) = &self.service {
            worker.pool.sweep();
        }
    }
}

/// Serves connections until `shutdown`, and then finishes the requests in flight.
async fn serve_connections(
    app: App,
    kind: ListenerKind,
    mut inbox: mpsc::Receiver<AcceptedConnection>,
    count: &AtomicUsize,
    shutdown: ShutdownSignals,
) {
    let stop = shutdown.stop.clone();
    let server = Arc::new(ConnectionServer::start(app, kind, shutdown));
    let mut connections = JoinSet::new();
    let mut sweep = tokio::time::interval(SWEEP_INTERVAL);
    loop {
        let AcceptedConnection { stream, permit } = tokio::select! {
            accepted = inbox.recv() => match accepted {
                Some(accepted) => accepted,
                None => break,
            },
            // A connection has ended.
            Some(_) = connections.join_next() => {
                count.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            _ = sweep.tick() => {
                server.sweep();
                continue;
            }
            () = stop.cancelled() => break,
        };
        let (Ok(client), Ok(connection)) = (stream.peer_addr(), TcpStream::from_std(stream)) else {
            count.fetch_sub(1, Ordering::Relaxed);
            continue;
        };
        let served = Arc::clone(&server).serve(client.ip(), connection);
        connections.spawn(async move {
            served.await;
            drop(permit);
        });
    }
    // Close the connections in the queue, so that their clients connect to another router.
    drop(inbox);
    while connections.join_next().await.is_some() {}
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use futures_util::FutureExt as _;

    use super::*;
    use crate::Args;

    #[tokio::test]
    async fn threads_have_finished_when_the_last_one_has_ended() {
        let stop = CancellationToken::new();
        let app = App::new(Args::try_parse_from(["router"]).unwrap(), None);
        let mut threads = Threads::start(&app, ListenerKind::Api, 2, &stop).unwrap();
        let mut finished = Box::pin(threads.finished());
        assert!((&mut finished).now_or_never().is_none());
        stop.cancel();
        finished.await;
        threads.abort();
    }
}

//! Clients' connections: accepted in one place, served by the thread that has the fewest.
//!
//! Each thread has a runtime and connections to replicas of its own, so that a request and its answer stay on
//! one processor and wake nobody else.

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
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::admin::Pages;
use crate::app::App;
use crate::deferred::DeferredTasks;
use crate::proxy::{Body, Worker, serve};

mod connection;

use connection::{Activity, Ending, Limits};

/// Accepted connections that wait for a thread to take them.
const HANDOVER_MAX: usize = 256;
/// Number of concurrent streams of an HTTP/2 connection.
///
/// Beyond it: the client waits; a stream that it opens nevertheless is refused with `REFUSED_STREAM`.
const H2_STREAMS_MAX: u32 = 256;
/// Bytes that a client may send ahead on a stream, and that a stream buffers for its client,
const H2_STREAM_BYTES: u32 = 256 * 1024;
/// and those that it may send ahead on all streams of a connection.
const H2_CONNECTION_BYTES: u32 = 1024 * 1024;
/// hyper does not take less.
const H1_BUFFER_MIN: usize = 8192;
/// How often those who wait for an answer look whether it is time to give up.
const TICK: Duration = Duration::from_millis(500);
/// How often idle connections to replicas are looked through.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// The time without traffic after which an HTTP/2 connection is probed with a ping.
const H2_PING_INTERVAL: Duration = Duration::from_secs(30);
/// Time in which an HTTP/2 client must answer a ping.
///
/// Beyond it: the connection is closed.
const H2_PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Bytes that the kernel buffers of a connection in each direction. It would let them grow to megabytes for each
/// client that does not read, or that sends ahead.
const SOCKET_BUFFER_BYTES: u32 = 256 * 1024;
/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;
/// While no more connections may be open, how often those without a request are told to make room.
const PRESSURE_INTERVAL: Duration = Duration::from_millis(500);

/// A client's connection, and its place among those that may be open.
type Accepted = (std::net::TcpStream, OwnedSemaphorePermit);

/// What is served on a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Surface {
    /// The API, with health, metrics and the console beside it.
    Api,
    /// Health and metrics alone.
    Admin,
    /// The gRPC service for the operator.
    Grpc,
}

impl Surface {
    fn name(self) -> &'static str {
        match self {
            Self::Api => "serve",
            Self::Admin => "admin",
            Self::Grpc => "grpc",
        }
    }
}

/// Takes `port` of `host`.
///
/// # Errors
/// It is taken already, or may not be.
pub(crate) fn bind(host: IpAddr, port: u16) -> anyhow::Result<TcpListener> {
    let address = SocketAddr::new(host, port);
    let listen = || {
        let socket = if host.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        // Connections inherit these.
        socket.set_send_buffer_size(SOCKET_BUFFER_BYTES)?;
        socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().with_context(|| format!("failed to listen on {address}"))
}

/// The threads that serve.
pub(crate) struct Threads {
    threads: Vec<Thread>,
    /// Ends what is left of them.
    cut: CancellationToken,
    /// Tells connections without a request that others wait for their place.
    pressure: Arc<Notify>,
    /// Nothing is ever sent: it closes when the last of them ends, however that does.
    running: mpsc::Receiver<Infallible>,
}

struct Thread {
    inbox: mpsc::Sender<Accepted>,
    connections: Arc<AtomicUsize>,
    handle: JoinHandle<()>,
}

impl Threads {
    /// Starts `count` threads, which end when `stop` is cancelled and what they serve is finished.
    ///
    /// # Errors
    /// The operating system has none left.
    pub(crate) fn start(
        app: &App,
        surface: Surface,
        count: usize,
        stop: &CancellationToken,
    ) -> anyhow::Result<Self> {
        let pressure = Arc::new(Notify::new());
        let cut = CancellationToken::new();
        let (runs, running) = mpsc::channel(1);
        let start = |number| {
            let (inbox, connections_in) = mpsc::channel(HANDOVER_MAX);
            let connections = Arc::new(AtomicUsize::new(0));
            // Signals and processes are of no concern here, and looking for them would cost something each time.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
            let (app, count) = (app.clone(), Arc::clone(&connections));
            let (stop, cut, runs) = (stop.clone(), cut.clone(), runs.clone());
            let ending = Ending { stop, pressure: Arc::clone(&pressure) };
            let name = format!("{}-{number}", surface.name());
            let handle = std::thread::Builder::new().name(name).spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        () = serve_connections(app, surface, connections_in, &count, ending) => {}
                        () = cut.cancelled() => {}
                    }
                });
                drop(runs);
            })?;
            Ok::<_, std::io::Error>(Thread { inbox, connections, handle })
        };
        let threads: Result<Vec<_>, _> = (0..count).map(start).collect();
        Ok(Self { threads: threads.context("failed to start a thread")?, cut, pressure, running })
    }

    /// Waits until all is served after `stop`.
    pub(crate) async fn finished(&mut self) {
        let _ = self.running.recv().await;
    }

    /// Cuts off what is not finished.
    pub(crate) fn cut_off(self) {
        self.cut.cancel();
        for thread in self.threads {
            drop(thread.inbox);
            if thread.handle.join().is_err() {
                tracing::error!("a serving thread panicked");
            }
        }
    }

    /// Hands connections to threads until `stop`.
    pub(crate) async fn accept(
        &self,
        listener: TcpListener,
        connections_max: usize,
        stop: &CancellationToken,
    ) {
        let room = Arc::new(Semaphore::new(connections_max.min(Semaphore::MAX_PERMITS)));
        loop {
            let next = async {
                let permit = self.free_place(&room).await;
                (accept(&listener).await, permit)
            };
            let (connection, permit) = tokio::select! {
                next = next => next,
                () = stop.cancelled() => return,
            };
            let Ok(connection) = connection.into_std() else { continue };
            let least = self.threads.iter().min_by_key(|thread| thread.connections.load(Ordering::Relaxed));
            if let Some(thread) = least {
                thread.connections.fetch_add(1, Ordering::Relaxed);
                // A thread that is gone has been told to end.
                let _ = thread.inbox.send((connection, permit)).await;
            }
        }
    }
}

impl Threads {
    /// A place for one more connection. While there is none, connections without a request are told to make room.
    async fn free_place(&self, room: &Arc<Semaphore>) -> OwnedSemaphorePermit {
        loop {
            let permit = tokio::time::timeout(PRESSURE_INTERVAL, Arc::clone(room).acquire_owned()).await;
            match permit {
                Ok(permit) => return permit.expect("invariant: it is never closed"),
                Err(_) => self.pressure.notify_waiters(),
            }
        }
    }
}

/// The next connection.
async fn accept(listener: &TcpListener) -> TcpStream {
    /// When the process has no more file handles, some will be free soon.
    const PAUSE: Duration = Duration::from_millis(50);
    loop {
        match listener.accept().await {
            Ok((connection, _)) => {
                // Tokens are small and must not wait for each other.
                if connection.set_nodelay(true).is_ok() {
                    return connection;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// How connections are served.
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

/// Wakes those who wait for an answer, which costs a request less than a timer of its own.
async fn tick(worker: Arc<Worker>) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        worker.tick.notify_waiters();
    }
}

/// What answers the requests of a thread.
enum Service {
    Api(Arc<Worker>),
    Pages(Pages),
}

impl Service {
    fn new(app: App, surface: Surface) -> Self {
        match surface {
            Surface::Api => Self::Api(Arc::new(Worker::new(app))),
            Surface::Admin => Self::Pages(Pages::probes(app)),
            Surface::Grpc => Self::Pages(Pages::grpc(app)),
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

/// Serves connections on one thread.
///
/// Connections are served by the thread that calls [`Self::serve`], which must be the one that made this.
pub struct ConnectionServer {
    app: App,
    builder: auto::Builder<TokioExecutor>,
    service: Service,
    ending: Ending,
    _deferred: DeferredTasks,
    /// Runs while requests are finished after `ending`. Dropping it aborts it.
    _ticking: JoinSet<()>,
}

impl ConnectionServer {
    /// Serves the API until `stop`.
    ///
    /// # Panics
    /// Outside of a runtime; it must be one of this thread alone.
    #[must_use]
    pub fn new(app: &App, stop: CancellationToken) -> Self {
        Self::start(app.clone(), Surface::Api, Ending { stop, pressure: Arc::default() })
    }

    fn start(app: App, surface: Surface, ending: Ending) -> Self {
        let builder = builder(&app);
        let service = Service::new(app.clone(), surface);
        let mut ticking = JoinSet::new();
        if let Service::Api(worker) = &service {
            ticking.spawn(tick(Arc::clone(worker)));
        }
        Self { app, builder, service, ending, _deferred: DeferredTasks::start(), _ticking: ticking }
    }

    /// Serves the connection of the client at this address to its end.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection and frees all that its requests hold.
    pub async fn serve<C>(self: Arc<Self>, client: IpAddr, connection: C)
    where
        C: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let activity = Activity::new();
        let (server, watched) = (Arc::clone(&self), Arc::clone(&activity));
        let service = service_fn(move |request| {
            let (server, request_under_way) = (Arc::clone(&server), watched.begin());
            async move {
                let response = server.service.answer(client, request).await;
                Ok::<_, Infallible>(response.map(|body| request_under_way.answer(body)))
            }
        });
        let limits = Limits::of(&self.app);
        let connection = self.builder.serve_connection(TokioIo::new(connection), service);
        connection::supervise(connection, &activity, limits, &self.ending).await;
    }

    /// Closes connections to replicas that have been idle for too long.
    fn sweep(&self) {
        if let Service::Api(worker) = &self.service {
            worker.pool.sweep();
        }
    }
}

/// Serves the connections that come in until `ending`, then finishes the requests that are under way.
async fn serve_connections(
    app: App,
    surface: Surface,
    mut inbox: mpsc::Receiver<Accepted>,
    count: &AtomicUsize,
    ending: Ending,
) {
    let stop = ending.stop.clone();
    let server = Arc::new(ConnectionServer::start(app, surface, ending));
    let mut connections = JoinSet::new();
    let mut sweep = tokio::time::interval(SWEEP_INTERVAL);
    loop {
        let (connection, permit) = tokio::select! {
            accepted = inbox.recv() => match accepted {
                Some(accepted) => accepted,
                None => break,
            },
            // Clears away those that have ended.
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
        let (Ok(client), Ok(connection)) = (connection.peer_addr(), TcpStream::from_std(connection)) else {
            count.fetch_sub(1, Ordering::Relaxed);
            continue;
        };
        let served = Arc::clone(&server).serve(client.ip(), connection);
        connections.spawn(async move {
            served.await;
            drop(permit);
        });
    }
    while connections.join_next().await.is_some() {}
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use futures_util::FutureExt as _;

    use super::*;
    use crate::Args;

    #[tokio::test]
    async fn what_a_client_is_sent_does_not_wait_for_acknowledgements() {
        let listener = bind(IpAddr::from([127, 0, 0, 1]), 0).unwrap();
        let address = listener.local_addr().unwrap();
        let (_client, accepted) = tokio::join!(TcpStream::connect(address), accept(&listener));
        assert!(accepted.nodelay().unwrap());
    }

    #[tokio::test]
    async fn threads_have_finished_once_the_last_has_ended() {
        let stop = CancellationToken::new();
        let app = App::new(Args::try_parse_from(["router"]).unwrap(), None);
        let mut threads = Threads::start(&app, Surface::Api, 2, &stop).unwrap();
        let mut finished = Box::pin(threads.finished());
        assert!((&mut finished).now_or_never().is_none());
        stop.cancel();
        finished.await;
        threads.cut_off();
    }
}

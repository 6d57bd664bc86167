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
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::admin::Admin;
use crate::app::App;
use crate::later::Keeper;
use crate::proxy::upstream::Pool;
use crate::proxy::{Worker, serve};

/// Accepted connections that wait for a thread to take them.
const HANDOVER_MAX: usize = 256;
/// Streams of one HTTP/2 connection.
const H2_STREAMS_MAX: u32 = 1024;
/// hyper does not take less.
const H1_BUFFER_MIN: usize = 8192;
/// How often those who wait for an answer look whether it is time to give up.
const TICK: Duration = Duration::from_millis(500);
/// How often idle connections to replicas are looked through.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// An HTTP/2 connection that says nothing is asked whether it is there,
const H2_PING_INTERVAL: Duration = Duration::from_secs(30);
/// and closed if it is not.
const H2_PING_TIMEOUT: Duration = Duration::from_secs(20);

/// A client's connection, and its place among those that may be open.
type Accepted = (std::net::TcpStream, OwnedSemaphorePermit);

/// Takes `port` of `host`.
///
/// # Errors
/// It is taken already, or may not be.
pub(crate) async fn bind(host: IpAddr, port: u16) -> anyhow::Result<TcpListener> {
    let address = SocketAddr::new(host, port);
    TcpListener::bind(address).await.with_context(|| format!("failed to listen on {address}"))
}

/// The threads that serve.
pub(crate) struct Threads {
    threads: Vec<Thread>,
    /// Ends what is left of them.
    cut: CancellationToken,
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
    pub(crate) fn start(app: &App, count: usize, stop: &CancellationToken) -> anyhow::Result<Self> {
        let cut = CancellationToken::new();
        let (runs, running) = mpsc::channel(1);
        let start = |number| {
            let (inbox, connections_in) = mpsc::channel(HANDOVER_MAX);
            let connections = Arc::new(AtomicUsize::new(0));
            // Signals and processes are of no concern here, and looking for them would cost something each time.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
            let (app, count) = (app.clone(), Arc::clone(&connections));
            let (stop, cut, runs) = (stop.clone(), cut.clone(), runs.clone());
            let handle = std::thread::Builder::new().name(format!("serve-{number}")).spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        () = serve_connections(app, connections_in, &count, stop) => {}
                        () = cut.cancelled() => {}
                    }
                });
                drop(runs);
            })?;
            Ok::<_, std::io::Error>(Thread { inbox, connections, handle })
        };
        let threads: Result<Vec<_>, _> = (0..count).map(start).collect();
        Ok(Self { threads: threads.context("failed to start a thread")?, cut, running })
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
                let permit = Arc::clone(&room).acquire_owned().await.expect("invariant: it is never closed");
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

/// Serves the connections that come in until `stop`, then finishes the requests that are under way.
async fn serve_connections(
    app: App,
    mut inbox: mpsc::Receiver<Accepted>,
    count: &AtomicUsize,
    stop: CancellationToken,
) {
    let builder = Arc::new(builder(&app));
    let worker = Worker { admin: Admin::new(app.clone()), app, pool: Pool::default(), tick: Notify::new() };
    let worker = Arc::new(worker);
    let _keeper = Keeper::start();
    // Goes on while requests are finished after `stop`.
    let mut ticking = JoinSet::new();
    ticking.spawn(tick(Arc::clone(&worker)));
    let graceful = GracefulShutdown::new();
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
                worker.pool.sweep();
                continue;
            }
            () = stop.cancelled() => break,
        };
        let Ok(connection) = TcpStream::from_std(connection) else {
            count.fetch_sub(1, Ordering::Relaxed);
            continue;
        };
        let (builder, worker, watcher) = (Arc::clone(&builder), Arc::clone(&worker), graceful.watcher());
        connections.spawn(async move {
            let service = service_fn(move |request| serve(Arc::clone(&worker), request));
            let connection = builder.serve_connection(TokioIo::new(connection), service);
            // That a client goes away or talks nonsense is its own affair.
            if let Err(error) = watcher.watch(connection).await {
                tracing::trace!(%error, "a connection ended");
            }
            drop(permit);
        });
    }
    graceful.shutdown().await;
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use futures_util::FutureExt as _;

    use super::*;
    use crate::Args;

    #[tokio::test]
    async fn what_a_client_is_sent_does_not_wait_for_acknowledgements() {
        let listener = bind(IpAddr::from([127, 0, 0, 1]), 0).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (_client, accepted) = tokio::join!(TcpStream::connect(address), accept(&listener));
        assert!(accepted.nodelay().unwrap());
    }

    #[tokio::test]
    async fn threads_have_finished_once_the_last_has_ended() {
        let stop = CancellationToken::new();
        let app = App::new(Args::try_parse_from(["router"]).unwrap(), None);
        let mut threads = Threads::start(&app, 2, &stop).unwrap();
        let mut finished = Box::pin(threads.finished());
        assert!((&mut finished).now_or_never().is_none());
        stop.cancel();
        finished.await;
        threads.cut_off();
    }
}

//! Accepts the connections of clients, and assigns each to the thread with the fewest connections.
//!
//! Each thread has its own runtime and its own connections to replicas, so that a request and its answer are handled by
//! one thread and wake no other thread. `server` serves the connections of a thread.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use process::listen::ConnectionSlots;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::app::App;

mod connection;
mod server;

use connection::ShutdownSignals;
pub use server::ConnectionServer;
pub(crate) use server::ListenerKind;

/// The number of accepted connections that can wait for one thread.
const HANDOVER_MAX: usize = 256;
/// The interval at which the connections to replicas are checked, and those that have been idle for too long are
/// closed.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// Size of the kernel's buffer of a connection in each direction. By default, the kernel can enlarge the buffer to
/// megabytes for each client that does not read or that sends data ahead.
const SOCKET_BUFFER_BYTES: u32 = 256 * 1024;
/// Number of connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// A client connection, with its permit under `--max-connections`.
struct AcceptedConnection {
    stream: std::net::TcpStream,
    permit: OwnedSemaphorePermit,
}

/// Listens on `port` of `host`.
///
/// # Errors
/// The port is in use, the process is not permitted to use it, or the machine does not have the address `host`.
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
    /// Notifies idle connections to close, because other connections wait to be accepted.
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
            // The threads use neither signals nor child processes. Without the drivers for them, the runtime has less
            // work per wake-up.
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

    /// Waits until `stop` has been canceled and all requests are finished.
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

    /// Accepts connections and assigns them to threads until `stop` is canceled.
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
                // Sending fails only if the thread has ended. In this case, the connection is closed.
                let _ = thread.inbox.send(AcceptedConnection { stream, permit }).await;
            }
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

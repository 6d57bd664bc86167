//! The HTTP listener: connections, their limits, and how they end.

mod conformance;
mod connection;
mod peer;
mod protocol_error;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::response::Response;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::connection::Connection;
use self::peer::Peer;
use crate::limits::Limits;

pub(crate) use conformance::conforming;

/// While no more connections may be open, how often those without a request are closed.
const PRESSURE_INTERVAL: Duration = Duration::from_millis(500);
/// How long a connection may be without a request although others wait for its place.
const SILENCE_MAX: Duration = Duration::from_secs(1);

/// Takes `port` of `host`.
///
/// # Errors
/// It is taken already, or may not be.
pub(crate) async fn bind(host: IpAddr, port: u16) -> anyhow::Result<TcpListener> {
    let address = SocketAddr::new(host, port);
    TcpListener::bind(address).await.with_context(|| format!("failed to listen on {address}"))
}

/// Serves `router` until `stop`, then finishes the requests that are under way.
///
/// # Cancel safety
/// Dropping it cuts off all connections.
pub(crate) async fn serve(listener: TcpListener, router: Router, limits: Limits, stop: CancellationToken) {
    let graceful = GracefulShutdown::new();
    let connections_max = limits.connections_max.min(Semaphore::MAX_PERMITS);
    let room = Arc::new(Semaphore::new(connections_max));
    let pressure = Arc::new(Notify::new());
    let mut connections = JoinSet::new();
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.read_timeout).half_close(true);
    loop {
        let next = async {
            let permit = free_place(&room, &pressure).await;
            (accept(&listener).await, permit)
        };
        let (connection, permit) = tokio::select! {
            next = next => next,
            // Clears away those that have ended.
            Some(_) = connections.join_next() => continue,
            () = stop.cancelled() => break,
        };
        let connection = Connection::new(connection, limits.write_timeout);
        let (peer, router) = (connection.peer(), TowerToHyperService::new(router.clone()));
        let has_request = Arc::new(AtomicBool::new(false));
        let requested = Arc::clone(&has_request);
        let service = service_fn(move |request| {
            requested.store(true, Ordering::Relaxed);
            answer(router.clone(), request, peer.clone())
        });
        let connection = graceful.watch(builder.serve_connection(TokioIo::new(connection), service));
        let pressure = Arc::clone(&pressure);
        connections.spawn(async move {
            tokio::select! {
                ended = connection => if let Err(error) = ended {
                    // That a client goes away or talks nonsense is its own affair.
                    tracing::trace!(%error, "a connection ended");
                },
                () = must_make_room(&pressure, &has_request) => {}
            }
            drop(permit);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

/// A place for one more connection. While there is none, connections without a request are closed.
async fn free_place(room: &Arc<Semaphore>, pressure: &Notify) -> OwnedSemaphorePermit {
    loop {
        let permit = tokio::time::timeout(PRESSURE_INTERVAL, Arc::clone(room).acquire_owned()).await;
        match permit {
            Ok(permit) => return permit.expect("invariant: it is never closed"),
            Err(_) => pressure.notify_waiters(),
        }
    }
}

/// Completes when others wait for the place of a connection that has not sent the head of a request for some time.
/// A connection that has ever sent one stays: routers reuse connections, and would not know whether a request that was
/// under way to a closed one has arrived.
async fn must_make_room(pressure: &Notify, has_request: &AtomicBool) {
    tokio::time::sleep(SILENCE_MAX).await;
    loop {
        pressure.notified().await;
        if !has_request.load(Ordering::Relaxed) {
            return;
        }
    }
}

/// The answer to a request, unless its client goes away before.
///
/// # Errors
/// It did.
async fn answer(
    router: TowerToHyperService<Router>,
    request: Request<Incoming>,
    peer: Peer,
) -> io::Result<Response> {
    let version = request.version();
    tokio::select! {
        Ok(response) = router.call(request) => Ok(response),
        () = peer.gone(version) => Err(io::ErrorKind::ConnectionAborted.into()),
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

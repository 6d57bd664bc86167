//! The HTTP and gRPC listeners: they accept connections, enforce limits, and close connections.

mod conformance;
mod connection;
mod grpc;
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
use process::listen::{ConnectionSlots, IDLE_UNDER_PRESSURE};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::connection::Connection;
use self::peer::Peer;
use crate::limits::HttpLimits;

pub(crate) use conformance::conforming;
pub(crate) use grpc::{GRPC_REQUEST_BYTES_MAX, serve_grpc};

/// Binds a listener to `port` on `host`.
///
/// # Errors
/// The address is not available, the port is in use, or the process lacks the permission to bind it.
pub(crate) fn bind(host: IpAddr, port: u16) -> anyhow::Result<TcpListener> {
    /// Length of the operating system's queue of connections that the server has not accepted yet (the listen backlog),
    /// for each port.
    ///
    /// If exceeded: the operating system of the client retries the connection after a second.
    const BACKLOG: u32 = 1024;
    let address = SocketAddr::new(host, port);
    let listen = || {
        let socket = if host.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().with_context(|| format!("failed to listen on {address}"))
}

/// Serves `router` until `stop` is canceled, and then finishes the requests in progress.
///
/// # Cancel safety
/// Dropping the future closes all connections.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    limits: HttpLimits,
    stop: CancellationToken,
) {
    let graceful = GracefulShutdown::new();
    let pressure = Arc::new(Notify::new());
    let mut slots = ConnectionSlots::new(limits.max_connections, Arc::clone(&pressure));
    let mut connections = JoinSet::new();
    let builder = connection_builder(limits.read_timeout);
    loop {
        let (connection, permit) = tokio::select! {
            accepted = slots.accept(&listener) => accepted,
            () = stop.cancelled() => break,
        };
        // Remove the tasks of closed connections.
        while connections.try_join_next().is_some() {}
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
                    // Clients may disconnect or send malformed data at any time, so such errors are logged only at the
                    // trace level.
                    tracing::trace!(%error, "a connection failed");
                },
                () = must_make_room(&pressure, &has_request) => {}
            }
            drop(permit);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

/// Size of the head of a request (the request line and the headers), and of each buffer of a connection.
///
/// If exceeded: 431 for the head; a longer response is written to the connection only as fast as the client reads it.
const CONNECTION_BUFFER_BYTES_MAX: usize = 128 << 10;

/// Returns the settings of HTTP connections.
pub(crate) fn connection_builder(read_timeout: Duration) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(read_timeout).half_close(true);
    builder.max_buf_size(CONNECTION_BUFFER_BYTES_MAX);
    builder
}

/// Completes when other connections wait to be accepted and this connection has been open for at least
/// [`IDLE_UNDER_PRESSURE`] without receiving the head of a request. A connection that has received a request remains
/// open: routers reuse connections, and cannot know whether a request on a closed connection was received.
async fn must_make_room(pressure: &Notify, has_request: &AtomicBool) {
    tokio::time::sleep(IDLE_UNDER_PRESSURE).await;
    loop {
        pressure.notified().await;
        if !has_request.load(Ordering::Relaxed) {
            return;
        }
    }
}

/// Answers a request.
///
/// # Errors
/// The client disconnected before the answer was ready.
async fn answer(
    router: TowerToHyperService<Router>,
    request: Request<Incoming>,
    peer: Peer,
) -> io::Result<Response> {
    let version = request.version();
    tokio::select! {
        Ok(response) = router.call(request) => Ok(response),
        () = peer.disconnected(version) => Err(io::ErrorKind::ConnectionAborted.into()),
    }
}

//! The gRPC listener: it serves HTTP/2 connections, enforces limits, and closes idle or unresponsive connections.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http_body_util::BodyExt as _;
use hyper::server::conn::http2;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use process::listen::{ConnectionSlots, IDLE_UNDER_PRESSURE};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic::service::Routes;

/// Number of open connections to the port given by `--grpc-port`. Each stream of load reports has its own connection.
/// This limit is greater than the limit for such streams, so that connections remain available for
/// `ovfleet-server drain` and health checks.
///
/// If exceeded: further connections wait. To make room for them, a connection is closed after one second without a gRPC
/// call other than health checks.
const CONNECTIONS_MAX: usize = 320;
/// Number of concurrent streams per connection to the port given by `--grpc-port`.
///
/// If exceeded: the client must wait; any further stream is refused with `REFUSED_STREAM`.
const STREAMS_MAX: u32 = 16;
/// Size of a gRPC request to the server.
///
/// If exceeded: the gRPC call fails with `OUT_OF_RANGE`.
pub(crate) const GRPC_REQUEST_BYTES_MAX: usize = 4096;
/// Time for which a connection to the port given by `--grpc-port` may remain open without a gRPC call other than health
/// checks.
///
/// If exceeded: the connection is closed.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// The time without traffic after which a connection is probed with a ping.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// Time within which a client of the port given by `--grpc-port` must answer a ping.
///
/// If exceeded: the connection is closed.
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// The prefix of the paths of health checks. Health checks need no token, so they do not count as activity that keeps a
/// connection open.
const HEALTH: &str = "/grpc.health.v1.Health/";
/// The time that a connection has for a graceful shutdown, unless a call is open.
const GRACE: Duration = Duration::from_secs(1);

/// Serves gRPC services. Never returns.
///
/// # Cancel safety
/// Dropping the future closes all connections.
pub(crate) async fn serve_grpc(listener: TcpListener, services: Routes) -> Infallible {
    let pressure = Arc::new(Notify::new());
    let mut slots = ConnectionSlots::new(CONNECTIONS_MAX, Arc::clone(&pressure));
    let services = TowerToHyperService::new(services.into_axum_router());
    let mut connections = JoinSet::new();
    loop {
        let (connection, permit) = slots.accept(&listener).await;
        // Remove the tasks of closed connections.
        while connections.try_join_next().is_some() {}
        let (services, pressure) = (services.clone(), Arc::clone(&pressure));
        connections.spawn(async move {
            serve_connection(connection, services, &pressure).await;
            drop(permit);
        });
    }
}

/// Serves a connection until it ends or has had no call for too long.
async fn serve_connection(
    connection: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    services: TowerToHyperService<axum::Router>,
    pressure: &Notify,
) {
    let (call_count, mut open_calls) = watch::channel(0);
    let service = service_fn(move |request| {
        let keeps_open = !request.uri().path().starts_with(HEALTH);
        let call = keeps_open.then(|| OpenCall::begin(&call_count));
        let answer = services.call(request);
        async move {
            let answer: Response = answer.await?;
            // The body of the answer holds the call, so the call is open until the body is dropped.
            let held = move |frame| {
                let _open = &call;
                frame
            };
            Ok::<_, Infallible>(answer.map(|body: Body| body.map_frame(held)))
        }
    });
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(connection), service));
    tokio::select! {
        // Connection errors are caused by the client or the network, so they are not logged.
        _ = connection.as_mut() => return,
        () = is_idle(&mut open_calls, pressure) => {}
    }
    connection.as_mut().graceful_shutdown();
    // A call may have arrived at the last moment. The shutdown lets it finish.
    while timeout(GRACE, connection.as_mut()).await.is_err() && *open_calls.borrow() > 0 {}
}

/// Completes when a connection has had no [`OpenCall`] for [`IDLE_MAX`], or for [`IDLE_UNDER_PRESSURE`] while other
/// connections wait to be accepted.
async fn is_idle(open_calls: &mut watch::Receiver<usize>, pressure: &Notify) {
    loop {
        let has_calls = *open_calls.borrow_and_update() > 0;
        let idle = async {
            sleep(IDLE_UNDER_PRESSURE).await;
            let _ = timeout(IDLE_MAX - IDLE_UNDER_PRESSURE, pressure.notified()).await;
        };
        tokio::select! {
            () = idle, if !has_calls => return,
            // Waiting fails only if the connection has ended.
            _ = open_calls.changed() => {}
        }
    }
}

/// An open call on a connection, other than a health check. The call counts as open until this value is dropped.
struct OpenCall(watch::Sender<usize>);

impl OpenCall {
    fn begin(count: &watch::Sender<usize>) -> Self {
        count.send_modify(|count| *count += 1);
        Self(count.clone())
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Bytes;
    use axum::routing::post;
    use process::listen::PRESSURE_INTERVAL;
    use tokio::io::{AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::time::{Instant, interval};

    use super::*;

    /// The bytes that a client sends before its first call: the preface and an empty SETTINGS frame.
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

    const CHECK: &str = "/grpc.health.v1.Health/Check";
    const WATCH: &str = "/grpc.health.v1.Health/Watch";
    /// The path of a call whose answer does not end.
    const ENDLESS: &str = "/test/Endless";

    /// Returns an HTTP/2 frame on the first stream.
    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(payload.len()).unwrap();
        [&[0, 0, length, kind, flags, 0, 0, 0, 1], payload].concat()
    }

    /// Returns the preface and the bytes of a call, with an empty message, to the method with this path.
    fn call(path: &str) -> Vec<u8> {
        let field = |name: &[u8], value: &str| {
            [name, &[u8::try_from(value.len()).unwrap()], value.as_bytes()].concat()
        };
        // These are entries of HPACK's static table: `:method: POST` and `:scheme: http`, then the names `:path`,
        // `:authority` and `content-type`.
        let head = [
            vec![0x83, 0x86],
            field(&[0x04], path),
            field(&[0x01], "x"),
            field(&[0x0f, 0x10], "application/grpc"),
        ];
        [PREFACE, &frame(1, 4, &head.concat()), &frame(0, 1, &[0; 5])].concat()
    }

    /// Serves a client that sends `bytes`. Returns the time after which its connection is closed.
    async fn open_time(bytes: &[u8], pressure: &Notify) -> Duration {
        let (mut client, connection): (DuplexStream, _) = duplex(4096);
        client.write_all(bytes).await.unwrap();
        let (_reporter, health) = tonic_health::server::health_reporter();
        let endless =
            || async { Body::from_stream(futures_util::stream::pending::<Result<Bytes, Infallible>>()) };
        let router = Routes::new(health).into_axum_router().route(ENDLESS, post(endless));
        let services = TowerToHyperService::new(router);
        let start = Instant::now();
        serve_connection(connection, services, pressure).await;
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_calls_other_than_health_checks_is_closed() {
        for bytes in [&b""[..], PREFACE, &call(CHECK), &call(WATCH)] {
            let open = open_time(bytes, &Notify::new()).await;
            assert!((IDLE_MAX..=IDLE_MAX + GRACE).contains(&open), "after {open:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_a_call_makes_room_for_others() {
        let pressure = Notify::new();
        let mut pauses = interval(PRESSURE_INTERVAL);
        let waiting = async {
            loop {
                pauses.tick().await;
                pressure.notify_waiters();
            }
        };
        let opens = async {
            for bytes in [&b""[..], PREFACE, &call(CHECK), &call(WATCH)] {
                let open = open_time(bytes, &pressure).await;
                let expected = IDLE_UNDER_PRESSURE..=IDLE_UNDER_PRESSURE + PRESSURE_INTERVAL + GRACE;
                assert!(expected.contains(&open), "after {open:?}");
            }
        };
        tokio::select! {
            () = opens => {}
            () = waiting => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_with_a_call_stays_open_until_the_client_answers_no_ping() {
        assert_eq!(open_time(&call(ENDLESS), &Notify::new()).await, PING_INTERVAL + PING_TIMEOUT);
    }
}

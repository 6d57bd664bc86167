//! Tests that clients that hold connections or memory, or do not read their answers, do not prevent the router from
//! serving other clients and probes.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use proto::v1alpha1::router_client::RouterClient;
use proto::v1alpha1::{RoutingState, WatchReplicasRequest};

use crate::harness::*;

fn answering() -> Upstream {
    Upstream::start("m", |_, stream| send(stream, &whole("{}")))
}

/// A replica whose answers end only when the connection is closed.
fn endless() -> Upstream {
    let piece = event(&"x".repeat(16 * 1024));
    Upstream::start("m", move |_, stream| {
        send(stream, STREAM);
        while send(stream, &piece) {}
        false
    })
}

/// The address that follows `purpose` in the log.
fn address_of(router: &Router, purpose: &str) -> String {
    router.await_log(purpose);
    let log = router.log();
    log.split_once(purpose).unwrap().1.split_whitespace().next().unwrap().to_owned()
}

fn get(address: &str, path: &str) -> Answer {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(raw("GET", path, "", "").as_bytes()).unwrap();
    Answer::read(&mut stream)
}

fn await_no_request_in_flight(router: &Router) {
    await_condition("no request to be in flight", || {
        let metrics = router.get("/metrics").body;
        (metric(&metrics, "ovfleet_router_requests_in_flight") == 0.0).then_some(())
    });
}

#[test]
fn silent_connections_make_room_for_those_with_a_request() {
    let upstream = answering();
    let router = Router::start(&[&upstream], &["--max-connections=4"]);
    let silent: Vec<TcpStream> = (0..40).map(|_| router.connect()).collect();
    // Ten times as many connections as permitted are silent.
    for _ in 0..3 {
        assert_eq!(router.post(CHAT, &chat("m", false)).status, 200);
    }
    drop(silent);
}

#[test]
fn a_connection_without_a_complete_request_is_closed() {
    let upstream = answering();
    let router = Router::start(&[&upstream], &["--read-timeout=200ms"]);
    // The third prefix may still become the HTTP/2 preface, and the fourth is the complete preface.
    for beginning in ["", "G", "PRI * HT", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut stream = router.connect();
        stream.write_all(beginning.as_bytes()).unwrap();
        let mut rest = Vec::new();
        let ended = stream.read_to_end(&mut rest);
        let timed_out = ended.is_err_and(|error| {
            matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
        });
        assert!(!timed_out, "the connection remains open after {beginning:?}");
    }
    // A client that uses its connection is not disconnected.
    let mut stream = router.connect();
    for _ in 0..20 {
        let request = raw("POST", CHAT, "", &chat("m", false)).replace("connection: close\r\n", "");
        stream.write_all(request.as_bytes()).unwrap();
        read_until(&mut stream, "\r\n\r\n{}");
    }
}

#[test]
fn probes_and_metrics_have_their_own_port() {
    let upstream = endless();
    let router =
        Router::start(&[&upstream], &["--max-connections=1", "--admin-port=0", "--write-timeout=1h"]);
    let admin = address_of(&router, "metrics and probes on ");
    // The only permitted connection to the API is in use.
    let mut busy = router.connect();
    busy.write_all(raw("POST", CHAT, "", &chat("m", true)).as_bytes()).unwrap();
    read_until(&mut busy, "data: x");
    for path in ["/v2/health/live", "/v2/health/ready", "/metrics"] {
        assert_eq!(get(&admin, path).status, 200, "{path}");
    }
    for path in [CHAT, "/v3/models", "/debug/replicas", "/console"] {
        assert_eq!(get(&admin, path).status, 404, "{path}");
    }
    // While the router finishes requests in flight, it is alive but not ready.
    router.signal("TERM");
    router.await_log("waiting for requests in flight");
    assert_eq!(get(&admin, "/v2/health/live").status, 200);
    assert_eq!(get(&admin, "/v2/health/ready").status, 503);
}

#[test]
fn an_answer_that_is_not_read_is_aborted() {
    let upstream = endless();
    let router = Router::start(&[&upstream], &["--write-timeout=200ms"]);
    let mut deaf = router.connect();
    deaf.write_all(raw("POST", CHAT, "", &chat("m", true)).as_bytes()).unwrap();
    await_condition("the request to arrive", || (!upstream.seen().is_empty()).then_some(()));
    await_no_request_in_flight(&router);
}

#[test]
fn an_answer_that_is_not_read_is_aborted_over_http2() {
    let upstream = endless();
    let router = Router::start(&[&upstream], &["--write-timeout=200ms"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(&router.address).await.unwrap();
        let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        let (mut client, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(connection);
        let uri = format!("http://{}{CHAT}", router.address);
        let body = Full::new(hyper::body::Bytes::from(chat("m", true)));
        let request = http::Request::post(uri).body(body).unwrap();
        let answer = client.send_request(request).await.unwrap();
        assert_eq!(answer.status(), 200);
        let (router, upstream) = (&router, &upstream);
        assert_eq!(upstream.seen().len(), 1);
        let mut body = answer.into_body();
        // Until the router aborts the request, the client answers pings, but its flow-control windows remain closed.
        while metric(&router.get("/metrics").body, "ovfleet_router_requests_in_flight") > 0.0 {
            tokio::task::yield_now().await;
        }
        // Data that was sent earlier arrives first; then the stream ends with an error.
        while let Some(frame) = body.frame().await {
            if frame.is_err() {
                return;
            }
        }
        panic!("the stream ended as if it were complete");
    });
}

#[test]
fn the_bodies_of_all_requests_together_have_a_limit() {
    let (go, gate) = std::sync::mpsc::channel::<()>();
    let gate = std::sync::Mutex::new(gate);
    let upstream = Upstream::start("m", move |_, stream| {
        gate.lock().unwrap().recv().unwrap();
        send(stream, &whole("{}"))
    });
    let router = Router::start(&[&upstream], &["--max-buffered-body-bytes=64KiB"]);
    let large = chat("m", false).replace("Hello", &"x".repeat(60 * 1024));
    let mut first = router.connect();
    first.write_all(raw("POST", CHAT, "", &large).as_bytes()).unwrap();
    await_condition("the first request to arrive", || (!upstream.seen().is_empty()).then_some(()));
    let second = router.post(CHAT, &large);
    assert_eq!((second.status, second.header("retry-after")), (429, Some("1")));
    assert!(second.body.contains("body_buffer_full") && second.body.contains("65536"), "{second:?}");
    go.send(()).unwrap();
    assert_eq!(Answer::read(&mut first).status, 200);
    go.send(()).unwrap();
    assert_eq!(router.post(CHAT, &large).status, 200, "there is room again");
}

#[test]
fn the_body_of_a_request_is_released_when_its_stream_begins() {
    let upstream = endless();
    let router = Router::start(&[&upstream], &["--max-buffered-body-bytes=64KiB"]);
    let large = chat("m", true).replace("Hello", &"x".repeat(60 * 1024));
    let mut open = Vec::new();
    for _ in 0..3 {
        let mut stream = router.connect();
        stream.write_all(raw("POST", CHAT, "", &large).as_bytes()).unwrap();
        let head = read_until(&mut stream, "\r\n\r\n");
        assert!(head.starts_with("HTTP/1.1 200 "), "with {} open streams: {head:.300}", open.len());
        open.push(stream);
    }
}

#[test]
fn a_client_that_is_still_sending_receives_the_rejection_of_its_body() {
    let (go, gate) = std::sync::mpsc::channel::<()>();
    let gate = std::sync::Mutex::new(gate);
    let upstream = Upstream::start("m", move |_, stream| {
        gate.lock().unwrap().recv().unwrap();
        send(stream, &whole("{}"))
    });
    let router = Router::start(&[&upstream], &["--max-body-bytes=8MiB", "--max-buffered-body-bytes=8MiB"]);
    let large = raw("POST", CHAT, "", &chat("m", false).replace("Hello", &"x".repeat(6 << 20)));
    let mut first = router.connect();
    first.write_all(large.as_bytes()).unwrap();
    await_condition("the first request to arrive", || (!upstream.seen().is_empty()).then_some(()));
    for _ in 0..8 {
        let mut client = router.connect();
        // The router reads the rest of a rejected body, so that the client does not see a broken connection.
        client.write_all(large.as_bytes()).unwrap();
        let answer = Answer::read(&mut client);
        assert_eq!((answer.status, answer.body.contains("body_buffer_full")), (429, true), "{answer:?}");
    }
    go.send(()).unwrap();
    assert_eq!(Answer::read(&mut first).status, 200);
}

#[test]
fn the_operator_receives_the_routing_state_of_replicas() {
    let upstream = answering();
    let router = Router::start(&[&upstream], &["--grpc-port=0"]);
    let address = address_of(&router, "gRPC on ");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let replicas = runtime.block_on(async {
        let mut client = RouterClient::connect(format!("http://{address}")).await.unwrap();
        let mut stream = client.watch_replicas(WatchReplicasRequest {}).await.unwrap().into_inner();
        // The stream does not end after the first message.
        stream.message().await.unwrap().unwrap();
        stream.message().await.unwrap().unwrap()
    });
    assert_eq!(replicas.replicas.len(), 1);
    let replica = &replicas.replicas[0];
    assert_eq!(
        (replica.address.clone(), replica.state()),
        (upstream.address.to_string(), RoutingState::Ready)
    );
    assert_eq!((replica.models.as_slice(), replica.requests_in_flight), (&["m".to_owned()][..], 0));
}

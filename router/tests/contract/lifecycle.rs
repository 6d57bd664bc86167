//! Tests how the process starts and stops.

use std::io::Write as _;
use std::process::Output;
use std::sync::Mutex;
use std::sync::mpsc::channel;

use crate::harness::*;

/// Runs a router that fails to start, and returns its output.
fn refusal(arguments: &[&str]) -> String {
    let Output { status, stderr, .. } = command(arguments).output().unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert!(!status.success() && !said.contains("panicked"), "{said}");
    said
}

#[test]
fn errors_at_startup_are_reported() {
    let errors = |said: &str| said.lines().filter(|line| line.starts_with("error: ")).count();
    let said = refusal(&[]);
    assert!(said.contains("--replica") && errors(&said) == 1, "{said}");
    let said = refusal(&["--replica=127.0.0.1:1", "--config=/no/such/file.yaml"]);
    assert!(said.contains("/no/such/file.yaml") && errors(&said) == 1, "{said}");
    let said = refusal(&["--replica=127.0.0.1:1", "--api-keys=/no/such/keys"]);
    assert!(said.contains("/no/such/keys") && errors(&said) == 1, "{said}");
    let router = Router::unready(&["--replica=127.0.0.1:1"]);
    let port = router.address.rsplit(':').next().unwrap();
    let said = refusal(&["--replica=127.0.0.1:1", "--port", port]);
    assert!(said.contains(port) && said.contains("in use") && errors(&said) == 1, "{said}");
    assert!(refusal(&["--policy=best"]).contains("least-requests"));
}

/// A replica whose streams pause after the first event, and the sender that lets a stream continue.
fn gated() -> (Upstream, std::sync::mpsc::Sender<()>) {
    let (go, gate) = channel::<()>();
    let gate = Mutex::new(gate);
    let upstream = Upstream::start("m", move |_, stream| {
        send(stream, STREAM);
        send(stream, &event("1"));
        if gate.lock().unwrap().recv().is_err() {
            return false;
        }
        send(stream, &event("2"));
        send(stream, &event("[DONE]")) && send(stream, END)
    });
    (upstream, go)
}

fn begun(router: &Router) -> std::net::TcpStream {
    let mut stream = router.connect();
    stream.write_all(raw("POST", CHAT, "", &chat("m", true)).as_bytes()).unwrap();
    read_until(&mut stream, "data: 1\n\n");
    stream
}

#[test]
fn on_sigterm_the_router_finishes_requests_in_flight_and_exits_successfully() {
    let (upstream, go) = gated();
    let router = Router::start(&[&upstream], &[]);
    let mut stream = begun(&router);
    let address = router.address.clone();
    router.signal("TERM");
    router.await_log("waiting for requests in flight");
    await_condition("new connections to be refused", || {
        std::net::TcpStream::connect(&address).is_err().then_some(())
    });
    go.send(()).unwrap();
    read_until(&mut stream, "data: [DONE]\n\n");
    let (status, log) = router.ended();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("all requests are finished"), "{log}");
}

#[test]
fn after_the_drain_timeout_the_router_aborts_requests_and_exits_successfully() {
    let (upstream, _go) = gated();
    let router = Router::start(&[&upstream], &["--drain-timeout=50ms"]);
    let mut stream = begun(&router);
    router.signal("INT");
    assert!(!Answer::read(&mut stream).is_complete);
    let (status, log) = router.ended();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("aborting the remaining requests"), "{log}");
}

#[test]
fn on_the_second_signal_the_router_exits_immediately() {
    let (upstream, _go) = gated();
    let router = Router::start(&[&upstream], &["--drain-timeout=1h"]);
    let _stream = begun(&router);
    router.signal("TERM");
    router.await_log("waiting for requests in flight");
    router.signal("TERM");
    let (status, log) = router.ended();
    assert_eq!(status.code(), Some(1), "{log}");
}

#[test]
fn a_connection_is_closed_if_the_request_head_does_not_arrive_in_time() {
    let upstream = Upstream::start("m", |_, _| false);
    let router = Router::start(&[&upstream], &["--read-timeout=100ms"]);
    let mut slow = router.connect();
    slow.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n").unwrap();
    assert!(!Answer::read(&mut slow).head.contains("200 OK"));
}

#[test]
fn json_logs_have_a_line_for_each_request() {
    let upstream = Upstream::start("m", |_, stream| send(stream, &whole("{}")));
    let router =
        Router::start(&[&upstream], &["--log-format=json", "--access-log", "--log=info,router=debug"]);
    router.post(CHAT, &chat("m", false));
    router.await_log("\"endpoint\":\"chat_completions\"");
    router.signal("TERM");
    let (_, log) = router.ended();
    for line in log.lines() {
        assert!(serde_json::from_str::<serde_json::Value>(line).is_ok(), "not JSON: {line}");
    }
    assert!(!log.contains("Hello"), "{log}");
}

//! Tests that the router propagates the trace context of a request to the replica, and exports spans if configured.

use std::sync::{Arc, Mutex};

use axum::body::Bytes;

use crate::harness::*;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn upstream() -> Upstream {
    Upstream::start("m", |_, stream| send(stream, &whole("{}")))
}

/// Receives spans like a collector, and stores their bytes.
fn collector() -> (String, Arc<Mutex<Vec<u8>>>) {
    let taken = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&taken);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let routes = axum::Router::new().fallback(move |body: Bytes| async move {
        kept.lock().unwrap().extend_from_slice(&body);
        [("content-type", "application/grpc"), ("grpc-status", "0")]
    });
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, routes).await.unwrap();
        });
    });
    (address, taken)
}

#[test]
fn trace_headers_are_passed_on_if_no_spans_are_sent() {
    let upstream = upstream();
    let router = Router::start(&[&upstream], &[]);
    router.request("POST", CHAT, &format!("traceparent: {PARENT}\r\ntracestate: a=b\r\n"), &chat("m", false));
    router.post(CHAT, &chat("m", false));
    let seen = upstream.seen();
    assert_eq!((seen[0].header("traceparent"), seen[0].header("tracestate")), (Some(PARENT), Some("a=b")));
    assert_eq!(seen[1].header("traceparent"), None);
}

#[test]
fn spans_are_sent_and_the_replicas_are_children_of_them() {
    let upstream = upstream();
    let (endpoint, taken) = collector();
    let router =
        Router::start(&[&upstream], &[&format!("--otlp-endpoint={endpoint}"), "--trace-sampling-ratio=1"]);
    router.request("POST", CHAT, &format!("traceparent: {PARENT}\r\n"), &chat("m", false));
    router.post(CHAT, &chat("m", false));
    let seen = upstream.seen();
    let given = seen[0].header("traceparent").unwrap();
    assert!(
        given.starts_with(&format!("00-{TRACE}-")) && given.ends_with("-01") && given != PARENT,
        "{given}"
    );
    let begun = seen[1].header("traceparent").unwrap();
    assert!(begun.len() == PARENT.len() && !begun.contains(TRACE), "{begun}");
    router.signal("TERM");
    let (status, log) = router.ended();
    assert!(status.success(), "{log}");
    let taken = taken.lock().unwrap();
    let holds = |wanted: &[u8]| taken.windows(wanted.len()).any(|window| window == wanted);
    let id: Vec<u8> = (0..16).map(|at| u8::from_str_radix(&TRACE[2 * at..2 * at + 2], 16).unwrap()).collect();
    assert!(holds(&id) && holds(b"ovfleet-router") && holds(b"chat_completions"), "{} bytes", taken.len());
    assert!(holds(upstream.address.to_string().as_bytes()) && !holds(b"Hello"), "names, but no prompts");
}

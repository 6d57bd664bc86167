//! Traces that a client has started continue through the router, which sends spans if it is configured to do so.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http_body_util::{BodyExt as _, Empty};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};

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
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            sender.send(format!("http://{}", listener.local_addr().unwrap())).unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            let service = service_fn(|request: http::Request<hyper::body::Incoming>| {
                let kept = Arc::clone(&kept);
                async move {
                    let body = request.into_body().collect().await.unwrap().to_bytes();
                    kept.lock().unwrap().extend_from_slice(&body);
                    let response = http::Response::builder()
                        .header("content-type", "application/grpc")
                        .header("grpc-status", "0")
                        .body(Empty::<bytes::Bytes>::new());
                    Ok::<_, Infallible>(response.unwrap())
                }
            });
            let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
            // The connection ends with the router.
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
        });
    });
    (receiver.recv().unwrap(), taken)
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
    let router = Router::start(&[&upstream], &[&format!("--otlp-endpoint={endpoint}"), "--trace-share=1"]);
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

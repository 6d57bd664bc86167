//! Tests retries: until the client has received a byte, idempotent requests and computations are retried, and requests
//! that may store something are retried only if no replica can have processed them.

use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::harness::*;

/// A request that crashes every replica that receives it.
const DEADLY: &str = r#"{"model":"m","messages":[{"role":"user","content":"deadly"}]}"#;

fn mortal() -> Upstream {
    Upstream::start("m", |request, stream| {
        !String::from_utf8_lossy(&request.body).contains("deadly") && send(stream, &whole("{}"))
    })
}

fn deadly_seen(upstreams: &[Upstream]) -> usize {
    let is_deadly = |request: &Request| request.body == DEADLY.as_bytes();
    upstreams.iter().map(|upstream| upstream.seen().iter().filter(|request| is_deadly(request)).count()).sum()
}

#[test]
fn a_request_that_kills_replicas_is_sent_to_at_most_two() {
    let upstreams: Vec<Upstream> = (0..6).map(|_| mortal()).collect();
    let all: Vec<&Upstream> = upstreams.iter().collect();
    let router =
        Router::start(&all, &["--policy=round-robin", "--attempts=16", "--retry-budget-percent=100"]);
    // Let the router open a connection to each replica. It reuses these connections later.
    for _ in 0..upstreams.len() {
        assert_eq!(router.post(CHAT, &chat("m", false)).status, 200);
    }
    let answer = router.post(CHAT, DEADLY);
    assert_eq!(deadly_seen(&upstreams), 2);
    assert_eq!(answer.status, 502, "{answer:?}");
    assert!(answer.body.contains("\"replicas_failed\""), "{answer:?}");
    assert_eq!(answer.header("x-should-retry"), Some("false"), "official clients would retry the request");
    // The client may retry a request that broke only one connection.
    let router = Router::start(&all, &["--attempts=1"]);
    let answer = router.post(CHAT, DEADLY);
    assert_eq!((answer.status, answer.header("x-should-retry")), (502, None), "{answer:?}");
}

/// A replica with store 1. Instead of answering the first request without the header `x-warm`, it closes the
/// connection.
fn dropping_first_request() -> Upstream {
    let dropped = AtomicUsize::new(0);
    Upstream::with_store(TcpListener::bind("127.0.0.1:0").unwrap(), "m", 1, move |request, stream| {
        let is_warming = request.header("x-warm").is_some();
        let drops = !is_warming && dropped.fetch_add(1, Ordering::Relaxed) == 0;
        !drops && send(stream, &whole("\"answered\""))
    })
}

fn stored(prefix: &str) -> String {
    format!("{prefix}_{:016x}{:032x}", 1, 0x100)
}

#[test]
fn a_stored_write_runs_once_and_a_read_is_repeated() {
    let (response, conversation) = (stored("resp"), stored("conv"));
    let append = format!("/v3/conversations/{conversation}/items");
    let read = format!("/v3/responses/{response}");
    let follow = format!(r#"{{"model":"m","input":"x","previous_response_id":"{response}"}}"#);
    let append_body = r#"{"items":[]}"#;
    let passing = format!(r#"{{"model":"m","input":"x","store":false,"previous_response_id":"{response}"}}"#);
    let writes = [
        ("POST", "/v3/responses", follow.as_str()),
        ("POST", &append, append_body),
        ("POST", "/v3/conversations", "{}"),
    ];
    let repeats = [
        ("GET", read.as_str(), ""),
        ("DELETE", &read, ""),
        ("POST", "/v3/responses", &passing),
        ("POST", "/v3/embeddings", r#"{"model":"m"}"#),
    ];
    for is_warm in [false, true] {
        for (method, path, body) in writes.into_iter().chain(repeats) {
            let replica = dropping_first_request();
            let router = Router::start(&[&replica], &[]);
            if is_warm {
                assert_eq!(router.request("POST", CHAT, "x-warm: 1\r\n", &chat("m", false)).status, 200);
            }
            let answer = router.request(method, path, "", body);
            let received = replica.seen().len() - usize::from(is_warm);
            if writes.contains(&(method, path, body)) {
                assert_eq!((answer.status, received), (502, 1), "{method} {path}: {answer:?}");
                assert!(answer.body.contains("\"outcome_unknown\""), "{answer:?}");
                assert_eq!(answer.header("x-should-retry"), Some("false"));
            } else {
                assert_eq!((answer.status, received), (200, 2), "{method} {path}: {answer:?}");
            }
        }
    }
}

#[test]
fn a_client_does_not_repeat_a_write_that_a_replica_may_still_store() {
    let silent = Upstream::start("m", |_, stream| {
        use std::io::Read as _;
        // Wait until the router closes the connection.
        let _ = stream.read(&mut [0; 1]);
        false
    });
    let router = Router::start(&[&silent], &["--answer-timeout=100ms", "--attempts=1"]);
    let answer = router.post("/v3/responses", r#"{"model":"m","input":"x"}"#);
    assert_eq!(answer.status, 504, "{answer:?}");
    assert!(answer.body.contains("\"replicas_timed_out\""), "{answer:?}");
    assert_eq!((answer.header("x-should-retry"), answer.header("retry-after")), (Some("false"), None));
    let answer = router.post(CHAT, &chat("m", false));
    assert_eq!(answer.status, 504, "{answer:?}");
    assert_eq!((answer.header("x-should-retry"), answer.header("retry-after")), (None, Some("1")));
    assert_eq!(silent.seen().len(), 2);
}

#[test]
fn a_stored_write_does_not_fail_because_the_replica_closes_idle_connections() {
    // Each connection serves one request, and the replica closes it after the answer.
    let replica = Upstream::with_store(TcpListener::bind("127.0.0.1:0").unwrap(), "m", 1, |_, stream| {
        send(stream, &whole("{}"));
        false
    });
    let router = Router::start(&[&replica], &[]);
    let body = format!(r#"{{"model":"m","input":"x","previous_response_id":"{}"}}"#, stored("resp"));
    for number in 1..40 {
        assert_eq!(router.post("/v3/responses", &body).status, 200);
        assert_eq!(replica.seen().len(), number);
    }
}

#[test]
fn a_write_that_a_full_replica_rejects_goes_to_another() {
    let full = Upstream::start("m", |_, stream| send(stream, &with_status("503 Service Unavailable", "{}")));
    let free = Upstream::start("m", |_, stream| send(stream, &whole("1")));
    let router = Router::start(&[&full, &free], &["--policy=round-robin"]);
    for _ in 0..4 {
        assert_eq!(router.post("/v3/responses", r#"{"model":"m","input":"x"}"#).body, "1");
    }
    assert!(!full.seen().is_empty());
}

#[test]
fn answers_of_replicas_are_counted_by_status() {
    let statuses = ["400 Bad Request", "500 Internal Server Error", "503 Service Unavailable"];
    for status in statuses {
        for is_chunked in [false, true] {
            let replica = Upstream::start("m", move |_, stream| {
                if is_chunked {
                    send(
                        stream,
                        &format!("HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n{END}"),
                    )
                } else {
                    send(stream, &with_status(status, "{}"))
                }
            });
            let router = Router::start(&[&replica], &["--attempts=1", "--access-log"]);
            let answer = router.post(CHAT, &chat("m", false));
            assert_eq!((answer.status.to_string(), answer.body.as_str()), (status[..3].to_owned(), "{}"));
            let metrics = router.get("/metrics").body;
            let class = format!("status=\"{}xx\"", &status[..1]);
            let line =
                metrics.lines().find(|line| line.contains("outcome=\"replica_error\"")).unwrap_or_default();
            assert!(line.contains(&class) && line.ends_with(" 1"), "{status}: {metrics}");
            router.await_log(&format!("status={}", &status[..3]));
        }
    }
}

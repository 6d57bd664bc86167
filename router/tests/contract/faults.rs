//! Tests replicas that fail before or after the first byte of an answer.

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::harness::*;

/// A replica that answers every request.
fn good() -> Upstream {
    Upstream::start("m", |request, stream| {
        if String::from_utf8_lossy(&request.body).contains("\"stream\":true") {
            send(stream, STREAM)
                && send(stream, &event("good"))
                && send(stream, &event("[DONE]"))
                && send(stream, END)
        } else {
            send(stream, &whole("\"good\""))
        }
    })
}

/// The policy picks the replicas in turn, so that the failing replica receives requests.
const IN_TURN: &str = "--policy=round-robin";
/// The number of requests, which is small enough that every retry is permitted.
const REQUESTS: usize = 10;

/// Checks that the healthy replica answers every request, and that the failing one was tried.
fn assert_retried_elsewhere(bad: &Upstream, arguments: &[&str], is_stream: bool) -> String {
    let good = good();
    let all: Vec<&str> = [IN_TURN].into_iter().chain(arguments.iter().copied()).collect();
    let router = Router::start(&[bad, &good], &all);
    for _ in 0..REQUESTS {
        let answer = router.post(CHAT, &chat("m", is_stream));
        assert!(answer.status == 200 && answer.body.contains("good") && answer.is_complete, "{answer:?}");
        assert_eq!(answer.header("x-ovfleet-replica"), Some(good.address.to_string().as_str()));
    }
    assert!(!bad.seen().is_empty());
    let (one, other) = (&bad.seen()[0], &good.seen()[0]);
    assert_eq!(one.body, other.body, "both replicas receive the same body");
    let metrics = router.get("/metrics").body;
    assert!(metric(&metrics, "ovfleet_router_retries_total") >= 1.0, "{metrics}");
    metrics
}

#[test]
fn a_request_is_retried_if_the_replica_dies_before_its_first_byte() {
    for is_stream in [false, true] {
        assert_retried_elsewhere(&Upstream::start("m", |_, _| false), &[], is_stream);
    }
}

#[test]
fn a_request_is_retried_if_the_replica_dies_between_head_and_first_event() {
    assert_retried_elsewhere(&Upstream::start("m", |_, stream| send_and_close(stream, STREAM)), &[], true);
}

#[test]
fn a_request_is_retried_if_the_replica_dies_within_an_answer_that_is_not_streamed() {
    let bad = Upstream::start("m", |_, stream| {
        send(stream, "HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{\"half\":");
        false
    });
    assert_retried_elsewhere(&bad, &[], false);
}

#[test]
fn a_request_is_retried_if_the_answer_is_not_http() {
    let bad = Upstream::start("m", |_, stream| send_and_close(stream, "SSH-2.0-OpenSSH_9.9\r\n\r\n"));
    assert_retried_elsewhere(&bad, &[], false);
}

#[test]
fn requests_are_retried_after_server_errors_and_when_a_replica_is_full() {
    for status in
        ["500 Internal Server Error", "502 Bad Gateway", "503 Service Unavailable", "429 Too Many Requests"]
    {
        assert_retried_elsewhere(
            &Upstream::start("m", move |_, stream| send(stream, &with_status(status, "{}"))),
            &[],
            true,
        );
    }
}

#[test]
fn a_request_is_retried_if_the_answer_does_not_begin_in_time() {
    let bad = || {
        Upstream::start("m", |_, stream| {
            use std::io::Read as _;
            // Wait until the router closes the connection.
            let _ = stream.read(&mut [0; 1]);
            false
        })
    };
    let metrics = assert_retried_elsewhere(&bad(), &["--first-token-timeout=100ms"], true);
    assert!(metrics.contains("reason=\"timeout\""), "{metrics}");
    assert_retried_elsewhere(&bad(), &["--answer-timeout=100ms"], false);
}

#[test]
fn a_request_is_retried_after_a_connect_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // The replica lists its model once, and accepts no other connection.
    let client = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        read_request(&mut stream);
        send_and_close(&mut stream, &whole(r#"{"data":[{"id":"m"}]}"#));
        listener
    });
    let (good, deaf) = (good(), format!("--replica={address}"));
    let router = Router::start(&[&good], &[IN_TURN, "--connect-timeout=100ms", &deaf]);
    router.await_served(address);
    let listener = client.join().unwrap();
    // Fill the backlog, so that the kernel does not respond to further connection attempts.
    let mut waiting = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(500)) {
        waiting.push(stream);
    }
    for _ in 0..REQUESTS {
        let answer = router.post(CHAT, &chat("m", false));
        assert!(answer.status == 200 && answer.body.contains("good"), "{answer:?}");
    }
    let metrics = router.get("/metrics").body;
    assert!(metrics.contains("retries_total{reason=\"connect\"}"), "{metrics}");
    drop((listener, waiting));
}

#[test]
fn a_request_whose_replica_accepts_no_connection_is_retried_until_its_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // The replica lists its model once, and then refuses connections.
    let list_models = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        read_request(&mut stream);
        send_and_close(&mut stream, &whole(r#"{"data":[{"id":"m"}]}"#));
    });
    let replica = format!("--replica={address}");
    let router = Router::unready(&[&replica, "--replica-wait-timeout=1h"]);
    router.await_served(address);
    list_models.join().unwrap();
    let answer = router.request("POST", CHAT, "x-ovfleet-timeout: 0.5\r\n", &chat("m", false));
    assert_eq!((answer.status, answer.header("retry-after")), (504, Some("1")), "{answer:?}");
    let error: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(error["error"]["type"], "server_error");
    assert_eq!(error["error"]["code"], "replicas_timed_out");
    let metrics = router.get("/metrics").body;
    assert!(metrics.contains("retries_total{reason=\"connect\"}"), "{metrics}");
}

#[test]
fn a_replica_that_fails_repeatedly_is_ejected() {
    let metrics = assert_retried_elsewhere(&Upstream::start("m", |_, _| false), &[], false);
    assert!(metric(&metrics, "ovfleet_router_ejections_total") >= 1.0, "{metrics}");
}

#[test]
fn errors_of_the_client_are_not_retried() {
    let refuse = |status: &'static str| {
        Upstream::start("m", move |_, stream| send(stream, &with_status(status, "{\"error\":1}")))
    };
    for status in ["400 Bad Request", "404 Not Found", "413 Content Too Large", "422 Unprocessable Content"] {
        let upstreams = [refuse(status), refuse(status)];
        let router = Router::start(&[&upstreams[0], &upstreams[1]], &[]);
        let answer = router.post(CHAT, &chat("m", false));
        assert_eq!(
            (answer.status.to_string(), answer.body.as_str()),
            (status[..3].to_owned(), "{\"error\":1}")
        );
        assert_eq!(upstreams[0].seen().len() + upstreams[1].seen().len(), 1);
    }
}

#[test]
fn when_no_replica_has_room_the_client_receives_the_answer_of_the_replica() {
    let full = || {
        let answer = "HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\ncontent-length: 2\r\n\r\n{}";
        Upstream::start("m", move |_, stream| send(stream, answer))
    };
    let upstreams = [full(), full()];
    let router = Router::start(&[&upstreams[0], &upstreams[1]], &[]);
    let answer = router.post(CHAT, &chat("m", false));
    assert_eq!((answer.status, answer.header("retry-after")), (429, Some("7")));
    assert_eq!((upstreams[0].seen().len(), upstreams[1].seen().len()), (1, 1));
}

#[test]
fn an_error_whose_body_is_too_large_to_buffer_counts_as_its_status() {
    let full = || {
        let answer = with_status("429 Too Many Requests", &"x".repeat(3 << 20));
        Upstream::start("m", move |_, stream| send(stream, &answer))
    };
    let upstreams = [full(), full()];
    let router = Router::start(&[&upstreams[0], &upstreams[1]], &[]);
    let answer = router.post(CHAT, &chat("m", false));
    assert_eq!((answer.status, answer.body.as_str(), answer.is_complete), (429, "", true), "{answer:?}");
    assert_eq!((upstreams[0].seen().len(), upstreams[1].seen().len()), (1, 1));
    let metrics = router.get("/metrics").body;
    assert!(metrics.contains("retries_total{reason=\"busy\"}"), "{metrics}");
}

#[test]
fn attempts_are_counted() {
    let bad = || Upstream::start("m", |_, _| false);
    let upstreams = [bad(), bad(), bad()];
    let router = Router::start(&[&upstreams[0], &upstreams[1], &upstreams[2]], &["--attempts=2"]);
    let answer = router.post(CHAT, &chat("m", false));
    assert_eq!(answer.status, 502);
    assert!(answer.body.contains("\"code\":\"replicas_failed\""), "{answer:?}");
    let seen: usize = upstreams.iter().map(|upstream| upstream.seen().len()).sum();
    assert_eq!(seen, 2);
}

/// A replica that closes the connection within the third event of a stream.
fn dying_mid_stream() -> Upstream {
    Upstream::start("m", |_, stream| {
        send(stream, STREAM);
        send(stream, &event("{\"sequence_number\":1}"));
        send(stream, &event("{\"sequence_number\":2}"));
        // The rest of this event is never sent.
        send(stream, "5\r\ndata:\r\n");
        false
    })
}

#[test]
fn a_stream_whose_replica_dies_ends_with_an_error_event() {
    let upstream = dying_mid_stream();
    let router = Router::start(&[&upstream], &[]);
    let broken = |count: u32| {
        let metrics = router.get("/metrics").body;
        for endpoint in ["chat_completions", "completions", "responses"] {
            let labels = format!("endpoint=\"{endpoint}\",outcome=\"broken\",status=\"2xx\"");
            let line = format!("ovfleet_router_requests_total{{{labels}}} {count}\n");
            assert!(metrics.contains(&line), "{line}{metrics}");
        }
    };
    // The series must exist from the start, because Prometheus sees no increase in a series that begins at 1.
    broken(0);
    for path in [CHAT, "/v1/completions"] {
        let answer = router.post(path, &chat("m", true));
        assert!(answer.status == 200 && answer.is_complete, "{answer:?}");
        let events: Vec<&str> = answer.body.split_terminator("\n\n").collect();
        assert_eq!(events.len(), 4, "{}", answer.body);
        assert_eq!(events[1], "data: {\"sequence_number\":2}");
        let error: serde_json::Value = serde_json::from_str(&events[2]["data: ".len()..]).unwrap();
        assert_eq!(error["error"]["code"], "replica_failed");
        assert_eq!(events[3], "data: [DONE]");
    }
    let answer = router.post("/v3/responses", &chat("m", true));
    let last = answer.body.trim_end().rsplit("\n\n").next().unwrap();
    let data = last.strip_prefix("event: error\ndata: ").unwrap();
    let error: serde_json::Value = serde_json::from_str(data).unwrap();
    assert_eq!((&error["type"], &error["sequence_number"]), (&"error".into(), &3.into()));
    broken(1);
}

#[test]
fn a_stream_of_announced_length_ends_with_an_error_event_too() {
    let upstream = Upstream::start("m", |_, stream| {
        let head = STREAM.replace("transfer-encoding: chunked", "content-length: 1000");
        send_and_close(stream, &format!("{head}data: 1\n\n"))
    });
    let router = Router::start(&[&upstream], &[]);
    let answer = router.post(CHAT, &chat("m", true));
    assert!(answer.status == 200 && answer.is_complete, "{answer:?}");
    assert!(answer.body.starts_with("data: 1\n\ndata: {\"error\":"), "{answer:?}");
    assert!(answer.body.ends_with("data: [DONE]\n\n"), "{answer:?}");
}

#[test]
fn a_stream_that_falls_silent_ends_with_an_error_event() {
    let upstream = Upstream::start("m", |_, stream| {
        use std::io::Read as _;
        send(stream, STREAM);
        send(stream, &event("1"));
        let _ = stream.read(&mut [0; 1]);
        false
    });
    let router = Router::start(&[&upstream], &["--idle-timeout=200ms"]);
    let answer = router.post(CHAT, &chat("m", true));
    assert!(answer.is_complete && answer.body.contains("stopped answering"), "{answer:?}");
}

#[test]
fn an_answer_that_is_not_a_stream_of_events_is_cut_off() {
    let upstream = Upstream::start("m", |_, stream| {
        send(stream, "HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ntransfer-encoding: chunked\r\n\r\n");
        send(stream, "3\r\nabc\r\n");
        false
    });
    let router = Router::start(&[&upstream], &[]);
    let answer = router.post("/v3/audio/speech", &chat("m", false));
    assert_eq!((answer.status, answer.body.as_str(), answer.is_complete), (200, "abc", false));
}

#[test]
fn while_no_replica_listens_requests_wait_for_one() {
    let upstream = Upstream::start("m", |_, stream| send(stream, &whole("1")));
    // No process listens on this address yet.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = listener.local_addr().unwrap();
    drop(listener);
    let late = format!("--replica={place}");
    let router = Router::start(&[&upstream], &["--replica-wait-timeout=30s", &late]);
    let answers = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let answer = router.post(CHAT, &chat("late", false));
                assert_eq!((answer.status, answer.body.as_str()), (200, "2"));
                answers.fetch_add(1, Ordering::Relaxed);
            });
        }
        await_condition("the requests to wait", || {
            let metrics = router.get("/metrics").body;
            (metric(&metrics, "ovfleet_router_requests_without_replica") >= 8.0).then_some(())
        });
        assert_eq!(answers.load(Ordering::Relaxed), 0);
        let listener = TcpListener::bind(place).unwrap();
        let _late = Upstream::on(listener, "late", |_, stream| send(stream, &whole("2")));
    });
    assert_eq!(answers.load(Ordering::Relaxed), 8);
}

#[test]
fn a_request_without_a_replica_is_rejected_by_timeout_or_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = format!("--replica={}", listener.local_addr().unwrap());
    drop(listener);
    let router = Router::unready(&[&nobody, "--replica-wait-timeout=300ms"]);
    assert_eq!(router.get("/v2/health/ready").status, 503);
    assert_eq!(router.get("/v2/health/live").status, 200);
    let answer = router.post(CHAT, &chat("m", false));
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    assert!(answer.body.contains("\"code\":\"no_replica\""), "{answer:?}");
    assert!(answer.body.contains("\"no replica that can answer the request is available\""), "{answer:?}");
    let router = Router::unready(&[&nobody, "--replica-wait-timeout=1h"]);
    let answer = router.request("POST", CHAT, "x-ovfleet-timeout: 0.3\r\n", &chat("m", false));
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    let error: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(
        (&error["error"]["type"], &error["error"]["code"]),
        (&"server_error".into(), &"no_replica".into())
    );
    assert_eq!(
        error["error"]["message"],
        "no replica of the model became available within the time in the x-ovfleet-timeout header"
    );
    let router = Router::unready(&[&nobody, "--replica-wait-requests=0", "--replica-wait-timeout=1h"]);
    assert_eq!(router.post(CHAT, &chat("m", false)).status, 503);
}

#[test]
fn a_replica_that_comes_back_after_a_crash_is_used_again() {
    let first = Upstream::start("m", |_, stream| send(stream, &whole("1")));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = listener.local_addr().unwrap();
    drop(listener);
    let second = format!("--replica={place}");
    let router = Router::start(&[&first], &[IN_TURN, &second]);
    // The model of the second replica is unknown, so all requests go to the first.
    assert_eq!(router.post(CHAT, &chat("m", false)).body, "1");
    let _second = Upstream::on(TcpListener::bind(place).unwrap(), "m", |_, stream| send(stream, &whole("2")));
    await_condition("the second replica to be used", || {
        (router.post(CHAT, &chat("m", false)).body == "2").then_some(())
    });
}

//! Tests that requests and answers are forwarded unchanged, and that connections are reused.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::sync::Mutex;
use std::sync::mpsc::channel;

use crate::harness::*;

#[test]
fn the_bytes_of_a_request_and_its_answer_are_forwarded_unchanged() {
    let answer = r#"{"odd" :  "spacing","usage":{"prompt_tokens":5,"completion_tokens":2}}"#;
    let upstream = Upstream::start("m", move |_, stream| send(stream, &whole(answer)));
    let router = Router::start(&[&upstream], &[]);
    let body = "{ \"model\":\"m\" ,\n \"messages\" : [ {\"content\":\"\\u00e9\",\"x\":1.0e5} ] }";
    let given =
        router.request("POST", "/v1/chat/completions?a=b", "x-mine: 1\r\nauthorization: Bearer k\r\n", body);
    assert_eq!((given.status, given.body.as_str(), given.is_complete), (200, answer, true));
    assert_eq!(given.header("x-ovfleet-replica"), Some(upstream.address.to_string().as_str()));
    let seen = &upstream.seen()[0];
    assert!(seen.head.starts_with("POST /v1/chat/completions?a=b HTTP/1.1\r\n"), "{}", seen.head);
    assert_eq!(seen.body, body.as_bytes());
    assert_eq!((seen.header("x-mine"), seen.header("authorization")), (Some("1"), Some("Bearer k")));
    assert_eq!(seen.header("host"), Some(upstream.address.to_string().as_str()));
    let dispatch = seen.header("x-ovfleet-dispatch").unwrap();
    let (id, number) = dispatch.split_once('/').unwrap();
    assert!(id.len() == 16 && number == "1", "{dispatch}");
    assert_eq!(seen.header("connection"), None);
}

#[test]
fn events_are_forwarded_one_by_one_as_they_are_sent() {
    let (go, gate) = channel::<()>();
    let gate = Mutex::new(gate);
    let upstream = Upstream::start("m", move |_, stream| {
        let gate = gate.lock().unwrap();
        send(stream, STREAM);
        for number in 0..5 {
            send(stream, &event(&number.to_string()));
            gate.recv().unwrap();
        }
        send(stream, &event("[DONE]")) && send(stream, END)
    });
    let router = Router::start(&[&upstream], &[]);
    let mut stream = router.connect();
    stream.write_all(raw("POST", CHAT, "", &chat("m", true)).as_bytes()).unwrap();
    for number in 0..5 {
        // Send the next event only after the client has received this one.
        let read = read_until(&mut stream, &format!("data: {number}\n\n"));
        assert!(!read.contains(&format!("data: {}\n\n", number + 1)));
        go.send(()).unwrap();
    }
    read_until(&mut stream, "data: [DONE]\n\n");
}

#[test]
fn an_event_in_pieces_is_whole_for_the_client() {
    let upstream = Upstream::start("m", |_, stream| {
        send(stream, STREAM);
        for piece in ["da", "ta: {\"a\"", ":1}\n", "\ndata: 2\n\nda", "ta: [DONE]\n\n"] {
            send(stream, &format!("{:x}\r\n{piece}\r\n", piece.len()));
        }
        send(stream, END)
    });
    let router = Router::start(&[&upstream], &[]);
    let answer = router.post(CHAT, &chat("m", true));
    assert_eq!(answer.body, "data: {\"a\":1}\n\ndata: 2\n\ndata: [DONE]\n\n");
    assert!(answer.is_complete);
}

#[test]
fn a_request_ends_at_the_replica_when_its_client_leaves() {
    let (closed, closed_receiver) = channel();
    let closed = Mutex::new(closed);
    let upstream = Upstream::start("m", move |request, stream| {
        if String::from_utf8_lossy(&request.body).contains("\"stream\":true") {
            send(stream, STREAM);
            send(stream, &event("1"));
        }
        // The client disconnects. Wait until the router closes this connection as a result.
        let ended = matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_));
        closed.lock().unwrap().send(ended).unwrap();
        false
    });
    let router = Router::start(&[&upstream], &[]);
    for is_stream in [true, false] {
        let mut stream = router.connect();
        stream.write_all(raw("POST", CHAT, "", &chat("m", is_stream)).as_bytes()).unwrap();
        if is_stream {
            read_until(&mut stream, "data: 1\n\n");
        } else {
            await_condition("the request to arrive", || (upstream.seen().len() == 2).then_some(()));
        }
        stream.shutdown(Shutdown::Both).unwrap();
        assert!(closed_receiver.recv_timeout(LIMIT).unwrap());
    }
    await_condition("no request to be in flight", || {
        router.get("/debug/replicas").body.contains("\"in_flight\":0").then_some(())
    });
    let metrics = router.get("/metrics").body;
    let cancelled = metrics.lines().find(|line| line.contains("outcome=\"cancelled\"")).unwrap_or_default();
    assert!(cancelled.ends_with(" 2"), "{metrics}");
}

#[test]
fn connections_to_replicas_are_reused() {
    let upstream = Upstream::start("m", |request, stream| {
        let port = stream.peer_addr().unwrap().port().to_string();
        let is_stream = String::from_utf8_lossy(&request.body).contains("\"stream\":true");
        if is_stream {
            send(stream, STREAM) && send(stream, &event(&port)) && send(stream, END)
        } else {
            send(stream, &whole(&port))
        }
    });
    let router = Router::start(&[&upstream], &[]);
    let mut ports: Vec<String> = (0..6)
        .map(|number| {
            let body = router.post(CHAT, &chat("m", number % 2 == 0)).body;
            body.trim().trim_start_matches("data: ").to_owned()
        })
        .collect();
    ports.dedup();
    assert_eq!(ports.len(), 1, "{ports:?}");
}

#[test]
fn a_replica_may_close_an_idle_connection_without_being_blamed() {
    let upstream = Upstream::start("m", |_, stream| {
        send(stream, &whole("{}"));
        false
    });
    let router = Router::start(&[&upstream], &[]);
    for number in 1..=20 {
        assert_eq!(router.post(CHAT, &chat("m", false)).status, 200);
        upstream.await_closed(number);
    }
    assert_eq!(upstream.seen().len(), 20);
    assert_eq!(metric(&router.get("/metrics").body, "ovfleet_router_retries_total"), 0.0);
}

#[test]
fn several_requests_go_over_one_connection_and_large_answers_pass() {
    let large = "x".repeat(3 << 20);
    let answer = format!("{{\"a\":\"{large}\"}}");
    let upstream = Upstream::start("m", move |_, stream| send(stream, &whole(&answer)));
    let router = Router::start(&[&upstream], &[]);
    let mut stream = router.connect();
    for _ in 0..3 {
        let request = raw("POST", CHAT, "", &chat("m", false)).replace("connection: close\r\n", "");
        stream.write_all(request.as_bytes()).unwrap();
        let head = {
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") {
                stream.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            String::from_utf8(head).unwrap()
        };
        let mut body = vec![0; header(&head, "content-length").unwrap().parse().unwrap()];
        stream.read_exact(&mut body).unwrap();
        assert_eq!(body.len(), large.len() + 8);
    }
}

#[tokio::test]
async fn http_2_without_tls_is_accepted() {
    use http_body_util::BodyExt as _;
    let upstream = Upstream::start("m", |request, stream| {
        assert!(request.head.starts_with("POST /v3/chat/completions HTTP/1.1"), "{}", request.head);
        send(stream, STREAM)
            && send(stream, &event("1"))
            && send(stream, &event("[DONE]"))
            && send(stream, END)
    });
    let router = Router::start(&[&upstream], &[]);
    let stream = tokio::net::TcpStream::connect(&router.address).await.unwrap();
    let io = hyper_util::rt::TokioIo::new(stream);
    let executor = hyper_util::rt::TokioExecutor::new();
    let (sender, connection) = hyper::client::conn::http2::handshake(executor, io).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(connection);
    // All requests are sent over one connection.
    for _ in 0..20 {
        let mut sender = sender.clone();
        tasks.spawn(async move {
            let request = http::Request::post("http://router/v3/chat/completions")
                .header("content-type", "application/json")
                .body(http_body_util::Full::new(bytes::Bytes::from(chat("m", true))))
                .unwrap();
            let response = sender.send_request(request).await?;
            assert_eq!((response.status().as_u16(), response.version()), (200, http::Version::HTTP_2));
            let body = response.into_body().collect().await?.to_bytes();
            assert_eq!(body, "data: 1\n\ndata: [DONE]\n\n");
            Ok(())
        });
    }
    drop(sender);
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap().unwrap();
    }
    assert_eq!(upstream.seen().len(), 20);
}

#[test]
fn unknown_paths_and_bodies_that_are_not_json_are_forwarded() {
    let upstream =
        Upstream::start("m", |_, stream| send(stream, &with_status("404 Not Found", "{\"mine\":1}")));
    let router = Router::start(&[&upstream], &[]);
    let binary = "\u{1}not json";
    let answer = router.request("PUT", "/v3/audio/transcriptions", "", binary);
    assert_eq!((answer.status, answer.body.as_str()), (404, "{\"mine\":1}"));
    assert_eq!(upstream.seen()[0].body, binary.as_bytes());
    assert_eq!(router.request("DELETE", "/v1/models/m", "", "").status, 404);
    assert_eq!(upstream.seen().len(), 2);
    // vLLM serves `/tokenize` and `/detokenize` without a version prefix.
    for path in ["/v3/tokenize", "/tokenize", "/detokenize"] {
        assert_eq!(router.request("POST", path, "", "{\"model\":\"m\"}").body, "{\"mine\":1}", "{path}");
    }
    assert_eq!(upstream.seen().len(), 5);
}

//! Tests hostile clients. Regardless of what a hostile client sends, and whether it reads the answers, other clients
//! get answers, and the memory usage remains bounded.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use proto::v1alpha1::replica_client::ReplicaClient;
use proto::v1alpha1::{State, WatchLoadRequest};
use serde_json::{Map, Value, json};

use crate::harness::{Server, command, rest, with_descriptors};

/// The maximum size of a request head in bytes.
const HEAD_BYTES_MAX: usize = 128 << 10;

/// The time limit for each condition that a test waits for. Conditions are usually met much sooner.
const DEADLINE: Duration = Duration::from_secs(60);

fn post(path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}")
        .into_bytes()
}

/// Sends a request to an address and returns the answer.
fn answer(address: &str, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    // The answer may arrive before the whole request is sent.
    let _ = stream.write_all(request);
    rest(stream)
}

/// Returns the status and the error object of an answer.
fn refusal(answer: &str) -> (u16, Value) {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
    assert!(head.to_ascii_lowercase().contains("content-type: application/json"), "{answer}");
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let body: Value = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"));
    assert!(body["error"]["message"].is_string(), "{answer}");
    (status, body["error"].clone())
}

#[test]
fn probes_and_metrics_are_answered_while_the_api_has_no_free_connection() {
    let arguments = ["--admin-port", "0", "--max-connections", "1", "--read-timeout", "1h"];
    let server = Server::start(&mut command(&arguments));
    let admin = server.logged("metrics and probes on ");
    let mut silent = server.connect();
    // Wait for an answer, to be sure that the server has accepted the connection.
    silent.write_all(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    silent.read_exact(&mut [0; 12]).unwrap();
    let get = |path: &str| {
        answer(&admin, format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes())
    };
    for path in ["/v2/health/live", "/v2/health/ready", "/metrics"] {
        assert!(get(path).starts_with("HTTP/1.1 200"), "{path}");
    }
    assert_eq!(refusal(&get("/v1/models")).0, 404, "the admin port does not serve the API");
}

#[test]
fn silent_connections_make_room_for_those_with_a_request() {
    let server = Server::start(&mut command(&["--max-connections", "4", "--read-timeout", "1h"]));
    // Open more connections than the server accepts at the same time, and send a part of a request head on every second
    // one.
    let silent: Vec<TcpStream> = (0..10)
        .map(|number| {
            let mut connection = server.connect();
            connection.write_all(if number % 2 == 0 { &b""[..] } else { b"GET /v1/mod" }).unwrap();
            connection
        })
        .collect();
    let request = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n";
    let mut client = server.connect();
    for _ in 0..2 {
        // Send the second request on the same connection, which must not be closed to make room for others.
        client.write_all(request).unwrap();
        client.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"]}") {
            let mut piece = [0; 1024];
            let count = client.read(&mut piece).unwrap();
            assert!(count > 0, "the connection is closed: {}", String::from_utf8_lossy(&answer));
            answer.extend_from_slice(&piece[..count]);
        }
        assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    }
    drop(silent);
}

#[test]
fn a_silent_connection_is_closed_while_other_connections_replace_each_other() {
    let server = Server::start(&mut command(&["--max-connections", "2", "--read-timeout", "1h"]));
    let mut silent = server.connect();
    silent.set_nonblocking(true).unwrap();
    let request = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let started = Instant::now();
    loop {
        let answer = answer(&server.address, request);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        match silent.read(&mut [0]) {
            Ok(count) => {
                assert_eq!(count, 0);
                break;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        assert!(started.elapsed() < DEADLINE, "the connection is still open");
    }
}

#[tokio::test]
async fn silent_grpc_connections_leave_room_for_routers_and_file_descriptors_for_the_api() {
    /// The limit on the process's open file descriptors, which exceeds the connection limit of the gRPC port.
    const DESCRIPTORS: usize = 400;
    let server = Server::start(&mut with_descriptors(DESCRIPTORS, &command(&[])));
    let address = server.logged("gRPC on ");
    let silent: Vec<TcpStream> = (0..DESCRIPTORS).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let request = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    assert!(answer(&server.address, request).starts_with("HTTP/1.1 200"));
    let report = async {
        let mut router = ReplicaClient::connect(format!("http://{address}")).await.unwrap();
        let mut reports = router.watch_load(WatchLoadRequest::default()).await.unwrap().into_inner();
        reports.message().await.unwrap().unwrap()
    };
    let report = tokio::time::timeout(DEADLINE, report).await.expect("the router gets no report");
    assert_eq!(report.state(), State::Serving);
    drop(silent);
}

#[test]
fn a_client_that_does_not_read_makes_room_for_others() {
    let arguments = ["--max-concurrent-requests", "1", "--write-timeout", "200ms", "--sim-step-time", "0"];
    let server = Server::start(&mut command(&arguments));
    let body = r#"{"model":"sim","prompt":"x","stream":true,"ignore_eos":true,"n":64,"max_tokens":8000}"#;
    let mut stalled = server.connect();
    stalled.write_all(&post("/v1/completions", body)).unwrap();
    let mut begun = [0; 12];
    stalled.read_exact(&mut begun).unwrap();
    assert_eq!(&begun, b"HTTP/1.1 200");
    let started = Instant::now();
    let other = r#"{"model":"sim","prompt":"x","max_tokens":1}"#;
    while !answer(&server.address, &post("/v1/completions", other)).starts_with("HTTP/1.1 200") {
        assert!(started.elapsed() < DEADLINE, "the stalled request still counts");
    }
    drop(stalled);
}

#[test]
fn forms_that_would_take_gigabytes_to_compile_are_rejected() {
    const MEMORY_BYTES_MAX: usize = 512 << 20;
    let server = Server::start(&mut command(&[]));
    let properties: Map<String, Value> = (0..2000).map(|number| (format!("p{number}"), json!({}))).collect();
    let multiples = [97, 89, 83].map(|number| json!({"multipleOf": number}));
    let ask = |parameters: Value| {
        let mut body = json!({"model": "sim", "prompt": "x", "max_tokens": 4});
        body.as_object_mut().unwrap().extend(parameters.as_object().unwrap().clone());
        answer(&server.address, &post("/v1/completions", &body.to_string()))
    };
    for form in [
        json!({"guided_json": {
            "type": "object", "properties": properties, "additionalProperties": false, "minProperties": 1
        }}),
        json!({"guided_json": {"allOf": multiples}}),
    ] {
        let (status, error) = refusal(&ask(form));
        assert_eq!((status, error["code"].as_str()), (400, Some("invalid_value")), "{error}");
        assert!(error["message"].as_str().unwrap().contains("to compile"), "{error}");
        assert!(error["param"].as_str().unwrap().starts_with("guided_"), "{error}");
    }
    // A large form that is cheap to compile passes its trial in a separate process, so the server compiles it.
    let valid = json!({"guided_json": {"type": "object", "properties": properties}});
    let accepted = ask(valid);
    assert!(accepted.starts_with("HTTP/1.1 200"), "{accepted}");
    let peak = server.peak_memory();
    assert!(peak < MEMORY_BYTES_MAX, "{} MiB", peak >> 20);
}

#[test]
fn protocol_errors_have_bodies() {
    let server = Server::start(&mut command(&[]));
    let long = "x".repeat(70_000);
    let fields = (0..200).map(|field| format!("x-{field}: y\r\n")).collect::<String>();
    // This head has the maximum size, but no empty line at its end.
    let start = "GET / HTTP/1.1\r\nhost: x\r\nx: ";
    let large = start.to_owned() + &"y".repeat(HEAD_BYTES_MAX - start.len());
    for (request, status, code) in [
        ("GET / HTTP/1.1\r\nhost\r\n\r\n".to_owned(), 400, "malformed_http"),
        (format!("GET /{long} HTTP/1.1\r\nhost: x\r\n\r\n"), 414, "uri_too_long"),
        (format!("GET / HTTP/1.1\r\nhost: x\r\n{fields}\r\n"), 431, "headers_too_large"),
        (format!("GET / HTTP/1.1\r\nhost: x\r\n{long}: y\r\n\r\n"), 431, "headers_too_large"),
        (large, 431, "headers_too_large"),
        ("GET /v1/models HTTP/1.1\r\n\r\n".to_owned(), 400, "malformed_http"),
        ("GET /v1/models HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n".to_owned(), 400, "malformed_http"),
        (
            "POST /v1/tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
                .to_owned(),
            400,
            "malformed_http",
        ),
    ] {
        let refusal = refusal(&answer(&server.address, request.as_bytes()));
        assert_eq!((refusal.0, refusal.1["code"].as_str()), (status, Some(code)), "{request:.80}");
    }
}

#[test]
fn a_request_head_of_the_largest_size_is_accepted() {
    let server = Server::start(&mut command(&[]));
    let (start, end) = ("GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: ", "\r\n\r\n");
    let value = "y".repeat(HEAD_BYTES_MAX - start.len() - end.len());
    let answer = answer(&server.address, format!("{start}{value}{end}").as_bytes());
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer:.200}");
}

#[test]
fn a_path_that_is_not_utf_8_is_rejected_with_an_error_object() {
    let server = Server::start(&mut command(&[]));
    for (method, path) in [
        ("GET", "/v3/models/%ff"),
        ("GET", "/v3/responses/%ff"),
        ("DELETE", "/v3/responses/%ff"),
        ("POST", "/v3/responses/%ff/cancel"),
        ("GET", "/v3/responses/%ff/input_items"),
        ("GET", "/v3/conversations/%ff"),
        ("DELETE", "/v3/conversations/%ff"),
        ("GET", "/v3/conversations/%ff/items"),
        ("GET", "/v3/conversations/conv_1/items/%ff"),
    ] {
        let request = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        let refusal = refusal(&answer(&server.address, request.as_bytes()));
        assert_eq!((refusal.0, refusal.1["code"].as_str()), (400, Some("malformed_http")), "{method} {path}");
    }
}

#[test]
fn texts_that_need_too_much_memory_are_rejected_before_they_are_tokenized() {
    const PEAK_MAX: usize = 512 << 20;
    let server = Server::start(&mut command(&["--max-tokenizer-memory", "128MiB"]));
    let attack = |path: &str, body: String| {
        let request = post(path, &body);
        let refusal = refusal(&answer(&server.address, &request));
        assert_eq!(refusal.0, 400, "{}", refusal.1);
        refusal.1["code"].as_str().unwrap().to_owned()
    };
    let digits = "7".repeat(7_000_000);
    let tokenized = format!(r#"{{"model":"sim","prompt":"{digits}"}}"#);
    let prompt = format!(r#"{{"model":"sim","prompt":"{}"}}"#, &digits[..500_000]);
    let chat =
        format!(r#"{{"model":"sim","messages":[{{"role":"user","content":"{}"}}]}}"#, &digits[..500_000]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(attack("/tokenize", tokenized.clone()), "string_above_max_length"));
        }
        for _ in 0..16 {
            scope.spawn(|| assert_eq!(attack("/v1/completions", prompt.clone()), "context_length_exceeded"));
            scope.spawn(|| {
                assert_eq!(attack("/v1/chat/completions", chat.clone()), "context_length_exceeded")
            });
        }
    });
    // Smaller texts are all tokenized. If they would exceed the memory limit together, some of them wait.
    let counted = format!(r#"{{"model":"sim","prompt":"{}"}}"#, &digits[..150_000]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let answer = answer(&server.address, &post("/tokenize", &counted));
                assert!(answer.contains(r#""count":150000"#), "{answer:.200}");
            });
        }
    });
    let peak = server.peak_memory();
    assert!(peak < PEAK_MAX, "{} MiB", peak >> 20);
}

#[test]
fn a_client_that_half_closes_its_connection_gets_its_answer() {
    let server = Server::start(&mut command(&["--sim-step-time", "5ms"]));
    for stream in [false, true] {
        let body =
            format!(r#"{{"model":"sim","prompt":"x","stream":{stream},"ignore_eos":true,"max_tokens":40}}"#);
        let mut client = server.connect();
        client.write_all(&post("/v1/completions", &body)).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        client.set_read_timeout(Some(DEADLINE)).unwrap();
        let answer = rest(client);
        assert!(answer.contains("HTTP/1.1 200"), "{answer}");
        assert!(answer.contains(r#""finish_reason":"length""#), "{answer}");
    }
}

#[test]
fn a_client_that_disconnects_cancels_its_request_streamed_or_not() {
    let server = Server::start(&mut command(&["--sim-step-time", "20ms", "--max-concurrent-requests", "1"]));
    for stream in [false, true] {
        let body = format!(
            r#"{{"model":"sim","prompt":"x","stream":{stream},"ignore_eos":true,"max_tokens":8000}}"#
        );
        let mut client = server.connect();
        client.write_all(&post("/v1/completions", &body)).unwrap();
        let metric = |name: &str| {
            let text =
                answer(&server.address, b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
            value.unwrap_or_else(|| panic!("no {name}: {text}"))
        };
        let started = Instant::now();
        let wait = |running: u64| {
            while metric("ovfleet_server_sequences_running ") != running {
                assert!(started.elapsed() < DEADLINE, "timed out waiting for {running} sequences");
            }
        };
        wait(1);
        drop(client);
        wait(0);
        assert!(started.elapsed() < DEADLINE);
    }
}

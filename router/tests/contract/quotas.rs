//! Tests token quotas: the usage of a stream is charged whether or not its client requested the usage, and however the
//! stream ends.

use std::io::Write as _;
use std::net::Shutdown;

use crate::access::file;
use crate::harness::*;

/// The number of tokens of each prompt, as the replica counts them. For most prompts in these tests, the router
/// estimates a single token, because they are empty.
const PROMPT_TOKENS: u32 = 300;

/// A replica whose streams are like those of vLLM and ovfleet's server: with `include_usage`, each chunk has the member
/// `usage`, which is `null` except in an additional last chunk.
fn streaming(events: usize) -> Upstream {
    Upstream::start("m", move |request, stream| {
        let body = String::from_utf8_lossy(&request.body).into_owned();
        let body: serde_json::Value = serde_json::from_str(&body).unwrap();
        let includes_usage = body["stream_options"]["include_usage"] == true;
        let null = if includes_usage { ",\"usage\":null" } else { "" };
        send(stream, STREAM);
        for _ in 0..events {
            if !send(
                stream,
                &event(&format!(
                    "{{\"choices\":[{{\"delta\":{{\"content\":\"\\\"usage\\\":null\"}}}}]{null}}}"
                )),
            ) {
                return false;
            }
        }
        if includes_usage {
            send(
                stream,
                &event(&format!(
                    "{{\"choices\":[],\"usage\":{{\"prompt_tokens\":{PROMPT_TOKENS},\"completion_tokens\":{events},\"total_tokens\":0}}}}"
                )),
            );
        }
        send(stream, &event("[DONE]")) && send(stream, END)
    })
}

const KEY: &str = "authorization: Bearer alpha\r\n";

fn start(upstream: &Upstream, tokens_per_minute: u32) -> (tempfile::TempDir, Router) {
    let (directory, keys) = file("alpha\n");
    let replica = upstream.argument();
    let router = Router::unready(&[&replica, &keys, &format!("--tokens-per-minute={tokens_per_minute}")]);
    router.await_log("ready");
    (directory, router)
}

fn ask(router: &Router, more: &str) -> Answer {
    let body = format!(r#"{{"model":"m","messages":[],"max_tokens":100,"stream":true{more}}}"#);
    router.request("POST", CHAT, KEY, &body)
}

#[test]
fn a_stream_is_charged_for_its_prompt_although_its_client_did_not_request_the_usage() {
    let upstream = streaming(3);
    let (_directory, router) = start(&upstream, 600);
    for more in ["", r#","stream_options":null"#, r#","stream_options":{"include_usage":false}"#] {
        let answer = ask(&router, more);
        if answer.status == 429 {
            // Each stream was charged for about 300 of the 600 permitted tokens.
            assert!(upstream.seen().len() == 2, "{answer:?}");
            return;
        }
        assert_eq!(answer.status, 200, "{answer:?}");
        let chunk = "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"usage\\\":null\"}}]}\n\n";
        assert_eq!(answer.body, format!("{}data: [DONE]\n\n", chunk.repeat(3)), "the usage is not forwarded");
    }
    panic!("the quota was never exhausted");
}

#[test]
fn a_client_that_requests_the_usage_receives_it_and_its_body_is_unchanged() {
    let upstream = streaming(1);
    let (_directory, router) = start(&upstream, 10_000);
    let answer = ask(&router, r#", "stream_options" : {"include_usage":true} "#);
    assert!(
        answer.body.contains("\"usage\":null") && answer.body.contains("\"prompt_tokens\":300"),
        "{answer:?}"
    );
    assert!(String::from_utf8_lossy(&upstream.seen()[0].body).contains(r#" "stream_options" : {"#));
}

#[test]
fn without_a_quota_no_body_is_changed() {
    let upstream = streaming(1);
    let router = Router::start(&[&upstream], &[]);
    let body = r#"{"model":"m","messages":[],"stream":true}"#;
    assert_eq!(router.post(CHAT, body).status, 200);
    assert_eq!(upstream.seen()[0].body, body.as_bytes());
}

#[test]
fn an_answer_that_is_too_large_to_be_received_whole_is_charged_by_its_usage() {
    let text = "x".repeat(3 << 19);
    let answer = format!(
        r#"{{"choices":[{{"message":{{"content":"{text}"}}}}],"usage":{{"prompt_tokens":300,"completion_tokens":5000}},"x":1}}"#
    );
    let upstream = Upstream::start("m", move |_, stream| send(stream, &whole(&answer)));
    let (_directory, router) = start(&upstream, 600);
    let ask = || router.request("POST", CHAT, KEY, r#"{"model":"m","messages":[],"max_tokens":100}"#);
    let first = ask();
    assert!(first.status == 200 && first.is_complete);
    await_condition("the request to be recorded", || {
        (metric(&router.get("/metrics").body, "ovfleet_router_requests_total") == 1.0).then_some(())
    });
    assert_eq!(ask().status, 429);
}

#[test]
fn reading_a_stored_response_costs_no_tokens() {
    const USAGE: &str = r#"{"usage":{"input_tokens":300,"output_tokens":200}}"#;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let upstream = Upstream::with_store(listener, "m", 1, |_, stream| send(stream, &whole(USAGE)));
    let (_directory, router) = start(&upstream, 600);
    let path = format!("/v3/responses/resp_{:016x}{:032x}", 1, 0x100);
    for _ in 0..5 {
        assert_eq!(router.request("GET", &path, KEY, "").status, 200);
    }
    let body = r#"{"model":"m","input":"x","max_output_tokens":200}"#;
    assert_eq!(router.request("POST", "/v3/responses", KEY, body).status, 200);
    await_condition("the tokens of the response to be charged", || {
        (router.request("POST", "/v3/responses", KEY, body).status == 429).then_some(())
    });
    assert_eq!(router.request("GET", &path, KEY, "").status, 200);
}

/// Replicas with `--ovms-compat` accept these spellings.
#[test]
fn alternative_spellings_of_a_path_are_charged_and_forwarded_unchanged() {
    const USAGE: &str = r#"{"usage":{"input_tokens":300,"output_tokens":200}}"#;
    for path in ["/v1/responses/", "/v3/v1/responses"] {
        let upstream = Upstream::start("m", |_, stream| send(stream, &whole(USAGE)));
        let (_directory, router) = start(&upstream, 600);
        let body = r#"{"model":"m","input":"x","max_output_tokens":200}"#;
        assert_eq!(router.request("POST", path, KEY, body).status, 200, "{path}");
        await_condition("the tokens of the response to be charged", || {
            (router.request("POST", path, KEY, body).status == 429).then_some(())
        });
        assert!(upstream.seen()[0].head.starts_with(&format!("POST {path} HTTP/1.1")));
    }
    for path in ["/v1/chat/completions/", "/v3/v1/chat/completions"] {
        let upstream = streaming(1);
        let (_directory, router) = start(&upstream, 10_000);
        let body = r#"{"model":"m","messages":[],"stream":true}"#;
        assert_eq!(router.request("POST", path, KEY, body).status, 200, "{path}");
        assert!(String::from_utf8_lossy(&upstream.seen()[0].body).contains("include_usage"), "{path}");
    }
}

#[test]
fn a_content_encoding_does_not_hide_a_request_from_its_quota() {
    let upstream = streaming(1);
    let (_directory, router) = start(&upstream, 10_000);
    let headers = |encoding| format!("{KEY}content-encoding: {encoding}\r\n");
    let body = r#"{"model":"m","messages":[],"stream":true}"#;
    let answer = router.request("POST", CHAT, &headers("gzip"), body);
    assert_eq!(answer.status, 415, "{answer:?}");
    assert!(answer.body.contains("unsupported_content_encoding"), "{answer:?}");
    assert_eq!(router.request("POST", CHAT, &headers("identity"), body).status, 200);
    let [forwarded] = &upstream.seen()[..] else { panic!("one request is forwarded") };
    assert!(String::from_utf8_lossy(&forwarded.body).contains("include_usage"));
}

#[test]
fn a_client_that_leaves_is_charged_for_the_tokens_it_received() {
    const EVENTS: usize = 1000;
    let upstream = Upstream::start("m", |request, stream| {
        if request.head.starts_with("POST /v1/embeddings ") {
            return send(stream, &whole("{}"));
        }
        send(stream, STREAM);
        for number in 0..EVENTS {
            send(stream, &event(&format!("{{\"number\":{number}}}")));
        }
        // The client disconnects. Wait until the router closes this connection as a result.
        let _ = std::io::Read::read(stream, &mut [0; 1]);
        false
    });
    let (_directory, router) = start(&upstream, 1000);
    let mut stream = router.connect();
    let body = r#"{"model":"m","messages":[],"max_tokens":8,"stream":true}"#;
    stream.write_all(raw("POST", CHAT, KEY, body).as_bytes()).unwrap();
    read_until(&mut stream, &format!("{{\"number\":{}}}", EVENTS - 1));
    stream.shutdown(Shutdown::Both).unwrap();
    await_condition("the request to end", || {
        let metrics = router.get("/metrics").body;
        metrics.contains("outcome=\"cancelled\"").then_some(())
    });
    // On arrival, this request is charged for about 130 tokens, and the previous request was charged for about 10. The
    // quota is exceeded only because the previous request was also charged for its events.
    let answer = router.request("POST", "/v1/embeddings", KEY, r#"{"model":"m","input":"x"}"#);
    assert_eq!(answer.status, 429, "{answer:?}");
}

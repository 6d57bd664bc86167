//! Tests the limits of requests, such as their size, their number, the context length and unread answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::{Body, Bytes};
use axum::http::Request;
use futures_util::StreamExt as _;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use server_engine::TokenId;

use crate::harness::{Answer, GatedRunner, RepeatingRunner, Server, Setup, chat, completion, merged};

const PATH: &str = "/v3/chat/completions";

#[tokio::test]
async fn a_body_that_is_too_large_is_413_announced_or_not() {
    let server = Server::repeating("x");
    let large = chat(json!({"pad": "x".repeat(65 * 1024)}));
    let answer = server.post(PATH, large.clone()).await;
    assert_eq!((answer.status.as_u16(), &answer.headers["connection"]), (413, &"close".parse().unwrap()));
    assert_eq!(answer.json()["error"]["code"], "request_too_large");
    let chunks = futures_util::stream::iter([Ok::<_, std::convert::Infallible>(large.clone()), Ok(large)]);
    assert_eq!(server.post(PATH, Body::from_stream(chunks)).await.status, 413);
}

#[tokio::test]
async fn a_body_that_is_too_large_is_discarded_up_to_a_limit() {
    let server = Server::repeating("x");
    let sent = async |count: usize, headers: &[(&str, &str)]| {
        let read = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&read);
        let piece = Bytes::from(vec![b' '; 1 << 20]);
        let pieces = futures_util::stream::repeat(piece).take(count).inspect(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let request =
            headers.iter().fold(Request::post(PATH), |request, (name, value)| request.header(*name, *value));
        let request = request.body(Body::from_stream(pieces.map(Ok::<_, std::convert::Infallible>))).unwrap();
        let status = server.send(request).await.status();
        (status.as_u16(), read.load(Ordering::Relaxed))
    };
    assert_eq!(sent(10, &[]).await, (413, 10));
    assert_eq!(sent(1000, &[]).await, (413, 65));
    assert_eq!(sent(1000, &[("content-length", "1048576000")]).await, (413, 0));
    assert_eq!(sent(10, &[("content-length", "10485760"), ("expect", "100-continue")]).await, (413, 0));
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_arrive_is_408() {
    let server = Server::repeating("x");
    let never = futures_util::stream::pending::<Result<String, std::convert::Infallible>>();
    let answer = server.post(PATH, Body::from_stream(never)).await;
    assert_eq!(answer.status, 408, "{}", answer.body);
}

#[tokio::test]
async fn requests_beyond_the_limit_are_429_with_retry_after() {
    let (runner, permits) = GatedRunner::new("x");
    let mut setup = Setup::new(runner);
    setup.limits.max_concurrent_requests = 2;
    let server = setup.start();
    let request = || Request::post(PATH).body(Body::from(chat(json!({})))).unwrap();
    let (first, second, refused) = tokio::join!(biased; server.send(request()), server.send(request()), async {
        let refused = server.post(PATH, chat(json!({}))).await;
        drop(permits);
        refused
    });
    assert_eq!((first.status().as_u16(), second.status().as_u16()), (200, 200));
    assert_eq!(refused.status, 429);
    assert_eq!(refused.json()["error"]["code"], "too_many_requests");
    assert!(refused.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    drop((first, second));
    assert_eq!(server.post(PATH, chat(json!({}))).await.status, 200, "there is room again");
}

#[tokio::test]
async fn a_large_answer_counts_until_the_client_has_read_it() {
    let server = Server::repeating("x");
    let logprobs = json!({"max_tokens": 200, "logprobs": true, "top_logprobs": 20});
    let response =
        json!({"model": "test-model", "input": "Hi", "max_output_tokens": 200, "top_logprobs": 20});
    let text = json!({"model": "test-model", "text": "x".repeat(30_000)});
    for (path, body) in
        [(PATH, chat(logprobs)), ("/v3/responses", response.to_string()), ("/v3/tokenize", text.to_string())]
    {
        let unread = server.open(path, body).await;
        assert_eq!((unread.status().as_u16(), server.app.requests()), (200, 1), "{path}");
        let answer = Answer::read(unread).await;
        assert!(answer.body.len() > 64 << 10, "{path}: {} bytes", answer.body.len());
        assert_eq!(server.app.requests(), 0, "{path}");
    }
    let small = server.open(PATH, chat(json!({}))).await;
    assert_eq!((small.status().as_u16(), server.app.requests()), (200, 0));
}

#[tokio::test]
async fn unread_answers_about_tokens_share_a_budget() {
    let mut setup = Setup::new(RepeatingRunner::new([TokenId::from(b'x')]));
    setup.limits.max_body_bytes = 1 << 20;
    let server = setup.start();
    // The text of each of these tokens has 12 bytes, and the answer has the text in two fields.
    let body = Bytes::from(json!({"model": "test-model", "tokens": vec![257; 200_000]}).to_string());
    let detokenize = || server.open("/v3/detokenize", body.clone());
    let mut unread = Vec::new();
    let refused = loop {
        match detokenize().await {
            answer if answer.status() == 200 => unread.push(answer),
            refused => break Answer::read(refused).await,
        }
    };
    assert_eq!(
        (refused.status.as_u16(), &refused.json()["error"]["code"]),
        (429, &json!("answer_buffer_full"))
    );
    assert!(refused.headers.contains_key("retry-after"));
    assert_eq!(unread.len(), 13);
    unread.pop();
    assert_eq!(detokenize().await.status(), 200, "there is room again");
}

#[tokio::test]
async fn a_full_queue_is_429_and_a_request_that_never_fits_is_400() {
    let (runner, permits) = GatedRunner::new("x");
    let mut setup = Setup::new(runner);
    setup.max_queue = 2;
    let server = setup.start();
    // Let the first request start. Its next step waits for a permit, so other requests wait, too.
    permits.send(()).unwrap();
    let mut first = server.open(PATH, chat(json!({"stream": true}))).await;
    first.body_mut().frame().await.unwrap().unwrap();
    let (second, (full, never)) = tokio::join!(biased; server.post(PATH, chat(json!({"n": 2}))), async {
        let full = server.post(PATH, chat(json!({}))).await;
        let never = server.post(PATH, chat(json!({"n": 3}))).await;
        drop(permits);
        (full, never)
    });
    assert_eq!(second.status, 200);
    assert_eq!((full.status.as_u16(), &full.json()["error"]["code"]), (429, &json!("queue_full")));
    assert!(full.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    assert_eq!((never.status.as_u16(), &never.json()["error"]["param"]), (400, &json!("n")));
    assert_eq!(Answer::read(first).await.status, 200);
}

#[tokio::test]
async fn requests_beyond_the_context_length_are_rejected() {
    let server = Server::repeating("x");
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(600)}]});
    for (parameters, param) in [
        (long, "messages"),
        (json!({"max_tokens": 1000}), "max_tokens"),
        (json!({"max_completion_tokens": 1000}), "max_completion_tokens"),
    ] {
        let error = server.post(PATH, chat(parameters)).await.json()["error"].clone();
        assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!(param)));
    }
}

#[tokio::test]
async fn an_answer_that_could_have_too_many_log_probabilities_is_rejected() {
    let runner = RepeatingRunner::new([TokenId::from(b'x')]);
    let server = Setup { max_model_len: 1024, ..Setup::new(runner) }.start();
    let logprobs = json!({"n": 128, "max_tokens": 800, "logprobs": true, "top_logprobs": 20});
    let response = json!({
        "model": "test-model", "input": "Hi", "n": 128, "max_output_tokens": 800, "top_logprobs": 20,
    });
    for (path, body, param) in [
        (PATH, chat(logprobs), "max_tokens"),
        (
            "/v3/completions",
            completion(json!({"n": 128, "max_tokens": 800, "logprobs": 20, "stream": true})),
            "max_tokens",
        ),
        ("/v3/responses", response.to_string(), "max_output_tokens"),
    ] {
        let rejected = server.post(path, body).await;
        let error = &rejected.json()["error"];
        assert_eq!(rejected.status, 400, "{path}: {error}");
        assert_eq!((&error["code"], &error["param"]), (&json!("integer_above_max_value"), &json!(param)));
        let message = error["message"].as_str().unwrap();
        assert!(
            message.starts_with(&format!("{param}: 800 tokens per choice exceed the limit of 2097152 ")),
            "{error}"
        );
    }
}

/// A server with a context length of 512 tokens, whose model limits answers to `tokens_max` tokens by default.
fn with_default_length(tokens_max: Option<u32>) -> Server {
    let mut text = server::built_in_text().unwrap();
    text.defaults.tokens_max = tokens_max;
    let model = server::Model::new(vec!["test-model".to_owned()], text, "test");
    Setup { model: Some(model), ..Setup::new(RepeatingRunner::new([TokenId::from(b'x')])) }.start()
}

#[tokio::test]
async fn the_default_length_of_answers_is_limited_to_the_room_after_the_prompt() {
    let server = with_default_length(Some(600));
    let request = |prompt: Value, limit: Value| {
        merged(merged(json!({"model": "test-model"}), prompt), limit).to_string()
    };
    let messages = json!({"messages": [{"role": "user", "content": "Hi"}]});
    for (path, prompt, name) in [
        (PATH, messages, "max_tokens"),
        ("/v3/completions", json!({"prompt": "Hi"}), "max_tokens"),
        ("/v3/responses", json!({"input": "Hi"}), "max_output_tokens"),
    ] {
        let answer = server.post(path, request(prompt.clone(), json!({}))).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        let answer = answer.json();
        assert_eq!(answer["usage"]["total_tokens"], 512, "{path}: {answer}");
        match path {
            "/v3/responses" => assert_eq!(answer["incomplete_details"]["reason"], "max_output_tokens"),
            _ => assert_eq!(answer["choices"][0]["finish_reason"], "length"),
        }
        let rejected = server.post(path, request(prompt, json!({name: 600}))).await;
        assert_eq!(rejected.status, 400, "{path}: {}", rejected.body);
        let error = &rejected.json()["error"];
        assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!(name)));
    }
    // A long conversation is truncated as if the model did not limit the length of answers by default.
    let turns: Vec<Value> = (0..20).map(|_| json!({"role": "user", "content": "x".repeat(24)})).collect();
    let body = request(json!({"input": turns}), json!({"truncation": "auto"}));
    let usage = server.post("/v3/responses", body).await.json()["usage"].clone();
    assert_eq!(usage["total_tokens"], 512, "{usage}");
    assert!((128..200).contains(&usage["output_tokens"].as_u64().unwrap()), "{usage}");
}

#[tokio::test]
async fn the_default_length_of_completions_does_not_displace_the_prompt() {
    for (default, room) in [(Some(600), 128), (None, 16)] {
        let server = with_default_length(default);
        let usage = async |length: usize, truncate: Value| {
            let body = json!({"model": "test-model", "prompt": vec![97; length], "truncate_prompt_tokens": truncate});
            let answer = server.post("/v3/completions", body.to_string()).await;
            assert_eq!(answer.status, 200, "{}", answer.body);
            let usage = &answer.json()["usage"];
            (usage["prompt_tokens"].as_u64().unwrap(), usage["completion_tokens"].as_u64().unwrap())
        };
        assert_eq!(usage(505, Value::Null).await, (505, 7));
        assert_eq!(usage(600, json!(-1)).await, (512 - room, room));
    }
}

#[tokio::test]
async fn bodies_share_a_budget_and_one_that_exceeds_it_is_429() {
    let mut setup = Setup::new(crate::harness::faulty(Vec::new()));
    setup.limits.max_body_bytes = 64 * 1024;
    setup.limits.max_buffered_body_bytes = 160 * 1024;
    let server = setup.start();
    // Only 40 KiB of this body arrives. Its buffer has 64 KiB, and the received text counts a second time, because
    // parsing may copy it into a value.
    let begun = Bytes::from(vec![b' '; 40 * 1024]);
    let (sender, sent) = tokio::sync::oneshot::channel::<()>();
    let pieces = futures_util::stream::iter([begun.clone(), Bytes::from_static(b" ")])
        .chain(futures_util::stream::once(async move {
            drop(sender);
            std::future::pending().await
        }))
        .map(Ok::<_, std::convert::Infallible>);
    let first = server.open(PATH, Body::from_stream(pieces));
    let others = async {
        sent.await.unwrap_err();
        let large = server.post(PATH, chat(json!({"pad": "x".repeat(30 * 1024)}))).await;
        let small = server.post(PATH, chat(json!({}))).await;
        (large, small)
    };
    let (large, small) = tokio::select! {
        _ = first => panic!("the body never ends"),
        others = others => others,
    };
    assert_eq!((large.status.as_u16(), &large.json()["error"]["code"]), (429, &json!("body_buffer_full")));
    assert!(large.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    assert_eq!(small.status, 200, "there is room for a small body");
    let large = server.post(PATH, chat(json!({"pad": "x".repeat(30 * 1024)}))).await;
    assert_eq!(large.status, 200, "the first body has released its bytes: {}", large.body);
}

/// One byte of JSON can become more than 60 bytes of values.
#[tokio::test]
async fn a_body_with_too_many_values_is_rejected_before_it_is_parsed() {
    let mut setup = Setup::new(crate::harness::faulty(Vec::new()));
    setup.limits.max_body_bytes = 8 << 20;
    let server = setup.start();
    for path in [
        PATH,
        "/v3/completions",
        "/v3/responses",
        "/v3/conversations",
        "/v3/responses/input_tokens",
        "/tokenize",
    ] {
        let tools =
            |count| format!("{{\"model\": \"test-model\", \"tools\": [{}{{}}]}}", "{\"\":0},".repeat(count));
        // Cut off a body, so that parsing it would cause a different error.
        let cut = tools(110_000).trim_end_matches("]}").to_owned();
        for body in [tools(110_000), cut] {
            let rejected = server.post(path, body).await;
            let error = &rejected.json()["error"];
            assert_eq!(
                (rejected.status.as_u16(), &error["code"]),
                (400, &json!("too_many_values")),
                "{path}"
            );
        }
        let fewer = server.post(path, tools(10_000)).await;
        assert_ne!(fewer.json()["error"]["code"], "too_many_values", "{path}");
    }
}

#[tokio::test]
async fn a_prompt_that_certainly_does_not_fit_is_rejected_without_being_tokenized() {
    let server = Server::repeating("x");
    let digits = "7".repeat(2000);
    for (path, body, param) in [
        (PATH, chat(json!({"messages": [{"role": "user", "content": digits}]})), "messages"),
        ("/v3/completions", json!({"model": "test-model", "prompt": digits}).to_string(), "prompt"),
        ("/v3/responses", json!({"model": "test-model", "input": digits}).to_string(), "input"),
    ] {
        let error = server.post(path, body).await.json()["error"].clone();
        assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!(param)));
        assert!(error["message"].as_str().unwrap().contains("at least"), "{error}");
    }
    // A truncated prompt is not rejected.
    let cut = json!({"model": "test-model", "prompt": digits, "truncate_prompt_tokens": 10, "max_tokens": 1});
    assert_eq!(server.post("/v3/completions", cut.to_string()).await.json()["usage"]["prompt_tokens"], 10);
}

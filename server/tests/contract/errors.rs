//! What is refused, and what clients are told of it: always OpenAI's error object.

use axum::http::StatusCode;
use serde_json::{Value, json};
use server::Metrics;

use crate::{Reply, Server, Setup, app, greedy, request, send, whole};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// An error of this status, class and code that blames this parameter.
#[track_caller]
fn check(reply: &Reply, status: u16, (kind, code, param): (&str, Value, Value), context: &str) {
    assert_eq!(reply.status, status, "{context}: {}", reply.text);
    assert_eq!(reply.headers["content-type"], "application/json", "{context}");
    let body = reply.json();
    assert_eq!(body.as_object().unwrap().len(), 1, "{context}: {body}");
    let error = &body["error"];
    assert_eq!(error.as_object().unwrap().len(), 4, "{context}: {body}");
    let message = error["message"].as_str().unwrap();
    assert!(!message.is_empty(), "{context}");
    assert_eq!(
        (&error["type"], &error["code"], &error["param"]),
        (&json!(kind), &code, &param),
        "{context}: {body}"
    );
    if code.is_null()
        && let Some(param) = param.as_str()
    {
        assert!(message.starts_with(param), "{context}: the message names the parameter: {message}");
    }
}

/// A refusal of what the client sent.
#[track_caller]
fn bad(reply: &Reply, param: &Value, context: &str) {
    check(reply, 400, ("invalid_request_error", Value::Null, param.clone()), context);
}

fn chat(more: &Value) -> Value {
    let mut request = greedy(&json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}));
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

fn completion(more: &Value) -> Value {
    let mut request = greedy(&json!({"prompt": "Once", "max_tokens": 4}));
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

#[tokio::test]
async fn what_is_no_json_object_is_refused() {
    let server = Server::new(&Setup::default());
    let deep = "[".repeat(10_000);
    let closed = format!("{deep}{}", "]".repeat(10_000));
    let within = format!("{{\"model\":\"sim\",\"messages\":{closed}}}");
    let huge = "{\"model\":\"sim\",\"temperature\":1e999}";
    for body in ["", "{", "nonsense", "[]", "\"text\"", "null", "{\"model\":}", &deep, &closed, &within, huge]
    {
        for path in [CHAT, COMPLETIONS] {
            let reply = send(&server.app, "POST", path, body.to_owned()).await;
            bad(&reply, &Value::Null, &body[..body.len().min(40)]);
        }
    }
}

#[tokio::test]
async fn a_value_of_the_wrong_type_is_refused_by_name() {
    let server = Server::new(&Setup::default());
    let shared = [
        ("model", json!(7)),
        ("stream", json!("yes")),
        ("stream_options", json!(true)),
        ("max_tokens", json!("4")),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!(1.5)),
        ("max_tokens", json!(5_000_000_000_u64)),
        ("max_completion_tokens", json!([])),
        ("min_tokens", json!(-1)),
        ("n", json!("2")),
        ("best_of", json!({})),
        ("stop", json!(7)),
        ("stop_token_ids", json!("a")),
        ("include_stop_str_in_output", json!(1)),
        ("ignore_eos", json!("no")),
        ("skip_special_tokens", json!(0)),
        ("seed", json!("seven")),
        ("temperature", json!("hot")),
        ("top_p", json!([0.5])),
        ("top_k", json!(1.5)),
        ("min_p", json!("0")),
        ("repetition_penalty", json!({})),
        ("frequency_penalty", json!("0")),
        ("presence_penalty", json!(true)),
        ("logit_bias", json!([1])),
        ("response_format", json!("json")),
    ];
    for (param, value) in shared {
        for (path, request) in
            [(CHAT, chat(&json!({param: value}))), (COMPLETIONS, completion(&json!({param: value})))]
        {
            bad(&server.post(path, &request).await, &json!(param), &format!("{path} {param}: {value}"));
        }
    }
    for (param, field, value) in [
        ("messages", "messages", json!("Hello")),
        ("messages[0]", "messages", json!(["Hello"])),
        ("messages[0].role", "messages", json!([{"content": "Hello"}])),
        ("messages[0].role", "messages", json!([{"role": 1, "content": "Hello"}])),
        ("messages[0].role", "messages", json!([{"role": "wizard", "content": "Hello"}])),
        ("messages[0].content", "messages", json!([{"role": "user"}])),
        ("messages[0].content", "messages", json!([{"role": "user", "content": 7}])),
        ("messages[0].content[0].type", "messages", json!([{"role": "user", "content": [{"text": "a"}]}])),
        ("messages[0].content[0].text", "messages", json!([{"role": "user", "content": [{"type": "text"}]}])),
        (
            "messages[0].content[0].type",
            "messages",
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ),
        ("logprobs", "logprobs", json!(3)),
        ("top_logprobs", "top_logprobs", json!("3")),
        ("tools", "tools", json!({})),
        ("documents", "documents", json!("a")),
        ("chat_template_kwargs", "chat_template_kwargs", json!([])),
        ("chat_template_kwargs.messages", "chat_template_kwargs", json!({"messages": []})),
        ("add_generation_prompt", "add_generation_prompt", json!("yes")),
    ] {
        let reply = server.post(CHAT, &chat(&json!({field: value}))).await;
        bad(&reply, &json!(param), &format!("{param}: {value}"));
    }
    for (param, field, value) in [
        ("prompt", "prompt", json!(7)),
        ("prompt", "prompt", json!({"text": "a"})),
        ("prompt[1]", "prompt", json!(["a", 1])),
        ("prompt[1]", "prompt", json!([1, "a"])),
        ("prompt[0]", "prompt", json!([-1])),
        ("logprobs", "logprobs", json!(true)),
        ("echo", "echo", json!("yes")),
        ("suffix", "suffix", json!(7)),
    ] {
        let reply = server.post(COMPLETIONS, &completion(&json!({field: value}))).await;
        bad(&reply, &json!(param), &format!("{param}: {value}"));
    }
}

#[tokio::test]
async fn a_value_out_of_range_is_refused_by_name() {
    let server = Server::new(&Setup::default());
    let shared = [
        ("max_tokens", json!({"max_tokens": 0})),
        ("max_completion_tokens", json!({"max_completion_tokens": 0})),
        ("min_tokens", json!({"min_tokens": 5})),
        ("n", json!({"n": 0})),
        ("n", json!({"n": 129})),
        ("n", json!({"n": 9})),
        ("best_of", json!({"best_of": 2})),
        ("temperature", json!({"temperature": -0.1})),
        ("temperature", json!({"temperature": 2.1})),
        ("top_p", json!({"top_p": 1.1})),
        ("top_k", json!({"top_k": -2})),
        ("min_p", json!({"min_p": -0.1})),
        ("repetition_penalty", json!({"repetition_penalty": 0})),
        ("frequency_penalty", json!({"frequency_penalty": 2.5})),
        ("presence_penalty", json!({"presence_penalty": -2.5})),
        ("logit_bias.x", json!({"logit_bias": {"x": 1}})),
        ("logit_bias.259", json!({"logit_bias": {"259": 1}})),
        ("logit_bias.1", json!({"logit_bias": {"1": 101}})),
        ("logit_bias.1", json!({"logit_bias": {"1": "much"}})),
        ("stop", json!({"stop": vec!["x"; 17]})),
        ("stop[1]", json!({"stop": ["x", "y".repeat(1025)]})),
        ("stop_token_ids[1]", json!({"stop_token_ids": [1, 259]})),
        ("stream_options", json!({"stream_options": {"include_usage": true}})),
        ("response_format", json!({"response_format": {"type": "json_object"}})),
        ("response_format.type", json!({"response_format": {}})),
    ];
    for (param, more) in shared {
        for (path, request) in [(CHAT, chat(&more)), (COMPLETIONS, completion(&more))] {
            let reply = server.post(path, &request).await;
            assert_eq!(reply.status, 400, "{path} {more}: {}", reply.text);
            assert_eq!(reply.json()["error"]["param"], param, "{path} {more}: {}", reply.text);
        }
    }
    for (param, more) in [
        ("messages", json!({"messages": []})),
        ("messages", json!({"messages": null})),
        ("top_logprobs", json!({"top_logprobs": 2})),
        ("top_logprobs", json!({"logprobs": true, "top_logprobs": 21})),
        ("tool_choice", json!({"tool_choice": "required"})),
    ] {
        bad(&server.post(CHAT, &chat(&more)).await, &json!(param), &more.to_string());
    }
    for (param, more) in [
        ("prompt", json!({"prompt": null})),
        ("prompt", json!({"prompt": ""})),
        ("prompt", json!({"prompt": []})),
        ("prompt", json!({"prompt": [[]]})),
        ("prompt", json!({"prompt": ["a", ""]})),
        ("prompt", json!({"prompt": vec!["a"; 129]})),
        ("n", json!({"prompt": vec!["a"; 65], "n": 2})),
        ("logprobs", json!({"logprobs": 21})),
        ("echo", json!({"logprobs": 1, "echo": true})),
        ("suffix", json!({"suffix": "end"})),
    ] {
        bad(&server.post(COMPLETIONS, &completion(&more)).await, &json!(param), &more.to_string());
    }
    let reply = server.post(COMPLETIONS, &completion(&json!({"prompt": [1, 259]}))).await;
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("prompt")));
}

#[tokio::test]
async fn what_does_not_fit_the_context_has_a_code_of_its_own() {
    let server = Server::new(&Setup { tokens_max: 128, ..Setup::default() });
    let long = "x".repeat(128);
    let message = json!([{"role": "user", "content": long}]);
    let code = json!("context_length_exceeded");
    for (path, param, request) in [
        (CHAT, "messages", chat(&json!({"messages": message}))),
        (CHAT, "max_tokens", chat(&json!({"max_tokens": 128}))),
        (CHAT, "max_completion_tokens", chat(&json!({"max_completion_tokens": 128}))),
        (COMPLETIONS, "prompt", completion(&json!({"prompt": long}))),
        (COMPLETIONS, "max_tokens", completion(&json!({"max_tokens": 125}))),
    ] {
        let expected = ("invalid_request_error", code.clone(), json!(param));
        check(&server.post(path, &request).await, 400, expected, param);
    }
    server.post(COMPLETIONS, &completion(&json!({"max_tokens": 124}))).await.ok();
}

#[tokio::test]
async fn what_is_not_there_is_an_error_object_too() {
    let server = Server::new(&Setup::default());
    let kind = "invalid_request_error";
    let unknown_model = || (kind, json!("model_not_found"), json!("model"));
    for (path, request) in
        [(CHAT, chat(&json!({"model": "other"}))), (COMPLETIONS, completion(&json!({"model": ""})))]
    {
        check(&server.post(path, &request).await, 404, unknown_model(), path);
    }
    check(&server.get("/v1/models/other").await, 404, unknown_model(), "models");
    for (path, request) in
        [(CHAT, chat(&json!({"model": null}))), (COMPLETIONS, completion(&json!({"model": null})))]
    {
        bad(&server.post(path, &request).await, &json!("model"), path);
    }
    for path in ["/", "/v1", "/v1/", "/v1/embeddings", "/v2/chat/completions", "/v1/chat/completions/"] {
        let expected = (kind, json!("unknown_url"), Value::Null);
        check(&server.get(path).await, 404, expected, path);
    }
    for (method, path) in
        [("GET", CHAT), ("PUT", COMPLETIONS), ("POST", "/v1/models"), ("DELETE", "/v3/models/sim")]
    {
        let reply = send(&server.app, method, path, String::new()).await;
        check(&reply, 405, (kind, json!("method_not_supported"), Value::Null), path);
        assert!(reply.headers.contains_key("allow"), "{method} {path}: what is allowed is told");
    }
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused() {
    let server = Server::new(&Setup { body_bytes_max: 4096, ..Setup::default() });
    let request = completion(&json!({"user": "x".repeat(4096)}));
    let expected = ("invalid_request_error", json!("request_too_large"), Value::Null);
    for path in [CHAT, COMPLETIONS] {
        check(&server.post(path, &request).await, 413, expected.clone(), path);
    }
    server.post(COMPLETIONS, &completion(&json!({"user": "x".repeat(1024)}))).await.ok();
}

#[tokio::test]
async fn fields_that_nobody_knows_and_nulls_are_ignored() {
    let server = Server::new(&Setup::default());
    let more = json!({
        "user": "me", "store": false, "service_tier": "auto", "metadata": {"a": [1]}, "no_such_field": [[]],
        "stop": null, "stream": null, "n": null, "top_p": null, "seed": null, "response_format": null,
    });
    for (path, request) in [(CHAT, chat(&more)), (COMPLETIONS, completion(&more))] {
        server.post(path, &request).await.ok();
    }
}

#[tokio::test]
async fn over_the_limit_of_requests_a_client_is_told_to_come_back() {
    let server = Server::new(&Setup { requests_max: 1, ..Setup::default() });
    let request = chat(&json!({"stream": true}));
    server.gate.allow(1);
    let open = server.open(CHAT, &request).await;
    assert_eq!(open.status(), StatusCode::OK);
    let refused = server.post(COMPLETIONS, &completion(&json!({}))).await;
    check(&refused, 429, ("rate_limit_error", json!("too_many_requests"), Value::Null), "second request");
    assert!(refused.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    server.gate.open();
    whole(open).await.events();
    server.post(COMPLETIONS, &completion(&json!({}))).await.ok();
}

#[tokio::test]
async fn over_the_limit_of_the_queue_a_client_is_told_to_come_back() {
    let server = Server::new(&Setup { sequences_max: 1, waiting_max: 1, ..Setup::default() });
    server.gate.allow(1);
    let running = server.open(CHAT, &chat(&json!({"stream": true}))).await;
    assert_eq!(running.status(), StatusCode::OK);

    let request_waiting = completion(&json!({}));
    let waiting = server.post(COMPLETIONS, &request_waiting);
    let refused = async {
        while server.engine.handle().waiting() == 0 {
            tokio::task::yield_now().await;
        }
        let refused = server.post(COMPLETIONS, &completion(&json!({}))).await;
        server.gate.open();
        refused
    };
    let (waiting, refused, running) = tokio::join!(waiting, refused, whole(running));
    check(&refused, 429, ("rate_limit_error", json!("queue_full"), Value::Null), "third request");
    assert!(refused.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    waiting.ok();
    running.events();
}

#[tokio::test]
async fn before_there_is_a_model_clients_are_told_to_come_back() {
    let app = app(&Setup::default(), Metrics::new("sim", "sim"));
    for path in [CHAT, COMPLETIONS] {
        let reply = send(&app, "POST", path, chat(&json!({})).to_string()).await;
        check(&reply, 503, ("server_error", json!("starting"), Value::Null), path);
        assert!(reply.headers.contains_key("retry-after"));
    }
    let ready = request(&app, "GET", "/v2/health/ready", String::new()).await;
    assert_eq!(ready.status(), StatusCode::SERVICE_UNAVAILABLE);
    let live = request(&app, "GET", "/v2/health/live", String::new()).await;
    assert_eq!(live.status(), StatusCode::OK);
}

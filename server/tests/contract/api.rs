//! What answers look like, whole and in chunks.

use axum::http::StatusCode;
use expect_test::{Expect, expect};
use serde_json::{Value, json};

use crate::{Reply, Server, Setup, greedy};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn server() -> Server {
    Server::new(&Setup::default())
}

fn chat(more: &Value) -> Value {
    let mut request = greedy(&json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}));
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

fn completion(more: &Value) -> Value {
    let mut request = greedy(&json!({"prompt": "Once upon a time", "max_tokens": 8}));
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

/// Compares, without what differs from run to run and version to version.
fn check(reply: &Reply, expected: &Expect) {
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.text);
    let value: Value = match reply.text.split_once('{') {
        Some(("data: ", _)) => reply.events().into(),
        _ => reply.json(),
    };
    let mut text = value.to_string();
    let first = value.get(0).unwrap_or(&value);
    for (name, placeholder) in [("id", "\"ID\""), ("created", "0"), ("system_fingerprint", "\"FP\"")] {
        text = text.replace(&format!("\"{name}\":{}", first[name]), &format!("\"{name}\":{placeholder}"));
    }
    expected.assert_eq(&text.replace("},{\"choices", "},\n{\"choices"));
}

fn texts(answer: &Value) -> Vec<&str> {
    let choices = answer["choices"].as_array().unwrap().iter();
    choices
        .map(|choice| choice.get("text").unwrap_or(&choice["message"]["content"]).as_str().unwrap())
        .collect()
}

/// The text of a choice of a stream, and why it ended.
fn streamed(events: &[Value], index: u64) -> (String, String) {
    let (mut text, mut reason) = (String::new(), None);
    for event in events {
        for choice in event["choices"].as_array().unwrap() {
            if choice["index"] != index {
                continue;
            }
            assert!(reason.is_none(), "nothing comes after the end: {choice}");
            text += choice.get("text").unwrap_or(&choice["delta"]["content"]).as_str().unwrap_or_default();
            reason = choice["finish_reason"].as_str().map(str::to_owned);
        }
    }
    (text, reason.unwrap())
}

#[tokio::test]
async fn a_chat_answer_has_openais_shape() {
    check(
        &server().post(CHAT, &chat(&json!({}))).await,
        &expect![[
            r#"{"id":"ID","object":"chat.completion","created":0,"model":"sim","choices":[{"index":0,"message":{"role":"assistant","content":"uprjdcpm","refusal":null},"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":24,"completion_tokens":8,"total_tokens":32,"prompt_tokens_details":{"cached_tokens":0}},"system_fingerprint":"FP"}"#
        ]],
    );
}

#[tokio::test]
async fn a_chat_stream_has_openais_chunks_and_its_usage_last() {
    let request = chat(&json!({"stream": true, "max_tokens": 1, "stream_options": {"include_usage": true}}));
    check(
        &server().post(CHAT, &request).await,
        &expect![[
            r#"[{"id":"ID","object":"chat.completion.chunk","created":0,"model":"sim","choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}],"usage":null,"system_fingerprint":"FP"},{"id":"ID","object":"chat.completion.chunk","created":0,"model":"sim","choices":[{"index":0,"delta":{"content":"u"},"logprobs":null,"finish_reason":null}],"usage":null,"system_fingerprint":"FP"},{"id":"ID","object":"chat.completion.chunk","created":0,"model":"sim","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null,"system_fingerprint":"FP"},{"id":"ID","object":"chat.completion.chunk","created":0,"model":"sim","choices":[],"usage":{"prompt_tokens":24,"completion_tokens":1,"total_tokens":25,"prompt_tokens_details":{"cached_tokens":0}},"system_fingerprint":"FP"}]"#
        ]],
    );
}

#[tokio::test]
async fn a_completion_has_openais_shape() {
    check(
        &server().post(COMPLETIONS, &completion(&json!({}))).await,
        &expect![[
            r#"{"id":"ID","object":"text_completion","created":0,"model":"sim","choices":[{"index":0,"text":"xciewsqk","logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":16,"completion_tokens":8,"total_tokens":24,"prompt_tokens_details":{"cached_tokens":0}},"system_fingerprint":"FP"}"#
        ]],
    );
}

#[tokio::test]
async fn a_completion_stream_has_openais_chunks_and_no_usage_unless_wanted() {
    let request = completion(&json!({"stream": true, "max_tokens": 1}));
    check(
        &server().post(COMPLETIONS, &request).await,
        &expect![[
            r#"[{"id":"ID","object":"text_completion","created":0,"model":"sim","choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":null}],"system_fingerprint":"FP"},{"id":"ID","object":"text_completion","created":0,"model":"sim","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],"system_fingerprint":"FP"}]"#
        ]],
    );
}

#[tokio::test]
async fn a_stream_says_what_a_whole_answer_says() {
    let server = server();
    for (path, request) in [(CHAT, chat(&json!({"n": 2}))), (COMPLETIONS, completion(&json!({"n": 2})))] {
        let whole = server.post(path, &request).await.ok();
        let mut request = request;
        request["stream"] = json!(true);
        request["stream_options"] = json!({"include_usage": true});
        let events = server.post(path, &request).await.events();
        for index in [0, 1] {
            let (text, reason) = streamed(&events, index);
            assert_eq!(text, texts(&whole)[index as usize]);
            assert_eq!(reason, "length");
        }
        let usage = &events.last().unwrap()["usage"];
        for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(usage[count], whole["usage"][count], "{path} {count}");
        }
        assert!(events[..events.len() - 1].iter().all(|event| event["usage"].is_null()));
        let ids: Vec<_> = events.iter().map(|event| &event["id"]).collect();
        assert!(ids.iter().all(|id| *id == ids[0]), "all chunks have one id");
    }
}

#[tokio::test]
async fn every_form_of_prompt_is_answered_and_choices_come_in_the_prompts_order() {
    let server = server();
    let one = |text: &str| completion(&json!({"prompt": text}));
    let first = texts(&server.post(COMPLETIONS, &one("ab")).await.ok())[0].to_owned();
    let second = texts(&server.post(COMPLETIONS, &one("xyz")).await.ok())[0].to_owned();
    assert_ne!(first, second, "the simulated model looks at its prompt");

    for (prompt, expected) in [
        (json!(["ab", "xyz"]), vec![&first, &second]),
        (json!([97, 98]), vec![&first]),
        (json!([[120, 121, 122], [97, 98]]), vec![&second, &first]),
    ] {
        let answer = server.post(COMPLETIONS, &completion(&json!({"prompt": prompt}))).await.ok();
        assert_eq!(texts(&answer), expected, "{prompt}");
    }

    let both = completion(&json!({"prompt": ["ab", "xyz"], "n": 2, "echo": true}));
    let answer = server.post(COMPLETIONS, &both).await.ok();
    let (first, second) = (format!("ab{first}"), format!("xyz{second}"));
    assert_eq!(texts(&answer), [&first, &first, &second, &second]);
    assert_eq!(answer["usage"]["prompt_tokens"], 5, "a prompt counts once for all its choices");
    assert_eq!(answer["usage"]["completion_tokens"], 32);
}

#[tokio::test]
async fn choices_of_a_seed_differ_and_come_again() {
    let server = server();
    let request = chat(&json!({"n": 3, "temperature": 1, "seed": 7, "max_tokens": 16}));
    let (first, again) = (server.post(CHAT, &request).await.ok(), server.post(CHAT, &request).await.ok());
    assert_eq!(texts(&first), texts(&again));
    let texts = texts(&first);
    assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2], "{texts:?}");
}

#[tokio::test]
async fn a_stop_string_across_tokens_ends_a_choice_before_it() {
    let server = server();
    for (path, request) in
        [(CHAT, chat(&json!({"max_tokens": 16}))), (COMPLETIONS, completion(&json!({"max_tokens": 16})))]
    {
        let answer = server.post(path, &request).await.ok();
        let text = texts(&answer)[0];
        let stop = &text[5..8];
        let end = text.find(stop).unwrap();
        for (include, expected) in [(false, &text[..end]), (true, &text[..end + 3])] {
            let mut request = request.clone();
            request["stop"] = json!(["not in it", stop]);
            request["include_stop_str_in_output"] = json!(include);
            let answer = server.post(path, &request).await.ok();
            assert_eq!(texts(&answer), [expected]);
            assert_eq!(answer["choices"][0]["finish_reason"], "stop");
            assert_eq!(answer["usage"]["completion_tokens"], end + 3);

            request["stream"] = json!(true);
            let events = server.post(path, &request).await.events();
            assert_eq!(streamed(&events, 0), (expected.to_owned(), "stop".to_owned()));
        }
    }
}

#[tokio::test]
async fn a_stop_token_ends_a_choice_and_is_no_text() {
    let server = server();
    let answer = server.post(COMPLETIONS, &completion(&json!({}))).await.ok();
    let text = texts(&answer)[0];
    let stop = text.as_bytes()[4];
    let end = text.find(char::from(stop)).unwrap();
    let answer = server.post(COMPLETIONS, &completion(&json!({"stop_token_ids": [stop]}))).await.ok();
    assert_eq!(texts(&answer), [&text[..end]]);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn chat_log_probabilities_have_an_entry_for_each_token() {
    let request = chat(&json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 5}));
    let server = server();
    let answer = server.post(CHAT, &request).await.ok();
    let logprobs = &answer["choices"][0]["logprobs"];
    assert!(logprobs["refusal"].is_null());
    let tokens = logprobs["content"].as_array().unwrap();
    let text: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!((tokens.len(), text.as_str()), (5, texts(&answer)[0]));
    for token in tokens {
        assert_eq!(token["bytes"], json!(token["token"].as_str().unwrap().as_bytes()));
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        let [first, second] = [0, 1].map(|index| top[index]["logprob"].as_f64().unwrap());
        assert!(second <= first && first <= 0.0, "{token}");
        // They are the model's own, before any bias.
        assert!(token["logprob"].as_f64().unwrap() <= first, "{token}");
    }

    let mut request = request;
    request["stream"] = json!(true);
    let events = server.post(CHAT, &request).await.events();
    let parts = events.iter().filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(&parts.flatten().cloned().collect::<Vec<_>>(), tokens);
}

#[tokio::test]
async fn completion_log_probabilities_are_parallel_lists() {
    let server = server();
    let answer = server.post(COMPLETIONS, &completion(&json!({"logprobs": 2, "max_tokens": 5}))).await.ok();
    let logprobs = &answer["choices"][0]["logprobs"];
    let list = |name: &str| logprobs[name].as_array().unwrap();
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3, 4]));
    let text: String = list("tokens").iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(text, texts(&answer)[0]);
    for ((token, logprob), top) in list("tokens").iter().zip(list("token_logprobs")).zip(list("top_logprobs"))
    {
        // The generated token is there too, whether or not it is one of the two.
        assert!((2..=3).contains(&top.as_object().unwrap().len()), "{top}");
        let [listed, told] = [&top[token.as_str().unwrap()], logprob].map(|value| value.as_f64().unwrap());
        assert!((listed - told).abs() < 1e-5, "{top} {logprob}");
    }
    let without = server.post(COMPLETIONS, &completion(&json!({}))).await.ok();
    assert!(without["choices"][0]["logprobs"].is_null());
}

#[tokio::test]
async fn a_prompt_seen_before_is_told_as_cached() {
    let server = server();
    let request = completion(&json!({"prompt": "a".repeat(100)}));
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!(cached(&server.post(COMPLETIONS, &request).await.ok()), 0);
    assert_eq!(cached(&server.post(COMPLETIONS, &request).await.ok()), 96, "six whole blocks of 16 tokens");
}

#[tokio::test]
async fn models_are_listed_and_found_under_all_their_names() {
    let server = server();
    let list = server.get("/v1/models").await.ok();
    assert_eq!(list["object"], "list");
    let names: Vec<&Value> = list["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(names, ["sim", "org/alias"]);
    for model in list["data"].as_array().unwrap() {
        let path = format!("/v1/models/{}", model["id"].as_str().unwrap());
        assert_eq!(&server.get(&path).await.ok(), model);
        assert_eq!(model["object"], "model");
        assert!(model["created"].as_u64().unwrap() > 0);
    }
    let answer = server.post(CHAT, &chat(&json!({"model": "org/alias"}))).await.ok();
    assert_eq!(answer["model"], "org/alias", "an answer has the name that the request has");
}

#[tokio::test]
async fn v3_is_v1() {
    let server = server();
    for (path, request) in [("chat/completions", chat(&json!({}))), ("completions", completion(&json!({})))] {
        let first = server.post(&format!("/v1/{path}"), &request).await.ok();
        let third = server.post(&format!("/v3/{path}"), &request).await.ok();
        assert_eq!(first["choices"], third["choices"]);
    }
    for path in ["models", "models/sim"] {
        assert_eq!(
            server.get(&format!("/v1/{path}")).await.ok(),
            server.get(&format!("/v3/{path}")).await.ok()
        );
    }
}

#[tokio::test]
async fn an_answer_has_its_id_in_a_header() {
    let reply = server().post(CHAT, &chat(&json!({}))).await;
    assert_eq!(reply.headers["x-request-id"].to_str().unwrap(), reply.ok()["id"]);
}

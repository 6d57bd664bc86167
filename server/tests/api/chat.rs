//! Tests the wire format of answers of `/chat/completions`.

use expect_test::expect;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use server_engine::sim::{SimFault, SimFaultKind};

use crate::harness::{Answer, GatedRunner, IM_END, RepeatingRunner, Server, Setup, chat, faulty, merged};

const PATH: &str = "/v3/chat/completions";
const TEXT: &str = "the quick brown fox jumps over the lazy dog ";

#[tokio::test]
async fn a_whole_answer_has_the_format_of_openai() {
    let server = Server::repeating(TEXT);
    let answer = server.post(PATH, chat(json!({}))).await;
    assert_eq!(answer.headers["x-request-id"].to_str().unwrap(), answer.json()["id"]);
    expect![[r#"
        200
        {
          "id": "chatcmpl-…",
          "object": "chat.completion",
          "created": 0,
          "model": "test-model",
          "choices": [
            {
              "index": 0,
              "message": {
                "role": "assistant",
                "content": "umps ove",
                "refusal": null
              },
              "logprobs": null,
              "finish_reason": "length"
            }
          ],
          "usage": {
            "prompt_tokens": 21,
            "completion_tokens": 8,
            "total_tokens": 29,
            "prompt_tokens_details": {
              "cached_tokens": 0
            }
          },
          "system_fingerprint": "fp_…"
        }
    "#]]
    .assert_eq(&answer.shown());
}

#[tokio::test]
async fn a_streamed_answer_has_the_format_of_openai() {
    let server = Server::repeating(TEXT);
    let answer = server.post(PATH, chat(json!({"stream": true, "max_tokens": 1}))).await;
    assert_eq!(answer.headers["cache-control"], "no-cache");
    expect![[r#"
        200
        {"id":"chatcmpl-…","object":"chat.completion.chunk","created":0,"model":"test-model","choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}],"system_fingerprint":"fp_…"}
        {"id":"chatcmpl-…","object":"chat.completion.chunk","created":0,"model":"test-model","choices":[{"index":0,"delta":{"content":"u"},"logprobs":null,"finish_reason":null}],"system_fingerprint":"fp_…"}
        {"id":"chatcmpl-…","object":"chat.completion.chunk","created":0,"model":"test-model","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"system_fingerprint":"fp_…"}
        [DONE]
    "#]].assert_eq(&answer.shown());
}

#[tokio::test]
async fn a_streamed_answer_with_usage_has_a_null_in_all_chunks_but_the_last() {
    let server = Server::repeating(TEXT);
    let parameters = json!({"stream": true, "max_tokens": 1, "stream_options": {"include_usage": true}});
    expect![[r#"
        200
        {"id":"chatcmpl-…","object":"chat.completion.chunk","created":0,"model":"test-model","choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}],"usage":null,"system_fingerprint":"fp_…"}
        {"id":"chatcmpl-…","object":"chat.completion.chunk","created":0,"model":"test-model","choices":[{"index":0,"delta":{"content":"u"},"logprobs":null,"finish_reason":null}],"usage":null,"system_fingerprint":"fp_…"}
        {"id":"chatcmpl-…","object":"chat.completion.chunk","created":0,"model":"test-model","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null,"system_fingerprint":"fp_…"}
        {"id":"chatcmpl-…","object":"chat.completion.chunk","created":0,"model":"test-model","choices":[],"usage":{"prompt_tokens":21,"completion_tokens":1,"total_tokens":22,"prompt_tokens_details":{"cached_tokens":0}},"system_fingerprint":"fp_…"}
        [DONE]
    "#]].assert_eq(&server.post(PATH, chat(parameters)).await.shown());
}

#[tokio::test]
async fn log_probabilities_are_returned_with_their_text_streamed_or_not() {
    let server = Server::repeating(TEXT);
    let parameters = json!({"max_tokens": 1, "logprobs": true, "top_logprobs": 2});
    let whole = server.post(PATH, chat(parameters)).await.json();
    let parameters = json!({"max_tokens": 1, "logprobs": true, "top_logprobs": 2, "stream": true});
    let streamed = server.post(PATH, chat(parameters)).await;
    let chunk: serde_json::Value = serde_json::from_str(streamed.events()[1]).unwrap();
    assert_eq!(whole["choices"][0]["logprobs"], chunk["choices"][0]["logprobs"]);
    expect![[r#"{"content":[{"token":"u","logprob":-0.08300683,"bytes":[117],"top_logprobs":[{"token":"u","logprob":-0.08300683,"bytes":[117]},{"token":"\u0000","logprob":-8.083007,"bytes":[0]}]}],"refusal":null}"#]].assert_eq(&whole["choices"][0]["logprobs"].to_string());
}

/// Log probabilities that have accumulated are encoded on another thread.
#[tokio::test]
async fn a_stream_that_is_read_late_has_all_log_probabilities() {
    let (runner, permits) = GatedRunner::new(TEXT);
    let server = Setup::new(runner).start();
    let mut parameters = json!({"max_tokens": 200, "logprobs": true, "top_logprobs": 2, "stream": true});
    permits.send(()).unwrap();
    // The stream begins with the first token. Nothing more is read until the engine has generated all other tokens.
    let unread = server.open(PATH, chat(parameters.clone())).await;
    drop(permits);
    server.block_until_computed(1);
    let streamed = Answer::read(unread).await;
    let chunks = streamed.events().into_iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
    let logprobs: Vec<Vec<Value>> = chunks
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array().cloned())
        .filter(|logprobs| !logprobs.is_empty())
        .collect();
    // Tokio makes a task yield after 128 events, so the 199 events that have accumulated are sent in parts.
    let largest = logprobs.iter().map(Vec::len).max();
    assert!(largest > Some(100), "{largest:?}");
    assert_eq!(logprobs.concat().len(), 200);
    parameters["stream"] = json!(false);
    let whole = server.post(PATH, chat(parameters)).await.json();
    assert_eq!(json!(logprobs.concat()), whole["choices"][0]["logprobs"]["content"]);
}

#[tokio::test]
async fn streamed_text_joined_is_the_whole_text() {
    let server = Server::repeating("Grüße, 世界! 🦊 — ");
    for max_tokens in [1, 2, 3, 17, 60] {
        let whole = server.post(PATH, chat(json!({"max_tokens": max_tokens}))).await;
        let streamed = server.post(PATH, chat(json!({"max_tokens": max_tokens, "stream": true}))).await;
        assert_eq!(whole.text(), streamed.text(), "{max_tokens} tokens");
        assert_eq!(whole.json()["usage"]["completion_tokens"], max_tokens);
    }
}

#[tokio::test]
async fn a_stop_string_ends_a_choice_before_its_text_and_counts_the_tokens_up_to_it() {
    let server = Server::repeating(TEXT);
    let plain = server.post(PATH, chat(json!({"max_tokens": 60}))).await.text();
    let (before, _) = plain.split_once("jumps").unwrap();
    for stream in [false, true] {
        let parameters = json!({"max_tokens": 60, "stop": ["jumpy", "jumps"], "stream": stream});
        let answer = server.post(PATH, chat(parameters)).await;
        assert_eq!(answer.text(), before);
        if !stream {
            assert_eq!(answer.json()["choices"][0]["finish_reason"], "stop");
            assert_eq!(answer.json()["usage"]["completion_tokens"], before.len() + "jumps".len());
        }
        let parameters = json!({"max_tokens": 60, "stop": "jumps", "include_stop_str_in_output": true});
        assert_eq!(server.post(PATH, chat(parameters)).await.text(), format!("{before}jumps"));
    }
    server.idle().await;
}

#[tokio::test]
async fn log_probabilities_end_with_the_text() {
    let server = Server::repeating(TEXT);
    let parameters = json!({"max_tokens": 60, "stop": "jumps", "logprobs": true});
    let answer = server.post(PATH, chat(parameters)).await;
    let tokens = answer.json()["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    let joined: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(joined, answer.text());
}

#[tokio::test]
async fn the_end_token_ends_a_choice_unless_it_is_ignored() {
    let script = "hello".bytes().map(u32::from).chain([IM_END]);
    let server = Setup::new(RepeatingRunner::new(script)).start();
    let answer = server.post(PATH, chat(json!({"max_tokens": 20}))).await;
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "stop");
    assert!("hello".ends_with(&answer.text()), "{}", answer.text());
    let answer = server.post(PATH, chat(json!({"max_tokens": 20, "ignore_eos": true}))).await;
    assert_eq!(answer.json()["usage"]["completion_tokens"], 20);
    assert!(!answer.text().contains("<|im_end|>"));
    let parameters = json!({"max_tokens": 20, "ignore_eos": true, "skip_special_tokens": false});
    assert!(server.post(PATH, chat(parameters)).await.text().contains("hello<|im_end|>hello"));
    let parameters =
        json!({"max_tokens": 20, "include_stop_str_in_output": true, "skip_special_tokens": false});
    assert!(server.post(PATH, chat(parameters)).await.text().ends_with("<|im_end|>"));
    let answer = server.post(PATH, chat(json!({"max_tokens": 20, "min_tokens": 12}))).await;
    assert!(answer.json()["usage"]["completion_tokens"].as_u64().unwrap() >= 12, "{}", answer.body);
}

#[tokio::test]
async fn stop_tokens_end_a_choice_and_have_no_text() {
    let server = Server::repeating(TEXT);
    let answer =
        server.post(PATH, chat(json!({"max_tokens": 60, "stop_token_ids": [u32::from(b'z')]}))).await;
    assert!(answer.text().ends_with("the la"), "{}", answer.text());
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn the_chunks_of_several_choices_have_their_numbers_and_each_choice_ends() {
    let server = Server::repeating(TEXT);
    let whole = server.post(PATH, chat(json!({"n": 3}))).await.json();
    let choices = whole["choices"].as_array().unwrap();
    let indexes: Vec<_> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(indexes, [0, 1, 2]);
    assert!(choices.iter().all(|choice| choice["message"] == choices[0]["message"]));
    assert_eq!(whole["usage"]["completion_tokens"], 24);

    let streamed = server.post(PATH, chat(json!({"n": 3, "stream": true}))).await;
    let chunks: Vec<serde_json::Value> =
        streamed.events().iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
    for index in 0..3 {
        let of_choice = |chunk: &&serde_json::Value| chunk["choices"][0]["index"] == index;
        let text: String = chunks
            .iter()
            .filter(of_choice)
            .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
            .collect();
        assert_eq!(text, choices[0]["message"]["content"]);
        let last = chunks.iter().rfind(of_choice).unwrap();
        assert_eq!(last["choices"][0]["finish_reason"], "length");
    }
}

#[tokio::test]
async fn equal_seeds_give_equal_answers_and_different_seeds_different_ones() {
    let server = Setup::new(faulty(Vec::new())).start();
    let sampled = async |seed: i64| {
        let parameters = json!({"temperature": 1.5, "max_tokens": 30, "seed": seed, "ignore_eos": true});
        server.post(PATH, chat(parameters)).await.text()
    };
    assert_eq!(sampled(-7).await, sampled(-7).await);
    assert_ne!(sampled(1).await, sampled(2).await);
    let unseeded = async || {
        server
            .post(PATH, chat(json!({"temperature": 1.5, "max_tokens": 30, "ignore_eos": true})))
            .await
            .text()
    };
    assert_ne!(unseeded().await, unseeded().await);
    let texts = async || {
        let parameters = json!({"temperature": 1.5, "n": 3, "seed": 7, "ignore_eos": true});
        let answer = server.post(PATH, chat(parameters)).await.json();
        [0, 1, 2].map(|choice| answer["choices"][choice]["message"]["content"].as_str().unwrap().to_owned())
    };
    let [one, two, three] = texts().await;
    assert!(one != two && two != three && three != one, "the choices of one request differ");
    assert_eq!(texts().await, [one, two, three]);
}

#[tokio::test]
async fn a_choice_that_a_stop_string_ended_is_not_computed_further() {
    let letters: serde_json::Map<_, _> =
        (b'a'..=b'w').map(|letter| (letter.to_string(), json!(100))).collect();
    let sampled = |more: serde_json::Value| {
        let parameters = json!({
            "n": 2, "temperature": 1.5, "seed": 3, "max_tokens": 40, "logit_bias": letters, "stream": true,
        });
        chat(merged(parameters, more))
    };
    let whole = Server::repeating("x").post(PATH, sampled(json!({"stream": false}))).await.json();
    let [one, other] = [0, 1].map(|choice| whole["choices"][choice]["message"]["content"].as_str().unwrap());
    let stop = &one[4..7];
    assert!(!other.contains(stop), "{stop} in {other}");

    let (runner, permits) = GatedRunner::new("x");
    let server = Setup::new(runner).start();
    for _ in 0..7 {
        permits.send(()).unwrap();
    }
    let mut response = server.open(PATH, sampled(json!({"stop": stop}))).await;
    let mut seen = String::new();
    while !seen.contains(r#""finish_reason":"stop""#) {
        let frame = response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
        seen += std::str::from_utf8(&frame).unwrap();
    }
    // The step that waits for a permit may have started before the choice ended. The next step contains only the other
    // sequence.
    permits.send(()).unwrap();
    server.engine.handle().load().wait_for(|load| load.load.running == 1).await.unwrap();
    drop(permits);
    let answer = crate::harness::Answer::read(response).await;
    assert!(answer.body.contains(r#""index":1"#) && answer.body.ends_with("data: [DONE]\n\n"));
    server.idle().await;
}

#[tokio::test]
async fn a_bias_and_a_penalty_reach_the_sampler() {
    let server = Server::repeating("a");
    let parameters = json!({"logit_bias": {"98": 100, "97": -100.0}});
    assert_eq!(server.post(PATH, chat(parameters)).await.text(), "bbbbbbbb");
    let parameters = json!({"presence_penalty": 2, "frequency_penalty": 2});
    assert!(server.post(PATH, chat(parameters)).await.text().starts_with("aa"));
}

#[tokio::test]
async fn cached_prompt_tokens_are_reported() {
    let server = Server::repeating(TEXT);
    let messages = json!([{"role": "user", "content": "x".repeat(100)}]);
    let cached = async || {
        let answer = server.post(PATH, chat(json!({"messages": messages}))).await.json();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached().await, 0);
    assert_eq!(cached().await, 112);
}

#[tokio::test]
async fn without_a_limit_an_answer_fills_the_context() {
    let server = Server::repeating(TEXT);
    let answer = server.post(PATH, chat(json!({"max_tokens": null}))).await.json();
    assert_eq!(answer["usage"]["total_tokens"], 512);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn a_refusal_of_the_assistant_is_part_of_the_prompt() {
    let server = Server::repeating("x");
    let tokens = async |said: Value| {
        let messages = json!([{"role": "user", "content": "Hi"}, said, {"role": "user", "content": "Hm"}]);
        let answer = server.post(PATH, chat(json!({"messages": messages}))).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["usage"]["prompt_tokens"].clone()
    };
    let plain = tokens(json!({"role": "assistant", "content": "I will not."})).await;
    let whole = json!({"role": "assistant", "content": null, "refusal": "I will not."});
    assert_eq!(tokens(whole).await, plain);
    let part = json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]});
    assert_eq!(tokens(part).await, plain);
    let empty = json!([{"role": "assistant", "content": [{"type": "refusal"}]}]);
    let refused = server.post(PATH, chat(json!({"messages": empty}))).await.json();
    assert_eq!(refused["error"]["param"], "messages[0].content[0].refusal");
}

#[tokio::test]
async fn the_last_message_is_continued_if_requested() {
    let server = Server::repeating("x");
    let messages =
        json!([{"role": "user", "content": "Tell"}, {"role": "assistant", "content": "Once upon "}]);
    let said = json!({"messages": messages, "continue_final_message": true, "return_token_ids": true});
    let answer = server.post(PATH, chat(said)).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "xxxxxxxx");
    let tokens = json!({"model": "test-model", "tokens": answer["prompt_token_ids"]});
    let prompt = server.post("/detokenize", tokens.to_string()).await.json()["prompt"].clone();
    assert!(prompt.as_str().unwrap().ends_with("assistant\nOnce upon "), "{prompt}");
    for parameters in [
        json!({"continue_final_message": true, "add_generation_prompt": true}),
        json!({"continue_final_message": true, "messages": [{"role": "user", "content": " "}]}),
    ] {
        let refused = server.post(PATH, chat(parameters)).await.json();
        assert_eq!(refused["error"]["param"], "continue_final_message", "{refused}");
    }
}

#[tokio::test]
async fn messages_may_have_parts_tools_and_roles_of_all_kinds() {
    let server = Server::repeating(TEXT);
    let tokens = async |messages: serde_json::Value| {
        let answer = server.post(PATH, chat(json!({"messages": messages}))).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let plain = tokens(json!([{"role": "user", "content": "a\nb"}])).await;
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    assert_eq!(tokens(json!([{"role": "user", "content": parts}])).await, plain);
    let developer = tokens(json!([{"role": "developer", "content": "x"}])).await;
    assert_eq!(tokens(json!([{"role": "system", "content": "x"}])).await, developer);
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}});
    tokens(json!([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]))
    .await;
    let answer = server.post(PATH, chat(json!({"add_generation_prompt": false}))).await.json();
    let with = server.post(PATH, chat(json!({}))).await.json();
    assert!(with["usage"]["prompt_tokens"].as_u64() > answer["usage"]["prompt_tokens"].as_u64());
}

#[tokio::test]
async fn a_step_that_fails_before_the_first_token_has_a_status() {
    let server = Setup::new(faulty(vec![SimFault { step: 0, kind: SimFaultKind::Step }])).start();
    for stream in [false, true] {
        let answer = server.post(PATH, chat(json!({"stream": stream}))).await;
        if stream {
            assert_eq!(answer.status, 200, "the engine continues to serve: {}", answer.body);
        } else {
            expect![[r#"
                500
                {
                  "error": {
                    "message": "failed to compute a step: a simulated fault",
                    "type": "server_error",
                    "param": null,
                    "code": "step_failed"
                  }
                }
            "#]]
            .assert_eq(&answer.shown());
        }
    }
}

#[tokio::test]
async fn a_later_failure_is_the_last_event_and_there_is_no_done() {
    let server = Setup::new(faulty(vec![SimFault { step: 2, kind: SimFaultKind::Step }])).start();
    let answer = server.post(PATH, chat(json!({"stream": true, "ignore_eos": true}))).await;
    let events = answer.events();
    assert!(!events.contains(&"[DONE]"));
    let last: serde_json::Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "step_failed");
    server.idle().await;
}

#[tokio::test]
async fn a_dead_engine_is_reported_and_the_server_is_not_ready() {
    let server = Setup::new(faulty(vec![SimFault { step: 0, kind: SimFaultKind::Fatal }])).start();
    assert_eq!(server.get("/v2/health/ready").await.status, 200);
    let answer = server.post(PATH, chat(json!({}))).await;
    assert!(answer.status.is_server_error(), "{}", answer.body);
    server.engine.handle().wait_for_failure().await;
    assert_eq!(server.get("/v2/health/ready").await.status, 503);
    assert_eq!(server.get("/v2/health/live").await.status, 200);
    assert_eq!(server.post(PATH, chat(json!({}))).await.status, 503);
}

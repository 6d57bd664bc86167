//! Tests the wire format of answers of `/completions`.

use expect_test::expect;
use serde_json::json;
use server_engine::TokenId;

use crate::harness::{IM_END, RepeatingRunner, Server, Setup, completion};

const PATH: &str = "/v3/completions";
const TEXT: &str = "the quick brown fox jumps over the lazy dog ";

#[tokio::test]
async fn a_whole_answer_has_the_format_of_openai() {
    let server = Server::repeating(TEXT);
    expect![[r#"
        200
        {
          "id": "cmpl-…",
          "object": "text_completion",
          "created": 0,
          "model": "test-model",
          "choices": [
            {
              "index": 0,
              "text": "e quick ",
              "logprobs": null,
              "finish_reason": "length"
            }
          ],
          "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 8,
            "total_tokens": 10,
            "prompt_tokens_details": {
              "cached_tokens": 0
            }
          },
          "system_fingerprint": "fp_…"
        }
    "#]]
    .assert_eq(&server.post(PATH, completion(json!({}))).await.shown());
}

#[tokio::test]
async fn a_streamed_answer_has_the_format_of_openai() {
    let server = Server::repeating(TEXT);
    let parameters = json!({"stream": true, "max_tokens": 1, "stream_options": {"include_usage": true}});
    expect![[r#"
        200
        {"id":"cmpl-…","object":"text_completion","created":0,"model":"test-model","choices":[{"index":0,"text":"e","logprobs":null,"finish_reason":null}],"usage":null,"system_fingerprint":"fp_…"}
        {"id":"cmpl-…","object":"text_completion","created":0,"model":"test-model","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],"usage":null,"system_fingerprint":"fp_…"}
        {"id":"cmpl-…","object":"text_completion","created":0,"model":"test-model","choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3,"prompt_tokens_details":{"cached_tokens":0}},"system_fingerprint":"fp_…"}
        [DONE]
    "#]].assert_eq(&server.post(PATH, completion(parameters)).await.shown());
}

#[tokio::test]
async fn streamed_choices_joined_are_the_whole_ones() {
    let server = Server::repeating(TEXT);
    let whole = server.post(PATH, completion(json!({"n": 2}))).await.json();
    let parameters = json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}});
    let answer = server.post(PATH, completion(parameters)).await;
    let (mut texts, mut usage) = ([String::new(), String::new()], serde_json::Value::Null);
    for chunk in
        answer.events().iter().filter_map(|event| serde_json::from_str::<serde_json::Value>(event).ok())
    {
        assert!(usage.is_null(), "nothing comes after the usage");
        usage = chunk["usage"].clone();
        for choice in chunk["choices"].as_array().unwrap() {
            texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
        }
    }
    for (choice, text) in texts.iter().enumerate() {
        assert_eq!(whole["choices"][choice]["text"], *text);
    }
    for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(usage[count], whole["usage"][count]);
    }
}

#[tokio::test]
async fn a_completion_has_sixteen_tokens_by_default() {
    let server = Server::repeating(TEXT);
    let answer = server.post(PATH, completion(json!({"max_tokens": null}))).await.json();
    assert_eq!(answer["usage"]["completion_tokens"], 16);
}

#[tokio::test]
async fn log_probabilities_are_parallel_lists() {
    let server = Server::repeating("aé");
    let answer = server.post(PATH, completion(json!({"logprobs": 1, "max_tokens": 3}))).await.json();
    expect![[r#"
        {
          "index": 0,
          "text": "�a�",
          "logprobs": {
            "tokens": [
              "bytes:\\xa9",
              "a",
              "bytes:\\xc3"
            ],
            "token_logprobs": [
              -0.08300694,
              -0.08300683,
              -0.08300694
            ],
            "top_logprobs": [
              {
                "bytes:\\xa9": -0.08300694
              },
              {
                "a": -0.08300683
              },
              {
                "bytes:\\xc3": -0.08300694
              }
            ],
            "text_offset": [
              0,
              1,
              2
            ]
          },
          "finish_reason": "length"
        }"#]]
    .assert_eq(&serde_json::to_string_pretty(&answer["choices"][0]).unwrap());
}

#[tokio::test]
async fn a_prompt_can_have_four_forms() {
    let server = Server::repeating(TEXT);
    let texts = async |prompt: serde_json::Value, n: u32| -> Vec<String> {
        let answer = server.post(PATH, completion(json!({"prompt": prompt, "n": n}))).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let choices = answer.json()["choices"].as_array().unwrap().clone();
        let indexes: Vec<_> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
        assert_eq!(indexes, (0..choices.len() as u64).collect::<Vec<_>>());
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
    };
    let one = texts(json!("ab"), 1).await;
    let other = texts(json!("abcd"), 1).await;
    assert_eq!(texts(json!(["ab"]), 1).await, one);
    assert_eq!(texts(json!([97, 98]), 1).await, one);
    let both = [one.clone(), other.clone()].concat();
    assert_eq!(texts(json!(["ab", "abcd"]), 1).await, both);
    assert_eq!(texts(json!([[97, 98], [97, 98, 99, 100]]), 1).await, both);
    // All choices of a prompt come before those of the next prompt.
    assert_eq!(texts(json!(["ab", "abcd"]), 2).await, [one.clone(), one, other.clone(), other].concat());
}

#[tokio::test]
async fn equal_prompts_have_independent_answers_unless_there_is_a_seed() {
    let server = Server::repeating(TEXT);
    let texts = async |seed: Option<u32>| {
        let sampled = json!({
            "prompt": ["ab", "ab"], "temperature": 1.5, "max_tokens": 30, "ignore_eos": true, "seed": seed,
        });
        let answer = server.post(PATH, completion(sampled)).await.json();
        [0, 1].map(|choice| answer["choices"][choice]["text"].as_str().unwrap().to_owned())
    };
    let [one, other] = texts(None).await;
    assert_ne!(one, other);
    let [one, other] = texts(Some(7)).await;
    assert_eq!(one, other);
}

#[tokio::test]
async fn choices_repeat_only_a_limited_amount_about_the_prompt() {
    let runner = RepeatingRunner::new(TEXT.bytes().map(TokenId::from));
    let server = Setup { max_model_len: 1024, ..Setup::new(runner) }.start();
    let message = async |n: u32| {
        let scored = json!({"prompt": "a".repeat(1000), "n": n, "prompt_logprobs": 20, "max_tokens": 1});
        server.post(PATH, completion(scored)).await.body
    };
    assert!(message(128).await.contains("exceed the limit of 2097152 log probabilities"));
    assert!(!message(32).await.contains("exceed the limit"));
}

#[tokio::test]
async fn an_echo_comes_before_the_text_streamed_or_not() {
    let server = Server::repeating(TEXT);
    let plain = server.post(PATH, completion(json!({}))).await.json();
    let plain = plain["choices"][0]["text"].as_str().unwrap();
    let whole = server.post(PATH, completion(json!({"echo": true}))).await.json();
    assert_eq!(whole["choices"][0]["text"], format!("Hi{plain}"));
    let streamed = server.post(PATH, completion(json!({"echo": true, "stream": true}))).await;
    let first: serde_json::Value = serde_json::from_str(streamed.events()[0]).unwrap();
    assert_eq!(first["choices"][0]["text"], "Hi");
    let tokens = server.post(PATH, completion(json!({"echo": true, "prompt": [72, 105]}))).await.json();
    assert_eq!(tokens["choices"][0]["text"], whole["choices"][0]["text"]);
}

#[tokio::test]
async fn an_echo_without_generated_tokens_has_the_finish_reason_length() {
    let server = Setup::new(RepeatingRunner::new([IM_END])).start();
    let answer = server.post(PATH, completion(json!({"echo": true, "max_tokens": 0}))).await.json();
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("Hi"), &json!("length")));
}

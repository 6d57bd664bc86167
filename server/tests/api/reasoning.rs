//! Tests the reasoning and the content of answers.

use std::time::Duration;

use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use crate::harness::{Answer, IM_END, Server, Setup, chat};

const PATH: &str = "/v3/chat/completions";
/// A template like Qwen 3's: the model opens its reasoning, unless thinking is disabled.
const QWEN: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}";
/// A template like DeepSeek R1's: the prompt opens the reasoning.
const OPENED: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";
const SAID: &str = "<think>\nFirst this,\nthen that.\n</think>\n\nThe answer.";

async fn message(server: &Server, mut parameters: Value) -> (Value, Value) {
    parameters["max_tokens"] = parameters.get("max_tokens").cloned().unwrap_or(json!(200));
    let whole = server.post(PATH, chat(parameters.clone())).await;
    assert_eq!(whole.status, 200, "{}", whole.body);
    let whole = whole.json();
    parameters["stream"] = json!(true);
    let streamed = server.post(PATH, chat(parameters)).await;
    let joined = |field: &str| {
        let events = streamed.events();
        let chunks = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
        chunks
            .filter_map(|chunk| Some(chunk["choices"][0]["delta"][field].as_str()?.to_owned()))
            .collect::<String>()
    };
    let choice = &whole["choices"][0];
    for field in ["content", "reasoning_content", "reasoning"] {
        assert_eq!(joined(field), choice["message"][field].as_str().unwrap_or_default(), "{field}");
    }
    (choice.clone(), whole["usage"].clone())
}

#[tokio::test]
async fn reasoning_has_both_names_and_is_counted() {
    let server = Setup::scripted(QWEN, &[], &[SAID]).start();
    let (choice, usage) = message(&server, json!({})).await;
    assert_eq!(choice["message"]["reasoning_content"], "First this,\nthen that.\n");
    assert_eq!(choice["message"]["reasoning"], choice["message"]["reasoning_content"]);
    assert_eq!(choice["message"]["content"], "\nThe answer.");
    assert_eq!(choice["finish_reason"], "stop");
    let thought = SAID.find("</think>").unwrap() + "</think>".len() - "<think".len();
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], thought);
}

#[tokio::test]
async fn reasoning_that_the_prompt_has_opened_ends_with_the_tag() {
    let server = Setup::scripted(OPENED, &[], &[SAID.strip_prefix("<think>\n").unwrap()]).start();
    let (choice, _) = message(&server, json!({})).await;
    assert_eq!(choice["message"]["reasoning_content"], "First this,\nthen that.\n");
    assert_eq!(choice["message"]["content"], "\nThe answer.");
}

#[tokio::test]
async fn reasoning_that_is_cut_off_stays_reasoning() {
    for (template, said) in [(QWEN, SAID), (OPENED, "First this,\nthen that.\n</think>x")] {
        let server = Setup::scripted(template, &[], &[said]).start();
        let (choice, _) = message(&server, json!({"max_tokens": 18})).await;
        assert_eq!(choice["message"]["content"], "");
        assert!(
            "First this,\nthen that.".starts_with(choice["message"]["reasoning_content"].as_str().unwrap())
        );
        assert_eq!(choice["finish_reason"], "length");
    }
}

#[tokio::test]
async fn special_tokens_mark_reasoning_although_they_have_no_text() {
    let server = Setup::scripted(QWEN, &["<think>", "</think>"], &[SAID]).start();
    let (choice, _) = message(&server, json!({})).await;
    assert_eq!(choice["message"]["reasoning_content"], "First this,\nthen that.\n");
    let (choice, _) = message(&server, json!({"skip_special_tokens": false, "max_tokens": 20})).await;
    assert!(choice["message"]["content"].as_str().unwrap().starts_with("<think>\nFirst"), "{choice}");
}

#[tokio::test]
async fn reasoning_is_omitted_if_requested() {
    let server = Setup::scripted(QWEN, &[], &[SAID]).start();
    let (choice, _) = message(&server, json!({"include_reasoning": false, "logprobs": true})).await;
    assert!(
        choice["message"].get("reasoning").is_none() && choice["message"].get("reasoning_content").is_none()
    );
    assert_eq!(choice["message"]["content"], "\nThe answer.");
}

#[tokio::test]
async fn a_stream_begins_with_the_first_token_of_omitted_reasoning() {
    let (setup, permits) = Setup::scripted(QWEN, &[], &[SAID]).gated();
    let server = setup.start();
    permits.send(()).unwrap();
    let body = chat(json!({"include_reasoning": false, "stream": true, "max_tokens": 200}));
    let began = async {
        let mut response = server.open(PATH, body).await;
        let first = response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
        (response, String::from_utf8(first.to_vec()).unwrap())
    };
    let began = tokio::time::timeout(Duration::from_secs(60), began).await;
    let (response, first) = began.expect("the stream does not begin");
    assert!(first.contains(r#""role":"assistant""#), "{first}");
    drop(permits);
    assert_eq!(Answer::read(response).await.text(), "\nThe answer.");
}

#[tokio::test]
async fn a_stop_string_does_not_end_reasoning() {
    let server = Setup::scripted(QWEN, &[], &[SAID]).start();
    let (choice, _) = message(&server, json!({"stop": ["that", "ans"]})).await;
    assert_eq!(choice["message"]["reasoning_content"], "First this,\nthen that.\n");
    assert_eq!(choice["message"]["content"], "\nThe ");
}

#[tokio::test]
async fn the_token_ids_of_parsed_text_are_all_generated_tokens() {
    let server = Setup::scripted(QWEN, &[], &[SAID]).start();
    let said: Vec<u32> = SAID.bytes().map(u32::from).collect();
    let until_stop = &said[..SAID.find("ans").unwrap() + "ans".len()];
    for (stop, ids) in [(Value::Null, &[&said[..], &[IM_END]].concat()[..]), (json!(["ans"]), until_stop)] {
        let (choice, usage) = message(&server, json!({"stop": stop, "return_token_ids": true})).await;
        assert_eq!(choice["token_ids"], json!(ids));
        assert_eq!(usage["completion_tokens"], ids.len());
    }
}

#[tokio::test]
async fn the_effort_reaches_the_template_and_variables_override_it() {
    let server = Setup::scripted(QWEN, &[], &["x"]).start();
    let tokens =
        async |parameters: Value| message(&server, parameters).await.1["prompt_tokens"].as_u64().unwrap();
    let thinking = tokens(json!({})).await;
    assert_eq!(tokens(json!({"reasoning_effort": "high"})).await, thinking);
    let closed = thinking + "<think>\n\n</think>\n\n".len() as u64;
    assert_eq!(tokens(json!({"reasoning_effort": "none"})).await, closed);
    assert_eq!(tokens(json!({"chat_template_kwargs": {"enable_thinking": false}})).await, closed);
    let both = json!({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(tokens(both).await, thinking);
    let said = |field: &str| {
        json!({"messages": [
            {"role": "user", "content": "x"}, {"role": "assistant", "content": "y", field: "because"},
        ]})
    };
    assert_eq!(tokens(said("reasoning")).await, tokens(said("reasoning_content")).await);
    assert!(tokens(said("reasoning")).await > tokens(said("unknown")).await);
}

//! Tests that the variables in `chat_template_kwargs` reach the chat template.

use serde_json::{Value, json};
use server::{Model, built_in_text_with};

use crate::harness::{RepeatingRunner, Server, Setup, chat, merged};

/// A template that renders some variables. The tests can decode the prompt from its token IDs in the answer, because
/// each token ID is the value of a byte.
const TEMPLATE: &str = "{{ messages[0].content }}|{{ tone | default('none') }}|{{ list | default([]) | join('+') }}|\
    {{ enable_thinking | default('unset') }}|{{ add_generation_prompt }}";

fn server() -> Server {
    let text = built_in_text_with(TEMPLATE, &[]).unwrap();
    let model = Some(Model::new(vec!["test-model".to_owned()], text, "test"));
    Setup { model, ..Setup::new(RepeatingRunner::new("Hello. ".bytes().map(u32::from))) }.start()
}

fn text(tokens: &Value) -> String {
    let bytes = tokens.as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as u8);
    String::from_utf8(bytes.collect()).unwrap()
}

/// Returns the prompt of a chat request with these parameters.
async fn prompt(parameters: Value) -> String {
    let all = merged(json!({"return_token_ids": true}), parameters);
    let answer = server().post("/v3/chat/completions", chat(all)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    text(&answer.json()["prompt_token_ids"])
}

#[tokio::test]
async fn variables_of_a_chat_reach_the_template() {
    assert_eq!(prompt(json!({})).await, "Hi|none||unset|True");
    let kwargs = json!({"tone": "dry", "list": [1, "b"], "unused": {"a": null}});
    assert_eq!(prompt(json!({"chat_template_kwargs": kwargs})).await, "Hi|dry|1+b|unset|True");
    // `chat_template_kwargs` override the variables that other parameters set.
    assert_eq!(prompt(json!({"reasoning_effort": "none"})).await, "Hi|none||False|True");
    let both = json!({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(prompt(both).await, "Hi|none||True|True");
    let refused = server().post("/v3/chat/completions", chat(json!({"chat_template_kwargs": "dry"}))).await;
    assert_eq!(
        (refused.status.as_u16(), refused.json()["error"]["param"].clone()),
        (400, json!("chat_template_kwargs"))
    );
}

#[tokio::test]
async fn variables_of_other_endpoints_reach_the_template() {
    let server = server();
    let kwargs = json!({"tone": "dry"});
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let body = json!({"model": "test-model", "messages": messages, "chat_template_kwargs": kwargs});
    let tokens = server.post("/tokenize", body.to_string()).await.json()["tokens"].clone();
    assert_eq!(text(&tokens), "Hi|dry||unset|True");
    let body = json!({"model": "test-model", "input": "Hi", "chat_template_kwargs": kwargs});
    let counted = server.post("/v3/responses/input_tokens", body.to_string()).await.json();
    assert_eq!(counted["input_tokens"], "Hi|dry||unset|True".len(), "{counted}");
}

//! Checks that valid requests are accepted, and that invalid requests are rejected with the right errors.

use expect_test::{Expect, expect};
use serde_json::{Value, json};
use server_openai::{ChatRequest, CompletionRequest, Content, Prompt, RequestError, Stop};

fn show(error: &RequestError) -> String {
    format!("{} | {}\n", error.param.as_deref().unwrap_or("-"), error.message)
}

fn assert_rejected(bodies: &[Value], expect: &Expect) {
    let shown: String = bodies
        .iter()
        .map(|body| {
            let body = body.to_string();
            match (ChatRequest::parse(body.as_bytes()), CompletionRequest::parse(body.as_bytes())) {
                (Err(error), _) | (Ok(_), Err(error)) => show(&error),
                (Ok(_), Ok(_)) => panic!("accepted: {body}"),
            }
        })
        .collect();
    expect.assert_eq(&shown);
}

#[test]
fn a_value_of_a_wrong_type_is_rejected_with_the_path_of_its_parameter() {
    assert_rejected(
        &[
            json!({"temperature": "hot"}),
            json!({"max_tokens": -1}),
            json!({"max_tokens": 1.5}),
            json!({"max_tokens": 4_294_967_296_u64}),
            json!({"stream": 1}),
            json!({"stream_options": {"include_usage": "yes"}}),
            json!({"stop": 5}),
            json!({"stop": ["a", 5]}),
            json!({"stop_token_ids": [1, "2"]}),
            json!({"model": 5}),
            json!({"seed": "x"}),
            json!({"logit_bias": [1]}),
            json!({"messages": "hello"}),
            json!({"messages": [5]}),
            json!({"messages": [{"content": "no role"}]}),
            json!({"messages": [{"role": "user", "content": 5}]}),
            json!({"messages": [{"role": "user", "content": [{"text": "no type"}]}]}),
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}),
            json!({"tools": [1]}),
            json!({"prompt": {}}),
            json!({"prompt": ["a", 1]}),
            json!({"prompt": [1, "a"]}),
            json!({"prompt": [[1], [-1]]}),
            json!({"logprobs": "all"}),
        ],
        &expect![[r#"
            temperature | temperature: "hot" is not a number
            max_tokens | max_tokens: -1 is not an integer from 0 to 4294967295
            max_tokens | max_tokens: 1.5 is not an integer from 0 to 4294967295
            max_tokens | max_tokens: 4294967296 is not an integer from 0 to 4294967295
            stream | stream: 1 is not a boolean
            stream_options.include_usage | stream_options.include_usage: "yes" is not a boolean
            stop | stop: 5 is not a string or an array of strings
            stop[1] | stop[1]: 5 is not a string
            stop_token_ids[1] | stop_token_ids[1]: "2" is not an integer from 0 to 4294967295
            model | model: 5 is not a string
            seed | seed: "x" is not an integer
            logit_bias | logit_bias: an array is not an object
            messages | messages: "hello" is not an array
            messages[0] | messages[0]: 5 is not an object
            messages[0].role | messages[0].role: is missing
            messages[0].content | messages[0].content: 5 is not a string or an array of content parts
            messages[0].content[0].type | messages[0].content[0].type: is missing
            messages[0].content[0].text | messages[0].content[0].text: 1 is not a string
            tools[0] | tools[0]: 1 is not an object
            prompt | prompt: an object is not a string, an array of strings, an array of tokens or an array of arrays of tokens
            prompt[1] | prompt[1]: 1 is not a string
            prompt[1] | prompt[1]: "a" is not an integer from 0 to 4294967295
            prompt[1][0] | prompt[1][0]: -1 is not an integer from 0 to 4294967295
            logprobs | logprobs: "all" is not a boolean
        "#]],
    );
}

#[test]
fn a_body_that_is_not_an_object_is_rejected_without_a_parameter() {
    let deep = "[".repeat(10_000);
    let closed = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let shown: String =
        ["", "{", "[]", "5", "{\"a\":1} x", "{\"a\":1e999}", "\u{feff}{}", deep.as_str(), closed.as_str()]
            .iter()
            .map(|body| show(&ChatRequest::parse(body.as_bytes()).unwrap_err()))
            .collect();
    expect![[r#"
        - | failed to parse the request body as JSON: EOF while parsing a value at line 1 column 0
        - | failed to parse the request body as JSON: EOF while parsing an object at line 1 column 1
        - | the request body must be a JSON object
        - | the request body must be a JSON object
        - | failed to parse the request body as JSON: trailing characters at line 1 column 9
        - | failed to parse the request body as JSON: number out of range at line 1 column 10
        - | failed to parse the request body as JSON: expected value at line 1 column 1
        - | failed to parse the request body as JSON: recursion limit exceeded at line 1 column 128
        - | failed to parse the request body as JSON: recursion limit exceeded at line 1 column 128
    "#]]
    .assert_eq(&shown);
    assert_eq!(ChatRequest::parse(b"{\"a\": \"\xff\"}").unwrap_err().param, None);
}

#[test]
fn unknown_fields_and_nulls_are_ignored() {
    let body = json!({
        "model": "m", "user": "u", "store": {"x": [1]}, "temperature": null, "stop": null, "n": null,
        "messages": [{"role": "user", "content": null, "audio": {}}],
    });
    let request = ChatRequest::parse(body.to_string().as_bytes()).unwrap();
    assert_eq!(request.generation.model.as_deref(), Some("m"));
    assert_eq!(request.generation.temperature, None);
    assert_eq!(request.messages.unwrap()[0].content, None);
}

#[test]
fn a_prompt_has_four_forms_and_a_stop_has_two_forms() {
    let prompt = |prompt: Value| {
        CompletionRequest::parse(json!({"prompt": prompt}).to_string().as_bytes()).unwrap().prompt.unwrap()
    };
    assert_eq!(prompt(json!("a")), Prompt::Texts(vec!["a".to_owned()]));
    assert_eq!(prompt(json!(["a", "b"])), Prompt::Texts(vec!["a".to_owned(), "b".to_owned()]));
    assert_eq!(prompt(json!([1, 2])), Prompt::Tokens(vec![vec![1, 2]]));
    assert_eq!(prompt(json!([[1, 2], [3]])), Prompt::Tokens(vec![vec![1, 2], vec![3]]));
    let stop = |stop: Value| {
        ChatRequest::parse(json!({"stop": stop}).to_string().as_bytes()).unwrap().generation.stop.unwrap()
    };
    assert_eq!(stop(json!("a")), Stop(vec!["a".to_owned()]));
    assert_eq!(stop(json!(["a", "b"])), Stop(vec!["a".to_owned(), "b".to_owned()]));
}

#[test]
fn a_message_keeps_the_fields_that_templates_read() {
    let body = json!({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]});
    let request = ChatRequest::parse(body.to_string().as_bytes()).unwrap();
    let messages = request.messages.unwrap();
    assert!(matches!(&messages[0].content, Some(Content::Parts(parts)) if parts.len() == 1));
    assert_eq!(serde_json::to_value(&messages).unwrap(), body["messages"]);
}

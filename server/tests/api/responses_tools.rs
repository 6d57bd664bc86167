//! Tests tools on `/responses` that are not functions: tools that agents such as Codex declare are offered to the model
//! or ignored with a warning, and calls are reported in the form in which the tools were declared.

use std::time::Duration;

use axum::body::Body;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use crate::harness::{Server, Setup, merged};
use crate::responses::{PATH, QWEN, events, request, weather};

const READ: &str =
    "<tool_call>\n{\"name\": \"mcp__files__read\", \"arguments\": {\"path\": \"a.txt\"}}\n</tool_call>";
const PATCH: &str = "<tool_call>\n{\"name\": \"apply_patch\", \"arguments\": {\"input\": \"*** Begin\\n+a\\n\"}}\n</tool_call>";

fn tools() -> Value {
    json!([
        weather(),
        {"type": "custom", "name": "apply_patch", "description": "Edits files."},
        {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [
            {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
        ]},
        {"type": "web_search", "external_web_access": true},
        {"type": "image_generation", "output_format": "png"},
    ])
}

fn asks(parameters: Value) -> String {
    request(merged(json!({"tools": tools(), "max_output_tokens": 400}), parameters))
}

fn server(answers: &[&str]) -> Server {
    Setup::scripted(QWEN, &["<think>", "</think>"], answers).start()
}

#[tokio::test]
async fn the_tools_of_an_agent_are_accepted_and_ignored_ones_cause_warnings() {
    let server = server(&["Hello."]);
    let response = server.post(PATH, asks(json!({}))).await;
    assert_eq!(response.status, 200, "{}", response.body);
    let response = response.json();
    let shown: Vec<&Value> = response["tools"].as_array().unwrap().iter().map(|tool| &tool["name"]).collect();
    assert_eq!(shown, ["weather", "apply_patch", "mcp__files"]);
    let warned: Vec<(&Value, &Value)> = response["warnings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|warning| (&warning["code"], &warning["param"]))
        .collect();
    let code = json!("unsupported_tool");
    assert_eq!(warned, [(&code, &json!("tools[3]")), (&code, &json!("tools[4]"))]);
    // A response without warnings has no `warnings` member.
    let plain = server.post(PATH, request(json!({"tools": [weather()]}))).await.json();
    assert!(plain.get("warnings").is_none(), "{plain}");
}

#[tokio::test]
async fn a_call_of_a_member_of_a_namespace_names_the_namespace() {
    let server = server(&[READ, "Read."]);
    let first = server.post(PATH, asks(json!({}))).await.json();
    let call = &first["output"][0];
    assert_eq!(
        (&call["type"], &call["namespace"], &call["name"], &call["arguments"]),
        (&json!("function_call"), &json!("mcp__files"), &json!("read"), &json!("{\"path\": \"a.txt\"}"))
    );
    // Stored items and items that the client repeats produce the same prompt.
    let output = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "text"});
    let continued = asks(json!({"previous_response_id": first["id"], "input": [output]}));
    let continued = server.post(PATH, continued).await.json();
    let again = asks(json!({"input": [{"role": "user", "content": "Hi"}, call, output]}));
    let again = server.post(PATH, again).await.json();
    assert_eq!(continued["usage"]["input_tokens"], again["usage"]["input_tokens"], "{continued} {again}");
    assert_eq!(continued["output"][0]["content"][0]["text"], "Read.");
}

#[tokio::test]
async fn a_call_of_a_custom_tool_has_text_for_its_input() {
    let server = server(&[PATCH, "Done."]);
    let first = server.post(PATH, asks(json!({}))).await.json();
    let call = &first["output"][0];
    assert_eq!(
        (&call["type"], &call["name"], &call["input"], &call["status"]),
        (&json!("custom_tool_call"), &json!("apply_patch"), &json!("*** Begin\n+a\n"), &json!("completed"))
    );
    let output = json!({"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"});
    let continued = asks(json!({"previous_response_id": first["id"], "input": [output]}));
    let continued = server.post(PATH, continued).await.json();
    assert_eq!(continued["output"][0]["content"][0]["text"], "Done.", "{continued}");
    let again = asks(json!({"input": [{"role": "user", "content": "Hi"}, call, output]}));
    let again = server.post(PATH, again).await.json();
    assert_eq!(continued["usage"]["input_tokens"], again["usage"]["input_tokens"], "{continued} {again}");
    let items = server.get(&format!("{PATH}/{}/input_items", continued["id"].as_str().unwrap())).await.json();
    let kinds: Vec<&Value> = items["data"].as_array().unwrap().iter().map(|item| &item["type"]).collect();
    assert!(kinds.contains(&&json!("custom_tool_call_output")), "{items}");
}

#[tokio::test]
async fn a_streamed_call_of_a_custom_tool_has_its_own_events() {
    let answer = server(&[PATCH]).post(PATH, asks(json!({"stream": true}))).await;
    let events = events(&answer);
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
    let input = json!("*** Begin\n+a\n");
    let deltas: String = of("response.custom_tool_call_input.delta")
        .iter()
        .map(|event| event["delta"].as_str().unwrap())
        .collect();
    assert_eq!(json!(deltas), input);
    assert_eq!(of("response.custom_tool_call_input.done")[0]["input"], input);
    assert_eq!(of("response.function_call_arguments.delta").len(), 0);
    assert_eq!(of("response.output_item.done")[0]["item"]["input"], input);
    assert_eq!(of("response.completed")[0]["response"]["output"][0]["input"], input);
}

#[tokio::test(start_paused = true)]
async fn a_stream_has_comments_while_the_input_of_a_custom_tool_is_generated() {
    let patch = PATCH.replace("+a", &format!("+{}", "a".repeat(2000)));
    for background in [false, true] {
        let (setup, permits) = Setup::scripted(QWEN, &[], &[&patch]).gated();
        let server = setup.start();
        // These permits are enough for the prompt and the beginning of the tool's input, but not for its end.
        for _ in 0..500 {
            permits.send(()).unwrap();
        }
        let parameters = json!({"stream": true, "background": background, "max_output_tokens": 4000});
        let mut body = server.open(PATH, asks(parameters)).await.into_body();
        // While this test waits, Tokio advances the paused clock, so keep-alive comments may also precede the call.
        while !sent(&mut body).await.contains("response.output_item.added") {}
        for _ in 0..3 {
            assert_eq!(sent(&mut body).await, ": keep-alive\n\n", "background: {background}");
        }
        drop(permits);
        let rest = body.collect().await.unwrap().to_bytes();
        assert!(String::from_utf8(rest.to_vec()).unwrap().contains("response.completed"));
    }
}

/// Returns the next bytes of a stream, which must be sent within 11 seconds.
async fn sent(body: &mut Body) -> String {
    let frame = tokio::time::timeout(Duration::from_secs(11), body.frame()).await.expect("a silent stream");
    let bytes = frame.unwrap().unwrap().into_data().unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[tokio::test]
async fn a_call_of_a_custom_tool_that_is_cut_off_retains_its_input() {
    // This limit cuts off the input after its `+`.
    let tokens = PATCH.find("+a").unwrap() + 1;
    let answer = server(&[PATCH]).post(PATH, asks(json!({"max_output_tokens": tokens}))).await.json();
    let call = &answer["output"][0];
    assert_eq!(
        (&call["type"], &call["status"]),
        (&json!("custom_tool_call"), &json!("incomplete")),
        "{answer}"
    );
    assert_eq!(call["input"], "*** Begin\n+");
}

#[tokio::test]
async fn a_choice_may_name_a_custom_tool_or_a_member_of_a_namespace() {
    let server = server(&[PATCH]);
    for choice in [
        json!({"type": "custom", "name": "apply_patch"}),
        json!({"type": "function", "namespace": "mcp__files", "name": "read"}),
        json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, {"type": "function", "name": "weather"}]}),
    ] {
        let answer = server.post(PATH, asks(json!({"tool_choice": choice}))).await;
        assert_eq!(answer.status, 200, "{choice}: {}", answer.body);
        assert_eq!(answer.json()["tool_choice"], choice);
    }
    let refused = server.post(PATH, asks(json!({"tool_choice": {"type": "web_search"}}))).await;
    assert_eq!(
        (refused.status.as_u16(), refused.json()["error"]["param"].clone()),
        (400, json!("tool_choice.type"))
    );
}

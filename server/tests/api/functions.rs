//! Tests `functions` and `function_call`, the deprecated forms of `tools` and `tool_choice`.

use serde_json::{Value, json};

use crate::harness::{Setup, chat};
use crate::tools::{CALL, HERMES};

const PATH: &str = "/v3/chat/completions";

fn function() -> Value {
    json!({
        "name": "weather", "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    })
}

#[tokio::test]
async fn a_call_has_the_deprecated_form_streamed_or_not() {
    let server = Setup::scripted(HERMES, &[], &[CALL]).start();
    let parameters = json!({"max_tokens": 400, "functions": [function()]});
    let answer = server.post(PATH, chat(parameters.clone())).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "function_call", "{answer}");
    let message = &choice["message"];
    assert_eq!(message["function_call"], json!({"name": "weather", "arguments": "{\"city\": \"Paris\"}"}));
    assert!(message["content"].is_null() && message.get("tool_calls").is_none(), "{message}");

    let mut streamed = parameters;
    streamed["stream"] = json!(true);
    let answer = server.post(PATH, chat(streamed)).await;
    let (mut names, mut arguments, mut reason) = (Vec::new(), String::new(), Value::Null);
    for event in answer.events().iter().filter_map(|event| serde_json::from_str::<Value>(event).ok()) {
        let choice = &event["choices"][0];
        assert!(choice["delta"].get("tool_calls").is_none(), "{event}");
        names.extend(choice["delta"]["function_call"]["name"].as_str().map(str::to_owned));
        arguments += choice["delta"]["function_call"]["arguments"].as_str().unwrap_or_default();
        reason = choice["finish_reason"].clone();
    }
    assert_eq!((names, arguments.as_str()), (vec!["weather".to_owned()], "{\"city\": \"Paris\"}"));
    assert_eq!(reason, "function_call");
}

#[tokio::test]
async fn a_required_function_is_called_and_none_disables_calls() {
    let server = Setup::scripted(HERMES, &[], &["I do not like functions."]).start();
    let ask = async |choice: Value| {
        let now = json!({"name": "now"});
        let parameters = json!({"max_tokens": 400, "functions": [function(), now], "function_call": choice});
        server.post(PATH, chat(parameters)).await.json()["choices"][0]["message"].clone()
    };
    assert_eq!(ask(json!({"name": "now"})).await["function_call"], json!({"name": "now", "arguments": "{}"}));
    assert_eq!(ask(json!("none")).await["content"], "I do not like functions.");
}

#[tokio::test]
async fn a_history_of_functions_is_the_history_of_tools() {
    let server = Setup::scripted(HERMES, &[], &["Fine."]).start();
    let call = json!({"name": "weather", "arguments": "{\"city\": \"Paris\"}"});
    let tokens = async |messages: Value| {
        let parameters = json!({"model": "test-model", "messages": messages, "max_tokens": 9});
        let answer = server.post(PATH, parameters.to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["usage"]["prompt_tokens"].clone()
    };
    let former = tokens(json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "function_call": call},
        {"role": "function", "name": "weather", "content": "20 degrees"},
    ]));
    let present = tokens(json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "20 degrees"},
    ]));
    assert_eq!(former.await, present.await);
}

#[tokio::test]
async fn errors_name_the_parameters_of_functions() {
    let server = Setup::scripted(HERMES, &[], &[CALL]).start();
    let tool = json!({"type": "function", "function": function()});
    let unknown_type = json!({"name": "f", "strict": true, "parameters": {"type": "strin"}});
    let called = json!([{"role": "assistant", "function_call": {"arguments": "{}"}}]);
    for (wrong, param) in [
        (json!({"function_call": "auto"}), "function_call"),
        (json!({"functions": [function()], "tools": [tool]}), "functions"),
        (json!({"functions": [{"name": ""}]}), "functions[0].name"),
        (json!({"functions": [{"name": "a"}, {"name": "a"}]}), "functions[1].name"),
        (json!({"functions": [function()], "function_call": {"name": "other"}}), "function_call.name"),
        (json!({"functions": [unknown_type]}), "functions[0].parameters.type"),
        (json!({"messages": called}), "messages[0].function_call.name"),
        (json!({"messages": [{"role": "function", "content": "x"}]}), "messages[0].name"),
    ] {
        let answer = server.post(PATH, chat(wrong.clone())).await;
        assert_eq!(answer.status, 400, "{wrong} {}", answer.body);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().starts_with(param), "{error}");
    }
}

//! Tests tool calls on `/chat/completions` in several formats, with and without streaming.

use expect_test::expect;
use serde_json::{Value, json};

use crate::harness::{Server, Setup, chat, merged};

const PATH: &str = "/v3/chat/completions";

/// A template that renders tools, like Qwen's.
pub(crate) const HERMES: &str = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}\
    {% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\
    {% for call in message.tool_calls or [] %}<tool_call>\n{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// A template that renders no tools.
const PLAIN: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

pub(crate) const CALL: &str =
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>";

fn weather() -> Value {
    json!({"type": "function", "function": {
        "name": "weather", "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    }})
}

fn with_tools(parameters: Value) -> String {
    let all =
        json!({"max_tokens": 400, "tools": [weather(), {"type": "function", "function": {"name": "now"}}]});
    chat(merged(all, parameters))
}

/// Returns the non-streamed answer, and checks that streaming returns the same choices, except for the IDs of calls.
async fn answered(server: &Server, parameters: Value) -> Value {
    let whole = server.post(PATH, with_tools(parameters.clone())).await;
    assert_eq!(whole.status, 200, "{}", whole.body);
    let mut parameters = parameters;
    parameters["stream"] = json!(true);
    let streamed = server.post(PATH, with_tools(parameters)).await;
    let whole = whole.json();
    for choice in whole["choices"].as_array().unwrap() {
        let mut folded = folded(&streamed.events(), choice["index"].as_u64().unwrap());
        let mut choice = choice.clone();
        for message in [&mut folded["message"], &mut choice["message"]] {
            for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
                check_id(&call["id"].take());
            }
        }
        assert_eq!(folded["message"], choice["message"], "{}", streamed.body);
        assert_eq!(folded["finish_reason"], choice["finish_reason"]);
        let tokens = |choice: &Value| choice["logprobs"]["content"].clone();
        if !tokens(&choice).is_null() {
            assert_eq!(folded["tokens"], tokens(&choice));
        }
    }
    whole
}

fn check_id(id: &Value) {
    let letters = id.as_str().and_then(|id| id.strip_prefix("call_")).unwrap_or_default();
    assert!(letters.len() == 24 && letters.bytes().all(|letter| letter.is_ascii_alphanumeric()), "{id}");
}

/// Joins the chunks of a choice, as the official clients do.
fn folded(events: &[&str], index: u64) -> Value {
    let (mut content, mut reasoning, mut tokens) = (String::new(), String::new(), Vec::new());
    let mut calls: Vec<Value> = Vec::new();
    let mut reason = Value::Null;
    let chunks = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
    for chunk in chunks.filter(|chunk| chunk["choices"][0]["index"] == index) {
        let choice = &chunk["choices"][0];
        assert!(reason.is_null(), "nothing comes after the end: {chunk}");
        reason = choice["finish_reason"].clone();
        tokens.extend(choice["logprobs"]["content"].as_array().into_iter().flatten().cloned());
        let delta = &choice["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
        assert_eq!(delta["reasoning"], delta["reasoning_content"], "both names have the same value");
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let at = call["index"].as_u64().unwrap() as usize;
            if at == calls.len() {
                assert_eq!(call["function"]["arguments"], "", "a call begins without arguments: {call}");
                let mut call = call.clone();
                call.as_object_mut().unwrap().remove("index");
                calls.push(call);
            } else {
                assert_eq!(at + 1, calls.len(), "calls come one after the other: {call}");
                assert!(
                    call.get("id").is_none() && call["function"].get("name").is_none(),
                    "the ID and the name are sent only once: {call}"
                );
                let piece = call["function"]["arguments"].as_str().unwrap();
                let arguments = calls[at]["function"]["arguments"].as_str().unwrap();
                calls[at]["function"]["arguments"] = json!(format!("{arguments}{piece}"));
            }
        }
    }
    let content = if content.is_empty() && !calls.is_empty() { Value::Null } else { json!(content) };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !reasoning.is_empty() {
        message["reasoning_content"] = json!(reasoning);
        message["reasoning"] = json!(reasoning);
    }
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
    }
    json!({"message": message, "finish_reason": reason, "tokens": tokens})
}

fn calls(answer: &Value) -> Vec<(String, String)> {
    let calls = answer["choices"][0]["message"]["tool_calls"].as_array().into_iter().flatten();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    calls.map(|call| (text(&call["function"]["name"]), text(&call["function"]["arguments"]))).collect()
}

fn call(name: &str, arguments: &str) -> (String, String) {
    (name.to_owned(), arguments.to_owned())
}

#[tokio::test]
async fn a_whole_answer_contains_the_call() {
    let server = Setup::scripted(HERMES, &[], &[CALL]).start();
    let mut answer = answered(&server, json!({})).await;
    answer["choices"][0]["message"]["tool_calls"][0]["id"] = json!("call_…");
    expect![[r#"
        {
          "index": 0,
          "message": {
            "role": "assistant",
            "content": null,
            "refusal": null,
            "tool_calls": [
              {
                "id": "call_…",
                "type": "function",
                "function": {
                  "name": "weather",
                  "arguments": "{\"city\": \"Paris\"}"
                }
              }
            ]
          },
          "logprobs": null,
          "finish_reason": "tool_calls"
        }"#]]
    .assert_eq(&serde_json::to_string_pretty(&answer["choices"][0]).unwrap());
}

#[tokio::test]
async fn a_streamed_answer_contains_the_call_in_parts() {
    let server = Setup::scripted(HERMES, &[], &[&format!("Hm\n{CALL}")]).start();
    let answer = server.post(PATH, with_tools(json!({"stream": true}))).await;
    let events = answer.events();
    assert_eq!(events.last(), Some(&"[DONE]"));
    let mut shown = String::new();
    let mut arguments = String::new();
    for event in &events[..events.len() - 1] {
        let mut choice = serde_json::from_str::<Value>(event).unwrap()["choices"][0].take();
        let delta = &mut choice["delta"];
        if let Some(id) = delta.pointer_mut("/tool_calls/0/id") {
            check_id(&id.take());
        } else if let Some(piece) = delta.pointer("/tool_calls/0/function/arguments") {
            // The sizes of the chunks depend on timing.
            assert_eq!(delta["tool_calls"][0].as_object().unwrap().len(), 2, "{delta}");
            arguments += piece.as_str().unwrap();
            continue;
        }
        if delta["content"].as_str().is_some_and(|text| !text.is_empty()) {
            continue;
        }
        shown += &format!("{choice}\n");
    }
    assert_eq!(arguments, r#"{"city": "Paris"}"#);
    expect![[r#"
        {"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}
        {"index":0,"delta":{"tool_calls":[{"index":0,"id":null,"type":"function","function":{"name":"weather","arguments":""}}]},"logprobs":null,"finish_reason":null}
        {"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls"}
    "#]].assert_eq(&shown);
}

#[tokio::test]
async fn calls_are_parsed_in_the_format_of_the_template() {
    let cases: [(&str, &[&str], &str); 6] = [
        (HERMES, &[], CALL),
        // The template does not render tools, so the prompt describes them as text. This text also specifies the format
        // of the calls.
        (PLAIN, &[], CALL),
        (
            "{% for m in messages %}<|start_header_id|>{{ m.role }}\n{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}<|python_tag|>{% endif %}{% if add_generation_prompt %}<|start_header_id|>assistant\n{% endif %}",
            &["<|python_tag|>", "<|start_header_id|>"],
            "<|python_tag|>{\"name\": \"weather\", \"parameters\": {\"city\": \"Paris\"}}",
        ),
        (
            "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}[/INST]{% endif %}",
            &["[TOOL_CALLS]", "[/INST]"],
            "[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}]",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}<tool_call><function=x><parameter=x>{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            &[],
            "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
            &[
                "<|start|>",
                "<|channel|>",
                "<|message|>",
                "<|end|>",
                "<|call|>",
                "<|return|>",
                "<|constrain|>",
            ],
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Paris\"}<|call|>",
        ),
    ];
    for (template, special, said) in cases {
        let server = Setup::scripted(template, special, &[said]).start();
        let answer = answered(&server, json!({})).await;
        let [(name, arguments)] = &calls(&answer)[..] else { panic!("{said}: {answer}") };
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        assert_eq!((name.as_str(), &arguments), ("weather", &json!({"city": "Paris"})), "{said}");
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
        assert!(answer["choices"][0]["message"]["content"].is_null(), "{answer}");
    }
}

#[tokio::test]
async fn the_tags_around_a_call_may_be_special_tokens() {
    let qwen = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}<function=x><parameter=x>{% endif %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let tagged =
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>";
    for (template, said) in [(HERMES, CALL), (qwen, tagged)] {
        for choice in ["auto", "required"] {
            for special in [&[][..], &["<tool_call>", "</tool_call>"]] {
                let server = Setup::scripted(template, special, &[said]).start();
                let answer = answered(&server, json!({"tool_choice": choice})).await;
                let [(name, arguments)] = &calls(&answer)[..] else {
                    panic!("{choice}, {special:?}: {answer}")
                };
                let arguments: Value = serde_json::from_str(arguments).unwrap();
                assert_eq!((name.as_str(), arguments), ("weather", json!({"city": "Paris"})));
                assert!(answer["choices"][0]["message"]["content"].is_null(), "{answer}");
                assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{answer}");
            }
        }
    }
}

#[tokio::test]
async fn several_calls_can_have_text_before_between_and_after_them() {
    let said =
        format!("One: {CALL} two: <tool_call>{{\"name\": \"now\", \"arguments\": {{}}}}</tool_call> done");
    let server = Setup::scripted(HERMES, &[], &[&said]).start();
    let answer = answered(&server, json!({"n": 3})).await;
    assert_eq!(calls(&answer), [call("weather", r#"{"city": "Paris"}"#), call("now", "{}")]);
    assert_eq!(answer["choices"][0]["message"]["content"], "One:  two:  done");
    let choices = answer["choices"].as_array().unwrap().iter();
    let calls = choices.flat_map(|choice| choice["message"]["tool_calls"].as_array().unwrap());
    let ids: std::collections::HashSet<&str> = calls.map(|call| call["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 6, "each call has its own ID");
}

#[tokio::test]
async fn without_parallel_calls_the_answer_ends_with_the_first() {
    let server = Setup::scripted(HERMES, &[], &[&format!("a{CALL}b{CALL}c{}", "d".repeat(300))]).start();
    let answer = answered(&server, json!({"parallel_tool_calls": false})).await;
    assert_eq!(calls(&answer), [call("weather", r#"{"city": "Paris"}"#)]);
    assert_eq!(answer["choices"][0]["message"]["content"], "ab");
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() < 200, "{answer}");
    server.idle().await;
}

#[tokio::test]
async fn text_that_is_not_a_call_is_content() {
    for said in
        ["<tool_call>{\"name\": 5}</tool_call> x", "<tool_call>{\"na", "plain <tool_ca", "</tool_call>"]
    {
        let server = Setup::scripted(HERMES, &[], &[said]).start();
        let answer = answered(&server, json!({})).await;
        assert_eq!(answer["choices"][0]["message"]["content"], said);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn calls_are_text_in_requests_without_tools() {
    let server = Setup::scripted(HERMES, &[], &[CALL]).start();
    for parameters in [json!({"tools": null}), json!({"tools": []}), json!({"tool_choice": "none"})] {
        let answer = answered(&server, parameters).await;
        assert_eq!(answer["choices"][0]["message"]["content"], CALL);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }
    let answer = answered(&server, json!({"skip_special_tokens": false})).await;
    assert_eq!(
        answer["choices"][0]["message"]["content"], CALL,
        "a client that requests special tokens parses calls itself"
    );
}

#[tokio::test]
async fn a_call_that_the_token_limit_cuts_off_retains_its_arguments() {
    let server = Setup::scripted(HERMES, &[], &[CALL]).start();
    let tokens = CALL.find("ris").unwrap();
    let answer = answered(&server, json!({"max_tokens": tokens})).await;
    assert_eq!(calls(&answer), [call("weather", r#"{"city": "Pa"#)]);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn a_stop_string_ends_content_and_not_a_call() {
    let server = Setup::scripted(HERMES, &[], &[&format!("a b{CALL}c STOP d")]).start();
    for stop in ["STOP", "\"city\"", "\n", "}"] {
        let answer = answered(&server, json!({"stop": [stop, "STOP"]})).await;
        assert_eq!(calls(&answer), [call("weather", r#"{"city": "Paris"}"#)], "{stop}");
        assert_eq!(answer["choices"][0]["message"]["content"], "a bc ", "{stop}");
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
    }
    let answer = answered(&server, json!({"stop": "b"})).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "a ");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop", "the stop string precedes the call");
    server.idle().await;
}

#[tokio::test]
async fn log_probabilities_are_those_of_all_tokens_in_order() {
    let said = format!("Hm {CALL} ok");
    let server = Setup::scripted(HERMES, &[], &[&said]).start();
    let answer = answered(&server, json!({"logprobs": true, "top_logprobs": 1})).await;
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let joined: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(joined, said);
}

#[tokio::test]
async fn arguments_that_the_format_does_not_type_are_typed_by_the_tool() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}<function=x><parameter=x>{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let said = "<tool_call>\n<function=weather>\n<parameter=city>\n75\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>";
    let server = Setup::scripted(template, &[], &[said]).start();
    assert_eq!(calls(&answered(&server, json!({})).await), [call("weather", r#"{"city":"75","days":3}"#)]);
}

#[tokio::test]
async fn a_conversation_with_tools_can_have_three_turns() {
    let second = "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
    for template in [HERMES, PLAIN] {
        let server = Setup::scripted(template, &[], &[CALL, second, "It is fine."]).start();
        let mut messages = vec![json!({"role": "user", "content": "Weather?"})];
        let mut turns = Vec::new();
        for result in ["21", "noon", ""] {
            let answer = answered(&server, json!({"messages": messages})).await;
            let message = answer["choices"][0]["message"].clone();
            turns.push(message["content"].clone());
            messages.push(message.clone());
            if let Some(call) = message["tool_calls"].as_array().and_then(|calls| calls.first()) {
                messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": result}));
            }
        }
        assert_eq!(turns, [Value::Null, Value::Null, json!("It is fine.")]);
        assert_eq!(messages.len(), 6);
    }
}

#[tokio::test]
async fn a_required_call_is_made_whatever_the_model_prefers() {
    let now = json!({"type": "function", "function": {"name": "now"}});
    let allowed =
        |mode: &str| json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [now]}});
    for template in [HERMES, PLAIN] {
        let server = Setup::scripted(template, &[], &["I do not like tools."]).start();
        for choice in [now.clone(), allowed("required")] {
            let answer =
                answered(&server, json!({"tool_choice": choice, "parallel_tool_calls": false})).await;
            assert_eq!(calls(&answer), [call("now", "{}")], "{answer}");
            assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
        }
        let answer = answered(&server, json!({"tool_choice": allowed("auto")})).await;
        assert_eq!(answer["choices"][0]["message"]["content"], "I do not like tools.");
    }
    let server = Setup::scripted(HERMES, &[], &[CALL]).start();
    let answer = answered(&server, json!({"tool_choice": "required"})).await;
    assert_eq!(calls(&answer), [call("weather", r#"{"city": "Paris"}"#)], "the script has this call");
    let parameters = json!({"tool_choice": allowed("auto"), "parallel_tool_calls": false});
    let answer = answered(&server, parameters).await;
    assert_eq!(calls(&answer), [call("now", "{}")], "the script has a call of another tool: {answer}");
}

#[tokio::test]
async fn arguments_of_a_strict_tool_match_its_schema() {
    let mut strict = weather();
    strict["function"]["strict"] = json!(true);
    strict["function"]["parameters"]["required"] = json!(["days"]);
    strict["function"]["parameters"]["additionalProperties"] = json!(false);
    strict["function"]["parameters"]["properties"]["days"] = json!({"type": "integer", "enum": [3]});
    strict["function"]["parameters"]["properties"].as_object_mut().unwrap().remove("city");
    let server = Setup::scripted(HERMES, &[], &[&format!("Hm {CALL}")]).start();
    let answer = answered(&server, json!({"tools": [strict], "parallel_tool_calls": false})).await;
    assert_eq!(calls(&answer), [call("weather", r#"{"days": 3}"#)]);
    assert!(answer["choices"][0]["message"]["content"].as_str().unwrap().starts_with("Hm "), "{answer}");
}

#[tokio::test]
async fn malformed_tools_and_choices_are_rejected() {
    let tool = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    let cases = [
        json!({"tools": [{"function": {"name": "f"}}]}),
        json!({"tools": [{"type": "web_search"}]}),
        json!({"tools": [{"type": "function"}]}),
        json!({"tools": [{"type": "function", "function": 5}]}),
        tool(json!({})),
        tool(json!({"name": 5})),
        tool(json!({"name": ""})),
        tool(json!({"name": "a b"})),
        tool(json!({"name": "x".repeat(129)})),
        tool(json!({"name": "f", "description": 5})),
        tool(json!({"name": "f", "parameters": []})),
        tool(json!({"name": "f", "strict": "yes"})),
        json!({"tools": [weather(), weather()]}),
        json!({"tools": [weather(), {"type": "function", "name": "weather"}]}),
        json!({"tools": vec![json!({"type": "function", "name": "f"}); 513]}),
        json!({"tool_choice": "weather"}),
        json!({"tool_choice": {"type": "function"}}),
        json!({"tool_choice": {"type": "function", "function": {"name": "other"}}}),
        json!({"tool_choice": {"type": "function", "name": 5}}),
        json!({"tool_choice": {"type": "web_search"}}),
        json!({"tool_choice": {"type": "allowed_tools", "tools": []}}),
        json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "some", "tools": []}}}),
        json!({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
        json!({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}}),
        json!({"tools": [], "tool_choice": "required"}),
        json!({"reasoning_effort": "lots"}),
        json!({"chat_template_kwargs": {"tools": []}}),
        json!({"messages": [{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}]}),
        json!({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}),
        json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}),
        json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]}),
    ];
    let server = Setup::scripted(HERMES, &[], &["x"]).start();
    let mut shown = String::new();
    for case in cases {
        let answer = server.post(PATH, with_tools(case.clone())).await;
        assert_eq!(answer.status, 400, "{case}: {}", answer.body);
        let error = &answer.json()["error"];
        let text = |field: &str| error[field].as_str().unwrap_or("-").chars().take(160).collect::<String>();
        shown += &format!("{} {} | {}\n", text("code"), text("param"), text("message"));
    }
    expect![[r#"
        missing_required_parameter tools[0].type | tools[0].type: is missing
        invalid_value tools[0].type | tools[0].type: must be "function", not "web_search"
        missing_required_parameter tools[0].name | tools[0].name: is missing
        invalid_type tools[0].function | tools[0].function: must be an object
        missing_required_parameter tools[0].function.name | tools[0].function.name: is missing
        invalid_type tools[0].function.name | tools[0].function.name: must be a string
        invalid_value tools[0].function.name | tools[0].function.name: must be 1 to 128 ASCII letters, digits, underscores, dashes, dots, colons or slashes, not ""
        invalid_value tools[0].function.name | tools[0].function.name: must be 1 to 128 ASCII letters, digits, underscores, dashes, dots, colons or slashes, not "a b"
        invalid_value tools[0].function.name | tools[0].function.name: must be 1 to 128 ASCII letters, digits, underscores, dashes, dots, colons or slashes, not "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
        invalid_type tools[0].function.description | tools[0].function.description: must be a string
        invalid_type tools[0].function.parameters | tools[0].function.parameters: must be an object: a JSON schema is expected
        invalid_type tools[0].function.strict | tools[0].function.strict: must be a boolean
        invalid_value tools[1].function.name | tools[1].function.name: another tool already has the name "weather"
        invalid_value tools[1].name | tools[1].name: another tool already has the name "weather"
        array_above_max_length tools | tools: has 513 tools (limit: 512)
        invalid_value tool_choice | tool_choice: "weather" is not "none", "auto" or "required"
        missing_required_parameter tool_choice.name | tool_choice.name: is missing
        invalid_value tool_choice.function.name | tool_choice.function.name: the request has no tool named "other"
        invalid_type tool_choice.name | tool_choice.name: must be a string
        invalid_value tool_choice.type | tool_choice.type: a tool of type "web_search" cannot be called: this server does not run tools
        missing_required_parameter tool_choice.mode | tool_choice.mode: is missing
        invalid_value tool_choice.allowed_tools.mode | tool_choice.allowed_tools.mode: must be "auto" or "required"
        invalid_value tool_choice.tools | tool_choice.tools: is empty
        invalid_value tool_choice.tools[0].name | tool_choice.tools[0].name: the request has no tool named "other"
        invalid_value tool_choice | tool_choice: requires a tool call, but the request has no tools
        invalid_value reasoning_effort | reasoning_effort: "lots" is not "none", "minimal", "low", "medium", "high", "xhigh" or "max"
        invalid_value chat_template_kwargs.tools | chat_template_kwargs.tools: cannot be set here: another parameter or the model sets it
        invalid_type messages[0].tool_calls[0].id | messages[0].tool_calls[0].id: must be a string
        missing_required_parameter messages[0].tool_calls[0].function | messages[0].tool_calls[0].function: is missing
        missing_required_parameter messages[0].tool_calls[0].function.name | messages[0].tool_calls[0].function.name: is missing
        invalid_type messages[0].tool_calls[0].function.arguments | messages[0].tool_calls[0].function.arguments: must be a string or an object
    "#]].assert_eq(&shown);
    server.idle().await;
}

#[tokio::test]
async fn an_error_about_a_schema_names_the_member_that_the_request_contains() {
    let server = Setup::scripted(HERMES, &[], &["x"]).start();
    let nested = json!({"name": "f", "strict": true, "parameters": {"type": "strin"}});
    let mut flat = nested.clone();
    flat["type"] = json!("function");
    let nested = json!({"type": "function", "function": nested});
    let namespace = json!({"type": "namespace", "name": "n", "tools": [flat]});
    let (chats, responses) = (PATH, "/v3/responses");
    for (path, tool, param) in [
        (chats, &flat, "tools[1].parameters.type"),
        (chats, &nested, "tools[1].function.parameters.type"),
        (responses, &flat, "tools[1].parameters.type"),
        (responses, &nested, "tools[1].function.parameters.type"),
        (responses, &namespace, "tools[1].tools[0].parameters.type"),
    ] {
        let tools = json!([weather(), tool]);
        let body = match path {
            PATH => with_tools(json!({"tools": tools})),
            _ => json!({"model": "test-model", "input": "Hi", "tools": tools}).to_string(),
        };
        let answer = server.post(path, body).await;
        assert_eq!(answer.status, 400, "{}", answer.body);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().starts_with(&format!("{param}: ")), "{error}");
    }
}

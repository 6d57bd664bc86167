use std::sync::Arc;

use expect_test::{Expect, expect};
use serde_json::json;
use server_openai::ChatRequest;
use server_parsers::{Delta, Formats, Parser, ToolFormat, Tools};

use super::*;
use crate::backend::built_in_text_with;

mod families;
mod images;

/// Returns the template of a model family, from the tests of `server-text`.
fn golden(name: &str) -> String {
    let golden: Value =
        serde_json::from_str(include_str!("../../../text/tests/golden/templates.json")).unwrap();
    golden["templates"][name].as_str().unwrap().to_owned()
}

fn prompt(template: &str, mut request: Value) -> Result<String, Error> {
    request["model"] = json!("m");
    let model = Model::new(vec!["m".to_owned()], built_in_text_with(template, &[]).unwrap(), "test");
    let request = ChatRequest::read(&request).unwrap();
    let rendered = render(&Conversation::of_chat(request)?, &model, &Media::default(), None)?;
    let text = model.text.tokenizer.decode(&rendered.tokens, false);
    assert!(text.ends_with(&rendered.end));
    Ok(text)
}

fn check(template: &str, request: Value, expect: &Expect) {
    expect.assert_eq(&prompt(template, request).unwrap());
}

fn tools() -> Value {
    json!([
        {"type": "function", "function": {
            "name": "f", "description": "d", "strict": true,
            "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}},
        }},
        {"type": "function", "name": "g"},
    ])
}

/// Returns a question, two calls in one message, and their results in reverse order.
fn history() -> Value {
    let call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    json!([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": null, "tool_calls": [
            call("call_one", "f", json!("{\"a\": \"b\"}")), call("call_two", "g", json!("")),
        ]},
        {"role": "tool", "tool_call_id": "call_two", "content": [{"type": "text", "text": "two"}]},
        {"role": "tool", "tool_call_id": "call_one", "content": "one"},
    ])
}

#[test]
fn a_template_that_renders_tools_gets_tools_calls_and_results() {
    check(
        &golden("qwen3"),
        json!({"tools": tools(), "messages": history()}),
        &expect![[r#"
        <|im_start|>system
        # Tools

        <tools>
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}}}}
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}
        </tools><|im_end|>
        <|im_start|>user
        q<|im_end|>
        <|im_start|>assistant
        <tool_call>
        {"name": "f", "arguments": {"a": "b"}}
        </tool_call>
        <tool_call>
        {"name": "g", "arguments": {}}
        </tool_call><|im_end|>
        <|im_start|>user
        <tool_response>
        two
        </tool_response>
        <tool_response>
        one
        </tool_response><|im_end|>
        <|im_start|>assistant
    "#]],
    );
}

#[test]
fn a_template_that_renders_one_call_gets_each_call_with_its_result() {
    let date = json!({"date_string": "26 Jul 2024"});
    check(
        &golden("llama3"),
        json!({"messages": history(), "chat_template_kwargs": date}),
        &expect![[r#"
        <|start_header_id|>system<|end_header_id|>

        Today Date: 26 Jul 2024

        <|eot_id|><|start_header_id|>user<|end_header_id|>

        q<|eot_id|><|start_header_id|>assistant<|end_header_id|>

        {"name": "f", "parameters": {"a": "b"}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>

        "one"<|eot_id|><|start_header_id|>assistant<|end_header_id|>

        {"name": "g", "parameters": {}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>

        "two"<|eot_id|><|start_header_id|>assistant<|end_header_id|>

    "#]],
    );
}

#[test]
fn a_template_that_requires_ids_of_nine_characters_gets_them() {
    check(
        &golden("mistral"),
        json!({"tools": tools(), "messages": history()}),
        &expect![[
            r#"[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}}}}, {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}][/AVAILABLE_TOOLS][INST] q[/INST][TOOL_CALLS] [{"name": "f", "arguments": {"a": "b"}, "id": "qcna3ukgo"}, {"name": "g", "arguments": {}, "id": "04d0yh3up"}]<|im_end|>[TOOL_RESULTS] {"content": two}[/TOOL_RESULTS][TOOL_RESULTS] {"content": one}[/TOOL_RESULTS]"#
        ]],
    );
}

#[test]
fn a_template_that_renders_no_tools_gets_them_as_text() {
    check(
        &golden("chatml"),
        json!({"tools": tools(), "messages": history()}),
        &expect![[r#"
        <|im_start|>system
        # Tools

        You may call one or more functions to assist with the user query.

        You are provided with function signatures within <tools></tools> XML tags:
        <tools>
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}}}}
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}
        </tools>

        For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
        <tool_call>
        {"name": <function-name>, "arguments": <args-json-object>}
        </tool_call><|im_end|>
        <|im_start|>user
        q<|im_end|>
        <|im_start|>assistant
        <tool_call>
        {"name": "f", "arguments": {"a": "b"}}
        </tool_call>
        <tool_call>
        {"name": "g", "arguments": {}}
        </tool_call><|im_end|>
        <|im_start|>user
        <tool_response>
        two
        </tool_response>
        <tool_response>
        one
        </tool_response><|im_end|>
        <|im_start|>assistant
    "#]],
    );
    // If the conversation has a system message, the tools are appended to it.
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]);
    let rendered = prompt(&golden("chatml"), json!({"tools": tools(), "messages": messages})).unwrap();
    assert!(rendered.starts_with("<|im_start|>system\ns\n\n# Tools\n\n"), "{rendered}");
}

#[test]
fn a_template_that_rejects_system_messages_gets_tools_in_the_users_message() {
    let template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}[{{ m.content }}]{% endfor %}";
    let rendered =
        prompt(template, json!({"tools": tools(), "messages": [{"role": "user", "content": "q"}]})).unwrap();
    assert!(rendered.starts_with("[# Tools\n\n") && rendered.ends_with("</tool_call>\n\nq]"), "{rendered}");
}

#[test]
fn phi_reads_tools_from_the_system_message() {
    check(
        &golden("phi"),
        json!({"tools": tools(), "messages": history()}),
        &expect![[
            r#"<|system|><|tool|>[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}}}}, {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}]<|/tool|><|end|><|user|>q<|end|><|assistant|><|tool_call|>[{"name": "f", "arguments": {"a": "b"}}, {"name": "g", "arguments": {}}]<|/tool_call|><|end|><|tool|>two<|end|><|tool|>one<|end|><|assistant|>"#
        ]],
    );
}

#[test]
fn tools_that_may_not_be_called_are_not_rendered() {
    let with = |more: Value| {
        let mut request = json!({"messages": [{"role": "user", "content": "q"}]});
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        prompt(&golden("qwen3"), request).unwrap()
    };
    let without = with(json!({}));
    assert_eq!(with(json!({"tools": tools(), "tool_choice": "none"})), without);
    assert_eq!(with(json!({"tools": []})), without);
    let auto = with(json!({"tools": tools()}));
    assert_ne!(auto, without);
    for choice in [json!("auto"), json!("required"), json!({"type": "function", "function": {"name": "f"}})] {
        assert_eq!(
            with(json!({"tools": tools(), "tool_choice": choice})),
            auto,
            "the choice must not change the prompt"
        );
    }
}

#[test]
fn arguments_that_are_not_an_object_stay_unchanged() {
    let call = |arguments: &str| {
        json!({"messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "t", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]},
        ]})
    };
    for (arguments, shown) in [
        ("{\"b\": 1, \"a\": 2}", "{\"b\": 1, \"a\": 2}"),
        ("", "{}"),
        ("{\"a\": ", "{\"a\": "),
        ("[1]", "[1]"),
    ] {
        let rendered = prompt(&golden("qwen3"), call(arguments)).unwrap();
        assert!(
            rendered.contains(&format!(
                "t\n<tool_call>\n{{\"name\": \"f\", \"arguments\": {shown}}}\n</tool_call>"
            )),
            "{rendered}"
        );
    }
}

#[test]
fn arguments_of_lfm2_are_python_literals_that_the_parser_reads_back() {
    let arguments = json!({
        "flag": true,
        "nothing": null,
        "number": -1.5,
        "text": "true",
        "list": [true, false, null, "it's \"x\"\n\u{1f}", "", [], {"a": [null, {"b": false}]}],
        "object": {"true": true, "": "null", "none": null},
    });
    let text = tools_as_text::calls(&[("f", &arguments)], ToolFormat::Lfm2);
    let written = r#"flag=True, nothing=None, number=-1.5, text="true", list=[True, False, None, "it's \"x\"\n\u001f", "", [], {"a": [None, {"b": False}]}], object={"true": True, "": "null", "none": None}"#;
    assert_eq!(text, format!("<|tool_call_start|>[f({written})]<|tool_call_end|>"));
    let formats = Formats { tool: ToolFormat::Lfm2, reasoning: ReasoningFormat::None };
    let mut parser = Parser::new(formats, &Arc::new(Tools::new([("f", None)])), "");
    let mut deltas = parser.push(&text);
    deltas.extend(parser.finish());
    let arguments_of = |delta: Delta| match delta {
        Delta::ToolCallArguments { text, .. } => text,
        _ => String::new(),
    };
    let read: String = deltas.into_iter().map(arguments_of).collect();
    assert_eq!(serde_json::from_str::<Value>(&read).unwrap(), arguments);
}

#[test]
fn reasoning_gets_the_name_that_the_template_reads() {
    let messages = |field: &str| {
        json!({"messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", field: "hm", "tool_calls": [{"id": "a", "function": {"name": "g"}}]},
            {"role": "tool", "tool_call_id": "a", "content": "r"},
        ]})
    };
    for field in ["reasoning", "reasoning_content"] {
        let rendered = prompt(&golden("qwen3"), messages(field)).unwrap();
        assert!(rendered.contains("<think>\nhm\n</think>"), "{rendered}");
    }
    let harmony = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>{% if m.thinking %}analysis<|message|>{{ m.thinking }}{% endif %}final<|message|>{{ m.content }}<|end|>{% endfor %}{{ reasoning_effort }}";
    let mut request = messages("reasoning");
    request["reasoning_effort"] = json!("xhigh");
    let rendered = prompt(harmony, request).unwrap();
    assert!(rendered.contains("analysis<|message|>hm") && rendered.ends_with("high"), "{rendered}");
    assert!(!rendered.ends_with("xhigh"), "gpt-oss has only three efforts: {rendered}");
}

#[test]
fn a_continued_text_may_be_a_part_of_the_marker_after_it() {
    for template in ["chatml", "qwen3", "llama3"] {
        for text in ["<", "end", "im", "|", "s", "eot"] {
            let messages = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]);
            let request = json!({"messages": messages, "continue_final_message": true});
            let rendered = prompt(&golden(template), request).unwrap();
            assert!(rendered.ends_with(&format!("\n{text}")), "{template}: {rendered}");
            let end = format!("<|im_start|>assistant\n{text}");
            assert!(template != "chatml" || rendered.ends_with(&end), "{rendered}");
        }
    }
}

#[test]
fn the_number_of_messages_is_limited() {
    let request = |count: usize| {
        let messages: Vec<Value> = vec![json!({"role": "user", "content": ""}); count];
        prompt("{{ messages | length }}", json!({"messages": messages}))
    };
    assert_eq!(request(MESSAGES_MAX).unwrap(), MESSAGES_MAX.to_string());
    let error = request(MESSAGES_MAX + 1).unwrap_err();
    assert!(error.to_string().contains("has 4097 messages (limit: 4096)"), "{error}");
}

#[test]
fn reserved_variables_are_rejected() {
    for name in RESERVED {
        let request =
            json!({"messages": [{"role": "user", "content": "q"}], "chat_template_kwargs": {name: 1}});
        let error = prompt(&golden("chatml"), request).unwrap_err();
        assert!(error.to_string().contains(&format!("chat_template_kwargs.{name}")), "{error}");
    }
}

//! Tests the prompts of the model families whose calls the server parses, with their own templates where the licenses
//! allow it. The templates are in `server/text/tests/templates`. The tests of `server-text` compare the rendering with
//! that of Jinja in Python; these tests check the input of the templates.

use expect_test::expect_file;

use super::*;

/// Returns the template of a family.
fn template(name: &str) -> String {
    let path = format!("{}/text/tests/templates/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

/// Returns a conversation that covers many features of templates: a system message, a call with reasoning and text,
/// parallel calls with results in another order, a tool without a description, an answer and a question.
fn conversation() -> Value {
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    json!({"tools": tools(), "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "say", "reasoning_content": "think", "tool_calls": [call("call_a", "f", "{\"a\": \"b\"}")]},
        {"role": "tool", "tool_call_id": "call_a", "content": "ra"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": null, "reasoning_content": "again", "tool_calls": [
            call("call_b", "f", "{\"a\": \"x\\ny\"}"), call("call_c", "g", ""),
        ]},
        {"role": "tool", "tool_call_id": "call_c", "content": "rc"},
        {"role": "tool", "tool_call_id": "call_b", "content": "rb"},
    ]})
}

#[test]
fn the_template_of_each_family_has_its_formats_and_renders_a_conversation_with_tools() {
    for (name, tool, reasoning) in [
        ("gpt-oss", "gptoss", "gptoss"),
        ("gemma-4", "gemma4", "gemma4"),
        ("deepseek-r1-distill", "deepseek", "deepseek"),
        ("deepseek-v3.1", "deepseek", "deepseek"),
        ("granite-3.3", "granite", "granite"),
        ("granite-4.0", "granite", "none"),
        ("qwen3", "hermes3", "qwen3"),
        ("qwen3-coder", "qwen3coder", "none"),
        ("devstral-small", "devstral", "none"),
        ("mistral-small-3.2", "devstral", "none"),
        ("mistral-nemo", "mistral", "none"),
        ("lfm2", "lfm2", "qwen3"),
        ("lfm2-first", "lfm2", "none"),
        ("minicpm5", "minicpm5", "minicpm5"),
        ("phi-4-functools", "phi4", "none"),
    ] {
        let template = template(name);
        let model = Model::new(vec!["m".to_owned()], built_in_text_with(&template, &[]).unwrap(), "test");
        let formats = model.formats();
        assert_eq!((formats.tool.name(), formats.reasoning.name()), (tool, reasoning), "{name}");
        // The template of gpt-oss renders the current date, which the test cannot set.
        let prompt = prompt(&template, conversation()).unwrap();
        let rendered = prompt.split_inclusive('\n').map(|line| match line.split_once("Current date: ") {
            Some((before, _)) => format!("{before}Current date: 2026-01-01\n"),
            None => line.to_owned(),
        });
        expect_file![format!("families/{name}.txt")].assert_eq(&rendered.collect::<String>());
    }
}

#[test]
fn gpt_oss_gets_the_text_before_a_call_as_reasoning() {
    let mut request = conversation();
    let messages = request["messages"].as_array_mut().unwrap();
    messages.truncate(4);
    let rendered = prompt(&template("gpt-oss"), request).unwrap();
    assert!(rendered.contains("<|channel|>analysis<|message|>think\n\nsay<|end|>"), "{rendered}");
}

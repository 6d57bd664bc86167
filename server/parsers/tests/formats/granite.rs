//! Tests the format `<|tool_call|>[{"name": …, "arguments": …}]` and the format of Hermes, with reasoning that phrases
//! or tags mark.

use server_parsers::{ReasoningFormat, ToolFormat};

use crate::check::{Case, both, call, content, cut, reasoning, tool};

fn granite() -> Case {
    tool(ToolFormat::Granite)
}

fn thinking() -> Case {
    both(ToolFormat::Granite, ReasoningFormat::Granite)
}

#[test]
fn calls_are_parsed() {
    let both = [call(0, "weather", r#"{"city": "</tool_call>"}"#), call(1, "now", "{}")].concat();
    for text in [
        r#"<|tool_call|>[{"name": "weather", "arguments": {"city": "</tool_call>"}}, {"name": "now", "arguments": {}}]"#,
        r#"<tool_call>[{"name": "weather", "arguments": {"city": "</tool_call>"}}, {"name": "now", "arguments": {}}]</tool_call>"#,
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"</tool_call>\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
        r#"<|tool_call|>{"name": "weather", "arguments": {"city": "</tool_call>"}}<|tool_call|>{"name": "now", "arguments": {}}"#,
    ] {
        granite().reads(text, &both);
    }
}

#[test]
fn text_that_is_not_a_call_stays_text() {
    for text in
        ["<|tool_call|>", "<|tool_call|>[]", "<|tool_call|>[{\"a\": 1}]", "<|tool", "[{\"name\": \"now\"}]"]
    {
        granite().is_text(text);
    }
    granite().reads("<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"a\": 1", &cut(0, "f", "{\"a\": 1"));
}

#[test]
fn reasoning_is_marked_by_phrases() {
    let expected = [reasoning(" Let me see.\n\n"), content(" It is 5.")];
    thinking().reads("Here is my thought process: Let me see.\n\nHere is my response: It is 5.", &expected);
    thinking()
        .reads("\nHere's my thought process:\n Let me see.\n\nHere's my response:\n It is 5.", &expected);
    thinking().reads("Here is my thought process:\nOn and on", &[reasoning("On and on")]);
    let text = "Here is my thought process:\nA <tool_call>\nHere is my response:\n<|tool_call|>[{\"name\": \"now\"}]";
    thinking().reads(text, &[vec![reasoning("A <tool_call>\n")], call(0, "now", "{}")].concat());
    // Elsewhere the phrases are text.
    thinking().is_text("So: Here is my thought process: none. Here is my response: none.");
    thinking().is_text("Here is my");
}

#[test]
fn reasoning_and_the_response_are_marked_by_tags() {
    let expected = [reasoning("Hm."), content("It is 5.")];
    for text in [
        "<think>Hm.</think>It is 5.",
        "<think>Hm.</think><response>It is 5.</response>",
        "<think>\nHm.</think>\n<response>\nIt is 5.</response>\n",
    ] {
        thinking().reads(text, &expected);
    }
    thinking().reads("<response>It is 5.</response>", &[content("It is 5.")]);
    thinking().reads("<response>a</response> b", &[content("a</response> b")]);
    thinking().reads("<response>a</respon", &[content("a</respon")]);
    thinking().is_text("a <response>b</response>");
}

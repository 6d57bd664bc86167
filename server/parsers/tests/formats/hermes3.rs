//! Tests the format `<tool_call>{"name": …, "arguments": …}</tool_call>`.

use server_parsers::{Delta, ReasoningFormat, ToolFormat};

use crate::check::{Case, both, call, content, cut, reasoning, tool};

fn hermes() -> Case {
    tool(ToolFormat::Hermes3)
}

#[test]
fn a_call_is_parsed() {
    let paris = call(0, "weather", r#"{"city": "Paris"}"#);
    for text in [
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>",
        "<tool_call>{\"name\":\"weather\",\"arguments\":{\"city\": \"Paris\"}}</tool_call>",
        "\n<tool_call>\n\n {\"name\" : \"weather\" , \"arguments\" : {\"city\": \"Paris\"} }\n\n</tool_call>\n",
        "<tool_call>{\"arguments\": {\"city\": \"Paris\"}, \"name\": \"weather\"}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": \"{\\\"city\\\": \\\"Paris\\\"}\"}</tool_call>",
        "<tool_call>{\"arguments\": \" {\\\"city\\\": \\\"Paris\\\"}\\n\", \"name\": \"weather\"}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"parameters\": {\"city\": \"Paris\"}}</tool_call>",
        "<tool_call>{\"id\": [1], \"name\": \"weather\", \"n\":1,\"x\": 1.5, \"arguments\": {\"city\": \"Paris\"}, \"y\":null}</tool_call>",
        "<tool_call>{\"name\": \"weat\\u0068er\", \"arguments\": {\"city\": \"Paris\"}}</tool_call>",
        // Models sometimes omit parts of a call.
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}",
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}",
    ] {
        hermes().reads(text, &paris);
    }
}

#[test]
fn a_tool_without_parameters_is_a_tool() {
    for arguments in ["{}", "null", "\"\"", "\"{}\""] {
        let text = format!("<tool_call>{{\"name\": \"now\", \"arguments\": {arguments}}}</tool_call>");
        hermes().reads(&text, &call(0, "now", "{}"));
        let text = format!("<tool_call>{{\"arguments\": {arguments}, \"name\": \"now\"}}</tool_call>");
        hermes().reads(&text, &call(0, "now", "{}"));
    }
    hermes().reads("<tool_call>{\"name\": \"now\"}</tool_call>", &call(0, "now", "{}"));
}

#[test]
fn text_before_between_and_after_calls_is_content() {
    let text = "I look.\n<tool_call>{\"name\":\"now\",\"arguments\":{}}</tool_call> and\n<tool_call>\n{\"name\":\"a\",\"arguments\":{\"x\":1}}\n</tool_call>\n<tool_call>\n{\"name\":\"b\",\"arguments\":{}}\n</tool_call>\nDone. ";
    let expected = [
        vec![content("I look.\n")],
        call(0, "now", "{}"),
        vec![content(" and\n")],
        call(1, "a", "{\"x\":1}"),
        call(2, "b", "{}"),
        vec![content("\nDone. ")],
    ];
    hermes().reads(text, &expected.concat());
}

#[test]
fn several_calls_in_one_pair_of_tags_are_calls() {
    let expected = [call(0, "a", "{}"), call(1, "b", "{}")].concat();
    for text in [
        "<tool_call>{\"name\":\"a\",\"arguments\":{}}\n{\"name\":\"b\",\"arguments\":{}}</tool_call>",
        "<tool_call>[{\"name\":\"a\",\"arguments\":{}}, {\"name\":\"b\",\"arguments\":{}}]</tool_call>",
        "<tool_call>{\"name\":\"a\",\"arguments\":{}}\n<tool_call>{\"name\":\"b\",\"arguments\":{}}</tool_call>",
    ] {
        hermes().reads(text, &expected);
    }
}

#[test]
fn a_marker_within_a_string_ends_nothing() {
    let arguments = r#"{"text": "a </tool_call> b <tool_call> \" } \\"}"#;
    let text = format!("<tool_call>\n{{\"name\": \"say\", \"arguments\": {arguments}}}\n</tool_call>");
    hermes().reads(&text, &call(0, "say", arguments));
}

#[test]
fn text_that_is_not_a_call_stays_text() {
    for text in [
        "Hello.",
        "",
        "Write <tool_call> and </tool_call> around it.",
        "a < b and <tool_cal",
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>weather</tool_call>",
        "<tool_call>{\"tool\": \"weather\"}</tool_call>",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": 1, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"args\": {\"city\": \"Paris\"}}</tool_call>",
        "<tool_call>{'name': 'weather'}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": \"Paris\"}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"argu",
        "<tool_call>[]</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": {'city': 'Paris'}}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": { \n city: 'Paris'}}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": \"{'city'\"}</tool_call>",
        "<tool_call><tool_call>",
        "{\"name\": \"weather\", \"arguments\": {}}",
        "</tool_call>",
        "  \n ",
        "\u{1F600} <\u{1F600}tool_call>",
    ] {
        if text.is_empty() {
            hermes().reads(text, &[]);
        } else {
            hermes().is_text(text);
        }
    }
}

#[test]
fn a_call_after_a_malformed_one_is_a_call() {
    for broken in ["<tool_call>", "<tool_call>{\"name\": oops}</tool_call>", "<tool_call>[", "<tool_ca", "<"]
    {
        let text = format!("{broken}<tool_call>{{\"name\":\"now\",\"arguments\":{{}}}}</tool_call>");
        hermes().reads(&text, &[vec![content(broken)], call(0, "now", "{}")].concat());
    }
}

#[test]
fn deltas_remain_valid_if_a_call_turns_out_malformed() {
    let text = "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\": oops}}</tool_call>";
    hermes().reads(text, &[cut(0, "f", "{\"a\": "), vec![content("oops}}</tool_call>")]].concat());
    let text = "<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"a\\\": \"}</tool_call>";
    hermes().reads(text, &[cut(0, "f", "{\"a\": "), vec![content("\"}</tool_call>")]].concat());
    let text = "<tool_call>{\"name\":\"f\",\"arguments\":{}}}\n</tool_call>";
    hermes().reads(text, &[call(0, "f", "{}"), vec![content("}\n</tool_call>")]].concat());
}

#[test]
fn a_call_that_is_cut_off_keeps_its_arguments() {
    for (text, arguments) in [
        ("<tool_call>{\"name\":\"f\",\"arguments\":{", "{"),
        ("<tool_call>{\"name\":\"f\",\"arguments\":{\"a\": \"b", "{\"a\": \"b"),
        ("<tool_call>{\"name\":\"f\",\"arguments\":{\"a\": \"b\\", "{\"a\": \"b\\"),
        ("<tool_call>{\"name\":\"f\",\"arguments\":{\"a\": \"b\\u00", "{\"a\": \"b\\u00"),
        ("<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"a\\\": 1", "{\"a\": 1"),
    ] {
        hermes().reads(text, &cut(0, "f", arguments));
    }
}

#[test]
fn malformed_strings_are_corrected() {
    let text = "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\": \"x\ny\", \"b\": \"C:\\Dir\"}}</tool_call>";
    hermes().reads(text, &call(0, "f", "{\"a\": \"x\\ny\", \"b\": \"C:\\\\Dir\"}"));
}

#[test]
fn a_call_of_a_tool_that_was_not_offered_is_a_call() {
    hermes().reads("<tool_call>{\"name\":\"rm -rf\",\"arguments\":{}}</tool_call>", &call(0, "rm -rf", "{}"));
}

#[test]
fn without_tools_calls_are_text() {
    hermes().without_tools().is_text("\n <tool_call>{\"name\":\"now\",\"arguments\":{}}</tool_call>");
}

#[test]
fn certain_text_is_not_held_back() {
    let steps: [(&str, Vec<Delta>); 9] = [
        ("See: <tool", vec![content("See: ")]),
        ("_box> <tool_call>{\"name\": \"we", vec![content("<tool_box> ")]),
        ("ather\", \"arguments\":", vec![]),
        (" {", vec![]),
        ("\"ci", cut(0, "weather", "{\"ci")),
        ("ty\": \"Pa\\", vec![Delta::ToolCallArguments { index: 0, text: "ty\": \"Pa".to_owned() }]),
        ("nris\"", vec![Delta::ToolCallArguments { index: 0, text: "\\nris\"".to_owned() }]),
        (
            "}",
            vec![
                Delta::ToolCallArguments { index: 0, text: "}".to_owned() },
                Delta::ToolCallEnd { index: 0 },
            ],
        ),
        ("}\n</tool_call>", vec![]),
    ];
    let mut parser = hermes().parser();
    for (text, expected) in steps {
        assert_eq!(parser.push(text), expected, "{text}");
    }
    assert_eq!(parser.calls(), 1);
    assert_eq!(parser.finish(), []);
}

#[test]
fn reasoning_precedes_calls_and_a_call_within_it_is_reasoning() {
    let thinking = both(ToolFormat::Hermes3, ReasoningFormat::Qwen3);
    let within = "I may write <tool_call>{\"name\":\"now\",\"arguments\":{}}</tool_call>.\n";
    let text = format!(
        "<think>\n{within}</think>\n\n<tool_call>\n{{\"name\":\"now\",\"arguments\":{{\"a\":\"<think>\"}}}}\n</tool_call>"
    );
    let called = call(0, "now", "{\"a\":\"<think>\"}");
    thinking.reads(&text, &[vec![reasoning(within)], called].concat());
    // Unclosed reasoning remains reasoning, even if it contains calls.
    thinking.reads(&format!("<think>{within}"), &[reasoning(within)]);
    thinking.clone().without_tools().reads("<think>a</think>b", &[reasoning("a"), content("b")]);
    let prompted = thinking.after("<|im_start|>assistant\n<think>\n");
    prompted.reads("Hm.</think>\nHello", &[reasoning("Hm."), content("Hello")]);
}

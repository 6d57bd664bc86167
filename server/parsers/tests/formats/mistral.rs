//! Tests the formats `[TOOL_CALLS][{"name": …, "arguments": …}]` and `[TOOL_CALLS]name[ARGS]{…}`.

use server_parsers::{ReasoningFormat, ToolFormat};

use crate::check::{Case, both, call, content, cut, reasoning, tool};

fn mistral() -> Case {
    tool(ToolFormat::Mistral)
}

fn devstral() -> Case {
    tool(ToolFormat::Devstral)
}

#[test]
fn calls_in_an_array_are_parsed() {
    let expected = [call(0, "weather", r#"{"city": "[TOOL_CALLS]]"}"#), call(1, "now", "{}")].concat();
    for text in [
        r#"[TOOL_CALLS][{"name": "weather", "arguments": {"city": "[TOOL_CALLS]]"}}, {"name": "now", "arguments": {}}]"#,
        "[TOOL_CALLS] [{\"arguments\": {\"city\": \"[TOOL_CALLS]]\"}, \"name\": \"weather\", \"id\": \"123456789\"},\n{\"name\": \"now\", \"arguments\": {}}]",
        r#"[TOOL_CALLS]{"name": "weather", "arguments": {"city": "[TOOL_CALLS]]"}}[TOOL_CALLS]{"name": "now"}"#,
        " [{\"name\": \"weather\", \"arguments\": {\"city\": \"[TOOL_CALLS]]\"}}, {\"name\": \"now\", \"arguments\": {}}]",
    ] {
        mistral().reads(text, &expected);
    }
}

#[test]
fn calls_by_name_are_parsed() {
    let expected = [call(0, "weather", r#"{"city": "[ARGS]{"}"#), call(1, "now", "{}")].concat();
    for text in [
        r#"[TOOL_CALLS]weather[ARGS]{"city": "[ARGS]{"}[TOOL_CALLS]now[ARGS]{}"#,
        "[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{\"city\": \"[ARGS]{\"}\n[TOOL_CALLS] now[ARGS] {}",
        r#"[TOOL_CALLS]weather{"city": "[ARGS]{"}[TOOL_CALLS]now{}"#,
    ] {
        mistral().reads(text, &expected);
        devstral().reads(text, &expected);
    }
}

#[test]
fn a_call_without_arguments_is_a_call() {
    let now = call(0, "now", "{}");
    let both = [now.clone(), call(1, "weather", "{\"days\": 1}")].concat();
    for case in [mistral(), devstral()] {
        for text in [
            "[TOOL_CALLS]now[ARGS]",
            "[TOOL_CALLS]now[ARGS] \n",
            "[TOOL_CALLS]now[ARGS]null",
            "[TOOL_CALLS]now[CALL_ID]123456789[ARGS] null\n",
        ] {
            case.reads(text, &now);
            for next in ["[TOOL_CALLS]weather[ARGS]{\"days\": 1}", " [TOOL_CALLS] weather {\"days\": 1}"] {
                case.reads(&format!("{text}{next}"), &both);
            }
        }
        case.reads("[TOOL_CALLS]now[ARGS]null.", &[content("[TOOL_CALLS]now[ARGS]null.")]);
        case.reads("[TOOL_CALLS]now[ARGS]null!", &[now.clone(), vec![content("!")]].concat());
        // The parser cannot know whether arguments would have followed.
        case.reads_cut("[TOOL_CALLS]now[ARGS]", &cut(0, "now", ""));
        case.reads_cut("[TOOL_CALLS]now[ARGS]nul", &[content("[TOOL_CALLS]now[ARGS]nul")]);
    }
}

#[test]
fn whitespace_around_the_name_is_dropped() {
    let expected = [call(0, "weather", "{\"days\": 1}"), call(1, "now", "{}")].concat();
    for case in [mistral(), devstral()] {
        for text in [
            "[TOOL_CALLS]weather [ARGS] {\"days\": 1}[TOOL_CALLS]now [ARGS] {}",
            "[TOOL_CALLS] weather\n[ARGS]\n{\"days\": 1}\n[TOOL_CALLS]\nnow {}",
            "[TOOL_CALLS]weather [CALL_ID] 123456789 [ARGS] {\"days\": 1}[TOOL_CALLS]now[ARGS]",
        ] {
            case.reads(text, &expected);
        }
    }
}

#[test]
fn a_malformed_sibling_does_not_hide_a_call() {
    mistral().reads(
        r#"[TOOL_CALLS][{"name": 1}, {"name": "now", "arguments": {}}] ok"#,
        &[vec![content(r#"[TOOL_CALLS][{"name": 1}, "#)], call(0, "now", "{}"), vec![content(" ok")]]
            .concat(),
    );
    mistral().reads(
        r#"[TOOL_CALLS][{"name": "now", "arguments": {}}, {"city": "}]", "x": [1]}, {"a": 1} ,{"name": "f", "arguments": {"a": 1}}]"#,
        &[
            call(0, "now", "{}"),
            vec![content(r#", {"city": "}]", "x": [1]}, {"a": 1} ,"#)],
            call(1, "f", r#"{"a": 1}"#),
        ]
        .concat(),
    );
    // Without a marker, an answer in JSON is content.
    mistral().is_text(r#"[{"name": "Bob", "age": 3}, {"name": "now", "arguments": {}}]"#);
    mistral().is_text(r#"[TOOL_CALLS][{"name": 1}, {"name": 2}]"#);
    mistral().is_text(r#"[TOOL_CALLS][{"name": 1}, 2, {"name": "now", "arguments": {}}]"#);
}

#[test]
fn magistral_thinks_between_tags() {
    for tool in [ToolFormat::Mistral, ToolFormat::Devstral, ToolFormat::None] {
        let magistral = both(tool, ReasoningFormat::Mistral);
        magistral.reads("[THINK]Hm.\n[/THINK]\nHello.", &[reasoning("Hm.\n"), content("Hello.")]);
        magistral
            .clone()
            .after("[INST]Hi[/INST][THINK]")
            .reads("Hm.[/THINK]Hello.", &[reasoning("Hm."), content("Hello.")]);
        magistral.reads("[THINK]Hm [/THI", &[reasoning("Hm [/THI")]);
        magistral.is_text("Not [THINK] here.[/THINK]");
    }
    both(ToolFormat::Mistral, ReasoningFormat::Mistral).reads(
        "[THINK][TOOL_CALLS]now[ARGS]{}?[/THINK][TOOL_CALLS]now[ARGS]{}",
        &[vec![reasoning("[TOOL_CALLS]now[ARGS]{}?")], call(0, "now", "{}")].concat(),
    );
}

#[test]
fn text_around_calls_is_content() {
    for case in [mistral(), devstral()] {
        case.reads(
            "I look. [TOOL_CALLS]now[ARGS]{} then[TOOL_CALLS]a.b-c[ARGS]{\"x\": -1} .",
            &[
                vec![content("I look. ")],
                call(0, "now", "{}"),
                vec![content(" then")],
                call(1, "a.b-c", "{\"x\": -1}"),
                vec![content(" .")],
            ]
            .concat(),
        );
    }
    mistral().reads(
        "Look: [TOOL_CALLS][{\"name\": \"now\", \"arguments\": {}}] ok",
        &[vec![content("Look: ")], call(0, "now", "{}"), vec![content(" ok")]].concat(),
    );
}

#[test]
fn text_that_is_not_a_call_stays_text() {
    for text in [
        "[TOOL_CALLS]",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS][1]",
        "[TOOL_CALLS] is a marker",
        "[TOOL_CALLS]now",
        "[TOOL_CALLS]now[ARGS]nullable",
        "[TOOL_CALLS]now[ARGS]nul",
        "[TOOL_CALLS]now [X] {}",
        "[TOOL_CALLS]now now[ARGS]{}",
        "[TOOL_CALLS]now[ARGS][TOOL_CA",
        "[TOOL_CALLS]now[ARGS][1]",
        "[TOOL_CALLS]now[ARGS]{'a': 1}",
        "[TOOL_CALLS]now[ARGS]{ a}",
        "[TOOL_CALLS]now[ARG]{}",
        "[TOOL_CALLS]now[X]{}",
        "[TOOL_CA",
        "[TOOL_CALL]now[ARGS]{}",
        "[1, 2]",
        "a [{\"name\": \"now\", \"arguments\": {}}]",
    ] {
        mistral().is_text(text);
        devstral().is_text(text);
    }
    mistral().is_text("[{\"name\": \"Bob\", \"age\": 3}");
    devstral().is_text("[{\"name\": \"now\", \"arguments\": {}}]");
}

#[test]
fn a_call_after_a_malformed_one_is_a_call() {
    for broken in ["[TOOL_CALLS]", "[TOOL_CALLS]now", "[TOOL_CALLS][", "[TOOL_CALLS]now[ARGS][", "["] {
        let text = format!("{broken}[TOOL_CALLS]now[ARGS]{{}}");
        devstral().reads(&text, &[vec![content(broken)], call(0, "now", "{}")].concat());
        mistral().reads(&text, &[vec![content(broken)], call(0, "now", "{}")].concat());
    }
}

#[test]
fn a_malformed_or_cut_off_call_keeps_its_arguments() {
    devstral().reads("[TOOL_CALLS]f[ARGS]{\"a\": \"b", &cut(0, "f", "{\"a\": \"b"));
    devstral()
        .reads("[TOOL_CALLS]f[ARGS]{\"a\": b}", &[cut(0, "f", "{\"a\": "), vec![content("b}")]].concat());
    mistral().reads(
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": b}}]",
        &[cut(0, "f", "{\"a\": "), vec![content("b}}]")]].concat(),
    );
}

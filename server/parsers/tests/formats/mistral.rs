//! `[TOOL_CALLS][{"name": …, "arguments": …}]`, `[TOOL_CALLS]name[ARGS]{…}`

use server_parsers::ToolFormat;

use crate::check::{Case, call, content, cut, tool};

fn mistral() -> Case {
    tool(ToolFormat::Mistral)
}

fn devstral() -> Case {
    tool(ToolFormat::Devstral)
}

#[test]
fn calls_in_an_array_are_read() {
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
fn calls_by_name_are_read() {
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
fn text_round_calls_is_content() {
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
fn what_is_no_call_is_text() {
    for text in [
        "[TOOL_CALLS]",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS][1]",
        "[TOOL_CALLS] is a marker",
        "[TOOL_CALLS]now",
        "[TOOL_CALLS]now[ARGS]",
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
fn a_call_after_something_broken_is_a_call() {
    for broken in ["[TOOL_CALLS]", "[TOOL_CALLS]now", "[TOOL_CALLS][", "[TOOL_CALLS]now[ARGS]", "["] {
        let text = format!("{broken}[TOOL_CALLS]now[ARGS]{{}}");
        devstral().reads(&text, &[vec![content(broken)], call(0, "now", "{}")].concat());
        mistral().reads(&text, &[vec![content(broken)], call(0, "now", "{}")].concat());
    }
}

#[test]
fn a_call_that_breaks_or_is_cut_off_keeps_what_it_has() {
    devstral().reads("[TOOL_CALLS]f[ARGS]{\"a\": \"b", &cut(0, "f", "{\"a\": \"b"));
    devstral()
        .reads("[TOOL_CALLS]f[ARGS]{\"a\": b}", &[cut(0, "f", "{\"a\": "), vec![content("b}")]].concat());
    mistral().reads(
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": b}}]",
        &[cut(0, "f", "{\"a\": "), vec![content("b}}]")]].concat(),
    );
}

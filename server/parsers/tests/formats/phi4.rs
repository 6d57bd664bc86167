//! Tests the format `functools[{"name": …, "arguments": …}, …]`.

use server_parsers::ToolFormat;

use crate::check::{Case, call, content, cut, tool};

fn phi() -> Case {
    tool(ToolFormat::Phi4)
}

#[test]
fn calls_are_parsed() {
    let both = [call(0, "weather", r#"{"city": "a]}"}"#), call(1, "now", "{}")].concat();
    for text in [
        r#"functools[{"name": "weather", "arguments": {"city": "a]}"}}, {"name": "now", "arguments": {}}]"#,
        "functools [\n{\"arguments\": {\"city\": \"a]}\"}, \"name\": \"weather\"}\n,\n{\"name\": \"now\"} ]\n",
        r#"functools[{"name": "weather", "arguments": {"city": "a]}"}}]functools[{"name": "now", "arguments": {}}]"#,
        r#"<|tool_call|>[{"name": "weather", "arguments": {"city": "a]}"}}, {"name": "now", "arguments": {}}]<|/tool_call|>"#,
        "functools[{\"name\": \"weather\", \"arguments\": {\"city\": \"a]}\"}}]\nfunctools[{\"name\": \"now\", \"arguments\": {}}]",
    ] {
        phi().reads(text, &both);
    }
}

#[test]
fn text_around_calls_is_content() {
    let text =
        r#"Now: functools[{"name": "now", "arguments": {}}] and functools[{"name": "b", "arguments": {}}]."#;
    let expected = [
        vec![content("Now: ")],
        call(0, "now", "{}"),
        vec![content(" and ")],
        call(1, "b", "{}"),
        vec![content(".")],
    ];
    phi().reads(text, &expected.concat());
}

#[test]
fn text_that_is_not_a_call_stays_text() {
    for text in [
        "import functools\n\n@functools.cache\ndef f(): pass",
        "functools",
        "functool",
        "functools[",
        "functools[]",
        "functools[1, 2]",
        "functools[{\"a\": 1}]",
        "functools[{\"name\": \"now\"",
        "functools{\"name\": \"now\"}",
    ] {
        phi().is_text(text);
    }
    phi().reads(
        r#"functools functools[{"name": "now"}]"#,
        &[vec![content("functools ")], call(0, "now", "{}")].concat(),
    );
}

#[test]
fn a_malformed_or_cut_off_call_keeps_its_arguments() {
    phi().reads(
        r#"functools[{"name": "now", "arguments": {}}, {"name": "f", "arguments": {"a": "b"#,
        &[call(0, "now", "{}"), cut(1, "f", "{\"a\": \"b")].concat(),
    );
    phi().reads(
        r#"functools[{"name": "now", "arguments": {}}, oops]"#,
        &[call(0, "now", "{}"), vec![content(", oops]")]].concat(),
    );
}

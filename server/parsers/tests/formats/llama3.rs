//! Tests the formats `{"name": …, "parameters": …}` and `[f(a=1), g()]`, with markers and without them.

use server_parsers::{Delta, ToolFormat};

use crate::check::{Case, call, content, cut, tool};

fn llama() -> Case {
    tool(ToolFormat::Llama3)
}

#[test]
fn json_calls_are_parsed() {
    let paris = call(0, "weather", r#"{"city": "a; b}"}"#);
    let both = [paris.clone(), call(1, "now", "{}")].concat();
    for text in [
        r#"{"name": "weather", "parameters": {"city": "a; b}"}}"#,
        r#"<|python_tag|>{"name": "weather", "parameters": {"city": "a; b}"}}"#,
        "\n<|python_tag|>\n{\"type\": \"function\", \"name\": \"weather\", \"parameters\": {\"city\": \"a; b}\"}}\n",
        r#"{"name": "weather", "arguments": {"city": "a; b}"}}"#,
        r#"{"parameters": {"city": "a; b}"}, "name": "weather"}"#,
        r#"[{"name": "weather", "parameters": {"city": "a; b}"}}]"#,
    ] {
        llama().reads(text, &paris);
    }
    for separator in [";", "; ", "\n", " ; \n", ""] {
        let text = format!(
            r#"{{"name": "weather", "parameters": {{"city": "a; b}}"}}}}{separator}{{"name": "now", "parameters": {{}}}}"#
        );
        llama().reads(&text, &both);
        llama().reads(&format!("<|python_tag|>{text}"), &both);
    }
    llama().reads(
        "{\"name\": \"weather\", \"parameters\": {\"city\": \"a; b}\"}}\n<|python_tag|>{\"name\": \"now\", \"parameters\": {}}",
        &both,
    );
}

#[test]
fn python_calls_are_parsed() {
    let arguments =
        r#"{"city":"Pa'ris","days":-3,"share":-0.5,"tags":["a",[1,null],{"b":true}],"metric":false}"#;
    let both = [call(0, "weather", arguments), call(1, "now", "{}")].concat();
    let python = "[weather(city=\"Pa'ris\", days=-3,share=-.5, tags=['a', [1, None], {'b': True}], metric = False), now()]";
    for text in [
        python.to_owned(),
        format!("\n{python}\n"),
        format!("<|python_start|>{python}<|python_end|>"),
        format!("<|python_start|>\n{python}\n<|python_end|>\n"),
        format!("<|python_tag|>{python}"),
        "[ weather( city='Pa\\'ris' , days=-3, share=-0.5, tags=(\"a\", (1, None,), {\"b\": True},), metric=False, ) ,\nnow( ) , ]".to_owned(),
    ] {
        llama().reads(&text, &both);
    }
    llama().reads("[a.b(x=1)]", &call(0, "a.b", "{\"x\":1}"));
}

#[test]
fn python_values_get_the_types_of_the_tool() {
    llama().reads(
        "[weather(city=75001, days=\"3\", share='0.5', metric='True', where=\"{'a': 1}\", note=None, any=5)]",
        &call(
            0,
            "weather",
            r#"{"city":"75001","days":3,"share":0.5,"metric":true,"where":{"a":1},"note":null,"any":5}"#,
        ),
    );
    llama().reads("[other(a=1, b='1')]", &call(0, "other", r#"{"a":1,"b":"1"}"#));
}

#[test]
fn a_response_in_json_is_content() {
    for text in [
        r#"{"name": "Bob", "age": 3}"#,
        r#"{"name": "Bob"}"#,
        r#"{"parameters": {"a": 1}}"#,
        r#"{"name": 3, "parameters": {}}"#,
        r#"{"name": "f", "parameters": [1]}"#,
        r#"{"items": [{"name": "f", "parameters": {}}]}"#,
        r#"{"a": 1}; {"b": 2}"#,
        "{}",
        "[]",
        "[1, 2, 3]",
        "[{\"a\": 1}]",
        "{",
        "[",
        "{not json}",
        "```json\n{\"name\": \"now\", \"parameters\": {}}\n```",
    ] {
        llama().is_text(text);
    }
}

#[test]
fn prose_in_brackets_is_content() {
    for text in [
        "[see (this) and that]",
        "[link](https://example.com)",
        "[f(x)]",
        "[f(1, 2)]",
        "[f(a==1)]",
        "[f(a=b)]",
        "[f(a=g(1))]",
        "[now]",
        "[1](https://example.com/f(x)/)",
        "[1, 2](3)",
        "[2(3 + 4)]",
        "[f(https://example.com)]",
        "[f(a: int, b: str)]",
        "[-1, .5]",
        "[0-9()]",
        "[-()]",
        "[2(x=3)]",
        "Use [now()] for it.",
        "<|python_tag|>print('x')",
        "<|python_start|>import os<|python_end|>",
        "<|python",
    ] {
        llama().is_text(text);
    }
}

#[test]
fn text_around_marked_calls_is_content() {
    llama().reads(
        "I look. <|python_tag|>{\"name\": \"now\", \"parameters\": {}} Then <|python_start|>[a(x=1)]<|python_end|> done",
        &[
            vec![content("I look. ")],
            call(0, "now", "{}"),
            vec![content(" Then ")],
            call(1, "a", "{\"x\":1}"),
            vec![content(" done")],
        ]
        .concat(),
    );
    llama().reads("[now()] and more", &[call(0, "now", "{}"), vec![content(" and more")]].concat());
}

#[test]
fn a_malformed_or_cut_off_call_keeps_its_arguments() {
    for (text, arguments) in [
        ("{\"name\": \"f\", \"parameters\": {\"a\": \"b", "{\"a\": \"b"),
        ("[f(a=\"b", "{\"a\":\"b"),
        ("[f(a=\"b\\", "{\"a\":\"b"),
        ("[f(a=12", "{\"a\":12"),
        ("[f(a=[1, 2", "{\"a\":[1,2"),
        ("[f(a=[1, Tr", "{\"a\":[1,tr"),
        ("[f(a=1, b", "{\"a\":1"),
        ("[f(a=1", "{\"a\":1"),
    ] {
        llama().reads(text, &cut(0, "f", arguments));
    }
    llama().reads("[f(a=1, b=c)]", &[cut(0, "f", "{\"a\":1"), vec![content(", b=c)]")]].concat());
    llama().reads("[f(a=[1, c])]", &[cut(0, "f", "{\"a\":[1"), vec![content(", c])]")]].concat());
    llama().reads("[f(a=1), g(b)]", &[call(0, "f", "{\"a\":1}"), vec![content(", g(b)]")]].concat());
    llama().is_text("[f(a");
    llama().is_text("[f(a=No");
    llama().is_text("[f(a=");
}

#[test]
fn a_json_response_is_held_back_until_it_cannot_be_a_call() {
    let mut parser = llama().parser();
    assert_eq!(parser.push("{\"name\": \"Bob\", \"age"), []);
    assert_eq!(parser.push("\": 3"), [content("{\"name\": \"Bob\", \"age\": 3")]);
    assert_eq!(parser.push(", \"x"), [content(", \"x")]);
    let mut parser = llama().parser();
    assert_eq!(parser.push("[weather("), []);
    assert_eq!(parser.push("city=\"P"), cut(0, "weather", "{\"city\":\"P"));
    assert_eq!(parser.push("aris"), [Delta::ToolCallArguments { index: 0, text: "aris".to_owned() }]);
}

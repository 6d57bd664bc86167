//! Tests the format `<|tool_call_start|>[f(a="x"), g()]<|tool_call_end|>`.

use server_parsers::{ReasoningFormat, ToolFormat};

use crate::check::{Case, both, call, content, cut, reasoning, tool};

fn lfm() -> Case {
    tool(ToolFormat::Lfm2)
}

#[test]
fn calls_are_parsed() {
    let arguments = r#"{"city":"a <|tool_call_end|> b","note":null,"days":-1}"#;
    let both = [call(0, "weather", arguments), call(1, "now", "{}")].concat();
    for text in [
        "<|tool_call_start|>[weather(city=\"a <|tool_call_end|> b\", note=None, days=-1), now()]<|tool_call_end|>",
        "<|tool_call_start|>[weather(city=\"a <|tool_call_end|> b\",note=None,days=-1),now()]",
        "<|tool_call_start|>\n[ weather(city=\"a <|tool_call_end|> b\", note=None, days=-1) , now() ]\n<|tool_call_end|>\n",
        "<|tool_call_start|>[weather(city=\"a <|tool_call_end|> b\", note=None, days=-1)]<|tool_call_end|><|tool_call_start|>[now()]<|tool_call_end|>",
        "<|tool_call_start|>[{\"name\": \"weather\", \"arguments\": {\"city\":\"a <|tool_call_end|> b\",\"note\":null,\"days\":-1}}, {\"name\": \"now\", \"arguments\": {}}]<|tool_call_end|>",
        "<|tool_call_start|>{\"name\": \"weather\", \"arguments\": {\"city\":\"a <|tool_call_end|> b\",\"note\":null,\"days\":-1}}\n{\"name\": \"now\"} <|tool_call_end|>",
    ] {
        lfm().reads(text, &both);
    }
}

#[test]
fn text_around_calls_is_content() {
    lfm().reads(
        "I look.<|tool_call_start|>[now()]<|tool_call_end|>Looked. <|tool_call_start|>[a(x=1)]<|tool_call_end|> Bye",
        &[
            vec![content("I look.")],
            call(0, "now", "{}"),
            vec![content("Looked. ")],
            call(1, "a", "{\"x\":1}"),
            vec![content(" Bye")],
        ]
        .concat(),
    );
}

#[test]
fn text_that_is_not_a_call_stays_text() {
    for text in [
        "<|tool_call_start|>",
        "<|tool_call_start|>now()<|tool_call_end|>",
        "<|tool_call_start|>[]<|tool_call_end|>",
        "<|tool_call_start|>[f(x)]<|tool_call_end|>",
        "[now()]",
        "<|tool_call",
        "<|tool_call_end|>",
    ] {
        lfm().is_text(text);
    }
    lfm().reads("<|tool_call_start|>[f(a='b", &cut(0, "f", "{\"a\":\"b"));
}

#[test]
fn quotes_within_strings_may_be_without_a_backslash() {
    for (arguments, json) in [
        ("code='sed -n '1,5p' x'", r#"{"code":"sed -n '1,5p' x"}"#),
        ("code='print('hi')', days=1", r#"{"code":"print('hi')","days":1}"#),
        ("code='f('a', 'b')'", r#"{"code":"f('a', 'b')"}"#),
        ("code='awk -F',' x',", r#"{"code":"awk -F',' x"}"#),
        (r#"code="say "hi" to "x".", b='c'"#, r#"{"code":"say \"hi\" to \"x\".","b":"c"}"#),
        ("code='it's', days = 1", r#"{"code":"it's","days":1}"#),
        (
            "tags=['it's', 'b', 'c'], where={'k': 'it's', 'l': 'm'}",
            r#"{"tags":["it's","b","c"],"where":{"k":"it's","l":"m"}}"#,
        ),
        ("days='it's'", r#"{"days":"it's"}"#),
        ("code='', b='' ", r#"{"code":"","b":""}"#),
        (r"code='a\'b', b='c'", r#"{"code":"a'b","b":"c"}"#),
        ("code='''it's''', b='c'", r#"{"code":"it's","b":"c"}"#),
        ("code='a) b', c='[x]'", r#"{"code":"a) b","c":"[x]"}"#),
    ] {
        let one = format!("<|tool_call_start|>[weather({arguments})]<|tool_call_end|>");
        lfm().reads(&one, &call(0, "weather", json));
        let two = format!("<|tool_call_start|>[weather({arguments}), now()]<|tool_call_end|> ok");
        lfm().reads(&two, &[call(0, "weather", json), call(1, "now", "{}"), vec![content(" ok")]].concat());
    }
    // The closing bracket of the list is missing.
    lfm().reads("<|tool_call_start|>[f(a='b')<|tool_call_end|>", &call(0, "f", r#"{"a":"b"}"#));
    // The text ends at the quote or soon after it.
    lfm().reads("<|tool_call_start|>[f(a='b'", &cut(0, "f", r#"{"a":"b""#));
    lfm().reads("<|tool_call_start|>[f(a='b')", &call(0, "f", r#"{"a":"b"}"#));
    lfm().reads("<|tool_call_start|>[f(a='b', c", &cut(0, "f", r#"{"a":"b""#));
    lfm().reads("<|tool_call_start|>[f(a='b' c", &cut(0, "f", r#"{"a":"b' c"#));
}

#[test]
fn names_have_all_characters_that_tools_may_have() {
    for name in ["3d_render", "ns/f:g", "a.b-c", "/f", ":f", "-f", ".f"] {
        let text = format!("<|tool_call_start|>[{name}(a='x'), {name}()]<|tool_call_end|>");
        lfm().reads(&text, &[call(0, name, r#"{"a":"x"}"#), call(1, name, "{}")].concat());
    }
    for key in ["$top", "@type", "3d", "xml:lang", "a/b", "x-id", "größe"] {
        let arguments = format!("q='x', {key}='y', {key} = 1");
        let json = format!(r#"{{"q":"x","{key}":"y","{key}":1}}"#);
        lfm().reads(
            &format!("<|tool_call_start|>[f({arguments}), 3d()]<|tool_call_end|>"),
            &[call(0, "f", &json), call(1, "3d", "{}")].concat(),
        );
    }
    // Numbers among calls are still text.
    lfm().is_text("<|tool_call_start|>[1, -2, $f()]<|tool_call_end|>");
    lfm().reads(
        "<|tool_call_start|>[1, -2, now()]<|tool_call_end|>",
        &[vec![content("<|tool_call_start|>[1, -2, ")], call(0, "now", "{}")].concat(),
    );
}

#[test]
fn a_malformed_sibling_does_not_hide_a_call() {
    lfm().reads(
        "<|tool_call_start|>[f(x), now()]<|tool_call_end|> ok",
        &[vec![content("<|tool_call_start|>[f(x), ")], call(0, "now", "{}"), vec![content(" ok")]].concat(),
    );
    lfm().reads(
        "<|tool_call_start|>[now(), f('a, b', [1]), g, weather(days=1)]<|tool_call_end|>",
        &[call(0, "now", "{}"), vec![content(", f('a, b', [1]), g, ")], call(1, "weather", r#"{"days":1}"#)]
            .concat(),
    );
    lfm().reads(
        r#"<|tool_call_start|>[{"name": 1}, {"name": "now"}]<|tool_call_end|>"#,
        &[vec![content(r#"<|tool_call_start|>[{"name": 1}, "#)], call(0, "now", "{}")].concat(),
    );
    lfm().is_text("<|tool_call_start|>[f(x), g(y)]<|tool_call_end|>");
    lfm().reads(
        "<|tool_call_start|>[f(x, <|tool_call_start|>[now()]<|tool_call_end|>",
        &[vec![content("<|tool_call_start|>[f(x, ")], call(0, "now", "{}")].concat(),
    );
    // Without a marker, such a list is content.
    tool(ToolFormat::Llama3).is_text("[f(x), now()]");
}

#[test]
fn the_newer_models_think() {
    both(ToolFormat::Lfm2, ReasoningFormat::Qwen3).reads(
        "<think>Hm [now()].</think>\n<|tool_call_start|>[now()]<|tool_call_end|>",
        &[vec![reasoning("Hm [now()].")], call(0, "now", "{}")].concat(),
    );
}

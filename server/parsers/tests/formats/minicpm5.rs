//! Tests the format `<function name="f"><param name="a">…</param></function>`.

use server_parsers::{ReasoningFormat, ToolFormat};

use crate::check::{Case, both, call, content, cut, reasoning, tool};

fn mini() -> Case {
    tool(ToolFormat::MiniCpm5)
}

#[test]
fn calls_are_parsed() {
    let paris = call(0, "weather", r#"{"city":"Paris","days":3}"#);
    for text in [
        "<function name=\"weather\"><param name=\"city\">Paris</param><param name=\"days\">3</param></function>",
        "<function name='weather'>\n<param name='city'>\nParis\n</param>\n<param name='days'>\n3\n</param>\n</function>\n",
        "<function name=weather><param name=city >Paris</param><param name=days>3</param></function>",
        "<function name=\"weather\" ><param name=\"city\"><![CDATA[Paris]]></param><param name=\"days\"><![CDATA[3]]></param></function>",
        "<function name=\"weather\"><param name=\"city\">\n<![CDATA[Pa]]>ris\n</param><param name=\"days\">3</param></function>",
    ] {
        mini().reads(text, &paris);
    }
    for text in
        ["<function name=\"now\"></function>", "<function name=\"now\"/>", "<function name=now>\n</function>"]
    {
        mini().reads(text, &call(0, "now", "{}"));
    }
}

#[test]
fn cdata_is_verbatim() {
    for (value, meant) in [
        ("<![CDATA[a < b && \"c\" </param></function>]]>", "a < b && \\\"c\\\" </param></function>"),
        ("<![CDATA[\na\n]]>", "\\na\\n"),
        ("\n<![CDATA[a]]>\n", "a"),
        ("<![CDATA[]]>", ""),
        ("<![CDATA[a]] >]]]>", "a]] >]"),
        ("x<![CDATA[1]]>\n<![CDATA[2]]>y", "x1\\n2y"),
        ("<![CDAT", "<![CDAT"),
        ("&lt;", "&lt;"),
        ("</param> x", "</param> x"),
    ] {
        let text = format!("<function name=\"f\"><param name=\"a\">{value}</param></function>");
        mini().reads(&text, &call(0, "f", &format!("{{\"a\":\"{meant}\"}}")));
    }
}

#[test]
fn text_around_calls_is_content() {
    mini().reads(
        "I look. <function name=\"now\"></function> and\n<function name=\"f\"><param name=\"a\">1</param><param name=\"a\">2</param></function>\n<function name=\"now\"></function> so",
        &[
            vec![content("I look. ")],
            call(0, "now", "{}"),
            vec![content(" and\n")],
            call(1, "f", "{\"a\":\"1\"}"),
            call(2, "now", "{}"),
            vec![content(" so")],
        ]
        .concat(),
    );
}

#[test]
fn text_that_is_not_a_call_stays_text() {
    for text in [
        "<function",
        "<function name=",
        "<function name=\"\"></function>",
        "<function name=\"f\" id=\"1\"></function>",
        "<function name=\"f\">",
        "<function name=\"f\">text</function>",
        "<function name=\"f\n\"></function>",
        "<function=f></function>",
    ] {
        mini().is_text(text);
    }
    mini().reads("<function name=\"f\"><param name=\"a\">b", &cut(0, "f", "{\"a\":\"b"));
    mini().reads("<function name=\"f\"><param name=\"a\"><![CDATA[b]", &cut(0, "f", "{\"a\":\"b"));
}

#[test]
fn reasoning_precedes_calls() {
    both(ToolFormat::MiniCpm5, ReasoningFormat::MiniCpm5).reads(
        "<think>\n<function name=\"now\"></function>\n</think>\n\n<function name=\"now\"></function>",
        &[vec![reasoning("<function name=\"now\"></function>\n")], call(0, "now", "{}")].concat(),
    );
}

//! Tests the format `<tool_call><function=f><parameter=a>…</parameter></function></tool_call>`.

use server_parsers::{Delta, ReasoningFormat, ToolFormat};

use crate::check::{Case, both, call, content, cut, reasoning, tool};

fn qwen() -> Case {
    tool(ToolFormat::Qwen3Coder)
}

#[test]
fn calls_are_parsed() {
    let paris = call(0, "weather", r#"{"city":"Paris","days":3}"#);
    for text in [
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "<tool_call><function=weather><parameter=city>Paris</parameter><parameter=days>3</parameter></function></tool_call>",
        "<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>",
        "<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n",
        // Models sometimes omit parts of a call.
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</function>",
        "<tool_call>\n<function=\"weather\">\n<parameter=\"city\">\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>",
    ] {
        qwen().reads(text, &paris);
    }
    for text in [
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<function=now></function>",
        "<tool_call><function=now></tool_call>",
    ] {
        qwen().reads(text, &call(0, "now", "{}"));
    }
}

#[test]
fn values_are_typed_by_the_tool() {
    let text = "<function=weather><parameter=city>5</parameter><parameter=days>5</parameter><parameter=share>5.5</parameter><parameter=metric>True</parameter><parameter=note>null</parameter><parameter=limit>null</parameter><parameter=where>{\"a\": [1]}</parameter><parameter=tags>['a', None]</parameter><parameter=either>7</parameter><parameter=any>5</parameter><parameter=unknown>5</parameter></function>";
    let arguments = r#"{"city":"5","days":5,"share":5.5,"metric":true,"note":null,"limit":null,"where":{"a": [1]},"tags":["a",null],"either":7,"any":"5","unknown":"5"}"#;
    qwen().reads(text, &call(0, "weather", arguments));
    let text = "<function=weather><parameter=days>many</parameter><parameter=note>nullify</parameter><parameter=note2>x</parameter><parameter=where>{oops</parameter><parameter=either>seven</parameter></function>";
    let arguments = r#"{"days":"many","note":"nullify","note2":"x","where":"{oops","either":"seven"}"#;
    qwen().reads(text, &call(0, "weather", arguments));
    qwen().reads("<function=other><parameter=a>1</parameter></function>", &call(0, "other", r#"{"a":"1"}"#));
}

#[test]
fn one_newline_is_trimmed_on_each_side_of_a_value() {
    for (value, meant) in [
        ("\na\n", "a"),
        ("\n\na\n\n", "\\na\\n"),
        (" a ", " a "),
        ("", ""),
        ("\n", ""),
        ("\n\n", ""),
        ("\n\n\n", "\\n"),
        ("\n  a\n  b\n", "  a\\n  b"),
        ("say \"hi\" \\n", "say \\\"hi\\\" \\\\n"),
    ] {
        let text = format!("<function=weather><parameter=city>{value}</parameter></function>");
        qwen().reads(&text, &call(0, "weather", &format!("{{\"city\":\"{meant}\"}}")));
    }
}

#[test]
fn a_value_may_contain_tags() {
    for value in [
        "a </parameter> b",
        "</parameter",
        "<parameter=x>",
        "a </function> b",
        "</function>\n</parameter> </para",
        "</parameter></parameter>",
        "<tool_call> </tool_call>",
        "</parameter>\n<param",
    ] {
        let text =
            format!("<tool_call><function=f><parameter=a>\n{value}\n</parameter>\n</function></tool_call>");
        let arguments = format!("{{\"a\":\"{}\"}}", value.replace('\n', "\\n"));
        qwen().reads(&text, &call(0, "f", &arguments));
    }
}

#[test]
fn the_first_of_two_arguments_with_the_same_name_counts() {
    qwen().reads(
        "<function=f><parameter=a>1</parameter><parameter=b>2</parameter><parameter=a>3</parameter></function>",
        &call(0, "f", r#"{"a":"1","b":"2"}"#),
    );
}

#[test]
fn text_around_calls_is_content() {
    qwen().reads(
        "I look.\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>\nand <function=now></function> so",
        &[
            vec![content("I look.\n\n")],
            call(0, "now", "{}"),
            call(1, "now", "{}"),
            vec![content("\nand ")],
            call(2, "now", "{}"),
            vec![content(" so")],
        ]
        .concat(),
    );
}

#[test]
fn text_that_is_not_a_call_stays_text() {
    for text in [
        "<tool_call>",
        "<tool_call>\n<function=",
        "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>",
        "<function=>",
        "<function=f> is how it is written",
        "<function=f\n>",
        "<function=f><parameter=",
        "<func",
        "</function>",
        "if a <tool_call> b",
    ] {
        qwen().is_text(text);
    }
    for broken in ["<tool_call>x", "<tool_call><function=", "<function=f>", "<"] {
        let text = format!("{broken}<function=now></function>");
        qwen().reads(&text, &[vec![content(broken)], call(0, "now", "{}")].concat());
    }
}

#[test]
fn a_malformed_or_cut_off_call_keeps_its_arguments() {
    for (text, arguments) in [
        ("<function=weather><parameter=city>", "{\"city\":\""),
        ("<function=weather><parameter=city>\nPar", "{\"city\":\"Par"),
        ("<function=weather><parameter=city>\nParis\n</para", "{\"city\":\"Paris"),
        ("<function=weather><parameter=city>\nParis\n</parameter>", "{\"city\":\"Paris\""),
        ("<function=weather><parameter=city>\nParis\n</parameter>\n<param", "{\"city\":\"Paris\""),
        ("<function=weather><parameter=days>1", "{\"days\":1"),
        ("<function=weather><parameter=metric>tr", "{\"metric\":tr"),
        ("<function=weather><parameter=metric>", "{\"metric\":"),
        ("<function=weather><parameter=note>nul", "{\"note\":nul"),
        ("<function=weather><parameter=days>ma", "{\"days\":\"ma"),
        ("<function=weather><parameter=where>{'a", "{\"where\":\"{'a"),
        ("<function=weather><parameter=where>{\"a\":[1", "{\"where\":{\"a\":[1"),
    ] {
        qwen().reads(text, &cut(0, "weather", arguments));
    }
    qwen().reads(
        "<function=f><parameter=a>1</parameter><parameter=\n",
        &[cut(0, "f", "{\"a\":\"1\""), vec![content("<parameter=\n")]].concat(),
    );
}

#[test]
fn text_is_passed_on_as_it_arrives() {
    let more = |text: &str| Delta::ToolCallArguments { index: 0, text: text.to_owned() };
    let mut parser = qwen().parser();
    assert_eq!(parser.push("<tool_call>\n<function=weather>\n"), []);
    assert_eq!(parser.push("<parameter=city>\n"), cut(0, "weather", "{\"city\":\""));
    assert_eq!(parser.push("Pa"), [more("Pa")]);
    assert_eq!(parser.push("ris\n"), [more("ris")]);
    assert_eq!(parser.push("\n<"), [more("\\n")]);
    assert_eq!(parser.push("b></parameter>\n</func"), [more("\\n<b>")]);
    assert_eq!(parser.push("tion>"), [more("\"}"), Delta::ToolCallEnd { index: 0 }]);
    assert_eq!(parser.push("\n</tool_call>"), []);
    assert_eq!(parser.finish(), []);
}

#[test]
fn reasoning_precedes_calls() {
    both(ToolFormat::Qwen3Coder, ReasoningFormat::Qwen3).after("<think>\n").reads(
        "I look.\n</think>\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        &[vec![reasoning("I look.\n")], call(0, "now", "{}")].concat(),
    );
}

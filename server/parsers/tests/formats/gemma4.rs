//! Tests the format `<|tool_call>call:f{k:v}<tool_call|>` and Gemma 3's code blocks.

use server_parsers::{Delta, ReasoningFormat, ToolFormat};

use crate::check::{Case, both, call, content, cut, reasoning, tool};

fn gemma() -> Case {
    tool(ToolFormat::Gemma4)
}

#[test]
fn calls_are_parsed() {
    let arguments = r#"{"city":"Paris","days":-3,"share":0.5,"metric":true,"note":null,"tags":["a",1,[],{}],"where":{"a":{"b":[1]}}}"#;
    for text in [
        "<|tool_call>call:weather{city:<|\"|>Paris<|\"|>,days:-3,share:0.5,metric:true,note:null,tags:[<|\"|>a<|\"|>,1,[],{}],where:{a:{b:[1]}}}<tool_call|>",
        "\n<|tool_call> call:weather{ city : <|\"|>Paris<|\"|> ,\n days: -3 , share:0.5, metric:true, note:null, tags: [ <|\"|>a<|\"|> , 1, [ ], { } ], where:{ a: {b:[1]}}, }\n<tool_call|>\n",
        "<|tool_call>call:weather{<|\"|>city<|\"|>:\"Paris\",\"days\":-3,share:0.5,metric:true,note:null,tags:[\"a\",1,[],{}],where:{a:{b:[1]}}}",
        "<|tool_call>call:weather{city:Paris,days:-3,share:0.5,metric:True,note:None,tags:[a,1,[],{}],where:{a:{b:[1]}}}<tool_call|><turn|>",
    ] {
        gemma().reads(text, &call(0, "weather", arguments));
    }
    gemma().reads("<|tool_call>call:now{}<tool_call|>", &call(0, "now", "{}"));
}

#[test]
fn strings_are_verbatim() {
    for (value, meant) in [
        ("D:\\temp", "D:\\\\temp"),
        ("say \"hi\"\n}", "say \\\"hi\\\"\\n}"),
        ("<tool_call|> <| <|\" <|\"|", "<tool_call|> <| <|\\\" <|\\\"|"),
        ("{\"a\": \"b\\n\"}", "{\\\"a\\\": \\\"b\\\\n\\\"}"),
        ("", ""),
        ("a,b:[c]", "a,b:[c]"),
        ("5", "5"),
        ("<<|", "<<|"),
    ] {
        let text = format!("<|tool_call>call:f{{a:<|\"|>{value}<|\"|>}}<tool_call|>");
        gemma().reads(&text, &call(0, "f", &format!("{{\"a\":\"{meant}\"}}")));
    }
}

#[test]
fn names_have_all_characters_that_tools_may_have() {
    for name in ["3d_render", "ns/f:g", "a.b-c", "/f"] {
        let text = format!("<|tool_call>call:{name}{{a:1}}<tool_call|>");
        gemma().reads(&text, &call(0, name, "{\"a\":1}"));
    }
    for key in ["filter[status]", "xml:lang", "a,b", "{", "<tool_call|>", " a", "\\n"] {
        let text = format!("<|tool_call>call:f{{$top:1,\"{key}\":<|\"|>x<|\"|>,@type:2}}<tool_call|>");
        let json = format!(r#"{{"$top":1,"{key}":"x","@type":2}}"#);
        gemma().reads(&text, &call(0, "f", &json));
    }
}

#[test]
fn code_may_follow_a_call_in_a_string() {
    // If the text after the parenthesis cannot begin a Python name, it does not begin another call.
    for code in ["g('x') $y", "g('x').y", "g('x') - 1", "g('x') / 2"] {
        let text = format!("```tool_code\nf(code='{code}')\n```");
        gemma().reads(&text, &call(0, "f", &format!("{{\"code\":\"{code}\"}}")));
    }
}

#[test]
fn several_calls_are_parsed() {
    let both = [call(0, "a", "{\"x\":1}"), call(1, "b", "{}")].concat();
    for text in [
        "<|tool_call>call:a{x:1}<tool_call|><|tool_call>call:b{}<tool_call|>",
        "<|tool_call>call:a{x:1}<tool_call|>\n<|tool_call>call:b{}<tool_call|>",
        "<|tool_call>call:a{x:1}call:b{}<tool_call|>",
        "<|tool_call>call:a{x:1}\ncall:b{}<tool_call|><|tool_response>",
        "<|tool_call>call:a{x:1}<|tool_call>call:b{}",
    ] {
        gemma().reads(text, &both);
    }
}

#[test]
fn the_end_marker_closes_open_brackets() {
    for (arguments, json) in [
        ("city:<|\"|>Paris<|\"|>,guests:4", r#"{"city":"Paris","guests":4}"#),
        ("guests:4 ", r#"{"guests":4}"#),
        ("city:Paris", r#"{"city":"Paris"}"#),
        ("city:<|\"|>Paris<|\"|>", r#"{"city":"Paris"}"#),
        ("guests:4,", r#"{"guests":4}"#),
        ("a:{b:[1,true", r#"{"a":{"b":[1,true]}}"#),
        ("a:{b:[1]", r#"{"a":{"b":[1]}}"#),
    ] {
        let text = format!("<|tool_call>call:f{{{arguments}<tool_call|>");
        gemma().reads(&text, &call(0, "f", json));
        gemma().reads(&format!("{text}ok"), &[call(0, "f", json), vec![content("ok")]].concat());
        let two = format!("{text}\n<|tool_call>call:now{{}}<tool_call|>");
        gemma().reads(&two, &[call(0, "f", json), call(1, "now", "{}")].concat());
    }
    gemma().reads(
        "<|tool_call>call:f{guests:4<|tool_call>call:now{}<tool_call|>",
        &[cut(0, "f", "{\"guests\":"), vec![content("4")], call(1, "now", "{}")].concat(),
    );
    gemma().reads("<|tool_call>call:f{guests:4<tool_", &cut(0, "f", "{\"guests\":4"));
}

#[test]
fn text_around_calls_is_content() {
    gemma().reads(
        "I look. <|tool_call>call:now{}<tool_call|> and <|tool_call>call:now{}<tool_call|> so.<turn|>",
        &[
            vec![content("I look. ")],
            call(0, "now", "{}"),
            vec![content(" and ")],
            call(1, "now", "{}"),
            vec![content(" so.")],
        ]
        .concat(),
    );
}

#[test]
fn text_that_is_not_a_call_stays_text() {
    for text in [
        "<|tool_call>",
        "<|tool_call>call:",
        "<|tool_call>call:f",
        "<|tool_call>call:{}",
        "<|tool_call>call:f{ ,}<tool_call|>",
        "<|tool_call>call:f{a}<tool_call|>",
        "<|tool_call>now{}",
        "<|tool_call>call:f(a=1)<tool_call|>",
        "call:now{}",
        "<|tool_ca",
        "<|tool_call>c<|tool_call>",
    ] {
        gemma().is_text(text);
    }
    gemma().reads("<|tool_call>call:f{a:<|\"|>b<|", &cut(0, "f", "{\"a\":\"b"));
    gemma().reads("<|tool_call>call:f{a:12", &cut(0, "f", "{\"a\":12"));
    gemma().reads("<|tool_call>call:f{a:[1,", &cut(0, "f", "{\"a\":[1"));
    let broken = "<|tool_call>call:f{a:1,b:x<tool_|>";
    gemma().reads(broken, &[cut(0, "f", "{\"a\":1,\"b\":"), vec![content("x<tool_|>")]].concat());
    let broken = "<|tool_call>call:f{a:1,}:";
    gemma().reads(broken, &[call(0, "f", "{\"a\":1}"), vec![content(":")]].concat());
    let broken = "<|tool_call>call:f{a:1,]";
    gemma().reads(broken, &[cut(0, "f", "{\"a\":1"), vec![content(",]")]].concat());
}

#[test]
fn code_blocks_with_python_calls_are_parsed() {
    let both = [call(0, "weather", r#"{"city":"a ``` b"}"#), call(1, "now", "{}")].concat();
    for text in [
        "```tool_code\nweather(city=\"a ``` b\")\nnow()\n```",
        "```tool_code\nprint(weather(city='a ``` b'))\n```\n```tool_code\nprint(now())\n```",
        "```tool_code\nweather(city=\"a ``` b\")\nnow()",
        "```tool_code\n[weather(city=\"a ``` b\"), now()]\n```\n",
    ] {
        gemma().reads(text, &both);
    }
    gemma().reads(
        "See:\n```tool_code\nnow()\n```\nSo.",
        &[vec![content("See:\n")], call(0, "now", "{}"), vec![content("\nSo.")]].concat(),
    );
    for text in ["```tool_code\nx = 1\n```", "```python\nnow()\n```", "```tool_code", "```tool_code\n```"] {
        gemma().is_text(text);
    }
}

#[test]
fn reasoning_is_in_a_channel() {
    let thinking = both(ToolFormat::Gemma4, ReasoningFormat::Gemma4);
    let expected =
        [vec![reasoning("Hm <|tool_call>call:now{}<tool_call|>\n")], call(0, "now", "{}")].concat();
    let text = "Hm <|tool_call>call:now{}<tool_call|>\n<channel|><|tool_call>call:now{}<tool_call|>";
    thinking.reads(&format!("<|channel>thought\n{text}"), &expected);
    thinking.clone().after("<|turn>model\n<|channel>thought\n").reads(text, &expected);
    thinking.reads("a<|channel>thought\nb<channel|>c", &[content("a"), reasoning("b"), content("c")]);
    thinking.reads("<|channel>thought\n<channel|>Hi", &[content("Hi")]);
    thinking.is_text("<|channel>thou");
    thinking.is_text("a <channel|>");
}

#[test]
fn text_is_passed_on_as_it_arrives() {
    let more = |text: &str| Delta::ToolCallArguments { index: 0, text: text.to_owned() };
    let mut parser = gemma().parser();
    assert_eq!(parser.push("<|tool_call>call:f"), []);
    assert_eq!(parser.push("{a:<|\"|>"), cut(0, "f", "{\"a\":\""));
    assert_eq!(parser.push("x<|"), [more("x")]);
    assert_eq!(parser.push("y"), [more("<|y")]);
    assert_eq!(parser.push("<|\"|>,b:1"), [more("\",\"b\":")]);
    assert_eq!(parser.push("}"), [more("1}"), Delta::ToolCallEnd { index: 0 }]);
}

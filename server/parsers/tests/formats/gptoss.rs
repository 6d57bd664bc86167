//! Tests the Harmony format.

use server_parsers::{Delta, ReasoningFormat, ToolFormat};

use crate::check::{Case, both, call, content, cut, reasoning, tool};

fn gptoss() -> Case {
    both(ToolFormat::Gptoss, ReasoningFormat::Gptoss)
}

#[test]
fn channels_are_distinguished() {
    gptoss().reads(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>",
        &[reasoning("Hm."), content("Hello.")],
    );
    gptoss().reads("<|channel|>final<|message|>Hello.", &[content("Hello.")]);
    gptoss().reads("<|channel|>analysis<|message|>Hm.", &[reasoning("Hm.")]);
    gptoss().reads("<|start|>assistant<|message|>Hello.<|end|>", &[content("Hello.")]);
    gptoss().reads("<|message|>Hello.", &[content("Hello.")]);
    gptoss().reads("<|channel|>other<|message|>Hello.", &[content("Hello.")]);
    // A preamble is content.
    gptoss().reads("<|channel|>commentary<|message|>I look.<|end|>", &[content("I look.")]);
}

#[test]
fn calls_are_parsed() {
    let arguments = r#"{"city": "<|call|> <|end|> }"}"#;
    for header in [
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.weather<|message|>",
        "<|channel|>commentary to=functions.weather json<|message|>\n",
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        "<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|> ",
        " to=functions.weather<|channel|>commentary <|constrain|>json<|message|>",
        // A call in the analysis channel is parsed, too.
        "<|channel|>analysis to=functions.weather <|constrain|>json<|message|>",
        "<|channel|>commentary to=weather code<|message|>",
    ] {
        for end in ["<|call|>", "", "\n<|call|>", "<|end|>", "<|call|>\n"] {
            gptoss().reads(&format!("{header}{arguments}{end}"), &call(0, "weather", arguments));
        }
    }
    for body in ["", "{}", " \n{}\n"] {
        let text =
            format!("<|channel|>commentary to=functions.now <|constrain|>json<|message|>{body}<|call|>");
        gptoss().reads(&text, &call(0, "now", "{}"));
    }
}

#[test]
fn a_whole_turn_is_parsed() {
    let text = "<|channel|>analysis<|message|>First.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>analysis<|message|>Second.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|channel|>commentary<|message|>{\"a\": 1}<|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>";
    gptoss().reads(
        text,
        &[
            vec![reasoning("First."), content("I look.")],
            call(0, "now", "{}"),
            vec![reasoning("\nSecond.")],
            call(1, "f", "{\"a\": 1}"),
            vec![content("\nDone.")],
        ]
        .concat(),
    );
}

#[test]
fn messages_of_a_kind_are_joined_by_a_newline() {
    gptoss().reads(
        "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|><|end|><|start|>assistant<|channel|>final<|message|>b<|end|>",
        &[content("a\nb")],
    );
    // No `<|end|>` token separates the messages.
    gptoss().reads(
        "<|channel|>analysis<|message|>a<|channel|>analysis<|message|>b<|start|>assistant<|channel|>final<|message|>c",
        &[reasoning("a\nb"), content("c")],
    );
}

#[test]
fn text_outside_of_messages_is_content() {
    gptoss().is_text("Hello.");
    gptoss().is_text("to be or not");
    gptoss().is_text(" ");
    gptoss().is_text("a < b <|");
    gptoss().reads("Hello.<|return|>", &[content("Hello.")]);
    gptoss().reads("Hello.\n<|channel|>final<|message|>You.", &[content("Hello.\nYou.")]);
    gptoss().reads("<|channel|>final<|message|>a<|end|>\n b", &[content("a\n\n b")]);
}

#[test]
fn text_that_is_not_a_header_stays_text() {
    for text in [
        "<|channel|>",
        "<|start|>assistant",
        "<|channel|>final\n<|x",
        "<|start|>assistant<|channel|>fin",
        "<|constrain|> alone",
        "<|channel|>final {x}<|message|>Hello.",
        "<|channel|>this is no header but a text of many words<|message|>Hello.",
    ] {
        gptoss().is_text(text);
    }
    let long = format!("<|channel|>{}", "x".repeat(600));
    gptoss().is_text(&long);
    gptoss().reads(
        "<|start|>assistant<|start|>assistant<|channel|>final<|message|>a",
        &[content("<|start|>assistanta")],
    );
    gptoss().reads(
        "<|channel|>final<|message|>a <|constrain|> b <|message|> c",
        &[content("a <|constrain|> b <|message|> c")],
    );
}

#[test]
fn a_call_without_valid_json_is_text_without_the_header() {
    let code = "<|channel|>commentary to=python code<|message|>print(1)<|call|>";
    gptoss().reads(code, &[content("print(1)")]);
    // In the analysis channel, such text is reasoning.
    let reasoned = "<|channel|>analysis to=python code<|message|>print({})\nx<|call|>";
    gptoss().reads(
        &format!(
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{reasoned}\
             <|start|>assistant<|channel|>final<|message|>1"
        ),
        &[reasoning("Hm.\nprint({})\nx"), content("1")],
    );
    gptoss().reads(
        "<|channel|>commentary to=functions.f<|message|> {\n 'a': 1}<|call|>",
        &[content(" {\n 'a': 1}")],
    );
    gptoss().reads(
        "<|channel|>commentary to=functions.f<|message|>{\"a\": b}<|call|>",
        &[cut(0, "f", "{\"a\": "), vec![content("b}")]].concat(),
    );
    gptoss().reads(
        "<|channel|>commentary to=functions.f<|message|>{}}<|call|>",
        &[call(0, "f", "{}"), vec![content("}")]].concat(),
    );
}

#[test]
fn a_call_that_is_cut_off_keeps_its_arguments() {
    let header = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>";
    gptoss().reads_cut(header, &cut(0, "f", ""));
    // Here, the model has ended its turn with a token that is not part of the text, so the call is complete and has no
    // arguments.
    gptoss().reads(header, &call(0, "f", "{}"));
    gptoss().reads(&format!("{header}{{\"a\": \"b\\"), &cut(0, "f", "{\"a\": \"b\\"));
}

#[test]
fn disabled_formats_are_text() {
    let call_text = "<|channel|>commentary to=functions.now<|message|>{}<|call|>";
    // Headers are markup even without tools.
    gptoss().without_tools().reads(call_text, &[content("{}")]);
    let code = "<|channel|>analysis to=python code<|message|>print(1)<|call|>";
    gptoss().without_tools().reads(code, &[reasoning("print(1)")]);
    let reasoned = format!("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{call_text}");
    gptoss().without_tools().reads(&reasoned, &[reasoning("Hm."), content("{}")]);
    tool(ToolFormat::Gptoss).reads(
        &reasoned,
        &[vec![content("<|channel|>analysis<|message|>Hm.<|end|>")], call(0, "now", "{}")].concat(),
    );
}

#[test]
fn text_is_passed_on_as_it_arrives() {
    let more = |text: &str| Delta::ToolCallArguments { index: 0, text: text.to_owned() };
    let mut parser = gptoss().parser();
    assert_eq!(parser.push("<|channel|>analysis<|message|>H"), [reasoning("H")]);
    assert_eq!(parser.push("m<|e"), [reasoning("m")]);
    assert_eq!(parser.push("nd|><|channel|>commentary to=functions.f<|message|>"), []);
    assert_eq!(parser.push("{\"a"), cut(0, "f", "{\"a"));
    assert_eq!(parser.push("\": <"), [more("\": ")]);
}

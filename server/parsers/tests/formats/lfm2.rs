//! `<|tool_call_start|>[f(a="x"), g()]<|tool_call_end|>`

use server_parsers::{ReasoningFormat, ToolFormat};

use crate::check::{Case, both, call, content, cut, reasoning, tool};

fn lfm() -> Case {
    tool(ToolFormat::Lfm2)
}

#[test]
fn calls_are_read() {
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
fn text_round_calls_is_content() {
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
fn what_is_no_call_is_text() {
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
fn the_newer_models_think() {
    both(ToolFormat::Lfm2, ReasoningFormat::Qwen3).reads(
        "<think>Hm [now()].</think>\n<|tool_call_start|>[now()]<|tool_call_end|>",
        &[vec![reasoning("Hm [now()].")], call(0, "now", "{}")].concat(),
    );
}

//! Checks the guarantees of `server-parsers` for arbitrary model output in every combination of formats. The first four
//! bytes of an input select the formats, whether the prompt has opened a reasoning section, and how the text is split.
//! The rest is the text.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use serde_json::json;
use server_parsers::{Delta, Formats, Parser, ReasoningFormat, ToolFormat, Tools};

/// Maximum number of elementary steps for each byte of text, as in the tests of the crate.
const WORK_PER_BYTE: u64 = 40;

fuzz_target!(|input: &[u8]| {
    let Some(([tool, reasoning, opened, cut], text)) = input.split_first_chunk() else { return };
    let formats = Formats {
        tool: ToolFormat::ALL[usize::from(*tool) % ToolFormat::ALL.len()],
        reasoning: ReasoningFormat::ALL[usize::from(*reasoning) % ReasoningFormat::ALL.len()],
    };
    if formats.check().is_err() {
        return;
    }
    let prompt = if opened % 2 == 0 { "" } else { "<think>\n" };
    let text = String::from_utf8_lossy(text);
    let whole = read(formats, prompt, [&*text]);
    // Without reasoning and tool calls, the whole text is content, except for Harmony's markup and Gemma's end-of-turn
    // tag.
    let is_plain = formats.reasoning == ReasoningFormat::None && formats.tool != ToolFormat::Gptoss;
    let calls = whole.iter().any(|delta| matches!(delta, Delta::ToolCallBegin { .. }));
    if is_plain && !calls && !text.contains("<turn|>") && !text.trim().is_empty() {
        assert_eq!(whole, [Delta::Content(text.clone().into_owned())], "a text without calls is content");
    }
    let letters = text.char_indices().map(|(at, letter)| &text[at..at + letter.len_utf8()]);
    assert_eq!(read(formats, prompt, letters), whole, "a text split into characters has the same deltas");
    // Split the text every few characters; the interval depends on the input.
    let every = usize::from(*cut) % 7 + 2;
    let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).step_by(every).chain([text.len()]).collect();
    let pieces = ends.windows(2).map(|ends| &text[ends[0]..ends[1]]);
    assert_eq!(
        read(formats, prompt, pieces),
        whole,
        "a text split every {every} characters has the same deltas"
    );
});

/// Returns the merged deltas of a text that is parsed in pieces.
fn read<'a>(formats: Formats, prompt: &str, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Delta> {
    let schema = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"},
        "note": {"type": ["string", "null"]}, "tags": {"type": "array"}, "metric": {"type": "boolean"},
    }});
    let tools = Arc::new(Tools::new([("weather", Some(&schema)), ("now", None)]));
    let mut parser = Parser::new(formats, &tools, prompt);
    let mut deltas: Vec<Delta> = Vec::new();
    let mut bytes = 0;
    for piece in pieces {
        deltas.extend(parser.push(piece));
        bytes += piece.len() as u64;
        assert!(parser.work() <= WORK_PER_BYTE * bytes, "{} steps for {bytes} bytes", parser.work());
    }
    deltas.extend(parser.finish());
    joined(deltas)
}

fn joined(deltas: Vec<Delta>) -> Vec<Delta> {
    let mut joined: Vec<Delta> = Vec::new();
    let mut calls = 0;
    for delta in deltas {
        match (&delta, joined.last_mut()) {
            (Delta::Content(more), _) | (Delta::Reasoning(more), _) if more.is_empty() => {
                panic!("a delta is empty")
            }
            (Delta::Content(more), Some(Delta::Content(text))) => text.push_str(more),
            (Delta::Reasoning(more), Some(Delta::Reasoning(text))) => text.push_str(more),
            (Delta::ToolCallArguments { text: more, .. }, Some(Delta::ToolCallArguments { text, .. })) => {
                text.push_str(more)
            }
            (Delta::ToolCallBegin { index, name }, _) => {
                assert!(*index == calls && !name.is_empty(), "call {index} of {calls}");
                calls += 1;
                joined.push(delta);
            }
            _ => joined.push(delta),
        }
    }
    joined
}

//! Parses transcripts, split at every position, and checks the guarantees of the parser.

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use server_parsers::{Delta, Formats, Parser, ReasoningFormat, ToolFormat, Tools};

/// A test case: the formats, the offered tools and the end of the prompt.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) formats: Formats,
    pub(crate) tools: Arc<Tools>,
    pub(crate) prompt: &'static str,
}

/// The tools that the transcripts use.
pub(crate) fn tools() -> Arc<Tools> {
    let weather = json!({"type": "object", "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "metric": {"type": "boolean"},
        "note": {"type": ["string", "null"]},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "where": {"type": "object"},
        "tags": {"type": "array"},
        "either": {"type": ["string", "integer"]},
        "any": {},
    }});
    Arc::new(Tools::new([("weather", Some(&weather)), ("now", None::<&Value>)]))
}

/// A test case with a tool format and without a reasoning format.
pub(crate) fn tool(tool: ToolFormat) -> Case {
    Case { formats: Formats { tool, reasoning: ReasoningFormat::None }, tools: tools(), prompt: "" }
}

/// A test case with a tool format and a reasoning format.
pub(crate) fn both(tool: ToolFormat, reasoning: ReasoningFormat) -> Case {
    Case { formats: Formats { tool, reasoning }, tools: tools(), prompt: "" }
}

impl Case {
    pub(crate) fn without_tools(mut self) -> Self {
        self.tools = Arc::default();
        self
    }

    pub(crate) fn after(mut self, prompt: &'static str) -> Self {
        self.prompt = prompt;
        self
    }

    pub(crate) fn parser(&self) -> Parser {
        self.formats.check().expect("the formats of a case are compatible");
        Parser::new(self.formats, &self.tools, self.prompt)
    }

    /// Asserts that `text` is parsed as `expected`, in one piece and however it is split.
    pub(crate) fn reads(&self, text: &str, expected: &[Delta]) {
        let expected = joined(expected.to_vec());
        assert_eq!(self.read([text]), expected, "in one piece: {text:?}");
        self.splits(text, &expected);
    }

    /// Asserts that a response that the token limit cuts off after `text` is parsed as `expected`, wherever it is
    /// split.
    pub(crate) fn reads_cut(&self, text: &str, expected: &[Delta]) {
        for (at, _) in text.char_indices() {
            let (head, tail) = text.split_at(at);
            let mut parser = self.parser();
            let mut deltas = parser.push(head);
            deltas.extend(parser.push(tail));
            deltas.extend(parser.finish_cut());
            well_formed(&deltas);
            assert_eq!(joined(deltas), joined(expected.to_vec()), "cut: {head:?} {tail:?}");
        }
    }

    /// Asserts that all of `text` is content.
    pub(crate) fn is_text(&self, text: &str) {
        self.reads(text, &[content(text)]);
    }

    /// Asserts that `text` is parsed as `expected`, however it is split.
    pub(crate) fn splits(&self, text: &str, expected: &[Delta]) {
        let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        for end in &ends {
            let (head, tail) = text.split_at(*end);
            assert_eq!(self.read([head, tail]), expected, "cut: {head:?} {tail:?}");
        }
        let letters: Vec<&str> = ends.windows(2).map(|ends| &text[ends[0]..ends[1]]).collect();
        assert_eq!(self.read(letters), expected, "character by character: {text:?}");
        for seed in 0..8 {
            let pieces = pieces(text, &mut StdRng::seed_from_u64(seed));
            assert_eq!(self.read(pieces.iter().copied()), expected, "seed {seed}: {pieces:?}");
        }
    }

    /// Parses a text in pieces. Returns the merged deltas, after checking the guarantees of the parser.
    pub(crate) fn read<'a>(&self, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Delta> {
        let mut parser = self.parser();
        let mut deltas = Vec::new();
        let mut bytes = 0;
        for piece in pieces {
            deltas.extend(parser.push(piece));
            bytes += piece.len() as u64;
            assert!(parser.work() <= WORK_PER_BYTE * bytes, "{} steps for {bytes} bytes", parser.work());
        }
        deltas.extend(parser.finish());
        well_formed(&deltas);
        joined(deltas)
    }
}

/// Maximum number of elementary steps for each byte of text.
pub(crate) const WORK_PER_BYTE: u64 = 40;

/// Splits `text` into pieces of random length, some of them empty.
fn pieces<'a>(text: &'a str, random: &mut StdRng) -> Vec<&'a str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let letters = random.random_range(0..12);
        let end = rest.char_indices().nth(letters).map_or(rest.len(), |(at, _)| at);
        let (piece, tail) = rest.split_at(end);
        pieces.push(piece);
        rest = tail;
    }
    pieces
}

/// Checks the guarantees that hold for the deltas of every response.
pub(crate) fn well_formed(deltas: &[Delta]) {
    let mut calls = 0;
    let mut open: Option<String> = None;
    for delta in deltas {
        match delta {
            Delta::Content(text) | Delta::Reasoning(text) => {
                assert!(!text.is_empty(), "an empty delta");
                open = None;
            }
            Delta::ToolCallBegin { index, name } => {
                assert_eq!(*index, calls, "indices count up");
                assert!(!name.is_empty(), "a call without a name");
                calls += 1;
                open = Some(String::new());
            }
            Delta::ToolCallArguments { index, text } => {
                assert!(!text.is_empty(), "an empty delta");
                assert_eq!(index + 1, calls, "arguments of the call that began last");
                open.as_mut().expect("arguments belong to an open call").push_str(text);
            }
            Delta::ToolCallEnd { index } => {
                assert_eq!(index + 1, calls, "the end of the call that began last");
                let arguments = open.take().expect("an end belongs to an open call");
                let value: Result<Value, _> = serde_json::from_str(&arguments);
                // A number that is too large for `serde_json` is still valid JSON.
                let is_range = value.as_ref().is_err_and(|error| error.to_string().contains("out of range"));
                assert!(is_range || value.is_ok_and(|value| value.is_object()), "not an object: {arguments}");
            }
        }
    }
}

/// Merges adjacent deltas of content, of reasoning and of arguments.
pub(crate) fn joined(deltas: Vec<Delta>) -> Vec<Delta> {
    let mut joined: Vec<Delta> = Vec::new();
    for delta in deltas {
        match (joined.last_mut(), &delta) {
            (Some(Delta::Content(last)), Delta::Content(text))
            | (Some(Delta::Reasoning(last)), Delta::Reasoning(text))
            | (Some(Delta::ToolCallArguments { text: last, .. }), Delta::ToolCallArguments { text, .. }) => {
                last.push_str(text);
            }
            _ => joined.push(delta),
        }
    }
    joined
}

pub(crate) fn content(text: &str) -> Delta {
    Delta::Content(text.to_owned())
}

pub(crate) fn reasoning(text: &str) -> Delta {
    Delta::Reasoning(text.to_owned())
}

/// Returns a call that was cut off, without a delta for the arguments if they are empty.
pub(crate) fn cut(index: u32, name: &str, arguments: &str) -> Vec<Delta> {
    let mut deltas = vec![Delta::ToolCallBegin { index, name: name.to_owned() }];
    if !arguments.is_empty() {
        deltas.push(Delta::ToolCallArguments { index, text: arguments.to_owned() });
    }
    deltas
}

/// Returns a complete call.
pub(crate) fn call(index: u32, name: &str, arguments: &str) -> Vec<Delta> {
    let mut deltas = cut(index, name, arguments);
    deltas.push(Delta::ToolCallEnd { index });
    deltas
}

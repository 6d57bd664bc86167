//! Tools in words, for templates that know none: as Hermes and Qwen are told of them, which other models follow
//! best. Calls are then read, and written, as `hermes3`.

use std::io;

use serde::Serialize as _;
use serde_json::ser::{Formatter, Serializer};
use serde_json::{Value, json};

/// What the model is told of its tools.
pub(super) fn tools(tools: &[Value]) -> String {
    let mut text = String::from(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n\
         You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
    );
    for tool in tools {
        text.push('\n');
        text.push_str(&spaced(tool));
    }
    text.push_str(
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments within \
         <tool_call></tool_call> XML tags:\n<tool_call>\n\
         {\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>",
    );
    text
}

/// A call as the model would have written it.
pub(super) fn call(name: &str, arguments: &Value) -> String {
    format!("<tool_call>\n{}\n</tool_call>", spaced(&json!({"name": name, "arguments": arguments})))
}

/// The result of a call.
pub(super) fn result(content: &str) -> String {
    format!("<tool_response>\n{content}\n</tool_response>")
}

/// The system's message at the beginning of a conversation, which gets one if it has none.
pub(super) fn system(messages: &mut Vec<Value>) -> &mut Value {
    if messages.first().is_none_or(|first| first["role"] != "system") {
        messages.insert(0, json!({"role": "system", "content": ""}));
    }
    &mut messages[0]
}

/// Adds to a message.
pub(super) fn add(message: &mut Value, text: &str) {
    let before = message["content"].as_str().unwrap_or_default();
    let joined = if before.is_empty() { text.to_owned() } else { format!("{before}\n\n{text}") };
    message["content"] = json!(joined);
}

/// Adds to the beginning of a message.
pub(super) fn add_before(message: &mut Value, text: &str) {
    let after = message["content"].as_str().unwrap_or_default();
    message["content"] = json!(format!("{text}\n\n{after}"));
}

/// JSON with a space after each comma and colon, as Python writes it and models have read it.
pub(super) fn spaced(value: &Value) -> String {
    let mut text = Vec::new();
    let written = value.serialize(&mut Serializer::with_formatter(&mut text, Spaced));
    written.expect("invariant: a value is JSON, and memory takes it");
    String::from_utf8(text).expect("invariant: JSON is UTF-8")
}

struct Spaced;

impl Spaced {
    fn separate<W: io::Write + ?Sized>(writer: &mut W, is_first: bool) -> io::Result<()> {
        if is_first { Ok(()) } else { writer.write_all(b", ") }
    }
}

impl Formatter for Spaced {
    fn begin_array_value<W: io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        Self::separate(writer, first)
    }

    fn begin_object_key<W: io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        Self::separate(writer, first)
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

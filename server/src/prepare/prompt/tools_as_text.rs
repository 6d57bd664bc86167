//! Describes tools, calls and results as text, for templates that do not render them. Tools are described with the
//! wording of the templates of Hermes and Qwen, which other models follow best. DeepSeek's models receive a different
//! description. Calls are in the model's own format if the template renders tools and the format is that of Phi-4,
//! Granite or LFM2. All other calls are in the format of Hermes. Results are in the format of Hermes and Qwen.

use std::io;

use serde::Serialize as _;
use serde_json::ser::{Formatter, Serializer};
use serde_json::{Value, json};
use server_parsers::ToolFormat;
use server_text::{ChatTemplate, ToolsLocation};

use crate::model::Model;

/// Returns the format of the text. If the template renders tools, this is the model's own format. Otherwise, it is the
/// format of Hermes, except for DeepSeek's models, because a description of tools exists for their format.
pub(super) fn format(model: &Model) -> ToolFormat {
    match (model.template_features.tools_location, model.formats.tool) {
        (_, ToolFormat::DeepSeek) => ToolFormat::DeepSeek,
        (ToolsLocation::Unsupported, _) => ToolFormat::Hermes3,
        (_, format) => format,
    }
}

/// Returns the description of the tools for the model.
pub(super) fn tools(tools: &[Value], model: &Model) -> String {
    if format(model) == ToolFormat::DeepSeek { deepseek_tools(tools, model) } else { hermes_tools(tools) }
}

fn hermes_tools(tools: &[Value]) -> String {
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

/// Returns the description of tools for DeepSeek's models. The template determines which of their two call formats the
/// description contains.
fn deepseek_tools(tools: &[Value], model: &Model) -> String {
    let template = model.text.chat_template.as_ref().map(ChatTemplate::source).unwrap_or_default();
    let call = if template.contains("```json") {
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>FUNCTION_NAME\n```json\n{\"parameter\": \"value\"}\n```<｜tool▁call▁end｜>"
    } else {
        "<｜tool▁call▁begin｜>FUNCTION_NAME<｜tool▁sep｜>{\"parameter\": \"value\"}<｜tool▁call▁end｜>"
    };
    let mut text = String::from("## Tools\n\nYou may call these functions:\n");
    for tool in tools {
        text.push_str(&format!("\n```json\n{}\n```\n", spaced(tool)));
    }
    text.push_str(&format!(
        "\nTo call functions, write the following text and nothing after it. To call several functions, repeat the \
         part between the first and the last marker:\n\
         <｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>\n\n\
         FUNCTION_NAME is the name of one of the functions. The JSON after it contains the arguments, which must match \
         the parameters of the function."
    ));
    text
}

/// Returns the text of calls: in the given format for Phi-4, Granite and LFM2, and otherwise in that of Hermes.
pub(super) fn calls(calls: &[(&str, &Value)], format: ToolFormat) -> String {
    let objects = calls.iter().map(|(name, arguments)| json!({"name": name, "arguments": arguments}));
    match format {
        ToolFormat::Phi4 => format!("<|tool_call|>{}<|/tool_call|>", spaced(&objects.collect())),
        ToolFormat::Granite => format!("<|tool_call|>{}", spaced(&objects.collect())),
        ToolFormat::Lfm2 => {
            let calls: Vec<String> = calls.iter().map(|(name, arguments)| python(name, arguments)).collect();
            format!("<|tool_call_start|>[{}]<|tool_call_end|>", calls.join(", "))
        }
        _ => {
            let calls = objects.map(|object| format!("<tool_call>\n{}\n</tool_call>", spaced(&object)));
            calls.collect::<Vec<_>>().join("\n")
        }
    }
}

/// Returns a call in LFM2's format. If the model generated arguments that are not an object, they remain unchanged.
fn python(name: &str, arguments: &Value) -> String {
    let Value::Object(arguments) = arguments else {
        return format!("{name}({})", arguments.as_str().unwrap_or_default());
    };
    let arguments: Vec<String> = arguments
        .iter()
        .map(|(key, argument)| format!("{key}={}", literal(argument, Notation::Python)))
        .collect();
    format!("{name}({})", arguments.join(", "))
}

/// Whether templates of the format render results even though they render no calls.
pub(super) fn shows_results(format: ToolFormat) -> bool {
    matches!(format, ToolFormat::Phi4 | ToolFormat::Granite | ToolFormat::Lfm2)
}

/// Returns the text of a call's result.
pub(super) fn result(content: &str) -> String {
    format!("<tool_response>\n{content}\n</tool_response>")
}

/// Returns the system message at the beginning of a conversation. Adds an empty one if the conversation has none.
pub(super) fn system(messages: &mut Vec<Value>) -> &mut Value {
    if messages.first().is_none_or(|first| first["role"] != "system") {
        messages.insert(0, json!({"role": "system", "content": ""}));
    }
    &mut messages[0]
}

pub(super) fn append(message: &mut Value, text: &str) {
    if let Some(parts) = message["content"].as_array_mut() {
        parts.push(json!({"type": "text", "text": format!("\n\n{text}")}));
        return;
    }
    let before = message["content"].as_str().unwrap_or_default();
    let joined = if before.is_empty() { text.to_owned() } else { format!("{before}\n\n{text}") };
    message["content"] = json!(joined);
}

/// Inserts a text at the beginning of a message.
pub(super) fn prepend(message: &mut Value, text: &str) {
    if let Some(parts) = message["content"].as_array_mut() {
        parts.insert(0, json!({"type": "text", "text": format!("{text}\n\n")}));
        return;
    }
    let after = message["content"].as_str().unwrap_or_default();
    message["content"] = json!(format!("{text}\n\n{after}"));
}

/// Returns JSON with a space after each comma and colon, as Python writes it, because models were trained with this
/// format.
pub(super) fn spaced(value: &Value) -> String {
    literal(value, Notation::Json)
}

/// Returns a value as a literal with a space after each comma and colon.
fn literal(value: &Value, notation: Notation) -> String {
    let mut text = Vec::new();
    let written = value.serialize(&mut Serializer::with_formatter(&mut text, SpacedFormatter { notation }));
    written.expect("invariant: writing a JSON value to memory does not fail");
    String::from_utf8(text).expect("invariant: JSON is UTF-8")
}

/// The notation of a literal. JSON and Python differ only in the names of null, true and false: JSON's strings and
/// numbers are also Python literals.
#[derive(Clone, Copy)]
enum Notation {
    Json,
    Python,
}

struct SpacedFormatter {
    notation: Notation,
}

impl SpacedFormatter {
    fn separate<W: io::Write + ?Sized>(writer: &mut W, is_first: bool) -> io::Result<()> {
        if is_first { Ok(()) } else { writer.write_all(b", ") }
    }
}

impl Formatter for SpacedFormatter {
    fn write_null<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(match self.notation {
            Notation::Json => b"null",
            Notation::Python => b"None",
        })
    }

    fn write_bool<W: io::Write + ?Sized>(&mut self, writer: &mut W, value: bool) -> io::Result<()> {
        let word = match (self.notation, value) {
            (Notation::Json, true) => "true",
            (Notation::Json, false) => "false",
            (Notation::Python, true) => "True",
            (Notation::Python, false) => "False",
        };
        writer.write_all(word.as_bytes())
    }

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

//! Converts messages for a template: the parts of the content are joined, and calls are converted to the form that the
//! template renders. If the template renders no calls, they become text.

use serde_json::{Map, Value, json};
use server_openai::{Content, ContentPart, Message};
use server_parsers::ToolFormat;
use server_text::{ArgumentsFormat, CallCount, CallIdFormat, CallStyle, EmptyContent};

use super::tools_as_text;
use crate::error::Error;
use crate::image_reader::{ImageReader, TemplateContent};
use crate::model::Model;
use crate::prepare::conversation::Conversation;
use crate::prepare::images::is_image;

/// The roles of messages. `developer` is OpenAI's newer name for `system`; templates receive only `system`.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Returns the messages of a conversation for the template.
///
/// # Errors
/// A message is malformed.
pub(super) fn for_template(conversation: &Conversation, model: &Model) -> Result<Vec<Value>, Error> {
    let mut messages = Vec::with_capacity(conversation.messages.len());
    let mut images = 0;
    for (index, message) in conversation.messages.iter().enumerate() {
        let at = format!("{}[{index}]", conversation.param);
        messages.push(read(message, &at, model.images.as_ref(), &mut images)?);
    }
    let messages = match model.template_features.call_style {
        Some(style) => {
            let messages = match style.count {
                CallCount::Many => messages,
                CallCount::One => one_call_each(messages),
            };
            messages.into_iter().map(|message| styled(message, style)).collect()
        }
        None => as_text(messages, tools_as_text::format(model)),
    };
    Ok(messages.into_iter().map(|message| value(message, model)).collect())
}

/// A message whose members have been checked.
struct ParsedMessage {
    role: String,
    content: Option<String>,
    /// The parts of the content, if some of them are images and the template renders parts.
    parts: Vec<MessagePart>,
    name: Option<String>,
    reasoning: Option<String>,
    calls: Vec<Call>,
    /// The ID of the call, if this message is the result of a call.
    call_id: Option<String>,
    /// The form of calls that the template renders.
    style: Option<CallStyle>,
}

/// A part of the content of a message with images.
enum MessagePart {
    Text(String),
    Image,
}

/// A call that the assistant made.
struct Call {
    id: Option<String>,
    name: String,
    /// The arguments: an object, or a string if the model did not write an object.
    arguments: Value,
}

/// Reads a message. `images` is the number of images before the message. The function adds the number of images of the
/// message to it.
fn read(
    message: &Message,
    at: &str,
    reader: Option<&ImageReader>,
    images: &mut usize,
) -> Result<ParsedMessage, Error> {
    if !ROLES.contains(&message.role.as_str()) {
        let problem = format!("{:?} is not one of {}", message.role, ROLES.join(", "));
        return Err(Error::invalid(format!("{at}.role"), problem));
    }
    let content = match &message.content {
        None if message.role != "assistant" => return Err(Error::missing(format!("{at}.content"))),
        None => message.refusal.clone(),
        Some(Content::Text(text)) => Some(text.clone()),
        Some(Content::Parts(parts)) => Some(join(parts, &format!("{at}.content"), reader, images)?),
    };
    let parts = match (&message.content, reader) {
        (Some(Content::Parts(parts)), Some(reader))
            if parts.iter().any(is_image) && reader.template != TemplateContent::Text =>
        {
            let part = |part: &ContentPart| match is_image(part) {
                true => MessagePart::Image,
                false => MessagePart::Text(part.text.clone().unwrap_or_default()),
            };
            parts.iter().map(part).collect()
        }
        _ => Vec::new(),
    };
    if let Some(reader) = reader {
        check_reserved(message, at, reader)?;
    }
    let calls = message.tool_calls.iter().flatten().enumerate();
    let calls = calls.map(|(index, call)| read_call(call, &format!("{at}.tool_calls[{index}]")));
    let role = if message.role == "developer" { "system" } else { &message.role };
    Ok(ParsedMessage {
        role: role.to_owned(),
        content,
        parts,
        name: message.name.clone(),
        reasoning: message.reasoning_content.clone().or_else(|| message.reasoning.clone()),
        calls: calls.collect::<Result<_, _>>()?,
        call_id: message.tool_call_id.clone(),
        style: None,
    })
}

/// Rejects texts that stand for images, because they would be confused with the images of the request.
fn check_reserved(message: &Message, at: &str, reader: &ImageReader) -> Result<(), Error> {
    let check = |text: &str, at: String| match reader.processor.reserved_text(text) {
        None => Ok(()),
        Some(reserved) => {
            Err(Error::invalid(at, format!("contains {reserved:?}, which this model reads as an image")))
        }
    };
    match &message.content {
        None => Ok(()),
        Some(Content::Text(text)) => check(text, format!("{at}.content")),
        Some(Content::Parts(parts)) => parts.iter().enumerate().try_for_each(|(index, part)| {
            check(part.text.as_deref().unwrap_or_default(), format!("{at}.content[{index}].text"))
        }),
    }
}

/// Joins the parts of a message with line feeds. Images are replaced with the tags that the model expects. `images` is
/// the number of images before the message. The function adds the number of images of the message to it.
fn join(
    parts: &[ContentPart],
    at: &str,
    reader: Option<&ImageReader>,
    images: &mut usize,
) -> Result<String, Error> {
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        if let Some(reader) = reader.filter(|_| is_image(part)) {
            texts.push(reader.processor.tag(*images));
            *images += 1;
            continue;
        }
        let (member, text) = match part.r#type.as_str() {
            "text" | "input_text" | "output_text" => ("text", &part.text),
            "refusal" => ("refusal", &part.refusal),
            kind => {
                let problem = format!(
                    "parts of type {kind:?} are not supported; use text, refusal or, if the model supports images, \
                     image_url"
                );
                return Err(Error::invalid(format!("{at}[{index}].type"), problem));
            }
        };
        let text = text.as_ref().ok_or_else(|| Error::missing(format!("{at}[{index}].{member}")))?;
        texts.push(text.clone());
    }
    Ok(texts.join("\n"))
}

fn read_call(call: &Map<String, Value>, at: &str) -> Result<Call, Error> {
    let wrong = |field: &str, problem: &str| Error::coded("invalid_type", format!("{at}.{field}"), problem);
    let id = match call.get("id") {
        None | Some(Value::Null) => None,
        Some(Value::String(id)) => Some(id.clone()),
        Some(_) => return Err(wrong("id", "must be a string")),
    };
    let function = match call.get("function") {
        Some(Value::Object(function)) => function,
        Some(_) => return Err(wrong("function", "must be an object")),
        None => return Err(Error::missing(format!("{at}.function"))),
    };
    let name = match function.get("name") {
        Some(Value::String(name)) => name.clone(),
        Some(_) => return Err(wrong("function.name", "must be a string")),
        None => return Err(Error::missing(format!("{at}.function.name"))),
    };
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => json!({}),
        Some(object @ Value::Object(_)) => object.clone(),
        Some(Value::String(text)) if text.trim().is_empty() => json!({}),
        // The model may have generated arguments that are not a JSON object. Such arguments remain text.
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(object @ Value::Object(_)) => object,
            _ => json!(text),
        },
        Some(_) => return Err(wrong("function.arguments", "must be a string or an object")),
    };
    Ok(Call { id, name, arguments })
}

/// Splits each message with several calls into one message per call, each followed by the result of the call.
fn one_call_each(messages: Vec<ParsedMessage>) -> Vec<ParsedMessage> {
    let mut split = Vec::with_capacity(messages.len());
    let mut rest = messages.into_iter().peekable();
    while let Some(mut message) = rest.next() {
        if message.calls.len() < 2 {
            split.push(message);
            continue;
        }
        let mut results = Vec::new();
        while let Some(result) = rest.next_if(|next| next.role == "tool") {
            results.push(result);
        }
        for call in std::mem::take(&mut message.calls) {
            let result =
                results.iter().position(|result| result.call_id.is_some() && result.call_id == call.id);
            split.push(ParsedMessage {
                role: message.role.clone(),
                content: message.content.take(),
                parts: std::mem::take(&mut message.parts),
                name: message.name.clone(),
                reasoning: message.reasoning.take(),
                calls: vec![call],
                call_id: None,
                style: None,
            });
            split.extend(result.map(|at| results.remove(at)));
        }
        split.extend(results);
    }
    split
}

fn styled(mut message: ParsedMessage, style: CallStyle) -> ParsedMessage {
    if style.ids == CallIdFormat::NineCharacters {
        let ids = message.calls.iter_mut().map(|call| &mut call.id).chain([&mut message.call_id]);
        ids.flatten().for_each(|id| *id = nine_character_id(id));
    }
    message.style = Some(style);
    message
}

/// Returns an ID of nine letters and digits: the given ID if it has this form, or a hash of it.
fn nine_character_id(id: &str) -> String {
    const LENGTH: usize = 9;
    if id.len() == LENGTH && id.bytes().all(|letter| letter.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    // FNV-1a is the same in all processes, so the same conversation always has the same prompt.
    let hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let digits = (0..LENGTH as u32).map(|place| (hash / 36_u64.pow(place) % 36) as u32);
    digits.filter_map(|digit| char::from_digit(digit, 36)).collect()
}

/// Converts calls to the text of messages. Also converts results, unless templates of the format render them.
fn as_text(messages: Vec<ParsedMessage>, format: ToolFormat) -> Vec<ParsedMessage> {
    let mut converted: Vec<ParsedMessage> = Vec::with_capacity(messages.len());
    let mut after_result = false;
    for mut message in messages {
        let is_result = message.role == "tool";
        let calls = std::mem::take(&mut message.calls);
        if !calls.is_empty() {
            let before = message.content.take().filter(|text| !text.is_empty());
            message.content =
                Some(before.into_iter().chain([calls_text(&calls, format)]).collect::<Vec<_>>().join("\n"));
        }
        if is_result && !tools_as_text::shows_results(format) {
            let text = tools_as_text::result(message.content.as_deref().unwrap_or_default());
            if let Some(last) = converted.last_mut().filter(|_| after_result) {
                last.content = Some(format!("{}\n{text}", last.content.as_deref().unwrap_or_default()));
                continue;
            }
            message = ParsedMessage {
                role: "user".to_owned(),
                content: Some(text),
                name: None,
                call_id: None,
                ..message
            };
        }
        after_result = is_result;
        converted.push(message);
    }
    converted
}

fn calls_text(calls: &[Call], format: ToolFormat) -> String {
    let calls: Vec<(&str, &Value)> = calls.iter().map(|call| (call.name.as_str(), &call.arguments)).collect();
    tools_as_text::calls(&calls, format)
}

/// Returns a message as JSON for the template.
fn value(message: ParsedMessage, model: &Model) -> Value {
    let ParsedMessage { role, mut content, parts, name, mut reasoning, calls, call_id, style } = message;
    if model.formats.tool == ToolFormat::Gptoss && !calls.is_empty() {
        // gpt-oss's template renders either reasoning or content before a call, and rejects both together. Append the
        // content to the reasoning.
        if let (Some(thought), Some(text)) = (&mut reasoning, content.take_if(|text| !text.is_empty())) {
            *thought = format!("{thought}\n\n{text}");
        }
    }
    let wants_null =
        style.is_some_and(|style| style.empty_content == EmptyContent::Null) && !calls.is_empty();
    let mut value = json!({"role": role});
    // Templates concatenate strings, so missing content must be an empty string, unless the style of the template
    // requires `null`.
    value["content"] = match content.filter(|text| !(wants_null && text.is_empty())) {
        None if wants_null => Value::Null,
        content => json!(content.unwrap_or_default()),
    };
    let needs_parts = model.images.as_ref().is_some_and(|reader| reader.template == TemplateContent::Parts);
    if !parts.is_empty() {
        value["content"] = parts.into_iter().map(MessagePart::value).collect();
    } else if needs_parts && let Some(text) = value["content"].as_str() {
        value["content"] = json!([{"type": "text", "text": text}]);
    }
    if let Some(name) = name {
        value["name"] = json!(name);
    }
    if let Some(reasoning) = reasoning {
        value[model.template_features.reasoning_member] = json!(reasoning);
        value["reasoning_content"] = json!(reasoning);
    }
    if !calls.is_empty() {
        let format = style.map_or(ArgumentsFormat::Object, |style| style.arguments);
        value["tool_calls"] = calls.into_iter().map(|call| call_value(call, format)).collect();
    }
    if let Some(call_id) = call_id {
        value["tool_call_id"] = json!(call_id);
    }
    value
}

impl MessagePart {
    fn value(self) -> Value {
        match self {
            Self::Text(text) => json!({"type": "text", "text": text}),
            Self::Image => json!({"type": "image"}),
        }
    }
}

fn call_value(call: Call, format: ArgumentsFormat) -> Value {
    let Call { id, name, arguments } = call;
    let arguments = match (format, arguments) {
        (ArgumentsFormat::JsonString, object @ Value::Object(_)) => json!(tools_as_text::spaced(&object)),
        (_, arguments) => arguments,
    };
    let mut value = Map::new();
    value.extend(id.map(|id| ("id".to_owned(), json!(id))));
    value.insert("type".to_owned(), json!("function"));
    value.insert("function".to_owned(), json!({"name": name, "arguments": arguments}));
    Value::Object(value)
}

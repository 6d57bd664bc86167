//! Messages as a template wants them: content as one text, calls in the form that the template shows, or in words
//! where it shows none.

use serde_json::{Map, Value, json};
use server_openai::{Content, ContentPart, Message};
use server_parsers::ToolFormat;
use server_text::{Arguments, CallCount, CallIds, CallStyle, NoText};

use super::words;
use crate::error::Error;
use crate::model::Model;
use crate::prepare::conversation::Conversation;

/// Who may speak. `developer` is what OpenAI calls `system` lately; templates know only the latter.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// The messages of a conversation.
///
/// # Errors
/// One of them is none.
pub(super) fn for_template(conversation: &Conversation, model: &Model) -> Result<Vec<Value>, Error> {
    let mut messages = Vec::with_capacity(conversation.messages.len());
    for (index, message) in conversation.messages.iter().enumerate() {
        messages.push(read(message, &format!("{}[{index}]", conversation.param))?);
    }
    let messages = match model.abilities.calls {
        Some(style) => {
            let messages = match style.count {
                CallCount::Many => messages,
                CallCount::One => one_call_each(messages),
            };
            messages.into_iter().map(|message| styled(message, style)).collect()
        }
        None => in_words(messages, words::format(model)),
    };
    Ok(messages.into_iter().map(|message| value(message, model)).collect())
}

/// A message that was looked through.
struct Read {
    role: String,
    content: Option<String>,
    name: Option<String>,
    reasoning: Option<String>,
    calls: Vec<Call>,
    /// The call that this is the result of.
    call_id: Option<String>,
    /// How the template wants the calls.
    style: Option<CallStyle>,
}

/// A call that the assistant made.
struct Call {
    id: Option<String>,
    name: String,
    /// An object; a string if the model wrote no object.
    arguments: Value,
}

fn read(message: &Message, at: &str) -> Result<Read, Error> {
    if !ROLES.contains(&message.role.as_str()) {
        let problem = format!("{:?} is none of {}", message.role, ROLES.join(", "));
        return Err(Error::invalid(format!("{at}.role"), problem));
    }
    let content = match &message.content {
        None if message.role != "assistant" => return Err(Error::missing(format!("{at}.content"))),
        None => message.refusal.clone(),
        Some(Content::Text(text)) => Some(text.clone()),
        Some(Content::Parts(parts)) => Some(join(parts, &format!("{at}.content"))?),
    };
    let calls = message.tool_calls.iter().flatten().enumerate();
    let calls = calls.map(|(index, call)| read_call(call, &format!("{at}.tool_calls[{index}]")));
    let role = if message.role == "developer" { "system" } else { &message.role };
    Ok(Read {
        role: role.to_owned(),
        content,
        name: message.name.clone(),
        reasoning: message.reasoning_content.clone().or_else(|| message.reasoning.clone()),
        calls: calls.collect::<Result<_, _>>()?,
        call_id: message.tool_call_id.clone(),
        style: None,
    })
}

/// The text of a message in parts, a line for each.
fn join(parts: &[ContentPart], at: &str) -> Result<String, Error> {
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let (member, text) = match part.r#type.as_str() {
            "text" | "input_text" | "output_text" => ("text", &part.text),
            "refusal" => ("refusal", &part.refusal),
            kind => {
                let problem = format!("a part of type {kind:?} is given, but this model takes only text");
                return Err(Error::invalid(format!("{at}[{index}].type"), problem));
            }
        };
        let text = text.as_ref().ok_or_else(|| Error::missing(format!("{at}[{index}].{member}")))?;
        texts.push(text.as_str());
    }
    Ok(texts.join("\n"))
}

fn read_call(call: &Map<String, Value>, at: &str) -> Result<Call, Error> {
    let wrong = |field: &str, problem: &str| Error::coded("invalid_type", format!("{at}.{field}"), problem);
    let id = match call.get("id") {
        None | Some(Value::Null) => None,
        Some(Value::String(id)) => Some(id.clone()),
        Some(_) => return Err(wrong("id", "is no string")),
    };
    let function = match call.get("function") {
        Some(Value::Object(function)) => function,
        Some(_) => return Err(wrong("function", "is no object")),
        None => return Err(Error::missing(format!("{at}.function"))),
    };
    let name = match function.get("name") {
        Some(Value::String(name)) => name.clone(),
        Some(_) => return Err(wrong("function.name", "is no string")),
        None => return Err(Error::missing(format!("{at}.function.name"))),
    };
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => json!({}),
        Some(object @ Value::Object(_)) => object.clone(),
        Some(Value::String(text)) if text.trim().is_empty() => json!({}),
        // What is no object is the model's own writing, and stays as it was.
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(object @ Value::Object(_)) => object,
            _ => json!(text),
        },
        Some(_) => return Err(wrong("function.arguments", "is neither a string nor an object")),
    };
    Ok(Call { id, name, arguments })
}

/// The same conversation with a call in each message, followed by its result.
fn one_call_each(messages: Vec<Read>) -> Vec<Read> {
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
            split.push(Read {
                role: message.role.clone(),
                content: message.content.take(),
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

fn styled(mut message: Read, style: CallStyle) -> Read {
    if style.ids == CallIds::Nine {
        let ids = message.calls.iter_mut().map(|call| &mut call.id).chain([&mut message.call_id]);
        ids.flatten().for_each(|id| *id = nine(id));
    }
    message.style = Some(style);
    message
}

/// Nine letters and digits for an id: itself, or what is as good as unique to it.
fn nine(id: &str) -> String {
    const LENGTH: usize = 9;
    if id.len() == LENGTH && id.bytes().all(|letter| letter.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    // FNV-1a: the same in all processes, so that the same conversation has the same prompt.
    let hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let digits = (0..LENGTH as u32).map(|place| (hash / 36_u64.pow(place) % 36) as u32);
    digits.filter_map(|digit| char::from_digit(digit, 36)).collect()
}

/// The same conversation with calls and their results written out.
fn in_words(messages: Vec<Read>, format: ToolFormat) -> Vec<Read> {
    let mut said: Vec<Read> = Vec::with_capacity(messages.len());
    let mut after_result = false;
    for mut message in messages {
        let is_result = message.role == "tool";
        let calls = std::mem::take(&mut message.calls);
        if !calls.is_empty() {
            let before = message.content.take().filter(|text| !text.is_empty());
            message.content =
                Some(before.into_iter().chain([written(&calls, format)]).collect::<Vec<_>>().join("\n"));
        }
        if is_result && !words::shows_results(format) {
            let text = words::result(message.content.as_deref().unwrap_or_default());
            if let Some(last) = said.last_mut().filter(|_| after_result) {
                last.content = Some(format!("{}\n{text}", last.content.as_deref().unwrap_or_default()));
                continue;
            }
            message =
                Read { role: "user".to_owned(), content: Some(text), name: None, call_id: None, ..message };
        }
        after_result = is_result;
        said.push(message);
    }
    said
}

fn written(calls: &[Call], format: ToolFormat) -> String {
    let calls: Vec<(&str, &Value)> = calls.iter().map(|call| (call.name.as_str(), &call.arguments)).collect();
    words::calls(&calls, format)
}

/// A message as the template sees it.
fn value(message: Read, model: &Model) -> Value {
    let Read { role, mut content, name, mut reasoning, calls, call_id, style } = message;
    if model.formats.tool == ToolFormat::Gptoss && !calls.is_empty() {
        // gpt-oss' template shows one of the two before a call, as a thought, and refuses both.
        if let (Some(thought), Some(text)) = (&mut reasoning, content.take_if(|text| !text.is_empty())) {
            *thought = format!("{thought}\n\n{text}");
        }
    }
    let wants_null = style.is_some_and(|style| style.content == NoText::Null) && !calls.is_empty();
    let mut value = json!({"role": role});
    // Templates add texts up: they want a string even where there is none.
    value["content"] = match content.filter(|text| !(wants_null && text.is_empty())) {
        None if wants_null => Value::Null,
        content => json!(content.unwrap_or_default()),
    };
    if let Some(name) = name {
        value["name"] = json!(name);
    }
    if let Some(reasoning) = reasoning {
        value[model.abilities.thoughts] = json!(reasoning);
        value["reasoning_content"] = json!(reasoning);
    }
    if !calls.is_empty() {
        let form = style.map_or(Arguments::Object, |style| style.arguments);
        value["tool_calls"] = calls.into_iter().map(|call| call_value(call, form)).collect();
    }
    if let Some(call_id) = call_id {
        value["tool_call_id"] = json!(call_id);
    }
    value
}

fn call_value(call: Call, form: Arguments) -> Value {
    let Call { id, name, arguments } = call;
    let arguments = match (form, arguments) {
        (Arguments::Text, object @ Value::Object(_)) => json!(words::spaced(&object)),
        (_, arguments) => arguments,
    };
    let mut value = Map::new();
    value.extend(id.map(|id| ("id".to_owned(), json!(id))));
    value.insert("type".to_owned(), json!("function"));
    value.insert("function".to_owned(), json!({"name": name, "arguments": arguments}));
    Value::Object(value)
}

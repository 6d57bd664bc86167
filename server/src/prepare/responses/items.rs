//! Parses the input items of a request, and assigns an ID to each item without a usable ID.

use server_openai::ImageUrl;
use server_openai::responses::{
    Call, CallOutput, CustomCall, InputItem, InputPart, Item, ItemStatus, Message, Output, Part, Reasoning,
    ReasoningText, SummaryText, TextOrList,
};

use crate::error::Error;
use crate::prepare::images;
use crate::store::ItemIds;

/// Size of an item ID that a client chooses.
///
/// If exceeded: the server replaces the ID with a new one.
const ID_BYTES_MAX: usize = 128;
/// Number of input items of a Responses API request.
///
/// If exceeded: 400, `array_above_max_length`.
pub(crate) const ITEMS_MAX: usize = 8192;
/// The roles of messages.
const ROLES: [&str; 4] = ["user", "assistant", "system", "developer"];
/// The supported types of items, for errors.
const KINDS: &str = "message, reasoning, function_call, function_call_output, custom_tool_call, \
    custom_tool_call_output and item_reference";

#[derive(Debug, PartialEq)]
pub(crate) enum InputElement {
    Item(Item),
    /// The element refers to the stored item with this ID.
    Reference(String),
}

/// Parses the elements of the parameter `at`. References are not looked up.
///
/// # Errors
/// An element is malformed, or there are too many.
pub(crate) fn read(items: Vec<InputItem>, at: &str, ids: &mut ItemIds) -> Result<Vec<InputElement>, Error> {
    if items.len() > ITEMS_MAX {
        let problem = format!("has {} items (limit: {ITEMS_MAX})", items.len());
        return Err(Error::coded("array_above_max_length", at, problem));
    }
    items
        .into_iter()
        .enumerate()
        .map(|(index, item)| read_one(item, &format!("{at}[{index}]"), ids))
        .collect()
}

/// Returns the ID of the stored item that an element of the input refers to, if the element is a reference.
pub(crate) fn reference(item: &InputItem) -> Option<&str> {
    let is_reference = match item.r#type.as_deref() {
        Some(kind) => kind == "item_reference",
        None => item.role.is_none(),
    };
    item.id.as_deref().filter(|_| is_reference)
}

pub(crate) fn user_message(text: String, ids: &mut ItemIds) -> Item {
    Item::Message(Message {
        id: ids.next("msg"),
        status: ItemStatus::Completed,
        content: vec![Part::InputText { text }],
        role: "user".to_owned(),
    })
}

fn read_one(item: InputItem, at: &str, ids: &mut ItemIds) -> Result<InputElement, Error> {
    let kind = match item.r#type.as_deref() {
        Some(kind) => kind,
        None if item.role.is_none() && item.id.is_some() => "item_reference",
        None => "message",
    };
    Ok(InputElement::Item(match kind {
        "message" => message(item, at, ids)?,
        "reasoning" => reasoning(item, at, ids)?,
        "function_call" => call(item, at, ids)?,
        "function_call_output" => Item::FunctionCallOutput(output(item, at, ids)?),
        "custom_tool_call" => custom_call(item, at, ids)?,
        "custom_tool_call_output" => Item::CustomToolCallOutput(output(item, at, ids)?),
        "item_reference" => {
            return item.id.map(InputElement::Reference).ok_or_else(|| Error::missing(format!("{at}.id")));
        }
        other => {
            let problem = format!("{other:?} is not supported; supported types: {KINDS}");
            return Err(Error::invalid(format!("{at}.type"), problem));
        }
    }))
}

fn message(item: InputItem, at: &str, ids: &mut ItemIds) -> Result<Item, Error> {
    let role = item.role.ok_or_else(|| Error::missing(format!("{at}.role")))?;
    if !ROLES.contains(&role.as_str()) {
        let problem = format!("{role:?} is not one of {}", ROLES.join(", "));
        return Err(Error::invalid(format!("{at}.role"), problem));
    }
    let part = |text: String| {
        if role == "assistant" {
            Part::OutputText { annotations: Vec::new(), logprobs: Vec::new(), text }
        } else {
            Part::InputText { text }
        }
    };
    let at = format!("{at}.content");
    let content = match item.content {
        None => return Err(Error::missing(at)),
        Some(TextOrList::Text(text)) => vec![part(text)],
        Some(TextOrList::List(parts)) if parts.is_empty() => return Err(Error::invalid(at, "is empty")),
        Some(TextOrList::List(parts)) => read_parts(parts, &at, part)?,
    };
    if role != "user" {
        refuse_images(
            &content,
            &at,
            &format!(
                "messages with the role {role:?} cannot contain images; only messages with the role \"user\" can"
            ),
        )?;
    }
    Ok(Item::Message(Message {
        id: item_id(item.id, "msg", ids),
        status: status(item.status.as_deref()),
        content,
        role,
    }))
}

/// Reads the parts of a message or of the result of a call. `text` converts texts to parts.
fn read_parts(parts: Vec<InputPart>, at: &str, text: impl Fn(String) -> Part) -> Result<Vec<Part>, Error> {
    let read = |(index, part): (usize, InputPart)| {
        let at = format!("{at}[{index}]");
        let needed = |value: Option<String>, member: &str| {
            value.ok_or_else(|| Error::missing(format!("{at}.{member}")))
        };
        match part.r#type.as_deref() {
            Some("input_text" | "output_text" | "text" | "summary_text" | "reasoning_text") => {
                Ok(text(needed(part.text, "text")?))
            }
            Some("input_image") => read_image(part, &at),
            Some("refusal") => Ok(Part::Refusal { refusal: needed(part.refusal, "refusal")? }),
            Some(kind) => {
                let problem = format!(
                    "parts of type {kind:?} are not supported; use input_text, output_text, refusal or, if the model \
                     supports images, input_image"
                );
                Err(Error::invalid(format!("{at}.type"), problem))
            }
            None => Err(Error::missing(format!("{at}.type"))),
        }
    };
    parts.into_iter().enumerate().map(read).collect()
}

fn read_image(part: InputPart, at: &str) -> Result<Part, Error> {
    if part.file_id.is_some() {
        let problem = "this server stores no files; send the image as image_url";
        return Err(Error::coded("unsupported_parameter", format!("{at}.file_id"), problem));
    }
    let ImageUrl { url, detail, .. } =
        part.image_url.ok_or_else(|| Error::missing(format!("{at}.image_url")))?;
    let detail = part.detail.or(detail).unwrap_or_else(|| "auto".to_owned());
    images::read_detail(Some(&detail), at)?;
    Ok(Part::InputImage { detail, image_url: url })
}

/// Checks that none of the parts is an image.
fn refuse_images(parts: &[Part], at: &str, problem: &str) -> Result<(), Error> {
    match parts.iter().position(|part| matches!(part, Part::InputImage { .. })) {
        Some(index) => Err(Error::invalid(format!("{at}[{index}].type"), problem)),
        None => Ok(()),
    }
}

fn reasoning(item: InputItem, at: &str, ids: &mut ItemIds) -> Result<Item, Error> {
    let texts = |parts: Vec<InputPart>, at: String| {
        let text = |(index, part): (usize, InputPart)| {
            part.text.ok_or_else(|| Error::missing(format!("{at}[{index}].text")))
        };
        parts.into_iter().enumerate().map(text).collect::<Result<Vec<String>, Error>>()
    };
    let summary = texts(item.summary.unwrap_or_default(), format!("{at}.summary"))?;
    let content = match item.content {
        None => None,
        Some(TextOrList::Text(text)) => Some(vec![text]),
        Some(TextOrList::List(parts)) => Some(texts(parts, format!("{at}.content"))?),
    };
    let content = content.map(|content| content.into_iter().map(|text| ReasoningText { text }).collect());
    Ok(Item::Reasoning(Reasoning {
        id: item_id(item.id, "rs", ids),
        summary: summary.into_iter().map(|text| SummaryText { text }).collect(),
        content,
        encrypted_content: item.encrypted_content,
        status: item.status.as_deref().map(|text| status(Some(text))),
    }))
}

fn call(item: InputItem, at: &str, ids: &mut ItemIds) -> Result<Item, Error> {
    let call_id = item.call_id.or_else(|| item.id.clone());
    Ok(Item::FunctionCall(Call {
        call_id: call_id.ok_or_else(|| Error::missing(format!("{at}.call_id")))?,
        name: item.name.ok_or_else(|| Error::missing(format!("{at}.name")))?,
        arguments: item.arguments.ok_or_else(|| Error::missing(format!("{at}.arguments")))?,
        namespace: item.namespace,
        id: item_id(item.id, "fc", ids),
        status: status(item.status.as_deref()),
    }))
}

fn custom_call(item: InputItem, at: &str, ids: &mut ItemIds) -> Result<Item, Error> {
    let call_id = item.call_id.or_else(|| item.id.clone());
    Ok(Item::CustomToolCall(CustomCall {
        call_id: call_id.ok_or_else(|| Error::missing(format!("{at}.call_id")))?,
        name: item.name.ok_or_else(|| Error::missing(format!("{at}.name")))?,
        input: item.input.ok_or_else(|| Error::missing(format!("{at}.input")))?,
        namespace: item.namespace,
        id: item_id(item.id, "ctc", ids),
        status: status(item.status.as_deref()),
    }))
}

fn output(item: InputItem, at: &str, ids: &mut ItemIds) -> Result<CallOutput, Error> {
    let at = format!("{at}.output");
    let output = match item.output {
        None => return Err(Error::missing(at)),
        Some(TextOrList::Text(text)) => Output::Text(text),
        Some(TextOrList::List(parts)) => {
            let parts = read_parts(parts, &at, |text| Part::InputText { text })?;
            let problem = "tool results cannot contain images; send the image in a user message";
            refuse_images(&parts, &at, problem)?;
            Output::Parts(parts)
        }
    };
    // Clients that were written for OVMS may omit `call_id`.
    let call_id = item.call_id.unwrap_or_default();
    Ok(CallOutput {
        id: item_id(item.id, "fco", ids),
        status: status(item.status.as_deref()),
        call_id,
        output,
    })
}

/// Returns the ID that the client has chosen, or a new ID if that ID is missing, empty or too long.
fn item_id(given: Option<String>, prefix: &str, ids: &mut ItemIds) -> String {
    let given = given.filter(|id| !id.is_empty() && id.len() <= ID_BYTES_MAX);
    given.unwrap_or_else(|| ids.next(prefix))
}

fn status(given: Option<&str>) -> ItemStatus {
    match given {
        Some("in_progress") => ItemStatus::InProgress,
        Some("incomplete") => ItemStatus::Incomplete,
        _ => ItemStatus::Completed,
    }
}

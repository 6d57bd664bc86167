//! Converts items to the messages that chat templates render. Reasoning of the assistant, and the text and the calls
//! that follow it, are separate items, but become one message.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Map, json};
use server_openai::responses::{self, Call, CallOutput, CustomCall, Item, Output, Part, Reasoning};
use server_openai::{Content, ContentPart, ImageUrl, Message};

use super::tools::INPUT;
use crate::prepare::tools::joined_name;

/// Returns the instructions, the stored items and the items of the request as messages.
pub(crate) fn messages(
    instructions: Option<&str>,
    history: &[Arc<Item>],
    input: &[Arc<Item>],
) -> Vec<Message> {
    let mut all = Turns::default();
    if let Some(instructions) = instructions.filter(|text| !text.is_empty()) {
        all.system(instructions.to_owned());
    }
    let history = history.iter().map(|item| (item, None));
    let input = input.iter().enumerate().map(|(index, item)| (item, Some(index)));
    for (item, index) in history.chain(input) {
        match &**item {
            Item::Message(item) => all.message(item, index),
            Item::Reasoning(reasoning) => all.reasoning(reasoning),
            Item::FunctionCall(call) => all.call(call),
            Item::FunctionCallOutput(output) | Item::CustomToolCallOutput(output) => all.output(output),
            Item::CustomToolCall(call) => all.custom_call(call),
        }
    }
    all.finish()
}

/// The messages of the items that have been converted so far.
#[derive(Default)]
struct Turns {
    done: Vec<Message>,
    /// The last assistant message, to which items may still be added.
    open: Option<Message>,
    /// The name of the called tool for each call ID, because some templates render this name with the result of the
    /// call.
    called: HashMap<String, String>,
}

impl Turns {
    /// Adds a message. `index` is its index in the request's input; `None` if it is stored.
    fn message(&mut self, item: &responses::Message, index: Option<usize>) {
        if item.content.iter().any(|part| matches!(part, Part::InputImage { .. })) {
            self.close();
            let content = Some(content(&item.content, index));
            self.done.push(Message { role: item.role.clone(), content, ..Message::default() });
            return;
        }
        let text = joined(&item.content);
        if item.role != "assistant" {
            self.close();
            // Many templates accept only one system message, at the beginning of a conversation, so the system messages
            // at the beginning are joined.
            if item.role == "user" || self.done.iter().any(|message| message.role != "system") {
                self.done.push(message(&item.role, text));
            } else {
                self.system(text);
            }
            return;
        }
        match &mut self.open {
            // The message has no text so far, only reasoning or calls.
            Some(open) if open.content.is_none() => open.content = Some(Content::Text(text)),
            _ => {
                self.close();
                self.open = Some(message("assistant", text));
            }
        }
    }

    /// Adds text to the system message at the beginning, or creates this message.
    fn system(&mut self, text: String) {
        match self.done.first_mut() {
            Some(Message { content: Some(Content::Text(before)), .. }) => {
                before.push_str("\n\n");
                before.push_str(&text);
            }
            _ => self.done.push(message("system", text)),
        }
    }

    fn reasoning(&mut self, reasoning: &Reasoning) {
        let content: Vec<&str> = reasoning.content.iter().flatten().map(|part| part.text.as_str()).collect();
        let summary = reasoning.summary.iter().map(|part| part.text.as_str()).collect();
        let text = if content.is_empty() { summary } else { content }.join("\n");
        if text.is_empty() {
            return;
        }
        match &mut self.open {
            Some(Message { content: None, tool_calls: None, reasoning_content: Some(before), .. }) => {
                before.push('\n');
                before.push_str(&text);
            }
            _ => {
                self.close();
                let role = "assistant".to_owned();
                self.open = Some(Message { role, reasoning_content: Some(text), ..Message::default() });
            }
        }
    }

    fn call(&mut self, call: &Call) {
        let Call { call_id, namespace, name, arguments, .. } = call;
        self.function(call_id, called_name(namespace.as_deref(), name), arguments);
    }

    /// Adds a custom tool call as the model wrote it: as a function call.
    fn custom_call(&mut self, call: &CustomCall) {
        let CustomCall { call_id, namespace, name, input, .. } = call;
        self.function(call_id, called_name(namespace.as_deref(), name), &json!({INPUT: input}).to_string());
    }

    fn function(&mut self, call_id: &str, name: String, arguments: &str) {
        let mut shown = Map::new();
        shown.insert("id".to_owned(), json!(call_id));
        shown.insert("type".to_owned(), json!("function"));
        shown.insert("function".to_owned(), json!({"name": name, "arguments": arguments}));
        self.called.insert(call_id.to_owned(), name);
        let open =
            self.open.get_or_insert_with(|| Message { role: "assistant".to_owned(), ..Message::default() });
        open.tool_calls.get_or_insert_default().push(shown);
    }

    fn output(&mut self, output: &CallOutput) {
        self.close();
        let text = match &output.output {
            Output::Text(text) => text.clone(),
            Output::Parts(parts) => joined(parts),
        };
        let mut answer = message("tool", text);
        answer.name = self.called.get(&output.call_id).cloned();
        answer.tool_call_id = (!output.call_id.is_empty()).then(|| output.call_id.clone());
        self.done.push(answer);
    }

    fn close(&mut self) {
        self.done.extend(self.open.take());
    }

    fn finish(mut self) -> Vec<Message> {
        self.close();
        self.done
    }
}

/// Returns the name by which the model calls a tool.
fn called_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        Some(namespace) => joined_name(namespace, name),
        None => name.to_owned(),
    }
}

fn message(role: &str, text: String) -> Message {
    Message { role: role.to_owned(), content: Some(Content::Text(text)), ..Message::default() }
}

/// Converts the content of a message with images to the form of the chat endpoint. `item` is the index of the message
/// in the request's input; `None` if the message is stored.
fn content(parts: &[Part], item: Option<usize>) -> Content {
    let param = |index: usize| match item {
        Some(item) => format!("input[{item}].content[{index}].image_url"),
        None => "input".to_owned(),
    };
    let part = |(index, part): (usize, &Part)| match part {
        Part::InputImage { detail, image_url } => ContentPart {
            r#type: "image_url".to_owned(),
            image_url: Some(ImageUrl {
                url: image_url.clone(),
                detail: Some(detail.clone()),
                param: Some(param(index)),
            }),
            ..ContentPart::default()
        },
        _ => ContentPart {
            r#type: "text".to_owned(),
            text: Some(part.text().to_owned()),
            ..ContentPart::default()
        },
    };
    Content::Parts(parts.iter().enumerate().map(part).collect())
}

fn joined(parts: &[Part]) -> String {
    parts.iter().map(Part::text).collect::<Vec<_>>().join("\n")
}

/// Returns the indices at which a conversation may be cut: those of the user's messages, unless a cut there would
/// remove nothing. The system message at the beginning always remains.
pub(crate) fn cuts(messages: &[Message]) -> Vec<usize> {
    let first = usize::from(messages.first().is_some_and(|message| message.role == "system"));
    (first..messages.len()).filter(|&at| at > first && messages[at].role == "user").collect()
}

/// Returns the conversation without the messages before `cut`, except for the system message at the beginning.
pub(crate) fn without(messages: &[Message], cut: usize) -> Vec<Message> {
    let first = usize::from(messages.first().is_some_and(|message| message.role == "system"));
    messages[..first].iter().chain(&messages[cut..]).cloned().collect()
}

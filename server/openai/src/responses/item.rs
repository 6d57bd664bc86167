//! The items of a conversation, whether a client sent them or the model generated them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ChatTokenLogprob;

/// An item of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Item {
    /// A message by any author.
    Message(Message),
    /// The reasoning of the model.
    Reasoning(Reasoning),
    /// A function call by the model.
    FunctionCall(Call),
    /// The result of a function call.
    FunctionCallOutput(CallOutput),
    /// A custom tool call by the model.
    CustomToolCall(CustomCall),
    /// The result of a custom tool call.
    CustomToolCallOutput(CallOutput),
}

impl Item {
    /// Returns the identifier of the item.
    #[must_use]
    pub fn id(&self) -> &str {
        match self {
            Self::Message(Message { id, .. })
            | Self::Reasoning(Reasoning { id, .. })
            | Self::FunctionCall(Call { id, .. })
            | Self::CustomToolCall(CustomCall { id, .. })
            | Self::FunctionCallOutput(CallOutput { id, .. })
            | Self::CustomToolCallOutput(CallOutput { id, .. }) => id,
        }
    }

    /// Changes the state of the item.
    pub fn set_status(&mut self, status: ItemStatus) {
        match self {
            Self::Message(message) => message.status = status,
            Self::Reasoning(reasoning) => reasoning.status = Some(status),
            Self::FunctionCall(call) => call.status = status,
            Self::CustomToolCall(call) => call.status = status,
            Self::FunctionCallOutput(output) | Self::CustomToolCallOutput(output) => output.status = status,
        }
    }
}

/// The state of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemStatus {
    /// The model is generating the item.
    InProgress,
    /// The item is complete.
    Completed,
    /// The item was cut off.
    Incomplete,
}

/// A message by any author.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// The identifier of the message.
    pub id: String,
    /// The state of the message.
    pub status: ItemStatus,
    /// The parts of the content.
    pub content: Vec<Part>,
    /// The role of the author: `user`, `assistant`, `system` or `developer`.
    pub role: String,
}

/// A part of the content of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Part {
    /// Text of a user, system or developer message, or of the result of a tool call.
    InputText {
        /// The text of the part.
        text: String,
    },
    /// Text of an assistant message.
    OutputText {
        /// The citations: always empty, because the server has no sources to cite.
        #[serde(default)]
        annotations: Vec<Value>,
        /// The log probabilities of the tokens of the text, if requested.
        #[serde(default)]
        logprobs: Vec<ChatTokenLogprob>,
        /// The text of the part.
        text: String,
    },
    /// An image that a client sent.
    InputImage {
        /// The level of detail: `low`, `high` or `auto`.
        detail: String,
        /// The URL of the image, which may contain the image itself (`data:`).
        image_url: String,
    },
    /// A refusal, which clients may send but the server never generates.
    Refusal {
        /// The text of the refusal.
        refusal: String,
    },
}

impl Part {
    /// Returns the text of the part; empty for an image.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::InputText { text } | Self::OutputText { text, .. } => text,
            Self::InputImage { .. } => "",
            Self::Refusal { refusal } => refusal,
        }
    }
}

/// The reasoning of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reasoning {
    /// The identifier of the item.
    pub id: String,
    /// The summary of the reasoning. For reasoning that the model generated, the summary is the whole text, because the
    /// server does not summarize it.
    pub summary: Vec<SummaryText>,
    /// The text of the reasoning, if a client sent it; otherwise absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Vec<ReasoningText>>,
    /// The encrypted reasoning, if a client sent it. The server cannot read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted_content: Option<String>,
    /// The state of the item; absent if a client sent the item without a state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<ItemStatus>,
}

/// A part of the summary of the reasoning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "summary_text")]
pub struct SummaryText {
    /// The text of the part.
    pub text: String,
}

/// A part of the text of the reasoning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "reasoning_text")]
pub struct ReasoningText {
    /// The text of the part.
    pub text: String,
}

/// A function call by the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The identifier of the item.
    pub id: String,
    /// The state of the item.
    pub status: ItemStatus,
    /// The arguments as JSON, converted from the model's notation if necessary; incomplete JSON if the call was cut off
    /// or is malformed.
    pub arguments: String,
    /// The identifier of the call, to which its result refers.
    pub call_id: String,
    /// The name of the tool.
    pub name: String,
    /// The namespace that the tool belongs to; absent if it belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// A custom tool call by the model. Its input is plain text instead of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CustomCall {
    /// The identifier of the item.
    pub id: String,
    /// The state of the item.
    pub status: ItemStatus,
    /// The input of the tool.
    pub input: String,
    /// The identifier of the call, to which its result refers.
    pub call_id: String,
    /// The name of the tool.
    pub name: String,
    /// The namespace that the tool belongs to; absent if it belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// The result of a tool call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallOutput {
    /// The identifier of the item.
    pub id: String,
    /// The state of the item.
    pub status: ItemStatus,
    /// The identifier of the call that produced the result; empty if the client omitted it.
    pub call_id: String,
    /// The content of the result.
    pub output: Output,
}

/// The content of the result of a tool call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Output {
    /// The result is a string.
    Text(String),
    /// The result is a list of parts.
    Parts(Vec<Part>),
}

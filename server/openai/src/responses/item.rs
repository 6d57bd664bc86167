//! The items of a conversation, whether a client sent them or the model generated them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ChatTokenLogprob;

/// An item of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Item {
    /// A message of any author.
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

/// A message of any author.
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
    /// Text that a client sent.
    InputText {
        /// The text of the part.
        text: String,
    },
    /// Text that the model generated.
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
    /// The summary of the reasoning. If the model generated the reasoning, this is its complete text, because the
    /// server does not summarize it.
    pub summary: Vec<SummaryText>,
    /// The text of the reasoning that a client sent, if any; otherwise absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Vec<ReasoningText>>,
    /// The encrypted reasoning that a client sent, which the server cannot read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted_content: Option<String>,
    /// The state of the item; absent if a client sent it without one.
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
    /// The arguments as the model wrote them: JSON, unless generation was cut off.
    pub arguments: String,
    /// The identifier of the call, which its result refers to.
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
    /// The identifier of the call, which its result refers to.
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
    /// The identifier of the call that produced the result.
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

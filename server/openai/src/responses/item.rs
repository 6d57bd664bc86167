//! Items: what a conversation is made of, given and generated alike.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ChatTokenLogprob;

/// A part of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Item {
    /// Somebody says something.
    Message(Message),
    /// The model thinks.
    Reasoning(Reasoning),
    /// The model calls a tool.
    FunctionCall(Call),
    /// The tool answers.
    FunctionCallOutput(CallOutput),
    /// The model calls a custom tool.
    CustomToolCall(CustomCall),
    /// The custom tool answers.
    CustomToolCallOutput(CallOutput),
}

impl Item {
    /// Its name.
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

    /// Changes how far it is.
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

/// How far an item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemStatus {
    /// It is being generated.
    InProgress,
    /// It is whole.
    Completed,
    /// It was cut off.
    Incomplete,
}

/// Somebody says something.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Names it.
    pub id: String,
    /// How far it is.
    pub status: ItemStatus,
    /// What is said.
    pub content: Vec<Part>,
    /// Who says it: `user`, `assistant`, `system` or `developer`.
    pub role: String,
}

/// A part of what is said.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Part {
    /// A text that was given.
    InputText {
        /// The text.
        text: String,
    },
    /// A text that was generated.
    OutputText {
        /// Always empty: there is nothing to cite.
        #[serde(default)]
        annotations: Vec<Value>,
        /// Of the tokens of the text, if asked for.
        #[serde(default)]
        logprobs: Vec<ChatTokenLogprob>,
        /// The text.
        text: String,
    },
    /// A refusal, which may be given and is not generated.
    Refusal {
        /// The text.
        refusal: String,
    },
}

impl Part {
    /// Its text.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::InputText { text } | Self::OutputText { text, .. } => text,
            Self::Refusal { refusal } => refusal,
        }
    }
}

/// The model thinks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reasoning {
    /// Names it.
    pub id: String,
    /// What is thought: all of it, nothing is summed up.
    pub summary: Vec<SummaryText>,
    /// The same where a client gave it so; absent if it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Vec<ReasoningText>>,
    /// As a client gave it. It cannot be read here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted_content: Option<String>,
    /// How far it is; absent if a client gave it without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<ItemStatus>,
}

/// A part of what is thought.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "summary_text")]
pub struct SummaryText {
    /// The text.
    pub text: String,
}

/// A part of what is thought.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "reasoning_text")]
pub struct ReasoningText {
    /// The text.
    pub text: String,
}

/// The model calls a tool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Names the item.
    pub id: String,
    /// How far it is.
    pub status: ItemStatus,
    /// The arguments, as the model wrote them: JSON, unless it was cut off.
    pub arguments: String,
    /// Names the call: the tool's answer refers to it.
    pub call_id: String,
    /// The tool.
    pub name: String,
    /// The namespace that the tool belongs to; absent if it belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// The model calls a custom tool, whose input is text and not JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CustomCall {
    /// Names the item.
    pub id: String,
    /// How far it is.
    pub status: ItemStatus,
    /// What the tool is given.
    pub input: String,
    /// Names the call: the tool's answer refers to it.
    pub call_id: String,
    /// The tool.
    pub name: String,
    /// The namespace that the tool belongs to; absent if it belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// A tool answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallOutput {
    /// Names the item.
    pub id: String,
    /// How far it is.
    pub status: ItemStatus,
    /// Which call it answers.
    pub call_id: String,
    /// The answer.
    pub output: Output,
}

/// What a tool answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Output {
    /// A text.
    Text(String),
    /// Several.
    Parts(Vec<Part>),
}

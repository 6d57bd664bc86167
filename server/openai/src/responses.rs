//! The responses endpoint on the wire: requests, items, responses, and the events of a stream.
//!
//! What a server keeps of a response is what it has answered, so responses and items are read as well as written.

mod conversation;
mod event;
mod item;
mod request;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use conversation::{Conversation, Deleted, InputTokens, List};
pub use event::{Event, EventData, kind};
pub use item::{
    Call, CallOutput, CustomCall, Item, ItemStatus, Message, Output, Part, Reasoning, ReasoningText,
    SummaryText,
};
pub use request::{
    ConversationRequest, InputItem, InputPart, ItemsRequest, ReasoningParameter, Request, TextOr,
    TextParameter,
};

/// The value of the member `object`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Object {
    /// A response.
    #[serde(rename = "response")]
    Response,
    /// A conversation.
    #[serde(rename = "conversation")]
    Conversation,
    /// That a conversation is no more.
    #[serde(rename = "conversation.deleted")]
    ConversationDeleted,
    /// A list.
    #[serde(rename = "list")]
    List,
    /// A count of tokens.
    #[serde(rename = "response.input_tokens")]
    InputTokens,
}

/// A response: as it is answered, as it is kept, and as it stands in events.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Response {
    /// Names it.
    pub id: String,
    /// Always [`Object::Response`].
    pub object: Object,
    /// When it was begun, in seconds since 1970.
    pub created_at: u64,
    /// How far it is.
    pub status: Status,
    /// Whether it is made whether or not anybody waits for it.
    pub background: bool,
    /// When it was complete, in seconds since 1970; absent unless it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed_at: Option<u64>,
    /// Why it failed.
    pub error: Option<ResponseError>,
    /// Why it is not complete.
    pub incomplete_details: Option<IncompleteDetails>,
    /// As in the request.
    pub instructions: Option<String>,
    /// As in the request.
    pub max_output_tokens: Option<u32>,
    /// As in the request.
    pub max_tool_calls: Option<u32>,
    /// The model's name as the request gave it.
    pub model: String,
    /// What the model has said, thought and called.
    pub output: Vec<Item>,
    /// Whether there may be several calls.
    pub parallel_tool_calls: bool,
    /// The response that this one follows.
    pub previous_response_id: Option<String>,
    /// The conversation it is in, absent if in none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conversation: Option<ConversationName>,
    /// As in the request.
    pub prompt_cache_key: Option<String>,
    /// How much is thought.
    pub reasoning: ReasoningParameter,
    /// As in the request.
    pub safety_identifier: Option<String>,
    /// There is one: `default`.
    pub service_tier: String,
    /// Whether it is kept.
    pub store: bool,
    /// What was used.
    pub temperature: f32,
    /// The form of the text.
    pub text: TextParameter,
    /// Which tools may be called.
    pub tool_choice: Value,
    /// The tools.
    pub tools: Vec<Value>,
    /// Of how many of the most probable tokens log probabilities are told.
    pub top_logprobs: u32,
    /// What was used.
    pub top_p: f32,
    /// What happens if the conversation is too long: `auto` or `disabled`.
    pub truncation: String,
    /// Tokens used; `null` until it has ended.
    pub usage: Option<Usage>,
    /// As in the request.
    pub user: Option<String>,
    /// As in the request.
    pub metadata: Map<String, Value>,
    /// The parts of the request that have no effect; absent if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<Warning>,
}

/// A part of the request that has no effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// For programs: `unsupported_tool` or `unsupported_format`.
    pub code: String,
    /// The parameter, as a path: `tools[1]`.
    pub param: String,
    /// For people.
    pub message: String,
}

/// How far a response is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// In the background, and not begun.
    Queued,
    /// It is being made.
    InProgress,
    /// It is whole.
    Completed,
    /// It was cut off: see the details.
    Incomplete,
    /// See the error.
    Failed,
    /// Somebody cancelled it.
    Cancelled,
}

impl Status {
    /// Whether it stays as it is.
    #[must_use]
    pub fn is_final(self) -> bool {
        !matches!(self, Self::Queued | Self::InProgress)
    }
}

/// Why a response failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseError {
    /// For programs: `server_error`.
    pub code: String,
    /// For people.
    pub message: String,
}

/// Why a response is not complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncompleteDetails {
    /// `max_output_tokens`.
    pub reason: String,
}

/// A conversation, by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConversationName {
    /// Its name.
    pub id: String,
}

/// Tokens used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Of the prompt.
    pub input_tokens: u64,
    /// What is to be known about them.
    pub input_tokens_details: InputTokensDetails,
    /// Generated, reasoning and calls included.
    pub output_tokens: u64,
    /// What is to be known about them.
    pub output_tokens_details: OutputTokensDetails,
    /// Both together.
    pub total_tokens: u64,
}

/// What is to be known about the tokens of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputTokensDetails {
    /// Those that were in the prefix cache and were not computed again.
    pub cached_tokens: u64,
    /// Always 0: what is written into the prefix cache is not counted.
    pub cache_write_tokens: u64,
}

/// What is to be known about generated tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputTokensDetails {
    /// Those of reasoning.
    pub reasoning_tokens: u64,
}

#[cfg(test)]
mod tests;

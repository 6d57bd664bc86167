//! A response with its state, its errors and its usage.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Item, ReasoningParameter, TextParameter};

/// The type of an object, in its member `object`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Object {
    /// The object is a response.
    #[serde(rename = "response")]
    Response,
    /// The object is a conversation.
    #[serde(rename = "conversation")]
    Conversation,
    /// The object confirms that a conversation was deleted.
    #[serde(rename = "conversation.deleted")]
    ConversationDeleted,
    /// The object is a list.
    #[serde(rename = "list")]
    List,
    /// The object is a count of tokens.
    #[serde(rename = "response.input_tokens")]
    InputTokens,
}

/// A response. Responses are sent, stored and included in events in this format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Response {
    /// The identifier of the response.
    pub id: String,
    /// The object type: always [`Object::Response`].
    pub object: Object,
    /// The time when the response was created, in seconds since 1970.
    pub created_at: u64,
    /// The state of the generation.
    pub status: Status,
    /// Whether the response is generated in the background, even if no client waits for it.
    pub background: bool,
    /// The time when the response was completed, in seconds since 1970; absent unless the response is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed_at: Option<u64>,
    /// The reason why the response failed.
    pub error: Option<ResponseError>,
    /// The reason why the response is incomplete.
    pub incomplete_details: Option<IncompleteDetails>,
    /// The instructions of the request.
    pub instructions: Option<String>,
    /// The token limit of the request.
    pub max_output_tokens: Option<u32>,
    /// The tool call limit of the request.
    pub max_tool_calls: Option<u32>,
    /// The name of the model as given in the request.
    pub model: String,
    /// The messages, reasoning and tool calls that the model generated.
    pub output: Vec<Item>,
    /// Whether a response may contain several tool calls.
    pub parallel_tool_calls: bool,
    /// The identifier of the earlier response that this response continues.
    pub previous_response_id: Option<String>,
    /// The conversation that the response belongs to; absent if it belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conversation: Option<ConversationName>,
    /// The prompt cache key of the request.
    pub prompt_cache_key: Option<String>,
    /// The settings of the reasoning.
    pub reasoning: ReasoningParameter,
    /// The safety identifier of the request.
    pub safety_identifier: Option<String>,
    /// The service tier: always `default`.
    pub service_tier: String,
    /// Whether the server stores the response.
    pub store: bool,
    /// The temperature that was used.
    pub temperature: f32,
    /// The format and the verbosity of the text.
    pub text: TextParameter,
    /// Whether the model may, must or must not call tools, or which tool it must call.
    pub tool_choice: Value,
    /// The tools of the request, except those that the server ignores.
    pub tools: Vec<Value>,
    /// The number of most probable tokens that are reported at each position.
    pub top_logprobs: u32,
    /// The value of `top_p` that was used.
    pub top_p: f32,
    /// The behavior if the conversation is too long: `auto` or `disabled`.
    pub truncation: String,
    /// The numbers of tokens used; `null` until generation ends, and if it fails or is canceled.
    pub usage: Option<ResponseUsage>,
    /// The user of the request.
    pub user: Option<String>,
    /// The metadata of the request.
    pub metadata: Map<String, Value>,
    /// The warnings about parts of the request that have no effect or only a limited one; absent if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<Warning>,
}

/// A warning about a part of the request that has no effect or only a limited one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// The machine-readable code: `unsupported_tool` or `unsupported_format`.
    pub code: String,
    /// The path of the parameter, such as `tools[1]`.
    pub param: String,
    /// The human-readable description of the warning.
    pub message: String,
}

/// The state of the generation of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The response waits in the background for generation to begin.
    Queued,
    /// The model is generating the response.
    InProgress,
    /// The response is complete.
    Completed,
    /// The response was cut off; `incomplete_details` has the reason.
    Incomplete,
    /// Generation failed; `error` has the reason.
    Failed,
    /// A client canceled the response.
    Cancelled,
}

impl Status {
    /// Whether the state can no longer change.
    #[must_use]
    pub fn is_final(self) -> bool {
        !matches!(self, Self::Queued | Self::InProgress)
    }
}

/// The reason why a response failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseError {
    /// The machine-readable code: `server_error`.
    pub code: String,
    /// The human-readable description of the error.
    pub message: String,
}

/// The reason why a response is incomplete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncompleteDetails {
    /// The reason for the cut-off: `max_output_tokens`.
    pub reason: String,
}

/// A reference to a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConversationName {
    /// The identifier of the conversation.
    pub id: String,
}

/// The numbers of tokens that a response used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseUsage {
    /// The number of tokens of the prompt.
    pub input_tokens: u64,
    /// Details about the tokens of the prompt.
    pub input_tokens_details: InputTokensDetails,
    /// The number of generated tokens, including reasoning and tool calls.
    pub output_tokens: u64,
    /// Details about the generated tokens.
    pub output_tokens_details: OutputTokensDetails,
    /// The sum of input and output tokens.
    pub total_tokens: u64,
}

/// Details about the tokens of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputTokensDetails {
    /// The number of tokens that were in the prefix cache and did not have to be computed.
    pub cached_tokens: u64,
    /// The number of tokens written to the prefix cache: always 0, because the server does not count them.
    pub cache_write_tokens: u64,
    /// The number of tokens that images take; absent if there are no images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_tokens: Option<u64>,
}

/// Details about generated tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputTokensDetails {
    /// The number of tokens that the model generated as reasoning.
    pub reasoning_tokens: u64,
}

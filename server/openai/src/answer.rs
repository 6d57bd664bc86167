//! The responses of the chat and completions endpoints, both whole and streamed in chunks.

use std::sync::Arc;

use serde::Serialize;

use crate::{ChatLogprobs, CompletionLogprobs, PromptLogprobs};

/// The reason why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChoiceFinishReason {
    /// The model, a stop string or a stop token ended the choice, which contains no tool call.
    Stop,
    /// The choice reached its token limit.
    Length,
    /// The choice contains a tool call and was not cut off by its token limit.
    ToolCalls,
    /// The same as `ToolCalls`, for a request that uses the deprecated `functions`.
    FunctionCall,
}

/// The numbers of tokens that a request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// The number of tokens of the prompt, or of all prompts together.
    pub prompt_tokens: u64,
    /// The number of generated tokens of all choices, including candidates that are not returned (`best_of`).
    pub completion_tokens: u64,
    /// The sum of prompt and completion tokens.
    pub total_tokens: u64,
    /// Details about the prompt tokens.
    pub prompt_tokens_details: PromptTokensDetails,
    /// Details about the generated tokens; absent unless the text is parsed for reasoning or draft tokens were
    /// computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
}

/// Details about the generated tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CompletionTokensDetails {
    /// The number of tokens that the model generated as reasoning.
    pub reasoning_tokens: u64,
    /// The number of draft tokens that the model accepted, from any source; absent if none were computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_prediction_tokens: Option<u64>,
    /// The number of draft tokens that the model rejected, which are not among the generated tokens; absent if none
    /// were computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rejected_prediction_tokens: Option<u64>,
}

/// Details about the prompt tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// The number of tokens that were in the prefix cache and did not have to be computed.
    pub cached_tokens: u64,
    /// The number of tokens that images take; absent if there are no images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_tokens: Option<u64>,
}

/// The complete response of the chat endpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatCompletion {
    /// The identifier of the response.
    pub id: String,
    /// The object type: always `chat.completion`.
    pub object: &'static str,
    /// The time when the request was submitted to the engine, in seconds since 1970.
    pub created: u64,
    /// The name of the model as given in the request.
    pub model: String,
    /// The choices, in order of their indices.
    pub choices: Vec<ChatChoice>,
    /// The numbers of tokens used.
    pub usage: Usage,
    /// A fingerprint that changes when the same seed may produce a different response.
    pub system_fingerprint: String,
    /// The tokens of the prompt; absent unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Arc<[u32]>>,
    /// The log probabilities of the prompt; absent unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// A choice of a complete chat response.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChoice {
    /// The index of the choice.
    pub index: u32,
    /// The message that the model generated.
    pub message: ChatMessage,
    /// The log probabilities of the tokens of the choice, if requested.
    pub logprobs: Option<ChatLogprobs>,
    /// The reason why the choice ended.
    pub finish_reason: ChoiceFinishReason,
    /// The tokens of the choice; absent unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// A message that the model generated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChatMessage {
    /// The role of the author: always `assistant`.
    pub role: &'static str,
    /// The text of the message; `null` if the message contains tool calls but no text.
    pub content: Option<String>,
    /// A refusal: always `null`, because the server cannot distinguish refusals from other text.
    pub refusal: Option<String>,
    /// The reasoning before the message; absent if there is none or the request excludes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same as `reasoning_content`, under the name that newer clients use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The tool calls of the message; absent if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<ToolCall>>,
    /// The tool call of the message, in responses to requests that used the deprecated `functions`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_call: Option<FunctionCall>,
}

/// A tool call in a complete response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolCall {
    /// The identifier of the call, to which the message with the result refers.
    pub id: String,
    /// The type of the tool: always `function`.
    pub r#type: &'static str,
    /// The function that is called, with its arguments.
    pub function: FunctionCall,
}

/// The name and the arguments of a function call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FunctionCall {
    /// The name of the function.
    pub name: String,
    /// The arguments as JSON, converted from the model's notation if necessary; incomplete JSON if the call was cut off
    /// or is malformed.
    pub arguments: String,
}

/// A chunk of a streamed chat response.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunk {
    /// The identifier of the response, which is the same in all its chunks.
    pub id: String,
    /// The object type: always `chat.completion.chunk`.
    pub object: &'static str,
    /// The time when the request was submitted to the engine, in seconds since 1970.
    pub created: u64,
    /// The name of the model as given in the request.
    pub model: String,
    /// One choice; none in the additional last chunk that reports the total usage.
    pub choices: Vec<ChatChunkChoice>,
    /// The numbers of tokens used. Absent unless the request sets `include_usage`. If it does, the last chunk contains
    /// the total usage, and all other chunks contain `null` or, if the request sets `continuous_usage_stats`, the usage
    /// up to that point.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// A fingerprint as in [`ChatCompletion`].
    pub system_fingerprint: String,
    /// The tokens of the prompt, in the first chunk of each choice; absent unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Arc<[u32]>>,
}

/// The new part of a choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunkChoice {
    /// The index of the choice.
    pub index: u32,
    /// The new part of the message.
    pub delta: ChatDelta,
    /// The log probabilities of the tokens of this chunk, if requested.
    pub logprobs: Option<ChatLogprobs>,
    /// The reason why the choice ended; `null` until then.
    pub finish_reason: Option<ChoiceFinishReason>,
    /// The tokens of this chunk; absent unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// The new part of a message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ChatDelta {
    /// The role `assistant`, in the first chunk of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// The new text of the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// A refusal: `null` in the first chunk of a choice, otherwise absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Option<String>>,
    /// The new reasoning of the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same as `reasoning_content`, under the name that newer clients use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The new parts of the tool calls of the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<ToolCallDelta>>,
    /// The new part of the tool call of the message, in responses to requests that used the deprecated `functions`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_call: Option<FunctionDelta>,
}

/// The new part of a tool call. The first part names the function and has empty arguments; later parts append to the
/// arguments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolCallDelta {
    /// The index of the call within its choice, starting at 0.
    pub index: u32,
    /// The identifier of the call, in its first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The type of the tool, always `function`, in the first part of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#type: Option<&'static str>,
    /// The new part of the function call.
    pub function: FunctionDelta,
}

/// The new part of a function call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FunctionDelta {
    /// The name of the function, in the first part of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The new part of the arguments.
    pub arguments: String,
}

/// A response of the completions endpoint. Whole responses and chunks have the same fields.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Completion {
    /// The identifier of the response.
    pub id: String,
    /// The object type: always `text_completion`.
    pub object: &'static str,
    /// The time when the request was submitted to the engine, in seconds since 1970.
    pub created: u64,
    /// The name of the model as given in the request.
    pub model: String,
    /// The choices. A chunk contains one choice, or none if it is the additional last chunk that reports the total
    /// usage.
    pub choices: Vec<CompletionChoice>,
    /// The numbers of tokens used. Always present in a whole response; in a chunk, as in [`ChatChunk::usage`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// A fingerprint as in [`ChatCompletion`].
    pub system_fingerprint: String,
}

/// A choice of a completion.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CompletionChoice {
    /// The index of the choice. With several prompts, the choices of the first prompt come first.
    pub index: u32,
    /// The text of the choice; in a chunk, the new part of the text.
    pub text: String,
    /// The log probabilities of the tokens of the choice, if requested.
    pub logprobs: Option<CompletionLogprobs>,
    /// The reason why the choice ended; `null` in chunks before that.
    pub finish_reason: Option<ChoiceFinishReason>,
    /// The tokens of the choice or, in a chunk, of the chunk; absent unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// The tokens of the prompt, in a whole response and in the first chunk of each choice; absent unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Arc<[u32]>>,
    /// The log probabilities of the prompt; absent unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

//! What answers look like, whole and in chunks.

use serde::Serialize;

use crate::{ChatLogprobs, CompletionLogprobs, PromptLogprobs};

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended it, or a stop string or stop token did.
    Stop,
    /// It has as many tokens as it may.
    Length,
    /// The model ended it after calling tools.
    ToolCalls,
    /// The same, where tools came as functions.
    FunctionCall,
}

/// Tokens used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Of the prompt (of all prompts).
    pub prompt_tokens: u64,
    /// Generated, over all choices.
    pub completion_tokens: u64,
    /// Both together.
    pub total_tokens: u64,
    /// What is to be known about the prompt tokens.
    pub prompt_tokens_details: PromptTokensDetails,
    /// What is to be known about the generated tokens, of models that think.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
}

/// What is to be known about the generated tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CompletionTokensDetails {
    /// Those that the model thought with.
    pub reasoning_tokens: u64,
    /// Those that were guessed, where any were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_prediction_tokens: Option<u64>,
    /// Guesses that were computed and are not among the generated tokens, where there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rejected_prediction_tokens: Option<u64>,
}

/// What is to be known about the prompt tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// Those that were in the prefix cache and were not computed again.
    pub cached_tokens: u64,
}

/// A whole answer of the chat endpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatCompletion {
    /// Names the answer.
    pub id: String,
    /// Always `chat.completion`.
    pub object: &'static str,
    /// When it was begun, in seconds since 1970.
    pub created: u64,
    /// The model's name as the request gave it.
    pub model: String,
    /// The choices, by index.
    pub choices: Vec<ChatChoice>,
    /// Tokens used.
    pub usage: Usage,
    /// Changes when the same seed may give another answer.
    pub system_fingerprint: String,
    /// The prompt's tokens, absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// The log probabilities of the prompt, absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// A choice of a whole chat answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChoice {
    /// Which one.
    pub index: u32,
    /// What the model said.
    pub message: ChatMessage,
    /// Log probabilities, if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Its tokens, absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// What the model said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChatMessage {
    /// Always `assistant`.
    pub role: &'static str,
    /// The text.
    pub content: Option<String>,
    /// Always `null`: we do not tell refusals apart.
    pub refusal: Option<String>,
    /// What it thought before, absent if nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same under its other name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The calls it made, absent if none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<ToolCall>>,
    /// The call it made, where tools came as functions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_call: Option<FunctionCall>,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolCall {
    /// Names the call: the tool's answer refers to it.
    pub id: String,
    /// Always `function`.
    pub r#type: &'static str,
    /// What is called with what.
    pub function: FunctionCall,
}

/// What is called with what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FunctionCall {
    /// The tool.
    pub name: String,
    /// Its arguments, as the model wrote them: JSON, unless it was cut off.
    pub arguments: String,
}

/// A chunk of a chat answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunk {
    /// Names the answer; the same in all its chunks.
    pub id: String,
    /// Always `chat.completion.chunk`.
    pub object: &'static str,
    /// When the answer was begun, in seconds since 1970.
    pub created: u64,
    /// The model's name as the request gave it.
    pub model: String,
    /// At most one; none in the chunk with the usage.
    pub choices: Vec<ChatChunkChoice>,
    /// Absent unless the request wants the usage; then `null` in all chunks but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// As in [`ChatCompletion`].
    pub system_fingerprint: String,
    /// The prompt's tokens, in the first chunk; absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// What is new in a choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunkChoice {
    /// Which one.
    pub index: u32,
    /// What is new.
    pub delta: ChatDelta,
    /// Log probabilities of the tokens whose text this is, if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended; `null` until it has.
    pub finish_reason: Option<FinishReason>,
    /// The tokens whose text this is, absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// What is new in a message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ChatDelta {
    /// `assistant`, in the first chunk of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// More text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// `null`, in the first chunk of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Option<String>>,
    /// More of what it thinks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same under its other name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// More of its calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<ToolCallDelta>>,
    /// More of its call, where tools came as functions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_call: Option<FunctionDelta>,
}

/// What is new in a call: first all that names it, with empty arguments, then pieces of the arguments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolCallDelta {
    /// Which call of the choice, from 0.
    pub index: u32,
    /// As in [`ToolCall`], in the call's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Always `function`, in the call's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#type: Option<&'static str>,
    /// What is called with what.
    pub function: FunctionDelta,
}

/// What is new in what is called with what.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FunctionDelta {
    /// The tool, in the call's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// More of the arguments.
    pub arguments: String,
}

/// An answer of the completions endpoint, whole or a chunk: they have one shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Completion {
    /// Names the answer.
    pub id: String,
    /// Always `text_completion`.
    pub object: &'static str,
    /// When it was begun, in seconds since 1970.
    pub created: u64,
    /// The model's name as the request gave it.
    pub model: String,
    /// The choices; in a chunk at most one.
    pub choices: Vec<CompletionChoice>,
    /// Always there in a whole answer; in chunks as in [`ChatChunk`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// As in [`ChatCompletion`].
    pub system_fingerprint: String,
}

/// A choice of a completion.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CompletionChoice {
    /// Which one: with several prompts those of the first come first.
    pub index: u32,
    /// The text, in a chunk what is new of it.
    pub text: String,
    /// Log probabilities, if asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// Why it ended; `null` in a chunk until it has.
    pub finish_reason: Option<FinishReason>,
    /// Its tokens, in a chunk those whose text this is; absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// The prompt's tokens, absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// The log probabilities of the prompt, absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

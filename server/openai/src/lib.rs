//! The OpenAI API on the wire: what requests, answers, chunks and errors look like in JSON, and nothing of
//! what they mean. Serde only: no HTTP, no engine, no text.
//!
//! Reading is tolerant: fields we do not know are ignored and `null` is the same as absent. A value of a
//! wrong type is refused by the name of the parameter it stands in ([`Malformed::param`]). Whether a value of
//! the right type is in range is for the server to say.

mod answer;
mod error;
mod logprobs;
mod model;
mod parse;
mod request;
pub mod responses;
mod tokens;

pub use answer::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage, Completion,
    CompletionChoice, CompletionTokensDetails, FinishReason, FunctionCall, FunctionDelta,
    PromptTokensDetails, ToolCall, ToolCallDelta, Usage,
};
pub use error::{ErrorBody, ErrorObject};
pub use logprobs::{
    ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, PromptLogprob, PromptLogprobs, TopLogprob,
};
pub use model::{Model, ModelList};
pub use parse::{Malformed, object};
pub use request::{
    ChatRequest, CompletionRequest, Content, ContentPart, Generation, Message, Prompt, Stop, StreamOptions,
};
pub use tokens::{DetokenizeRequest, Detokenized, Lists, Texts, TokenizeRequest, Tokenized};

//! The wire types of the OpenAI API: the JSON of requests, responses, chunks and errors, without their semantics. The
//! crate depends only on serde, serde_json and serde_path_to_error, and contains no code for HTTP, the engine or the
//! tokenizer.
//!
//! Parsing is tolerant: unknown fields are ignored, and `null` has the same effect as leaving out an optional field. A
//! value of a wrong type causes an error with the path of the parameter ([`RequestError::param`]). The server checks
//! whether values are in range.

mod answer;
mod error;
mod logprobs;
mod model;
mod parse;
mod request;
pub mod responses;
mod text_or_list;
mod tokens;

pub use answer::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage, ChoiceFinishReason,
    Completion, CompletionChoice, CompletionTokensDetails, FunctionCall, FunctionDelta, PromptTokensDetails,
    ToolCall, ToolCallDelta, Usage,
};
pub use error::{ErrorBody, ErrorObject};
pub use logprobs::{
    ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, PromptLogprob, PromptLogprobs, TopLogprob,
};
pub use model::{Model, ModelList};
pub use parse::{RequestError, object};
pub use request::{
    ChatRequest, CompletionRequest, Content, ContentPart, Generation, ImageUrl, Message, Prompt, Stop,
    StreamOptions,
};
pub use tokens::{DetokenizeRequest, DetokenizeResponse, Lists, Texts, TokenizeRequest, TokenizeResponse};

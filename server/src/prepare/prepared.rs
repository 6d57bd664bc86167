//! Defines prepared requests: the requests to the engine, and how their tokens become an answer.

use std::sync::Arc;

use server_engine::{Request, TokenId};
use tokio_util::sync::CancellationToken;

use super::media::Media;
use super::parser_settings::ParserSettings;
use crate::limits::ByteReservation;
use crate::model::Model;

/// The model and the limits that a request is prepared for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    pub(crate) model: &'a Model,
    pub(crate) limits: server_engine::EngineLimits,
    /// The media that were fetched for the request.
    pub(crate) media: &'a Media,
    /// Canceled when the client disconnects, so that the preparation can stop.
    pub(crate) canceled: &'a CancellationToken,
    /// The seed for a request that does not set one, and for the IDs of tool calls.
    pub(crate) seed: u64,
}

/// A request with all parameters resolved.
#[derive(Debug)]
pub(crate) struct PreparedRequest {
    /// The requests to the engine, one for each prompt.
    pub(crate) prompts: Vec<Request>,
    /// The memory of the images, which is needed until the answer is complete.
    pub(crate) image_memory: Option<ByteReservation>,
    /// For each prompt, the text with which its choices begin; empty without an echo.
    pub(crate) echoes: Vec<String>,
    /// The options for converting tokens to text.
    pub(crate) text: TextOptions,
    /// The options for presenting the answer.
    pub(crate) answer_options: AnswerOptions,
}

/// The options for converting tokens to the text of a choice.
#[derive(Clone, Debug)]
pub(crate) struct TextOptions {
    /// The settings for parsing the text; `None` if all of it is content.
    pub(crate) parser: Option<Arc<ParserSettings>>,
    /// Strings that end a choice. In parsed text, they take effect only within content.
    pub(crate) stops: Vec<String>,
    /// The number of tokens that a choice must have before a stop string can end it.
    pub(crate) tokens_min: u32,
    /// Whether the string or token that ended a choice is part of its text.
    pub(crate) include_stop: bool,
    /// Whether special tokens are omitted from the text.
    pub(crate) skip_special: bool,
    /// Whether the text continues the text of the prompt.
    pub(crate) continues_text: bool,
    /// The engine's stop tokens.
    pub(crate) stop_tokens: Vec<TokenId>,
    /// Whether tokens are converted to text.
    pub(crate) detokenize: bool,
    /// Whether to discard the generated tokens: the request asks for no tokens, but the engine generates at least one.
    pub(crate) discards: bool,
}

/// The options for presenting the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AnswerOptions {
    /// The name of the model in the request.
    pub(crate) model: String,
    pub(crate) stream: bool,
    /// The chunks in which a streamed answer reports the usage.
    pub(crate) usage: UsageReporting,
    /// Number of returned choices for each prompt. If more are generated, the best ones are returned.
    pub(crate) choices: u32,
    /// Number of most probable tokens to report at each position; `None` if no log probabilities are requested.
    pub(crate) logprobs: Option<u32>,
    /// Number of most probable tokens to report at each position of the prompt; `None` if no log probabilities of the
    /// prompt are requested.
    pub(crate) prompt_logprobs: Option<u32>,
    /// Whether the answer has the token IDs.
    pub(crate) token_ids: bool,
    /// Whether log probabilities identify tokens by their IDs.
    pub(crate) names_by_id: bool,
    /// Whether a call is reported as `function_call`, the deprecated form of `tool_calls`.
    pub(crate) calls_functions: bool,
    /// The tokens of the prompts, if the answer contains them or their log probabilities.
    pub(crate) prompts: Vec<Arc<[TokenId]>>,
}

/// The chunks in which a streamed answer reports the usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UsageReporting {
    Never,
    /// The usage is in an additional last chunk.
    LastChunk,
    /// The usage is in an additional last chunk, and each other chunk has the usage up to that point.
    EveryChunk,
}

//! PreparedRequest requests: the requests to the engine, and how their tokens become an answer.

use std::sync::Arc;

use server_engine::{Request, TokenId};

use super::parser_settings::ParserSettings;
use crate::model::Model;

/// The model and the limits that a request is prepared for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    pub(crate) model: &'a Model,
    /// The limits of the engine.
    pub(crate) limits: server_engine::EngineLimits,
    /// The seed for a request without one.
    pub(crate) seed: u64,
}

/// A request with all parameters resolved.
#[derive(Debug)]
pub(crate) struct PreparedRequest {
    /// The requests to the engine, one for each prompt.
    pub(crate) prompts: Vec<Request>,
    /// The prefix of the text of each prompt's choices, which may be empty.
    pub(crate) echoes: Vec<String>,
    /// How tokens become text.
    pub(crate) text: TextRule,
    /// How the answer is presented.
    pub(crate) reply: Reply,
}

/// How tokens become the text of a choice.
#[derive(Clone, Debug)]
pub(crate) struct TextRule {
    /// How the text is parsed; `None` if all of it is content.
    pub(crate) parser: Option<Arc<ParserSettings>>,
    /// Strings that end a choice. In parsed text they count only within content.
    pub(crate) stops: Vec<String>,
    /// Number of tokens before which no stop string ends a choice.
    pub(crate) tokens_min: u32,
    /// Whether the string or token that ended a choice is part of its text.
    pub(crate) include_stop: bool,
    /// Whether special tokens have no text.
    pub(crate) skip_special: bool,
    /// Whether the text continues the prompt's text.
    pub(crate) continues_text: bool,
    /// The engine's stop tokens.
    pub(crate) stop_tokens: Vec<TokenId>,
    /// Whether tokens become text at all.
    pub(crate) detokenize: bool,
    /// Whether the generated tokens are discarded: the engine generates at least one token.
    pub(crate) discards: bool,
}

/// How the answer is presented.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// The name of the model in the request.
    pub(crate) model: String,
    pub(crate) stream: bool,
    /// When a streamed answer reports the usage.
    pub(crate) usage: UsageRule,
    /// Number of returned choices for each prompt: the best, if more are generated.
    pub(crate) choices: u32,
    /// Number of most probable tokens with log probabilities; `None` for no log probabilities.
    pub(crate) logprobs: Option<u32>,
    /// The same for the tokens of the prompt.
    pub(crate) prompt_logprobs: Option<u32>,
    /// Whether the answer has the token IDs.
    pub(crate) token_ids: bool,
    /// Whether log probabilities name tokens by their IDs.
    pub(crate) names_by_id: bool,
    /// Whether a call is reported as `function_call`, the deprecated form of `tool_calls`.
    pub(crate) calls_functions: bool,
    /// The prompts' tokens, if the answer needs them or their log probabilities.
    pub(crate) prompts: Vec<Vec<TokenId>>,
}

/// When a streamed answer reports the usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UsageRule {
    Never,
    /// In an additional last chunk.
    Last,
    /// In an additional last chunk, and the usage so far in each other chunk.
    Always,
}

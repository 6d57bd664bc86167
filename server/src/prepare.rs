//! From a request as it was on the wire to one for the engine, once: defaults resolved, ranges checked, the
//! conversation rendered and tokenised. After this nobody looks at the wire.
//!
//! Pure: it takes no time but computing, and the same request gives the same result.

mod completion;
mod conversation;
mod encode;
mod fitting;
mod functions;
mod guide;
mod infill;
mod parameters;
mod prompt;
mod reading;
mod resolved;
pub(crate) mod responses;
mod tokens;
mod tools;

use std::sync::Arc;

use server_engine::{Request, TokenId};
use server_openai::{ChatRequest, Generation};

pub(crate) use completion::completion;
use conversation::Conversation;
pub(crate) use guide::may_compile;
pub(crate) use parameters::{Endpoint, Here, Kind, Parameter, Peer, checked};
pub(crate) use reading::Reading;
use resolved::{Source, TokensMax};
pub(crate) use tokens::{detokenize, tokenize};

use crate::error::Error;
use crate::model::Model;

/// What requests are prepared for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    pub(crate) model: &'a Model,
    /// What the engine keeps to.
    pub(crate) limits: server_engine::Limits,
    /// For a request that names none.
    pub(crate) seed: u64,
}

/// A request, resolved.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// One for each prompt.
    pub(crate) prompts: Vec<Request>,
    /// What the text of each prompt's choices begins with; empty for none.
    pub(crate) echoes: Vec<String>,
    /// How tokens become text.
    pub(crate) text: TextRule,
    /// How the answer is put.
    pub(crate) reply: Reply,
}

/// How tokens become the text of a choice.
#[derive(Clone, Debug)]
pub(crate) struct TextRule {
    /// How the text is read; `None` if all of it is content.
    pub(crate) reading: Option<Arc<Reading>>,
    /// Strings that end a choice: within its content, where the text is read.
    pub(crate) stops: Vec<String>,
    /// Tokens within which none of them ends a choice.
    pub(crate) tokens_min: u32,
    /// Whether the string or token that ended a choice is part of its text.
    pub(crate) include_stop: bool,
    /// Whether special tokens have no text.
    pub(crate) skip_special: bool,
    /// Whether the text goes on from the prompt's.
    pub(crate) continues_text: bool,
    /// The engine's stop tokens.
    pub(crate) stop_tokens: Vec<TokenId>,
    /// Whether tokens become text at all.
    pub(crate) detokenize: bool,
    /// Whether nothing that is generated is wanted: the engine generates a token in any case.
    pub(crate) discards: bool,
}

/// How the answer is put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// The model's name as the request gave it.
    pub(crate) model: String,
    pub(crate) stream: bool,
    /// When a streamed answer tells the usage.
    pub(crate) usage: UsageRule,
    /// How many choices of each prompt are wanted: the best, where more are generated.
    pub(crate) choices: u32,
    /// `Some(k)`: log probabilities are wanted, of the `k` most probable tokens too.
    pub(crate) logprobs: Option<u32>,
    /// The same of the prompt's tokens.
    pub(crate) prompt_logprobs: Option<u32>,
    /// Whether the tokens themselves are wanted.
    pub(crate) token_ids: bool,
    /// Whether log probabilities name tokens by their numbers.
    pub(crate) names_by_id: bool,
    /// Whether a call is told as one of a function, as before there were tools.
    pub(crate) calls_functions: bool,
    /// The prompts' tokens, if they or their log probabilities are wanted.
    pub(crate) prompts: Vec<Vec<TokenId>>,
}

/// When a streamed answer tells the usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UsageRule {
    Never,
    /// In a chunk after all others.
    Last,
    /// There, and so far in each chunk.
    Always,
}

/// Prepares a request to the chat endpoint.
///
/// # Errors
/// It cannot be served.
pub(crate) fn chat(mut request: ChatRequest, target: Target<'_>) -> Result<Prepared, Error> {
    let mut generation = std::mem::take(&mut request.generation);
    target.model.api_rules.complete(&mut generation);
    target.model.api_rules.complete_messages(request.messages.as_deref_mut().unwrap_or_default());
    let wanted = request.logprobs.unwrap_or(false);
    if request.top_logprobs.is_some() && !wanted {
        return Err(Error::invalid("top_logprobs", "is given, but logprobs is not true"));
    }
    let logprobs = wanted.then(|| request.top_logprobs.unwrap_or(0));
    // Another model's request has errors of another model.
    let model = parameters::model(&generation, target.model)?;
    let answer = Wanted { model, logprobs, tokens_max: requested_tokens(&generation) };
    let mut asked = Conversation::of_chat(request)?;
    let calls_functions = std::mem::take(&mut asked.calls_functions);
    let mut prepared = conversation(&generation, &asked, answer, target)?;
    prepared.reply.calls_functions = calls_functions;
    Ok(prepared)
}

/// What is wanted of the answer to a conversation.
pub(crate) struct Wanted {
    /// The model, as the request names it.
    pub(crate) model: String,
    /// `Some(k)`: log probabilities, of the `k` most probable tokens too.
    pub(crate) logprobs: Option<u32>,
    /// What the request says of its length.
    tokens_max: Option<TokensMax>,
}

/// Prepares a conversation.
///
/// # Errors
/// It cannot be served.
pub(crate) fn conversation(
    generation: &Generation,
    conversation: &Conversation,
    answer: Wanted,
    target: Target<'_>,
) -> Result<Prepared, Error> {
    let Wanted { model, logprobs, tokens_max } = answer;
    let mut resolved = parameters::resolve(generation, target, ("top_logprobs", logprobs))?;
    let defaults = &target.model.text.defaults;
    let tokens_max =
        tokens_max.or(defaults.tokens_max.map(|tokens| TokensMax { param: "max_tokens", tokens }));
    if let Some(TokensMax { param, tokens: 0 }) = tokens_max {
        return Err(Error::coded("integer_below_min_value", param, "must be at least 1"));
    }
    resolved.check_choices(1)?;
    let rendered = prompt::render(conversation, target.model, resolved.prompt_tokens_max(target))?;
    resolved.text.continues_text = conversation.continues;
    resolved.guide = guide::of_conversation(generation, conversation, &rendered.end, target)?;
    // Whoever wants special tokens wants the text as it is; so it is with OVMS.
    if resolved.text.skip_special && resolved.text.detokenize {
        let reading = Reading::of(conversation, rendered.end, target.model, target.seed);
        resolved.text.reading = reading.map(Arc::new);
    }
    let source = Source { prompts: vec![rendered.tokens], param: conversation.param, echoes: Vec::new() };
    resolved.prepare(model, source, tokens_max, target)
}

/// What the request asks for, and by which parameter.
fn requested_tokens(generation: &Generation) -> Option<TokensMax> {
    let later = generation.max_completion_tokens;
    let later = later.map(|tokens| TokensMax { param: "max_completion_tokens", tokens });
    later.or(generation.max_tokens.map(|tokens| TokensMax { param: "max_tokens", tokens }))
}

//! Prepares requests to the chat endpoint. The responses endpoint prepares its conversations with the same function
//! ([`prepare_conversation`]).

use std::sync::Arc;

use server_openai::{ChatRequest, Generation};

use super::conversation::Conversation;
use super::parser_settings::ParserSettings;
use super::prepared::{PreparedRequest, Target};
use super::resolved::{PromptSource, TokensMax, UndecodedRequest};
use super::{functions, guide, parameters, prompt};
use crate::error::Error;

/// Prepares a request to the chat endpoint.
///
/// # Errors
/// The request is invalid.
pub(crate) fn chat(mut request: ChatRequest, target: Target<'_>) -> Result<PreparedRequest, Error> {
    let mut generation = std::mem::take(&mut request.generation);
    target.model.api_rules.complete(&mut generation);
    target.model.api_rules.complete_messages(request.messages.as_deref_mut().unwrap_or_default());
    let has_logprobs = request.logprobs.unwrap_or(false);
    if request.top_logprobs.is_some() && !has_logprobs {
        return Err(Error::invalid("top_logprobs", "requires logprobs = true"));
    }
    let logprobs = has_logprobs.then(|| request.top_logprobs.unwrap_or(0));
    // Check the model before the parameters whose limits depend on it.
    let model = parameters::model(&generation, target.model)?;
    let answer = AnswerRequest { model, logprobs, tokens_max: TokensMax::requested(&generation) };
    let mut conversation = Conversation::of_chat(request)?;
    let calls_functions = std::mem::take(&mut conversation.calls_functions);
    let undecoded = prepare_conversation(&generation, &conversation, answer, target)
        .map_err(|error| if calls_functions { functions::renamed(error) } else { error })?;
    let mut prepared = undecoded.decode_images(target)?;
    prepared.answer_options.calls_functions = calls_functions;
    Ok(prepared)
}

/// The parameters of the answer that the chat and responses endpoints read in different ways.
pub(super) struct AnswerRequest {
    /// The name of the model in the request.
    pub(super) model: String,
    /// Number of most probable tokens to report at each position; `None` if no log probabilities are requested.
    pub(super) logprobs: Option<u32>,
    /// The requested length of the answer.
    pub(super) tokens_max: Option<TokensMax>,
}

/// Prepares a conversation without decoding its images.
///
/// # Errors
/// The request is invalid.
pub(super) fn prepare_conversation(
    generation: &Generation,
    conversation: &Conversation,
    answer: AnswerRequest,
    target: Target<'_>,
) -> Result<UndecodedRequest, Error> {
    let AnswerRequest { model, logprobs, tokens_max } = answer;
    let mut resolved = parameters::resolve(generation, target, "top_logprobs", logprobs)?;
    let defaults = &target.model.text.defaults;
    let tokens_max = tokens_max.or(defaults.tokens_max.map(TokensMax::default_of));
    if let Some(TokensMax { param, tokens: 0, .. }) = tokens_max {
        return Err(Error::coded("integer_below_min_value", param, "must be at least 1"));
    }
    resolved.check_choices(1)?;
    let tokens_max_of_prompt = resolved.prompt_tokens_max(target);
    let rendered = prompt::render(conversation, target.model, target.media, tokens_max_of_prompt)?;
    resolved.text.continues_text = conversation.continues;
    resolved.guide = guide::of_conversation(generation, conversation, &rendered.end, target)?;
    // As in OVMS, an answer that retains its special tokens is not parsed. Without detokenization, there is no text to
    // parse.
    if resolved.text.skip_special && resolved.text.detokenize {
        let parser = ParserSettings::of(conversation, rendered.end, target.model, target.seed);
        resolved.text.parser = parser.map(Arc::new);
    }
    let source = PromptSource {
        prompts: vec![rendered.tokens],
        param: conversation.param,
        echoes: Vec::new(),
        images: rendered.images,
    };
    resolved.prepare(model, source, tokens_max, target)
}

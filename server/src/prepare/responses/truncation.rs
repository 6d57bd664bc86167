//! Removes the beginning of a conversation that does not fit, if the request allows it (`truncation`).

use server_openai::responses::Request;
use server_openai::{Generation, Message};

use super::messages;
use crate::error::Error;
use crate::prepare::chat::{AnswerRequest, prepare_conversation};
use crate::prepare::conversation::Conversation;
use crate::prepare::fitting::{first_fitting, guess_cut};
use crate::prepare::prepared::Target;
use crate::prepare::resolved::{ANSWER_SHARE, LimitSource, TokensMax, UndecodedRequest};

/// Prepares the conversation. If it does not fit and may be truncated, prepares its longest suffix that leaves room for
/// the answer. If no suffix does, and the request does not limit the length of the answer, prepares the last turn
/// alone.
///
/// # Errors
/// The request is invalid, or the conversation does not fit, even after the truncation that the request allows.
pub(super) fn prepare_fitting(
    request: &Request,
    generation: &Generation,
    model: &str,
    conversation: &Conversation,
    target: Target<'_>,
) -> Result<UndecodedRequest, Error> {
    let limit = |tokens, source| TokensMax { param: "max_output_tokens", tokens, source };
    let tokens_max = request.max_output_tokens.map(|tokens| limit(tokens, LimitSource::Request));
    let prepare = |messages: Vec<Message>, tokens_max: Option<TokensMax>| {
        let conversation = Conversation { messages, ..conversation.clone() };
        let answer = AnswerRequest { model: model.to_owned(), logprobs: logprobs(request), tokens_max };
        prepare_conversation(generation, &conversation, answer, target)
    };
    let too_long = match prepare(conversation.messages.clone(), tokens_max) {
        Err(error) if is_too_long(&error) && request.truncation.as_deref() == Some("auto") => error,
        other => return other,
    };
    let cuts = messages::cuts(&conversation.messages);
    let rest = |cut: usize| messages::without(&conversation.messages, cut);
    let room = target.limits.requests.max_model_len / ANSWER_SHARE;
    let left = tokens_max.unwrap_or(limit(room.max(1), LimitSource::Room));
    let tokens_max_of_prompt = target.limits.requests.max_model_len.saturating_sub(left.tokens);
    let Target { model: served, media, .. } = target;
    let guess = guess_cut(&conversation.messages, &cuts, served, media, tokens_max_of_prompt);
    let fitting = first_fitting(cuts.len(), guess, |at| match prepare(rest(cuts[at]), Some(left)) {
        Ok(prepared) => Ok(Some(prepared)),
        Err(error) if is_too_long(&error) => Ok(None),
        Err(error) => Err(error),
    })?;
    let cut = fitting.as_ref().map_or(cuts.last(), |(at, _)| cuts.get(*at)).copied();
    match (tokens_max, cut) {
        (Some(_), _) | (_, None) => fitting.map(|(_, prepared)| prepared).ok_or(too_long),
        // Prepare the suffix again without a limit for the answer, so that the answer may use the rest of the context
        // length. If no suffix leaves enough room for the answer, prepare the last turn alone.
        (None, Some(cut)) => {
            // Release the memory of the images before they are read again.
            drop(fitting);
            prepare(rest(cut), None).map_err(|error| if is_too_long(&error) { too_long } else { error })
        }
    }
}

/// Whether shortening the conversation may avoid the error.
fn is_too_long(error: &Error) -> bool {
    match error {
        Error::ContextLength { .. } => true,
        // The request has too many messages or images, or the images have too many pixels or bytes.
        Error::Invalid { code, param, .. } => {
            *code == "array_above_max_length" && (param == "input" || param.starts_with("input["))
        }
        _ => false,
    }
}

/// Returns the number of most probable tokens to report at each position; `None` if no log probabilities are requested.
fn logprobs(request: &Request) -> Option<u32> {
    let is_included = request.include.iter().flatten().any(|name| name == "message.output_text.logprobs");
    let is_requested =
        is_included || request.logprobs == Some(true) || request.top_logprobs.is_some_and(|top| top > 0);
    is_requested.then(|| request.top_logprobs.unwrap_or(0))
}

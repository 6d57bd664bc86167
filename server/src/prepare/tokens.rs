//! Prepares requests to the tokenize and detokenize endpoints, which do not use the engine.

use serde_json::Value;
use server_engine::TokenId;
use server_openai::{
    ChatRequest, DetokenizeRequest, DetokenizeResponse, Generation, Lists, Texts, TokenizeRequest,
    TokenizeResponse,
};
use server_text::Tokenizer;

use super::conversation::Conversation;
use super::encode::{Encoder, Surround};
use super::prepared::Target;
use super::{parameters, prompt};
use crate::error::Error;

/// Number of tokens after padding, over all texts of one tokenize request.
///
/// Beyond it: 400, `integer_above_max_value`.
const PADDED_TOKENS_MAX: usize = 1 << 20;

/// Tokenizes a text, several texts, or a conversation.
///
/// # Errors
/// The request has none of these or more than one, or the text cannot be tokenized.
pub(crate) fn tokenize(request: &Value, target: Target<'_>) -> Result<TokenizeResponse, Error> {
    let wire = TokenizeRequest::read(request)?;
    model(wire.model.as_ref(), target)?;
    let surround = Surround::added_if(wire.add_special_tokens.unwrap_or(true));
    let encode = |text: &String, param: &'static str| {
        Encoder { model: target.model, param, tokens_max: None }.text(text, surround)
    };
    let has_messages = request.get("messages").is_some_and(|messages| !messages.is_null());
    let (texts, param) = match (&wire.text, &wire.prompt, has_messages) {
        (Some(text), None, false) => (text, "text"),
        (None, Some(prompt), false) => (prompt, "prompt"),
        (None, None, true) => {
            let conversation = Conversation::of_chat(ChatRequest::read(request)?)?;
            let tokens = prompt::render(&conversation, target.model, target.media, None)?.tokens;
            return fitted(Lists::One(tokens), &wire, target);
        }
        (None, None, false) => {
            let problem = "one of text, prompt and messages is required";
            return Err(Error::coded("missing_required_parameter", "text", problem));
        }
        _ => return Err(Error::invalid("text", "only one of text, prompt and messages can be given")),
    };
    let tokens = match texts {
        Texts::One(text) => Lists::One(encode(text, param)?),
        Texts::Several(texts) => {
            Lists::Several(texts.iter().map(|text| encode(text, param)).collect::<Result<_, _>>()?)
        }
    };
    fitted(tokens, &wire, target)
}

/// Detokenizes tokens.
///
/// # Errors
/// A token is not in the vocabulary.
pub(crate) fn detokenize(request: &Value, target: Target<'_>) -> Result<DetokenizeResponse, Error> {
    let wire = DetokenizeRequest::read(request)?;
    model(wire.model.as_ref(), target)?;
    let tokens = wire.tokens.ok_or_else(|| Error::missing("tokens"))?;
    parameters::check_tokens("tokens", &tokens, target)?;
    let text = target.model.text.tokenizer.decode(&tokens, wire.skip_special_tokens.unwrap_or(false));
    Ok(DetokenizeResponse { prompt: text.clone(), text })
}

/// Checks the name of the model, which may be absent as in vLLM.
fn model(name: Option<&String>, target: Target<'_>) -> Result<(), Error> {
    match name {
        None => Ok(()),
        Some(name) => {
            let generation = Generation { model: Some(name.clone()), ..Generation::default() };
            parameters::model(&generation, target.model).map(|_| ())
        }
    }
}

/// Truncates and pads lists of tokens as requested.
fn fitted(
    tokens: Lists<TokenId>,
    wire: &TokenizeRequest,
    target: Target<'_>,
) -> Result<TokenizeResponse, Error> {
    let pads = wire.pad_to_max_length.unwrap_or(false);
    let Some(length) = wire.max_length.map(|length| length as usize) else {
        if pads {
            return Err(Error::invalid("pad_to_max_length", "requires max_length"));
        }
        return Ok(response(tokens, None, wire, target));
    };
    let mut lists = match tokens {
        Lists::One(list) => vec![list],
        Lists::Several(lists) => lists,
    };
    let is_one = matches!(
        (&wire.text, &wire.prompt),
        (Some(Texts::One(_)), _) | (_, Some(Texts::One(_))) | (None, None)
    );
    if pads && lists.len().saturating_mul(length) > PADDED_TOKENS_MAX {
        let problem =
            format!("{length} tokens for each of {} texts exceed {PADDED_TOKENS_MAX} tokens", lists.len());
        return Err(Error::coded("integer_above_max_value", "max_length", problem));
    }
    lists.iter_mut().for_each(|list| list.truncate(length));
    let count = lists.iter().map(Vec::len).sum();
    if pads {
        let pad = padding(&target.model.text.tokenizer)?;
        let is_left = wire.padding_side.as_deref() == Some("left");
        for list in &mut lists {
            let missing = std::iter::repeat_n(pad, length - list.len());
            if is_left {
                list.splice(0..0, missing);
            } else {
                list.extend(missing);
            }
        }
    }
    let lists =
        if is_one { Lists::One(lists.into_iter().flatten().collect()) } else { Lists::Several(lists) };
    Ok(response(lists, Some(count), wire, target))
}

fn response(
    tokens: Lists<TokenId>,
    count: Option<usize>,
    wire: &TokenizeRequest,
    target: Target<'_>,
) -> TokenizeResponse {
    let tokenizer = &target.model.text.tokenizer;
    let names = |list: &Vec<TokenId>| list.iter().map(|token| tokenizer.token_text(*token)).collect();
    let token_strs = wire.return_token_strs.unwrap_or(false).then(|| match &tokens {
        Lists::One(list) => Lists::One(names(list)),
        Lists::Several(lists) => Lists::Several(lists.iter().map(names).collect()),
    });
    let all = match &tokens {
        Lists::One(list) => list.len(),
        Lists::Several(lists) => lists.iter().map(Vec::len).sum(),
    };
    let max_model_len = target.limits.requests.max_model_len;
    TokenizeResponse { tokens, count: count.unwrap_or(all), max_model_len, token_strs }
}

/// Returns the padding token that the model's files name, or else a token with the usual name of a padding token, or
/// else the end token, with which models without a padding token are usually trained.
fn padding(tokenizer: &Tokenizer) -> Result<TokenId, Error> {
    const NAMES: [&str; 5] = ["<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>"];
    let named =
        NAMES.iter().find_map(|name| tokenizer.token_id(name).filter(|token| tokenizer.is_special(*token)));
    let pad = tokenizer.pad().or(named);
    pad.or(tokenizer.eos())
        .ok_or_else(|| Error::invalid("pad_to_max_length", "this model has no padding token"))
}

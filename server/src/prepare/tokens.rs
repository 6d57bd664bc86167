//! Prepares requests to the tokenize and detokenize endpoints, which do not use the engine.

use serde_json::Value;
use server_engine::TokenId;
use server_openai::{
    ChatRequest, DetokenizeRequest, DetokenizeResponse, Generation, Lists, Texts, TokenizeRequest,
    TokenizeResponse,
};
use server_text::Tokenizer;

use super::conversation::Conversation;
use super::encode::{Encoder, SpecialTokens};
use super::prepared::Target;
use super::{parameters, prompt};
use crate::error::Error;

/// Number of tokens in the response to a tokenize request, over all texts and including padding.
///
/// If exceeded: 400, `string_above_max_length`; `integer_above_max_value` if the limit is exceeded only because of the
/// padding.
const TOKENS_MAX: usize = 1 << 20;
/// Size of the text in the response to a detokenize request.
///
/// If exceeded: 400, `array_above_max_length`.
const TEXT_BYTES_MAX: usize = 4 << 20;

/// Whether the answer to a request with this body may have padding, so that it may be much larger than the request.
pub(crate) fn may_pad(body: &[u8]) -> bool {
    // This search does not find a name that contains escape sequences. The caller also checks `may_compile`, which is
    // true for such a body.
    memchr::memmem::find(body, b"pad_to_max_length").is_some()
}

/// Tokenizes a text, several texts, or a conversation.
///
/// # Errors
/// The request has none of these or more than one, a parameter is invalid, the text cannot be tokenized, or the answer
/// would be too large.
pub(crate) fn tokenize(request: &Value, target: Target<'_>) -> Result<TokenizeResponse, Error> {
    let wire = TokenizeRequest::read(request)?;
    model(wire.model.as_ref(), target)?;
    let mut tokens_left = TOKENS_MAX;
    let has_messages = request.get("messages").is_some_and(|messages| !messages.is_null());
    let (texts, param) = match (&wire.text, &wire.prompt, has_messages) {
        (Some(text), None, false) => (text, "text"),
        (None, Some(prompt), false) => (prompt, "prompt"),
        (None, None, true) => {
            let conversation = Conversation::of_chat(ChatRequest::read(request)?)?;
            let tokens = prompt::render(&conversation, target.model, target.media, None)?.tokens;
            let tokens = truncated(tokens, "messages", &wire, &mut tokens_left)?;
            return response(Lists::One(tokens), &wire, target);
        }
        (None, None, false) => {
            let problem = "one of text, prompt and messages is required";
            return Err(Error::coded("missing_required_parameter", "text", problem));
        }
        _ => return Err(Error::invalid("text", "only one of text, prompt and messages can be given")),
    };
    let encoder = Encoder { model: target.model, param, tokens_max: None, image_tokens: 0 };
    let special_tokens = SpecialTokens::added_if(wire.add_special_tokens.unwrap_or(true));
    let mut encode =
        |text: &String| truncated(encoder.text(text, special_tokens)?, param, &wire, &mut tokens_left);
    let tokens = match texts {
        Texts::One(text) => Lists::One(encode(text)?),
        Texts::Several(texts) => Lists::Several(texts.iter().map(encode).collect::<Result<_, _>>()?),
    };
    response(tokens, &wire, target)
}

/// Detokenizes tokens.
///
/// # Errors
/// A parameter is missing or invalid, a token is not in the vocabulary, or the text would be too long.
pub(crate) fn detokenize(request: &Value, target: Target<'_>) -> Result<DetokenizeResponse, Error> {
    let wire = DetokenizeRequest::read(request)?;
    model(wire.model.as_ref(), target)?;
    let tokens = wire.tokens.ok_or_else(|| Error::missing("tokens"))?;
    parameters::check_tokens("tokens", &tokens, target)?;
    let tokenizer = &target.model.text.tokenizer;
    let bytes: usize = tokens.iter().map(|&token| tokenizer.token_bytes(token).len()).sum();
    if bytes > TEXT_BYTES_MAX {
        let problem = format!("the text of the tokens has {bytes} bytes (limit: {TEXT_BYTES_MAX} bytes)");
        return Err(Error::coded("array_above_max_length", "tokens", problem));
    }
    let text = tokenizer.decode(&tokens, wire.skip_special_tokens.unwrap_or(false));
    Ok(DetokenizeResponse { prompt: text.clone(), text })
}

/// Checks the name of the model, which may be absent, as in vLLM.
fn model(name: Option<&String>, target: Target<'_>) -> Result<(), Error> {
    match name {
        None => Ok(()),
        Some(name) => {
            let generation = Generation { model: Some(name.clone()), ..Generation::default() };
            parameters::model(&generation, target.model).map(|_| ())
        }
    }
}

/// Truncates the tokens of a text or conversation as requested, and subtracts the number of the remaining tokens from
/// `tokens_left`, the number of tokens that the answer may still have.
///
/// # Errors
/// The answer would have too many tokens.
fn truncated(
    mut tokens: Vec<TokenId>,
    param: &str,
    wire: &TokenizeRequest,
    tokens_left: &mut usize,
) -> Result<Vec<TokenId>, Error> {
    if let Some(length) = wire.max_length {
        tokens.truncate(length as usize);
        tokens.shrink_to_fit();
    }
    *tokens_left = tokens_left.checked_sub(tokens.len()).ok_or_else(|| {
        let problem = format!(
            "has more than {TOKENS_MAX} tokens; send less text, or limit the number of tokens with max_length"
        );
        Error::coded("string_above_max_length", param, problem)
    })?;
    Ok(tokens)
}

/// Returns the answer with these lists of tokens, padded if requested.
///
/// # Errors
/// The lists cannot be padded as requested.
fn response(
    mut tokens: Lists<TokenId>,
    wire: &TokenizeRequest,
    target: Target<'_>,
) -> Result<TokenizeResponse, Error> {
    let tokenizer = &target.model.text.tokenizer;
    let lists = match &mut tokens {
        Lists::One(list) => std::slice::from_mut(list),
        Lists::Several(lists) => lists.as_mut_slice(),
    };
    let count = lists.iter().map(Vec::len).sum();
    if wire.pad_to_max_length.unwrap_or(false) {
        pad(lists, wire, tokenizer)?;
    }
    let names = |list: &Vec<TokenId>| list.iter().map(|token| tokenizer.token_text(*token)).collect();
    let token_strs = wire.return_token_strs.unwrap_or(false).then(|| match &tokens {
        Lists::One(list) => Lists::One(names(list)),
        Lists::Several(lists) => Lists::Several(lists.iter().map(names).collect()),
    });
    let max_model_len = target.limits.requests.max_model_len;
    Ok(TokenizeResponse { tokens, count, max_model_len, token_strs })
}

/// Pads lists of tokens to `max_length`. The lists must have been truncated to this length.
fn pad(lists: &mut [Vec<TokenId>], wire: &TokenizeRequest, tokenizer: &Tokenizer) -> Result<(), Error> {
    let Some(length) = wire.max_length.map(|length| length as usize) else {
        return Err(Error::invalid("pad_to_max_length", "requires max_length"));
    };
    if lists.len().saturating_mul(length) > TOKENS_MAX {
        let problem = format!(
            "padding each text to {length} tokens exceeds the limit of {TOKENS_MAX} tokens in all texts (texts: {})",
            lists.len()
        );
        return Err(Error::coded("integer_above_max_value", "max_length", problem));
    }
    let padding = padding(tokenizer)?;
    for list in lists {
        let missing = std::iter::repeat_n(padding, length - list.len());
        if wire.padding_side.as_deref() == Some("left") {
            list.splice(0..0, missing);
        } else {
            list.extend(missing);
        }
    }
    Ok(())
}

/// Returns the padding token that the model's files name, otherwise a token with a common name for padding tokens,
/// otherwise the end token, which usually pads the training data of models without a padding token.
fn padding(tokenizer: &Tokenizer) -> Result<TokenId, Error> {
    const NAMES: [&str; 5] = ["<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>"];
    let named =
        NAMES.iter().find_map(|name| tokenizer.token_id(name).filter(|token| tokenizer.is_special(*token)));
    let pad = tokenizer.pad().or(named);
    pad.or(tokenizer.eos())
        .ok_or_else(|| Error::invalid("pad_to_max_length", "this model has no padding token"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_of_a_request_share_the_tokens_that_an_answer_may_have() {
        let mut tokens_left = 5;
        let mut truncate = |tokens: usize, max_length: Option<u32>| {
            let wire = TokenizeRequest { max_length, ..TokenizeRequest::default() };
            truncated(vec![1; tokens], "text", &wire, &mut tokens_left).map(|tokens| tokens.len())
        };
        assert_eq!(truncate(3, None), Ok(3));
        assert_eq!(truncate(9, Some(1)), Ok(1), "only the tokens of the answer count");
        let Err(Error::Invalid { code, param, .. }) = truncate(2, None) else {
            panic!("accepted 2 tokens, although only 1 is left")
        };
        assert_eq!((code, param.as_str()), ("string_above_max_length", "text"));
        assert_eq!(truncate(1, None), Ok(1));
    }
}

//! Resolves the parameters that make individual tokens more or less probable, or exclude them. The tokens must be in
//! the vocabulary.

use std::sync::Arc;

use server_engine::TokenId;
use server_openai::Generation;

use crate::error::Error;
use crate::limits::BIASES_MAX;
use crate::prepare::encode::Encoder;
use crate::prepare::prepared::Target;

/// Reads `logit_bias`.
pub(super) fn logit_bias(generation: &Generation, target: Target<'_>) -> Result<Vec<(TokenId, f32)>, Error> {
    let Some(bias) = &generation.logit_bias else { return Ok(Vec::new()) };
    if bias.len() > BIASES_MAX {
        let problem = format!("has {} tokens (limit: {BIASES_MAX})", bias.len());
        return Err(Error::coded("object_above_max_properties", "logit_bias", problem));
    }
    let read = |(token, value): (&String, &serde_json::Value)| {
        let param = || format!("logit_bias.{token}");
        // Reject other spellings of a number, such as 007, because a token with two spellings would have two biases.
        let token: TokenId =
            token.parse().ok().filter(|number: &TokenId| number.to_string() == *token).ok_or_else(|| {
                Error::invalid(param(), "the name must be a token ID, an integer of at least 0")
            })?;
        known(token, target).map_err(|problem| Error::invalid(param(), problem))?;
        super::Kind::Number(-100.0, 100.0).check(&param(), value)?;
        Ok((token, value.as_f64().unwrap_or(0.0) as f32))
    };
    bias.iter().map(read).collect()
}

/// Returns `allowed_token_ids` in ascending order and without duplicates. The table limits the number of IDs.
pub(super) fn allowed_token_ids(
    generation: &Generation,
    target: Target<'_>,
) -> Result<Option<Arc<[TokenId]>>, Error> {
    let Some(tokens) = &generation.allowed_token_ids else { return Ok(None) };
    if tokens.is_empty() {
        return Err(Error::coded("empty_array", "allowed_token_ids", "is empty: it allows nothing"));
    }
    check_tokens("allowed_token_ids", tokens, target)?;
    let mut tokens = tokens.clone();
    tokens.sort_unstable();
    tokens.dedup();
    Ok(Some(tokens.into()))
}

/// Tokenizes each of `bad_words` twice: at the beginning of a text, and after a space.
pub(super) fn bad_words(generation: &Generation, target: Target<'_>) -> Result<Arc<[Vec<TokenId>]>, Error> {
    let words = generation.bad_words.as_deref().unwrap_or_default();
    let mut runs: Vec<Vec<TokenId>> = Vec::new();
    for (index, word) in words.iter().enumerate() {
        let param = format!("bad_words[{index}]");
        let word = word.trim_start();
        if word.is_empty() {
            return Err(Error::invalid(param, "is empty"));
        }
        let encoder = Encoder { model: target.model, param: &param, tokens_max: None, image_tokens: 0 };
        for text in [word.to_owned(), format!(" {word}")] {
            runs.push(encoder.literal(&text)?);
        }
    }
    runs.sort_unstable();
    runs.dedup();
    runs.retain(|run| !run.is_empty());
    Ok(runs.into())
}

/// Checks that the vocabulary has all these tokens.
pub(crate) fn check_tokens(param: &str, tokens: &[TokenId], target: Target<'_>) -> Result<(), Error> {
    (0..).zip(tokens).try_for_each(|(index, &token): (usize, _)| {
        known(token, target).map_err(|problem| Error::invalid(format!("{param}[{index}]"), problem))
    })
}

/// Checks that the vocabulary has the token.
fn known(token: TokenId, target: Target<'_>) -> Result<(), String> {
    let vocabulary = target.limits.vocabulary;
    if token < vocabulary {
        Ok(())
    } else {
        Err(format!("token {token} is not in the vocabulary of {vocabulary} tokens"))
    }
}

//! The parameters that make tokens more and less probable one by one, or rule them out. Their tokens have to be in
//! the vocabulary.

use std::sync::Arc;

use server_engine::TokenId;
use server_openai::Generation;

use crate::error::Error;
use crate::limits::BIASES_MAX;
use crate::prepare::Target;
use crate::prepare::encode::Encoder;

/// `logit_bias`.
pub(super) fn biases(generation: &Generation, target: Target<'_>) -> Result<Vec<(TokenId, f32)>, Error> {
    let Some(bias) = &generation.logit_bias else { return Ok(Vec::new()) };
    if bias.len() > BIASES_MAX {
        let problem = format!("has {} tokens, which are more than {BIASES_MAX}", bias.len());
        return Err(Error::coded("object_above_max_properties", "logit_bias", problem));
    }
    let read = |(token, value): (&String, &serde_json::Value)| {
        let param = || format!("logit_bias.{token}");
        let token: TokenId = token
            .parse()
            .map_err(|_| Error::invalid(param(), "the name is no token: an integer from 0 is expected"))?;
        known(token, target).map_err(|problem| Error::invalid(param(), problem))?;
        super::Kind::Number(-100.0, 100.0).check(&param(), value)?;
        Ok((token, value.as_f64().unwrap_or(0.0) as f32))
    };
    bias.iter().map(read).collect()
}

/// `allowed_token_ids`, ascending. The table limits how many there are.
pub(super) fn allowed(generation: &Generation, target: Target<'_>) -> Result<Option<Arc<[TokenId]>>, Error> {
    let Some(tokens) = &generation.allowed_token_ids else { return Ok(None) };
    if tokens.is_empty() {
        return Err(Error::coded("empty_array", "allowed_token_ids", "is empty: it allows nothing"));
    }
    all_known("allowed_token_ids", tokens, target)?;
    let mut tokens = tokens.clone();
    tokens.sort_unstable();
    tokens.dedup();
    Ok(Some(tokens.into()))
}

/// `bad_words`: the ways their tokens may run, at the beginning of a text and after a space.
pub(super) fn bad(generation: &Generation, target: Target<'_>) -> Result<Arc<[Vec<TokenId>]>, Error> {
    let words = generation.bad_words.as_deref().unwrap_or_default();
    let mut runs: Vec<Vec<TokenId>> = Vec::new();
    for (index, word) in words.iter().enumerate() {
        let param = format!("bad_words[{index}]");
        let word = word.trim_start();
        if word.is_empty() {
            return Err(Error::invalid(param, "is empty"));
        }
        let encoder = Encoder { model: target.model, param: &param, tokens_max: None };
        for text in [word.to_owned(), format!(" {word}")] {
            runs.push(encoder.literal(&text)?);
        }
    }
    runs.sort_unstable();
    runs.dedup();
    runs.retain(|run| !run.is_empty());
    Ok(runs.into())
}

/// Whether the vocabulary has all these tokens.
pub(in crate::prepare) fn all_known(
    param: &str,
    tokens: &[TokenId],
    target: Target<'_>,
) -> Result<(), Error> {
    (0..).zip(tokens).try_for_each(|(index, &token): (usize, _)| {
        known(token, target).map_err(|problem| Error::invalid(format!("{param}[{index}]"), problem))
    })
}

/// Whether the vocabulary has the token; if not, in words.
fn known(token: TokenId, target: Target<'_>) -> Result<(), String> {
    let vocabulary = target.limits.vocabulary;
    if token < vocabulary {
        Ok(())
    } else {
        Err(format!("token {token} is not in the vocabulary of {vocabulary} tokens"))
    }
}

//! Resolves the parameters that the endpoints share. A parameter has the value in the request, otherwise the default of
//! the model, otherwise the built-in default. This module also checks the rules that involve several parameters. The
//! rules for individual parameters are in the [`table`](table.rs), against which every request is checked earlier.

mod beams;
mod biases;
mod kind;
mod lookup;
mod table;

use std::fmt::Display;

use serde_json::Value;
use server_engine::{Sampling, TokenId};
use server_openai::Generation;
use sha2::{Digest as _, Sha256};

pub(crate) use biases::check_tokens;
pub(crate) use kind::Kind;
pub(crate) use table::{Endpoint, Parameter, PeerSupport, Support};

use super::prepared::{Target, TextOptions, UsageReporting};
use super::resolved::{ResolvedParameters, Truncate};
use crate::error::Error;
use crate::limits::{CHOICES_MAX, REPETITION_PENALTY_MAX, REPETITION_PENALTY_MIN, TOP_LOGPROBS_MAX};
use crate::model::Model;

/// The default of `top_k`, as in OVMS.
const TOP_K_DEFAULT: u32 = 40;

/// Reads a body as a JSON object and checks the type and the range of every parameter.
///
/// # Errors
/// The body is not a JSON object, or a parameter is invalid.
pub(crate) fn checked(endpoint: Endpoint, body: &[u8]) -> Result<Value, Error> {
    let request = server_openai::object(body)?;
    let object =
        request.as_object().ok_or_else(|| Error::Internal("the request must be an object".to_owned()))?;
    endpoint.check(object)?;
    Ok(request)
}

/// Returns the model name in a request, if it is a name of the served model or of one of its adapters.
pub(super) fn model(generation: &Generation, model: &Model) -> Result<String, Error> {
    match &generation.model {
        None => Err(Error::missing("model")),
        Some(name) if model.has_name(name) => Ok(name.clone()),
        Some(name) => Err(Error::UnknownModel(name.clone())),
    }
}

/// Resolves the parameters. `logprobs` is the value of the parameter `logprobs_param`.
pub(super) fn resolve(
    generation: &Generation,
    target: Target<'_>,
    logprobs_param: &'static str,
    logprobs: Option<u32>,
) -> Result<ResolvedParameters, Error> {
    let stream = generation.stream.unwrap_or(false);
    let usage = usage(generation, stream)?;
    let choices = within("n", generation.n.unwrap_or(1), 1, CHOICES_MAX)?;
    let candidates = candidates(generation, choices, stream)?;
    if let Some(top) = logprobs {
        within(logprobs_param, top, 0, TOP_LOGPROBS_MAX)?;
    }
    if stream && generation.prompt_logprobs.is_some() {
        return Err(Error::invalid("prompt_logprobs", "cannot be combined with stream"));
    }
    let text = text(generation, target)?;
    let beams = beams::beams(generation, choices, candidates, &text, &target.model.text.tokenizer)?;
    let token_ids = generation.return_token_ids.unwrap_or(false) || !text.detokenize;
    // Without log probabilities, the parts of an answer contain no token IDs, and the choices of `best_of` cannot be
    // ranked.
    let reported = logprobs.or((token_ids || candidates > choices && beams.is_none()).then_some(0));
    let prompt_logprobs = generation.prompt_logprobs;
    Ok(ResolvedParameters {
        choices,
        candidates,
        beams,
        lookup: lookup::lookup(generation, target)?,
        draft: lookup::draft(generation, target.model),
        sampling: Sampling { logprobs: reported, prompt_logprobs, ..sampling(generation, target)? },
        text,
        truncate: truncate(generation)?,
        logprobs,
        prompt_logprobs,
        stream,
        usage,
        token_ids,
        names_by_id: generation.return_tokens_as_token_ids.unwrap_or(false),
        salt: salt(generation)?,
        adapter: generation.model.as_deref().map_or(0, |name| target.model.adapter_number(name)),
        guide: None,
    })
}

fn usage(generation: &Generation, stream: bool) -> Result<UsageReporting, Error> {
    let Some(options) = generation.stream_options else { return Ok(UsageReporting::Never) };
    if !stream {
        return Err(Error::invalid("stream_options", "requires stream = true"));
    }
    Ok(match (options.include_usage.unwrap_or(false), options.continuous_usage_stats.unwrap_or(false)) {
        (true, true) => UsageReporting::EveryChunk,
        (true, false) => UsageReporting::LastChunk,
        // As in vLLM, `continuous_usage_stats` alone has no effect.
        (false, _) => UsageReporting::Never,
    })
}

/// Returns the number of choices to generate for each prompt.
fn candidates(generation: &Generation, choices: u32, stream: bool) -> Result<u32, Error> {
    let Some(best_of) = generation.best_of else { return Ok(choices) };
    within("best_of", best_of, 1, CHOICES_MAX)?;
    if best_of < choices {
        let problem = format!("{best_of} is less than n ({choices})");
        return Err(Error::coded("integer_below_min_value", "best_of", problem));
    }
    if best_of > choices && stream {
        let problem = format!(
            "must be equal to n ({choices}), not {best_of}, if stream is true: the best choices are known only at the \
             end"
        );
        return Err(Error::invalid("best_of", problem));
    }
    Ok(best_of)
}

fn text(generation: &Generation, target: Target<'_>) -> Result<TextOptions, Error> {
    let detokenize = generation.detokenize.unwrap_or(true);
    let stops = stops(generation, target.model);
    if !detokenize && generation.stop.as_ref().is_some_and(|stop| !stop.0.is_empty()) {
        return Err(Error::invalid(
            "stop",
            "cannot be combined with detokenize = false, because the answer has no text",
        ));
    }
    Ok(TextOptions {
        parser: None,
        stops: if detokenize { stops } else { Vec::new() },
        tokens_min: generation.min_tokens.unwrap_or(0),
        include_stop: generation.include_stop_str_in_output.unwrap_or(false),
        skip_special: generation.skip_special_tokens.unwrap_or(true),
        continues_text: false,
        stop_tokens: stop_tokens(generation, target)?,
        detokenize,
        discards: false,
    })
}

fn truncate(generation: &Generation) -> Result<Option<Truncate>, Error> {
    match generation.truncate_prompt_tokens {
        None => Ok(None),
        Some(-1) => Ok(Some(Truncate::ToRoom)),
        Some(tokens) => match u32::try_from(tokens) {
            Ok(tokens @ 1..) => Ok(Some(Truncate::To(tokens))),
            _ => Err(Error::invalid("truncate_prompt_tokens", "must be -1 or at least 1")),
        },
    }
}

/// Returns the hash of the cache salt, or 0 if the request has no salt. The hash is cryptographic, so that no client can
/// construct a salt that collides with another one, and it does not change between versions, because stored blocks are
/// found by it.
fn salt(generation: &Generation) -> Result<u64, Error> {
    match generation.cache_salt.as_deref() {
        None => Ok(0),
        Some("") => Err(Error::invalid("cache_salt", "is empty")),
        Some(salt) => {
            let digest = Sha256::digest(salt);
            let first = digest.first_chunk().expect("invariant: SHA-256 has 32 bytes");
            Ok(u64::from_be_bytes(*first).max(1))
        }
    }
}

fn sampling(generation: &Generation, target: Target<'_>) -> Result<Sampling, Error> {
    let defaults = &target.model.text.defaults;
    let top_k = match generation.top_k {
        None => defaults.top_k.unwrap_or(TOP_K_DEFAULT),
        // As in vLLM, -1 means all tokens, for which the engine's value is 0.
        Some(top_k) => u32::try_from(top_k).unwrap_or(0),
    };
    if generation.num_assistant_tokens.is_some() && generation.assistant_confidence_threshold.is_some() {
        let problem = "cannot be combined with num_assistant_tokens";
        return Err(Error::invalid("assistant_confidence_threshold", problem));
    }
    let number =
        |given: Option<f32>, recommended: Option<f32>, default: f32| given.or(recommended).unwrap_or(default);
    let is_penalty =
        |penalty: &f32| (REPETITION_PENALTY_MIN..=REPETITION_PENALTY_MAX).contains(&f64::from(*penalty));
    Ok(Sampling {
        // The values of the request are within their ranges, but those from the model's files may not be.
        temperature: number(generation.temperature, defaults.temperature, 1.0).clamp(0.0, 2.0),
        top_p: number(generation.top_p, defaults.top_p, 1.0).clamp(0.0, 1.0),
        top_k,
        min_p: number(generation.min_p, defaults.min_p, 0.0).clamp(0.0, 1.0),
        repetition_penalty: number(
            generation.repetition_penalty,
            defaults.repetition_penalty.filter(is_penalty),
            1.0,
        ),
        frequency_penalty: number(generation.frequency_penalty, defaults.frequency_penalty, 0.0)
            .clamp(-2.0, 2.0),
        presence_penalty: number(generation.presence_penalty, defaults.presence_penalty, 0.0)
            .clamp(-2.0, 2.0),
        logit_bias: biases::logit_bias(generation, target)?,
        allowed_token_ids: biases::allowed_token_ids(generation, target)?,
        bad_words: biases::bad_words(generation, target)?,
        seed: generation.seed.map_or(target.seed, |seed| seed as u64),
        logprobs: None,
        prompt_logprobs: None,
    })
}

/// Checks the range of a value again, because tests also resolve requests that were not checked against the table.
fn within<T: PartialOrd + Display + Copy>(param: &'static str, value: T, min: T, max: T) -> Result<T, Error> {
    if value < min {
        return Err(Error::coded(
            "integer_below_min_value",
            param,
            format!("must be at least {min}, not {value}"),
        ));
    }
    if value > max {
        return Err(Error::coded(
            "integer_above_max_value",
            param,
            format!("must be at most {max}, not {value}"),
        ));
    }
    Ok(value)
}

fn stop_tokens(generation: &Generation, target: Target<'_>) -> Result<Vec<TokenId>, Error> {
    let named = generation.stop_token_ids.as_deref().unwrap_or_default();
    check_tokens("stop_token_ids", named, target)?;
    let ends = target.model.text.defaults.eos.iter();
    let ends = ends.filter(|_| !generation.ignore_eos.unwrap_or(false));
    let mut tokens: Vec<TokenId> = ends.chain(named).copied().collect();
    tokens.sort_unstable();
    tokens.dedup();
    Ok(tokens)
}

fn stops(generation: &Generation, model: &Model) -> Vec<String> {
    let named = generation.stop.as_ref().map_or(&[][..], |stop| &stop.0);
    // Ignore empty stop strings, as other servers do, because every text contains them.
    let stops = model.text.defaults.stop.iter().chain(named).filter(|stop| !stop.is_empty());
    stops.cloned().collect()
}

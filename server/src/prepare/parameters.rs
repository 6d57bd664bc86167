//! The parameters that the endpoints share: request before model before built-in default, and the ranges.

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};
use server_engine::{Sampling, TokenId};
use server_openai::Generation;

use super::{Resolved, Target, TextRule};
use crate::error::Error;
use crate::limits::{BIASES_MAX, CHOICES_MAX, STOP_BYTES_MAX, STOP_TOKENS_MAX, STOPS_MAX, TOP_LOGPROBS_MAX};
use crate::model::Model;

/// The name a request gives the model, if it is one of its names.
pub(super) fn model(generation: &Generation, model: &Model) -> Result<String, Error> {
    match &generation.model {
        None => Err(Error::invalid("model", "is missing")),
        Some(name) if model.has_name(name) => Ok(name.clone()),
        Some(name) => Err(Error::UnknownModel(name.clone())),
    }
}

/// `logprobs` comes with the name of the parameter that gives the number.
pub(super) fn resolve(
    generation: &Generation,
    target: Target<'_>,
    logprobs: (&'static str, Option<u32>),
) -> Result<Resolved, Error> {
    refuse_unsupported(generation)?;
    let stream = generation.stream.unwrap_or(false);
    if generation.stream_options.is_some() && !stream {
        return Err(Error::invalid("stream_options", "is given, but stream is not true"));
    }
    let choices = within("n", generation.n.unwrap_or(1), 1..=CHOICES_MAX)?;
    if generation.best_of.is_some_and(|best_of| best_of != choices) {
        return Err(Error::invalid("best_of", "is not supported unless it is equal to n"));
    }
    if let (param, Some(top)) = logprobs {
        within(param, top, 0..=TOP_LOGPROBS_MAX)?;
    }
    let stop_tokens = stop_tokens(generation, target)?;
    Ok(Resolved {
        choices,
        tokens_min: generation.min_tokens.unwrap_or(0),
        sampling: Sampling { logprobs: logprobs.1, ..sampling(generation, target)? },
        text: TextRule {
            stops: stops(generation, target.model)?,
            include_stop: generation.include_stop_str_in_output.unwrap_or(false),
            skip_special: generation.skip_special_tokens.unwrap_or(true),
            continues_text: false,
            stop_tokens,
        },
        stream,
        include_usage: generation
            .stream_options
            .is_some_and(|options| options.include_usage.unwrap_or(false)),
    })
}

fn refuse_unsupported(generation: &Generation) -> Result<(), Error> {
    let Some(format) = &generation.response_format else { return Ok(()) };
    match format.get("type") {
        Some(Value::String(kind)) if kind == "text" => Ok(()),
        Some(Value::String(kind)) => {
            Err(Error::invalid("response_format", format!("type {kind:?} is not supported, only \"text\"")))
        }
        _ => Err(Error::invalid("response_format.type", "is missing or no string")),
    }
}

fn sampling(generation: &Generation, target: Target<'_>) -> Result<Sampling, Error> {
    let defaults = &target.model.text.defaults;
    let top_k = match generation.top_k {
        None => defaults.top_k.unwrap_or(0),
        // -1 is how others say "all".
        Some(-1) => 0,
        Some(top_k) => u32::try_from(top_k)
            .map_err(|_| Error::invalid("top_k", format!("{top_k} is neither -1 (all), 0 (all) nor more")))?,
    };
    let temperature = generation.temperature.or(defaults.temperature).unwrap_or(1.0);
    let penalty = generation.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0);
    if !(penalty > 0.0 && penalty.is_finite()) {
        return Err(Error::invalid("repetition_penalty", format!("{penalty} is not greater than 0")));
    }
    Ok(Sampling {
        temperature: within("temperature", temperature, 0.0..=2.0)?,
        top_p: within("top_p", generation.top_p.or(defaults.top_p).unwrap_or(1.0), 0.0..=1.0)?,
        top_k,
        min_p: within("min_p", generation.min_p.or(defaults.min_p).unwrap_or(0.0), 0.0..=1.0)?,
        repetition_penalty: penalty,
        frequency_penalty: within(
            "frequency_penalty",
            generation.frequency_penalty.unwrap_or(0.0),
            -2.0..=2.0,
        )?,
        presence_penalty: within("presence_penalty", generation.presence_penalty.unwrap_or(0.0), -2.0..=2.0)?,
        bias: generation.logit_bias.as_ref().map_or(Ok(Vec::new()), |bias| biases(bias, target))?,
        seed: generation.seed.map_or(target.seed, |seed| seed as u64),
        logprobs: None,
    })
}

fn within<T: PartialOrd + Display + Copy>(
    param: &'static str,
    value: T,
    range: RangeInclusive<T>,
) -> Result<T, Error> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(Error::invalid(param, format!("{value} is not from {} to {}", range.start(), range.end())))
}

fn biases(bias: &Map<String, Value>, target: Target<'_>) -> Result<Vec<(TokenId, f32)>, Error> {
    if bias.len() > BIASES_MAX {
        return Err(Error::invalid("logit_bias", format!("has more than {BIASES_MAX} tokens")));
    }
    let read = |(token, value): (&String, &Value)| {
        let param = || format!("logit_bias.{token}");
        let token: TokenId = token
            .parse()
            .map_err(|_| Error::invalid(param(), "the name is no token: an integer from 0 is expected"))?;
        known(token, target).map_err(|problem| Error::invalid(param(), problem))?;
        let value = value.as_f64().ok_or_else(|| Error::invalid(param(), "the value is no number"))?;
        if !(-100.0..=100.0).contains(&value) {
            return Err(Error::invalid(param(), format!("{value} is not from -100 to 100")));
        }
        Ok((token, value as f32))
    };
    bias.iter().map(read).collect()
}

fn known(token: TokenId, target: Target<'_>) -> Result<(), String> {
    let vocabulary = target.limits.vocabulary;
    if token < vocabulary {
        Ok(())
    } else {
        Err(format!("token {token} is not in the vocabulary of {vocabulary} tokens"))
    }
}

fn stop_tokens(generation: &Generation, target: Target<'_>) -> Result<Vec<TokenId>, Error> {
    let named = generation.stop_token_ids.as_deref().unwrap_or_default();
    if named.len() > STOP_TOKENS_MAX {
        return Err(Error::invalid("stop_token_ids", format!("has more than {STOP_TOKENS_MAX} tokens")));
    }
    for (index, &token) in named.iter().enumerate() {
        known(token, target)
            .map_err(|problem| Error::invalid(format!("stop_token_ids[{index}]"), problem))?;
    }
    let ends = target.model.text.defaults.eos.iter();
    let ends = ends.filter(|_| !generation.ignore_eos.unwrap_or(false));
    let mut tokens: Vec<TokenId> = ends.chain(named).copied().collect();
    tokens.sort_unstable();
    tokens.dedup();
    Ok(tokens)
}

fn stops(generation: &Generation, model: &Model) -> Result<Vec<String>, Error> {
    let named = generation.stop.as_ref().map_or(&[][..], |stop| &stop.0);
    if named.len() > STOPS_MAX {
        return Err(Error::invalid("stop", format!("has more than {STOPS_MAX} strings")));
    }
    for (index, stop) in named.iter().enumerate() {
        if stop.len() > STOP_BYTES_MAX {
            let problem = format!("is longer than {STOP_BYTES_MAX} bytes");
            return Err(Error::invalid(format!("stop[{index}]"), problem));
        }
    }
    // An empty string is in every text; it is taken as none, as others do.
    let stops = model.text.defaults.stop.iter().chain(named).filter(|stop| !stop.is_empty());
    Ok(stops.cloned().collect())
}

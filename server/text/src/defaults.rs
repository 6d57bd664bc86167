//! The generation parameters that the publisher of a model recommends, from `generation_config.json` or the
//! metadata of a GGUF file.

use serde_json::Value as Json;
use server_gguf::{GgufFile, Value};

use crate::{LoadError, Tokenizer, json_file::JsonFile};

/// The recommended generation parameters; `None` means that there is no recommendation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// The temperature. 0 selects greedy decoding; the value is also 0 if the file disables sampling.
    pub temperature: Option<f32>,
    /// Sample only from the most probable tokens whose probabilities add up to this value.
    pub top_p: Option<f32>,
    /// Sample only from this number of most probable tokens.
    pub top_k: Option<u32>,
    /// Sample only from tokens whose probability is at least this fraction of that of the most probable token.
    pub min_p: Option<f32>,
    /// The divisor of positive logits, and the factor of negative logits, for tokens that have already occurred.
    pub repetition_penalty: Option<f32>,
    /// The penalty subtracted from the logits of generated tokens, for each occurrence.
    pub frequency_penalty: Option<f32>,
    /// The penalty subtracted from the logits of generated tokens, regardless of how often they occur.
    pub presence_penalty: Option<f32>,
    /// The largest number of tokens to generate.
    pub tokens_max: Option<u32>,
    /// The largest number of draft tokens to propose at a time.
    pub assistant_tokens_max: Option<u32>,
    /// The probability below which the draft model stops proposing.
    pub assistant_confidence_min: Option<f32>,
    /// The length of the longest n-gram that prompt lookup searches for.
    pub ngram_max: Option<u32>,
    /// The tokens that end generation, in ascending order.
    pub eos: Vec<u32>,
    /// The token that begins a text.
    pub bos: Option<u32>,
    /// The strings that end generation.
    pub stop: Vec<String>,
}

/// Tokens that end a turn or a text in most models that have them. Some GGUF files do not declare all of their end
/// tokens.
const END_TOKENS: [&str; 12] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
];

impl GenerationDefaults {
    /// Reads the recommendations from the files of a directory.
    pub(crate) fn from_directory(
        generation: &JsonFile,
        config: &JsonFile,
        tokenizer: &Tokenizer,
    ) -> Result<Self, LoadError> {
        let mut eos = tokens(generation, "eos_token_id")?;
        if eos.is_empty() {
            eos = tokens(config, "eos_token_id")?;
        }
        if eos.is_empty() {
            eos.extend(tokenizer.eos());
        }
        eos.sort_unstable();
        eos.dedup();
        let greedy = generation.bool("do_sample")? == Some(false);
        let bos = tokens(generation, "bos_token_id")?.first().copied().or(tokenizer.bos());
        Ok(Self {
            temperature: if greedy { Some(0.0) } else { generation.f32("temperature")? },
            top_p: generation.f32("top_p")?,
            top_k: generation.u32("top_k")?,
            min_p: generation.f32("min_p")?,
            repetition_penalty: generation.f32("repetition_penalty")?,
            frequency_penalty: generation.f32("frequency_penalty")?,
            presence_penalty: generation.f32("presence_penalty")?,
            tokens_max: generation.u32("max_new_tokens")?,
            assistant_tokens_max: generation.u32("num_assistant_tokens")?,
            assistant_confidence_min: generation.f32("assistant_confidence_threshold")?,
            ngram_max: generation.u32("max_ngram_size")?,
            eos,
            bos,
            stop: strings(generation, "stop_strings")?,
        })
    }

    /// Reads the recommendations from the metadata of a GGUF file.
    pub(crate) fn from_gguf(file: &GgufFile, tokenizer: &Tokenizer) -> Result<Self, LoadError> {
        let fault = |key: &str, problem: &str| LoadError::Field {
            path: file.path().to_owned(),
            field: key.to_owned(),
            problem: problem.to_owned(),
        };
        let float = |key: &str| match file.get(key) {
            Some(value) => value.f32().map(Some).ok_or_else(|| fault(key, "is not a float")),
            None => Ok(None),
        };
        let integer = |key: &str| match file.get(key) {
            // For `top_k`, -1 means no recommendation, and 0 means no limit.
            Some(value) if value.i64() == Some(-1) => Ok(None),
            Some(value) => value.u32().map(Some).ok_or_else(|| fault(key, "is not an unsigned integer")),
            None => Ok(None),
        };
        let mut eos: Vec<u32> = tokenizer.eos().into_iter().collect();
        for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
            let token = file.get(key).and_then(Value::u32);
            eos.extend(token.filter(|&token| token < tokenizer.vocabulary_size()));
        }
        eos.extend(end_tokens(tokenizer));
        eos.sort_unstable();
        eos.dedup();
        Ok(Self {
            temperature: float("general.sampling.temp")?,
            top_p: float("general.sampling.top_p")?,
            top_k: integer("general.sampling.top_k")?,
            min_p: float("general.sampling.min_p")?,
            repetition_penalty: float("general.sampling.penalty_repeat")?,
            eos,
            bos: tokenizer.bos(),
            ..Self::default()
        })
    }
}

/// Returns the [`END_TOKENS`] that are special tokens of the vocabulary, except for `<|end|>` if it only ends a
/// message.
fn end_tokens(tokenizer: &Tokenizer) -> Vec<u32> {
    let find = |text: &&str| tokenizer.token_id(text).filter(|&token| tokenizer.is_special(token));
    // If the vocabulary has `<|call|>` and `<|return|>`, `<|end|>` only ends a message within a turn.
    let ends_messages = find(&"<|return|>").is_some() && find(&"<|call|>").is_some();
    END_TOKENS.iter().filter(|text| !(ends_messages && **text == "<|end|>")).filter_map(find).collect()
}

/// Parses a token ID or a list of token IDs; a missing value is equivalent to an empty list.
fn tokens(file: &JsonFile, field: &str) -> Result<Vec<u32>, LoadError> {
    let fault = || file.fault(field, "is neither a token ID nor a list of token IDs");
    let token = |value: &Json| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(fault);
    match file.get(field) {
        None => Ok(Vec::new()),
        Some(Json::Array(values)) => values.iter().map(token).collect(),
        Some(value) => Ok(vec![token(value)?]),
    }
}

/// Parses a string or a list of strings; a missing value is equivalent to an empty list.
fn strings(file: &JsonFile, field: &str) -> Result<Vec<String>, LoadError> {
    let fault = || file.fault(field, "is neither a string nor a list of strings");
    let string = |value: &Json| value.as_str().map(str::to_owned).ok_or_else(fault);
    match file.get(field) {
        None => Ok(Vec::new()),
        Some(Json::Array(values)) => values.iter().map(string).collect(),
        Some(value) => Ok(vec![string(value)?]),
    }
}

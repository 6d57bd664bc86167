//! What a model's publisher recommends for generation: `generation_config.json`, or a GGUF file's metadata.

use serde_json::Value as Json;
use server_gguf::{GgufFile, Value};

use crate::{LoadError, Tokenizer, json_file::JsonFile};

/// Recommended parameters. `None` is no recommendation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// 0 is greedy; also if the file says not to sample.
    pub temperature: Option<f32>,
    /// Keep the most probable tokens whose probabilities add up to this.
    pub top_p: Option<f32>,
    /// Keep this many of the most probable tokens.
    pub top_k: Option<u32>,
    /// Keep tokens at least this times as probable as the most probable one.
    pub min_p: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens seen before.
    pub repetition_penalty: Option<f32>,
    /// Taken off the logits of generated tokens, for each time they were.
    pub frequency_penalty: Option<f32>,
    /// Taken off the logits of generated tokens, once.
    pub presence_penalty: Option<f32>,
    /// Tokens to generate at most.
    pub tokens_max: Option<u32>,
    /// Tokens that are guessed at a time.
    pub assistant_tokens_max: Option<u32>,
    /// A draft model guesses no further once its guess is less probable than this.
    pub assistant_confidence_min: Option<f32>,
    /// How many of the last tokens prompt lookup looks for.
    pub ngram_max: Option<u32>,
    /// Tokens that end generation, ascending.
    pub eos: Vec<u32>,
    /// The token that begins a text.
    pub bos: Option<u32>,
    /// Strings that end generation.
    pub stop: Vec<String>,
}

/// Tokens that end a turn or a text in the models that have them. Not all files name them all.
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
    /// From the files of a folder.
    pub(crate) fn from_folder(
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

    /// From a GGUF file's metadata.
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
            // -1 stands for no recommendation, 0 (of top_k) for no limit.
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
            frequency_penalty: None,
            presence_penalty: None,
            tokens_max: None,
            assistant_tokens_max: None,
            assistant_confidence_min: None,
            ngram_max: None,
            eos,
            bos: tokenizer.bos(),
            stop: Vec::new(),
        })
    }
}

/// The end tokens of the vocabulary that are special tokens there.
fn end_tokens(tokenizer: &Tokenizer) -> Vec<u32> {
    let find = |text: &&str| tokenizer.token_id(text).filter(|&token| tokenizer.is_special(token));
    // Where calls and returns have tokens of their own, <|end|> only ends a message within a turn.
    let ends_messages = find(&"<|return|>").is_some() && find(&"<|call|>").is_some();
    END_TOKENS.iter().filter(|text| !(ends_messages && **text == "<|end|>")).filter_map(find).collect()
}

/// A token id, or a list of them, or nothing.
fn tokens(file: &JsonFile, field: &str) -> Result<Vec<u32>, LoadError> {
    let fault = || file.fault(field, "is neither a token id nor a list of token ids");
    let token = |value: &Json| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(fault);
    match file.get(field) {
        None => Ok(Vec::new()),
        Some(Json::Array(values)) => values.iter().map(token).collect(),
        Some(value) => Ok(vec![token(value)?]),
    }
}

/// A string, or a list of them, or nothing.
fn strings(file: &JsonFile, field: &str) -> Result<Vec<String>, LoadError> {
    let fault = || file.fault(field, "is neither a string nor a list of strings");
    let string = |value: &Json| value.as_str().map(str::to_owned).ok_or_else(fault);
    match file.get(field) {
        None => Ok(Vec::new()),
        Some(Json::Array(values)) => values.iter().map(string).collect(),
        Some(value) => Ok(vec![string(value)?]),
    }
}

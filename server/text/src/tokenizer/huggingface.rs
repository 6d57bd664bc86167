//! The tokenizer of a model directory, as `transformers` would use it: `tokenizer.json`, supplemented by
//! `tokenizer_config.json` and `special_tokens_map.json`.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::AddedToken;

use super::{
    bound::TokenBound,
    encoder::{AddedTokens, Encoder, Tokenizer},
    pipeline::{Pipeline, built},
};
use crate::{
    LoadError,
    json_file::{self, JsonFile},
    vocabulary::{Vocabulary, byte_level_bytes, fallback_byte},
};

/// Highest token ID of a vocabulary. IDs may have gaps, but the table of tokens has an entry for every number up to the
/// highest ID.
///
/// If exceeded: the server does not start.
const TOKEN_ID_MAX: u32 = 1 << 24;

const FILE: &str = "tokenizer.json";

/// Loads the tokenizer of `directory`.
pub(crate) fn from_directory(directory: &Path, config: &JsonFile) -> Result<Tokenizer, LoadError> {
    let path = directory.join(FILE);
    let text = json_file::read_text(&path)?
        .ok_or(LoadError::NoFile { directory: directory.to_owned(), file: FILE })?;
    let json = |source| LoadError::Json { path: path.clone(), source };
    let fault = |field: &str, problem: String| LoadError::Field {
        path: path.clone(),
        field: field.to_owned(),
        problem,
    };
    let outline: Outline = serde_json::from_str(&text).map_err(json)?;
    check_templates(&outline.post_processor).map_err(|problem| fault("post_processor", problem))?;
    let mut inner: tokenizers::Tokenizer =
        built(|| text.parse()).map_err(|error| fault("the tokenizer", format!("cannot be used: {error}")))?;
    add_tokens_of_config(&mut inner, config)?;
    let decoder = Decoder::parse(&outline.decoder).map_err(|problem| fault("decoder", problem))?;
    let special_tokens_map = JsonFile::read(directory, "special_tokens_map.json")?;
    let named = |field: &str| -> Result<Option<u32>, LoadError> {
        let text = match config.token(field)? {
            Some(text) => Some(text),
            None => special_tokens_map.token(field)?,
        };
        Ok(text.and_then(|text| inner.token_to_id(text)))
    };
    let (bos, eos, pad) = (named("bos_token")?, named("eos_token")?, named("pad_token")?);
    let also_special = [bos, eos, pad];
    let vocabulary =
        vocabulary(&inner, &decoder, &also_special).map_err(|problem| fault("the vocabulary", problem))?;
    let added = added(config, bos, eos)?;
    let pipeline =
        Pipeline::new(&inner).map_err(|error| fault("the tokenizer", format!("cannot be used: {error}")))?;
    let tokenizer = Tokenizer {
        encoder: Encoder::Pipeline(Box::new(pipeline)),
        bound: TokenBound::of_pipeline(&inner, &vocabulary),
        vocabulary,
        added,
        bos,
        eos,
        pad,
        space_prefix: decoder.strip_start,
    };
    check_added(&tokenizer).map_err(|problem| fault("post_processor", problem))?;
    Ok(tokenizer)
}

/// Checks that the vocabulary has the tokens that are added around every text. A post-processor specifies these tokens
/// by their IDs, so they may be missing from the vocabulary.
fn check_added(tokenizer: &Tokenizer) -> Result<(), String> {
    // If the tokenizer cannot encode the empty text, ignore the error here, because every request will report it.
    let added = tokenizer.encode("", true, false).unwrap_or_default();
    let size = tokenizer.vocabulary_size();
    match added.into_iter().find(|token| *token >= size) {
        Some(unknown) => {
            Err(format!("adds a token with the ID {unknown}, but the vocabulary has {size} tokens"))
        }
        None => Ok(()),
    }
}

/// Checks that a post-processor defines the special tokens that its templates name. Otherwise, the library would panic
/// on the first text.
fn check_templates(post_processor: &Value) -> Result<(), String> {
    let mut members = post_processor["processors"].as_array().into_iter().flatten();
    members.try_for_each(check_templates)?;
    let templates = ["single", "pair"].into_iter().filter_map(|name| post_processor[name].as_array());
    for piece in templates.flatten() {
        let Some(token) = piece["SpecialToken"]["id"].as_str() else { continue };
        if post_processor["special_tokens"].get(token).is_none() {
            return Err(format!("names the special token {token:?}, which its special_tokens do not define"));
        }
    }
    Ok(())
}

/// The parts of a `tokenizer.json` that this module parses itself.
#[derive(Deserialize)]
struct Outline {
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    post_processor: Value,
}

/// Adds tokens that are only in `tokenizer_config.json`.
fn add_tokens_of_config(inner: &mut tokenizers::Tokenizer, config: &JsonFile) -> Result<(), LoadError> {
    const FIELD: &str = "added_tokens_decoder";
    let Some(tokens) = config.get(FIELD).and_then(Value::as_object) else { return Ok(()) };
    let mut tokens: Vec<(u32, AddedToken)> = tokens
        .iter()
        .map(|(id, token)| Some((id.parse().ok()?, AddedToken::deserialize(token).ok()?)))
        .collect::<Option<_>>()
        .ok_or_else(|| config.fault(FIELD, "is not a map of IDs to tokens"))?;
    tokens.retain(|(_, token)| inner.token_to_id(&token.content).is_none());
    tokens.sort_by_key(|(id, _)| *id);
    for (id, token) in tokens {
        let content = token.content.clone();
        inner
            .add_tokens([token])
            .map_err(|error| config.fault(FIELD, &format!("cannot be used: {error}")))?;
        if inner.token_to_id(&content) != Some(id) {
            let problem = format!(
                "assigns {content:?} the ID {id}, which is not the next free ID after the IDs in {FILE}"
            );
            return Err(config.fault(FIELD, &problem));
        }
    }
    Ok(())
}

/// The tokens to add around a text. For some tokenizer classes, the flags of the configuration override the
/// post-processor.
fn added(config: &JsonFile, bos: Option<u32>, eos: Option<u32>) -> Result<AddedTokens, LoadError> {
    let class = config.get("tokenizer_class").and_then(Value::as_str).unwrap_or_default();
    let class = class.strip_suffix("Fast").unwrap_or(class);
    if !matches!(class, "LlamaTokenizer" | "CodeLlamaTokenizer" | "GemmaTokenizer" | "CohereTokenizer") {
        return Ok(AddedTokens::PostProcessor);
    }
    let (add_bos, add_eos) = (config.bool("add_bos_token")?, config.bool("add_eos_token")?);
    if add_bos.is_none() && add_eos.is_none() {
        return Ok(AddedTokens::PostProcessor);
    }
    // These are the defaults of the tokenizer classes above.
    let (add_bos, add_eos) = (add_bos.unwrap_or(true), add_eos.unwrap_or(false));
    Ok(AddedTokens::Tokens { before: bos.filter(|_| add_bos), after: eos.filter(|_| add_eos) })
}

fn vocabulary(
    inner: &tokenizers::Tokenizer,
    decoder: &Decoder,
    also_special: &[Option<u32>],
) -> Result<Vocabulary, String> {
    let all = inner.get_vocab(true);
    let highest = all.values().copied().max().ok_or("is empty")?;
    if highest > TOKEN_ID_MAX {
        return Err(format!("has a token with the ID {highest}, which exceeds the limit of {TOKEN_ID_MAX}"));
    }
    let mut texts: Vec<Option<&str>> = vec![None; highest as usize + 1];
    for (text, &id) in &all {
        texts[id as usize] = Some(text);
    }
    let added = inner.get_added_tokens_decoder();
    let mut vocabulary = Vocabulary::default();
    for (id, text) in (0..).zip(texts) {
        let token = added.get(&id);
        let special = token.is_some_and(|token| token.special) || also_special.contains(&Some(id));
        let text = token.map(|token| token.content.as_str()).or(text).unwrap_or_default();
        vocabulary.push(&decoder.bytes(text), special);
    }
    Ok(vocabulary)
}

/// A decoder that maps each token to its bytes, independently of the tokens around it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Decoder {
    /// The replacements in the text of a token, in order.
    replace: Vec<(String, String)>,
    byte_fallback: bool,
    byte_level: bool,
    /// Whether to remove a space at the start of the whole text.
    strip_start: bool,
}

impl Decoder {
    fn parse(value: &Value) -> Result<Self, String> {
        let mut decoder = Self::default();
        decoder.add(value)?;
        Ok(decoder)
    }

    fn add(&mut self, value: &Value) -> Result<(), String> {
        let unsupported = || format!("is not supported: {value}");
        match value.get("type").and_then(Value::as_str) {
            Some("Sequence") => {
                let steps = value.get("decoders").and_then(Value::as_array).ok_or_else(unsupported)?;
                steps.iter().try_for_each(|step| self.add(step))?;
            }
            Some("ByteLevel") => self.byte_level = true,
            Some("ByteFallback") => self.byte_fallback = true,
            Some("Fuse") => {}
            Some("Replace") => {
                let pattern = value.pointer("/pattern/String").and_then(Value::as_str);
                let content = value.get("content").and_then(Value::as_str);
                let (pattern, content) = pattern.zip(content).ok_or_else(unsupported)?;
                self.replace.push((pattern.to_owned(), content.to_owned()));
            }
            Some("Strip") => {
                let number = |field: &str| value.get(field).and_then(Value::as_u64);
                let content = value.get("content").and_then(Value::as_str);
                match (content, number("start"), number("stop")) {
                    (Some(" "), Some(start @ (0 | 1)), Some(0)) => self.strip_start |= start == 1,
                    _ => return Err(unsupported()),
                }
            }
            Some("Metaspace") => {
                let space = value.get("replacement").and_then(Value::as_str).ok_or_else(unsupported)?;
                self.replace.push((space.to_owned(), " ".to_owned()));
                self.strip_start |= match value.get("prepend_scheme").and_then(Value::as_str) {
                    Some(scheme) => scheme != "never",
                    None => value.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(true),
                };
            }
            _ => return Err(unsupported()),
        }
        Ok(())
    }

    fn bytes(&self, text: &str) -> Vec<u8> {
        let mut text = text.to_owned();
        for (pattern, content) in &self.replace {
            text = text.replace(pattern, content);
        }
        if self.byte_fallback
            && let Some(byte) = fallback_byte(&text)
        {
            return vec![byte];
        }
        if self.byte_level { byte_level_bytes(&text) } else { text.into_bytes() }
    }
}

#[cfg(test)]
mod tests;

//! Computes a lower bound on the number of tokens of a text without tokenizing it. With this bound, the server can
//! reject a prompt that exceeds the context length before spending memory and time on tokenizing it.
//!
//! Each byte of a text has the weight `1 / L`, where `L` is the length of the longest vocabulary entry that contains
//! this byte. The weights of an entry of `n` bytes then add up to at most `n * 1 / n = 1`, so a text has at least as
//! many tokens as the sum of the weights of its bytes. Bytes that a tokenizer may drop, or fuse into one unknown token,
//! have the weight 0. For a tokenizer whose steps are not known to preserve the text, the bound is 0.

use std::collections::HashSet;

use serde_json::Value;
use tokenizers::ModelWrapper;

use super::spm::SPACE;
use crate::vocabulary::{Vocabulary, byte_of_char};

/// Canonical composition shortens a text to no less than a quarter of its size. The worst case is `U+1FBE U+0308
/// U+0301`, whose 7 bytes become the 2 bytes of `U+0390`.
const NFC_SHRINKAGE: f64 = 4.0;

/// All characters with the property `White_Space`. Added tokens with `lstrip` or `rstrip` absorb them.
const WHITE_SPACE: &str = "\t\n\u{b}\u{c}\r \u{85}\u{a0}\u{1680}\u{2000}\u{2001}\u{2002}\u{2003}\u{2004}\u{2005}\
    \u{2006}\u{2007}\u{2008}\u{2009}\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}";

/// Computes a lower bound on the number of tokens of a text.
#[derive(Debug, PartialEq)]
pub(super) struct TokenBound {
    /// The weight of each byte, as a fraction of a token.
    weights: [f64; 256],
    /// Whether the tokenizer applies Unicode normalization form C.
    composes: bool,
}

impl TokenBound {
    /// A bound that is 0 for every text.
    const UNKNOWN: Self = Self { weights: [0.0; 256], composes: false };

    /// Creates the bound of a pipeline whose entries decode to `vocabulary`.
    pub(super) fn of_pipeline(inner: &tokenizers::Tokenizer, vocabulary: &Vocabulary) -> Self {
        let ModelWrapper::BPE(bpe) = inner.get_model() else { return Self::UNKNOWN };
        let step = |step: Result<Value, serde_json::Error>| step.unwrap_or_else(|_| Value::from("unknown"));
        let mut steps = Steps::default();
        let is_known = steps.add(&step(serde_json::to_value(inner.get_normalizer())))
            && steps.add(&step(serde_json::to_value(inner.get_pre_tokenizer())));
        if !is_known || steps.byte_level && steps.marks_spaces {
            return Self::UNKNOWN;
        }
        let has = |text: String| inner.token_to_id(&text).is_some();
        let has_all_bytes = || (0..=255u8).all(|byte| has(format!("<{byte:#04X}>")));
        let keeps_unknown_text = steps.byte_level || bpe.byte_fallback && has_all_bytes();
        if !keeps_unknown_text {
            return Self::UNKNOWN;
        }
        let added = inner.get_added_tokens_decoder();
        let mut entries = Entries::default();
        for (text, id) in inner.get_vocab(true) {
            let decoded = vocabulary.bytes(id);
            if steps.byte_level && !added.contains_key(&id) {
                entries.add(&[decoded]);
            } else {
                entries.add(&[decoded, text.as_bytes(), text.replace(' ', SPACE).as_bytes()]);
            }
        }
        for token in added.values() {
            entries.add(&[token.content.as_bytes(), token.content.replace(' ', SPACE).as_bytes()]);
            if token.lstrip || token.rstrip {
                entries.drop_bytes(WHITE_SPACE.as_bytes());
            }
        }
        if steps.byte_level {
            let characters = (0..0x200).filter_map(char::from_u32);
            let missing = characters.filter(|character| !has(character.to_string())).filter_map(byte_of_char);
            entries.drop_bytes(&missing.collect::<Vec<u8>>());
        }
        entries.bound(steps.composes)
    }

    /// Creates the bound of a SentencePiece model with these entries, which are spelled as in the model's file.
    pub(super) fn of_pieces(pieces: &super::spm::Pieces<'_>, vocabulary: &Vocabulary) -> Self {
        let mut entries = Entries::default();
        for (id, text) in (0..).zip(pieces.tokens) {
            entries.add(&[vocabulary.bytes(id), text.as_bytes(), text.replace(' ', SPACE).as_bytes()]);
        }
        // A character that is not a piece itself becomes byte tokens or the unknown token, so at least one token.
        // Because it has up to four bytes, the weight of a byte must not exceed 1/4.
        entries.each_byte_at_least(char::MAX_LEN_UTF8);
        if pieces.options.remove_extra_whitespaces {
            entries.drop_bytes(b" ");
        }
        if pieces.options.strip_after_special {
            entries.drop_bytes(WHITE_SPACE.as_bytes());
        }
        entries.bound(false)
    }

    /// A lower bound on the number of tokens of `text`.
    pub(super) fn min_tokens(&self, text: &str) -> usize {
        let bytes = text.as_bytes();
        let mut counts = [0_u64; 256];
        let mut composed = 0_u64;
        for (index, &byte) in bytes.iter().enumerate() {
            // Composition does not change an ASCII character at the end of the text or before another ASCII character.
            let is_fixed = byte.is_ascii() && bytes.get(index + 1).is_none_or(u8::is_ascii);
            if is_fixed || !self.composes {
                counts[usize::from(byte)] += 1;
            } else {
                composed += 1;
            }
        }
        let fixed: f64 = counts.iter().zip(&self.weights).map(|(&count, weight)| count as f64 * weight).sum();
        let composed = composed as f64 / NFC_SHRINKAGE * self.least_weight();
        // Subtract a margin, so that rounding errors do not raise the bound above the number of tokens.
        ((fixed + composed) * (1.0 - 1e-9)) as usize
    }

    /// The smallest weight of a byte that can occur in UTF-8.
    fn least_weight(&self) -> f64 {
        let occurs = |byte: &u8| !matches!(byte, 0xc0 | 0xc1 | 0xf5..);
        (0..=255).filter(occurs).map(|byte| self.weights[usize::from(byte)]).fold(1.0, f64::min)
    }
}

/// The steps that are applied to a text before the model splits its words into tokens.
#[derive(Debug, Default)]
struct Steps {
    byte_level: bool,
    composes: bool,
    /// Whether spaces are written as [`SPACE`].
    marks_spaces: bool,
}

impl Steps {
    /// Adds a normalizer or pre-tokenizer as `tokenizer.json` describes it. Returns false if the step may drop or
    /// change text in a way that the bound does not account for.
    fn add(&mut self, step: &Value) -> bool {
        let text = |field: &str| step.get(field).and_then(Value::as_str);
        let inner = |field: &str| step.get(field).and_then(Value::as_array);
        match text("type") {
            None => step.is_null(),
            Some("Sequence") => {
                let steps = inner("normalizers").or(inner("pretokenizers"));
                steps.is_some_and(|steps| steps.iter().all(|step| self.add(step)))
            }
            Some("NFC") => {
                self.composes = true;
                true
            }
            Some("Replace") => {
                self.marks_spaces = true;
                step.pointer("/pattern/String").and_then(Value::as_str) == Some(" ")
                    && text("content") == Some(SPACE)
            }
            Some("Metaspace") => {
                self.marks_spaces = true;
                text("replacement") == Some(SPACE)
            }
            Some("ByteLevel") => {
                self.byte_level = true;
                true
            }
            Some("Split" | "Punctuation") => text("behavior").is_some_and(|behavior| behavior != "Removed"),
            Some("Digits" | "UnicodeScripts" | "Prepend") => true,
            Some(_) => false,
        }
    }
}

/// The properties of vocabulary entries on which the bound depends.
#[derive(Debug)]
struct Entries {
    /// For each byte, the length of the longest entry that contains it, or 0 if no entry does.
    longest: [usize; 256],
    dropped: HashSet<u8>,
}

impl Default for Entries {
    fn default() -> Self {
        Self { longest: [0; 256], dropped: HashSet::new() }
    }
}

impl Entries {
    /// Adds an entry that may represent any of these spellings, or a mixture of them.
    fn add(&mut self, spellings: &[&[u8]]) {
        let length = spellings.iter().map(|spelling| spelling.len()).max().unwrap_or(0);
        for &byte in spellings.iter().copied().flatten() {
            let longest = &mut self.longest[usize::from(byte)];
            *longest = (*longest).max(length);
        }
    }

    fn each_byte_at_least(&mut self, length: usize) {
        for longest in &mut self.longest {
            *longest = (*longest).max(length);
        }
    }

    /// Marks bytes that may be dropped from a text, or become part of a token of any length.
    fn drop_bytes(&mut self, bytes: &[u8]) {
        self.dropped.extend(bytes);
    }

    fn bound(self, composes: bool) -> TokenBound {
        let weight = |byte: u8| match self.longest[usize::from(byte)] {
            0 => 0.0,
            _ if self.dropped.contains(&byte) => 0.0,
            longest => 1.0 / longest as f64,
        };
        let mut weights = [0.0; 256];
        for (byte, slot) in (0..=255).zip(&mut weights) {
            *slot = weight(byte);
        }
        TokenBound { weights, composes }
    }
}

#[cfg(test)]
mod tests;

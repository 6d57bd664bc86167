//! The tokenizer of a model, which combines an encoder and a vocabulary.

use std::panic::{self, AssertUnwindSafe};

use super::{bound::TokenBound, pipeline::Pipeline, spm::Spm};
use crate::{error::EncodeError, vocabulary::Vocabulary};

/// Size of a text to tokenize; the limit that follows from `--max-tokenizer-memory` is usually lower (1.3 MB by
/// default). The limit is lower than ten million bytes because the regular expression engine of the pre-tokenizers
/// fails after ten million steps within one word.
///
/// If exceeded: 400, `invalid_value`.
pub const TEXT_BYTES_MAX: usize = 8 << 20;

/// Largest memory use of [`Tokenizer::encode`], in bytes per byte of the text. If each byte is a word and a token, 373
/// bytes were measured, because each word needs three strings and their alignments.
pub const ENCODE_MEMORY_PER_BYTE: usize = 400;

/// The tokenizer of a model. Threads can share a tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    pub(super) encoder: Encoder,
    pub(super) vocabulary: Vocabulary,
    pub(super) added: AddedTokens,
    pub(super) bound: TokenBound,
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) pad: Option<u32>,
    /// Whether every text is tokenized as if it began with a space.
    pub(super) space_prefix: bool,
}

#[derive(Debug)]
pub(super) enum Encoder {
    Pipeline(Box<Pipeline>),
    Spm(Box<Spm>),
}

/// The special tokens that are added around a text on request.
#[derive(Debug)]
pub(super) enum AddedTokens {
    /// The post-processor of the pipeline adds its tokens.
    PostProcessor,
    /// These tokens are added before and after the text.
    Tokens { before: Option<u32>, after: Option<u32> },
}

impl Tokenizer {
    /// Converts `text` to tokens.
    ///
    /// With `add_special`, the result includes the tokens that the model expects at the beginning and the end of a
    /// text. Use it for plain prompts, but not for rendered chat templates, which write these tokens themselves. With
    /// `parse_special`, text that spells a special token becomes that token; otherwise, it remains text. The running
    /// time is O(*n* log *w*) for a text of *n* bytes whose longest word has *w* bytes.
    ///
    /// # Errors
    /// The text is longer than [`TEXT_BYTES_MAX`], the vocabulary has no token for a part of it (which is rare), or the
    /// `tokenizers` library panics, which it does for some unusual steps in a `tokenizer.json`.
    pub fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, EncodeError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(EncodeError(format!("it has {} bytes (limit: {TEXT_BYTES_MAX} bytes)", text.len())));
        }
        let post_process = add_special && matches!(self.added, AddedTokens::PostProcessor);
        let encode = || match &self.encoder {
            Encoder::Pipeline(pipeline) => pipeline.encode(text, post_process, parse_special),
            Encoder::Spm(spm) => spm.encode(text, parse_special),
        };
        // The `tokenizers` library panics on some unusual steps in a `tokenizer.json`, such as a replacement of the
        // empty string. A panic leaves no inconsistent state: encoding changes only caches, whose entries are always
        // complete.
        let encoded = panic::catch_unwind(AssertUnwindSafe(encode));
        let mut tokens = encoded
            .map_err(|_| EncodeError("the model's tokenizer reported an internal error".to_owned()))??;
        if let AddedTokens::Tokens { before, after } = self.added
            && add_special
        {
            tokens.splice(0..0, before);
            tokens.extend(after);
        }
        Ok(tokens)
    }

    /// A lower bound on the number of tokens of `text`. It is computed without tokenizing, in linear time and without
    /// allocating memory.
    ///
    /// The bound is 0 for tokenizers whose steps are not known to preserve the text.
    pub fn min_tokens(&self, text: &str) -> usize {
        self.bound.min_tokens(text)
    }

    /// Converts `tokens` to text. Bytes that are not UTF-8 become U+FFFD. If the tokenizer adds a leading space to
    /// every text, that space is removed.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> String {
        let kept = tokens.iter().filter(|&&token| !(skip_special && self.is_special(token)));
        let bytes: Vec<u8> = kept.flat_map(|&token| self.token_bytes(token)).copied().collect();
        let own_space = if self.space_prefix { bytes.strip_prefix(b" ") } else { None };
        String::from_utf8_lossy(own_space.unwrap_or(&bytes)).into_owned()
    }

    /// The bytes that a token represents, which need not be whole characters. The result is empty for a token that does
    /// not exist.
    pub fn token_bytes(&self, token: u32) -> &[u8] {
        self.vocabulary.bytes(token)
    }

    /// The text of a token for display: bytes that are not UTF-8 become U+FFFD.
    pub fn token_text(&self, token: u32) -> String {
        String::from_utf8_lossy(self.token_bytes(token)).into_owned()
    }

    /// The token that has this spelling in the vocabulary, special tokens included.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        match &self.encoder {
            Encoder::Pipeline(pipeline) => pipeline.token_id(text),
            Encoder::Spm(spm) => spm.token_id(text),
        }
    }

    /// Whether a token is a special token, such as the end of a turn, which does not represent text.
    pub fn is_special(&self, token: u32) -> bool {
        self.vocabulary.is_special(token)
    }

    /// The highest token ID plus one. The model may return more logits than that for a position.
    pub fn vocabulary_size(&self) -> u32 {
        self.vocabulary.len() as u32
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The token that pads the shorter sequences of a batch, if the model files name one.
    pub fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// Whether [`Tokenizer::decode`] removes a leading space.
    pub fn has_space_prefix(&self) -> bool {
        self.space_prefix
    }
}

//! Text to tokens. Decides nothing about text itself: a tokenizer is either the pipeline that a
//! `tokenizer.json` describes (or a GGUF file's byte-level BPE, rebuilt as one), or SentencePiece's merging by
//! score, for which no such pipeline is exact.

mod bound;
mod gguf;
mod huggingface;
mod pipeline;
mod pre;
mod spm;

use bound::TokenBound;
use pipeline::Pipeline;
use spm::Spm;

use crate::vocabulary::Vocabulary;

pub(crate) use gguf::from_gguf;
pub(crate) use huggingface::from_folder;

/// Size of a text that is tokenized at once; the limit that follows from `--max-tokenizer-memory` is usually lower.
/// The regular expressions of pre-tokenizers count their steps and give up above ten million within one word.
///
/// Beyond it: 400, `invalid_value`.
pub const TEXT_BYTES_MAX: usize = 8 << 20;

/// The most memory that [`Tokenizer::encode`] takes while it runs, in bytes for each byte of the text. Where each byte is a
/// word and a token, a word costs three strings and their alignment: 373 bytes were measured.
pub const ENCODE_MEMORY_PER_BYTE: usize = 400;

/// Text could not be turned into tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("failed to tokenize the text: {0}")]
pub struct EncodeError(pub(crate) String);

/// A model's tokenizer. Shared between threads.
#[derive(Debug)]
pub struct Tokenizer {
    encoder: Encoder,
    vocabulary: Vocabulary,
    added: Added,
    bound: TokenBound,
    bos: Option<u32>,
    eos: Option<u32>,
    pad: Option<u32>,
    /// Whether every text is tokenized as if it began with a space.
    space_prefix: bool,
}

#[derive(Debug)]
enum Encoder {
    Pipeline(Box<Pipeline>),
    Spm(Box<Spm>),
}

/// What is added around a text when special tokens are asked for.
#[derive(Debug)]
enum Added {
    /// What the pipeline's post-processor adds.
    PostProcessor,
    /// These.
    Tokens { before: Option<u32>, after: Option<u32> },
}

impl Tokenizer {
    /// The tokens of `text`.
    ///
    /// With `add_special` the beginning and end tokens that the model wants around every text are added:
    /// wanted for a plain prompt, not for a rendered chat template, which writes them itself. With
    /// `parse_special` special tokens written out in the text become those tokens; without it they are text.
    /// Time is linear in the text (times the logarithm of the longest word).
    ///
    /// # Errors
    /// The text is longer than [`TEXT_BYTES_MAX`], or the vocabulary has no token for some of it (almost no
    /// model's lacks any).
    pub fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, EncodeError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(EncodeError(format!("it is longer than {TEXT_BYTES_MAX} bytes")));
        }
        let post_process = add_special && matches!(self.added, Added::PostProcessor);
        let mut tokens = match &self.encoder {
            Encoder::Pipeline(pipeline) => pipeline.encode(text, post_process, parse_special)?,
            Encoder::Spm(spm) => spm.encode(text, parse_special)?,
        };
        if let Added::Tokens { before, after } = self.added
            && add_special
        {
            tokens.splice(0..0, before);
            tokens.extend(after);
        }
        Ok(tokens)
    }

    /// A lower bound on the number of tokens of `text`, without tokenizing it: linear in the text, without memory.
    ///
    /// It is 0 for tokenizers that may drop text.
    pub fn min_tokens(&self, text: &str) -> usize {
        self.bound.min_tokens(text)
    }

    /// The text of `tokens`. Bytes that are no UTF-8 become U+FFFD. A leading space that the tokenizer puts
    /// before every text is taken away.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> String {
        let kept = tokens.iter().filter(|&&token| !(skip_special && self.is_special(token)));
        let bytes: Vec<u8> = kept.flat_map(|&token| self.token_bytes(token)).copied().collect();
        let own_space = if self.space_prefix { bytes.strip_prefix(b" ") } else { None };
        String::from_utf8_lossy(own_space.unwrap_or(&bytes)).into_owned()
    }

    /// The bytes that a token stands for: often not whole characters. None for a token that does not exist.
    pub fn token_bytes(&self, token: u32) -> &[u8] {
        self.vocabulary.bytes(token)
    }

    /// A token as text, for people: bytes that are no UTF-8 become U+FFFD.
    pub fn token_text(&self, token: u32) -> String {
        String::from_utf8_lossy(self.token_bytes(token)).into_owned()
    }

    /// The token that is written like this in the vocabulary, special ones included.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        match &self.encoder {
            Encoder::Pipeline(pipeline) => pipeline.token_id(text),
            Encoder::Spm(spm) => spm.token_id(text),
        }
    }

    /// Whether a token stands for no text, such as the end of a turn.
    pub fn is_special(&self, token: u32) -> bool {
        self.vocabulary.is_special(token)
    }

    /// One more than the highest token. The model's logits may be wider.
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

    /// The token that fills up shorter lists of a batch, if the model's files name one.
    pub fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// Whether [`Tokenizer::decode`] takes a leading space away.
    pub fn has_space_prefix(&self) -> bool {
        self.space_prefix
    }
}

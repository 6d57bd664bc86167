//! Tokenizes the texts of requests within the memory limit for tokenizers. A prompt that certainly leaves no room for
//! generated tokens is rejected without being tokenized, unless it may be truncated.

use server_engine::TokenId;
use server_text::EncodeError;

use super::images::image_tokens_note;
use crate::error::Error;
use crate::limits::AboveBudget;
use crate::model::Model;

/// Whether to add the special tokens that the model expects around a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpecialTokens {
    /// Add the special tokens: the text is a plain prompt.
    Added,
    /// Do not add the special tokens, for example because a chat template has written them.
    Absent,
}

impl SpecialTokens {
    pub(super) fn added_if(is_added: bool) -> Self {
        if is_added { Self::Added } else { Self::Absent }
    }
}

/// Tokenizes the texts of one parameter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Encoder<'a> {
    pub(super) model: &'a Model,
    /// The name of the parameter, for errors.
    pub(super) param: &'a str,
    /// The context length; `None` if the prompt is truncated or only counted.
    pub(super) tokens_max: Option<u32>,
    /// The number of the text's tokens that belong to images.
    pub(super) image_tokens: usize,
}

impl Encoder<'_> {
    /// Tokenizes a prompt, which may contain special tokens as text.
    ///
    /// # Errors
    /// The prompt is empty or too long, or it cannot be expressed in the vocabulary.
    pub(super) fn prompt(&self, text: &str, special_tokens: SpecialTokens) -> Result<Vec<TokenId>, Error> {
        // An empty text is not a prompt, even if special tokens are added.
        if text.is_empty() {
            return Err(Error::invalid(self.param, "is empty"));
        }
        self.text(text, special_tokens)
    }

    /// Tokenizes a text like [`Self::prompt`], but the text may be empty.
    ///
    /// # Errors
    /// The text is too long, or it cannot be expressed in the vocabulary.
    pub(super) fn text(&self, text: &str, special_tokens: SpecialTokens) -> Result<Vec<TokenId>, Error> {
        let tokenizer = &self.model.text.tokenizer;
        let tokens_min = tokenizer.min_tokens(text);
        if let Some(length) = self.tokens_max.filter(|length| tokens_min >= *length as usize) {
            let param = self.param.to_owned();
            let for_images = image_tokens_note(self.image_tokens);
            let message = format!(
                "{param}: the prompt has at least {tokens_min} tokens{for_images}, which leaves no room for generated \
                 tokens in the context length of {length} tokens"
            );
            return Err(Error::ContextLength { param, message });
        }
        self.within_memory(text, || tokenizer.encode(text, special_tokens == SpecialTokens::Added, true))
    }

    /// Tokenizes a text as plain text: adds no special tokens, and treats the names of special tokens as ordinary text.
    ///
    /// # Errors
    /// The text is too long, or it cannot be expressed in the vocabulary.
    pub(super) fn literal(&self, text: &str) -> Result<Vec<TokenId>, Error> {
        self.within_memory(text, || self.model.text.tokenizer.encode(text, false, false))
    }

    fn within_memory(
        &self,
        text: &str,
        encode: impl FnOnce() -> Result<Vec<TokenId>, EncodeError>,
    ) -> Result<Vec<TokenId>, Error> {
        let reservation = self.model.tokenizer_memory.reserve(text.len()).map_err(|AboveBudget { max }| {
            let problem = format!(
                "the text to tokenize has {} bytes (limit: {max} bytes, derived from --max-tokenizer-memory)",
                text.len()
            );
            Error::coded("string_above_max_length", self.param, problem)
        })?;
        let tokens = encode().map_err(|error| Error::invalid(self.param, error));
        drop(reservation);
        tokens
    }
}

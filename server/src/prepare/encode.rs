//! Texts of requests to tokens, within the memory that tokenizers may take. A prompt that certainly has more tokens than
//! the model takes is refused without being tokenized.

use server_engine::TokenId;
use server_text::EncodeError;

use crate::error::Error;
use crate::limits::TextTooLong;
use crate::model::Model;

/// Whether the tokens are added that the model wants around every text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Surround {
    /// They are: the text is a plain prompt.
    Added,
    /// They are not: a chat template writes them itself.
    Absent,
}

impl Surround {
    pub(super) fn added_if(is_added: bool) -> Self {
        if is_added { Self::Added } else { Self::Absent }
    }
}

/// Tokenizes the texts of one parameter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Encoder<'a> {
    pub(super) model: &'a Model,
    /// The parameter, for errors.
    pub(super) param: &'a str,
    /// The tokens that the model takes; `None` if the prompt is truncated to them or only counted.
    pub(super) tokens_max: Option<u32>,
}

impl Encoder<'_> {
    /// The tokens of a prompt, in which special tokens may be written out.
    ///
    /// # Errors
    /// It is empty, too long, or the vocabulary cannot express it.
    pub(super) fn prompt(&self, text: &str, surround: Surround) -> Result<Vec<TokenId>, Error> {
        // Even where a beginning token is added, nothing is no prompt.
        if text.is_empty() {
            return Err(Error::invalid(self.param, "is empty"));
        }
        self.text(text, surround)
    }

    /// As [`Self::prompt`], of a text that may be empty.
    ///
    /// # Errors
    /// It is too long, or the vocabulary cannot express it.
    pub(super) fn text(&self, text: &str, surround: Surround) -> Result<Vec<TokenId>, Error> {
        let tokenizer = &self.model.text.tokenizer;
        let tokens_min = tokenizer.min_tokens(text);
        if let Some(most) = self.tokens_max.filter(|most| tokens_min >= *most as usize) {
            let param = self.param.to_owned();
            let message = format!(
                "{param}: the prompt of at least {tokens_min} tokens leaves no room in this model's {most} tokens"
            );
            return Err(Error::ContextLength { param, message });
        }
        self.within_memory(text, || tokenizer.encode(text, surround == Surround::Added, true))
    }

    /// The tokens of a text that is no prompt, in which special tokens are text.
    ///
    /// # Errors
    /// It is too long, or the vocabulary cannot express it.
    pub(super) fn literal(&self, text: &str) -> Result<Vec<TokenId>, Error> {
        self.within_memory(text, || self.model.text.tokenizer.encode(text, false, false))
    }

    fn within_memory(
        &self,
        text: &str,
        encode: impl FnOnce() -> Result<Vec<TokenId>, EncodeError>,
    ) -> Result<Vec<TokenId>, Error> {
        let claim = self.model.tokenizer_memory.claim(text.len()).map_err(|TextTooLong { bytes_max }| {
            let problem = format!(
                "has {} bytes; this server tokenizes texts of at most {bytes_max} bytes (--max-tokenizer-memory)",
                text.len()
            );
            Error::coded("string_above_max_length", self.param, problem)
        })?;
        let tokens = encode().map_err(|error| Error::invalid(self.param, error));
        drop(claim);
        tokens
    }
}

//! Converts tokens to text, one at a time, and decides when bytes form complete characters.

use std::{mem, sync::Arc};

use crate::Tokenizer;

/// Options for converting tokens to text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DetokenizeOptions {
    /// Whether to omit special tokens, such as the end of a turn.
    pub skip_special: bool,
    /// Whether the tokens continue existing text. Some tokenizers put a space at the start of every text; in a
    /// continuation, a leading space is part of the text and is not removed.
    pub continues_text: bool,
}

/// Converts tokens to text incrementally. It returns only complete characters; bytes that cannot become a character are
/// replaced with U+FFFD as soon as that is certain.
///
/// # Guarantees
/// For a sequence that neither continues a text nor has visible special tokens, the concatenated results of all calls
/// equal the result of [`Tokenizer::decode`] for all tokens at once. The time is linear in the length of the text. At
/// most three bytes are held back.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    options: DetokenizeOptions,
    /// The special tokens that are always converted to text, in ascending order.
    visible_special: Arc<[u32]>,
    /// The bytes of an incomplete character.
    held: Vec<u8>,
    /// Whether the next byte, if it is a space, is the leading space that the tokenizer adds.
    at_start: bool,
}

impl Detokenizer {
    /// Creates a detokenizer for one sequence.
    pub fn new(tokenizer: Arc<Tokenizer>, options: DetokenizeOptions) -> Self {
        let at_start = tokenizer.has_space_prefix() && !options.continues_text;
        Self { tokenizer, options, visible_special: Arc::default(), held: Vec::new(), at_start }
    }

    /// Converts these special tokens to text even if others are omitted. `tokens` must be in ascending order.
    #[must_use]
    pub fn with_visible_special(self, tokens: Arc<[u32]>) -> Self {
        debug_assert!(tokens.is_sorted(), "binary search requires ascending order");
        Self { visible_special: tokens, ..self }
    }

    /// Adds the next token and returns the text that is now certain, which is often empty.
    pub fn push(&mut self, token: u32) -> String {
        let skips = self.options.skip_special && self.tokenizer.is_special(token);
        if skips && self.visible_special.binary_search(&token).is_err() {
            return String::new();
        }
        let mut bytes = self.tokenizer.token_bytes(token);
        if self.at_start && !bytes.is_empty() {
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            self.at_start = false;
        }
        self.held.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.held.len());
        let whole = append_certain(&self.held, &mut text);
        self.held.drain(..whole);
        text
    }

    /// Ends the sequence. Returns U+FFFD if the sequence ends within a character, otherwise an empty string.
    pub fn finish(mut self) -> String {
        String::from_utf8_lossy(&mem::take(&mut self.held)).into_owned()
    }
}

/// Appends `bytes` to `text`, except for an incomplete character at the end, and replaces invalid bytes with U+FFFD.
/// Returns the number of bytes consumed.
fn append_certain(bytes: &[u8], text: &mut String) -> usize {
    let mut done = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        done += chunk.valid().len();
        let invalid = chunk.invalid();
        let at_end = done + invalid.len() == bytes.len();
        // Only bytes at the end of the text can still become a character.
        if at_end && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none()) {
            return done;
        }
        if !invalid.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            done += invalid.len();
        }
    }
    done
}

//! Tokens to text, one at a time. Decides when bytes are certain to be text.

use std::{mem, sync::Arc};

use crate::Tokenizer;

/// How tokens become text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DetokenizeOptions {
    /// Leave out special tokens, such as the end of a turn.
    pub skip_special: bool,
    /// The tokens go on from text that precedes them: a space that some tokenizers put at the start of every
    /// text is a real one then, and kept.
    pub continues_text: bool,
}

/// Turns tokens into text as they come. No character is given out before it is whole; bytes that cannot
/// become a character are replaced by U+FFFD as soon as that is certain.
///
/// # Guarantees
/// What all calls return, joined, is what [`Tokenizer::decode`] returns for all tokens at once. Time is
/// linear in the text; at most three bytes are held back.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    options: DetokenizeOptions,
    /// Special tokens that are text in any case, ascending.
    kept: Arc<[u32]>,
    /// The beginning of a character.
    held: Vec<u8>,
    /// Whether a leading space would still be the tokenizer's own.
    at_start: bool,
}

impl Detokenizer {
    /// A detokeniser for one sequence.
    pub fn new(tokenizer: Arc<Tokenizer>, options: DetokenizeOptions) -> Self {
        let at_start = tokenizer.has_space_prefix() && !options.continues_text;
        Self { tokenizer, options, kept: Arc::default(), held: Vec::new(), at_start }
    }

    /// The same, with special tokens that are text even where others are left out: `kept`, ascending.
    #[must_use]
    pub fn keeping(self, kept: Arc<[u32]>) -> Self {
        debug_assert!(kept.is_sorted(), "they are looked for by halving");
        Self { kept, ..self }
    }

    /// Takes the next token and returns the text that is certain now, often none.
    pub fn push(&mut self, token: u32) -> String {
        let skips = self.options.skip_special && self.tokenizer.is_special(token);
        if skips && self.kept.binary_search(&token).is_err() {
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

    /// The sequence ends. Returns U+FFFD if it does so within a character, else nothing.
    pub fn finish(mut self) -> String {
        String::from_utf8_lossy(&mem::take(&mut self.held)).into_owned()
    }
}

/// Appends `bytes` to `text` up to the beginning of a character that is not whole yet, and returns how many
/// bytes that was.
fn append_certain(bytes: &[u8], text: &mut String) -> usize {
    let mut done = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        done += chunk.valid().len();
        let invalid = chunk.invalid();
        let at_end = done + invalid.len() == bytes.len();
        // At the end only: what could still become a character.
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

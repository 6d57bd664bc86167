//! The tokens of a model as bytes, and the trie of these tokens, with which masks are computed.

use std::collections::HashMap;
use std::sync::Arc;

use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::VocabularyError;

/// Size of a token that can be part of a structured output. The trie does not support longer tokens.
///
/// If exceeded: the model cannot choose the token in a structured output.
const TOKEN_BYTES_MAX: usize = 1000;
/// Number of tokens of a vocabulary for which structured outputs are supported. The trie stores the number of nodes of
/// a subtree in 22 bits, and each token needs at least one node.
///
/// If exceeded: 500, `internal`, for requests for structured outputs.
const TOKENS_MAX: usize = (1 << 22) - 1;

/// The tokens of a model as bytes.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    tokens: Vec<Box<[u8]>>,
    special: Vec<bool>,
    /// The special tokens by their texts.
    by_text: HashMap<String, u32>,
    /// For each byte, whether the text of a special token begins with it.
    first_bytes: Vec<bool>,
    /// The length of the longest text of a special token, in bytes.
    longest: usize,
}

impl Vocabulary {
    /// Creates a vocabulary from the tokens in the order of their IDs: their bytes, and whether they are special, that
    /// is, not text. Tokens without bytes are never part of a structured output.
    ///
    /// # Errors
    /// The vocabulary is empty or has too many tokens.
    pub fn new(tokens: impl IntoIterator<Item = (impl AsRef<[u8]>, bool)>) -> Result<Self, VocabularyError> {
        let mut vocabulary = Self {
            tokens: Vec::new(),
            special: Vec::new(),
            by_text: HashMap::new(),
            first_bytes: vec![false; 256],
            longest: 0,
        };
        for (bytes, special) in tokens {
            let bytes = bytes.as_ref();
            let token = vocabulary.tokens.len() as u32;
            if special
                && let Ok(text) = std::str::from_utf8(bytes)
                && !text.is_empty()
            {
                vocabulary.by_text.entry(text.to_owned()).or_insert(token);
                vocabulary.first_bytes[usize::from(bytes[0])] = true;
                vocabulary.longest = vocabulary.longest.max(bytes.len());
            }
            vocabulary.tokens.push(bytes.into());
            vocabulary.special.push(special);
        }
        match vocabulary.tokens.len() {
            0 => Err(VocabularyError("it has no tokens".to_owned())),
            count if count > TOKENS_MAX => Err(VocabularyError(format!(
                "it has {count} tokens, which exceeds the limit of {TOKENS_MAX}"
            ))),
            _ => Ok(vocabulary),
        }
    }

    /// The number of tokens of the vocabulary.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether the vocabulary is empty, which is never the case.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the bytes of a token, or an empty slice for tokens that do not exist.
    pub fn bytes(&self, token: u32) -> &[u8] {
        self.tokens.get(token as usize).map_or(&[], |bytes| bytes)
    }

    /// Whether a token is special.
    pub fn is_special(&self, token: u32) -> bool {
        self.special.get(token as usize).copied().unwrap_or(false)
    }

    /// The special token with this text.
    pub fn special(&self, text: &str) -> Option<u32> {
        self.by_text.get(text).copied()
    }

    /// The token with this text, special or not.
    pub fn token(&self, text: &str) -> Option<u32> {
        let found = || self.tokens.iter().position(|bytes| **bytes == *text.as_bytes());
        self.special(text).or_else(|| found().map(|token| token as u32))
    }

    /// The longest special token at the start of `text`, and its length in bytes.
    pub(crate) fn leading_special(&self, text: &str) -> Option<(u32, usize)> {
        let first = text.bytes().next()?;
        if !self.first_bytes[usize::from(first)] {
            return None;
        }
        let ends = text.char_indices().map(|(start, letter)| start + letter.len_utf8());
        let ends = ends.take_while(|&end| end <= self.longest);
        ends.filter_map(|end| Some((self.special(&text[..end])?, end))).last()
    }

    /// Builds the trie for llguidance, with an additional token for the end, which the engine replaces with its stop
    /// tokens.
    pub(crate) fn trie(&self) -> (TokEnv, u32) {
        let end = self.tokens.len() as u32;
        let word = |bytes: &[u8], special: bool| match special {
            _ if bytes.is_empty() || bytes.len() > TOKEN_BYTES_MAX => Vec::new(),
            true => special_word(bytes),
            // The trie marks special tokens with this byte, which never occurs in UTF-8 text.
            false if bytes[0] == TokTrie::SPECIAL_TOKEN_MARKER => Vec::new(),
            false => bytes.to_vec(),
        };
        let mut words: Vec<Vec<u8>> =
            self.tokens.iter().zip(&self.special).map(|(bytes, &special)| word(bytes, special)).collect();
        words.push(special_word(b"<end>"));
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, end), &words);
        (Arc::new(ApproximateTokEnv::new(trie)), end)
    }
}

fn special_word(bytes: &[u8]) -> Vec<u8> {
    [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_tokens_are_found_by_their_texts() {
        let tokens = [("a", false), ("<x>", true), ("<x>y", true), ("", true), ("<x", false)];
        let vocabulary = Vocabulary::new(tokens).unwrap();
        assert_eq!(vocabulary.special("<x>"), Some(1));
        assert_eq!(vocabulary.special("a"), None);
        assert_eq!(vocabulary.token("a"), Some(0));
        assert_eq!(vocabulary.leading_special("<x>yz"), Some((2, 4)));
        assert_eq!(vocabulary.leading_special("<x>z"), Some((1, 3)));
        assert_eq!(vocabulary.leading_special("z<x>"), None);
        assert_eq!((vocabulary.bytes(4), vocabulary.bytes(5)), (&b"<x"[..], &b""[..]));
    }

    #[test]
    fn a_vocabulary_without_tokens_is_rejected() {
        assert!(Vocabulary::new(Vec::<(&str, bool)>::new()).is_err());
    }
}

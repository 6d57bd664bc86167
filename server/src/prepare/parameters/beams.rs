//! The parameters of beam search.

use std::sync::Arc;

use server_engine::{BeamSearch, EarlyStopping, TextStop, TokenId};
use server_openai::Generation;
use server_text::Tokenizer;

use crate::error::Error;
use crate::prepare::prepared::TextOptions;

/// Returns the parameters of a beam search for `choices` choices with `width` beams, if the request enables beam
/// search.
pub(super) fn beams(
    generation: &Generation,
    choices: u32,
    width: u32,
    text: &TextOptions,
    tokenizer: &Arc<Tokenizer>,
) -> Result<Option<BeamSearch>, Error> {
    if generation.use_beam_search != Some(true) {
        return Ok(None);
    }
    if generation.stream == Some(true) {
        let problem = "cannot be combined with stream: the best beams are known only at the end";
        return Err(Error::invalid("use_beam_search", problem));
    }
    let groups = generation.num_beam_groups.unwrap_or(1);
    if groups == 0 || !width.is_multiple_of(groups) {
        let problem = format!("{width} beams cannot be divided evenly into {groups} groups");
        return Err(Error::invalid("num_beam_groups", problem));
    }
    let end = match &generation.early_stopping {
        Some(word) if word.as_bool() == Some(true) => EarlyStopping::Immediate,
        Some(word) if word.is_string() => EarlyStopping::Never,
        _ => EarlyStopping::Heuristic,
    };
    Ok(Some(BeamSearch {
        num_results: choices,
        num_groups: groups,
        length_penalty: generation.length_penalty.unwrap_or(1.0),
        diversity_penalty: generation.diversity_penalty.unwrap_or(0.0),
        early_stopping: end,
        stop_strings: StopStrings::of(text, tokenizer).map(|stops| Arc::new(stops) as Arc<dyn TextStop>),
    }))
}

/// Searches for stop strings in the text of a beam.
#[derive(Debug)]
struct StopStrings {
    tokenizer: Arc<Tokenizer>,
    stops: Vec<String>,
    /// Number of bytes of the longest stop string.
    bytes_max: usize,
    skip_special: bool,
}

impl StopStrings {
    fn of(text: &TextOptions, tokenizer: &Arc<Tokenizer>) -> Option<Self> {
        let bytes_max = text.stops.iter().map(String::len).max()?;
        let tokenizer = Arc::clone(tokenizer);
        let stops = text.stops.clone();
        Some(Self { tokenizer, stops, bytes_max, skip_special: text.skip_special })
    }

    /// Returns the bytes that a token adds to the text.
    fn bytes(&self, token: TokenId) -> &[u8] {
        let is_skipped = self.skip_special && self.tokenizer.is_special(token);
        if is_skipped { &[] } else { self.tokenizer.token_bytes(token) }
    }
}

impl TextStop for StopStrings {
    fn ends(&self, token: TokenId, before: &mut dyn Iterator<Item = TokenId>) -> bool {
        let new = self.bytes(token);
        if new.is_empty() {
            return false;
        }
        // A stop string may extend over any number of tokens, because skipped tokens add no bytes.
        let mut old: Vec<u8> = Vec::new();
        for token in before {
            if old.len() + 1 >= self.bytes_max {
                break;
            }
            old.extend(self.bytes(token).iter().rev());
        }
        old.reverse();
        let text = [&old[..], new].concat();
        // Ignore stop strings that end before the last token: they had no effect, because the text had fewer than
        // `min_tokens` tokens.
        let is_new = |stop: &String| {
            let from = (old.len() + 1).saturating_sub(stop.len());
            text[from..].windows(stop.len()).any(|part| part == stop.as_bytes())
        };
        self.stops.iter().any(is_new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The special token `<|endoftext|>` of the built-in tokenizer. The ID of a token that is not special is its byte.
    const SPECIAL: TokenId = 256;
    const A: TokenId = b'a' as TokenId;
    const B: TokenId = b'b' as TokenId;

    /// Returns a search for one stop string. The search skips special tokens.
    fn stop_string(stop: &str) -> StopStrings {
        let tokenizer = crate::backend::built_in_text().unwrap().tokenizer;
        StopStrings { tokenizer, stops: vec![stop.to_owned()], bytes_max: stop.len(), skip_special: true }
    }

    /// Whether a stop string ends a beam with these tokens at the last token.
    fn ends(stop: &StopStrings, tokens: &[TokenId]) -> bool {
        let (&last, before) = tokens.split_last().unwrap();
        stop.ends(last, &mut before.iter().rev().copied())
    }

    #[test]
    fn a_stop_string_is_found_across_skipped_special_tokens() {
        let stop = stop_string("ab");
        assert!(ends(&stop, &[B, A, B]));
        assert!(ends(&stop, &[A, SPECIAL, SPECIAL, SPECIAL, B]));
        let with_special = |stop| StopStrings { skip_special: false, ..stop_string(stop) };
        assert!(!ends(&with_special("ab"), &[A, SPECIAL, B]));
        assert!(ends(&with_special("endoftext|>b"), &[A, SPECIAL, B]));
        assert!(ends(&with_special("a<|endoftext|><|endoftext|>b"), &[A, SPECIAL, SPECIAL, B]));
    }

    #[test]
    fn a_stop_string_that_ends_before_the_last_token_is_ignored() {
        let stop = stop_string("ab");
        for tokens in [&[A, B, A][..], &[A, B, SPECIAL], &[B], &[SPECIAL, B]] {
            assert!(!ends(&stop, tokens), "{tokens:?}");
        }
        let short = stop_string("a");
        assert!(ends(&short, &[B, B, A]));
        assert!(!ends(&short, &[A, B, B]));
    }
}

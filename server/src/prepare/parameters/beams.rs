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

/// Searches for stop strings in the text of a beam's last tokens.
#[derive(Debug)]
struct StopStrings {
    tokenizer: Arc<Tokenizer>,
    stops: Vec<String>,
    /// Number of last tokens that suffice to contain the longest stop string.
    tokens: usize,
    skip_special: bool,
}

impl StopStrings {
    fn of(text: &TextOptions, tokenizer: &Arc<Tokenizer>) -> Option<Self> {
        let longest = text.stops.iter().map(String::len).max()?;
        let tokenizer = Arc::clone(tokenizer);
        let stops = text.stops.clone();
        Some(Self { tokenizer, stops, tokens: longest + 1, skip_special: text.skip_special })
    }
}

impl TextStop for StopStrings {
    fn num_tokens(&self) -> usize {
        self.tokens
    }

    fn ends(&self, tokens: &[TokenId]) -> bool {
        let is_shown = |token| !(self.skip_special && self.tokenizer.is_special(token));
        let bytes = |tokens: &[TokenId]| -> Vec<u8> {
            let shown = tokens.iter().filter(|&&token| is_shown(token));
            shown.flat_map(|&token| self.tokenizer.token_bytes(token)).copied().collect()
        };
        let Some((&last, before)) = tokens.split_last() else { return false };
        let mut text = bytes(before);
        let old = text.len();
        text.extend(bytes(&[last]));
        // Ignore stop strings that end before the last token: they had no effect, because the text had fewer than
        // `min_tokens` tokens.
        let is_new = |stop: &String| {
            let from = (old + 1).saturating_sub(stop.len());
            text[from..].windows(stop.len()).any(|part| part == stop.as_bytes())
        };
        self.stops.iter().any(is_new)
    }
}

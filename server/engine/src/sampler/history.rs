//! The tokens of a sequence that penalties and bad words need: its distinct tokens, how often each of them was
//! generated, and the last generated tokens.

use std::sync::Arc;

use server_scheduler::TokenId;

use crate::request::Sampling;

/// The tokens of one sequence that its sampling parameters need.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The distinct tokens of the prompt in ascending order. Empty if no penalty needs them.
    prompt: Arc<[TokenId]>,
    /// The generated tokens in ascending order, with their counts. Empty if no penalty needs them.
    counts: Vec<(TokenId, u32)>,
    /// The last generated tokens: as many as the bad words need.
    recent: Vec<TokenId>,
    recent_max: usize,
    generated: u32,
    counted: bool,
}

impl History {
    /// Creates the history of a sequence without generated tokens. Clones share the prompt.
    pub fn new(prompt: &[TokenId], sampling: &Sampling) -> Self {
        let mut seen = Vec::new();
        if sampling.repetition_penalty != 1.0 {
            seen.extend_from_slice(prompt);
            seen.sort_unstable();
            seen.dedup();
        }
        let longest = sampling.bad_words.iter().map(Vec::len).max().unwrap_or(0);
        Self {
            prompt: seen.into(),
            counts: Vec::new(),
            recent: Vec::new(),
            recent_max: longest.saturating_sub(1),
            generated: 0,
            counted: sampling.has_penalties(),
        }
    }

    /// Appends a generated token.
    pub fn push(&mut self, token: TokenId) {
        self.generated += 1;
        if self.recent_max > 0 {
            if self.recent.len() == self.recent_max {
                self.recent.remove(0);
            }
            self.recent.push(token);
        }
        if self.counted {
            match self.counts.binary_search_by_key(&token, |&(token, _)| token) {
                Ok(index) => self.counts[index].1 += 1,
                Err(index) => self.counts.insert(index, (token, 1)),
            }
        }
    }

    /// Number of tokens generated so far.
    pub fn generated(&self) -> u32 {
        self.generated
    }

    /// The last generated tokens: as many as [`Sampling::bad_words`] needs.
    pub(super) fn recent(&self) -> &[TokenId] {
        &self.recent
    }

    /// The distinct tokens of the prompt and the output.
    pub(super) fn seen(&self) -> impl Iterator<Item = TokenId> {
        let output = self.counts.iter().map(|&(token, _)| token);
        let fresh = output.filter(|token| self.prompt.binary_search(token).is_err());
        self.prompt.iter().copied().chain(fresh)
    }

    /// The distinct tokens of the output, with their counts.
    pub(super) fn counts(&self) -> &[(TokenId, u32)] {
        &self.counts
    }
}

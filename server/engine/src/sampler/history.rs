//! What the penalties need to know of a sequence: which tokens it has, and how often it generated them.

use std::sync::Arc;

use server_scheduler::TokenId;

use crate::request::Sampling;

/// The tokens of one sequence, as far as its sampling asks for them.
#[derive(Clone, Debug)]
pub struct History {
    /// Distinct tokens of the prompt in ascending order; empty if no penalty looks at them.
    prompt: Arc<[TokenId]>,
    /// Generated tokens in ascending order, and how often each; empty if no penalty looks at them.
    counts: Vec<(TokenId, u32)>,
    /// The last generated tokens, as many as a bad run may begin with.
    recent: Vec<TokenId>,
    recent_max: usize,
    generated: u32,
    counted: bool,
}

impl History {
    /// The history of a sequence that has generated nothing. Clones share the prompt.
    pub fn new(prompt: &[TokenId], sampling: &Sampling) -> Self {
        let mut seen = Vec::new();
        if sampling.repetition_penalty != 1.0 {
            seen.extend_from_slice(prompt);
            seen.sort_unstable();
            seen.dedup();
        }
        let longest = sampling.bad.iter().map(Vec::len).max().unwrap_or(0);
        Self {
            prompt: seen.into(),
            counts: Vec::new(),
            recent: Vec::new(),
            recent_max: longest.saturating_sub(1),
            generated: 0,
            counted: sampling.penalises(),
        }
    }

    /// Adds a generated token.
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
                Ok(found) => self.counts[found].1 += 1,
                Err(place) => self.counts.insert(place, (token, 1)),
            }
        }
    }

    /// Tokens generated so far.
    pub fn generated(&self) -> u32 {
        self.generated
    }

    /// The last generated tokens, as many as matter to [`Sampling::bad`].
    pub(super) fn recent(&self) -> &[TokenId] {
        &self.recent
    }

    /// The distinct tokens of prompt and output.
    pub(super) fn seen(&self) -> impl Iterator<Item = TokenId> {
        let output = self.counts.iter().map(|&(token, _)| token);
        let fresh = output.filter(|token| self.prompt.binary_search(token).is_err());
        self.prompt.iter().copied().chain(fresh)
    }

    /// The distinct tokens of the output, and how often each was generated.
    pub(super) fn counts(&self) -> &[(TokenId, u32)] {
        &self.counts
    }
}

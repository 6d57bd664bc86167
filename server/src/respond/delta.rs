//! The changes to the choices of an answer.

use std::mem::discriminant;

use server_engine::{TokenId, TokenLogprob};
use server_openai::ChoiceFinishReason;

use crate::encoding::EncodingCost;

/// A change to a choice.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ChoiceDelta {
    /// Text, and its tokens if the engine returns their log probabilities. Either may be empty, but not both.
    Text { choice: u32, text: String, tokens: Vec<TokenText> },
    /// Reasoning, and its tokens. Either may be empty, but not both.
    Reasoning { choice: u32, text: String, tokens: Vec<TokenText> },
    /// The beginning of a tool call. `call` is the index of the call within the choice. The arguments follow.
    CallBegin { choice: u32, call: u32, id: String, name: String },
    /// The next part of the arguments of the last call, and the tokens since the previous delta with tokens. Either may
    /// be empty, but not both.
    CallArguments { choice: u32, call: u32, text: String, tokens: Vec<TokenText> },
    /// The arguments of the call are a complete JSON object. A call that is cut off has no such delta.
    CallEnd { choice: u32, call: u32 },
    /// The end of the choice and, if tokens are requested, the generated tokens that no other delta has: a stop token,
    /// or the tokens of a stop string.
    End { choice: u32, reason: ChoiceFinishReason, tokens: Vec<TokenId> },
}

impl ChoiceDelta {
    /// Returns the index of the choice.
    pub(crate) fn choice(&self) -> u32 {
        match self {
            Self::Text { choice, .. }
            | Self::Reasoning { choice, .. }
            | Self::CallBegin { choice, .. }
            | Self::CallArguments { choice, .. }
            | Self::CallEnd { choice, .. }
            | Self::End { choice, .. } => *choice,
        }
    }

    /// Returns the number of tokens with log probabilities.
    pub(crate) fn num_tokens(&self) -> usize {
        match self {
            Self::Text { tokens, .. }
            | Self::Reasoning { tokens, .. }
            | Self::CallArguments { tokens, .. } => tokens.len(),
            Self::CallBegin { .. } | Self::CallEnd { .. } | Self::End { .. } => 0,
        }
    }

    /// Returns the size in bytes of the text.
    pub(crate) fn text_bytes(&self) -> usize {
        match self {
            Self::Text { text, .. } | Self::Reasoning { text, .. } | Self::CallArguments { text, .. } => {
                text.len()
            }
            Self::CallBegin { .. } | Self::CallEnd { .. } | Self::End { .. } => 0,
        }
    }

    /// Returns the cost of encoding these deltas.
    pub(crate) fn encoding_cost(deltas: &[Self]) -> EncodingCost {
        let tokens = EncodingCost::of_tokens(deltas.iter().map(Self::num_tokens).sum());
        tokens.max(EncodingCost::of_text(deltas.iter().map(Self::text_bytes).sum()))
    }

    /// Returns the delta with the index of its choice replaced.
    pub(super) fn with_choice(mut self, number: u32) -> Self {
        match &mut self {
            Self::Text { choice, .. }
            | Self::Reasoning { choice, .. }
            | Self::CallBegin { choice, .. }
            | Self::CallArguments { choice, .. }
            | Self::CallEnd { choice, .. }
            | Self::End { choice, .. } => *choice = number,
        }
        self
    }

    /// Appends `next`, or returns it if the two deltas cannot be merged.
    fn merge(&mut self, next: Self) -> Option<Self> {
        // The calls need not be compared, because a `CallBegin` separates the arguments of two calls.
        if discriminant(self) != discriminant(&next) || self.choice() != next.choice() {
            return Some(next);
        }
        match (self, next) {
            (
                Self::Text { text, tokens, .. }
                | Self::Reasoning { text, tokens, .. }
                | Self::CallArguments { text, tokens, .. },
                Self::Text { text: more, tokens: more_tokens, .. }
                | Self::Reasoning { text: more, tokens: more_tokens, .. }
                | Self::CallArguments { text: more, tokens: more_tokens, .. },
            ) => {
                text.push_str(&more);
                tokens.extend(more_tokens);
                None
            }
            (_, next) => Some(next),
        }
    }
}

/// Adds a delta, and merges it with the last one if possible. Empty deltas are ignored.
pub(super) fn push(delta: ChoiceDelta, deltas: &mut Vec<ChoiceDelta>) {
    if let ChoiceDelta::Text { text, tokens, .. }
    | ChoiceDelta::Reasoning { text, tokens, .. }
    | ChoiceDelta::CallArguments { text, tokens, .. } = &delta
        && text.is_empty()
        && tokens.is_empty()
    {
        return;
    }
    let unmerged = match deltas.last_mut() {
        Some(last) => last.merge(delta),
        None => Some(delta),
    };
    deltas.extend(unmerged);
}

/// A token within the text of a choice.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenText {
    pub(crate) token: TokenId,
    /// The position of the token's text in the generated text, in characters.
    pub(crate) start: usize,
    pub(crate) logprob: f32,
    /// The most probable tokens at this position, in descending order of probability.
    pub(crate) top: Vec<TokenLogprob>,
}

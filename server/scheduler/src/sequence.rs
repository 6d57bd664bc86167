//! A sequence as its submitter sees it.

use crate::TokenId;

/// Names a sequence for the life of the scheduler. The submitter chooses it and never uses it twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// A prompt and the sequences that continue it.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// The sequences, at least one, all of which continue the prompt. The first computes it, the others
    /// take over its blocks (copy on write) when it is done.
    pub sequences: Vec<SequenceId>,
    /// The prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// When each sequence ends.
    pub stop: StopRule,
}

/// When a sequence ends by its tokens. (Stop *strings* are found by whoever has the text, who aborts.)
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopRule {
    /// Tokens that end a sequence: the model's end tokens unless they are to be ignored, and the request's.
    pub tokens: Vec<TokenId>,
    /// Generated tokens after which a sequence ends.
    pub tokens_max: u32,
    /// Generated tokens before which no stop token ends it. (That none is sampled before is the sampler's
    /// work.)
    pub tokens_min: u32,
}

/// Why a sequence ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// It sampled a stop token.
    Stop,
    /// It has as many tokens as it may.
    Length,
}

//! The requests that a scheduler accepts, and the tokens and events that it exchanges with its caller.

use crate::block::{BlockHash, TokenId};
use crate::images::PromptImages;

/// Identifies a sequence for the life of the scheduler: the request and the index of the sequence within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId {
    /// The ID of the request ([`NewRequest::id`]).
    pub request: u64,
    /// The index of the sequence within its request, from 0.
    pub index: u32,
}

impl SequenceId {
    /// The ID of the sequence with this index in a request.
    pub const fn new(request: u64, index: u32) -> Self {
        Self { request, index }
    }
}

/// A prompt and the sequences that continue it.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// The ID of the request. The caller chooses it and never uses it twice.
    pub id: u64,
    /// The number of sequences that continue the prompt, at least one. The first sequence computes the prompt. The
    /// others then share its blocks (copy on write).
    pub num_sequences: u32,
    /// The prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// The images of the prompt. With bidirectional spans, `scores_prompt` is not supported.
    pub images: PromptImages,
    /// The stop criteria of each sequence.
    pub stop: StopCriteria,
    /// Whether the sequences advance in lockstep, as in a beam search: after the prompt, they run or wait together. All
    /// of them receive their next tokens in the same step, and each may then continue from the tokens of another
    /// sequence ([`SampledToken::parent`]).
    pub lockstep: bool,
    /// Whether the logits of all prompt tokens are computed, and not only those of the last one. If they are, the
    /// prompt is not taken from the prefix cache, except for tokens whose logits were computed before a preemption.
    pub scores_prompt: bool,
    /// The seed of the first block's hash. Requests with different seeds share no cached blocks.
    pub prefix_seed: BlockHash,
    /// The index of the LoRA adapter with which the tokens are computed, or 0 for the base model. Requests with
    /// different adapters share no cached blocks.
    pub adapter: u32,
    /// The ID of the tenant to which the request belongs. Requests of one tenant do not wait behind the whole backlog
    /// of another. The ID has no other meaning, and all requests without a tenant have the same ID.
    pub tenant: u128,
}

impl NewRequest {
    /// Creates a request with all optional features off.
    pub fn new(id: u64, num_sequences: u32, prompt: Vec<TokenId>, stop: StopCriteria) -> Self {
        Self {
            id,
            num_sequences,
            prompt,
            images: PromptImages::default(),
            stop,
            lockstep: false,
            scores_prompt: false,
            prefix_seed: BlockHash::NONE,
            adapter: 0,
            tenant: 0,
        }
    }
}

/// The token with which a sequence continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampledToken {
    /// The sequence to which the token belongs.
    pub sequence: SequenceId,
    /// The sequence whose tokens `sequence` continues, usually itself. In lockstep, the parent may be another sequence
    /// of the same request. That sequence must continue its own tokens in the same step.
    pub parent: SequenceId,
    /// The number of leading draft tokens of the sequence that the model would have sampled as well.
    pub accepted_drafts: u32,
    /// The token that follows the accepted drafts. `None` suspends the sequence until
    /// [`Scheduler::resume`](crate::Scheduler::resume) provides the token. A suspended sequence takes part in no step,
    /// but keeps its priority and, unless it is preempted, its blocks.
    pub token: Option<TokenId>,
}

impl SampledToken {
    /// A token that continues the sequence's own tokens.
    pub fn new(sequence: SequenceId, token: TokenId) -> Self {
        Self { sequence, parent: sequence, accepted_drafts: 0, token: Some(token) }
    }

    /// A placeholder for a token that is not known yet. It suspends the sequence.
    pub fn suspended(sequence: SequenceId) -> Self {
        Self { sequence, parent: sequence, accepted_drafts: 0, token: None }
    }
}

/// The criteria that decide when a sequence ends, based on its tokens. The caller handles stop strings, because it
/// knows the text: it aborts a sequence whose text contains one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopCriteria {
    /// The tokens that end a sequence: the stop tokens of the request and, unless the request ignores them, the model's
    /// end tokens.
    pub stop_token_ids: Vec<TokenId>,
    /// The number of generated tokens after which a sequence ends, including a stop token. At least one token is
    /// generated.
    pub max_tokens: u32,
    /// The number of tokens that must be generated before a stop token can end the sequence. (The sampler makes sure
    /// that no stop token is sampled earlier.)
    pub min_tokens: u32,
}

/// The reason why a sequence ended, unless it was aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The sequence sampled a stop token.
    Stop,
    /// The sequence reached its maximum number of tokens.
    Length,
}

/// A change of state that a step causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A step has computed tokens of the request for the first time. The event is reported once per request, for the
    /// first of its remaining sequences, before any of them finishes.
    Started {
        /// The sequence that computes the prompt.
        sequence: SequenceId,
        /// The number of prompt tokens that were in the prefix cache.
        cached_tokens: u32,
    },
    /// A sequence ended with the token that was sampled for it. It no longer holds any blocks.
    Finished {
        /// The sequence that ended.
        sequence: SequenceId,
        /// The reason why it ended.
        reason: FinishReason,
    },
}

/// The reason why a request was rejected. A rejected request is not queued and holds no blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// The prompt has no tokens.
    EmptyPrompt,
    /// The prompt and the requested tokens together are too long. Sequences in lockstep must all fit into the cache at
    /// the same time.
    TooLong {
        /// The number of tokens in the prompt.
        prompt_tokens: u32,
        /// The largest allowed number of tokens, prompt and completion together. It depends on the number of sequences
        /// if they are in lockstep.
        max_model_len: u32,
    },
    /// The request has more sequences than can ever run, or wait, at the same time.
    TooManySequences {
        /// The number of sequences of the request.
        num_sequences: u32,
        /// The largest number of sequences of a request.
        max_num_seqs: u32,
    },
    /// The queue has no room for all sequences of the request.
    QueueFull {
        /// Maximum number of waiting sequences.
        max_queue: u32,
    },
}

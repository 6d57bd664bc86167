//! Continuous batching over a paged KV cache: which sequences take part in the next step, with how many
//! tokens, in which blocks.
//!
//! This crate decides and nothing else. It performs no I/O, starts no thread and reads no clock, no random
//! number and no environment: the same calls in the same order give the same [`Batch`]es.
//!
//! ```text
//! submit ─► waiting ─► schedule ─► Batch ─► (the model runs) ─► commit ─► Event
//!              ▲            │
//!              └─ preempted ┘   the youngest gives its blocks back and is computed anew
//! ```
//!
//! Waiting requests of several tenants take turns by the tokens that each tenant has used ([`NewRequest::tenant`]); those of one
//! tenant are served in the order in which they arrive.
//!
//! A sequence is a list of tokens and a count of those whose keys and values are in the cache. Prefill, a
//! chunk of a prefill, decode and recomputing after a preemption are one thing: computing the tokens that
//! are not in the cache yet.
//!
//! The README beside this crate tells the policy and why it is so.

mod batch;
mod block;
mod block_pool;
mod claims;
mod eviction;
mod fairness;
mod keys;
mod load;
mod pace;
mod readings;
mod scheduler;
mod sequence;

pub use batch::{Batch, BlockCopy, Row};
pub use block::{BlockHash, BlockId, block_hash};
pub use eviction::SEQUENCE_BLOCKS_MIN;
pub use keys::{BlockKey, Evicted, KeyOf, Keying};
pub use load::Load;
pub use readings::{Place, ReadBack, ReadingId};
pub use scheduler::{DRAFT_TOKENS_MAX, PROMPT_TOKENS_MIN, SCORED_TOKENS_MAX, Scheduler};
pub use sequence::{Event, FinishReason, NewRequest, Rejected, Sampled, SequenceId, StopRule};

use std::time::Duration;

/// A token of the model's vocabulary.
pub type TokenId = u32;

/// The sizes and limits the scheduler keeps to. None is zero.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Tokens a block holds; read off the compiled model.
    pub block_tokens: u32,
    /// Blocks in the cache.
    pub blocks_total: u32,
    /// Most tokens computed in one step, over all sequences. A prompt that is longer is computed in chunks
    /// beside the decoding sequences, which come first.
    pub batch_tokens_max: u32,
    /// Most tokens computed in a step in which sequences decode while there are prompts to compute: how long a
    /// prompt may hold these up. However many decode, the prompts have a quarter of it; where several prompts
    /// wait for each sequence that decodes, it is so many times as much (as far as `batch_tokens_max` leaves that).
    pub chunk_tokens_max: u32,
    /// How long a step should take at most in which sequences decode. Prompts have as many tokens in it as fit by
    /// what steps were seen to take ([`Scheduler::took`]), but [`PROMPT_TOKENS_MIN`] in any case; `chunk_tokens_max` holds
    /// until enough is known.
    pub step_time_max: Option<Duration>,
    /// Most sequences that run at once. No more run than `batch_tokens_max`, so that each can have a token.
    pub sequences_max: u32,
    /// Most sequences that wait; beyond it [`Rejected::QueueFull`].
    pub waiting_max: u32,
    /// Longest sequence, prompt and generated tokens together. Never more than the cache holds.
    pub sequence_tokens_max: u32,
    /// Whether blocks of equal content are computed once and kept after their sequence ends.
    pub prefix_caching: bool,
    /// Full blocks that a sequence keeps at most while it generates, [`SEQUENCE_BLOCKS_MIN`] at least: others are left by what it
    /// attended to ([`Scheduler::attended`]). What it goes on with is not exact then, and not cached for others.
    pub sequence_blocks_max: Option<u32>,
}

impl SchedulerConfig {
    /// The longest sequence of a request with so many that go in step, prompt and generated tokens together: the cache
    /// has to hold them all, with nothing in common.
    pub fn in_step_tokens_max(&self, sequences: u32) -> u32 {
        let each = self.blocks_total / sequences.max(1) * self.block_tokens;
        each.min(self.sequence_tokens_max)
    }
}

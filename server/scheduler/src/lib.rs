//! Continuous batching over a paged KV cache: decides which sequences take part in the next step, with how many tokens
//! and in which blocks.
//!
//! The crate only decides. It performs no I/O, starts no threads, and reads no clock, no random numbers and no
//! environment: the same calls in the same order produce the same [`Batch`]es.
//!
//! ```text
//! submit ─► waiting ─► schedule ─► Batch ─► (the model runs) ─► commit ─► Event
//!              ▲            │
//!              └─ preempted ┘   the youngest sequence releases its blocks and is recomputed later
//! ```
//!
//! Waiting requests of several tenants take turns, weighted by the tokens that each tenant has used
//! ([`NewRequest::tenant`]). The requests of one tenant are ordered by their arrival.
//!
//! A sequence is a list of tokens and a count of those whose keys and values are in the cache. Prefill, a chunk of a
//! prefill, decode and recomputation after a preemption are the same operation: they compute the tokens that are not
//! in the cache yet.
//!
//! The README of this crate describes the policy and the reasons for it.

mod batch;
mod block;
mod block_keys;
mod block_pool;
mod block_scores;
mod claims;
mod config;
mod fairness;
mod id_map;
mod image_cache;
mod images;
mod load;
mod request;
mod restore;
mod scheduler;
mod sequence;
mod step_shares;
mod step_time;

pub use batch::{Batch, BlockCopy, ScheduledSequence};
pub use block::{BlockHash, BlockId, TokenId, block_hash};
pub use block_keys::{BlockKey, BlockKeyFn, BlockKeyScheme, EvictedBlock};
pub use config::{
    CacheSize, DRAFT_TOKENS_MAX, KV_EVICTION_BLOCKS_MIN, MAX_NUM_ENCODER_INPUT_TOKENS, PROMPT_TOKENS_MIN,
    RequestLimits, SCORED_TOKENS_MAX, SchedulerConfig,
};
pub use image_cache::{ImageLimits, ImageRequest};
pub use images::{ImageDigest, ImageSpan, PromptImages, SpanAttention};
pub use load::Load;
pub use request::{Event, FinishReason, NewRequest, Rejection, SampledToken, SequenceId, StopCriteria};
pub use restore::{RestoreId, RestoreRequest, RestoreTarget};
pub use scheduler::Scheduler;

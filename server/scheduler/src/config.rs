//! The sizes and limits of a scheduler. Most fields have the name of the server's flag that sets them.

use std::time::Duration;

use crate::request::Rejection;

/// The smallest number of blocks to which [`SchedulerConfig::kv_eviction_tokens`] may limit a sequence.
pub const KV_EVICTION_BLOCKS_MIN: u32 = 4;

/// Number of prompt tokens for which a step reports log probabilities. Each of these tokens needs a row of logits,
/// which is as long as the vocabulary and takes about as much time to compute as one or two layers.
///
/// If exceeded: the rest of the prompts is processed in the following steps.
pub const SCORED_TOKENS_MAX: u32 = 128;

/// The largest number of draft tokens in one step. Every draft token needs a row of logits, which is as long as the
/// vocabulary. Without this limit, the logits of a step could need gigabytes of memory.
pub const DRAFT_TOKENS_MAX: u32 = 256;

/// Number of tokens of the images that are being encoded or are queued for the image encoder. With an image in reserve,
/// the encoder does not wait for the engine between two images. With a longer queue, the images of a request with a
/// higher priority would have to wait for the whole queue.
///
/// If exceeded: further images wait in the order of their requests. A single image may have more tokens.
pub const MAX_NUM_ENCODER_INPUT_TOKENS: u32 = 1024;

/// The smallest number of prompt tokens that a step with a limited time may compute in addition to decodes, regardless
/// of how long the step then takes. If possible, the number of tokens that such a step may compute is a multiple of
/// this number, because a model has to prepare its operations for each new number of tokens.
pub const PROMPT_TOKENS_MIN: u32 = 16;

/// The size of the KV cache, which depends on the compiled model and on the memory for the cache. Both numbers are
/// greater than zero.
#[derive(Clone, Copy, Debug)]
pub struct CacheSize {
    /// Number of tokens in a block.
    pub block_tokens: u32,
    /// Number of blocks in the cache.
    pub blocks_total: u32,
}

/// The settings of a [`Scheduler`](crate::Scheduler). All numbers are greater than zero.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Maximum number of tokens that one step computes, over all sequences. Only an indivisible image may exceed it. A
    /// longer prompt is computed in chunks, together with the decoding sequences, which have priority.
    pub max_num_batched_tokens: u32,
    /// Without `max_itl`, the maximum number of tokens that a step computes while sequences decode and prompts wait to
    /// be computed. The setting limits how long a prompt may delay the decoding sequences. Prompts get at least a
    /// quarter of these tokens, regardless of how many sequences decode. They may get fewer while several tenants are
    /// present, and late chunks of a long prompt shrink so that all chunks take equally long. While only one tenant is
    /// present, the limit is a multiple of this number, up to `max_num_batched_tokens`, if there are several waiting
    /// prompts per decoding sequence, if many prompts wait, or if at least two prompts wait while many sequences
    /// decode.
    pub max_chunk_tokens: u32,
    /// The duration that a step with decoding sequences should not exceed. Prompts get as many tokens as fit into this
    /// time, predicted from the times of earlier steps ([`Scheduler::record_step`](crate::Scheduler::record_step)), but
    /// at least [`PROMPT_TOKENS_MIN`]. Until enough steps have been recorded, the size of a step is a quarter of
    /// `max_chunk_tokens`. While several tenants are present, the size of a step is also limited to `max_chunk_tokens`,
    /// regardless of whether `max_itl` is set.
    pub max_itl: Option<Duration>,
    /// Maximum number of sequences that run at the same time. It is limited to `max_num_batched_tokens`, so that each
    /// running sequence can have a token in every step.
    pub max_num_seqs: u32,
    /// Maximum number of waiting sequences. Further requests are rejected with [`Rejection::QueueFull`].
    pub max_queue: u32,
    /// Maximum number of tokens of a prompt and its completion together. It must not exceed the size of the cache.
    pub max_model_len: u32,
    /// Whether blocks with equal content are computed once and remain cached after their sequence has ended.
    pub prefix_caching: bool,
    /// Maximum number of tokens of a generating sequence that remain in the cache, rounded down to whole blocks.
    /// Sequences in lockstep have no such limit. At least [`KV_EVICTION_BLOCKS_MIN`] blocks must remain. The blocks
    /// with the lowest attention scores are evicted
    /// ([`Scheduler::record_block_scores`](crate::Scheduler::record_block_scores)). The output of a sequence with
    /// evicted blocks is no longer exact, and its blocks are not cached for other requests, apart from a prefix that
    /// others share.
    pub kv_eviction_tokens: Option<u32>,
}

/// The limits for the length and the number of sequences of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// Number of tokens in a block of the cache.
    pub block_tokens: u32,
    /// Number of blocks in the cache.
    pub blocks_total: u32,
    /// Maximum number of tokens of a prompt and its completion together.
    pub max_model_len: u32,
    /// Maximum number of sequences of a request.
    pub max_num_seqs: u32,
    /// Maximum number of waiting sequences.
    pub max_queue: u32,
}

impl RequestLimits {
    /// Returns the largest number of tokens, prompt and completion together, of each sequence in a request with this
    /// many sequences in lockstep. The cache must be able to hold all these sequences at the same time without shared
    /// blocks.
    pub fn lockstep_model_len(&self, num_sequences: u32) -> u32 {
        let tokens = self.blocks_total / num_sequences.max(1) * self.block_tokens;
        tokens.min(self.max_model_len)
    }

    /// Checks a request of this size. The caller checks whether the queue is full.
    ///
    /// # Errors
    /// [`Rejection`] if the request can never run.
    pub fn check(
        &self,
        prompt_tokens: usize,
        max_tokens: u32,
        num_sequences: u32,
        lockstep: bool,
    ) -> Result<(), Rejection> {
        let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
        if prompt_tokens == 0 {
            return Err(Rejection::EmptyPrompt);
        }
        let max_model_len = self.lockstep_model_len(if lockstep { num_sequences } else { 1 });
        if prompt_tokens.saturating_add(max_tokens.max(1)) > max_model_len {
            return Err(Rejection::TooLong { prompt_tokens, max_model_len });
        }
        let max_num_seqs = self.max_num_seqs;
        if num_sequences > max_num_seqs {
            return Err(Rejection::TooManySequences { num_sequences, max_num_seqs });
        }
        Ok(())
    }
}

impl SchedulerConfig {
    /// The limits that a scheduler with this configuration and a cache of this size sets for requests.
    pub fn request_limits(&self, cache: CacheSize) -> RequestLimits {
        let Self { max_model_len, max_queue, .. } = *self;
        let CacheSize { block_tokens, blocks_total } = cache;
        let max_num_seqs = self.max_num_seqs.min(self.max_num_batched_tokens).min(max_queue);
        RequestLimits { block_tokens, blocks_total, max_model_len, max_num_seqs, max_queue }
    }

    /// Panics unless a scheduler can work with this configuration and a cache of this size.
    pub(crate) fn validate(&self, cache: CacheSize) {
        let CacheSize { block_tokens, blocks_total } = cache;
        let max_model_len = self.max_model_len;
        assert!(
            block_tokens > 0 && blocks_total > 0,
            "block_tokens and blocks_total must be greater than zero"
        );
        assert!(self.max_num_batched_tokens > 0, "max_num_batched_tokens must be greater than zero");
        assert!(self.max_num_seqs > 0, "max_num_seqs must be greater than zero");
        assert!(self.max_chunk_tokens > 0, "max_chunk_tokens must be greater than zero");
        assert!(self.max_queue > 0, "max_queue must be greater than zero");
        assert!(max_model_len > 1, "max_model_len must leave room for a prompt token and a generated token");
        assert!(
            max_model_len.div_ceil(block_tokens) <= blocks_total,
            "a sequence of max_model_len ({max_model_len}) tokens must fit into the cache ({blocks_total} blocks of \
             {block_tokens} tokens)"
        );
        assert!(
            self.kv_eviction_blocks(block_tokens).is_none_or(|blocks| blocks >= KV_EVICTION_BLOCKS_MIN),
            "kv_eviction_tokens must be at least {KV_EVICTION_BLOCKS_MIN} blocks of {block_tokens} tokens"
        );
    }

    /// `kv_eviction_tokens` in whole blocks of `block_tokens` tokens.
    pub(crate) fn kv_eviction_blocks(&self, block_tokens: u32) -> Option<u32> {
        self.kv_eviction_tokens.map(|tokens| tokens / block_tokens)
    }
}

//! The scheduler: the queues of waiting and running sequences, and the calls that change them.
//!
//! This module accepts requests and removes sequences. `schedule` decides what a step computes, `commit` applies the
//! results, `restore` restores stored blocks, `images` reserves encoder outputs, and `invariants` checks the
//! invariants.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::batch::Batch;
use crate::block::{BlockHash, TokenId, block_hash};
use crate::block_pool::BlockPool;
use crate::claims::Claims;
use crate::config::{CacheSize, SchedulerConfig};
use crate::fairness::FairQueue;
use crate::image_cache::{ImageCache, ImageLimits};
use crate::images::SpanAttention;
use crate::load::Load;
use crate::request::{NewRequest, Rejection, SequenceId};
use crate::restore::BlockRestores;
use crate::sequence::{PrefixChain, Priority, Residency, RestoreState, Sequence, SequenceGroup};
use crate::step_shares::StepShares;
use crate::step_time::StepTimeModel;
use sequence_table::SequenceTable;

mod commit;
mod images;
mod invariants;
mod restore;
mod schedule;
mod sequence_table;

/// The largest number of sequences for which memory is reserved at the start. If there are more, the tables grow.
const RESERVED_SEQUENCES_MAX: u32 = 4096;

/// Decides what each step computes. The README of the crate describes the policy.
///
/// A clone continues independently from the same state.
///
/// # Guarantees
/// - Between [`Self::schedule`] and the [`Self::commit`] or [`Self::fail`] of its batch, no block that the batch reads
///   or writes is allocated to another sequence, even if sequences are aborted in the meantime.
/// - The next batch is not empty unless [`Self::is_idle`], [`Self::is_restoring`], [`Self::has_suspended`] or
///   [`Self::is_waiting_for_images`] returns true.
/// - A step that only decodes does not allocate memory.
#[derive(Clone, Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    cache: CacheSize,
    /// Number of blocks that must remain available after an admission, so that the running sequences can grow.
    watermark_blocks: u32,
    block_hash: fn(BlockHash, &[TokenId]) -> BlockHash,
    pool: BlockPool,
    claims: Claims,
    step_time: StepTimeModel,
    /// `None` if evicted blocks are not stored.
    restores: Option<Box<BlockRestores>>,
    images: ImageCache,
    /// Whether the latest admission pass has found room for the images of every sequence that it has tried to admit so
    /// far.
    images_have_room: bool,
    sequences: SequenceTable,
    fairness: FairQueue,
    shares: StepShares,
    /// Whether the latest batch had room for more work, so that each tenant that was not paused could have taken part.
    had_room: bool,
    /// The waiting sequences, by priority.
    waiting: VecDeque<QueueEntry>,
    /// The running sequences, by priority.
    running: Vec<QueueEntry>,
    /// The slots of the sequences in the batch in flight. `None` for sequences that were aborted after the batch was
    /// scheduled.
    in_flight: Vec<Option<u32>>,
    waiting_sequences: u32,
    running_sequences: u32,
    suspended_sequences: u32,
    uncomputed_tokens: u64,
    image_cache_hits_total: u64,
    image_cache_misses_total: u64,
    preemptions_total: u64,
    arrivals: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct QueueEntry {
    priority: Priority,
    slot: u32,
}

impl Scheduler {
    /// Creates a scheduler with an empty cache.
    ///
    /// # Panics
    /// Panics if a size or limit is zero, `max_model_len` is less than 2 or exceeds the size of the cache, or
    /// `kv_eviction_tokens` is less than [`KV_EVICTION_BLOCKS_MIN`](crate::KV_EVICTION_BLOCKS_MIN) blocks.
    pub fn new(config: SchedulerConfig, cache: CacheSize) -> Self {
        Self::with_block_hash(config, cache, block_hash)
    }

    /// Creates a scheduler that uses another hash function for blocks. Any function produces correct results, even a
    /// constant one: the hash affects which cached blocks are found, but never their content. However, only the hash
    /// separates the blocks of requests with different prefix seeds.
    ///
    /// # Panics
    /// Panics if [`Self::new`] would panic.
    pub fn with_block_hash(
        mut config: SchedulerConfig,
        cache: CacheSize,
        block_hash: fn(BlockHash, &[TokenId]) -> BlockHash,
    ) -> Self {
        config.validate(cache);
        config.max_num_seqs = config.max_num_seqs.min(config.max_num_batched_tokens);
        let SchedulerConfig { max_num_seqs, max_queue, .. } = config;
        let CacheSize { block_tokens, blocks_total } = cache;
        let reserved = max_num_seqs.saturating_add(max_queue).min(RESERVED_SEQUENCES_MAX) as usize;
        let running = max_num_seqs.min(RESERVED_SEQUENCES_MAX) as usize;
        Self {
            // One percent is enough for the growth during a few steps, and is a negligible part of the cache.
            watermark_blocks: blocks_total / 100,
            block_hash,
            pool: BlockPool::new(blocks_total, block_tokens),
            claims: Claims::with_capacity(blocks_total),
            step_time: StepTimeModel::default(),
            restores: None,
            images: ImageCache::new(ImageLimits { rows_max: 0, max_num_encoder_input_tokens: 0 }),
            images_have_room: true,
            sequences: SequenceTable::with_capacity(reserved),
            fairness: FairQueue::default(),
            shares: StepShares::default(),
            had_room: true,
            waiting: VecDeque::with_capacity(reserved),
            running: Vec::with_capacity(running),
            in_flight: Vec::with_capacity(running),
            waiting_sequences: 0,
            running_sequences: 0,
            suspended_sequences: 0,
            uncomputed_tokens: 0,
            image_cache_hits_total: 0,
            image_cache_misses_total: 0,
            preemptions_total: 0,
            arrivals: 0,
            config,
            cache,
        }
    }

    /// Adds a request to the waiting queue.
    ///
    /// # Errors
    /// [`Rejection`] if the prompt is empty, or the request exceeds a limit of the configuration.
    /// [`Rejection::TooLong`] applies to the prompt and `max_tokens` together. A caller that does not limit the
    /// completion must therefore set `max_tokens` to the maximum length minus the length of the prompt.
    ///
    /// # Panics
    /// Panics if the request has no sequences, its id is in use, its images are invalid, or it scores a prompt with
    /// bidirectional spans.
    pub fn submit(&mut self, request: NewRequest) -> Result<(), Rejection> {
        self.check_limits(&request)?;
        let NewRequest { id, num_sequences, prompt, .. } = request;
        let prompt_tokens = prompt.len() as u32;
        let images = request.images;
        assert!(
            images.is_valid(prompt_tokens),
            "the spans of the images must be ascending, without overlaps and within the prompt"
        );
        assert!(
            !request.scores_prompt || images.attention == SpanAttention::Causal,
            "a prompt with bidirectional spans cannot be scored"
        );
        let block_words = images.block_words(self.cache.block_tokens);
        let distinct_images = images.needed_after(0);
        let priority = Priority {
            start: self.fairness.arrive(request.tenant, prompt_tokens),
            arrival: self.arrivals,
            index: 0,
        };
        self.arrivals += 1;
        let mut sequence = Sequence {
            id: SequenceId::new(id, 0),
            priority,
            group: Arc::new(SequenceGroup {
                stop: request.stop,
                prompt_tokens,
                lockstep: request.lockstep,
                adapter: request.adapter,
                tenant: request.tenant,
                images,
                distinct_images,
                block_words,
            }),
            siblings: (1..num_sequences).map(|index| SequenceId::new(id, index)).collect(),
            tokens: prompt,
            prefix: PrefixChain::new(request.prefix_seed, request.adapter, self.block_hash),
            residency: Residency::default(),
            restore: RestoreState::Eligible,
            held_images: Vec::new(),
            expects_images: false,
            has_reserved_images: false,
            unscored: if request.scores_prompt { 0..prompt_tokens - 1 } else { 0..0 },
            cached_tokens: None,
            is_started: false,
            batch_index: None,
            num_draft_tokens: 0,
            is_suspended: false,
        };
        self.extend_hashes(&mut sequence);
        self.waiting_sequences += num_sequences;
        self.uncomputed_tokens += u64::from(prompt_tokens);
        self.shares.add_sequence(request.tenant);
        let slot = self.sequences.insert(sequence);
        self.expect_images(slot);
        self.enqueue(QueueEntry { priority, slot });
        Ok(())
    }

    /// Sets the number of draft tokens that the caller has for the next step of a sequence. The scheduler reserves room
    /// for as many of these tokens as it can without preempting other running sequences or excluding such sequences
    /// from the step. It reserves no room if the sequence does not decode in that step. A step has at most
    /// [`DRAFT_TOKENS_MAX`](crate::DRAFT_TOKENS_MAX) draft tokens, over all sequences. An unknown ID is ignored.
    pub fn set_num_draft_tokens(&mut self, id: SequenceId, num_draft_tokens: u32) {
        if let Some(slot) = self.sequences.slot(id) {
            self.sequences.get_mut(slot).num_draft_tokens = num_draft_tokens;
        }
    }

    /// Removes a sequence immediately, in any state. A token that the batch in flight samples for the sequence is
    /// ignored. The ID of an unknown or finished sequence has no effect.
    pub fn abort(&mut self, id: SequenceId) {
        let Some(slot) = self.sequences.slot(id) else { return };
        let sequence = self.sequences.get_mut(slot);
        if sequence.siblings.is_empty() {
            self.remove(slot);
            return;
        }
        if sequence.id == id {
            // The siblings are still identical, so the next one replaces the aborted one.
            sequence.id = sequence.siblings.remove(0);
        } else {
            sequence.siblings.retain(|&sibling| sibling != id);
        }
        let priority = sequence.priority;
        self.sequences.remove_id(id);
        if self.running.binary_search_by_key(&priority, |entry| entry.priority).is_ok() {
            self.running_sequences -= 1;
        } else {
            self.waiting_sequences -= 1;
        }
    }

    /// Records the attention that the tokens of a batch paid to each block of [`Batch::blocks`]. The caller must call
    /// this method before it commits the batch. Only the scores of sequences with exactly one token in the batch are
    /// used, and only the proportions of the scores matter.
    ///
    /// # Panics
    /// Panics if `batch` is not the one in flight, or the number of scores is not the number of blocks.
    pub fn record_block_scores(&mut self, batch: &Batch, scores: &[f32]) {
        assert_eq!(batch.sequences.len(), self.in_flight.len(), "the batch must be the one in flight");
        assert_eq!(batch.blocks.len(), scores.len(), "each block must have a score");
        if self.config.kv_eviction_tokens.is_none() {
            return;
        }
        for (scheduled, slot) in batch.sequences.iter().zip(&self.in_flight) {
            if let (Some(slot), 1) = (*slot, scheduled.tokens.len()) {
                let scores = &scores[scheduled.blocks.start as usize..scheduled.blocks.end as usize];
                self.sequences.get_mut(slot).residency.scores.record(scores);
            }
        }
    }

    /// Records the duration of the step that computed `batch`, the latest batch.
    pub fn record_step(&mut self, batch: &Batch, time: Duration) {
        if let Some(overhead) = self.step_time.overhead() {
            let cost = |work| self.step_time.cost(work);
            self.shares.end_step(time.as_secs_f64(), self.had_room, overhead, cost);
        }
        self.step_time.record_step(batch, time);
    }

    /// Evicts all cached blocks and encoder outputs that no sequence holds.
    pub fn clear_cache(&mut self) {
        self.pool.evict_all();
        self.images.evict_all();
    }

    /// Returns the current load in constant time.
    pub fn load(&self) -> Load {
        let (free, evictable) = (self.pool.blocks_free(), self.pool.blocks_evictable());
        Load {
            blocks_total: self.pool.blocks_total(),
            blocks_active: self.pool.blocks_total() - free - evictable,
            blocks_evictable: evictable,
            blocks_free: free,
            running: self.running_sequences,
            waiting: self.waiting_sequences,
            uncomputed_tokens: self.uncomputed_tokens,
            unencoded_image_tokens: self.images.rows_unencoded(),
            encoded_image_tokens: self.images.rows_encoded(),
            image_cache_hits_total: self.image_cache_hits_total,
            image_cache_misses_total: self.image_cache_misses_total,
            preemptions_total: self.preemptions_total,
        }
    }

    /// Whether any sequence is suspended. In this case, batches may be empty.
    pub fn has_suspended(&self) -> bool {
        self.suspended_sequences > 0
    }

    /// Whether the caller may pause decodes between steps. It may if `max_itl` is not set and at most one tenant has
    /// sequences or had some recently, because no tenant then waits for the work of another.
    pub fn allows_pauses(&self) -> bool {
        self.config.max_itl.is_none() && !self.shares.is_shared()
    }

    /// Whether no sequence waits or runs.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    fn check_limits(&self, request: &NewRequest) -> Result<(), Rejection> {
        let num_sequences = request.num_sequences;
        assert!(num_sequences > 0, "a request must have a sequence");
        let has_new_id =
            (0..num_sequences).all(|index| self.sequences.slot(SequenceId::new(request.id, index)).is_none());
        assert!(has_new_id, "the id of a request must not be used twice");
        let limits = self.config.request_limits(self.cache);
        limits.check(request.prompt.len(), request.stop.max_tokens, num_sequences, request.lockstep)?;
        let max_queue = limits.max_queue;
        if self.waiting_sequences.saturating_add(num_sequences) > max_queue {
            return Err(Rejection::QueueFull { max_queue });
        }
        Ok(())
    }

    /// Computes the hashes of the full blocks of `sequence` that have none yet.
    fn extend_hashes(&self, sequence: &mut Sequence) {
        if !self.config.prefix_caching {
            return;
        }
        let Sequence { tokens, prefix, group, .. } = sequence;
        let block_tokens = self.cache.block_tokens as usize;
        for (index, block) in tokens.chunks_exact(block_tokens).enumerate().skip(prefix.hashes.len()) {
            prefix.hashes.push(group.hash_block(index, prefix.last_hash(), block, self.block_hash));
        }
    }

    /// Adds an entry to the waiting queue.
    fn enqueue(&mut self, entry: QueueEntry) {
        let at = self.waiting.partition_point(|other| other.priority < entry.priority);
        self.waiting.insert(at, entry);
    }

    /// Removes a sequence, and the siblings that it represents, from the queues and tables.
    fn remove(&mut self, slot: u32) -> Sequence {
        self.end_restore_of(slot);
        self.release_blocks(slot);
        self.stop_expecting_images(slot);
        let sequence = self.sequences.remove(slot);
        self.shares.remove_sequence(sequence.group.tenant);
        if sequence.cached_tokens.is_some() {
            self.fairness.charge_generated(sequence.group.tenant, sequence.generated_tokens());
        } else {
            self.fairness.refund(sequence.group.tenant, sequence.group.prompt_tokens);
        }
        self.uncomputed_tokens -= u64::from(sequence.uncomputed_tokens());
        self.suspended_sequences -= u32::from(sequence.is_suspended);
        if let Some(index) = sequence.batch_index {
            self.in_flight[index as usize] = None;
        }
        if let Ok(at) = self.running.binary_search_by_key(&sequence.priority, |entry| entry.priority) {
            self.running.remove(at);
            self.running_sequences -= sequence.num_sequences();
        } else {
            let at = self.waiting.binary_search_by_key(&sequence.priority, |entry| entry.priority);
            self.waiting.remove(at.expect("invariant: a sequence waits or runs"));
            self.waiting_sequences -= sequence.num_sequences();
        }
        sequence
    }

    /// Releases all blocks, claims and images of a sequence, so that it has no computed tokens.
    fn release_blocks(&mut self, slot: u32) {
        let Sequence { prefix, residency, .. } = self.sequences.get_mut(slot);
        for index in std::mem::replace(&mut prefix.claims, 0..0) {
            self.claims.release(prefix.hashes[index as usize], slot);
        }
        for block in residency.block_table.drain(..).rev() {
            self.pool.release(block);
        }
        prefix.registered = 0;
        residency.scores.clear();
        residency.evicted_tokens = 0;
        self.uncomputed_tokens += u64::from(std::mem::take(&mut residency.computed_tokens));
        self.release_images(slot);
    }
}

//! The scheduler: what waits, what runs, and what may be asked of it.
//!
//! This file takes requests in and lets go of sequences. What a step consists of is decided in `schedule`,
//! what it changed in `commit`, what must hold at any time in `invariants`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::block::{BlockHash, block_hash};
use crate::block_pool::BlockPool;
use crate::claims::Claims;
use crate::eviction::{Attended, SEQUENCE_BLOCKS_MIN};
use crate::fairness::FairQueue;
use crate::pace::Pace;
use crate::readings::Readings;
use crate::sequence::{Rank, Sequence, Wish};
use crate::{Batch, Load, NewRequest, Rejected, SchedulerConfig, SequenceId, TokenId};
use sequences::Sequences;

pub use schedule::{DRAFT_TOKENS_MAX, PROMPT_TOKENS_MIN, SCORED_TOKENS_MAX};

mod commit;
mod invariants;
mod read_back;
mod schedule;
mod sequences;

/// How many sequences have room set aside at the start; more make the tables grow once.
const RESERVED_SEQUENCES_MAX: u32 = 4096;

/// Decides what each step computes. See the crate's documentation.
///
/// # Guarantees
/// - Between [`Self::schedule`] and the [`Self::commit`] or [`Self::fail`] of its batch, no block that the
///   batch reads or writes is given to anybody else, whatever is aborted meanwhile.
/// - The next batch has a row, unless [`Self::is_idle`], [`Self::is_reading`] or [`Self::has_suspended`].
/// - A step of decodes does not allocate.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    /// Blocks that admission leaves for the sequences that run to grow into.
    watermark_blocks: u32,
    hash: fn(BlockHash, &[TokenId]) -> BlockHash,
    pool: BlockPool,
    claims: Claims,
    pace: Pace,
    /// If evicted blocks are kept elsewhere.
    readings: Option<Box<Readings>>,
    sequences: Sequences,
    fairness: FairQueue,
    /// In the order of their ranks.
    waiting: VecDeque<Entry>,
    /// In the order of their ranks.
    running: Vec<Entry>,
    /// The slots of the rows of the batch that is being computed; `None` for those aborted since.
    in_flight: Vec<Option<u32>>,
    waiting_sequences: u32,
    running_sequences: u32,
    suspended_sequences: u32,
    uncomputed_tokens: u64,
    preemptions_total: u64,
    arrivals: u64,
}

/// A place in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    rank: Rank,
    slot: u32,
}

impl Scheduler {
    /// A scheduler with an empty cache.
    ///
    /// # Panics
    /// If a size is zero, or the longest sequence does not fit the cache.
    pub fn new(config: SchedulerConfig) -> Self {
        Self::with_block_hash(config, block_hash)
    }

    /// As [`Self::new`], with another hash of blocks. Any function is right, even a constant one: it decides
    /// what is found in the prefix cache, never what is taken from it.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn with_block_hash(
        mut config: SchedulerConfig,
        hash: fn(BlockHash, &[TokenId]) -> BlockHash,
    ) -> Self {
        let SchedulerConfig { block_tokens, blocks_total, sequence_tokens_max, waiting_max, .. } = config;
        assert!(block_tokens > 0 && blocks_total > 0, "a cache has blocks, and a block tokens");
        assert!(config.batch_tokens_max > 0 && config.sequences_max > 0, "a step computes something");
        assert!(config.chunk_tokens_max > 0, "prompts advance beside sequences that decode");
        assert!(waiting_max > 0, "a request waits before it runs");
        assert!(sequence_tokens_max > 1, "a sequence has a prompt and a generated token");
        assert!(
            sequence_tokens_max.div_ceil(block_tokens) <= blocks_total,
            "the longest sequence ({sequence_tokens_max} tokens) fits the cache ({blocks_total} blocks of \
             {block_tokens} tokens)"
        );
        assert!(
            config.sequence_blocks_max.is_none_or(|max| max >= SEQUENCE_BLOCKS_MIN),
            "there is something to leave"
        );
        config.sequences_max = config.sequences_max.min(config.batch_tokens_max);
        let reserved = config.sequences_max.saturating_add(waiting_max).min(RESERVED_SEQUENCES_MAX) as usize;
        let running = config.sequences_max.min(RESERVED_SEQUENCES_MAX) as usize;
        Self {
            // One in a hundred: enough for some steps of growth, too few to be missed.
            watermark_blocks: blocks_total / 100,
            hash,
            pool: BlockPool::new(blocks_total, block_tokens),
            claims: Claims::with_capacity(blocks_total),
            pace: Pace::default(),
            readings: None,
            sequences: Sequences::with_capacity(reserved),
            fairness: FairQueue::default(),
            waiting: VecDeque::with_capacity(reserved),
            running: Vec::with_capacity(running),
            in_flight: Vec::with_capacity(running),
            waiting_sequences: 0,
            running_sequences: 0,
            suspended_sequences: 0,
            uncomputed_tokens: 0,
            preemptions_total: 0,
            arrivals: 0,
            config,
        }
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`Rejected`], by the limits of the configuration. [`Rejected::TooLong`] goes by prompt and
    /// `tokens_max` together: who has no wish for a `tokens_max` asks for what is left.
    ///
    /// # Panics
    /// If the request has no sequence, or an id is in use.
    pub fn submit(&mut self, request: NewRequest) -> Result<(), Rejected> {
        self.accept(&request)?;
        let NewRequest { sequences, prompt, stop, in_step, scores_prompt, root, adapter, tenant } = request;
        let prompt_tokens = prompt.len() as u32;
        let mut siblings = sequences;
        let id = siblings.remove(0);
        let start = self.fairness.arrive(tenant, prompt_tokens);
        let rank = Rank { start, arrival: self.arrivals, index: 0 };
        self.arrivals += 1;
        let mut sequence = Sequence {
            id,
            rank,
            siblings,
            stop: Arc::new(stop),
            in_step,
            prompt_tokens,
            tokens: prompt,
            computed: 0,
            table: Vec::new(),
            left: 0,
            attended: Attended::default(),
            unscored: if scores_prompt { 0..prompt_tokens - 1 } else { 0..0 },
            // Hashes of different adapters are different, so that none is in the other's way.
            root: if adapter == 0 { root } else { (self.hash)(root, &[adapter]) },
            adapter,
            tenant,
            salt: root,
            hashes: Vec::new(),
            registered: 0,
            claims: 0..0,
            cached_tokens: None,
            started: false,
            row: None,
            drafts: 0,
            wish: Wish::Open,
            is_suspended: false,
        };
        self.extend_hashes(&mut sequence);
        self.waiting_sequences += sequence.group();
        self.uncomputed_tokens += u64::from(prompt_tokens);
        let slot = self.sequences.insert(sequence);
        self.enqueue(Entry { rank, slot });
        Ok(())
    }

    /// Asks that the next row of a sequence have room for so many drafts: tokens that may turn out to be what is sampled,
    /// and are computed beside the one that is known. It has as many as there are blocks and budget for without others
    /// having less, and none unless it is to take one token; never more than it may generate before its last, and never
    /// more than [`DRAFT_TOKENS_MAX`] in a step, over all sequences.
    pub fn propose(&mut self, id: SequenceId, drafts: u32) {
        if let Some(slot) = self.sequences.slot(id) {
            self.sequences.get_mut(slot).drafts = drafts;
        }
    }

    /// Lets go of a sequence at once, whatever it is doing; what it samples in a batch in flight is ignored.
    /// An unknown id, or one that has finished, is ignored.
    pub fn abort(&mut self, id: SequenceId) {
        let Some(slot) = self.sequences.slot(id) else { return };
        let sequence = self.sequences.get_mut(slot);
        if sequence.siblings.is_empty() {
            self.remove(slot);
            return;
        }
        if sequence.id == id {
            // Up to here they are all the same: the next one goes on in its place.
            sequence.id = sequence.siblings.remove(0);
        } else {
            sequence.siblings.retain(|&sibling| sibling != id);
        }
        let rank = sequence.rank;
        self.sequences.forget(id);
        if self.running.binary_search_by_key(&rank, |entry| entry.rank).is_ok() {
            self.running_sequences -= 1;
        } else {
            self.waiting_sequences -= 1;
        }
    }

    /// Learns what the tokens of a batch attended to, before it is committed: `weights` has a number for each of
    /// [`Batch::blocks`], of which those of a row that decodes count, by their proportion.
    ///
    /// # Panics
    /// If `batch` is not the last one scheduled, or there are not as many weights as blocks.
    pub fn attended(&mut self, batch: &Batch, weights: &[f32]) {
        assert_eq!(batch.rows.len(), self.in_flight.len(), "the batch is the one in flight");
        assert_eq!(batch.blocks.len(), weights.len(), "each block has a weight");
        if self.config.sequence_blocks_max.is_none() {
            return;
        }
        for (row, slot) in batch.rows.iter().zip(&self.in_flight) {
            if let (Some(slot), 1) = (*slot, row.tokens.len()) {
                let weights = &weights[row.blocks.start as usize..row.blocks.end as usize];
                self.sequences.get_mut(slot).attended.add(weights);
            }
        }
    }

    /// Learns how long the step of `batch` took.
    pub fn took(&mut self, batch: &Batch, time: Duration) {
        self.pace.took(batch, time);
    }

    /// Forgets what is cached of sequences that have ended: their blocks' content is lost.
    pub fn forget_cached(&mut self) {
        self.pool.forget_evictable();
    }

    /// How busy it is. Takes no time.
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
            preemptions_total: self.preemptions_total,
        }
    }

    /// Whether a sequence is suspended. Then there may be batches without rows.
    pub fn has_suspended(&self) -> bool {
        self.suspended_sequences > 0
    }

    /// Whether there is nothing to compute.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    fn accept(&self, request: &NewRequest) -> Result<(), Rejected> {
        let ids = &request.sequences;
        assert!(!ids.is_empty(), "a request has a sequence");
        for (position, id) in ids.iter().enumerate() {
            let is_new = self.sequences.slot(*id).is_none() && !ids[..position].contains(id);
            assert!(is_new, "a sequence id is used once");
        }
        let waiting_max = self.config.waiting_max;
        let sequences_max = self.config.sequences_max.min(waiting_max);
        let sequences = u32::try_from(ids.len()).unwrap_or(u32::MAX);
        let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        let in_step = if request.in_step { sequences } else { 1 };
        let sequence_tokens_max = self.config.in_step_tokens_max(in_step);
        if prompt_tokens == 0 {
            return Err(Rejected::EmptyPrompt);
        }
        if prompt_tokens.saturating_add(request.stop.tokens_max.max(1)) > sequence_tokens_max {
            return Err(Rejected::TooLong { prompt_tokens, sequence_tokens_max });
        }
        if sequences > sequences_max {
            return Err(Rejected::TooManySequences { sequences, sequences_max });
        }
        if self.waiting_sequences + sequences > waiting_max {
            return Err(Rejected::QueueFull);
        }
        Ok(())
    }

    /// Hashes the full blocks of `sequence` that are not hashed yet.
    fn extend_hashes(&self, sequence: &mut Sequence) {
        if !self.config.prefix_caching {
            return;
        }
        let Sequence { tokens, hashes, root, .. } = sequence;
        let block_tokens = self.config.block_tokens as usize;
        for block in tokens.chunks_exact(block_tokens).skip(hashes.len()) {
            let parent = hashes.last().copied().unwrap_or(*root);
            hashes.push((self.hash)(parent, block));
        }
    }

    /// Adds an entry to those that wait.
    fn enqueue(&mut self, entry: Entry) {
        let at = self.waiting.partition_point(|other| other.rank < entry.rank);
        self.waiting.insert(at, entry);
    }

    /// Takes a sequence, with its siblings if they are one yet, out of everything.
    fn remove(&mut self, slot: u32) -> Sequence {
        self.end_reading_of(slot);
        self.release_blocks(slot);
        let sequence = self.sequences.remove(slot);
        self.fairness.charge_generated(sequence.tenant, sequence.generated());
        self.uncomputed_tokens -= u64::from(sequence.uncomputed());
        self.suspended_sequences -= u32::from(sequence.is_suspended);
        if let Some(row) = sequence.row {
            self.in_flight[row as usize] = None;
        }
        if let Ok(at) = self.running.binary_search_by_key(&sequence.rank, |entry| entry.rank) {
            self.running.remove(at);
            self.running_sequences -= sequence.group();
        } else {
            let at = self.waiting.binary_search_by_key(&sequence.rank, |entry| entry.rank);
            self.waiting.remove(at.expect("invariant: a sequence waits or runs"));
            self.waiting_sequences -= sequence.group();
        }
        sequence
    }

    /// Gives back all that a sequence holds in the cache; it has computed nothing then.
    fn release_blocks(&mut self, slot: u32) {
        let sequence = self.sequences.get_mut(slot);
        for index in sequence.claims.clone() {
            self.claims.release(sequence.hashes[index as usize], slot);
        }
        for block in sequence.table.drain(..).rev() {
            self.pool.release(block);
        }
        self.uncomputed_tokens += u64::from(sequence.computed);
        sequence.left = 0;
        sequence.attended.clear();
        sequence.claims = 0..0;
        sequence.registered = 0;
        sequence.computed = 0;
    }
}

//! What the next step computes: decodes, then chunks of prompts, then whoever may start.

use super::{Entry, Scheduler};
use crate::block_pool::{Content, Serial};
use crate::sequence::Sequence;
use crate::{Batch, BlockCopy, BlockId};

/// Waiting requests that are looked at in a step: those behind them wait for another step, so that a long
/// queue does not cost time in each.
const LOOKAHEAD_MAX: usize = 128;

/// For each so many prompts that are not computed, a step with decodes in it may be as large as a chunk once more.
const PROMPTS_PER_CHUNK: u32 = 8;

/// Tokens of prompts in a step whose logits are computed only to be told: each takes as much memory as the
/// vocabulary, and a row of them about as much time as a layer or two.
pub const SCORED_TOKENS_MAX: u32 = 128;

/// What a step may still hold.
struct Budget {
    tokens: u32,
    /// Tokens of prompts whose logits are wanted.
    scores: u32,
}

/// What became of a waiting request that was looked at.
enum Admission {
    Admitted(u32),
    /// Its next block is being computed: others may go ahead.
    WaitsForPrefix,
    /// There is no room: nobody may go ahead.
    WaitsForRoom,
}

impl Scheduler {
    /// Decides the next step and takes the blocks it needs: one transaction.
    ///
    /// The batch is to be given to [`Self::commit`] or [`Self::fail`] before the next call, unless it has no
    /// rows.
    ///
    /// # Panics
    /// If the batch before was given to neither.
    pub fn schedule(&mut self, batch: &mut Batch) {
        assert!(self.in_flight.is_empty(), "a batch is committed or failed before the next");
        batch.clear();
        let mut budget = Budget { tokens: self.config.batch_tokens_max, scores: SCORED_TOKENS_MAX };
        self.schedule_decodes(batch, &mut budget);
        if !batch.rows.is_empty() {
            let decodes = self.config.batch_tokens_max - budget.tokens;
            budget.tokens = budget.tokens.min(self.chunk_budget(decodes));
        }
        self.schedule_chunks(batch, &mut budget);
        // What was just preempted finds no room: it needs more than it gave back.
        self.admit(batch, &mut budget);
    }

    /// Tokens of prompts beside `decodes`. Together they are as many from step to step, since a model that is
    /// given another number of tokens each time prepares for each; but many decodes do not stop the prompts.
    ///
    /// Where several prompts wait for each sequence that decodes, the step is so many times as large: it holds
    /// few up for the sake of many. And so it is where many prompts wait, of which each would wait longer if the
    /// decodes were computed again beside every small part of the first.
    fn chunk_budget(&self, decodes: u32) -> u32 {
        let prompts = (self.running.len() + self.waiting.len()) as u32 - decodes;
        let times = (prompts / decodes).max(prompts / PROMPTS_PER_CHUNK).max(1);
        let most = self.config.chunk_tokens_max.saturating_mul(times);
        most.saturating_sub(decodes).max(most.div_ceil(4))
    }

    /// One token for each sequence that lacks one only, the oldest first.
    fn schedule_decodes(&mut self, batch: &mut Batch, budget: &mut Budget) {
        let mut position = 0;
        while position < self.running.len() && budget.tokens > 0 {
            let slot = self.running[position].slot;
            if self.sequences.get(slot).uncomputed() == 1 && self.make_room(position, batch) {
                self.push_row(slot, batch, budget);
            }
            position += 1;
        }
    }

    /// The prompts that have begun, the oldest first. Their blocks were taken when they were admitted.
    fn schedule_chunks(&mut self, batch: &mut Batch, budget: &mut Budget) {
        for position in 0..self.running.len() {
            if budget.tokens == 0 {
                return;
            }
            let slot = self.running[position].slot;
            let sequence = self.sequences.get(slot);
            if sequence.row.is_none() && sequence.next_tokens(budget.scores) > 0 {
                self.push_row(slot, batch, budget);
            }
        }
    }

    fn push_row(&mut self, slot: u32, batch: &mut Batch, budget: &mut Budget) {
        let sequence = self.sequences.get_mut(slot);
        let count = sequence.next_tokens(budget.scores).min(budget.tokens);
        budget.tokens -= count;
        sequence.row = Some(self.in_flight.len() as u32);
        sequence.push_row(count, self.config.block_tokens, batch);
        budget.scores -= batch.rows.last().map_or(0, |row| row.scored.len() as u32);
        self.in_flight.push(Some(slot));
    }

    /// Sees to it that the running sequence at `position` may write its next token, preempting from the
    /// youngest on, in the end the sequence itself: then it is false.
    fn make_room(&mut self, position: usize, batch: &mut Batch) -> bool {
        let slot = self.running[position].slot;
        loop {
            let sequence = self.sequences.get_mut(slot);
            let index = (sequence.computed / self.config.block_tokens) as usize;
            match sequence.table.get(index).copied() {
                None => {
                    if let Some(block) = self.pool.allocate() {
                        sequence.table.push(block);
                        return true;
                    }
                }
                Some(shared) if self.pool.is_shared(shared) => {
                    if let Some(block) = self.pool.allocate() {
                        batch.copies.push(BlockCopy { from: shared, to: block });
                        sequence.table[index] = block;
                        self.pool.release(shared);
                        return true;
                    }
                }
                Some(_) => return true,
            }
            self.preempt_youngest();
            if self.running.len() == position {
                return false;
            }
        }
    }

    /// Sends the youngest running sequence back to wait. Its full blocks stay in the prefix cache as long as
    /// nobody needs the room.
    fn preempt_youngest(&mut self) {
        let entry = self.running.pop().expect("invariant: who needs room runs");
        self.release_blocks(entry.slot);
        let sequence = self.sequences.get(entry.slot);
        assert!(sequence.row.is_none(), "invariant: rows are given to the older first");
        self.running_sequences -= sequence.group();
        self.waiting_sequences += sequence.group();
        self.preemptions_total += 1;
        let at = self.waiting.partition_point(|other| other.rank < entry.rank);
        self.waiting.insert(at, entry);
    }

    /// Lets waiting requests start, in order, as far as there is room.
    fn admit(&mut self, batch: &mut Batch, budget: &mut Budget) {
        let mut position = 0;
        for _ in 0..LOOKAHEAD_MAX {
            if budget.tokens == 0 || position == self.waiting.len() {
                return;
            }
            // As many logits are computed as may be. Others do not wait for that.
            if self.sequences.get(self.waiting[position].slot).next_tokens(budget.scores) == 0 {
                position += 1;
                continue;
            }
            match self.admit_one(position, batch) {
                Admission::Admitted(slot) => self.push_row(slot, batch, budget),
                Admission::WaitsForPrefix => position += 1,
                Admission::WaitsForRoom => return,
            }
        }
    }

    fn admit_one(&mut self, position: usize, batch: &mut Batch) -> Admission {
        let Entry { rank, slot } = self.waiting[position];
        let sequence = self.sequences.get(slot);
        let group = sequence.group();
        if self.running_sequences + group > self.config.sequences_max {
            return Admission::WaitsForRoom;
        }
        let estimate = self.estimate_cached(sequence);
        if let Some(&next) = sequence.hashes.get(estimate.cached)
            && sequence.unscored.is_empty()
            && self.claims.contains(next)
        {
            return Admission::WaitsForPrefix;
        }
        if !self.has_room(sequence, estimate) {
            return Admission::WaitsForRoom;
        }
        if !self.take_blocks(slot, batch) {
            return Admission::WaitsForRoom;
        }
        self.waiting.remove(position);
        self.waiting_sequences -= group;
        self.running_sequences += group;
        let at = self.running.partition_point(|other| other.rank < rank);
        self.running.insert(at, Entry { rank, slot });
        Admission::Admitted(slot)
    }

    /// How many leading blocks of a waiting sequence the cache has, by their hashes: a cached block's parent
    /// is cached, and a held block's parent is held. Off at worst where hashes collide.
    fn estimate_cached(&self, sequence: &Sequence) -> Estimate {
        let most = (sequence.cacheable() / self.config.block_tokens) as usize;
        let cached = sequence.hashes.partition_point(|&hash| self.pool.may_have(hash)).min(most);
        let held = sequence.hashes[..cached].partition_point(|&hash| self.pool.may_hold(hash));
        Estimate { cached, held }
    }

    /// Whether a waiting sequence finds the blocks it lacks, and some to grow into. When nothing runs it
    /// only has to find the former, and does: it fits the cache.
    fn has_room(&self, sequence: &Sequence, estimate: Estimate) -> bool {
        if self.running.is_empty() {
            return true;
        }
        let Estimate { cached, held } = estimate;
        let kept = cached.min((sequence.tokens_len() as usize - 1) / self.config.block_tokens as usize);
        let lacking = sequence.tokens_len().div_ceil(self.config.block_tokens) - kept as u32;
        let evictable = kept.saturating_sub(held) as u32;
        let growth = sequence.group() + self.watermark_blocks;
        lacking + evictable + growth <= self.pool.blocks_available()
    }

    /// Takes all blocks that the tokens of a waiting sequence need, those in the prefix cache first, and
    /// announces the others. False, and nothing is taken, if there is no room after all.
    fn take_blocks(&mut self, slot: u32, batch: &mut Batch) -> bool {
        let block_tokens = self.config.block_tokens;
        let (cached, last) = self.take_cached(slot);
        let sequence = self.sequences.get(slot);
        if !self.has_room(sequence, Estimate { cached, held: cached }) {
            self.release_blocks(slot);
            return false;
        }
        let sequence = self.sequences.get_mut(slot);
        sequence.reserve(block_tokens);
        let len = sequence.tokens_len();
        sequence.registered = sequence.table.len() as u32;
        sequence.computed = (cached as u32 * block_tokens).min(len - 1);
        self.uncomputed_tokens -= u64::from(sequence.computed);
        if let Some(last) = last {
            let block = self.pool.allocate().expect("invariant: there is room");
            // When nothing else was left it is the very block, and nobody's any more.
            if block != last {
                batch.copies.push(BlockCopy { from: last, to: block });
            }
            sequence.table.push(block);
        }
        while sequence.table.len() < len.div_ceil(block_tokens) as usize {
            sequence.table.push(self.pool.allocate().expect("invariant: there is room"));
        }
        sequence.cached_tokens.get_or_insert(sequence.computed);
        sequence.claims = sequence.registered..sequence.hashes.len() as u32;
        for index in sequence.claims.clone() {
            self.claims.claim(sequence.hashes[index as usize], slot);
        }
        true
    }

    /// Takes the leading blocks of a waiting sequence that are in the prefix cache, and returns how many there
    /// are. The last token is to be computed in any case, because something is sampled from it: if its block is
    /// cached too, that one is not taken but returned, to be copied. One token costs less than a block of them.
    fn take_cached(&mut self, slot: u32) -> (usize, Option<BlockId>) {
        let block_tokens = self.config.block_tokens as usize;
        let sequence = self.sequences.get_mut(slot);
        let most = sequence.cacheable() as usize / block_tokens;
        let mut parent = Serial::ROOT;
        for (&hash, tokens) in
            sequence.hashes.iter().zip(sequence.tokens.chunks_exact(block_tokens)).take(most)
        {
            let Some(block) = self.pool.find(Content { hash, parent, tokens }) else { break };
            if (sequence.table.len() + 1) * block_tokens == sequence.tokens.len() {
                return (sequence.table.len() + 1, Some(block));
            }
            self.pool.share(block);
            sequence.table.push(block);
            parent = self.pool.serial(block).expect("invariant: a found block is cached");
        }
        (sequence.table.len(), None)
    }
}

/// What the cache is thought to have of a sequence, in leading full blocks.
#[derive(Clone, Copy)]
struct Estimate {
    /// In the prefix cache.
    cached: usize,
    /// Of those, held by others.
    held: usize,
}

//! What the next step computes: decodes, then chunks of prompts, then whoever may start.
//!
//! What stands in a queue is looked at in groups: the sequences of a request that go in step, any other by itself.

use std::ops::Range;

use super::{Entry, Scheduler};
use crate::block_pool::{Content, Serial};
use crate::pace::Work;
use crate::sequence::{Sequence, Wish};
use crate::{Batch, BlockCopy, BlockId};

/// Waiting requests that are looked at in a step: those behind them wait for another step, so that a long
/// queue does not cost time in each.
const LOOKAHEAD_MAX: usize = 128;

/// For each so many prompts that are not computed, a step with decodes in it may be as large as a chunk once more.
const PROMPTS_PER_CHUNK: u32 = 8;

/// From so many prompts on that are not computed, a step with decodes in it may be two chunks; of two prompts, from so many decodes
/// on: these take as long as a chunk then, and would be computed again beside each.
const PROMPTS_FOR_TWO: u32 = 8;
const DECODES_FOR_TWO: u32 = 16;

/// Number of prompt tokens in a step whose log probabilities are reported. The logits of each take as much memory as
/// the vocabulary and about as much time as a layer or two.
///
/// Beyond it: the rest of the prompts is computed in the following steps.
pub const SCORED_TOKENS_MAX: u32 = 128;

/// The most draft tokens in one step. The logits of every draft token are computed, so each takes as much memory as the
/// vocabulary: without a limit of its own, a step of drafts would need gigabytes of logits.
pub const DRAFT_TOKENS_MAX: u32 = 256;

/// Tokens of prompts that a step beside decodes computes in any case, however long it takes, and a number whose
/// multiples steps of a limited time are: a model that is given another number of tokens each time prepares for each.
pub const PROMPT_TOKENS_MIN: u32 = 16;

/// What a step may still hold.
struct Budget {
    tokens: u32,
    /// Tokens of prompts whose logits are wanted.
    scores: u32,
    /// Draft tokens, whose logits are wanted too.
    drafts: u32,
}

/// What became of a waiting request that was looked at.
enum Admission {
    Admitted(Range<usize>),
    /// Its next block is being computed or read back, or it is suspended: others may go ahead.
    WaitsForOthers,
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
        let mut budget = Budget {
            tokens: self.config.batch_tokens_max,
            scores: SCORED_TOKENS_MAX,
            drafts: DRAFT_TOKENS_MAX,
        };
        self.schedule_decodes(batch, &mut budget);
        if !batch.rows.is_empty() {
            budget.tokens = budget.tokens.min(self.chunk_budget(batch));
        }
        self.schedule_chunks(batch, &mut budget);
        // What was just preempted finds no room: it needs more than it gave back.
        self.admit(batch, &mut budget);
    }

    /// Tokens of prompts beside the decodes of `batch`.
    fn chunk_budget(&self, batch: &Batch) -> u32 {
        let tokens = batch.tokens.len() as u32;
        let mut begun = self.running.iter().map(|entry| self.sequences.get(entry.slot));
        let prompt = begun.find(|prompt| prompt.row.is_none() && !prompt.is_suspended);
        let past = prompt.map_or(0, |prompt| prompt.computed);
        let within = |time_max| self.pace.tokens_within(time_max, Work::of(batch), past);
        match self.config.step_time_max.map(within) {
            Some(Some(fit)) => in_whole_grains(tokens, fit),
            // How long anything takes is not known yet.
            Some(None) => beside(tokens, self.config.chunk_tokens_max),
            None => self.chunk_by_prompts(batch.rows.len() as u32, tokens, past),
        }
    }

    /// Tokens of prompts beside the `tokens` of so many `decodes`.
    ///
    /// Where several prompts wait for each sequence that decodes, the step is so many times as large: it holds
    /// few up for the sake of many. And so it is where many prompts wait, of which each would wait longer if the
    /// decodes were computed again beside every small part of the first.
    ///
    /// A single chunk takes as long at the end of a long prompt as soon after its beginning: from then on it is the smaller
    /// the more tokens it attends to, but a quarter at least.
    fn chunk_by_prompts(&self, decodes: u32, tokens: u32, past: u32) -> u32 {
        let prompts = (self.running.len() + self.waiting.len()) as u32 - decodes - self.suspended_sequences;
        let is_two = prompts >= if decodes < DECODES_FOR_TWO { PROMPTS_FOR_TWO } else { 2 };
        let times = (prompts / decodes).max(prompts / PROMPTS_PER_CHUNK).max(1 + u32::from(is_two));
        let most = beside(tokens, self.config.chunk_tokens_max.saturating_mul(times));
        match self.pace.tokens_as_even(most, past) {
            Some(fit) if times == 1 && fit < most => in_whole_grains(tokens, fit.max(most / 4)).min(most),
            _ => most,
        }
    }

    /// One token for each sequence that lacks one only, the oldest first.
    fn schedule_decodes(&mut self, batch: &mut Batch, budget: &mut Budget) {
        let mut position = 0;
        while position < self.running.len() && budget.tokens > 0 {
            let group = position..position + self.group_len(self.running[position..].iter());
            position = group.end;
            if self.are_due(group.clone(), budget) && self.make_room_for(group.clone(), batch) {
                for entry in group {
                    let drafts = self.take_drafts(entry, budget);
                    self.push_row(self.running[entry].slot, (1, drafts), batch, budget);
                }
            }
        }
    }

    /// Drafts that the running sequence at `position` may have beside its next token: blocks and budget that nobody else
    /// needs.
    fn take_drafts(&mut self, position: usize, budget: &Budget) -> u32 {
        let others = (self.running.len() - position) as u32;
        let sequence = self.sequences.get_mut(self.running[position].slot);
        let wanted = std::mem::take(&mut sequence.drafts);
        let spare = budget.tokens.saturating_sub(others).min(budget.drafts);
        let wanted = wanted.min(sequence.drafts_max()).min(spare);
        if wanted == 0 || sequence.in_step || !sequence.siblings.is_empty() {
            return 0;
        }
        let end = sequence.tokens_len() - sequence.left + wanted;
        while sequence.table.len() < end.div_ceil(self.config.block_tokens) as usize
            && self.pool.blocks_available() > self.watermark_blocks
        {
            sequence.table.extend(self.pool.allocate());
        }
        let room =
            sequence.table.len() as u32 * self.config.block_tokens + sequence.left - sequence.tokens_len();
        wanted.min(room)
    }

    /// Entries of the group at the beginning of `entries`.
    fn group_len<'a>(&self, mut entries: impl Iterator<Item = &'a Entry>) -> usize {
        let Some(first) = entries.next() else { return 0 };
        let is_alone = !self.sequences.get(first.slot).in_step;
        if is_alone {
            1
        } else {
            1 + entries.take_while(|entry| entry.rank.arrival == first.rank.arrival).count()
        }
    }

    /// Whether all sequences of a running group lack one token only, and a batch has room for it.
    fn are_due(&self, group: Range<usize>, budget: &Budget) -> bool {
        group.len() <= budget.tokens as usize
            && self.running[group].iter().all(|entry| self.sequences.get(entry.slot).uncomputed() == 1)
    }

    /// The prompts that have begun, the oldest first. Their blocks were taken when they were admitted.
    fn schedule_chunks(&mut self, batch: &mut Batch, budget: &mut Budget) {
        for position in 0..self.running.len() {
            if budget.tokens == 0 {
                return;
            }
            let slot = self.running[position].slot;
            if self.sequences.get(slot).row.is_none() {
                self.push_chunk(slot, batch, budget);
            }
        }
    }

    /// As many of a sequence's next tokens as may be, which can be none.
    fn push_chunk(&mut self, slot: u32, batch: &mut Batch, budget: &mut Budget) {
        let count = self.sequences.get(slot).chunk_tokens(budget.scores).min(budget.tokens);
        if count > 0 {
            self.push_row(slot, (count, 0), batch, budget);
        }
    }

    /// `count` of a sequence's next tokens, and drafts.
    fn push_row(&mut self, slot: u32, (count, drafts): (u32, u32), batch: &mut Batch, budget: &mut Budget) {
        let sequence = self.sequences.get_mut(slot);
        sequence.drafts = 0;
        budget.tokens -= count + drafts;
        budget.drafts -= drafts;
        sequence.row = Some(self.in_flight.len() as u32);
        sequence.push_row(count, drafts, self.config.block_tokens, batch);
        budget.scores -= batch.rows.last().map_or(0, |row| row.scored.len() as u32);
        self.in_flight.push(Some(slot));
    }

    /// As [`Self::make_room`] for all of a group, or none.
    fn make_room_for(&mut self, mut group: Range<usize>, batch: &mut Batch) -> bool {
        let copies = batch.copies.len();
        let is_made = group.all(|position| self.make_room(position, batch));
        if !is_made {
            // What the first of them took is given back.
            batch.copies.truncate(copies);
        }
        is_made
    }

    /// Sees to it that the running sequence at `position` may write its next token, preempting from the
    /// youngest on, in the end the sequence itself: then it is false.
    fn make_room(&mut self, position: usize, batch: &mut Batch) -> bool {
        let slot = self.running[position].slot;
        loop {
            let sequence = self.sequences.get_mut(slot);
            let index = (sequence.cached() / self.config.block_tokens) as usize;
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
            if self.end_youngest_reading() {
                continue;
            }
            self.preempt_youngest();
            if self.running.len() <= position {
                return false;
            }
        }
    }

    /// Sends the youngest running group back to wait. Its full blocks stay in the prefix cache as long as nobody needs
    /// the room.
    fn preempt_youngest(&mut self) {
        let count = self.group_len(self.running.iter().rev());
        for _ in 0..count {
            let entry = self.running.pop().expect("invariant: a group is where it was counted");
            self.preempt(entry);
        }
    }

    fn preempt(&mut self, entry: Entry) {
        self.release_blocks(entry.slot);
        let sequence = self.sequences.get(entry.slot);
        assert!(sequence.row.is_none(), "invariant: rows are given to the older first");
        self.running_sequences -= sequence.group();
        self.waiting_sequences += sequence.group();
        self.preemptions_total += 1;
        self.enqueue(entry);
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
            let group = position..position + self.group_len(self.waiting.range(position..));
            let after = group.end;
            match self.admit_group(group, batch) {
                Admission::Admitted(group) => self.push_admitted(group, batch, budget),
                Admission::WaitsForOthers => position = after,
                Admission::WaitsForRoom => return,
            }
        }
    }

    /// The first rows of a group.
    fn push_admitted(&mut self, group: Range<usize>, batch: &mut Batch, budget: &mut Budget) {
        if self.are_due(group.clone(), budget) {
            group.for_each(|position| self.push_row(self.running[position].slot, (1, 0), batch, budget));
        } else {
            group.for_each(|position| self.push_chunk(self.running[position].slot, batch, budget));
        }
    }

    /// Lets a group that waits start, all of it or nothing. Answers where it is among those that run.
    fn admit_group(&mut self, group: Range<usize>, batch: &mut Batch) -> Admission {
        let sequences = || self.waiting.range(group.clone()).map(|entry| self.sequences.get(entry.slot));
        let count: u32 = sequences().map(Sequence::group).sum();
        if self.running_sequences + count > self.config.sequences_max {
            return Admission::WaitsForRoom;
        }
        if sequences().any(|sequence| sequence.wish == Wish::Granted || sequence.is_suspended) {
            return Admission::WaitsForOthers;
        }
        let mut demand = 0;
        for sequence in sequences() {
            let estimate = self.estimate_cached(sequence);
            if let Some(&next) = sequence.hashes.get(estimate.cached)
                && sequence.unscored.is_empty()
                && !sequence.awaits_others()
                && self.claims.contains(next)
            {
                return Admission::WaitsForOthers;
            }
            demand += self.demand(sequence, estimate);
        }
        if !self.has_room(demand) {
            return Admission::WaitsForRoom;
        }
        if group.len() == 1 && self.begin_reading(self.waiting[group.start].slot) {
            return Admission::WaitsForOthers;
        }
        if !self.take_blocks(group.clone(), batch) {
            return Admission::WaitsForRoom;
        }
        self.waiting_sequences -= count;
        self.running_sequences += count;
        let rank = self.waiting[group.start].rank;
        self.fairness.begin(rank.start);
        let at = self.running.partition_point(|other| other.rank < rank);
        for place in at..at + group.len() {
            let entry = self.waiting.remove(group.start).expect("invariant: a group is where it was counted");
            self.running.insert(place, entry);
        }
        Admission::Admitted(at..at + group.len())
    }

    /// How many leading blocks of a waiting sequence the cache has, by their hashes: a cached block's parent
    /// is cached, and a held block's parent is held. Off at worst where hashes collide.
    fn estimate_cached(&self, sequence: &Sequence) -> Estimate {
        let most = (sequence.cacheable() / self.config.block_tokens) as usize;
        let cached = sequence.hashes.partition_point(|&hash| self.pool.may_have(hash)).min(most);
        let held = sequence.hashes[..cached].partition_point(|&hash| self.pool.may_hold(hash));
        Estimate { cached, held }
    }

    /// Blocks that a waiting sequence needs of those that nobody holds: those it lacks, and some to grow into.
    fn demand(&self, sequence: &Sequence, estimate: Estimate) -> u32 {
        let Estimate { cached, held } = estimate;
        let kept = cached.min((sequence.tokens_len() as usize - 1) / self.config.block_tokens as usize);
        let lacking = sequence.tokens_len().div_ceil(self.config.block_tokens) - kept as u32;
        let evictable = kept.saturating_sub(held) as u32;
        lacking + evictable + sequence.group()
    }

    /// Whether so many blocks are there for a waiting group. When nobody holds any they are: it fits the cache.
    fn has_room(&self, demand: u32) -> bool {
        let readings = self.readings.as_ref().filter(|readings| !readings.under_way.is_empty());
        let coming = readings.map_or(0, |readings| readings.outstanding());
        self.running.is_empty() && readings.is_none()
            || demand + coming + self.watermark_blocks <= self.pool.blocks_available()
    }

    /// Takes all blocks that the tokens of a waiting group need, those in the prefix cache first. False, and nothing is
    /// taken, if there is no room after all.
    fn take_blocks(&mut self, group: Range<usize>, batch: &mut Batch) -> bool {
        let mut demand = 0;
        let mut copied = None;
        for position in group.clone() {
            let slot = self.waiting[position].slot;
            let (cached, last) = self.take_cached(slot);
            copied = last;
            demand += self.demand(self.sequences.get(slot), Estimate { cached, held: cached });
        }
        let has_room = self.has_room(demand);
        for position in group {
            let slot = self.waiting[position].slot;
            if has_room {
                self.take_others(slot, copied.take(), batch);
            } else {
                self.release_blocks(slot);
            }
        }
        has_room
    }

    /// Takes the blocks of a waiting sequence that are not in the prefix cache, and announces them. `last` is the block
    /// of its last token, if that one is.
    fn take_others(&mut self, slot: u32, last: Option<BlockId>, batch: &mut Batch) {
        let block_tokens = self.config.block_tokens;
        let sequence = self.sequences.get_mut(slot);
        sequence.reserve(block_tokens);
        let len = sequence.tokens_len();
        sequence.registered = sequence.table.len() as u32;
        let cached = sequence.registered + u32::from(last.is_some());
        sequence.computed = (cached * block_tokens).min(len - 1);
        self.uncomputed_tokens -= u64::from(sequence.computed);
        // What comes back after a preemption finds what it computed itself, which nobody else need ever want.
        if sequence.cached_tokens.is_none() {
            self.pool.found(sequence.table.iter().copied().chain(last));
        }
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
    }

    /// Takes the leading blocks of a waiting sequence that are in the prefix cache, and returns how many there
    /// are. The last token is to be computed in any case, because something is sampled from it: if its block is
    /// cached too, that one is not taken but returned, to be copied. One token costs less than a block of them.
    fn take_cached(&mut self, slot: u32) -> (usize, Option<BlockId>) {
        let block_tokens = self.config.block_tokens as usize;
        let sequence = self.sequences.get_mut(slot);
        let most = sequence.cacheable() as usize / block_tokens;
        let mut parent = Serial::root(sequence.adapter);
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

/// Tokens of prompts beside so many others, `most` in all. Together they are as many from step to step, since a model
/// that is given another number of tokens each time prepares for each; but many decodes do not stop the prompts.
fn beside(tokens: u32, most: u32) -> u32 {
    most.saturating_sub(tokens).max(most.div_ceil(4))
}

/// Tokens of prompts beside `tokens` others, of which `fit`: less, so that all are a multiple of the least.
fn in_whole_grains(tokens: u32, fit: u32) -> u32 {
    let all = tokens.saturating_add(fit) / PROMPT_TOKENS_MIN * PROMPT_TOKENS_MIN;
    all.saturating_sub(tokens).max(PROMPT_TOKENS_MIN)
}

/// What the cache is thought to have of a sequence, in leading full blocks.
#[derive(Clone, Copy)]
struct Estimate {
    /// In the prefix cache.
    cached: usize,
    /// Of those, held by others.
    held: usize,
}

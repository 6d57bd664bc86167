//! Decides what the next step computes: decodes first, then chunks of prompts that have begun, then the tokens of newly
//! admitted requests.
//!
//! The queues are processed in groups: the forked sequences of a lockstep request form one group, and any other
//! sequence is a group by itself.

use std::ops::Range;
use std::time::Duration;

use super::{QueueEntry, Scheduler};
use crate::batch::{Batch, BlockCopy};
use crate::block::BlockId;
use crate::config::{DRAFT_TOKENS_MAX, PROMPT_TOKENS_MIN, SCORED_TOKENS_MAX};
use crate::sequence::{RestoreState, Sequence};
use crate::step_shares::LEAD_STEPS_MAX;
use crate::step_time::StepWork;

/// While several tenants are present, further requests of a tenant are admitted only if they leave
/// 1/`RESERVED_FOR_OTHERS` of the batch and of the cache to the other tenants.
const RESERVED_FOR_OTHERS: u32 = 8;

/// Maximum number of draft tokens in a step while several tenants are present: the draft tokens of one tenant delay the
/// others, as prompts do.
const SHARED_DRAFT_TOKENS_MAX: u32 = 64;

/// Maximum number of waiting groups that one step tries to admit. Without this limit, a long queue would slow down
/// every step. Groups that are skipped without an attempt do not count toward the limit.
const ADMISSION_ATTEMPTS_MAX: usize = 128;

/// Maximum number of waiting sequences that one step skips before it stops admitting sequences.
const ADMISSION_SKIPS_MAX: usize = 16_384;

/// A step with decodes may have the size of n chunks if there are n times this many uncomputed prompts.
const PROMPTS_PER_CHUNK: u32 = 8;

/// With at least this many uncomputed prompts, a step with decodes may have the size of two chunks. With at least
/// `DECODES_FOR_TWO_CHUNKS` decodes, two prompts suffice: the decodes of a step then take as long as a chunk, and
/// smaller steps would spend this time on decodes for each chunk.
const PROMPTS_FOR_TWO_CHUNKS: u32 = 8;
const DECODES_FOR_TWO_CHUNKS: u32 = 16;
/// With `max_itl`, the size of a step is `max_chunk_tokens` divided by this number until its time can be predicted.
const UNKNOWN_TIME_DIVISOR: u32 = 4;

/// The work that can still be added to the step.
struct Budget {
    tokens: u32,
    scored_tokens: u32,
    draft_tokens: u32,
    /// Whether no prompt tokens have been added to the step.
    is_without_prompts: bool,
}

/// The result of an attempt to admit a group.
enum Admission {
    /// The group is now at these positions of the running queue.
    Admitted(Range<usize>),
    /// The next block of the group is being computed or restored, or the group is suspended. Later groups may be
    /// admitted.
    Deferred,
    /// The images of the group are being encoded, or there is no room for them. Later groups may be admitted.
    AwaitsImages,
    /// The tenant would exceed its share of the batch or of the cache with this group. Groups of other tenants may be
    /// admitted.
    ShareExceeded,
    /// There is no room. Later groups must not be admitted.
    NoRoom,
}

/// The numbers of leading full blocks of a sequence that are in the cache, estimated from the hashes of the blocks.
#[derive(Clone, Copy)]
struct CachedPrefix {
    /// Number of leading blocks in the prefix cache.
    cached: usize,
    /// Number of these blocks that sequences or restores hold.
    active: usize,
}

impl Scheduler {
    /// Decides what the next step computes and allocates the blocks that the step needs, in one transaction.
    ///
    /// Unless the batch is empty, it must be passed to [`Self::commit`] or [`Self::fail`] before the next call.
    ///
    /// # Panics
    /// Panics if a batch is in flight.
    pub fn schedule(&mut self, batch: &mut Batch) {
        assert!(self.in_flight.is_empty(), "a batch must be committed or failed before the next");
        batch.clear();
        self.shares.begin_step(self.step_time.overhead());
        self.fill(batch);
        // The tenants that are not paused cannot use the step, because their sequences wait or are suspended. The
        // paused tenants use it instead.
        if batch.sequences.is_empty() && self.shares.resume_all() {
            self.fill(batch);
            self.had_room = true;
        }
        self.request_images();
    }

    /// Fills an empty batch with the work of all tenants that are not paused.
    fn fill(&mut self, batch: &mut Batch) {
        let mut budget = Budget {
            tokens: self.config.max_num_batched_tokens,
            scored_tokens: SCORED_TOKENS_MAX,
            draft_tokens: if self.shares.is_shared() { SHARED_DRAFT_TOKENS_MAX } else { DRAFT_TOKENS_MAX },
            is_without_prompts: true,
        };
        self.schedule_decodes(batch, &mut budget);
        budget.tokens = budget.tokens.min(self.prompt_budget(batch));
        self.schedule_chunks(batch, &mut budget);
        // A sequence that was just preempted is not admitted: it needs more blocks than it released.
        self.admit(batch, &mut budget);
        self.had_room = budget.tokens > 0;
    }

    /// The number of prompt tokens that may be added to the decodes of `batch`.
    fn prompt_budget(&self, batch: &Batch) -> u32 {
        let decode_tokens = batch.tokens.len() as u32;
        let mut running = self.running.iter();
        let prompt = running.find(|entry| {
            let prompt = self.sequences.get(entry.slot);
            prompt.batch_index.is_none() && !prompt.is_suspended && !self.pauses(entry)
        });
        let prompt = prompt.map(|entry| self.sequences.get(entry.slot));
        let computed_tokens = prompt.map_or(0, |prompt| prompt.residency.computed_tokens);
        let work = StepWork::of(batch);
        if self.shares.is_shared() {
            return self.shared_prompt_budget(decode_tokens, work, computed_tokens);
        }
        if batch.sequences.is_empty() {
            return self.config.max_num_batched_tokens;
        }
        let Some(max_itl) = self.config.max_itl else {
            let decodes = batch.sequences.len() as u32;
            return self.prompt_budget_by_chunks(decodes, decode_tokens, computed_tokens);
        };
        match self.step_time.tokens_within(max_itl, work, computed_tokens) {
            Some(prompt_tokens) => round_step_size(decode_tokens, prompt_tokens),
            None => self.prompt_budget_of_unknown_time(decode_tokens),
        }
    }

    /// With `max_itl`, the number of prompt tokens that may be added to a step with `decode_tokens` decode tokens while
    /// too few steps have been recorded for a prediction.
    fn prompt_budget_of_unknown_time(&self, decode_tokens: u32) -> u32 {
        // Round up: with a step size of 0, prompts would not progress.
        remaining_step_size(decode_tokens, self.config.max_chunk_tokens.div_ceil(UNKNOWN_TIME_DIVISOR))
    }

    /// The number of prompt tokens that may be added to a step with `decode_tokens` decode tokens while several tenants
    /// are present. The number is limited even without decodes, since a request may arrive during the step. The prompts
    /// may lengthen the step by at most the time by which one tenant may be ahead of another ([`LEAD_STEPS_MAX`]).
    /// `max_itl` also limits the duration of the step. A minimum number of prompt tokens is allowed in any case.
    fn shared_prompt_budget(&self, decode_tokens: u32, work: StepWork, computed_tokens: u32) -> u32 {
        let chunk = remaining_step_size(decode_tokens, self.config.max_chunk_tokens);
        let time_max = self.step_time.overhead().map(|overhead| {
            let time_max = self.step_time.cost(work) + (1.0 + LEAD_STEPS_MAX) * overhead;
            let time_max = Duration::from_secs_f64(time_max);
            self.config.max_itl.map_or(time_max, |max_itl| time_max.min(max_itl))
        });
        let fits = time_max.and_then(|time| self.step_time.tokens_within(time, work, computed_tokens));
        match fits {
            Some(tokens) => round_step_size(decode_tokens, tokens).min(chunk),
            None if self.config.max_itl.is_some() => self.prompt_budget_of_unknown_time(decode_tokens),
            None => chunk,
        }
    }

    /// The number of prompt tokens that may be added to a step with `decodes` decoding sequences and their
    /// `decode_tokens` tokens.
    ///
    /// If the number of waiting prompts is n times the number of decoding sequences, the step is n times as large: it
    /// delays few sequences for the benefit of many. The step is also larger if many prompts wait: with small chunks,
    /// the first prompt would need more steps, each of which also computes the decodes, and the other prompts would
    /// wait longer.
    ///
    /// The chunks of a single long prompt should take equally long. Therefore, the more tokens a chunk attends to, the
    /// smaller it is, down to a quarter of the normal size.
    fn prompt_budget_by_chunks(&self, decodes: u32, decode_tokens: u32, computed_tokens: u32) -> u32 {
        let prompts = (self.running.len() + self.waiting.len()) as u32 - decodes - self.suspended_sequences;
        let prompts_for_two = if decodes < DECODES_FOR_TWO_CHUNKS { PROMPTS_FOR_TWO_CHUNKS } else { 2 };
        let chunks = (prompts / decodes)
            .max(prompts / PROMPTS_PER_CHUNK)
            .max(1 + u32::from(prompts >= prompts_for_two));
        let step_size = self.config.max_chunk_tokens.saturating_mul(chunks);
        let prompt_tokens = remaining_step_size(decode_tokens, step_size);
        match self.step_time.equal_time_tokens(prompt_tokens, computed_tokens) {
            Some(equal) if chunks == 1 && equal < prompt_tokens => {
                round_step_size(decode_tokens, equal.max(prompt_tokens / 4)).min(prompt_tokens)
            }
            _ => prompt_tokens,
        }
    }

    /// Schedules one token for each sequence that has only its latest token left to compute, oldest first.
    fn schedule_decodes(&mut self, batch: &mut Batch, budget: &mut Budget) {
        let mut position = 0;
        while position < self.running.len() && budget.tokens > 0 {
            let group = position..position + self.group_len(self.running[position..].iter());
            position = group.end;
            if self.is_paused(&self.running[group.start]) {
                continue;
            }
            if self.can_decode(group.clone(), budget)
                && !self.defer_decode(group.start)
                && self.allocate_group_slots(group.clone(), batch)
            {
                for position in group {
                    let drafts = self.allocate_drafts(position, budget);
                    self.schedule_tokens(self.running[position].slot, 1, drafts, batch, budget);
                }
            }
        }
    }

    /// Allocates blocks for the draft tokens of the running sequence at `position`, without using the blocks and the
    /// budget that the later running sequences need for their next tokens. Returns the number of draft tokens for which
    /// there is room.
    fn allocate_drafts(&mut self, position: usize, budget: &Budget) -> u32 {
        let later_sequences = (self.running.len() - position - 1) as u32;
        let sequence = self.sequences.get_mut(self.running[position].slot);
        let requested = std::mem::take(&mut sequence.num_draft_tokens);
        let spare = budget.tokens.saturating_sub(1 + later_sequences).min(budget.draft_tokens);
        let drafts = requested.min(sequence.max_draft_tokens()).min(spare);
        if drafts == 0 || sequence.group.lockstep || !sequence.siblings.is_empty() {
            return 0;
        }
        let num_tokens = sequence.num_tokens();
        let residency = &mut sequence.residency;
        let block_tokens = self.cache.block_tokens;
        let end = num_tokens - residency.evicted_tokens + drafts;
        // In this step, each later sequence may need a block for its next token.
        let blocks_kept = self.watermark_blocks.max(later_sequences);
        while residency.block_table.len() < end.div_ceil(block_tokens) as usize
            && self.pool.blocks_available() > blocks_kept
        {
            residency.block_table.extend(self.pool.allocate());
        }
        let capacity = residency.block_table.len() as u32 * block_tokens + residency.evicted_tokens;
        drafts.min(capacity - num_tokens)
    }

    /// The length of the group at the start of `entries`.
    fn group_len<'a>(&self, mut entries: impl Iterator<Item = &'a QueueEntry>) -> usize {
        let Some(first) = entries.next() else { return 0 };
        if !self.sequences.get(first.slot).group.lockstep {
            return 1;
        }
        let arrival = first.priority.arrival;
        1 + entries.take_while(|entry| entry.priority.arrival == arrival).count()
    }

    /// Whether each sequence of a running group has only its latest token left to compute and the group fits into the
    /// budget.
    fn can_decode(&self, group: Range<usize>, budget: &Budget) -> bool {
        let lacks_one = |entry: &QueueEntry| self.sequences.get(entry.slot).uncomputed_tokens() == 1;
        group.len() <= budget.tokens as usize && self.running[group].iter().all(lacks_one)
    }

    /// Schedules the next chunks of the prompts that have begun, oldest first. Their blocks were allocated when they
    /// were admitted.
    fn schedule_chunks(&mut self, batch: &mut Batch, budget: &mut Budget) {
        for position in 0..self.running.len() {
            if budget.tokens == 0 {
                return;
            }
            let slot = self.running[position].slot;
            if self.sequences.get(slot).batch_index.is_none() && !self.pauses(&self.running[position]) {
                self.schedule_chunk(slot, batch, budget);
            }
        }
    }

    /// Whether the tenant of a sequence is paused in this step.
    fn is_paused(&self, entry: &QueueEntry) -> bool {
        self.shares.is_paused(self.sequences.get(entry.slot).group.tenant)
    }

    /// Whether the running sequence at `position`, which has only its latest token left to compute, is deferred to a
    /// later step because the other sequences of its tenant use up the tenant's time in this step. Sequences in
    /// lockstep are never deferred, because they must decode together.
    fn defer_decode(&mut self, position: usize) -> bool {
        let QueueEntry { slot, priority, .. } = self.running[position];
        let group = &self.sequences.get(slot).group;
        let overhead = self.step_time.overhead();
        !group.lockstep
            && self.shares.defer_decode(group.tenant, priority, overhead, |work| self.step_time.cost(work))
    }

    /// Whether a sequence takes no part in this step because its tenant is paused, or because the tenant's time is used
    /// for other sequences.
    fn pauses(&self, entry: &QueueEntry) -> bool {
        let sequence = self.sequences.get(entry.slot);
        let is_deferred = sequence.uncomputed_tokens() == 1
            && !sequence.group.lockstep
            && self.shares.is_decode_deferred(sequence.group.tenant, entry.priority);
        is_deferred || self.is_paused(entry)
    }

    /// Schedules as many of a sequence's next tokens as possible, which may be none.
    fn schedule_chunk(&mut self, slot: u32, batch: &mut Batch, budget: &mut Budget) {
        let sequence = self.sequences.get(slot);
        let tokens = sequence.chunk_tokens(budget.scored_tokens).min(budget.tokens);
        let tokens = match sequence.whole_spans(tokens) {
            Some(tokens) => tokens,
            // A span that cannot be divided may exceed the budget, but only if the step contains no prompt tokens yet.
            None if budget.is_without_prompts => sequence.tokens_of_first_span(),
            None => 0,
        };
        if tokens > 0 {
            budget.is_without_prompts = false;
            self.schedule_tokens(slot, tokens, 0, batch, budget);
        }
    }

    /// Adds the next `num_tokens` tokens of a sequence to the batch, followed by draft tokens.
    fn schedule_tokens(
        &mut self,
        slot: u32,
        num_tokens: u32,
        num_draft_tokens: u32,
        batch: &mut Batch,
        budget: &mut Budget,
    ) {
        let sequence = self.sequences.get_mut(slot);
        sequence.num_draft_tokens = 0;
        let computed_tokens = sequence.residency.computed_tokens;
        sequence.batch_index = Some(self.in_flight.len() as u32);
        sequence.add_to_batch(num_tokens, num_draft_tokens, self.cache.block_tokens, batch);
        budget.tokens = budget.tokens.saturating_sub(num_tokens + num_draft_tokens);
        budget.draft_tokens -= num_draft_tokens;
        budget.scored_tokens -= batch.sequences.last().map_or(0, |last| last.scored_tokens.len() as u32);
        self.in_flight.push(Some(slot));
        self.shares.add_work(sequence.group.tenant, num_tokens + num_draft_tokens, computed_tokens);
    }

    /// Calls [`Self::allocate_slot`] for each sequence of a group. Returns false if the group was preempted.
    fn allocate_group_slots(&mut self, mut group: Range<usize>, batch: &mut Batch) -> bool {
        let copies = batch.copies.len();
        let is_allocated = group.all(|position| self.allocate_slot(position, batch));
        if !is_allocated {
            // The group was preempted, which released the blocks of the copies.
            batch.copies.truncate(copies);
        }
        is_allocated
    }

    /// Allocates the block into which the running sequence at `position` writes its next token, if it needs one. While
    /// no block can be allocated, ends the youngest restore or, if there is none, preempts the youngest running group.
    /// Returns false if the sequence itself was preempted.
    fn allocate_slot(&mut self, position: usize, batch: &mut Batch) -> bool {
        let slot = self.running[position].slot;
        loop {
            let residency = &mut self.sequences.get_mut(slot).residency;
            let index = (residency.resident_tokens() / self.cache.block_tokens) as usize;
            match residency.block_table.get(index).copied() {
                None => {
                    if let Some(block) = self.pool.allocate() {
                        residency.block_table.push(block);
                        return true;
                    }
                }
                Some(shared) if self.pool.is_shared(shared) => {
                    if let Some(block) = self.pool.allocate() {
                        batch.copies.push(BlockCopy { from: shared, to: block });
                        residency.block_table[index] = block;
                        self.pool.release(shared);
                        return true;
                    }
                }
                Some(_) => return true,
            }
            if self.end_youngest_restore() {
                continue;
            }
            self.preempt_youngest();
            if self.running.len() <= position {
                return false;
            }
        }
    }

    /// Preempts the youngest running group. Its full blocks remain in the prefix cache until the space is needed.
    fn preempt_youngest(&mut self) {
        let count = self.group_len(self.running.iter().rev());
        for _ in 0..count {
            let entry = self.running.pop().expect("invariant: a group is part of its queue");
            self.preempt(entry);
        }
    }

    fn preempt(&mut self, entry: QueueEntry) {
        self.release_blocks(entry.slot);
        self.expect_images(entry.slot);
        let sequence = self.sequences.get(entry.slot);
        assert!(sequence.batch_index.is_none(), "invariant: older sequences are scheduled first");
        self.running_sequences -= sequence.num_sequences();
        self.waiting_sequences += sequence.num_sequences();
        self.preemptions_total += 1;
        self.enqueue(entry);
    }

    /// Admits waiting groups in order, as long as there is room. Skips groups that wait for something other than room.
    fn admit(&mut self, batch: &mut Batch, budget: &mut Budget) {
        let (mut position, mut attempts) = (0, 0);
        self.images_have_room = true;
        // The tenants whose next group would exceed their share. None of their further groups is admitted in this step,
        // because the requests of a tenant must not overtake each other.
        let mut full_tenants = Vec::new();
        while budget.tokens > 0
            && self.running_sequences < self.config.max_num_seqs
            && attempts < ADMISSION_ATTEMPTS_MAX
            && position < self.waiting.len().min(ADMISSION_SKIPS_MAX)
        {
            let group = position..position + self.group_len(self.waiting.range(position..));
            let next = group.end;
            let waiting = self.sequences.get(self.waiting[position].slot);
            let tenant = waiting.group.tenant;
            let is_excluded = self.shares.is_paused(tenant) || full_tenants.contains(&tenant);
            if is_excluded || !self.can_start(waiting, budget) {
                position = next;
                continue;
            }
            attempts += 1;
            match self.admit_group(group, batch) {
                Admission::Admitted(group) => self.schedule_admitted(group, batch, budget),
                Admission::Deferred => position = next,
                Admission::AwaitsImages => {
                    // The attempt does not count toward the limit if `can_start` skips the group from now on.
                    let waiting = self.sequences.get(self.waiting[position].slot);
                    attempts -= usize::from(self.awaits_images(waiting));
                    position = next;
                }
                Admission::ShareExceeded => full_tenants.push(tenant),
                Admission::NoRoom => return,
            }
        }
    }

    /// Whether a waiting sequence waits only for room, according to inexpensive checks.
    fn can_start(&self, sequence: &Sequence, budget: &Budget) -> bool {
        // A step has a maximum number of scored tokens, which does not affect sequences whose tokens are not scored.
        sequence.next_tokens(budget.scored_tokens) > 0
            && sequence.restore != RestoreState::Restoring
            && !sequence.is_suspended
            && !self.awaits_images(sequence)
    }

    /// Schedules the first tokens of a group that was just admitted.
    fn schedule_admitted(&mut self, group: Range<usize>, batch: &mut Batch, budget: &mut Budget) {
        let can_decode = self.can_decode(group.clone(), budget);
        for position in group {
            let slot = self.running[position].slot;
            if can_decode {
                self.schedule_tokens(slot, 1, 0, batch, budget);
            } else {
                self.schedule_chunk(slot, batch, budget);
            }
        }
    }

    /// Admits all sequences of a waiting group, or none.
    fn admit_group(&mut self, group: Range<usize>, batch: &mut Batch) -> Admission {
        let sequences = || self.waiting.range(group.clone()).map(|entry| self.sequences.get(entry.slot));
        let num_sequences: u32 = sequences().map(Sequence::num_sequences).sum();
        let first = self.sequences.get(self.waiting[group.start].slot);
        let (tenant, has_begun) = (first.group.tenant, first.cached_tokens.is_some());
        if sequences().any(|sequence| sequence.restore == RestoreState::Restoring || sequence.is_suspended) {
            return Admission::Deferred;
        }
        let mut blocks_needed = 0;
        for sequence in sequences() {
            let prefix = self.estimate_cached_prefix(sequence);
            if let Some(&next) = sequence.prefix.hashes.get(prefix.cached)
                && sequence.unscored.is_empty()
                && !sequence.is_lockstep_member()
                && self.claims.contains(next)
            {
                return Admission::Deferred;
            }
            blocks_needed += self.blocks_needed(sequence, prefix);
        }
        if self.exceeds_tenant_share(tenant, num_sequences, blocks_needed) {
            return Admission::ShareExceeded;
        }
        let max_num_seqs = self.config.max_num_seqs;
        if self.running_sequences + num_sequences > max_num_seqs || !self.has_room(blocks_needed) {
            return Admission::NoRoom;
        }
        if group.len() == 1 && self.begin_restore(self.waiting[group.start].slot) {
            return Admission::Deferred;
        }
        if !self.reserve_images(group.clone()) {
            return Admission::AwaitsImages;
        }
        if !self.allocate_group(group.clone(), batch) {
            return Admission::NoRoom;
        }
        self.waiting_sequences -= num_sequences;
        self.running_sequences += num_sequences;
        let priority = self.waiting[group.start].priority;
        if !has_begun {
            self.fairness.begin(tenant, priority.start);
        }
        let at = self.running.partition_point(|other| other.priority < priority);
        for position in at..at + group.len() {
            let entry = self.waiting.remove(group.start).expect("invariant: a group is part of its queue");
            self.stop_expecting_images(entry.slot);
            self.running.insert(position, entry);
        }
        Admission::Admitted(at..at + group.len())
    }

    /// Estimates how many leading blocks of a waiting sequence are in the cache. Binary search is correct because the
    /// parent of a cached block is cached and the parent of an active block is active. Only hash collisions can make
    /// the estimate wrong.
    fn estimate_cached_prefix(&self, sequence: &Sequence) -> CachedPrefix {
        let cacheable = (sequence.cacheable_tokens() / self.cache.block_tokens) as usize;
        let hashes = &sequence.prefix.hashes;
        let cached = hashes.partition_point(|&hash| self.pool.contains_hash(hash)).min(cacheable);
        let cached = sequence.reusable_blocks(cached, self.cache.block_tokens);
        let active = hashes[..cached].partition_point(|&hash| self.pool.is_hash_active(hash));
        CachedPrefix { cached, active }
    }

    /// The number of available blocks that the admission of a waiting sequence needs: those that it lacks, those of its
    /// cached prefix that no sequence or restore holds, and one for the growth of each sequence that it represents.
    fn blocks_needed(&self, sequence: &Sequence, prefix: CachedPrefix) -> u32 {
        let block_tokens = self.cache.block_tokens;
        let reused = prefix.cached.min((sequence.num_tokens() as usize - 1) / block_tokens as usize);
        let lacking = sequence.num_tokens().div_ceil(block_tokens) - reused as u32;
        let evictable = reused.saturating_sub(prefix.active) as u32;
        lacking + evictable + sequence.num_sequences()
    }

    /// Whether the running sequences of a tenant, together with a waiting group, would occupy the part of the batch or
    /// of the cache that is reserved for other tenants. A tenant without running sequences has no such limit, so that
    /// every request can run.
    fn exceeds_tenant_share(&self, tenant: u128, num_sequences: u32, blocks_needed: u32) -> bool {
        if !self.shares.is_shared() {
            return false;
        }
        let (mut sequences, mut blocks) = (0, 0);
        for entry in &self.running {
            let sequence = self.sequences.get(entry.slot);
            if sequence.group.tenant == tenant {
                let table = sequence.residency.block_table.iter();
                sequences += sequence.num_sequences();
                blocks += table.filter(|block| !self.pool.is_shared(**block)).count() as u32;
            }
        }
        let limit = |total: u32| total - total / RESERVED_FOR_OTHERS;
        sequences > 0
            && (sequences + num_sequences > limit(self.config.max_num_seqs)
                || blocks + blocks_needed > limit(self.cache.blocks_total))
    }

    /// Whether a waiting group that needs this many blocks can be admitted. If no block is in use, it always can,
    /// because every accepted request fits into the cache.
    fn has_room(&self, blocks_needed: u32) -> bool {
        let restores = self.restores.as_ref().filter(|restores| !restores.active.is_empty());
        let outstanding = restores.map_or(0, |restores| restores.outstanding_blocks());
        self.running.is_empty() && restores.is_none()
            || blocks_needed + outstanding + self.watermark_blocks <= self.pool.blocks_available()
    }

    /// Acquires the blocks of a waiting group that are in the prefix cache, and allocates the other blocks for its
    /// tokens. If there is no room for the exact number of blocks, returns false and allocates nothing.
    fn allocate_group(&mut self, group: Range<usize>, batch: &mut Batch) -> bool {
        let mut blocks_needed = 0;
        let mut copied = None;
        for position in group.clone() {
            let slot = self.waiting[position].slot;
            let (cached, last) = self.acquire_cached(slot);
            copied = last;
            let prefix = CachedPrefix { cached, active: cached };
            blocks_needed += self.blocks_needed(self.sequences.get(slot), prefix);
        }
        let has_room = self.has_room(blocks_needed);
        for position in group {
            let slot = self.waiting[position].slot;
            if has_room {
                self.allocate_uncached(slot, copied.take(), batch);
            } else {
                self.release_blocks(slot);
                self.expect_images(slot);
            }
        }
        has_room
    }

    /// Allocates the blocks of a waiting sequence that are not in the prefix cache, and claims them. `last` is the
    /// cached block of its last token, if there is one.
    fn allocate_uncached(&mut self, slot: u32, last: Option<BlockId>, batch: &mut Batch) {
        let block_tokens = self.cache.block_tokens;
        let sequence = self.sequences.get_mut(slot);
        sequence.reserve(block_tokens);
        let num_tokens = sequence.num_tokens();
        let Sequence { prefix, residency, .. } = sequence;
        prefix.registered = residency.block_table.len() as u32;
        let cached = prefix.registered + u32::from(last.is_some());
        residency.computed_tokens = (cached * block_tokens).min(num_tokens - 1);
        self.uncomputed_tokens -= u64::from(residency.computed_tokens);
        // A preempted sequence finds its own blocks in the cache. Such a hit does not show that other requests share
        // the prefix.
        if sequence.cached_tokens.is_none() {
            self.pool.record_hit(residency.block_table.iter().copied().chain(last));
        }
        if let Some(last) = last {
            let block = self.pool.allocate().expect("invariant: there is room");
            // If no other block was left, `last` itself was evicted and allocated, and it still has its content.
            if block != last {
                batch.copies.push(BlockCopy { from: last, to: block });
            }
            residency.block_table.push(block);
        }
        while residency.block_table.len() < num_tokens.div_ceil(block_tokens) as usize {
            residency.block_table.push(self.pool.allocate().expect("invariant: there is room"));
        }
        sequence.cached_tokens.get_or_insert(residency.computed_tokens);
        prefix.claims = prefix.registered..prefix.hashes.len() as u32;
        for index in prefix.claims.clone() {
            self.claims.claim(prefix.hashes[index as usize], slot);
        }
    }

    /// Acquires the leading blocks of a waiting sequence that are in the prefix cache, and returns their number. The
    /// last token is always computed, because its logits are needed for sampling. If its block is cached too, the block
    /// is counted but not acquired. Instead, the block is returned so that the caller can copy it: copying a block and
    /// computing one token is cheaper than computing the whole block.
    fn acquire_cached(&mut self, slot: u32) -> (usize, Option<BlockId>) {
        let sequence = self.sequences.get(slot);
        let block_tokens = self.cache.block_tokens as usize;
        let cacheable = sequence.cacheable_tokens() as usize / block_tokens;
        let mut blocks = self.find_cached(sequence, cacheable);
        blocks.truncate(sequence.reusable_blocks(blocks.len(), self.cache.block_tokens));
        let cached = blocks.len();
        let last = if cached * block_tokens == sequence.tokens.len() { blocks.pop() } else { None };
        blocks.iter().for_each(|&block| self.pool.acquire(block));
        self.sequences.get_mut(slot).residency.block_table = blocks;
        (cached, last)
    }

    /// The leading blocks of a sequence that are in the prefix cache, at most `blocks_max`.
    pub(super) fn find_cached(&self, sequence: &Sequence, blocks_max: usize) -> Vec<BlockId> {
        let mut blocks = Vec::new();
        while blocks.len() < blocks_max.min(sequence.prefix.hashes.len()) {
            let Some(block) = self.pool.find(sequence.next_content(&blocks, &self.pool)) else { break };
            blocks.push(block);
        }
        blocks
    }
}

/// The number of prompt tokens that bring a step with `decode_tokens` to `step_size` tokens. If possible, all steps
/// have the same number of tokens, because a model has to prepare its operations for each new number of tokens. With
/// many decodes, prompts get a quarter of the step size, so that they always progress.
fn remaining_step_size(decode_tokens: u32, step_size: u32) -> u32 {
    step_size.saturating_sub(decode_tokens).max(step_size.div_ceil(4))
}

/// Reduces `prompt_tokens` so that the number of tokens in the step is a multiple of [`PROMPT_TOKENS_MIN`], but returns
/// at least [`PROMPT_TOKENS_MIN`].
fn round_step_size(decode_tokens: u32, prompt_tokens: u32) -> u32 {
    let step_size = decode_tokens.saturating_add(prompt_tokens) / PROMPT_TOKENS_MIN * PROMPT_TOKENS_MIN;
    step_size.saturating_sub(decode_tokens).max(PROMPT_TOKENS_MIN)
}

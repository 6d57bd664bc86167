//! Applies the results of a step: computed tokens, blocks to cache, sampled tokens and finished sequences.

use super::{QueueEntry, Scheduler};
use crate::batch::Batch;
use crate::block::TokenId;
use crate::block_pool::RegisterResult;
use crate::request::{Event, SampledToken, SequenceId};
use crate::sequence::Sequence;

impl Scheduler {
    /// Applies the results of a computed batch. `sampled` contains the sampled tokens, in the order of
    /// [`Batch::samples`]. Appends the resulting events to `events`. The tokens of sequences that were aborted in the
    /// meantime are ignored.
    ///
    /// # Panics
    /// Panics if `batch` is not the one in flight, `sampled` does not match its `samples`, more drafts are accepted
    /// than a sequence has, or the parent of a sequence has been aborted or is not in lockstep with it.
    pub fn commit(&mut self, batch: &Batch, sampled: &[SampledToken], events: &mut Vec<Event>) {
        assert_eq!(batch.sequences.len(), self.in_flight.len(), "the batch must be the one in flight");
        let expected = batch.samples.iter().copied();
        assert!(
            sampled.iter().map(|sample| sample.sequence).eq(expected),
            "`sampled` must match the samples of the batch"
        );
        for (index, scheduled) in batch.sequences.iter().enumerate() {
            let Some(slot) = self.in_flight[index].take() else { continue };
            let accepted = match sampled.get(scheduled.samples.start as usize) {
                Some(sampled) if scheduled.num_draft_tokens > 0 => {
                    &batch.tokens[batch.drafts_of(scheduled)][..sampled.accepted_drafts as usize]
                }
                _ => &[],
            };
            let num_tokens = scheduled.tokens.len() as u32 - scheduled.num_draft_tokens;
            self.advance(slot, num_tokens, accepted, events);
            if !scheduled.samples.is_empty() {
                self.fork_siblings(slot);
            }
        }
        self.in_flight.clear();
        self.append_sampled(sampled, events);
    }

    /// Continues suspended sequences with the tokens that were sampled for them. The parent of each sequence must be
    /// resumed in the same call. Appends the resulting events to `events`. The tokens of sequences that were aborted in
    /// the meantime are ignored.
    ///
    /// # Panics
    /// Panics if a batch is in flight, a sequence is not suspended, drafts are accepted, or the parent of a sequence
    /// has been aborted or is not in lockstep with it.
    pub fn resume(&mut self, sampled: &[SampledToken], events: &mut Vec<Event>) {
        assert!(self.in_flight.is_empty(), "sequences resume between steps");
        for sampled in sampled {
            assert_eq!(sampled.accepted_drafts, 0, "a suspended sequence has no drafts");
            if let Some(slot) = self.sequences.slot(sampled.sequence) {
                let sequence = self.sequences.get_mut(slot);
                assert!(std::mem::take(&mut sequence.is_suspended), "only suspended sequences resume");
                self.suspended_sequences -= 1;
            }
        }
        self.append_sampled(sampled, events);
    }

    /// First reassigns the sequences whose parent is another sequence, so that they continue from the parent's tokens
    /// without its new token. Then appends the token of each sequence, or suspends the sequence.
    fn append_sampled(&mut self, sampled: &[SampledToken], events: &mut Vec<Event>) {
        for sampled in sampled.iter().filter(|sampled| sampled.parent != sampled.sequence) {
            self.reassign(sampled.sequence, sampled.parent);
        }
        for &SampledToken { sequence, token, .. } in sampled {
            let Some(slot) = self.sequences.slot(sequence) else { continue };
            match token {
                Some(token) => self.append(slot, token, events),
                None => {
                    self.sequences.get_mut(slot).is_suspended = true;
                    self.suspended_sequences += 1;
                }
            }
        }
    }

    /// Removes all sequences of a batch whose computation failed, and returns their ids. Blocks that the failed batch
    /// has written do not enter the prefix cache. Sequences outside the batch continue, even if they shared a prompt
    /// with removed ones.
    ///
    /// # Panics
    /// Panics if `batch` is not the one in flight.
    pub fn fail(&mut self, batch: &Batch) -> Vec<SequenceId> {
        assert_eq!(batch.sequences.len(), self.in_flight.len(), "the batch must be the one in flight");
        let mut removed = Vec::new();
        for index in 0..self.in_flight.len() {
            if let Some(slot) = self.in_flight[index] {
                let sequence = self.remove(slot);
                removed.push(sequence.id);
                removed.extend(sequence.siblings);
            }
        }
        self.in_flight.clear();
        removed
    }

    /// Marks the next `num_tokens` tokens of a sequence as computed, and appends the `accepted` drafts, which are
    /// computed as well.
    fn advance(&mut self, slot: u32, num_tokens: u32, accepted: &[TokenId], events: &mut Vec<Event>) {
        let sequence = self.sequences.get_mut(slot);
        sequence.batch_index = None;
        sequence.tokens.extend_from_slice(accepted);
        let computed_tokens = &mut sequence.residency.computed_tokens;
        *computed_tokens += num_tokens + accepted.len() as u32;
        sequence.unscored.start = sequence.unscored.start.max(*computed_tokens).min(sequence.unscored.end);
        self.uncomputed_tokens -= u64::from(num_tokens);
        let has_read_images = *computed_tokens >= sequence.group.images.end();
        if !sequence.is_started {
            sequence.is_started = true;
            let cached_tokens = sequence.cached_tokens.expect("invariant: a scheduled sequence was admitted");
            events.push(Event::Started { sequence: sequence.id, cached_tokens });
        }
        if has_read_images {
            self.release_images(slot);
        }
        if self.config.prefix_caching && self.sequences.get(slot).residency.evicted_tokens == 0 {
            self.cache_full_blocks(slot);
        }
        if let Some(blocks_max) = self.config.kv_eviction_blocks(self.cache.block_tokens) {
            self.evict_low_scores(slot, blocks_max);
        }
    }

    /// If a generating sequence that is not in lockstep has more than `blocks_max` full blocks, evicts the blocks with
    /// the lowest scores.
    ///
    /// The blocks before a cached block must be cached as well. Therefore, blocks of the sequence are first removed
    /// from the prefix cache, beginning with the last one and stopping at a block that is shared or has cached
    /// children. The blocks that remain in the prefix cache are not evicted.
    fn evict_low_scores(&mut self, slot: u32, blocks_max: u32) {
        let block_tokens = self.cache.block_tokens;
        let Sequence { group, prefix, residency, .. } = self.sequences.get_mut(slot);
        let full = (residency.resident_tokens() / block_tokens) as usize;
        let is_generating = residency.computed_tokens >= group.prompt_tokens;
        if full <= blocks_max as usize || group.lockstep || !is_generating {
            return;
        }
        if residency.scores.blocks_to_evict(full, 0, blocks_max).is_empty() {
            return;
        }
        while let Some(last) = prefix.registered.checked_sub(1)
            && self.pool.unregister(residency.block_table[last as usize])
        {
            prefix.registered = last;
        }
        let evicted = residency.scores.blocks_to_evict(full, prefix.registered as usize, blocks_max);
        residency.scores.remove(&evicted);
        residency.evicted_tokens += evicted.len() as u32 * block_tokens;
        for index in evicted.into_iter().rev() {
            self.pool.release(residency.block_table.remove(index));
        }
    }

    /// Registers the full blocks of a sequence in the prefix cache. If the content of a block is already cached, the
    /// sequence uses the cached block and releases its own, which saves memory and keeps prefixes shared.
    fn cache_full_blocks(&mut self, slot: u32) {
        let block_tokens = self.cache.block_tokens as usize;
        let sequence = self.sequences.get_mut(slot);
        let full = sequence.residency.computed_tokens / self.cache.block_tokens;
        let prefix = &mut sequence.prefix;
        while prefix.claims.start < prefix.claims.end.min(full) {
            self.claims.release(prefix.hashes[prefix.claims.start as usize], slot);
            prefix.claims.start += 1;
        }
        while sequence.prefix.registered < full {
            let index = sequence.prefix.registered as usize;
            if sequence.prefix.hashes.len() == index {
                let tokens = &sequence.tokens[index * block_tokens..][..block_tokens];
                let parent = sequence.prefix.last_hash();
                let hash = sequence.group.hash_block(index, parent, tokens, self.block_hash);
                sequence.prefix.hashes.push(hash);
            }
            let block = sequence.residency.block_table[index];
            let before = &sequence.residency.block_table[..index];
            let content = sequence.next_content(before, &self.pool);
            match self.pool.register(block, content) {
                RegisterResult::Cached => {}
                RegisterResult::Duplicate(present) => {
                    self.pool.acquire(present);
                    self.pool.release(block);
                    sequence.residency.block_table[index] = present;
                }
                // The next step tries again: the other block may be evicted by then.
                RegisterResult::Collision => return,
            }
            sequence.prefix.registered += 1;
        }
    }

    /// Creates a separate sequence for each sibling of a sequence whose prompt is computed. The siblings share its
    /// blocks.
    fn fork_siblings(&mut self, slot: u32) {
        let sequence = self.sequences.get_mut(slot);
        let siblings = std::mem::take(&mut sequence.siblings);
        for id in siblings {
            let sibling = self.sequences.get(slot).fork(id);
            for &block in &sibling.residency.block_table {
                self.pool.acquire(block);
            }
            let priority = sibling.priority;
            self.shares.add_sequence(sibling.group.tenant);
            let slot = self.sequences.insert(sibling);
            let at = self.running.partition_point(|other| other.priority < priority);
            self.running.insert(at, QueueEntry { priority, slot });
        }
    }

    /// Replaces the tokens and blocks of the sequence `id` with those of `parent`, unless `id` was aborted in the
    /// meantime.
    fn reassign(&mut self, id: SequenceId, parent: SequenceId) {
        let Some(slot) = self.sequences.slot(id) else { return };
        let parent = self.sequences.slot(parent).expect("the parent of a sequence must not be aborted");
        let [sequence, parent] = self.sequences.get_disjoint_mut([slot, parent]);
        // Both sequences have computed all their tokens, or both were preempted while they were suspended.
        let are_level = sequence.residency.computed_tokens == parent.residency.computed_tokens
            && sequence.num_tokens() == parent.num_tokens();
        let are_in_lockstep =
            sequence.is_lockstep_member() && parent.priority.arrival == sequence.priority.arrival;
        assert!(are_level && are_in_lockstep, "the parent of a sequence must be in lockstep with it");
        assert!(sequence.prefix.claims.is_empty(), "invariant: computed blocks are not claimed");
        for &block in &parent.residency.block_table {
            self.pool.acquire(block);
        }
        for block in sequence.residency.block_table.drain(..).rev() {
            self.pool.release(block);
        }
        sequence.reassign(parent);
    }

    fn append(&mut self, slot: u32, token: TokenId, events: &mut Vec<Event>) {
        self.uncomputed_tokens += 1;
        if let Some(reason) = self.sequences.get_mut(slot).append(token) {
            let sequence = self.remove(slot).id;
            events.push(Event::Finished { sequence, reason });
        }
    }
}

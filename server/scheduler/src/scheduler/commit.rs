//! What a step changed: tokens computed, blocks worth keeping, tokens sampled, sequences ended.

use super::{Entry, Scheduler};
use crate::block_pool::{After, Content, Registered, Serial};
use crate::{Batch, Event, Sampled, SequenceId, TokenId};

impl Scheduler {
    /// Takes in a batch that was computed, with what was sampled, in the order of [`Batch::samples`]. Adds
    /// what happened to `events`. What was aborted meanwhile is skipped; any token will do for it.
    ///
    /// # Panics
    /// If `batch` is not the last one scheduled, `sampled` is not of its `samples`, or a sequence goes on from one that
    /// is not of its request and in step with it, has been aborted, or does not go on from its own tokens itself, or more
    /// drafts are accepted than a row has.
    pub fn commit(&mut self, batch: &Batch, sampled: &[Sampled], events: &mut Vec<Event>) {
        assert_eq!(batch.rows.len(), self.in_flight.len(), "the batch is the one in flight");
        let expected = batch.samples.iter().copied();
        assert!(sampled.iter().map(|sample| sample.sequence).eq(expected), "each sample has a token");
        for (index, row) in batch.rows.iter().enumerate() {
            let Some(slot) = self.in_flight[index].take() else { continue };
            let accepted = match sampled.get(row.samples.start as usize) {
                Some(sampled) if row.drafts > 0 => {
                    &batch.tokens[batch.row_drafts(row)][..sampled.accepted as usize]
                }
                _ => &[],
            };
            self.advance(slot, row.tokens.len() as u32 - row.drafts, accepted, events);
            if !row.samples.is_empty() {
                self.fork_siblings(slot);
            }
        }
        self.in_flight.clear();
        self.take_tokens(sampled, events);
    }

    /// Gives suspended sequences the tokens that were sampled after what they computed, and lets them take part in steps
    /// again. Adds what happened to `events`. A sequence that was aborted meanwhile is skipped.
    ///
    /// # Panics
    /// If a batch is in flight, a sequence is not suspended, drafts are accepted, or a sequence continues from one that is
    /// not of its request, in step with it and resumed in the same call.
    pub fn resume(&mut self, sampled: &[Sampled], events: &mut Vec<Event>) {
        assert!(self.in_flight.is_empty(), "sequences resume between the steps");
        for sampled in sampled {
            assert_eq!(sampled.accepted, 0, "a suspended sequence has no drafts");
            if let Some(slot) = self.sequences.slot(sampled.sequence) {
                let sequence = self.sequences.get_mut(slot);
                assert!(std::mem::take(&mut sequence.is_suspended), "only suspended sequences resume");
                self.suspended_sequences -= 1;
            }
        }
        self.take_tokens(sampled, events);
    }

    /// Reassigns the tokens of sequences in step before any token is appended, so that a sequence takes over what the other
    /// one had computed. Then each sequence takes its token, or is suspended.
    fn take_tokens(&mut self, sampled: &[Sampled], events: &mut Vec<Event>) {
        for sampled in sampled.iter().filter(|sampled| sampled.from != sampled.sequence) {
            self.take_over(sampled.sequence, sampled.from);
        }
        for &Sampled { sequence, token, .. } in sampled {
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

    /// Drops all that was in a batch whose computation failed, and returns it. Nothing of what the batch was
    /// to write is in the prefix cache. What was not in the batch goes on, even if it once shared a prompt
    /// with what was.
    ///
    /// # Panics
    /// If `batch` is not the last one scheduled.
    pub fn fail(&mut self, batch: &Batch) -> Vec<SequenceId> {
        assert_eq!(batch.rows.len(), self.in_flight.len(), "the batch is the one in flight");
        let mut dropped = Vec::new();
        for index in 0..self.in_flight.len() {
            if let Some(slot) = self.in_flight[index] {
                let sequence = self.remove(slot);
                dropped.push(sequence.id);
                dropped.extend(sequence.siblings);
            }
        }
        self.in_flight.clear();
        dropped
    }

    /// `count` more tokens of a sequence are computed, and the drafts that are `accepted`.
    fn advance(&mut self, slot: u32, count: u32, accepted: &[TokenId], events: &mut Vec<Event>) {
        let sequence = self.sequences.get_mut(slot);
        sequence.row = None;
        sequence.tokens.extend_from_slice(accepted);
        sequence.computed += count + accepted.len() as u32;
        sequence.unscored.start = sequence.unscored.start.max(sequence.computed).min(sequence.unscored.end);
        self.uncomputed_tokens -= u64::from(count);
        if !sequence.started {
            sequence.started = true;
            let cached_tokens = sequence.cached_tokens.expect("invariant: what has a row was admitted");
            events.push(Event::Started { sequence: sequence.id, cached_tokens });
        }
        if self.config.prefix_caching && self.sequences.get(slot).left == 0 {
            self.cache_full_blocks(slot);
        }
        if let Some(blocks_max) = self.config.sequence_blocks_max {
            self.leave_blocks(slot, blocks_max);
        }
    }

    /// Has a sequence that generates leave the full blocks that it attended to least, if it has more than it may.
    ///
    /// What is in the prefix cache is there with all that it follows. So blocks of its own are taken out of it first, from the
    /// last on, up to one that others hold or follow: those before stay.
    fn leave_blocks(&mut self, slot: u32, blocks_max: u32) {
        let block_tokens = self.config.block_tokens;
        let sequence = self.sequences.get_mut(slot);
        let full = (sequence.cached() / block_tokens) as usize;
        if full <= blocks_max as usize || sequence.in_step || sequence.computed < sequence.prompt_tokens {
            return;
        }
        if sequence.attended.to_leave(full, 0, blocks_max).is_empty() {
            return;
        }
        while let Some(last) = sequence.registered.checked_sub(1)
            && self.pool.unregister(sequence.table[last as usize])
        {
            sequence.registered = last;
        }
        let places = sequence.attended.to_leave(full, sequence.registered as usize, blocks_max);
        sequence.attended.leave(&places);
        sequence.left += places.len() as u32 * block_tokens;
        for place in places.into_iter().rev() {
            self.pool.release(sequence.table.remove(place));
        }
    }

    /// Puts the full blocks of a sequence into the prefix cache. A block whose content is there already is
    /// given back and the other taken in its place: half the room, and a chain that is held as one.
    fn cache_full_blocks(&mut self, slot: u32) {
        let block_tokens = self.config.block_tokens as usize;
        let sequence = self.sequences.get_mut(slot);
        let full = sequence.computed / self.config.block_tokens;
        while sequence.claims.start < sequence.claims.end.min(full) {
            self.claims.release(sequence.hashes[sequence.claims.start as usize], slot);
            sequence.claims.start += 1;
        }
        while sequence.registered < full {
            let index = sequence.registered as usize;
            let tokens = &sequence.tokens[index * block_tokens..][..block_tokens];
            let (after, parent) = match index.checked_sub(1).map(|before| sequence.table[before]) {
                Some(before) => {
                    let parent = self.pool.serial(before);
                    (After::Block(before), parent.expect("invariant: a registered block is cached"))
                }
                None => (sequence.origin(), Serial::root(sequence.adapter)),
            };
            if sequence.hashes.len() == index {
                let parent = sequence.hashes.last().copied().unwrap_or(sequence.root);
                sequence.hashes.push((self.hash)(parent, tokens));
            }
            let block = sequence.table[index];
            match self.pool.register(block, after, Content { hash: sequence.hashes[index], parent, tokens }) {
                Registered::New => {}
                Registered::Duplicate(present) => {
                    self.pool.share(present);
                    self.pool.release(block);
                    sequence.table[index] = present;
                }
                // Tried again with the next step: the other may be gone by then.
                Registered::Collision => return,
            }
            sequence.registered += 1;
        }
    }

    /// The prompt is computed: its siblings go on by themselves, in the same blocks.
    fn fork_siblings(&mut self, slot: u32) {
        let sequence = self.sequences.get_mut(slot);
        let siblings = std::mem::take(&mut sequence.siblings);
        for (index, id) in (1..).zip(siblings) {
            let sibling = self.sequences.get(slot).fork(id, index);
            for &block in &sibling.table {
                self.pool.share(block);
            }
            let rank = sibling.rank;
            let slot = self.sequences.insert(sibling);
            let at = self.running.partition_point(|other| other.rank < rank);
            self.running.insert(at, Entry { rank, slot });
        }
    }

    /// `id` leaves its own tokens for those of `from`. If it was aborted meanwhile, nothing happens.
    fn take_over(&mut self, id: SequenceId, from: SequenceId) {
        let Some(slot) = self.sequences.slot(id) else { return };
        let from = self.sequences.slot(from).expect("a sequence goes on from one that is there");
        let [sequence, from] = self.sequences.pair_mut([slot, from]);
        // Both are computed to the end, or were preempted while they were suspended.
        let are_level = sequence.computed == from.computed && sequence.tokens_len() == from.tokens_len();
        assert!(
            are_level && sequence.awaits_others() && from.rank.arrival == sequence.rank.arrival,
            "in step"
        );
        assert!(sequence.claims.is_empty(), "invariant: what is computed is claimed no more");
        for &block in &from.table {
            self.pool.share(block);
        }
        for block in sequence.table.drain(..).rev() {
            self.pool.release(block);
        }
        sequence.take_over(from);
    }

    fn append(&mut self, slot: u32, token: TokenId, events: &mut Vec<Event>) {
        self.uncomputed_tokens += 1;
        if let Some(reason) = self.sequences.get_mut(slot).append(token) {
            let sequence = self.remove(slot).id;
            events.push(Event::Finished { sequence, reason });
        }
    }
}

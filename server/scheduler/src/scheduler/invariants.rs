//! Checks the invariants of the scheduler, which hold between any two calls.

use super::Scheduler;
use crate::sequence::RestoreState;

impl Scheduler {
    /// Checks the invariants that hold between any two calls. This method is meant for tests, because it takes time
    /// proportional to the size of the cache.
    ///
    /// # Panics
    /// Panics if an invariant is violated. In this case, the content of the cache cannot be trusted.
    pub fn check_invariants(&self) {
        let held = self.sequences.iter().flat_map(|(_, sequence)| &sequence.residency.block_table).copied();
        let restored = self.restores.iter().flat_map(|restores| restores.held_blocks());
        self.pool.check_invariants(held.chain(restored));
        self.check_restores();
        self.check_images();
        self.check_queues();
        self.check_running();
        self.check_waiting();
        self.check_claims();
        self.check_in_flight();
    }

    fn check_queues(&self) {
        assert!(self.running.is_sorted_by(|a, b| a.priority < b.priority), "invariant: running is sorted");
        assert!(
            self.waiting.iter().zip(self.waiting.iter().skip(1)).all(|(a, b)| a.priority < b.priority),
            "invariant: waiting is sorted"
        );
        let mut slots: Vec<u32> = self.running.iter().chain(&self.waiting).map(|entry| entry.slot).collect();
        slots.sort_unstable();
        let occupied = self.sequences.iter().map(|(slot, _)| slot);
        assert!(occupied.eq(slots), "invariant: a sequence either waits or runs");
        let mut ids = 0;
        for (slot, sequence) in self.sequences.iter() {
            for id in sequence.siblings.iter().chain([&sequence.id]) {
                assert_eq!(
                    self.sequences.slot(*id),
                    Some(slot),
                    "invariant: a sequence is indexed by its id"
                );
                ids += 1;
            }
        }
        assert_eq!(self.sequences.num_ids(), ids, "invariant: an id belongs to a sequence");
        let uncomputed =
            self.sequences.iter().map(|(_, sequence)| u64::from(sequence.uncomputed_tokens())).sum();
        assert_eq!(self.uncomputed_tokens, uncomputed, "invariant: uncomputed tokens are counted");
        let suspended = self.sequences.iter().filter(|(_, sequence)| sequence.is_suspended).count();
        assert_eq!(
            self.suspended_sequences as usize, suspended,
            "invariant: suspended sequences are counted"
        );
    }

    fn check_running(&self) {
        let mut running = 0;
        for entry in &self.running {
            let sequence = self.sequences.get(entry.slot);
            let residency = &sequence.residency;
            running += sequence.num_sequences();
            assert_eq!(entry.priority, sequence.priority);
            assert!(!sequence.expects_images, "invariant: a running sequence holds the images that it needs");
            assert!(
                (sequence.uncomputed_tokens() == 0) == sequence.is_suspended,
                "invariant: a running sequence has a token to compute, or is suspended"
            );
            let resident_blocks = residency.resident_tokens().div_ceil(self.cache.block_tokens);
            assert!(
                residency.block_table.len() >= resident_blocks as usize,
                "invariant: a resident token is in a block"
            );
            assert!(
                sequence.num_tokens() < self.config.max_model_len,
                "invariant: a sequence of the maximum length has finished"
            );
            for block in &residency.block_table[..sequence.prefix.registered as usize] {
                assert!(self.pool.is_cached(*block), "invariant: a registered block is cached");
            }
            // A decode does not allocate or copy the block that it writes to until it is scheduled.
            if sequence.uncomputed_tokens() > 1 || sequence.batch_index.is_some() {
                let next = (residency.resident_tokens() / self.cache.block_tokens) as usize;
                for block in &residency.block_table[next..] {
                    assert!(!self.pool.is_shared(*block), "invariant: a block to write is not shared");
                    assert!(!self.pool.is_cached(*block), "invariant: a block to write is not cached");
                }
            }
        }
        assert_eq!(self.running_sequences, running, "invariant: running sequences are counted");
        assert!(running <= self.config.max_num_seqs, "invariant: max_num_seqs is not exceeded");
    }

    fn check_waiting(&self) {
        let mut waiting = 0;
        for entry in &self.waiting {
            let sequence = self.sequences.get(entry.slot);
            let residency = &sequence.residency;
            waiting += sequence.num_sequences();
            assert_eq!(entry.priority, sequence.priority);
            assert!(residency.block_table.is_empty(), "invariant: a waiting sequence holds no blocks");
            assert_eq!(
                sequence.expects_images,
                sequence.held_images.is_empty(),
                "invariant: a waiting sequence expects its images unless it holds some"
            );
            assert_eq!(residency.computed_tokens, 0, "invariant: a waiting sequence has no computed tokens");
            assert_eq!(sequence.prefix.registered, 0, "invariant: a waiting sequence has no cached blocks");
            assert!(sequence.batch_index.is_none(), "invariant: a waiting sequence is not in a batch");
        }
        assert_eq!(self.waiting_sequences, waiting, "invariant: waiting sequences are counted");
        let sequences = self.waiting.iter().map(|entry| self.sequences.get(entry.slot));
        let queued = sequences.filter(|sequence| sequence.cached_tokens.is_none());
        self.fairness.check_invariants(queued.map(|sequence| sequence.group.tenant));
    }

    fn check_claims(&self) {
        for (hash, owner) in self.claims.iter() {
            let sequence = self.sequences.get(owner);
            let claims = sequence.prefix.claims.start as usize..sequence.prefix.claims.end as usize;
            assert!(sequence.prefix.hashes[claims].contains(&hash), "invariant: a claim has an owner");
            assert!(!sequence.residency.block_table.is_empty(), "invariant: the owner of a claim runs");
        }
    }

    fn check_restores(&self) {
        let restores = || self.restores.iter().flat_map(|restores| &restores.active);
        for restore in restores() {
            let is_complete = restore.block_table.len() >= restore.num_blocks;
            assert!(!is_complete, "invariant: a complete restore has ended");
        }
        for (slot, sequence) in self.sequences.iter() {
            let count = restores().filter(|restore| restore.slot == slot).count();
            let waits = sequence.restore == RestoreState::Restoring;
            assert_eq!(count, usize::from(waits), "invariant: a restore has one sequence that waits for it");
            let holds_blocks = !sequence.residency.block_table.is_empty();
            assert!(!waits || !holds_blocks, "invariant: a sequence that waits for a restore does not run");
        }
    }

    fn check_images(&self) {
        let sequences = || self.sequences.iter().map(|(_, sequence)| sequence);
        self.images.check_invariants(sequences().flat_map(|sequence| sequence.held_images.iter().copied()));
        let expecting = sequences().filter(|sequence| sequence.expects_images);
        self.images.check_expected(expecting.flat_map(|sequence| sequence.group.images.needed_after(0)));
        for sequence in sequences().filter(|sequence| !sequence.residency.block_table.is_empty()) {
            for image in sequence.group.images.needed_after(sequence.residency.computed_tokens) {
                assert!(
                    sequence.held_images.contains(&image.digest)
                        && self.images.are_available([&image.digest].into_iter()),
                    "invariant: a running sequence holds the images that it has not read"
                );
            }
        }
    }

    fn check_in_flight(&self) {
        for (index, slot) in self.in_flight.iter().enumerate() {
            if let Some(slot) = slot {
                let sequence = self.sequences.get(*slot);
                assert_eq!(sequence.batch_index, Some(index as u32), "invariant: batch indices are recorded");
            }
        }
        let scheduled = self.sequences.iter().filter(|(_, sequence)| sequence.batch_index.is_some()).count();
        let in_flight = self.in_flight.iter().flatten().count();
        assert_eq!(scheduled, in_flight, "invariant: only sequences in flight have a batch index");
    }
}

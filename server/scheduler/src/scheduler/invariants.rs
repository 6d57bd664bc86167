//! What holds between any two calls.

use super::Scheduler;
use crate::sequence::Wish;

impl Scheduler {
    /// Checks what must hold between any two calls, in time proportional to the cache: for tests.
    ///
    /// # Panics
    /// If anything does not: the scheduler is broken, and the cache is not to be trusted.
    pub fn check_invariants(&self) {
        let held = self.sequences.iter().flat_map(|(_, sequence)| sequence.table.iter().copied());
        let read = self.readings.iter().flat_map(|readings| readings.held());
        self.pool.check_invariants(held.chain(read));
        self.check_readings();
        self.check_queues();
        self.check_running();
        self.check_waiting();
        self.check_claims();
        self.check_in_flight();
    }

    fn check_queues(&self) {
        assert!(self.running.is_sorted_by(|a, b| a.rank < b.rank), "invariant: running in order");
        assert!(
            self.waiting.iter().zip(self.waiting.iter().skip(1)).all(|(a, b)| a.rank < b.rank),
            "invariant: waiting in order"
        );
        let mut slots: Vec<u32> = self.running.iter().chain(&self.waiting).map(|entry| entry.slot).collect();
        slots.sort_unstable();
        let kept = self.sequences.iter().map(|(slot, _)| slot);
        assert!(kept.eq(slots), "invariant: a sequence either waits or runs");
        let mut ids = 0;
        for (slot, sequence) in self.sequences.iter() {
            for id in sequence.siblings.iter().chain([&sequence.id]) {
                assert_eq!(self.sequences.slot(*id), Some(slot), "invariant: a sequence is found by its id");
                ids += 1;
            }
        }
        assert_eq!(self.sequences.ids(), ids, "invariant: an id is of a sequence");
        let uncomputed = self.sequences.iter().map(|(_, sequence)| u64::from(sequence.uncomputed())).sum();
        assert_eq!(self.uncomputed_tokens, uncomputed, "invariant: uncomputed tokens are counted");
        let suspended = self.sequences.iter().filter(|(_, sequence)| sequence.is_suspended).count();
        assert_eq!(
            self.suspended_sequences as usize, suspended,
            "invariant: suspended sequences are counted"
        );
    }

    fn check_running(&self) {
        let mut group = 0;
        for entry in &self.running {
            let sequence = self.sequences.get(entry.slot);
            group += sequence.group();
            assert_eq!(entry.rank, sequence.rank);
            assert!(
                (sequence.uncomputed() == 0) == sequence.is_suspended,
                "invariant: a running sequence has something to compute, or is suspended"
            );
            assert!(
                sequence.table.len() >= sequence.cached().div_ceil(self.config.block_tokens) as usize,
                "invariant: what is computed is in a block"
            );
            assert!(
                sequence.tokens_len() < self.config.sequence_tokens_max,
                "invariant: a sequence that may not grow has finished"
            );
            for block in &sequence.table[..sequence.registered as usize] {
                assert!(self.pool.serial(*block).is_some(), "invariant: a registered block is cached");
            }
            // What is computed next is written where nobody else reads, or copied or allocated first.
            if sequence.uncomputed() > 1 || sequence.row.is_some() {
                let next = (sequence.cached() / self.config.block_tokens) as usize;
                for block in &sequence.table[next..] {
                    assert!(!self.pool.is_shared(*block), "invariant: nobody writes what others read");
                    assert!(self.pool.serial(*block).is_none(), "invariant: cached content stays as it is");
                }
            }
        }
        assert_eq!(self.running_sequences, group, "invariant: running sequences are counted");
        assert!(group <= self.config.sequences_max, "invariant: no more run than may");
    }

    fn check_waiting(&self) {
        let mut group = 0;
        for entry in &self.waiting {
            let sequence = self.sequences.get(entry.slot);
            group += sequence.group();
            assert_eq!(entry.rank, sequence.rank);
            let holds = !sequence.table.is_empty() || sequence.computed > 0 || sequence.registered > 0;
            assert!(!holds, "invariant: who waits holds nothing");
            assert!(sequence.row.is_none(), "invariant: who waits is in no batch");
        }
        assert_eq!(self.waiting_sequences, group, "invariant: waiting sequences are counted");
    }

    fn check_claims(&self) {
        for (hash, owner) in self.claims.iter() {
            let sequence = self.sequences.get(owner);
            let claimed = &sequence.hashes[sequence.claims.start as usize..sequence.claims.end as usize];
            assert!(claimed.contains(&hash), "invariant: a claim is known to its owner");
            assert!(!sequence.table.is_empty(), "invariant: who claims runs");
        }
    }

    fn check_readings(&self) {
        let readings = || self.readings.iter().flat_map(|readings| &readings.under_way);
        for reading in readings() {
            assert!(reading.table.len() < reading.end, "invariant: a reading that is complete has ended");
        }
        for (slot, sequence) in self.sequences.iter() {
            let count = readings().filter(|reading| reading.slot == slot).count();
            let waits = sequence.wish == Wish::Granted;
            assert_eq!(count, usize::from(waits), "invariant: a reading has one who waits for it");
            assert!(!waits || sequence.table.is_empty(), "invariant: who waits for a reading does not run");
        }
    }

    fn check_in_flight(&self) {
        for (row, slot) in self.in_flight.iter().enumerate() {
            if let Some(slot) = slot {
                assert_eq!(self.sequences.get(*slot).row, Some(row as u32), "invariant: rows are known");
            }
        }
        let rows = self.sequences.iter().filter(|(_, sequence)| sequence.row.is_some()).count();
        assert_eq!(rows, self.in_flight.iter().flatten().count(), "invariant: no other has a row");
    }
}

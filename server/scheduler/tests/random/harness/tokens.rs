//! Which tokens are sampled, at random, and for which sequences that is known only later.

use std::collections::BTreeMap;

use super::{Harness, Known};
use server_scheduler::{Batch, Sampled, SequenceId};

impl Harness {
    /// A token for each sequence, or none yet; of those in step some take over the tokens of others.
    pub(super) fn sample(&mut self, batch: &Batch) -> Vec<Sampled> {
        let vocabulary = self.vocabulary;
        let mut sampled: Vec<_> =
            batch.samples.iter().map(|&id| Sampled::new(id, self.random.below(vocabulary))).collect();
        for row in batch.rows.iter().filter(|row| row.drafts > 0) {
            sampled[row.samples.start as usize].accepted = self.random.below(row.drafts + 1);
        }
        self.take_over(&mut sampled);
        // Of a request in step all or none.
        let mut is_suspended = BTreeMap::new();
        for sampled in &mut sampled {
            let request = self.sequences[&sampled.sequence].request;
            let in_step = self.requests.get(&request).is_some_and(|request| request.in_step);
            let mut at_random = || self.random.once_in(6);
            let suspends =
                if in_step { *is_suspended.entry(request).or_insert_with(at_random) } else { at_random() };
            if suspends {
                *sampled = Sampled { accepted: sampled.accepted, ..Sampled::suspended(sampled.sequence) };
            }
        }
        sampled
    }

    /// Lets some of those in step continue from one before them that continues from its own.
    fn take_over(&mut self, sampled: &mut [Sampled]) {
        let Self { random, sequences, requests, totals, .. } = self;
        for index in 0..sampled.len() {
            let Known { request, alive, .. } = sequences[&sampled[index].sequence];
            if !alive || !requests[&request].in_step || random.once_in(2) {
                continue;
            }
            let from = sampled[..index].iter().filter(|other| {
                let known = &sequences[&other.sequence];
                known.request == request && known.alive && other.from == other.sequence
            });
            let from: Vec<_> = from.map(|other| other.sequence).collect();
            if !from.is_empty() {
                sampled[index].from = from[random.below(from.len() as u32) as usize];
                totals.taken_over += 1;
            }
        }
    }

    /// Resumes suspended sequences at random, those in step together.
    pub(super) fn resume(&mut self) {
        let Self { random, sequences, suspended, .. } = self;
        let mut resumed: Vec<SequenceId> = Vec::new();
        suspended.retain(|id| {
            let request = sequences[id].request;
            let of_request = resumed.iter().any(|other| sequences[other].request == request);
            let is_resumed = of_request || random.once_in(2);
            if is_resumed {
                resumed.push(*id);
            }
            !is_resumed
        });
        // Some of a request may have stayed before the first of it was picked.
        let requests: Vec<u32> = resumed.iter().map(|id| sequences[id].request).collect();
        resumed.extend(suspended.extract_if(.., |id| requests.contains(&sequences[id].request)));
        let vocabulary = self.vocabulary;
        let mut sampled: Vec<_> =
            resumed.iter().map(|&id| Sampled::new(id, self.random.below(vocabulary))).collect();
        self.take_over(&mut sampled);
        let mut events = Vec::new();
        self.scheduler.resume(&sampled, &mut events);
        let before = |from: SequenceId| self.sequences[&from].tokens.clone();
        let taken: Vec<_> = sampled.iter().map(|sampled| before(sampled.from)).collect();
        self.take_in(&sampled, taken, &events);
    }
}

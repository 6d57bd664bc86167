//! Samples random tokens, some of them only after their sequences were suspended.

use std::collections::BTreeMap;

use super::{Harness, SequenceRecord};
use server_scheduler::{Batch, SampledToken, SequenceId};

impl Harness {
    /// Samples a token for each sequence or suspends it. Some sequences in lockstep continue from another sequence.
    pub(super) fn sample(&mut self, batch: &Batch) -> Vec<SampledToken> {
        let vocabulary = self.vocabulary;
        let mut sampled: Vec<_> =
            batch.samples.iter().map(|&id| SampledToken::new(id, self.random.below(vocabulary))).collect();
        for sequence in batch.sequences.iter().filter(|sequence| sequence.num_draft_tokens > 0) {
            sampled[sequence.samples.start as usize].accepted_drafts =
                self.random.below(sequence.num_draft_tokens + 1);
        }
        self.reassign(&mut sampled);
        // Either all sequences of a lockstep request are suspended, or none are.
        let mut is_suspended = BTreeMap::new();
        for sampled in &mut sampled {
            let request = self.sequences[&sampled.sequence].request;
            let lockstep = self.requests.get(&request).is_some_and(|request| request.lockstep);
            let mut at_random = || self.random.once_in(6);
            let suspends =
                if lockstep { *is_suspended.entry(request).or_insert_with(at_random) } else { at_random() };
            if suspends {
                *sampled = SampledToken {
                    accepted_drafts: sampled.accepted_drafts,
                    ..SampledToken::suspended(sampled.sequence)
                };
            }
        }
        sampled
    }

    /// Lets some sequences in lockstep continue from an earlier sequence of their request that continues its own
    /// tokens.
    fn reassign(&mut self, sampled: &mut [SampledToken]) {
        let Self { random, sequences, requests, totals, .. } = self;
        for index in 0..sampled.len() {
            let SequenceRecord { request, alive, .. } = sequences[&sampled[index].sequence];
            if !alive || !requests[&request].lockstep || random.once_in(2) {
                continue;
            }
            let parents = sampled[..index].iter().filter(|other| {
                let record = &sequences[&other.sequence];
                record.request == request && record.alive && other.parent == other.sequence
            });
            let parents: Vec<_> = parents.map(|other| other.sequence).collect();
            if !parents.is_empty() {
                sampled[index].parent = parents[random.below(parents.len() as u32) as usize];
                totals.reassigned += 1;
            }
        }
    }

    /// Resumes suspended sequences at random. The suspended sequences of a request are resumed together.
    pub(super) fn resume(&mut self) {
        let Self { random, sequences, suspended, .. } = self;
        let mut resumed: Vec<SequenceId> = Vec::new();
        suspended.retain(|id| {
            let request = sequences[id].request;
            let has_resumed_sibling = resumed.iter().any(|other| sequences[other].request == request);
            let is_resumed = has_resumed_sibling || random.once_in(2);
            if is_resumed {
                resumed.push(*id);
            }
            !is_resumed
        });
        // Add the siblings that precede the first resumed one, because the loop has already passed them.
        let requests: Vec<u32> = resumed.iter().map(|id| sequences[id].request).collect();
        resumed.extend(suspended.extract_if(.., |id| requests.contains(&sequences[id].request)));
        let vocabulary = self.vocabulary;
        let mut sampled: Vec<_> =
            resumed.iter().map(|&id| SampledToken::new(id, self.random.below(vocabulary))).collect();
        self.reassign(&mut sampled);
        let mut events = Vec::new();
        self.scheduler.resume(&sampled, &mut events);
        let tokens_of = |id: SequenceId| self.sequences[&id].tokens.clone();
        let tokens: Vec<_> = sampled.iter().map(|sampled| tokens_of(sampled.parent)).collect();
        self.apply_sampled(&sampled, tokens, &events);
    }
}

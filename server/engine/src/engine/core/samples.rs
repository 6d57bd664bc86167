//! What a step samples: a token for each sequence, with its log probabilities, or that it has ended.

use std::sync::Arc;

use server_scheduler::{Batch, SampledToken, ScheduledSequence, SequenceId, TokenId};

use super::drafts::Drafting;
use super::guides::{Next, Slot};
use super::{Live, Requests};
use crate::request::{Failure, TokenLogprobs};
use crate::runner::Logits;
use crate::sampler::{Choice, Sampler};
use crate::search::{Move, Options};

#[derive(Default)]
pub(super) struct Samples {
    /// In the order of the batch's samples; a sequence that has no new token has some.
    pub(super) tokens: Vec<SampledToken>,
    /// As long as `tokens`.
    pub(super) outcomes: Vec<Outcome>,
    /// Of sequences whose drafts were accepted: these, before the token in `tokens`, in the same order.
    pub(super) earlier: Vec<(TokenId, Option<Box<TokenLogprobs>>)>,
    /// Requests whose logits or guides gave no token, and why.
    pub(super) failed: Vec<(u64, Failure)>,
    /// Requests whose search has ended.
    pub(super) found: Vec<u64>,
    /// Requests whose sequences search.
    searching: Vec<u64>,
}

/// What a sampled token is.
pub(super) enum Outcome {
    /// A token of the sequence.
    Token(Option<Box<TokenLogprobs>>),
    /// Its last token: its guide lets nothing follow.
    Last(Option<Box<TokenLogprobs>>),
    /// None: the sequence had ended before, is needed no more, or waits for its guide.
    Nothing,
    /// A token of a beam.
    Beam,
}

impl Samples {
    /// Forgets the last step's.
    pub(super) fn clear(&mut self) {
        self.tokens.clear();
        self.outcomes.clear();
        self.earlier.clear();
        self.failed.clear();
        self.found.clear();
        self.searching.clear();
    }

    /// Samples a token for each sequence of `batch` that samples.
    pub(super) fn take(
        &mut self,
        batch: &Batch,
        logits: Logits<'_>,
        requests: &mut Requests,
        (sampler, drafting): (&mut Sampler, &mut Drafting),
    ) {
        let mut logits = logits.rows();
        for row in &batch.sequences {
            for (place, logits) in row.scored_tokens.clone().zip(&mut logits) {
                score(
                    row.id,
                    (row.computed_tokens + place - row.tokens.start) as usize,
                    logits,
                    (&mut *requests, &mut *sampler),
                );
            }
            if row.samples.is_empty() {
                continue;
            }
            if row.num_draft_tokens > 0 {
                let rows = logits.by_ref().take(1 + row.num_draft_tokens as usize);
                self.verify(batch, row, rows, (requests, sampler, drafting));
                continue;
            }
            let logits = logits.next().expect("invariant: there is a row of logits for each token wanted");
            // One copy for all sequences of a prompt.
            let mut kept: Option<Arc<[f32]>> = None;
            for &sequence in batch.samples_of(row) {
                let live = requests.live.get_mut(&sequence.request);
                let live = live.expect("invariant: what is scheduled is live");
                if live.search.is_some() {
                    self.see(sequence, logits, live, sampler);
                    continue;
                }
                let Some(_hold) = live.try_hold(sequence.index) else {
                    let kept = kept.get_or_insert_with(|| logits.into());
                    self.suspend(sequence, Arc::clone(kept), requests);
                    continue;
                };
                let token = self.sample(sequence, logits, live, sampler);
                if let Some(drafter) = live.drafter(sequence.index) {
                    drafting.learn(row, drafter, 0, token);
                }
            }
        }
        for index in 0..self.searching.len() {
            self.advance(self.searching[index], requests, false);
        }
    }

    /// Samples sequences that were suspended in earlier steps, those whose guides are ready. `waits` if it may wait for
    /// another thread that uses what a guide shares: nothing would wake the engine when that is done.
    pub(super) fn take_suspended(&mut self, requests: &mut Requests, waits: bool, sampler: &mut Sampler) {
        for number in std::mem::take(&mut requests.suspended) {
            let Some(live) = requests.live.get_mut(&number) else { continue };
            if live.search.is_some() {
                self.see_suspended(number, requests, waits, sampler);
                continue;
            }
            let indexes: Vec<u32> = live.logits.keys().copied().collect();
            for index in indexes {
                let hold = live.try_hold(index);
                let can_wait = waits && !live.guides[index as usize].is_away();
                // Its client may have aborted it.
                if !live.ended[index as usize] && hold.is_none() && !can_wait {
                    continue;
                }
                let logits = live.logits.remove(&index);
                if let Some(logits) = logits.filter(|_| !live.ended[index as usize]) {
                    self.sample(SequenceId::new(number, index), &logits, live, sampler);
                }
            }
            if !live.logits.is_empty() {
                requests.suspended.insert(number);
            }
        }
    }

    /// Lets a search that was suspended go on, if the guides of all its beams are ready.
    fn see_suspended(&mut self, number: u64, requests: &mut Requests, waits: bool, sampler: &mut Sampler) {
        let Some(live) = requests.live.get_mut(&number) else { return };
        if live.logits.keys().any(|&index| live.guides[index as usize].is_away()) {
            requests.suspended.insert(number);
            return;
        }
        let failed = std::mem::take(&mut live.logits)
            .into_iter()
            .find_map(|(index, logits)| see(index, &logits, live, sampler).err());
        for index in 0..live.histories.len() as u32 {
            self.tokens.push(SampledToken::new(SequenceId::new(number, index), 0));
            self.outcomes.push(Outcome::Nothing);
        }
        self.failed.extend(failed.map(|failure| (number, failure)));
        self.advance(number, requests, waits);
    }

    /// The sequence waits for its guide, with the logits that it is sampled from then.
    fn suspend(&mut self, sequence: SequenceId, logits: Arc<[f32]>, requests: &mut Requests) {
        let number = sequence.request;
        let live = requests.live.get_mut(&number).expect("invariant: what is scheduled is live");
        live.logits.insert(sequence.index, logits);
        requests.suspended.insert(number);
        self.tokens.push(SampledToken::suspended(sequence));
        self.outcomes.push(Outcome::Nothing);
    }

    /// Samples a token for a sequence whose guide is ready.
    fn sample(
        &mut self,
        sequence: SequenceId,
        logits: &[f32],
        live: &mut Live,
        sampler: &mut Sampler,
    ) -> TokenId {
        let (token, outcome) = match sample(sequence.index, logits, live, sampler) {
            Ok(sampled) => sampled,
            Err(failure) => {
                self.failed.push((sequence.request, failure));
                (0, Outcome::Nothing)
            }
        };
        self.tokens.push(SampledToken::new(sequence, token));
        self.outcomes.push(outcome);
        token
    }

    /// Samples after the last token of a row and after each of its drafts, as long as these are what was sampled before.
    fn verify<'a>(
        &mut self,
        batch: &Batch,
        row: &ScheduledSequence,
        mut logits: impl Iterator<Item = &'a [f32]>,
        (requests, sampler, drafting): (&mut Requests, &mut Sampler, &mut Drafting),
    ) {
        let (number, index) = (row.id.request, row.id.index);
        let live = requests.live.get_mut(&number).expect("invariant: what is scheduled is live");
        let Some(_hold) = live.try_hold(index) else {
            // The drafts were computed in vain.
            if let Some(drafter) = live.drafter(index) {
                drafter.counts.rejected += row.num_draft_tokens;
            }
            let first = logits.next().expect("invariant: there is a row of logits for each token wanted");
            self.suspend(row.id, first.into(), requests);
            logits.for_each(drop);
            return;
        };
        let drafts = &batch.tokens[batch.drafts_of(row)];
        let mut accepted = 0;
        let mut last = None;
        for (place, logits) in logits.enumerate() {
            // The logits of all drafts are there, wanted or not.
            if last.is_some() {
                continue;
            }
            match sample(index, logits, live, sampler) {
                Ok((token, Outcome::Token(logprobs)))
                    if drafts.get(place) == Some(&token)
                        && !live.stop.stop_token_ids.contains(&token)
                        && live.guides.get(index as usize).is_none_or(Slot::is_ready) =>
                {
                    accepted += 1;
                    self.earlier.push((token, logprobs));
                }
                Ok(sampled) => last = Some(sampled),
                Err(failure) => {
                    self.failed.push((number, failure));
                    last = Some((0, Outcome::Nothing));
                }
            }
        }
        let (token, outcome) = last.expect("invariant: no draft is after the last row of logits");
        if let Some(drafter) = live.drafter(index) {
            drafting.learn(row, drafter, accepted, token);
        }
        self.tokens.push(SampledToken { accepted_drafts: accepted, ..SampledToken::new(row.id, token) });
        self.outcomes.push(outcome);
    }

    /// Takes what may follow the beam of a sequence, if there is one. What follows is known when all have been seen.
    fn see(&mut self, sequence: SequenceId, logits: &[f32], live: &mut Live, sampler: &mut Sampler) {
        let (number, index) = (sequence.request, sequence.index);
        if self.searching.last() != Some(&number) {
            self.searching.push(number);
        }
        self.tokens.push(SampledToken::new(sequence, 0));
        self.outcomes.push(Outcome::Nothing);
        if live.guides.get(index as usize).is_some_and(Slot::is_away) {
            live.logits.insert(index, logits.into());
        } else if let Err(failure) = see(index, logits, live, sampler) {
            self.failed.push((number, failure));
        }
    }

    /// Lets the beams of a request go on, or suspends them if guides are not ready. `waits` as in [`Self::take_suspended`].
    fn advance(&mut self, number: u64, requests: &mut Requests, waits: bool) {
        if self.failed.iter().any(|failed| failed.0 == number) {
            return;
        }
        let live = requests.live.get_mut(&number).expect("invariant: what is scheduled is live");
        let holds = live.try_hold_all().or_else(|| waits.then(Vec::new));
        let holds = holds.filter(|_| live.logits.is_empty());
        let samples = self.tokens.iter_mut().zip(&mut self.outcomes);
        let samples = samples.filter(|(sampled, _)| sampled.sequence.request == number);
        let Some(_holds) = holds else {
            for (sampled, outcome) in samples {
                (*sampled, *outcome) = (SampledToken::suspended(sampled.sequence), Outcome::Nothing);
            }
            requests.suspended.insert(number);
            return;
        };
        let Some(mut search) = live.search.take() else { return };
        let moves = search.advance().to_vec();
        let mut complete = Vec::new();
        if let Err(failure) = follow(live, &moves, &mut complete) {
            self.failed.push((number, failure));
        }
        let has_ended = search.close(&complete);
        live.search = Some(search);
        if has_ended {
            self.found.push(number);
            return;
        }
        for (sampled, outcome) in samples {
            let slot = sampled.sequence.index;
            if let Some(&Move { from, token, .. }) = moves.iter().find(|to| to.slot == slot) {
                let parent = SequenceId::new(number, from);
                (*sampled, *outcome) =
                    (SampledToken { parent, token: Some(token), ..*sampled }, Outcome::Beam);
            }
        }
    }
}

/// Samples a token, and takes it in.
fn sample(
    index: u32,
    logits: &[f32],
    live: &mut Live,
    sampler: &mut Sampler,
) -> Result<(TokenId, Outcome), Failure> {
    let (token, outcome) = choose(index, logits, live, sampler)?;
    if !matches!(outcome, Outcome::Nothing) {
        live.histories[index as usize].push(token);
        if let Some(drafters) = &mut live.drafters {
            drafters.push(index as usize, live.histories.len(), token);
        }
    }
    Ok((token, outcome))
}

/// Shows the search what may follow the beam of a sequence, if there is one.
fn see(index: u32, logits: &[f32], live: &mut Live, sampler: &mut Sampler) -> Result<(), Failure> {
    let Some(search) = live.search.as_mut().filter(|search| search.has_beam(index)) else { return Ok(()) };
    let history = &live.histories[index as usize];
    let mut choice = Choice { sampling: &live.sampling, stop: &live.stop, history, index, allowed: None };
    if let Some(slot) = live.guides.get_mut(index as usize) {
        match slot.next(&live.stop, history.generated())? {
            Next::Sample(allowed) => choice.allowed = Some(allowed),
            Next::End => {
                search.see(index, Options { is_complete: true, ..Options::default() });
                return Ok(());
            }
        }
    }
    let options = sampler.options(logits, &choice, search.options())?;
    search.see(index, options);
    Ok(())
}

/// What is known of sequences goes with their beams. Adds to `complete` those after which nothing can follow.
fn follow(live: &mut Live, moves: &[Move], complete: &mut Vec<u32>) -> Result<(), Failure> {
    // All copies first: what they go on from is as it was.
    for &Move { slot, from, is_beam, .. } in moves.iter().filter(|to| to.from != to.slot) {
        let (slot, from) = (slot as usize, from as usize);
        if is_beam {
            live.histories[slot] = live.histories[from].clone();
        }
        if !live.guides.is_empty() {
            live.guides[slot] = if is_beam { live.guides[from].fork() } else { Slot::Gone };
        }
    }
    for &Move { slot, token, .. } in moves.iter().filter(|to| to.is_beam) {
        live.histories[slot as usize].push(token);
        if let Some(guide) = live.guides.get_mut(slot as usize)
            && guide.commit(token, &live.stop)?
        {
            *guide = Slot::Complete;
            complete.push(slot);
        }
    }
    Ok(())
}

/// Takes the log probability of the token after the one at `position` of a prompt.
fn score(
    sequence: SequenceId,
    position: usize,
    logits: &[f32],
    (requests, sampler): (&mut Requests, &mut Sampler),
) {
    let live = requests.live.get_mut(&sequence.request).expect("invariant: what is scheduled is live");
    let scores = live.scores.as_mut().zip(live.sampling.prompt_logprobs);
    let (scores, count) = scores.expect("invariant: whose scores are wanted has asked for them");
    assert_eq!(scores.tokens.len(), position, "invariant: a prompt is scored in order");
    scores.tokens.push(sampler.score(logits, scores.prompt[position + 1], count));
}

fn choose(
    index: u32,
    logits: &[f32],
    live: &mut Live,
    sampler: &mut Sampler,
) -> Result<(TokenId, Outcome), Failure> {
    let history = &live.histories[index as usize];
    let slot = live.guides.get_mut(index as usize);
    let mut choice = Choice { sampling: &live.sampling, stop: &live.stop, history, index, allowed: None };
    let Some(slot) = slot else {
        let token = sampler.sample(logits, &choice)?;
        return Ok((token, Outcome::Token(logprobs(&choice, logits, token, sampler))));
    };
    match slot.next(&live.stop, history.generated())? {
        Next::End => return Ok((0, Outcome::Nothing)),
        Next::Sample(allowed) => choice.allowed = Some(allowed),
    }
    let token = sampler.sample(logits, &choice)?;
    let logprobs = logprobs(&choice, logits, token, sampler);
    let ends = slot.commit(token, &live.stop)?;
    Ok((token, if ends { Outcome::Last(logprobs) } else { Outcome::Token(logprobs) }))
}

fn logprobs(
    choice: &Choice<'_>,
    logits: &[f32],
    token: TokenId,
    sampler: &mut Sampler,
) -> Option<Box<TokenLogprobs>> {
    choice.sampling.logprobs.map(|count| Box::new(sampler.logprobs(logits, token, count)))
}

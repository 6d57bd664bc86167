//! What a step samples: a token for each sequence, with its log probabilities, or that it has ended.

use server_scheduler::{Batch, Row, Sampled, SequenceId, TokenId};

use super::drafts::Drafting;
use super::guides::{Next, Slot};
use super::{Live, Requests, index_of, request_of};
use crate::request::{Failure, TokenLogprobs};
use crate::runner::Logits;
use crate::sampler::{Choice, Sampler};
use crate::search::{Move, Options};

#[derive(Default)]
pub(super) struct Samples {
    /// In the order of the batch's samples; a sequence that has no new token has some.
    pub(super) tokens: Vec<Sampled>,
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
    /// None: the sequence had ended before, or is needed no more.
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
        for row in &batch.rows {
            for (place, logits) in row.scored.clone().zip(&mut logits) {
                score(
                    row.sequence,
                    (row.past + place - row.tokens.start) as usize,
                    logits,
                    (&mut *requests, &mut *sampler),
                );
            }
            if row.samples.is_empty() {
                continue;
            }
            if row.drafts > 0 {
                let rows = logits.by_ref().take(1 + row.drafts as usize);
                self.verify(batch, row, rows, (requests, sampler, drafting));
                continue;
            }
            let logits = logits.next().expect("invariant: there is a row of logits for each token wanted");
            for &sequence in batch.row_samples(row) {
                let live = requests.live.get_mut(&request_of(sequence));
                let live = live.expect("invariant: what is scheduled is live");
                if live.search.is_some() {
                    self.see(sequence, logits, live, sampler);
                    continue;
                }
                let (token, outcome) = match sample(index_of(sequence), logits, live, sampler) {
                    Ok(sampled) => sampled,
                    Err(failure) => {
                        self.failed.push((request_of(sequence), failure));
                        (0, Outcome::Nothing)
                    }
                };
                if let Some(drafter) = live.drafters.get_mut(index_of(sequence) as usize) {
                    drafting.learn(row, drafter, 0, token);
                }
                self.tokens.push(Sampled::new(sequence, token));
                self.outcomes.push(outcome);
            }
        }
        for index in 0..self.searching.len() {
            self.advance(self.searching[index], requests);
        }
    }

    /// Samples after the last token of a row and after each of its drafts, as long as these are what was sampled before.
    fn verify<'a>(
        &mut self,
        batch: &Batch,
        row: &Row,
        logits: impl Iterator<Item = &'a [f32]>,
        (requests, sampler, drafting): (&mut Requests, &mut Sampler, &mut Drafting),
    ) {
        let (number, index) = (request_of(row.sequence), index_of(row.sequence));
        let live = requests.live.get_mut(&number).expect("invariant: what is scheduled is live");
        let drafts = &batch.tokens[batch.row_drafts(row)];
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
                        && !live.stop.tokens.contains(&token)
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
        drafting.learn(row, &mut live.drafters[index as usize], accepted, token);
        self.tokens.push(Sampled { accepted, ..Sampled::new(row.sequence, token) });
        self.outcomes.push(outcome);
    }

    /// Takes what may follow the beam of a sequence, if there is one. What follows is known when all have been seen.
    fn see(&mut self, sequence: SequenceId, logits: &[f32], live: &mut Live, sampler: &mut Sampler) {
        let number = request_of(sequence);
        if self.searching.last() != Some(&number) {
            self.searching.push(number);
        }
        self.tokens.push(Sampled::new(sequence, 0));
        self.outcomes.push(Outcome::Nothing);
        if let Err(failure) = see(index_of(sequence), logits, live, sampler) {
            self.failed.push((number, failure));
        }
    }

    /// Lets the beams of a request go on.
    fn advance(&mut self, number: u64, requests: &mut Requests) {
        if self.failed.iter().any(|failed| failed.0 == number) {
            return;
        }
        let live = requests.live.get_mut(&number).expect("invariant: what is scheduled is live");
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
        let samples = self.tokens.iter_mut().zip(&mut self.outcomes);
        for (sampled, outcome) in samples.filter(|(sampled, _)| request_of(sampled.sequence) == number) {
            let slot = index_of(sampled.sequence);
            if let Some(&Move { from, token, .. }) = moves.iter().find(|to| to.slot == slot) {
                let from = super::sequence_of(number, from);
                (*sampled, *outcome) = (Sampled { from, token, ..*sampled }, Outcome::Beam);
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
        if let Some(drafter) = live.drafters.get_mut(index as usize) {
            drafter.push(token);
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
    let live = requests.live.get_mut(&request_of(sequence)).expect("invariant: what is scheduled is live");
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

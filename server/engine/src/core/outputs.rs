//! The outputs of a step: how each sequence of the batch continues.

use std::sync::Arc;

use server_scheduler::{Batch, SampledToken, ScheduledSequence, SequenceId, TokenId};

use crate::guides::slot::{GuideDecision, GuideSlot};
use crate::logprobs::TokenLogprobs;
use crate::request::Failure;
use crate::requests::{ActiveRequest, Requests};
use crate::runner::Logits;
use crate::sampler::{Sampler, SamplingContext};
use crate::search::{Candidates, Move};
use crate::speculator::Speculator;

/// A generated token with its log probabilities, if they were requested.
pub(super) struct GeneratedToken {
    pub(super) token: TokenId,
    pub(super) logprobs: Option<Box<TokenLogprobs>>,
}

/// How a sequence continues.
pub(super) enum StepOutput {
    /// The accepted drafts and the token sampled after them.
    Tokens {
        sequence: SequenceId,
        accepted_drafts: Vec<GeneratedToken>,
        token: GeneratedToken,
        /// Whether the guide allows no token after this one.
        is_last: bool,
    },
    /// No token follows the accepted drafts: the sequence has ended or failed.
    End { sequence: SequenceId, accepted_drafts: Vec<GeneratedToken> },
    /// No token is known yet, because the guide is not ready.
    Suspended { sequence: SequenceId },
    /// The next token of a beam that continues `parent`.
    Beam { sequence: SequenceId, parent: SequenceId, token: TokenId },
}

impl StepOutput {
    pub(super) fn sequence(&self) -> SequenceId {
        match *self {
            Self::Tokens { sequence, .. }
            | Self::End { sequence, .. }
            | Self::Suspended { sequence }
            | Self::Beam { sequence, .. } => sequence,
        }
    }

    /// The output as the scheduler expects it. A sequence that ends gets an arbitrary token, and is aborted afterwards.
    pub(super) fn sampled_token(&self) -> SampledToken {
        match self {
            &Self::Suspended { sequence } => SampledToken::suspended(sequence),
            &Self::Beam { sequence, parent, token } => {
                SampledToken { parent, ..SampledToken::new(sequence, token) }
            }
            Self::Tokens { sequence, accepted_drafts, token, .. } => SampledToken {
                accepted_drafts: accepted_drafts.len() as u32,
                ..SampledToken::new(*sequence, token.token)
            },
            Self::End { sequence, accepted_drafts } => SampledToken {
                accepted_drafts: accepted_drafts.len() as u32,
                ..SampledToken::new(*sequence, 0)
            },
        }
    }
}

/// The outputs of a step. Their memory is reused in every step.
#[derive(Default)]
pub(super) struct StepOutputs {
    /// The outputs in the order of [`Batch::samples`].
    pub(super) outputs: Vec<StepOutput>,
    /// The requests for which no token could be sampled.
    pub(super) failures: Vec<(u64, Failure)>,
    /// The requests whose search has ended.
    pub(super) finished_searches: Vec<u64>,
    /// The requests in this step that use beam search.
    searching: Vec<u64>,
}

/// Whether the engine may wait for another thread that uses shared guide state.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LockWait {
    Allowed,
    /// The sequence is suspended instead.
    Never,
}

impl StepOutputs {
    pub(super) fn clear(&mut self) {
        let Self { outputs, failures, finished_searches, searching } = self;
        outputs.clear();
        failures.clear();
        finished_searches.clear();
        searching.clear();
    }

    /// Samples a token for each sequence in the samples of `batch`.
    pub(super) fn sample_batch(
        &mut self,
        batch: &Batch,
        logits: Logits<'_>,
        requests: &mut Requests,
        sampler: &mut Sampler,
        speculator: &mut Speculator,
    ) {
        let mut logits = logits.rows();
        for scheduled in &batch.sequences {
            for (index, logits) in scheduled.scored_tokens.clone().zip(&mut logits) {
                let position = scheduled.computed_tokens + index - scheduled.tokens.start;
                score(scheduled.id, position as usize, logits, requests, sampler);
            }
            if scheduled.samples.is_empty() {
                continue;
            }
            if scheduled.num_draft_tokens > 0 {
                let logits = logits.by_ref().take(1 + scheduled.num_draft_tokens as usize);
                self.verify_drafts(batch, scheduled, logits, requests, sampler, speculator);
                continue;
            }
            let logits = logits.next().expect("invariant: each sampled token has logits");
            // All suspended siblings share one copy of the logits.
            let mut copy: Option<Arc<[f32]>> = None;
            for &sequence in batch.samples_of(scheduled) {
                let active = requests.active.get_mut(&sequence.request);
                let active = active.expect("invariant: a scheduled request is active");
                if active.search.is_some() {
                    self.add_candidates(sequence, logits, active, sampler);
                    continue;
                }
                let Some(_lock) = active.try_lock_commit(sequence.index) else {
                    let copy = copy.get_or_insert_with(|| logits.into());
                    self.suspend(sequence, Arc::clone(copy), requests);
                    continue;
                };
                let token = self.sample(sequence, logits, active, sampler, speculator);
                speculator.record_sampled(scheduled, sequence, 0, token);
            }
        }
        for index in 0..self.searching.len() {
            self.advance_search(self.searching[index], requests, LockWait::Never);
        }
    }

    /// Samples suspended sequences of earlier steps whose guides are ready.
    pub(super) fn sample_suspended(
        &mut self,
        requests: &mut Requests,
        wait: LockWait,
        sampler: &mut Sampler,
        speculator: &mut Speculator,
    ) {
        for number in std::mem::take(&mut requests.suspended) {
            let Some(active) = requests.active.get_mut(&number) else { continue };
            if active.search.is_some() {
                self.resume_search(number, requests, wait, sampler);
                continue;
            }
            let indexes: Vec<u32> = active.suspended_logits.keys().copied().collect();
            for index in indexes {
                let lock = active.try_lock_commit(index);
                let can_wait = wait == LockWait::Allowed && !active.guides[index as usize].is_pending();
                // The client may have aborted the sequence.
                let has_ended = active.ended[index as usize];
                if !has_ended && lock.is_none() && !can_wait {
                    continue;
                }
                let logits = active.suspended_logits.remove(&index);
                if let Some(logits) = logits.filter(|_| !has_ended) {
                    self.sample(SequenceId::new(number, index), &logits, active, sampler, speculator);
                }
            }
            if !active.suspended_logits.is_empty() {
                requests.suspended.insert(number);
            }
        }
    }

    /// Continues a suspended search if the guides of all its beams are ready.
    fn resume_search(&mut self, number: u64, requests: &mut Requests, wait: LockWait, sampler: &mut Sampler) {
        let Some(active) = requests.active.get_mut(&number) else { return };
        if active.suspended_logits.keys().any(|&index| active.guides[index as usize].is_pending()) {
            requests.suspended.insert(number);
            return;
        }
        let failure = std::mem::take(&mut active.suspended_logits)
            .into_iter()
            .find_map(|(index, logits)| find_candidates(index, &logits, active, sampler).err());
        for index in 0..active.histories.len() as u32 {
            self.end(SequenceId::new(number, index));
        }
        self.failures.extend(failure.map(|failure| (number, failure)));
        self.advance_search(number, requests, wait);
    }

    /// Suspends a sequence. Its next token is sampled from `logits` when its guide is ready.
    fn suspend(&mut self, sequence: SequenceId, logits: Arc<[f32]>, requests: &mut Requests) {
        let active = requests.active.get_mut(&sequence.request);
        let active = active.expect("invariant: a scheduled request is active");
        active.suspended_logits.insert(sequence.index, logits);
        requests.suspended.insert(sequence.request);
        self.outputs.push(StepOutput::Suspended { sequence });
    }

    fn end(&mut self, sequence: SequenceId) {
        self.outputs.push(StepOutput::End { sequence, accepted_drafts: Vec::new() });
    }

    /// Samples a token for a sequence whose guide is ready. Returns the token for the scheduler.
    fn sample(
        &mut self,
        sequence: SequenceId,
        logits: &[f32],
        active: &mut ActiveRequest,
        sampler: &mut Sampler,
        speculator: &mut Speculator,
    ) -> TokenId {
        let output = match sample(sequence, logits, active, sampler, speculator) {
            Ok(Some(Sample { token, is_last })) => {
                StepOutput::Tokens { sequence, accepted_drafts: Vec::new(), token, is_last }
            }
            Ok(None) => StepOutput::End { sequence, accepted_drafts: Vec::new() },
            Err(failure) => {
                self.failures.push((sequence.request, failure));
                StepOutput::End { sequence, accepted_drafts: Vec::new() }
            }
        };
        let token = output.sampled_token().token.unwrap_or(0);
        self.outputs.push(output);
        token
    }

    /// Samples a token after the last known token of a sequence, and after each draft token that equals the token
    /// sampled for its position.
    fn verify_drafts<'a>(
        &mut self,
        batch: &Batch,
        scheduled: &ScheduledSequence,
        mut logits: impl Iterator<Item = &'a [f32]>,
        requests: &mut Requests,
        sampler: &mut Sampler,
        speculator: &mut Speculator,
    ) {
        let sequence = scheduled.id;
        let active = requests.active.get_mut(&sequence.request);
        let active = active.expect("invariant: a scheduled request is active");
        let Some(_lock) = active.try_lock_commit(sequence.index) else {
            speculator.record_unused(scheduled);
            let first = logits.next().expect("invariant: each sampled token has logits");
            self.suspend(sequence, first.into(), requests);
            // The logits of the drafts are skipped.
            logits.for_each(drop);
            return;
        };
        let drafts = &batch.tokens[batch.drafts_of(scheduled)];
        let mut accepted_drafts = Vec::new();
        let mut last = None;
        for (index, logits) in logits.enumerate() {
            // The logits after the first rejected draft are skipped.
            if last.is_some() {
                continue;
            }
            match sample(sequence, logits, active, sampler, speculator) {
                Ok(Some(Sample { token, is_last: false }))
                    if drafts.get(index) == Some(&token.token)
                        && !active.stop.stop_token_ids.contains(&token.token)
                        && active.guides.get(sequence.index as usize).is_none_or(GuideSlot::is_ready) =>
                {
                    accepted_drafts.push(token);
                }
                Ok(sample) => last = Some(sample),
                Err(failure) => {
                    self.failures.push((sequence.request, failure));
                    last = Some(None);
                }
            }
        }
        let num_accepted = accepted_drafts.len() as u32;
        let output = match last.expect("invariant: no draft follows the last logits") {
            Some(Sample { token, is_last }) => {
                StepOutput::Tokens { sequence, accepted_drafts, token, is_last }
            }
            None => StepOutput::End { sequence, accepted_drafts },
        };
        let token = output.sampled_token().token.unwrap_or(0);
        speculator.record_sampled(scheduled, sequence, num_accepted, token);
        self.outputs.push(output);
    }

    /// Passes the candidates of a beam to its search. The search advances when it has the candidates of all beams.
    fn add_candidates(
        &mut self,
        sequence: SequenceId,
        logits: &[f32],
        active: &mut ActiveRequest,
        sampler: &mut Sampler,
    ) {
        let SequenceId { request, index } = sequence;
        if self.searching.last() != Some(&request) {
            self.searching.push(request);
        }
        self.end(sequence);
        if active.guides.get(index as usize).is_some_and(GuideSlot::is_pending) {
            active.suspended_logits.insert(index, logits.into());
        } else if let Err(failure) = find_candidates(index, logits, active, sampler) {
            self.failures.push((request, failure));
        }
    }

    /// Advances the beams of a request, or suspends them if guides are not ready.
    fn advance_search(&mut self, number: u64, requests: &mut Requests, wait: LockWait) {
        if self.failures.iter().any(|failure| failure.0 == number) {
            return;
        }
        let active = requests.active.get_mut(&number).expect("invariant: a scheduled request is active");
        let locks = active.try_lock_all().or_else(|| (wait == LockWait::Allowed).then(Vec::new));
        let locks = locks.filter(|_| active.suspended_logits.is_empty());
        let outputs = self.outputs.iter_mut().filter(|output| output.sequence().request == number);
        let Some(_locks) = locks else {
            outputs.for_each(|output| *output = StepOutput::Suspended { sequence: output.sequence() });
            requests.suspended.insert(number);
            return;
        };
        let Some(mut search) = active.search.take() else { return };
        let moves = search.advance().to_vec();
        let mut complete = Vec::new();
        if let Err(failure) = apply_moves(active, &moves, &mut complete) {
            self.failures.push((number, failure));
        }
        let has_ended = search.finish_step(&complete);
        active.search = Some(search);
        if has_ended {
            self.finished_searches.push(number);
            return;
        }
        for output in outputs {
            let sequence = output.sequence();
            if let Some(&Move { parent, token, .. }) = moves.iter().find(|to| to.slot == sequence.index) {
                let parent = SequenceId::new(number, parent);
                *output = StepOutput::Beam { sequence, parent, token };
            }
        }
    }
}

struct Sample {
    token: GeneratedToken,
    /// Whether the guide allows no token after this one.
    is_last: bool,
}

/// Samples a token and appends it to the history. `None` if the guide allows no further token.
fn sample(
    sequence: SequenceId,
    logits: &[f32],
    active: &mut ActiveRequest,
    sampler: &mut Sampler,
    speculator: &mut Speculator,
) -> Result<Option<Sample>, Failure> {
    let ActiveRequest { sampling, stop, histories, guides, .. } = active;
    let history = &histories[sequence.index as usize];
    let mut context = SamplingContext { sampling, stop, history, index: sequence.index, allowed: None };
    let mut guide = guides.get_mut(sequence.index as usize);
    if let Some(guide) = &mut guide {
        match guide.decide(stop, history.generated())? {
            GuideDecision::End => return Ok(None),
            GuideDecision::Sample(allowed) => context.allowed = Some(allowed),
        }
    }
    let token = sampler.sample(logits, &context)?;
    let logprobs = sampling.logprobs.map(|count| Box::new(sampler.logprobs(logits, token, count)));
    let is_last = match guide {
        Some(guide) => guide.commit(token, stop)?,
        None => false,
    };
    histories[sequence.index as usize].push(token);
    speculator.push(sequence, histories.len(), token);
    Ok(Some(Sample { token: GeneratedToken { token, logprobs }, is_last }))
}

/// Passes the candidates for the next token of a beam to its search. Does nothing if the sequence has no beam.
fn find_candidates(
    index: u32,
    logits: &[f32],
    active: &mut ActiveRequest,
    sampler: &mut Sampler,
) -> Result<(), Failure> {
    let ActiveRequest { sampling, stop, histories, guides, search, .. } = active;
    let Some(search) = search.as_mut().filter(|search| search.has_beam(index)) else { return Ok(()) };
    let history = &histories[index as usize];
    let mut context = SamplingContext { sampling, stop, history, index, allowed: None };
    if let Some(guide) = guides.get_mut(index as usize) {
        match guide.decide(stop, history.generated())? {
            GuideDecision::Sample(allowed) => context.allowed = Some(allowed),
            GuideDecision::End => {
                search.add_candidates(index, Candidates { is_complete: true, ..Candidates::default() });
                return Ok(());
            }
        }
    }
    let candidates = sampler.candidates(logits, &context, search.num_candidates())?;
    search.add_candidates(index, candidates);
    Ok(())
}

/// Moves the histories and guides of sequences along with their beams. Adds to `complete` the sequences that no token
/// can follow.
fn apply_moves(active: &mut ActiveRequest, moves: &[Move], complete: &mut Vec<u32>) -> Result<(), Failure> {
    // Copy the states of all parents before changing any, because several beams may continue the same parent.
    for &Move { slot, parent, is_beam, .. } in moves.iter().filter(|to| to.parent != to.slot) {
        let (slot, parent) = (slot as usize, parent as usize);
        if is_beam {
            active.histories[slot] = active.histories[parent].clone();
        }
        if !active.guides.is_empty() {
            active.guides[slot] = if is_beam { active.guides[parent].fork() } else { GuideSlot::Released };
        }
    }
    for &Move { slot, token, .. } in moves.iter().filter(|to| to.is_beam) {
        active.histories[slot as usize].push(token);
        if let Some(guide) = active.guides.get_mut(slot as usize)
            && guide.commit(token, &active.stop)?
        {
            *guide = GuideSlot::Complete;
            complete.push(slot);
        }
    }
    Ok(())
}

/// Records the log probability of the prompt token after the one at `position`.
fn score(
    sequence: SequenceId,
    position: usize,
    logits: &[f32],
    requests: &mut Requests,
    sampler: &mut Sampler,
) {
    let active = requests.active.get_mut(&sequence.request);
    let active = active.expect("invariant: a scheduled request is active");
    let scores = active.scores.as_mut().zip(active.sampling.prompt_logprobs);
    let (scores, count) = scores.expect("invariant: a scored prompt has requested scores");
    assert_eq!(scores.tokens.len(), position, "invariant: a prompt is scored in order");
    scores.tokens.push(sampler.score(logits, scores.prompt[position + 1], count));
}

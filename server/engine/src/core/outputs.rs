//! The outputs of a step: how each sequence of the batch continues.

use std::sync::Arc;

use server_scheduler::{Batch, SampledToken, SequenceId, TokenId};

use super::jobs::{GeneratedToken, SamplingJob, SamplingResult, SamplingWork, SequenceState};
use crate::guide::CommitLock;
use crate::guides::slot::GuideSlot;
use crate::logprobs::ScoredToken;
use crate::request::Failure;
use crate::requests::{ActiveRequest, Requests};
use crate::runner::Logits;
use crate::search::Move;
use crate::speculator::Speculator;
use crate::workers::Workers;

/// How a sequence continues.
pub(super) enum StepOutput {
    /// The accepted drafts and the token sampled after them.
    Tokens {
        sequence: SequenceId,
        accepted_drafts: Vec<GeneratedToken>,
        token: GeneratedToken,
        /// Whether `token` is a stop token, or the guide allows no token after it. False without a guide.
        is_last: bool,
    },
    /// No token follows the accepted drafts: the sequence has ended or failed.
    End { sequence: SequenceId, accepted_drafts: Vec<GeneratedToken> },
    /// No token is known yet, because the guide is not ready or another thread uses its shared state.
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

    /// The output as the scheduler expects it. The token of [`Self::End`] is arbitrary, because the sequence is aborted
    /// afterward.
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
    /// The outputs. Those of a batch are in the order of [`Batch::samples`].
    pub(super) outputs: Vec<StepOutput>,
    /// The requests for which sampling or scoring failed, with the reasons.
    pub(super) failures: Vec<(u64, Failure)>,
    /// The requests whose search has ended.
    pub(super) finished_searches: Vec<u64>,
    /// The requests whose beams this step samples.
    searching: Vec<u64>,
}

/// Whether the engine may wait for another thread that uses shared guide state.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LockWait {
    Allowed,
    /// The sequence is suspended instead.
    Never,
}

/// The sequences that a run of sampling jobs samples.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SamplePhase {
    /// The sequences of the computed batch.
    Batch,
    /// The sequences that were suspended in earlier steps.
    Resumed,
}

/// The jobs of a step.
#[derive(Default)]
struct PlannedJobs<'a> {
    jobs: Vec<SamplingJob<'a>>,
    /// The locks of the guides to which tokens are committed when all jobs are done.
    locks: Vec<CommitLock>,
}

impl StepOutputs {
    pub(super) fn clear(&mut self) {
        let Self { outputs, failures, finished_searches, searching } = self;
        outputs.clear();
        failures.clear();
        finished_searches.clear();
        searching.clear();
    }

    /// Scores the requested tokens of prompts, and samples the sequences in `batch.samples`.
    pub(super) fn sample_batch(
        &mut self,
        batch: &Batch,
        mut logits: Logits<'_>,
        requests: &mut Requests,
        workers: &mut Workers,
        speculator: &mut Speculator,
    ) {
        let mut planned = PlannedJobs::default();
        for scheduled in &batch.sequences {
            for index in scheduled.scored_tokens.clone() {
                let position = scheduled.computed_tokens + index - scheduled.tokens.start;
                let work = score(scheduled.id, position as usize, requests);
                planned.jobs.push(SamplingJob::new(scheduled.id, logits.split_off_first(1), work));
            }
            if scheduled.samples.is_empty() {
                continue;
            }
            let logits = logits.split_off_first(1 + scheduled.num_draft_tokens as usize);
            let drafts = &batch.tokens[batch.drafts_of(scheduled)];
            // All suspended siblings share one copy of the logits.
            let mut copy: Option<Arc<[f32]>> = None;
            for &sequence in batch.samples_of(scheduled) {
                let active = active_of(sequence, requests);
                if active.search.is_some() {
                    self.plan_beam(sequence, logits, active, &mut planned.jobs);
                } else if let Some(lock) = active.try_lock_commit(sequence.index) {
                    planned.locks.push(lock);
                    self.plan_sample(sequence, logits, drafts, active, &mut planned.jobs);
                } else {
                    speculator.record_unused(scheduled);
                    let copy = copy.get_or_insert_with(|| first_row(logits).into());
                    self.suspend(sequence, Arc::clone(copy), requests);
                }
            }
        }
        self.run(planned, requests, workers, speculator, SamplePhase::Batch);
        for index in 0..self.searching.len() {
            self.advance_search(self.searching[index], requests, LockWait::Never);
        }
    }

    /// Samples the sequences that were suspended in earlier steps and whose guides are now ready.
    pub(super) fn sample_suspended(
        &mut self,
        requests: &mut Requests,
        wait: LockWait,
        workers: &mut Workers,
        speculator: &mut Speculator,
    ) {
        let mut planned = PlannedJobs::default();
        let ready = take_ready(requests, wait, &mut planned.locks);
        for ReadySequences { request, logits } in &ready {
            let active = requests.active.get_mut(request).expect("invariant: a suspended request is active");
            for (index, logits) in logits {
                let sequence = SequenceId::new(*request, *index);
                let logits = Logits::new(logits, logits.len() as u32);
                if active.search.is_some() {
                    plan_candidates(sequence, logits, active, &mut planned.jobs);
                } else {
                    self.plan_sample(sequence, logits, &[], active, &mut planned.jobs);
                }
            }
            if active.search.is_some() {
                self.searching.push(*request);
                (0..active.histories.len() as u32)
                    .for_each(|index| self.end(SequenceId::new(*request, index)));
            }
        }
        self.run(planned, requests, workers, speculator, SamplePhase::Resumed);
        for index in 0..self.searching.len() {
            self.advance_search(self.searching[index], requests, wait);
        }
    }

    /// Adds the job that samples a sequence whose guide is ready.
    fn plan_sample<'a>(
        &mut self,
        sequence: SequenceId,
        logits: Logits<'a>,
        drafts: &'a [TokenId],
        active: &mut ActiveRequest,
        jobs: &mut Vec<SamplingJob<'a>>,
    ) {
        let state = SequenceState::take(sequence.index, active);
        let output = self.outputs.len();
        jobs.push(SamplingJob::new(sequence, logits, SamplingWork::Sample { state, drafts, output }));
        self.end(sequence);
    }

    /// Adds the job that finds the candidates of a beam, or stores the logits until the guide of the beam is ready. The
    /// search advances when it has the candidates of all beams.
    fn plan_beam<'a>(
        &mut self,
        sequence: SequenceId,
        logits: Logits<'a>,
        active: &mut ActiveRequest,
        jobs: &mut Vec<SamplingJob<'a>>,
    ) {
        let SequenceId { request, index } = sequence;
        if self.searching.last() != Some(&request) {
            self.searching.push(request);
        }
        self.end(sequence);
        if active.guides.get(index as usize).is_some_and(GuideSlot::is_pending) {
            active.suspended_logits.insert(index, first_row(logits).into());
        } else {
            plan_candidates(sequence, logits, active, jobs);
        }
    }

    /// Runs the jobs on the sampling threads, and applies the results in the order in which the jobs were planned.
    fn run(
        &mut self,
        planned: PlannedJobs<'_>,
        requests: &mut Requests,
        workers: &mut Workers,
        speculator: &mut Speculator,
        phase: SamplePhase,
    ) {
        let PlannedJobs { mut jobs, locks } = planned;
        let num_logits = jobs.iter().map(|job| job.logits.len()).sum();
        workers.for_each(&mut jobs, num_logits, SamplingJob::run);
        for SamplingJob { sequence, work, outcome, .. } in jobs {
            let active = active_of(sequence, requests);
            match work {
                SamplingWork::Score { position, .. } => match outcome {
                    // After a failure, scores of the request may be missing, so no more are added.
                    _ if self.has_failed(sequence) => {}
                    Ok(SamplingResult::Score(score)) => add_score(position, score, active),
                    outcome => self.fail(sequence, outcome),
                },
                SamplingWork::FindCandidates { state, .. } => {
                    state.restore(active);
                    match (outcome, &mut active.search) {
                        (Ok(SamplingResult::Candidates(candidates)), Some(search)) => {
                            search.add_candidates(sequence.index, candidates);
                        }
                        (outcome, _) => self.fail(sequence, outcome),
                    }
                }
                SamplingWork::Sample { state, drafts, output } => {
                    state.restore(active);
                    self.outputs[output] = self.commit(sequence, outcome, active, speculator);
                    if phase == SamplePhase::Batch {
                        let sampled = self.outputs[output].sampled_token();
                        let token = sampled.token.unwrap_or(0);
                        speculator.record_sampled(
                            sequence,
                            drafts.len() as u32,
                            sampled.accepted_drafts,
                            token,
                        );
                    }
                }
            }
        }
        drop(locks);
    }

    /// Commits the sampled tokens of a sequence to its guide. Returns the output of the sequence.
    fn commit(
        &mut self,
        sequence: SequenceId,
        outcome: Result<SamplingResult, Failure>,
        active: &mut ActiveRequest,
        speculator: &mut Speculator,
    ) -> StepOutput {
        let end = |accepted_drafts| StepOutput::End { sequence, accepted_drafts };
        let mut record = |tokens: &[GeneratedToken]| {
            tokens.iter().for_each(|token| speculator.push(sequence, active.histories.len(), token.token));
        };
        let mut tokens = match outcome {
            Ok(SamplingResult::Tokens(tokens)) => tokens,
            Ok(SamplingResult::End(accepted_drafts)) => {
                record(&accepted_drafts);
                return end(accepted_drafts);
            }
            outcome => {
                self.fail(sequence, outcome);
                return end(Vec::new());
            }
        };
        let is_last = match active.guides.get_mut(sequence.index as usize) {
            Some(guide) => guide.commit(tokens.iter().map(|token| token.token), &active.stop),
            None => Ok(false),
        };
        match is_last {
            Ok(is_last) => {
                record(&tokens);
                let token = tokens.pop().expect("invariant: a sampled sequence has a token");
                StepOutput::Tokens { sequence, accepted_drafts: tokens, token, is_last }
            }
            Err(error) => {
                self.failures.push((sequence.request, error.into()));
                end(Vec::new())
            }
        }
    }

    /// Records the failure of a job.
    fn fail(&mut self, sequence: SequenceId, outcome: Result<SamplingResult, Failure>) {
        let unexpected =
            || Failure::Step("a sampling job returned the result of another kind of job".to_owned());
        self.failures.push((sequence.request, outcome.err().unwrap_or_else(unexpected)));
    }

    fn has_failed(&self, sequence: SequenceId) -> bool {
        self.failures.iter().any(|(request, _)| *request == sequence.request)
    }

    /// Suspends a sequence. Its next token is sampled from `logits` when its guide is ready.
    fn suspend(&mut self, sequence: SequenceId, logits: Arc<[f32]>, requests: &mut Requests) {
        active_of(sequence, requests).suspended_logits.insert(sequence.index, logits);
        requests.suspended.insert(sequence.request);
        self.outputs.push(StepOutput::Suspended { sequence });
    }

    fn end(&mut self, sequence: SequenceId) {
        self.outputs.push(StepOutput::End { sequence, accepted_drafts: Vec::new() });
    }

    /// Advances the beams of a request. Suspends them instead if a guide is not ready, or if another thread uses the
    /// shared state of the guides and `wait` does not allow waiting.
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

/// The suspended sequences of a request that can now be sampled.
struct ReadySequences {
    request: u64,
    /// The index and the logits of each sequence.
    logits: Vec<(u32, Arc<[f32]>)>,
}

/// Takes the logits of suspended sequences whose guides are ready. Locks these guides, except those of beams, which are
/// locked when the search advances.
fn take_ready(requests: &mut Requests, wait: LockWait, locks: &mut Vec<CommitLock>) -> Vec<ReadySequences> {
    let mut ready = Vec::new();
    for request in std::mem::take(&mut requests.suspended) {
        let Some(active) = requests.active.get_mut(&request) else { continue };
        let ActiveRequest { suspended_logits, guides, search, ended, .. } = active;
        let is_pending = |index: u32| guides[index as usize].is_pending();
        let mut logits = Vec::new();
        if search.is_some() {
            // A beam search continues only when the guides of all its beams are ready.
            if suspended_logits.keys().any(|&index| is_pending(index)) {
                requests.suspended.insert(request);
                continue;
            }
            logits.extend(std::mem::take(suspended_logits));
        } else {
            suspended_logits.retain(|&index, row| {
                // The client may have aborted the sequence.
                if ended[index as usize] {
                    return false;
                }
                let lock = guides[index as usize].try_lock_commit();
                let can_wait = wait == LockWait::Allowed && !is_pending(index);
                if lock.is_none() && !can_wait {
                    return true;
                }
                locks.extend(lock);
                logits.push((index, Arc::clone(row)));
                false
            });
            if !suspended_logits.is_empty() {
                requests.suspended.insert(request);
            }
        }
        ready.push(ReadySequences { request, logits });
    }
    ready
}

/// Adds the job that finds the candidates for the next token of a beam. Does nothing if the sequence
/// has no beam.
fn plan_candidates<'a>(
    sequence: SequenceId,
    logits: Logits<'a>,
    active: &mut ActiveRequest,
    jobs: &mut Vec<SamplingJob<'a>>,
) {
    let search = active.search.as_ref().filter(|search| search.has_beam(sequence.index));
    let Some(count) = search.map(|search| search.num_candidates()) else { return };
    let state = SequenceState::take(sequence.index, active);
    jobs.push(SamplingJob::new(sequence, logits, SamplingWork::FindCandidates { state, count }));
}

/// Copies the histories and guides of parents to the slots of the beams that continue them, and appends the new tokens.
/// Adds the slots of beams that no token can follow to `complete`.
fn apply_moves(active: &mut ActiveRequest, moves: &[Move], complete: &mut Vec<u32>) -> Result<(), Failure> {
    // Copy the states of all parents before any token is added to them, because several beams may continue the same
    // parent. Each parent also continues in its own slot, so no copy overwrites the state of a parent.
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
            && guide.commit([token], &active.stop)?
        {
            *guide = GuideSlot::Complete;
            complete.push(slot);
        }
    }
    Ok(())
}

/// The work of scoring the prompt token after the one at `position`.
fn score<'a>(sequence: SequenceId, position: usize, requests: &mut Requests) -> SamplingWork<'a> {
    let active = active_of(sequence, requests);
    let scores = active.scores.as_ref().zip(active.sampling.prompt_logprobs);
    let (scores, count) = scores.expect("invariant: a scored prompt has requested scores");
    SamplingWork::Score { position, token: scores.prompt[position + 1], count }
}

fn add_score(position: usize, score: ScoredToken, active: &mut ActiveRequest) {
    let scores = active.scores.as_mut().expect("invariant: a scored prompt has requested scores");
    assert_eq!(scores.tokens.len(), position, "invariant: a prompt is scored in order");
    scores.tokens.push(score);
}

fn active_of(sequence: SequenceId, requests: &mut Requests) -> &mut ActiveRequest {
    requests.active.get_mut(&sequence.request).expect("invariant: a scheduled request is active")
}

fn first_row(logits: Logits<'_>) -> &[f32] {
    logits.rows().next().expect("invariant: each sampled token has logits")
}

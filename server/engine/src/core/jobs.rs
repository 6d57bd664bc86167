//! The part of sampling that can run on any thread: a job samples the tokens of one sequence, scores one prompt token,
//! or finds the candidates of one beam.
//!
//! A job owns everything that it changes, so the result depends neither on the thread nor on the other jobs. A job
//! commits no tokens to guides, because the states of different guides can share data.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use server_scheduler::{SequenceId, StopCriteria, TokenId};

use crate::guides::slot::{GuideDecision, GuideSlot};
use crate::logprobs::{ScoredToken, TokenLogprobs};
use crate::request::{Failure, Sampling};
use crate::requests::ActiveRequest;
use crate::runner::Logits;
use crate::sampler::{History, Sampler, SamplingContext};
use crate::search::Candidates;

/// A generated token with its log probabilities, if they were requested.
pub(super) struct GeneratedToken {
    pub(super) token: TokenId,
    pub(super) logprobs: Option<Box<TokenLogprobs>>,
}

/// The sampling of one sequence or beam, or the scoring of one prompt token.
pub(super) struct SamplingJob<'a> {
    pub(super) sequence: SequenceId,
    /// To sample: the logits of the last known token, and those of the draft tokens after it. To score: the logits of
    /// the token before the scored one.
    pub(super) logits: Logits<'a>,
    pub(super) work: SamplingWork<'a>,
    pub(super) outcome: Result<SamplingResult, Failure>,
}

/// The work of a job.
pub(super) enum SamplingWork<'a> {
    /// Computes the score of the token after the one at `position` of a prompt.
    Score { position: usize, token: TokenId, count: u32 },
    /// Samples the next token, and one more token after each accepted draft token. `output` is the index of the
    /// sequence in the outputs of the step.
    Sample { state: SequenceState, drafts: &'a [TokenId], output: usize },
    /// Finds the candidates for the next token of a beam.
    FindCandidates { state: SequenceState, count: u32 },
}

/// The result of a job.
pub(super) enum SamplingResult {
    Score(ScoredToken),
    /// The sampled tokens. All of them except the last are accepted drafts.
    Tokens(Vec<GeneratedToken>),
    /// The accepted drafts, after which the guide allows no token.
    End(Vec<GeneratedToken>),
    Candidates(Candidates),
}

/// The state of a sequence that sampling reads and changes.
pub(super) struct SequenceState {
    sampling: Arc<Sampling>,
    stop: Arc<StopCriteria>,
    index: u32,
    history: History,
    guide: Option<GuideSlot>,
}

impl<'a> SamplingJob<'a> {
    pub(super) fn new(sequence: SequenceId, logits: Logits<'a>, work: SamplingWork<'a>) -> Self {
        let outcome = Err(Failure::Step("the sequence was not sampled".to_owned()));
        Self { sequence, logits, work, outcome }
    }

    /// Computes the outcome. A panic fails only the request of this job.
    pub(super) fn run(&mut self, sampler: &mut Sampler) {
        // Unwind safety: a sampler keeps no state between calls, and the sequence is not used after a failure.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.compute(sampler)));
        self.outcome = outcome.unwrap_or_else(|_| Err(Failure::Step("sampling panicked".to_owned())));
    }

    fn compute(&mut self, sampler: &mut Sampler) -> Result<SamplingResult, Failure> {
        let mut rows = self.logits.rows();
        let mut next = || rows.next().expect("invariant: a job has logits");
        match &mut self.work {
            SamplingWork::Score { token, count, .. } => {
                Ok(SamplingResult::Score(sampler.score(next(), *token, *count)))
            }
            SamplingWork::Sample { state, drafts, .. } => {
                let mut tokens = Vec::with_capacity(1);
                // The logits after the first rejected draft are not used.
                for draft in drafts.iter().map(Some).chain([None]) {
                    let Some(token) = state.sample(next(), sampler)? else {
                        return Ok(SamplingResult::End(tokens));
                    };
                    let is_accepted = draft == Some(&token.token) && state.accept_draft(token.token);
                    tokens.push(token);
                    if !is_accepted {
                        break;
                    }
                }
                Ok(SamplingResult::Tokens(tokens))
            }
            SamplingWork::FindCandidates { state, count } => state.candidates(next(), *count, sampler),
        }
    }
}

impl SequenceState {
    /// Moves the state of a sequence into a job. [`Self::restore`] moves it back to the request.
    pub(super) fn take(index: u32, active: &mut ActiveRequest) -> Self {
        let guide = active.guides.get_mut(index as usize);
        Self {
            sampling: Arc::clone(&active.sampling),
            stop: Arc::clone(&active.stop),
            index,
            history: std::mem::take(&mut active.histories[index as usize]),
            guide: guide.map(|guide| std::mem::replace(guide, GuideSlot::Released)),
        }
    }

    pub(super) fn restore(self, active: &mut ActiveRequest) {
        active.histories[self.index as usize] = self.history;
        if let Some(guide) = self.guide {
            active.guides[self.index as usize] = guide;
        }
    }

    /// Samples a token and appends it to the history. `None` if the guide allows no further token.
    fn sample(&mut self, logits: &[f32], sampler: &mut Sampler) -> Result<Option<GeneratedToken>, Failure> {
        let Some(context) = self.context()? else { return Ok(None) };
        let token = sampler.sample(logits, &context)?;
        let logprobs = context.sampling.logprobs;
        let logprobs = logprobs.map(|count| Box::new(sampler.logprobs(logits, token, count)));
        self.history.push(token);
        Ok(Some(GeneratedToken { token, logprobs }))
    }

    /// Accepts a draft that equals the sampled token. Returns whether another token can be sampled after it in the same
    /// step.
    fn accept_draft(&mut self, draft: TokenId) -> bool {
        let is_stop = self.stop.stop_token_ids.contains(&draft);
        !is_stop && self.guide.as_mut().is_none_or(|guide| guide.follow_draft(draft))
    }

    fn candidates(
        &mut self,
        logits: &[f32],
        count: u32,
        sampler: &mut Sampler,
    ) -> Result<SamplingResult, Failure> {
        let candidates = match self.context()? {
            Some(context) => sampler.candidates(logits, &context, count)?,
            None => Candidates { is_complete: true, ..Candidates::default() },
        };
        Ok(SamplingResult::Candidates(candidates))
    }

    /// The context in which the next token is sampled. `None` if the guide allows no further token.
    fn context(&mut self) -> Result<Option<SamplingContext<'_>>, Failure> {
        let Self { sampling, stop, index, history, guide } = self;
        let allowed = match guide {
            Some(guide) => match guide.decide(stop, history.generated())? {
                GuideDecision::End => return Ok(None),
                GuideDecision::Sample(allowed) => Some(allowed),
            },
            None => None,
        };
        Ok(Some(SamplingContext { sampling, stop, history, index: *index, allowed }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_fails_only_its_own_job() {
        let logits = [0.0, 1.0, 2.0];
        // A token outside of the vocabulary causes a panic. The engine rejects requests with such tokens.
        let job = |token| {
            let work = SamplingWork::Score { position: 0, token, count: 1 };
            SamplingJob::new(SequenceId::new(0, 0), Logits::new(&logits, 3), work)
        };
        let mut sampler = Sampler::new();
        let mut jobs = [job(1), job(7), job(2)];
        jobs.iter_mut().for_each(|job| job.run(&mut sampler));
        let rank = |job: &SamplingJob<'_>| match &job.outcome {
            Ok(SamplingResult::Score(score)) => Some(score.rank),
            _ => None,
        };
        assert_eq!(jobs.each_ref().map(rank), [Some(2), None, Some(1)]);
        assert_eq!(jobs[1].outcome.as_ref().err(), Some(&Failure::Step("sampling panicked".to_owned())));
    }
}

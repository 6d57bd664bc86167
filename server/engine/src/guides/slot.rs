//! The guide of a sequence and its state between steps.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use server_scheduler::{StopCriteria, TokenId};

use crate::guide::{CommitLock, Guide, GuideError, GuideState, Progress, TokenSet};
use crate::request::Failure;

/// The guide of a sequence.
#[derive(Debug)]
pub(crate) enum GuideSlot {
    /// The guide has not started.
    New(Arc<dyn Guide>),
    /// The last token is committed, but the allowed next tokens are not computed yet.
    Idle(GuideRun),
    /// A job that computes the allowed next tokens is queued or running.
    Pending,
    /// The allowed next tokens are known.
    Ready(ReadyGuide),
    /// The guide failed. The request fails when the sequence is sampled.
    Failed(GuideError),
    /// No token can follow the tokens of the sequence.
    Complete,
    /// The sequence has ended or failed, or has no beam. While a sampling job has the guide, this value replaces it.
    Released,
}

/// The state of a running guide, and its set of allowed tokens.
#[derive(Debug)]
pub(crate) struct GuideRun {
    pub(super) state: Box<dyn GuideState>,
    pub(super) allowed: TokenSet,
}

/// A guide whose allowed next tokens are known.
#[derive(Debug)]
pub(crate) struct ReadyGuide {
    pub(super) run: GuideRun,
    pub(super) progress: Progress,
    /// The allowed tokens after each draft token, in reverse order.
    pub(super) lookahead: Vec<LookaheadStep>,
}

/// A draft token, and the allowed tokens after it.
#[derive(Debug)]
pub(crate) struct LookaheadStep {
    pub(super) draft: TokenId,
    pub(super) allowed: TokenSet,
    pub(super) progress: Progress,
}

/// How a sequence with a guide continues.
#[derive(Debug)]
pub(crate) enum GuideDecision<'a> {
    /// One of these tokens is sampled.
    Sample(&'a TokenSet),
    /// The sequence has ended, because no token can follow.
    End,
}

impl GuideRun {
    fn fork(&self) -> Self {
        Self { state: self.state.fork(), allowed: TokenSet::new(self.allowed.vocabulary()) }
    }
}

impl GuideSlot {
    pub(crate) fn new(guide: &Arc<dyn Guide>) -> Self {
        Self::New(Arc::clone(guide))
    }

    /// Decides how a sequence with this many generated tokens continues. Stop tokens are allowed if the form may end
    /// and at least `min_tokens` tokens have been generated. If the form is complete and no token can follow, the
    /// sequence ends regardless of `stop`.
    pub(crate) fn decide(
        &mut self,
        stop: &StopCriteria,
        generated: u32,
    ) -> Result<GuideDecision<'_>, Failure> {
        let ReadyGuide { run: GuideRun { allowed, .. }, progress, .. } = match self {
            Self::Complete => return Ok(GuideDecision::End),
            Self::Failed(error) => return Err(error.clone().into()),
            Self::Ready(ready) => ready,
            Self::New(_) | Self::Idle(_) | Self::Pending | Self::Released => {
                return Err(GuideError::Failed("the allowed tokens are not known".to_owned()).into());
            }
        };
        stop.stop_token_ids.iter().for_each(|&token| allowed.remove(token));
        if allowed.is_empty() {
            return match progress {
                Progress::Open => {
                    Err(Failure::NoToken("the form of the answer cannot be completed from here".to_owned()))
                }
                Progress::MayEnd | Progress::Ended => Ok(GuideDecision::End),
            };
        }
        if *progress != Progress::Open && generated >= stop.min_tokens {
            stop.stop_token_ids.iter().for_each(|&token| allowed.insert(token));
        }
        Ok(GuideDecision::Sample(allowed))
    }

    /// Replaces the allowed tokens with those after `token`, which was sampled and equals the next draft. Returns false
    /// if the allowed tokens after `token` are not known. Does not commit `token`.
    pub(crate) fn follow_draft(&mut self, token: TokenId) -> bool {
        let Self::Ready(ReadyGuide { run, progress, lookahead }) = self else { return false };
        match lookahead.pop() {
            Some(step) if step.draft == token => {
                (run.allowed, *progress) = (step.allowed, step.progress);
                true
            }
            _ => false,
        }
    }

    /// Whether a job that computes the allowed next tokens is queued or running.
    pub(crate) fn is_pending(&self) -> bool {
        matches!(self, Self::Pending)
    }

    /// Locks the shared state for a commit. `None` if the allowed tokens are not known yet, or if a commit would have
    /// to wait for another thread.
    pub(crate) fn try_lock_commit(&self) -> Option<CommitLock> {
        match self {
            Self::Pending => None,
            Self::Ready(ready) => ready.run.state.try_lock_commit(),
            _ => Some(Box::new(())),
        }
    }

    /// Returns a copy for another sequence that continues from the same state.
    pub(crate) fn fork(&self) -> Self {
        match self {
            Self::New(guide) => Self::New(Arc::clone(guide)),
            Self::Idle(run) => Self::Idle(run.fork()),
            // Forked sequences have no drafts.
            Self::Ready(ReadyGuide { run, progress, .. }) => {
                Self::Ready(ReadyGuide { run: run.fork(), progress: *progress, lookahead: Vec::new() })
            }
            Self::Failed(error) => Self::Failed(error.clone()),
            Self::Complete => Self::Complete,
            Self::Pending | Self::Released => Self::Released,
        }
    }

    /// Commits the sampled tokens up to the first stop token. Returns true if no token can follow them.
    pub(crate) fn commit(
        &mut self,
        tokens: impl IntoIterator<Item = TokenId>,
        stop: &StopCriteria,
    ) -> Result<bool, GuideError> {
        let Self::Ready(ReadyGuide { mut run, .. }) = std::mem::replace(self, Self::Released) else {
            return Err(GuideError::Failed(
                "a token was sampled before the allowed tokens were known".to_owned(),
            ));
        };
        let mut progress = Progress::Open;
        for token in tokens {
            // A stop token ends the sequence, and is not part of the form.
            if stop.stop_token_ids.contains(&token) {
                return Ok(true);
            }
            // Unwind safety: a state that panicked is dropped.
            let result = catch_unwind(AssertUnwindSafe(|| run.state.commit(token)));
            progress = result.unwrap_or_else(|_| Err(GuideError::Failed("the guide panicked".to_owned())))?;
        }
        *self = Self::Idle(run);
        Ok(progress == Progress::Ended)
    }
}

impl From<GuideError> for Failure {
    fn from(error: GuideError) -> Self {
        let message = error.to_string();
        match error {
            GuideError::TooComplex(_) => Self::TooComplex(message),
            GuideError::Failed(_) => Self::Step(message),
        }
    }
}

/// The time that a request has spent in guides, on all threads.
#[derive(Debug, Default)]
pub(super) struct TimeSpent(AtomicU64);

impl TimeSpent {
    pub(super) fn add(&self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// The time that the jobs of a request's guides take.
#[derive(Debug, Default)]
pub(crate) struct GuideTime {
    pub(super) spent: Arc<TimeSpent>,
    /// The average time of recent jobs, or zero before the first job.
    pub(super) average: Duration,
}

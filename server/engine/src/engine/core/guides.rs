//! The guides of the sequences: what may come next is computed on threads of their own while the model runs.
//!
//! A guide's state is here, or away with a thread. The threads are started by the first request that has a guide. The engine
//! waits for them a moment at most: a sequence whose guide is not ready when the model is, is suspended with its logits, and
//! sampled when the guide is ready. So a guide that is slow slows its own sequence and no other, and changes no token.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use server_scheduler::{Batch, SequenceId, StopCriteria, TokenId};

use super::{Live, Requests};
use crate::clock::Clock;
use crate::guide::{Guide, GuideError, GuideState, Hold, Progress, TokenSet};
use crate::request::Failure;
use crate::waker::Waker;
use threads::{Done, Job, Spent, Threads, Work};

mod threads;

/// The longest that a step waits, once the model has run, for guides that are usually as quick.
const WAIT_MAX: Duration = Duration::from_millis(5);

/// Time that a request may spend on determining the allowed next tokens of a structured output before its first
/// token.
///
/// Beyond it: 400, `form_too_complex`; a stream ends with this error.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(30);
/// Time that each generated token adds to what a request may spend on determining the allowed next tokens.
///
/// Beyond it: 400, `form_too_complex`; a stream ends with this error.
const TOKEN_TIME_MAX: Duration = Duration::from_millis(20);

/// What the guide of a sequence is doing.
#[derive(Debug)]
pub(super) enum Slot {
    /// It has not begun.
    New(Arc<dyn Guide>),
    /// It has taken the last token.
    Rest(Guided),
    /// A thread computes what may come next.
    Away,
    /// What may come next is known, and after the guesses of what that is.
    Ready(Guided, Progress, Ahead),
    /// It cannot go on: the request fails when the sequence is sampled.
    Failed(GuideError),
    /// Nothing can follow what the sequence has.
    Complete,
    /// It has nothing more to say: the sequence has ended or failed.
    Gone,
}

/// Guessed tokens that may come, each with what may come after it; the first is the last here.
pub(super) type Ahead = Vec<(TokenId, TokenSet, Progress)>;

/// A guide's state, with the set that it fills.
#[derive(Debug)]
pub(super) struct Guided {
    state: Box<dyn GuideState>,
    pub(super) allowed: TokenSet,
}

impl Guided {
    fn fork(&self) -> Self {
        Self { state: self.state.fork(), allowed: TokenSet::new(self.allowed.vocabulary()) }
    }
}

/// What is to be done with a sequence that has a guide.
#[derive(Debug)]
pub(super) enum Next<'a> {
    /// One of these tokens is sampled.
    Sample(&'a TokenSet),
    /// It has ended: nothing can follow.
    End,
}

impl Slot {
    pub(super) fn new(guide: &Arc<dyn Guide>) -> Self {
        Self::New(Arc::clone(guide))
    }

    /// What is to come, of a sequence with so many generated tokens. Stop tokens are allowed where the form may
    /// end and there are enough tokens; where nothing but the end can come, the sequence ends whatever `stop` says.
    pub(super) fn next(&mut self, stop: &StopCriteria, generated: u32) -> Result<Next<'_>, Failure> {
        if matches!(self, Self::Complete) {
            return Ok(Next::End);
        }
        if let Self::Failed(error) = self {
            return Err(error.clone().into());
        }
        let Self::Ready(guided, progress, _) = self else {
            return Err(GuideError::Failed("what may come next is not known".to_owned()).into());
        };
        let allowed = &mut guided.allowed;
        stop.stop_token_ids.iter().for_each(|&token| allowed.remove(token));
        if allowed.is_empty() {
            return match progress {
                Progress::Open => Err(Failure::NoToken(
                    "the form that the answer is held to ends nowhere from here".to_owned(),
                )),
                Progress::MayEnd | Progress::Ended => Ok(Next::End),
            };
        }
        if *progress != Progress::Open && generated >= stop.min_tokens {
            stop.stop_token_ids.iter().for_each(|&token| allowed.insert(token));
        }
        Ok(Next::Sample(&guided.allowed))
    }

    /// Whether it is known what may come.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self, Self::Ready(..))
    }

    /// Whether a thread has yet to say what may come.
    pub(super) fn is_away(&self) -> bool {
        matches!(self, Self::Away)
    }

    /// Reserves what a commit needs. `None` if the commit would have to wait for another thread.
    pub(super) fn try_hold(&self) -> Option<Hold> {
        match self {
            Self::Away => None,
            Self::Ready(guided, ..) => guided.state.try_hold(),
            _ => Some(Box::new(())),
        }
    }

    /// The same for another sequence that goes on from here.
    pub(super) fn fork(&self) -> Self {
        match self {
            Self::New(guide) => Self::New(Arc::clone(guide)),
            Self::Rest(guided) => Self::Rest(guided.fork()),
            // Whoever forks has no guesses.
            Self::Ready(guided, progress, _) => Self::Ready(guided.fork(), *progress, Vec::new()),
            Self::Failed(error) => Self::Failed(error.clone()),
            Self::Complete => Self::Complete,
            Self::Away | Self::Gone => Self::Gone,
        }
    }

    /// Takes the token that was sampled. True if nothing can follow it.
    pub(super) fn commit(&mut self, token: TokenId, stop: &StopCriteria) -> Result<bool, GuideError> {
        let Self::Ready(mut guided, _, mut ahead) = std::mem::replace(self, Self::Gone) else {
            return Err(GuideError::Failed("a token came before it was known what may come".to_owned()));
        };
        // It ends the sequence, and is none of the form's business.
        if stop.stop_token_ids.contains(&token) {
            return Ok(true);
        }
        let progress = guided.state.commit(token)?;
        *self = match ahead.pop() {
            Some((guess, allowed, next)) if guess == token => {
                guided.allowed = allowed;
                Self::Ready(guided, next, ahead)
            }
            _ => Self::Rest(guided),
        };
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

/// What the guides of a request's sequences have taken so far.
#[derive(Debug, Default)]
pub(super) struct GuideTime {
    spent: Arc<Spent>,
    /// Of the last jobs; zero before the first.
    usual: Duration,
}

/// The threads, and what is away with them.
#[derive(Debug)]
pub(super) struct Guides {
    vocabulary: u32,
    threads: Threads,
    done: mpsc::Receiver<Done>,
    away: usize,
    steps: u64,
    /// Jobs that this step waits for.
    awaited: usize,
}

impl Guides {
    pub(super) fn new(vocabulary: u32, clock: Clock, waker: Waker) -> Self {
        let (threads, done) = Threads::new(clock, waker);
        Self { vocabulary, threads, done, away: 0, steps: 0, awaited: 0 }
    }

    /// Whether any is away with a thread.
    pub(super) fn are_away(&self) -> bool {
        self.away > 0
    }

    /// Sends off the guides of the sequences that `batch` samples. Answers how many these are.
    pub(super) fn send(&mut self, batch: &Batch, requests: &mut Requests) -> u32 {
        self.steps += 1;
        self.awaited = 0;
        if !requests.have_guides {
            return 0;
        }
        let mut count = 0;
        let sampled = |row| batch.samples_of(row).iter().map(move |&sequence| (row, sequence));
        for (row, sequence) in batch.sequences.iter().flat_map(sampled) {
            let guesses = requests.guesses(sequence, &batch.tokens[batch.drafts_of(row)]);
            let Some(live) = requests.live.get_mut(&sequence.request) else { continue };
            let Some(slot) = live.guides.get_mut(sequence.index as usize) else { continue };
            let work = match std::mem::replace(slot, Slot::Away) {
                Slot::New(guide) => Work::Start(guide, TokenSet::new(self.vocabulary)),
                Slot::Rest(guided) => Work::Next(guided),
                other => {
                    *slot = other;
                    continue;
                }
            };
            count += 1;
            self.away += 1;
            let GuideTime { spent, usual } = &live.guide_time;
            let is_awaited = *usual <= WAIT_MAX;
            self.awaited += usize::from(is_awaited);
            let generated: u32 = live.histories.iter().map(|history| history.generated()).sum();
            self.threads.add(Job {
                sequence,
                work,
                guesses,
                spent: Arc::downgrade(spent),
                time_max: REQUEST_TIME_MAX + TOKEN_TIME_MAX * generated,
                usual_time: *usual,
                awaited_by: is_awaited.then_some(self.steps),
            });
        }
        count
    }

    /// Takes in what the threads have done. True if that is anything.
    pub(super) fn collect(&mut self, requests: &mut Requests) -> bool {
        let before = self.away;
        while let Ok(done) = self.done.try_recv() {
            self.take(done, requests);
        }
        self.away < before
    }

    /// As [`Self::collect`], and waits a moment for what this step sent off if it is usually quick.
    pub(super) fn collect_soon(&mut self, requests: &mut Requests) {
        self.collect(requests);
        let until = Instant::now() + WAIT_MAX;
        while self.awaited > 0 {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(done) = self.done.recv_timeout(left) else { return };
            self.take(done, requests);
        }
    }

    fn take(&mut self, done: Done, requests: &mut Requests) {
        let Done { sequence, result, time, awaited_by } = done;
        self.away -= 1;
        self.awaited -= usize::from(awaited_by == Some(self.steps));
        // A request may have failed or gone meanwhile.
        let Some(live) = requests.live.get_mut(&sequence.request) else { return };
        live.guide_time.usual = (live.guide_time.usual + time) / 2;
        let Some(slot) = live.guides.get_mut(sequence.index as usize) else { return };
        *slot = match result {
            Ok((guided, progress, ahead)) => Slot::Ready(guided, progress, ahead),
            Err(error) => Slot::Failed(error),
        };
    }
}

impl Live {
    /// Whether a sequence can be sampled without waiting for its guide, if it has one: then other threads are kept from what
    /// that shares until the result is dropped.
    pub(super) fn try_hold(&self, index: u32) -> Option<Hold> {
        self.guides.get(index as usize).map_or_else(|| Some(Box::new(()) as Hold), Slot::try_hold)
    }

    /// The same for all beams.
    pub(super) fn try_hold_all(&self) -> Option<Vec<Hold>> {
        self.guides.iter().map(Slot::try_hold).collect()
    }
}

impl Requests {
    /// Those of the guesses for a sequence that a form may have something to say of.
    fn guesses(&self, sequence: SequenceId, drafts: &[TokenId]) -> Vec<TokenId> {
        let live = self.live.get(&sequence.request).filter(|live| !live.guides.is_empty());
        let is_text = |stop: &StopCriteria, token: &TokenId| !stop.stop_token_ids.contains(token);
        let guesses = live.map(|live| drafts.iter().copied().take_while(|token| is_text(&live.stop, token)));
        guesses.map_or(Vec::new(), Iterator::collect)
    }
}

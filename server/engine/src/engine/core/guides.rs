//! The guides of the sequences: what may come next is computed on threads of their own while the model runs, and
//! is there when the sampler needs it.
//!
//! A guide's state is here, or away with a thread; channels carry it, so no lock is on the way of a token. The
//! threads are started by the first request that has a guide.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use server_scheduler::{Batch, SequenceId, StopRule, TokenId};

use super::{Requests, index_of, request_of};
use crate::guide::{Guide, GuideError, GuideState, Progress, TokenSet, guide_threads};
use crate::request::Failure;

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
    pub(super) fn next(&mut self, stop: &StopRule, generated: u32) -> Result<Next<'_>, Failure> {
        if matches!(self, Self::Complete) {
            return Ok(Next::End);
        }
        let Self::Ready(guided, progress, _) = self else {
            return Err(GuideError("what may come next is not known".to_owned()).into());
        };
        let allowed = &mut guided.allowed;
        stop.tokens.iter().for_each(|&token| allowed.remove(token));
        if allowed.is_empty() {
            return match progress {
                Progress::Open => Err(Failure::NoToken(
                    "the form that the answer is held to ends nowhere from here".to_owned(),
                )),
                Progress::MayEnd | Progress::Ended => Ok(Next::End),
            };
        }
        if *progress != Progress::Open && generated >= stop.tokens_min {
            stop.tokens.iter().for_each(|&token| allowed.insert(token));
        }
        Ok(Next::Sample(&guided.allowed))
    }

    /// Whether it is known what may come.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self, Self::Ready(..))
    }

    /// The same for another sequence that goes on from here.
    pub(super) fn fork(&self) -> Self {
        match self {
            Self::New(guide) => Self::New(Arc::clone(guide)),
            Self::Rest(guided) => Self::Rest(guided.fork()),
            // Whoever forks has no guesses.
            Self::Ready(guided, progress, _) => Self::Ready(guided.fork(), *progress, Vec::new()),
            Self::Complete => Self::Complete,
            Self::Away | Self::Gone => Self::Gone,
        }
    }

    /// Takes the token that was sampled. True if nothing can follow it.
    pub(super) fn commit(&mut self, token: TokenId, stop: &StopRule) -> Result<bool, GuideError> {
        let Self::Ready(mut guided, _, mut ahead) = std::mem::replace(self, Self::Gone) else {
            return Err(GuideError("a token came before it was known what may come".to_owned()));
        };
        // It ends the sequence, and is none of the form's business.
        if stop.tokens.contains(&token) {
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
        Self::Step(error.to_string())
    }
}

/// The threads, and what is away with them.
#[derive(Debug)]
pub(super) struct Guides {
    vocabulary: u32,
    threads: Vec<Thread>,
    done: mpsc::Receiver<Done>,
    /// For threads yet to be started.
    sender: mpsc::Sender<Done>,
    away: usize,
    turn: usize,
}

#[derive(Debug)]
struct Thread {
    /// None once it is to end.
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Job {
    sequence: SequenceId,
    work: Work,
    guesses: Vec<TokenId>,
}

#[derive(Debug)]
enum Work {
    Start(Arc<dyn Guide>, TokenSet),
    Next(Guided),
}

#[derive(Debug)]
struct Done {
    sequence: SequenceId,
    result: Result<(Guided, Progress, Ahead), GuideError>,
}

impl Guides {
    pub(super) fn new(vocabulary: u32) -> Self {
        // No more is on its way than sequences in a step: these have their limit.
        let (sender, done) = mpsc::channel();
        Self { vocabulary, threads: Vec::new(), done, sender, away: 0, turn: 0 }
    }

    /// Sends off the guides of the sequences that `batch` samples. Answers how many these are.
    pub(super) fn send(&mut self, batch: &Batch, requests: &mut Requests) -> u32 {
        if !requests.have_guides {
            return 0;
        }
        let sampled = |row| batch.row_samples(row).iter().map(move |&sequence| (row, sequence));
        for (row, sequence) in batch.rows.iter().flat_map(sampled) {
            let guesses = requests.guesses(sequence, &batch.tokens[batch.row_drafts(row)]);
            let Some(slot) = requests.slot(sequence) else { continue };
            let work = match std::mem::replace(slot, Slot::Away) {
                Slot::New(guide) => Work::Start(guide, TokenSet::new(self.vocabulary)),
                Slot::Rest(guided) => Work::Next(guided),
                other => {
                    *slot = other;
                    continue;
                }
            };
            self.away += 1;
            self.dispatch(Job { sequence, work, guesses });
        }
        self.away as u32
    }

    /// Waits for all that is away. Adds the requests whose guides cannot go on to `failed`.
    pub(super) fn collect(&mut self, requests: &mut Requests, failed: &mut Vec<(u64, Failure)>) {
        while self.away > 0 {
            let done = self.done.recv().expect("invariant: a sender is kept here");
            self.away -= 1;
            let Done { sequence, result } = done;
            // A request may have failed or gone meanwhile.
            if let Some(slot) = requests.slot(sequence) {
                match result {
                    Ok((guided, progress, ahead)) => *slot = Slot::Ready(guided, progress, ahead),
                    Err(error) => {
                        *slot = Slot::Gone;
                        failed.push((request_of(sequence), error.into()));
                    }
                }
            }
        }
    }

    fn dispatch(&mut self, job: Job) {
        if self.threads.is_empty() {
            self.start_threads();
        }
        self.turn = (self.turn + 1) % self.threads.len().max(1);
        let refused = match self.threads.get(self.turn).and_then(|thread| thread.jobs.as_ref()) {
            Some(jobs) => jobs.send(job).err().map(|refused| refused.0),
            None => Some(job),
        };
        // Without threads it is done here and now: late, but right.
        if let Some(job) = refused {
            // The receiver is here.
            let _ = self.sender.send(carry_out(job));
        }
    }

    fn start_threads(&mut self) {
        for index in 0..guide_threads() {
            let (jobs, received) = mpsc::channel();
            let done = self.sender.clone();
            let body = move || {
                while let Ok(job) = received.recv() {
                    if done.send(carry_out(job)).is_err() {
                        return;
                    }
                }
            };
            match std::thread::Builder::new().name(format!("guide-{index}")).spawn(body) {
                Ok(thread) => self.threads.push(Thread { jobs: Some(jobs), thread: Some(thread) }),
                Err(error) => tracing::warn!("failed to start a thread for guides: {error}"),
            }
        }
    }
}

impl Drop for Guides {
    fn drop(&mut self) {
        // All first, so that they end at the same time.
        self.threads.iter_mut().for_each(|thread| thread.jobs = None);
        for thread in self.threads.iter_mut().filter_map(|thread| thread.thread.take()) {
            // Panics of guides are caught, and nothing else happens there.
            let _ = thread.join();
        }
    }
}

fn carry_out(job: Job) -> Done {
    let Job { sequence, work, guesses } = job;
    // What a panic left behind is dropped with the guide's state.
    let result = catch_unwind(AssertUnwindSafe(|| match work {
        Work::Start(guide, allowed) => next(Guided { state: guide.start()?, allowed }),
        Work::Next(guided) => next(guided),
    }));
    let result = result.unwrap_or_else(|_| Err(GuideError("it panicked".to_owned())));
    let result = result.map(|(guided, progress)| {
        // What goes wrong after a guess may never come to pass.
        let ahead = catch_unwind(AssertUnwindSafe(|| ahead(&guided, &guesses))).unwrap_or_default();
        (guided, progress, ahead)
    });
    Done { sequence, result }
}

/// What may come after each of the guesses, as long as these may come.
fn ahead(guided: &Guided, guesses: &[TokenId]) -> Ahead {
    let mut ahead = Ahead::new();
    let mut state = (!guesses.is_empty()).then(|| guided.state.fork());
    for &guess in guesses {
        let allowed = ahead.last().map_or(&guided.allowed, |(_, allowed, _)| allowed);
        let Some(state) = state.as_mut().filter(|_| allowed.contains(guess)) else { break };
        if !matches!(state.commit(guess), Ok(Progress::Open | Progress::MayEnd)) {
            break;
        }
        let mut next = TokenSet::new(allowed.vocabulary());
        let Ok(progress) = state.allow(&mut next) else { break };
        ahead.push((guess, next, progress));
    }
    ahead.reverse();
    ahead
}

fn next(mut guided: Guided) -> Result<(Guided, Progress), GuideError> {
    guided.allowed.clear();
    let progress = guided.state.allow(&mut guided.allowed)?;
    Ok((guided, progress))
}

impl Requests {
    /// Those of the guesses for a sequence that a form may have something to say of.
    fn guesses(&self, sequence: SequenceId, drafts: &[TokenId]) -> Vec<TokenId> {
        let live = self.live.get(&request_of(sequence)).filter(|live| !live.guides.is_empty());
        let is_text = |stop: &StopRule, token: &TokenId| !stop.tokens.contains(token);
        let guesses = live.map(|live| drafts.iter().copied().take_while(|token| is_text(&live.stop, token)));
        guesses.map_or(Vec::new(), Iterator::collect)
    }

    /// The guide of a sequence of a request that is live.
    pub(super) fn slot(&mut self, sequence: SequenceId) -> Option<&mut Slot> {
        self.live.get_mut(&request_of(sequence))?.guides.get_mut(index_of(sequence) as usize)
    }
}

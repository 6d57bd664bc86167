//! The threads that compute what guides allow, and the queue that they share.
//!
//! The queue is in the order of deadlines: a job that usually takes long has a late one. So a guide that is quick does not
//! wait behind many that are slow, and a slow one waits for a bounded time.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use server_scheduler::{SequenceId, TokenId};

use super::{Ahead, Guided};
use crate::clock::Clock;
use crate::guide::{Guide, GuideError, Progress, TokenSet, guide_threads};
use crate::waker::Waker;

/// The guide time that a request has used, on all threads.
#[derive(Debug, Default)]
pub(super) struct Spent(AtomicU64);

impl Spent {
    fn add(&self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

#[derive(Debug)]
pub(super) struct Job {
    pub(super) sequence: SequenceId,
    pub(super) work: Work,
    pub(super) guesses: Vec<TokenId>,
    /// What the sequence's request has used so far. Gone with the request: then nobody needs the result.
    pub(super) spent: Weak<Spent>,
    /// The guide time that the request may use.
    pub(super) time_max: Duration,
    /// How long a job of this request usually takes.
    pub(super) usual_time: Duration,
    /// The step that waits for it, if one does.
    pub(super) awaited_by: Option<u64>,
}

#[derive(Debug)]
pub(super) enum Work {
    Start(Arc<dyn Guide>, TokenSet),
    Next(Guided),
}

#[derive(Debug)]
pub(super) struct Done {
    pub(super) sequence: SequenceId,
    pub(super) result: Result<(Guided, Progress, Ahead), GuideError>,
    pub(super) time: Duration,
    pub(super) awaited_by: Option<u64>,
}

/// A job's deadline is this many times its usual duration away.
const PATIENCE: u32 = 8;

#[derive(Debug)]
pub(super) struct Threads {
    queue: Arc<Queue>,
    handles: Vec<JoinHandle<()>>,
    results: Results,
}

/// Where the results of jobs go.
#[derive(Clone, Debug)]
struct Results {
    done: mpsc::Sender<Done>,
    clock: Clock,
    waker: Waker,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Jobs {
    /// By their deadlines, then in the order they were added.
    waiting: BTreeMap<(Duration, u64), Job>,
    added: u64,
    is_closed: bool,
}

impl Threads {
    /// None are started before the first job.
    pub(super) fn new(clock: Clock, waker: Waker) -> (Self, mpsc::Receiver<Done>) {
        // No more jobs are on their way than sequences run, whose number is limited.
        let (done, received) = mpsc::channel();
        let results = Results { done, clock, waker };
        (Self { queue: Arc::default(), handles: Vec::new(), results }, received)
    }

    pub(super) fn add(&mut self, job: Job) {
        if self.handles.is_empty() {
            self.start();
        }
        if self.handles.is_empty() {
            // Without threads it is done here and now: late, but right.
            self.results.carry_out(job);
            return;
        }
        let deadline = self.results.clock.now() + job.usual_time * PATIENCE;
        let mut jobs = self.queue.lock();
        jobs.added += 1;
        let key = (deadline, jobs.added);
        jobs.waiting.insert(key, job);
        self.queue.changed.notify_one();
    }

    fn start(&mut self) {
        for index in 0..guide_threads() {
            let (queue, results) = (Arc::clone(&self.queue), self.results.clone());
            let run = move || {
                while let Some(job) = queue.next() {
                    results.carry_out(job);
                }
            };
            match std::thread::Builder::new().name(format!("guide-{index}")).spawn(run) {
                Ok(handle) => self.handles.push(handle),
                Err(error) => tracing::warn!("failed to start a thread for guides: {error}"),
            }
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.queue.lock().is_closed = true;
        self.queue.changed.notify_all();
        for handle in self.handles.drain(..) {
            // Panics of guides are caught, and nothing else happens there.
            let _ = handle.join();
        }
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        // Nothing panics while it is locked.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a job. `None` once the engine ends.
    fn next(&self) -> Option<Job> {
        let mut jobs = self.lock();
        while jobs.waiting.is_empty() && !jobs.is_closed {
            jobs = self.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
        if jobs.is_closed { None } else { jobs.waiting.pop_first().map(|(_, job)| job) }
    }
}

impl Results {
    fn carry_out(&self, job: Job) {
        let (sequence, awaited_by, spent) = (job.sequence, job.awaited_by, job.spent.upgrade());
        let began = self.clock.now();
        let result = match &spent {
            None => Err(GuideError::Failed("its request has ended".to_owned())),
            Some(spent) if spent.get() > job.time_max => Err(GuideError::TooComplex(format!(
                "it took more than the {:.1} s that the request may use",
                job.time_max.as_secs_f64()
            ))),
            Some(_) => carry_out(job),
        };
        let time = self.clock.now() - began;
        if let Some(spent) = spent {
            spent.add(time);
        }
        // Without a receiver the engine has ended.
        let _ = self.done.send(Done { sequence, result, time, awaited_by });
        self.waker.wake();
    }
}

fn carry_out(job: Job) -> Result<(Guided, Progress, Ahead), GuideError> {
    let Job { work, guesses, .. } = job;
    // What a panic left behind is dropped with the guide's state.
    let result = catch_unwind(AssertUnwindSafe(|| match work {
        Work::Start(guide, allowed) => next(Guided { state: guide.start()?, allowed }),
        Work::Next(guided) => next(guided),
    }));
    let (guided, progress) = result.unwrap_or_else(|_| Err(GuideError::Failed("it panicked".to_owned())))?;
    // What goes wrong after a guess may never come to pass.
    let ahead = catch_unwind(AssertUnwindSafe(|| ahead(&guided, &guesses))).unwrap_or_default();
    Ok((guided, progress, ahead))
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

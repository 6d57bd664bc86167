//! The threads that compute the allowed tokens of guides, and their queue.
//!
//! The queue is sorted by deadline, and a job that usually takes longer has a later deadline. As a result, a quick
//! guide does not wait behind many slow ones, and jobs that are added after the deadline of a slow guide do not
//! overtake it.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use server_scheduler::{SequenceId, TokenId};

use super::slot::{GuideRun, LookaheadStep, ReadyGuide, TimeSpent};
use crate::clock::Clock;
use crate::guide::{Guide, GuideError, Progress, TokenSet, guide_threads};
use crate::waker::Waker;

#[derive(Debug)]
pub(super) struct GuideJob {
    pub(super) sequence: SequenceId,
    pub(super) work: GuideWork,
    /// Draft tokens. The allowed tokens after each of them, up to the first that is not allowed, are computed as well.
    pub(super) drafts: Vec<TokenId>,
    /// The time that the request has spent so far. If the reference is no longer valid, the request has ended and the
    /// result of the job is not needed.
    pub(super) spent: Weak<TimeSpent>,
    /// The total time that the request may spend.
    pub(super) time_max: Duration,
    /// The time that a job of this request usually takes.
    pub(super) expected_time: Duration,
    /// The step that waits for the result, if any.
    pub(super) awaited_by: Option<u64>,
}

#[derive(Debug)]
pub(super) enum GuideWork {
    Start(Arc<dyn Guide>, TokenSet),
    Continue(GuideRun),
}

#[derive(Debug)]
pub(super) struct GuideResult {
    pub(super) sequence: SequenceId,
    pub(super) outcome: Result<ReadyGuide, GuideError>,
    pub(super) time: Duration,
    pub(super) awaited_by: Option<u64>,
}

/// The time from the submission of a job to its deadline, as a multiple of the job's expected time.
const DEADLINE_FACTOR: u32 = 8;

#[derive(Debug)]
pub(super) struct GuideThreads {
    queue: Arc<Queue>,
    handles: Vec<JoinHandle<()>>,
    executor: Executor,
}

/// Executes jobs and sends the results.
#[derive(Clone, Debug)]
struct Executor {
    results: mpsc::Sender<GuideResult>,
    clock: Clock,
    waker: Waker,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: Mutex<WaitingJobs>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct WaitingJobs {
    /// The jobs, sorted by their deadlines and then by the order in which they were added.
    waiting: BTreeMap<(Duration, u64), GuideJob>,
    added: u64,
    is_closed: bool,
}

impl GuideThreads {
    /// Creates an empty queue. The first job starts the threads.
    pub(super) fn new(clock: Clock, waker: Waker) -> (Self, mpsc::Receiver<GuideResult>) {
        // The channel needs no limit, because each sequence has at most one job at a time.
        let (results, receiver) = mpsc::channel();
        let executor = Executor { results, clock, waker };
        (Self { queue: Arc::default(), handles: Vec::new(), executor }, receiver)
    }

    pub(super) fn submit(&mut self, job: GuideJob) {
        if self.handles.is_empty() {
            self.start();
        }
        if self.handles.is_empty() {
            // No thread could be started, so compute the result on the current thread.
            self.executor.execute(job);
            return;
        }
        let deadline = self.executor.clock.now() + job.expected_time * DEADLINE_FACTOR;
        let mut jobs = self.queue.lock();
        jobs.added += 1;
        let key = (deadline, jobs.added);
        jobs.waiting.insert(key, job);
        self.queue.changed.notify_one();
    }

    fn start(&mut self) {
        for index in 0..guide_threads() {
            let (queue, executor) = (Arc::clone(&self.queue), self.executor.clone());
            let run = move || {
                while let Some(job) = queue.next() {
                    executor.execute(job);
                }
            };
            match std::thread::Builder::new().name(format!("guide-{index}")).spawn(run) {
                Ok(handle) => self.handles.push(handle),
                Err(error) => tracing::warn!("failed to start a thread for structured outputs: {error}"),
            }
        }
    }
}

impl Drop for GuideThreads {
    fn drop(&mut self) {
        self.queue.lock().is_closed = true;
        self.queue.changed.notify_all();
        for handle in self.handles.drain(..) {
            // The threads catch the panics of guides.
            let _ = handle.join();
        }
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, WaitingJobs> {
        // No code panics while the lock is held.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a job. `None` when the engine ends.
    fn next(&self) -> Option<GuideJob> {
        let mut jobs = self.lock();
        while jobs.waiting.is_empty() && !jobs.is_closed {
            jobs = self.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
        if jobs.is_closed { None } else { jobs.waiting.pop_first().map(|(_, job)| job) }
    }
}

impl Executor {
    fn execute(&self, job: GuideJob) {
        let (sequence, awaited_by, spent) = (job.sequence, job.awaited_by, job.spent.upgrade());
        let began = self.clock.now();
        let outcome = match &spent {
            None => Err(GuideError::Failed("the request has ended".to_owned())),
            Some(spent) if spent.get() > job.time_max => Err(GuideError::TooComplex(format!(
                "computing the allowed tokens took more than {:.1} s, the limit for this request",
                job.time_max.as_secs_f64()
            ))),
            Some(_) => compute(job),
        };
        let time = self.clock.now() - began;
        if let Some(spent) = spent {
            spent.add(time);
        }
        // Sending fails only if the engine has ended.
        let _ = self.results.send(GuideResult { sequence, outcome, time, awaited_by });
        self.waker.wake();
    }
}

fn compute(job: GuideJob) -> Result<ReadyGuide, GuideError> {
    let GuideJob { work, drafts, .. } = job;
    // Unwind safety: a state that panicked is dropped.
    let result = catch_unwind(AssertUnwindSafe(|| match work {
        GuideWork::Start(guide, allowed) => allow_next(GuideRun { state: guide.start()?, allowed }),
        GuideWork::Continue(run) => allow_next(run),
    }));
    let panicked = |_| Err(GuideError::Failed("the guide panicked".to_owned()));
    let (run, progress) = result.unwrap_or_else(panicked)?;
    // An error or panic in `lookahead` is ignored, because the draft that causes it may be rejected.
    let lookahead = catch_unwind(AssertUnwindSafe(|| lookahead(&run, &drafts))).unwrap_or_default();
    Ok(ReadyGuide { run, progress, lookahead })
}

/// The allowed tokens after each draft, last draft first. Stops at the first draft that is not allowed, ends the form
/// or causes an error.
fn lookahead(run: &GuideRun, drafts: &[TokenId]) -> Vec<LookaheadStep> {
    let mut steps: Vec<LookaheadStep> = Vec::new();
    let mut state = (!drafts.is_empty()).then(|| run.state.fork());
    for &draft in drafts {
        let allowed = steps.last().map_or(&run.allowed, |step| &step.allowed);
        let Some(state) = state.as_mut().filter(|_| allowed.contains(draft)) else { break };
        if !matches!(state.commit(draft), Ok(Progress::Open | Progress::MayEnd)) {
            break;
        }
        let mut allowed = TokenSet::new(allowed.vocabulary());
        let Ok(progress) = state.allow(&mut allowed) else { break };
        steps.push(LookaheadStep { draft, allowed, progress });
    }
    steps.reverse();
    steps
}

fn allow_next(mut run: GuideRun) -> Result<(GuideRun, Progress), GuideError> {
    run.allowed.clear();
    let progress = run.state.allow(&mut run.allowed)?;
    Ok((run, progress))
}

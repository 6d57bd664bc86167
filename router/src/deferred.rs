//! Defers work that an answer does not have to wait for: metrics, logs, the pick log, updates of the estimates, and the
//! correction of charges to token quotas. A thread that serves requests defers such work until it has nothing more
//! urgent to do; any other thread does the work immediately.
//!
//! Bookings and permits, their release, and charges on arrival are never deferred, because waiting requests depend on
//! them. When the next request arrives, the estimates and quotas may therefore not include the latest answers yet.

use std::cell::RefCell;
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::task::JoinSet;

/// Number of jobs that a thread defers at the same time. Further jobs run immediately.
const JOBS_MAX: usize = 1024;

type Job = Box<dyn FnOnce()>;

thread_local! {
    static DEFERRED: RefCell<DeferredQueue> = const { RefCell::new(DeferredQueue { jobs: Vec::new(), wake: None }) };
}

struct DeferredQueue {
    jobs: Vec<Job>,
    /// Wakes the task that runs the jobs. `None` if the thread does not defer jobs.
    wake: Option<Arc<Notify>>,
}

/// Runs `job` on this thread: soon if the thread defers jobs, and otherwise immediately. A job may defer another job,
/// but must not block.
pub(crate) fn defer(job: impl FnOnce() + 'static) {
    let run_now = DEFERRED.with_borrow_mut(|deferred| match &deferred.wake {
        Some(wake) if deferred.jobs.len() < JOBS_MAX => {
            if deferred.jobs.is_empty() {
                wake.notify_one();
            }
            deferred.jobs.push(Box::new(job));
            None
        }
        _ => Some(job),
    });
    if let Some(job) = run_now {
        job();
    }
}

/// Runs all deferred jobs of this thread.
pub(crate) fn run_deferred() {
    loop {
        let mut jobs = DEFERRED.with_borrow_mut(|deferred| std::mem::take(&mut deferred.jobs));
        if jobs.is_empty() {
            return;
        }
        for job in jobs.drain(..) {
            job();
        }
        // Reuse the memory, unless the jobs have deferred further jobs.
        DEFERRED.with_borrow_mut(|deferred| {
            if deferred.jobs.is_empty() {
                deferred.jobs = jobs;
            }
        });
    }
}

/// While this value exists, its thread defers jobs. Dropping the value runs the remaining jobs.
pub(crate) struct DeferredTasks(#[expect(dead_code, reason = "dropping it aborts the task")] JoinSet<()>);

impl DeferredTasks {
    /// Starts to defer jobs on this thread. The current Tokio runtime must run tasks on this thread alone.
    ///
    /// # Panics
    /// If called outside of a Tokio runtime.
    pub(crate) fn start() -> Self {
        let wake = Arc::new(Notify::new());
        DEFERRED.with_borrow_mut(|deferred| deferred.wake = Some(Arc::clone(&wake)));
        let mut task = JoinSet::new();
        task.spawn(async move {
            loop {
                wake.notified().await;
                // Requests and answers that have arrived in the meantime have priority.
                tokio::task::yield_now().await;
                run_deferred();
            }
        });
        Self(task)
    }
}

impl Drop for DeferredTasks {
    fn drop(&mut self) {
        DEFERRED.with_borrow_mut(|deferred| deferred.wake = None);
        run_deferred();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    /// A job that adds 1 to a count, and the count.
    fn counting() -> (impl Fn() + Clone + 'static, Rc<Cell<usize>>) {
        let count = Rc::new(Cell::new(0));
        let counted = Rc::clone(&count);
        (move || counted.set(counted.get() + 1), count)
    }

    #[test]
    fn a_job_runs_immediately_on_a_thread_that_does_not_defer() {
        let (add, count) = counting();
        defer(add);
        assert_eq!(count.get(), 1);
    }

    #[tokio::test]
    async fn deferred_jobs_run_when_nothing_else_is_ready_and_can_defer_others() {
        let _tasks = DeferredTasks::start();
        let (add, count) = counting();
        let again = add.clone();
        defer(move || {
            again();
            defer(again);
        });
        assert_eq!(count.get(), 0);
        while count.get() < 2 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn jobs_above_the_limit_run_immediately_and_the_rest_at_the_end() {
        let tasks = DeferredTasks::start();
        let (add, count) = counting();
        for _ in 0..JOBS_MAX + 3 {
            defer(add.clone());
        }
        assert_eq!(count.get(), 3);
        drop(tasks);
        assert_eq!(count.get(), JOBS_MAX + 3);
        defer(add);
        assert_eq!(count.get(), JOBS_MAX + 4);
    }
}

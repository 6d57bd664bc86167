//! What is not needed before an answer is on its way: counts, logs, what is shown of picks, what is learnt for those to
//! come. A thread that serves puts it off until there is nothing more urgent; any other thread does it at once.
//!
//! Nothing that a pick, a limit or a waiting request depends on goes here: that is done where it happens.

use std::cell::RefCell;
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::task::JoinSet;

/// Jobs that a thread puts off; what comes beyond is done at once.
const JOBS_MAX: usize = 1024;

type Job = Box<dyn FnOnce()>;

thread_local! {
    static DEFERRED: RefCell<DeferredQueue> = const { RefCell::new(DeferredQueue { jobs: Vec::new(), wake: None }) };
}

struct DeferredQueue {
    jobs: Vec<Job>,
    /// There is somebody who does them.
    wake: Option<Arc<Notify>>,
}

/// Does `job` soon, on this thread. It may put off another, and must not wait for anything.
pub(crate) fn defer(job: impl FnOnce() + 'static) {
    let at_once = DEFERRED.with_borrow_mut(|deferred| match &deferred.wake {
        Some(wake) if deferred.jobs.len() < JOBS_MAX => {
            if deferred.jobs.is_empty() {
                wake.notify_one();
            }
            deferred.jobs.push(Box::new(job));
            None
        }
        _ => Some(job),
    });
    if let Some(job) = at_once {
        job();
    }
}

/// Does all that this thread has put off.
pub(crate) fn run_deferred() {
    loop {
        let mut jobs = DEFERRED.with_borrow_mut(|deferred| std::mem::take(&mut deferred.jobs));
        if jobs.is_empty() {
            return;
        }
        for job in jobs.drain(..) {
            job();
        }
        // The memory is for the next ones, unless there are some already.
        DEFERRED.with_borrow_mut(|deferred| {
            if deferred.jobs.is_empty() {
                deferred.jobs = jobs;
            }
        });
    }
}

/// As long as it lives, this thread puts off what may wait. Dropping it does what is left.
pub(crate) struct DeferredTasks(
    #[expect(dead_code, reason = "it is aborted when this is dropped")] JoinSet<()>,
);

impl DeferredTasks {
    /// Begins to put off.
    ///
    /// # Panics
    /// Outside of a runtime; it must be one of this thread alone.
    pub(crate) fn start() -> Self {
        let wake = Arc::new(Notify::new());
        DEFERRED.with_borrow_mut(|deferred| deferred.wake = Some(Arc::clone(&wake)));
        let mut task = JoinSet::new();
        task.spawn(async move {
            loop {
                wake.notified().await;
                // Requests and answers that have come meanwhile are looked for, and go first.
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

    /// What adds 1 to a count, and the count.
    fn counting() -> (impl Fn() + Clone + 'static, Rc<Cell<usize>>) {
        let count = Rc::new(Cell::new(0));
        let counted = Rc::clone(&count);
        (move || counted.set(counted.get() + 1), count)
    }

    #[test]
    fn where_nobody_keeps_what_is_deferred_it_is_done_at_once() {
        let (add, count) = counting();
        defer(add);
        assert_eq!(count.get(), 1);
    }

    #[tokio::test]
    async fn what_is_deferred_is_done_once_nothing_else_is_ready_and_so_is_what_that_puts_off() {
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
    async fn no_more_is_deferred_than_may_be_and_the_end_does_what_is_left() {
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

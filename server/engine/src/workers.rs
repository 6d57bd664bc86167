//! The threads that sample tokens: the engine's thread, and helpers that wait while the model runs.
//!
//! The jobs of a call are independent of each other and each has its own random numbers, so the results do not depend
//! on the number of threads.

use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::sampler::Sampler;

/// The highest number of threads that sample by default. With more threads, the memory bandwidth would limit the speed.
const THREADS_MAX: usize = 16;
/// The number of logits that justify another thread. Waking a thread takes about as long as reading that many logits.
const LOGITS_PER_THREAD: usize = 1 << 18;

/// The threads that sample, each with its own sampler.
pub(crate) struct Workers {
    /// One sampler for each thread. The first one belongs to the calling thread.
    samplers: Vec<Sampler>,
    /// The helpers. `None` before the first call that needs them, and if they could not be started.
    pool: Option<ThreadPool>,
}

impl Workers {
    /// Creates the samplers of `threads` threads. If `threads` is `None`, there is one thread per processor, up to
    /// [`THREADS_MAX`]. No thread is started yet.
    pub(crate) fn new(threads: Option<usize>) -> Self {
        let threads =
            threads.unwrap_or_else(|| available_parallelism().map_or(1, usize::from).min(THREADS_MAX));
        Self { samplers: (0..threads.max(1)).map(|_| Sampler::new()).collect(), pool: None }
    }

    /// Calls `run` for each of `jobs`, which together read `num_logits` logits. The calling thread also runs jobs, and
    /// the method returns when all jobs are done.
    pub(crate) fn for_each<J: Send>(
        &mut self,
        jobs: &mut [J],
        num_logits: usize,
        run: impl Fn(&mut J, &mut Sampler) + Sync,
    ) {
        let threads = (num_logits / LOGITS_PER_THREAD).min(jobs.len()).min(self.samplers.len());
        if threads > 1 && self.pool.is_none() {
            self.start();
        }
        let (own, others) =
            self.samplers.split_first_mut().expect("invariant: there is at least one sampler");
        let Some(pool) = self.pool.as_ref().filter(|_| threads > 1) else {
            jobs.iter_mut().for_each(|job| run(job, own));
            return;
        };
        // The threads take one job at a time, because some jobs take longer than others.
        let queue = Mutex::new(jobs.iter_mut());
        let work = |sampler: &mut Sampler| {
            loop {
                let job = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(job) = job else { break };
                run(job, sampler);
            }
        };
        pool.in_place_scope(|scope| {
            for sampler in &mut others[..threads - 1] {
                scope.spawn(|_| work(sampler));
            }
            work(own);
        });
    }

    /// Starts the helpers. If that fails, the calling thread samples alone.
    fn start(&mut self) {
        let builder = ThreadPoolBuilder::new()
            .num_threads(self.samplers.len() - 1)
            .thread_name(|index| format!("sampling-{index}"));
        match builder.build() {
            Ok(pool) => self.pool = Some(pool),
            Err(error) => {
                tracing::warn!("failed to start threads for sampling, continuing with one: {error}");
                self.samplers.truncate(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::{Barrier, Mutex};

    use super::*;

    #[test]
    fn every_job_runs_once_with_any_number_of_threads() {
        for threads in [1, 2, 8] {
            let mut workers = Workers::new(Some(threads));
            for (count, logits) in
                [(0, 0), (1, LOGITS_PER_THREAD * 9), (100, 5), (100, LOGITS_PER_THREAD * 9)]
            {
                let mut jobs = vec![0; count];
                workers.for_each(&mut jobs, logits, |job, _| *job += 1);
                assert_eq!(jobs, vec![1; count], "{threads} threads");
            }
        }
    }

    #[test]
    fn helpers_run_jobs_beside_the_calling_thread_if_there_is_enough_work() {
        let mut workers = Workers::new(Some(3));
        let threads = Mutex::new(HashSet::new());
        let note = || {
            threads.lock().unwrap().insert(std::thread::current().id());
        };
        workers.for_each(&mut [(); 3], LOGITS_PER_THREAD, |_, _| note());
        assert_eq!(threads.lock().unwrap().len(), 1, "little work runs on one thread");
        // Each job waits until all three threads are running a job.
        let barrier = Barrier::new(3);
        workers.for_each(&mut [(); 3], 3 * LOGITS_PER_THREAD, |_, _| {
            note();
            barrier.wait();
        });
        assert_eq!(threads.lock().unwrap().len(), 3);
        assert!(threads.lock().unwrap().contains(&std::thread::current().id()));
    }
}

//! Runs long computations and file operations on threads that serve no connections and have a lower priority than the
//! model's threads.

use std::sync::LazyLock;

use tokio::runtime::{Builder, Runtime};

/// The nice value of a thread with a lower priority. While the threads of the model are busy, each thread with this
/// value gets about a tenth of a processor.
#[cfg(target_os = "linux")]
const NICE: i32 = 10;

/// The runtime whose threads run the work. An unprivileged thread cannot raise its priority again, so these are not the
/// threads of the runtime that serves connections.
static THREADS: LazyLock<Runtime> = LazyLock::new(|| {
    let threads =
        Builder::new_current_thread().thread_name("blocking").on_thread_start(lower_priority).build();
    threads.expect("invariant: a runtime that uses neither I/O nor timers can be created")
});

/// Runs `work` on a thread that may block and whose priority [`lower_priority`] has lowered, and returns the result. A
/// panic in `work` is resumed on the calling thread.
///
/// # Cancel safety
/// Once the future has been polled, `work` runs to completion even if the future is dropped, unless the process exits.
pub(crate) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match THREADS.spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The process is shutting down, so the result is no longer needed.
            Err(_) => std::future::pending().await,
        },
    }
}

/// Gives this thread a lower priority than the threads that compute the model: if one of those is preempted, the step
/// is delayed for all sequences. If the priority cannot be changed, the thread keeps its priority.
#[cfg(target_os = "linux")]
pub(crate) fn lower_priority() {
    // On Linux, each thread has its own priority, and the call accepts the ID of a thread.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
}

/// Does nothing, because on systems other than Linux, the system call changes the priority of the whole process.
#[cfg(not(target_os = "linux"))]
pub(crate) fn lower_priority() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn work_has_a_lower_priority_than_its_caller() {
        let nice = || rustix::process::getpriority_process(Some(rustix::thread::gettid())).unwrap();
        let before = nice();
        assert_eq!(run(nice).await, NICE.max(before));
        assert_eq!(nice(), before);
    }
}

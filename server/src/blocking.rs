//! Runs work that takes long on threads that serve no connections.

/// Runs `work` on a thread that may block, and returns its result. A panic of `work` continues on the calling thread.
///
/// # Cancel safety
/// Once the future has been polled, the work is completed, even if the future is dropped.
pub(crate) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The process is shutting down, so the result is no longer needed.
            Err(_) => std::future::pending().await,
        },
    }
}

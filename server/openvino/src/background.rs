//! A background thread that is joined when its handle is dropped.

use std::thread::JoinHandle;

/// A background thread. Dropping it waits until the thread has ended.
pub(crate) struct BackgroundThread(Option<JoinHandle<()>>);

impl BackgroundThread {
    /// Starts `work` on a new thread. If the system cannot start a thread, the work is skipped and a warning is logged.
    pub(crate) fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Self {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        Self(
            thread
                .inspect_err(|error| tracing::warn!(%error, name, "failed to start a background thread"))
                .ok(),
        )
    }
}

impl Drop for BackgroundThread {
    fn drop(&mut self) {
        // Ignore a panic: the panic hook has already reported it, and the work is optional.
        let _ = self.0.take().map(JoinHandle::join);
    }
}

//! The sleep levels of an idle engine, and the errors that a change of the level can cause.
//!
//! A sleeping engine still accepts requests, and the first request wakes the engine. The runner decides how memory is
//! released ([`ModelRunner::sleep`](crate::ModelRunner::sleep)). The engine clears the scheduler's prefix cache.

/// The memory that an engine releases while it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SleepLevel {
    /// The memory of the KV cache, including cached prefixes.
    Cache,
    /// The memory of the model as well. The model is loaded again when the engine wakes.
    Model,
}

/// The reason why an engine could not be put to sleep or woken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SleepError {
    /// The engine has requests to compute.
    #[error("requests are in progress: only an idle engine can sleep")]
    Busy,
    /// The engine could not be woken and is still asleep. The next request or explicit wake-up tries again.
    #[error("failed to wake the engine: {0}")]
    Wake(String),
    /// The engine is draining or has ended.
    #[error("the engine is draining or has stopped")]
    Stopped,
}

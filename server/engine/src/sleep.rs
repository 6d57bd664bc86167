//! Sleep: what an idle engine gives back, and how it is asked to.
//!
//! An engine that sleeps is alive, and takes requests: the first one wakes it. What giving back means is the runner's
//! business ([`ModelRunner::sleep`](crate::ModelRunner::sleep)); that the scheduler forgets what it believed to be
//! cached is the engine's.

use std::sync::Arc;
use std::sync::mpsc::TrySendError;

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::handle::{Command, EngineHandle};
use crate::report::EngineState;

/// What an engine gives back while it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SleepLevel {
    /// The memory of the KV cache, and with it what is cached of prompts.
    Cache,
    /// The model too, which is loaded again when it wakes.
    Model,
}

/// Why an engine could not be put to sleep, or woken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SleepError {
    /// It has something to compute.
    #[error("requests are in work: only an idle engine can sleep")]
    Busy,
    /// It sleeps on; the next request, or call, tries again.
    #[error("failed to wake the model: {0}")]
    Wake(String),
    /// The engine finishes what it has, or has ended.
    #[error("the engine has stopped")]
    Stopped,
}

/// A change that is asked for.
#[derive(Debug)]
pub(crate) struct SleepCommand {
    /// `None` to wake.
    pub(crate) level: Option<SleepLevel>,
    pub(crate) answer: oneshot::Sender<Result<(), SleepError>>,
    /// One change is on its way at a time.
    pub(crate) _turn: OwnedSemaphorePermit,
}

impl EngineHandle {
    /// Puts the engine to sleep and waits until it has given back what `level` says. One that sleeps already gives back
    /// what it still has of that.
    ///
    /// # Errors
    /// It has something to do, or takes nothing more.
    ///
    /// # Cancel safety
    /// Once it was polled, the change may happen.
    pub async fn sleep(&self, level: SleepLevel) -> Result<(), SleepError> {
        self.change(Some(level)).await
    }

    /// Wakes the engine and waits until it can compute. Requests do so by themselves.
    ///
    /// # Errors
    /// It cannot have back what it gave, or takes nothing more.
    ///
    /// # Cancel safety
    /// As [`Self::sleep`].
    pub async fn wake(&self) -> Result<(), SleepError> {
        self.change(None).await
    }

    /// What the engine has given back, if it sleeps.
    pub fn asleep(&self) -> Option<SleepLevel> {
        self.shared.load.borrow().asleep
    }

    async fn change(&self, level: Option<SleepLevel>) -> Result<(), SleepError> {
        let turn = Arc::clone(&self.shared.sleep_turn).acquire_owned().await;
        let turn = turn.expect("invariant: nobody closes it");
        if self.shared.load.borrow().state == EngineState::Draining {
            return Err(SleepError::Stopped);
        }
        let (answer, answered) = oneshot::channel();
        let command = Command::Sleep(SleepCommand { level, answer, _turn: turn });
        match self.shared.commands.try_send(command) {
            Ok(()) => answered.await.unwrap_or(Err(SleepError::Stopped)),
            // There is room for one change, and this is it.
            Err(TrySendError::Disconnected(_) | TrySendError::Full(_)) => Err(SleepError::Stopped),
        }
    }
}

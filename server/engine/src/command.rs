//! The commands that the handles and other threads send to the engine's thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use server_scheduler::{Rejection, StopCriteria, TokenId};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::aborts::Aborts;
use crate::guide::Guide;
use crate::images::RequestImages;
use crate::lookup::PromptLookup;
use crate::request::{DraftModelParams, Event, Sampling};
use crate::sampler::History;
use crate::search::BeamSearch;
use crate::sleep::{SleepError, SleepLevel};

/// Maximum number of commands in the channel in addition to submissions: one each to drain, to stop, to change the
/// sleep level and to wake the thread.
pub(crate) const CONTROL_COMMANDS_MAX: usize = 4;

#[derive(Debug)]
pub(crate) enum Command {
    /// Start a request.
    Submit(Box<Submission>),
    /// Finish the accepted requests, then end the thread.
    Drain,
    /// Sleep if the engine is idle, or wake.
    Sleep(SleepCommand),
    /// End the thread after the current step.
    Stop,
    /// Check for results of other threads (restored blocks, encoded images and ready guides) and for disconnected
    /// clients.
    Wake,
}

/// A request that the handle has accepted.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) prompt: Vec<TokenId>,
    pub(crate) images: Option<Arc<RequestImages>>,
    pub(crate) stop: StopCriteria,
    pub(crate) sampling: Sampling,
    pub(crate) beam_search: Option<BeamSearch>,
    pub(crate) lookup: Option<PromptLookup>,
    pub(crate) draft: Option<DraftModelParams>,
    pub(crate) guide: Option<Arc<dyn Guide>>,
    pub(crate) cache_salt: u64,
    pub(crate) adapter: u32,
    pub(crate) tenant: u128,
    /// The history of each sequence.
    pub(crate) histories: Vec<History>,
    pub(crate) events: mpsc::Sender<Event>,
    pub(crate) aborts: Arc<Aborts>,
    pub(crate) permit: WaitingPermit,
    pub(crate) submitted: Duration,
}

/// The sender of the reply to a [`SleepCommand`].
pub(crate) type SleepReply = oneshot::Sender<Result<(), SleepError>>;

/// A request to change the sleep level.
#[derive(Debug)]
pub(crate) struct SleepCommand {
    /// `None` to wake.
    pub(crate) level: Option<SleepLevel>,
    pub(crate) reply: SleepReply,
    /// Limits the channel to one such command.
    pub(crate) _permit: OwnedSemaphorePermit,
}

/// A permit that counts the sequences of a request as waiting until the permit is dropped.
#[derive(Debug)]
pub(crate) struct WaitingPermit {
    waiting: Arc<AtomicU32>,
    sequences: u32,
}

impl WaitingPermit {
    pub(crate) fn acquire(
        waiting: &Arc<AtomicU32>,
        sequences: u32,
        max_queue: u32,
    ) -> Result<Self, Rejection> {
        let add = |count: u32| count.checked_add(sequences).filter(|&count| count <= max_queue);
        waiting
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, add)
            .map_err(|_| Rejection::QueueFull { max_queue })?;
        Ok(Self { waiting: Arc::clone(waiting), sequences })
    }
}

impl Drop for WaitingPermit {
    fn drop(&mut self) {
        self.waiting.fetch_sub(self.sequences, Ordering::AcqRel);
    }
}

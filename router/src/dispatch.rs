//! Assigns replicas to requests. A new request receives a [`Placement`] immediately if a replica has room and no
//! earlier request is waiting, and otherwise waits in the queue of its model. The proxy sends the request; this module
//! sends nothing.
//!
//! ```text
//! place ─► Picker::book ─► a Placement (RAII) ─► the proxy sends the request
//!   └► queue (all replicas are full, or there is none) ─► place_waiting, when there may be room ─► a Placement
//! ```
//!
//! Requests that are waiting because all replicas are full and requests that are waiting because no replica of the
//! model accepts requests are in the same queue, so that a new replica serves the requests that have waited for it
//! before newcomers. Requests of the second kind have a separate limit and timeout: `--replica-wait-requests` and
//! `--replica-wait-timeout`.
//!
//! When room becomes free, `dispatcher` assigns it to waiting requests: `backfill` decides which of them gets the room,
//! and `picker` decides which replica a request gets. `queue_guard` and `replica_wait` count the requests that wait.
//! `placement` reports the outcome of a booked request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::queue::{QueueConfig, QueuedRequest};
use crate::replica::Replica;
use crate::served_model::ServedModel;
use crate::waiting::PlacementRequest;

mod backfill;
mod deadline;
mod dispatcher;
mod error;
mod pick_log;
mod picker;
mod placement;
mod queue_guard;
mod replica_wait;

use deadline::Deadline;
pub use dispatcher::Dispatcher;
pub use error::{PlacementError, WaitTarget};
pub use pick_log::{Pick, PickLog, ScoredCandidate};
use picker::{Search, SearchResult};
pub use placement::{Outcome, Placement};
use queue_guard::WaitReason;

/// The longest pause before the router retries a request at a replica that has already failed to answer it, if no other
/// replica is available.
const FAILED_REPLICA_PAUSE: Duration = Duration::from_millis(200);

impl Dispatcher {
    /// Books a replica for a request, after waiting for one if necessary.
    ///
    /// # Errors
    /// No replica became available in time, the request is not allowed to wait, or the only replica that can answer the
    /// request is gone.
    ///
    /// # Cancel safety
    /// Dropping the future removes the request from the queue. If a replica has just been booked for it, the room is
    /// offered to the next request.
    pub async fn place(
        self: &Arc<Self>,
        served_model: &Arc<ServedModel>,
        request: PlacementRequest,
        queued: QueuedRequest,
    ) -> Result<Placement, PlacementError> {
        if let Some(replica) = request.required_replica.clone() {
            return self.place_at(served_model, &replica, &request).await;
        }
        // A new request queues behind the waiting requests. A retried request does not, because it has already had its
        // turn.
        if served_model.waiters() == 0 || !request.failed_replicas.is_empty() {
            match self.picker.book(Search::everywhere(served_model, &request), Instant::now()) {
                SearchResult::Booked(assignment) => {
                    return Ok(Placement::new(self, served_model, assignment));
                }
                SearchResult::NoReplica => return self.await_replica(served_model, request, queued).await,
                SearchResult::Full => {}
            }
        } else if !self.is_available(served_model) {
            return self.await_replica(served_model, request, queued).await;
        }
        self.await_room(served_model, request, queued).await
    }

    /// Books the only replica that can answer the request. If the replica has just failed to answer, it may be
    /// restarting, so this method pauses first.
    async fn place_at(
        self: &Arc<Self>,
        served_model: &Arc<ServedModel>,
        replica: &Arc<Replica>,
        request: &PlacementRequest,
    ) -> Result<Placement, PlacementError> {
        if request.failed_replicas.contains(&replica.identity) {
            tokio::time::sleep(FAILED_REPLICA_PAUSE).await;
        }
        if replica.is_removed() {
            return Err(PlacementError::ReplicaGone);
        }
        let assignment = self.picker.book_required(served_model, request, Instant::now());
        let assignment = assignment.ok_or(PlacementError::ReplicaGone)?;
        Ok(Placement::new(self, served_model, assignment))
    }

    /// Waits in the queue until a replica has room.
    async fn await_room(
        self: &Arc<Self>,
        served_model: &Arc<ServedModel>,
        request: PlacementRequest,
        queued: QueuedRequest,
    ) -> Result<Placement, PlacementError> {
        let config = self.queue_config();
        let mut queue_guard = self.enqueue(served_model, request, queued, config, WaitReason::Full)?;
        let deadline = Deadline::after(config.queue_timeout, queued);
        queue_guard.wait(deadline).await;
        queue_guard.leave(deadline)
    }

    /// Waits in the queue while no replica accepts requests. When a replica appears, the request is served before later
    /// ones; if that replica is full, the request continues to wait as in [`Self::await_room`].
    async fn await_replica(
        self: &Arc<Self>,
        served_model: &Arc<ServedModel>,
        mut request: PlacementRequest,
        queued: QueuedRequest,
    ) -> Result<Placement, PlacementError> {
        let entered = Instant::now();
        let mut deadline = Deadline::after(self.settings().load().replica_wait_timeout, queued);
        let room = self.begin_replica_wait()?;
        if !request.failed_replicas.is_empty() {
            // No replica is available except, perhaps, those that have just failed to answer this request. Pause before
            // they are tried again.
            let mut changes = self.replicas.changes();
            let _ = tokio::time::timeout(FAILED_REPLICA_PAUSE, changes.changed()).await;
            request.failed_replicas.clear();
        }
        let config = self.queue_config();
        // `--replica-wait-requests` applies instead of the limits of the queue.
        let unlimited = QueueConfig { queue_requests: usize::MAX, queue_tokens: u64::MAX, ..config };
        let mut queue_guard =
            self.enqueue(served_model, request, queued, unlimited, WaitReason::NoReplica(room))?;
        if !queue_guard.wait(deadline).await && self.is_available(served_model) {
            queue_guard.set_full();
            deadline = Deadline::at(entered + config.queue_timeout, queued);
            queue_guard.wait(deadline).await;
        }
        queue_guard.leave(deadline)
    }

    fn queue_config(&self) -> QueueConfig {
        let settings = self.settings().load();
        QueueConfig {
            queue_requests: settings.queue_requests as usize,
            queue_tokens: settings.queue_tokens,
            queue_timeout: settings.queue_timeout,
            ..QueueConfig::default()
        }
    }
}

#[cfg(test)]
mod tests;

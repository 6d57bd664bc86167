//! The guard of a request in the queue of its model. The request enters the queue, waits for an assignment, and leaves
//! the queue at the latest when the guard is dropped.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tokio::sync::oneshot;
use tokio::time::timeout_at;

use super::deadline::Deadline;
use super::dispatcher::Dispatcher;
use super::error::{PlacementError, WaitTarget};
use super::placement::Placement;
use super::replica_wait::ReplicaWaitGuard;
use crate::queue::{QueueConfig, QueueFull, QueuedRequest, Ticket};
use crate::served_model::ServedModel;
use crate::waiting::{Assignment, PlacementRequest, Waiter};

impl Dispatcher {
    /// Adds a request to the queue of its model.
    pub(super) fn enqueue<'a>(
        self: &'a Arc<Self>,
        served_model: &'a Arc<ServedModel>,
        request: PlacementRequest,
        queued: QueuedRequest,
        config: QueueConfig,
        reason: WaitReason<'a>,
    ) -> Result<QueueGuard<'a>, PlacementError> {
        let since = Instant::now();
        let (wake, woken) = oneshot::channel();
        let pushed = served_model.with_waiting(|waiting| {
            waiting.queue.configure(config);
            let ticket = waiting.queue.push(queued, since)?;
            waiting.waiters.insert(ticket, Waiter { request, wake, since });
            Ok(ticket)
        });
        let ticket = pushed.map_err(|QueueFull { retry_after }| PlacementError::QueueFull { retry_after })?;
        self.queued.fetch_add(1, Ordering::AcqRel);
        self.queued_without_replica.fetch_add(usize::from(reason.is_no_replica()), Ordering::AcqRel);
        let queue_guard = QueueGuard {
            dispatcher: self,
            served_model,
            ticket,
            woken,
            placement: None,
            reason,
            since,
            has_left: false,
        };
        // Room may have appeared between the search and the moment when the request entered the queue.
        self.place_newcomer(served_model, ticket);
        Ok(queue_guard)
    }
}

/// The reason why a request is in the queue.
pub(super) enum WaitReason<'a> {
    /// All replicas are full.
    Full,
    /// No replica accepts requests. The request counts toward `--replica-wait-requests`.
    NoReplica(
        #[expect(dead_code, reason = "dropping it makes room for another request")] ReplicaWaitGuard<'a>,
    ),
}

impl WaitReason<'_> {
    fn is_no_replica(&self) -> bool {
        matches!(self, Self::NoReplica(_))
    }
}

/// A request in the queue. Dropping it removes the request.
pub(super) struct QueueGuard<'a> {
    dispatcher: &'a Arc<Dispatcher>,
    served_model: &'a Arc<ServedModel>,
    ticket: Ticket,
    woken: oneshot::Receiver<Assignment>,
    placement: Option<Placement>,
    reason: WaitReason<'a>,
    since: Instant,
    has_left: bool,
}

impl QueueGuard<'_> {
    /// Waits for a replica until `deadline`. Returns whether a replica has been assigned to the request.
    pub(super) async fn wait(&mut self, deadline: Deadline) -> bool {
        if self.placement.is_none() {
            let assignment = timeout_at(deadline.at.into(), &mut self.woken).await.ok().and_then(Result::ok);
            self.placement =
                assignment.map(|assignment| Placement::new(self.dispatcher, self.served_model, assignment));
        }
        self.placement.is_some()
    }

    /// Records that the request now waits because all replicas are full.
    pub(super) fn set_full(&mut self) {
        if self.reason.is_no_replica() {
            self.dispatcher.queued_without_replica.fetch_sub(1, Ordering::AcqRel);
            self.reason = WaitReason::Full;
        }
    }

    /// Leaves the queue, and returns the placement if a replica has been assigned to the request.
    pub(super) fn leave(mut self, deadline: Deadline) -> Result<Placement, PlacementError> {
        self.remove();
        let placement = self.placement.take().or_else(|| self.late_placement());
        self.dispatcher.metrics().record_queue_time(self.since.elapsed());
        placement.ok_or_else(|| {
            let retry_after =
                self.served_model.with_waiting(|waiting| waiting.queue.retry_after(Instant::now()));
            if self.dispatcher.is_available(self.served_model) {
                PlacementError::QueueTimeout { retry_after }
            } else {
                deadline.no_replica(WaitTarget::Model)
            }
        })
    }

    fn remove(&mut self) {
        if std::mem::replace(&mut self.has_left, true) {
            return;
        }
        let (waiter, was_first) = self.served_model.with_waiting(|waiting| {
            let was_first = waiting.queue.head() == Some(self.ticket);
            (waiting.cancel(self.ticket, Instant::now()), was_first)
        });
        self.dispatcher.queued.fetch_sub(1, Ordering::AcqRel);
        let without_replica = usize::from(self.reason.is_no_replica());
        self.dispatcher.queued_without_replica.fetch_sub(without_replica, Ordering::AcqRel);
        drop(waiter);
        if was_first {
            // The requests behind this one may have waited only because it was first.
            self.dispatcher.place_waiting(self.served_model, None);
        }
    }

    /// The placement for an assignment that arrived after the last call of [`Self::wait`]. No assignment arrives after
    /// [`Self::remove`].
    fn late_placement(&mut self) -> Option<Placement> {
        let assignment = self.woken.try_recv().ok()?;
        Some(Placement::new(self.dispatcher, self.served_model, assignment))
    }
}

impl Drop for QueueGuard<'_> {
    fn drop(&mut self) {
        self.remove();
        drop(self.late_placement());
    }
}

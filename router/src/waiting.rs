//! The requests that wait for a replica of one model, each with its demand and the channel that wakes its task.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::oneshot;

use crate::health::SentRequest;
use crate::ledger::BookingGuard;
use crate::policy::Demand;
use crate::prefix::PrefixHashes;
use crate::queue::{Queue, QueueConfig, Ticket};
use crate::replica::{Replica, Reservation};

/// The properties of a request that determine its replica.
#[derive(Clone, Debug, Default)]
pub struct PlacementRequest {
    /// The estimated size of the request, in tokens and sequences.
    pub demand: Demand,
    /// The hashes of the leading blocks of its prompt.
    pub prefix_hashes: Arc<PrefixHashes>,
    /// The identities of the replicas that have failed to answer the request.
    pub failed_replicas: Vec<u64>,
    /// The only replica that can answer the request, because it stores an object that the request refers to.
    pub required_replica: Option<Arc<Replica>>,
}

/// A booking of a replica for a request, on its way to the task that handles the request.
#[derive(Debug)]
pub(crate) struct Assignment {
    pub(crate) replica: Arc<Replica>,
    pub(crate) booking: BookingGuard,
    pub(crate) sent: SentRequest,
}

/// A request that waits.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) request: PlacementRequest,
    pub(crate) wake: oneshot::Sender<Assignment>,
    /// The time when the request entered the queue.
    pub(crate) since: Instant,
}

/// The requests that wait for a replica with room, in the order of the queue.
#[derive(Debug)]
pub(crate) struct WaitingList {
    pub(crate) queue: Queue,
    pub(crate) waiters: HashMap<Ticket, Waiter>,
    /// The first request of the queue, if it has waited too long, and the replica that is reserved for it.
    pub(crate) reservation: Option<(Ticket, Reservation)>,
}

impl WaitingList {
    pub(crate) fn new() -> Self {
        Self { queue: Queue::new(QueueConfig::default()), waiters: HashMap::new(), reservation: None }
    }

    /// Removes a request that was not dispatched to any replica.
    pub(crate) fn cancel(&mut self, ticket: Ticket, now: Instant) -> Option<Waiter> {
        self.release(ticket);
        self.queue.cancel(ticket, now);
        self.waiters.remove(&ticket)
    }

    /// Removes a request that was dispatched to a replica.
    pub(crate) fn dequeue(&mut self, ticket: Ticket, now: Instant) -> Option<Waiter> {
        self.release(ticket);
        self.queue.dequeue(ticket, now);
        self.waiters.remove(&ticket)
    }

    /// The replica that is reserved for a request.
    pub(crate) fn reserved_for(&self, ticket: Ticket) -> Option<&Arc<Replica>> {
        let (holder, reservation) = self.reservation.as_ref()?;
        (*holder == ticket).then(|| reservation.replica())
    }

    fn release(&mut self, ticket: Ticket) {
        self.reservation.take_if(|(holder, _)| *holder == ticket);
    }
}

//! A request's place at a replica, from the pick to the answer's last byte.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::dispatch::Dispatch;
use crate::fleet::Fleet;
use crate::health::Sent;
use crate::ledger::Booking;
use crate::replicas::Replica;

/// How a request ended, as far as the replica is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was answered, with whatever is not the replica's fault.
    Answered,
    /// The replica failed.
    Failed,
    /// It did not answer in time: a fault of the replica only if it has not computed anything meanwhile.
    TimedOut,
    /// Nothing was learnt, for example because the client left.
    Unknown,
}

/// A booked place. Dropping it gives it back and tells how the request ended, on whatever path.
#[derive(Debug)]
pub struct Placed {
    /// Where.
    pub replica: Arc<Replica>,
    /// Of which model.
    pub fleet: Arc<Fleet>,
    dispatch: Arc<Dispatch>,
    booking: Option<Booking>,
    sent: Sent,
    at: Instant,
    outcome: Outcome,
}

impl Placed {
    pub(super) fn new(
        dispatch: &Arc<Dispatch>,
        fleet: Arc<Fleet>,
        replica: Arc<Replica>,
        (booking, sent): (Booking, Sent),
    ) -> Self {
        Self {
            replica,
            fleet,
            dispatch: Arc::clone(dispatch),
            booking: Some(booking),
            sent,
            at: Instant::now(),
            outcome: Outcome::Unknown,
        }
    }

    /// The value of the header `x-ovfleet-dispatch`.
    pub(crate) fn header(&self) -> String {
        self.booking.as_ref().map_or_else(String::new, Booking::header)
    }

    /// The answer has begun.
    pub(crate) fn first_token(&self) {
        self.replica.has_progressed(Instant::now());
        if let Some(booking) = &self.booking {
            booking.first_token();
        }
    }

    /// How it ended, to be told when it is dropped.
    pub(crate) fn end(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        let Self { replica, fleet, dispatch, sent, .. } = self;
        let outcome = match self.outcome {
            Outcome::TimedOut if replica.has_progressed_since(self.at) => Outcome::Unknown,
            Outcome::TimedOut => Outcome::Failed,
            outcome => outcome,
        };
        match outcome {
            Outcome::Answered => {
                replica.answered.fetch_add(1, Ordering::Relaxed);
                dispatch.health().succeeded(replica.identity, *sent);
            }
            Outcome::Failed => {
                replica.failed.fetch_add(1, Ordering::Relaxed);
                let replicas = fleet.replicas();
                let fleet = replicas.iter().map(|replica| replica.identity);
                if dispatch.health().failed(replica.identity, *sent, fleet, Instant::now()) {
                    dispatch.metrics().ejected();
                    tracing::warn!(replica = replica.found.name, "ejected for a while: it fails");
                }
            }
            Outcome::Unknown | Outcome::TimedOut => dispatch.health().unknown(replica.identity, *sent),
        }
        // The room is there before those who wait for it look.
        self.booking = None;
        dispatch.pump_at(replica);
    }
}

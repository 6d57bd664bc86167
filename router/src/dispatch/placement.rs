//! The booking of a request at a replica. When it ends, it frees the room of the request and reports the outcome of the
//! request to the health check.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::dispatcher::Dispatcher;
use crate::health::SentRequest;
use crate::ledger::BookingGuard;
use crate::replica::Replica;
use crate::served_model::ServedModel;
use crate::waiting::Assignment;

/// The outcome of a request, as the health check of its replica counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The replica returned a complete answer, which can be an error that the client caused.
    Answered,
    /// The replica failed to answer.
    Failed,
    /// The replica did not answer in time. This counts as a failure only if the replica has computed nothing in the
    /// meantime.
    TimedOut,
    /// The outcome says nothing about the replica, for example because the client disconnected.
    Unknown,
}

/// The booking of a request at a replica. The booking lasts until the last byte of the answer. Dropping this value ends
/// the booking and reports the outcome to the health check.
#[derive(Debug)]
pub struct Placement {
    /// The replica that the request is booked at.
    pub replica: Arc<Replica>,
    /// The model that the request is for.
    pub served_model: Arc<ServedModel>,
    dispatcher: Arc<Dispatcher>,
    /// `None` only while the placement is being dropped.
    booking: Option<BookingGuard>,
    sent: SentRequest,
    at: Instant,
    outcome: Outcome,
}

impl Placement {
    pub(super) fn new(
        dispatcher: &Arc<Dispatcher>,
        served_model: &Arc<ServedModel>,
        assignment: Assignment,
    ) -> Self {
        let Assignment { replica, booking, sent } = assignment;
        Self {
            replica,
            served_model: Arc::clone(served_model),
            dispatcher: Arc::clone(dispatcher),
            booking: Some(booking),
            sent,
            at: Instant::now(),
            outcome: Outcome::Unknown,
        }
    }

    /// The value of the header `x-ovfleet-dispatch`.
    pub(crate) fn header(&self) -> String {
        self.booking.as_ref().map_or_else(String::new, BookingGuard::header)
    }

    /// Records that the replica has begun to answer, which shows that it makes progress and has computed the prompt.
    pub(crate) fn record_first_token(&self) {
        self.replica.record_progress(Instant::now());
        if let Some(booking) = &self.booking {
            booking.record_first_token();
        }
    }

    /// Records that the router begins to forward the answer to the client. If the request is a probe, the probe has
    /// succeeded.
    pub(crate) fn record_answer_began(&mut self) {
        self.dispatcher.health().answer_began(self.replica.identity, &mut self.sent);
    }

    /// Sets the outcome to report when the placement is dropped.
    pub(crate) fn set_outcome(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        let Self { replica, served_model, dispatcher, sent, .. } = self;
        let outcome = match self.outcome {
            Outcome::TimedOut if replica.has_progressed_since(self.at) => Outcome::Unknown,
            Outcome::TimedOut => Outcome::Failed,
            outcome => outcome,
        };
        match outcome {
            Outcome::Answered => {
                replica.answered.fetch_add(1, Ordering::Relaxed);
                dispatcher.health().succeeded(replica.identity, *sent);
            }
            Outcome::Failed => {
                replica.failed.fetch_add(1, Ordering::Relaxed);
                let replicas = served_model.replicas();
                let identities = replicas.iter().map(|replica| replica.identity);
                if dispatcher.health().failed(replica.identity, *sent, identities, Instant::now()) {
                    dispatcher.metrics().record_ejection();
                    tracing::warn!(
                        replica = replica.discovered.name,
                        "ejected the replica: its requests fail"
                    );
                }
            }
            Outcome::Unknown | Outcome::TimedOut => dispatcher.health().unknown(replica.identity, *sent),
        }
        // End the booking first, so that the waiting requests can use the freed room.
        self.booking = None;
        dispatcher.place_waiting_at(replica);
    }
}

//! Decides which waiting request of a model gets the room that has become free at a replica. The module wakes the task
//! of that request; it neither waits nor takes the lock of the queue.
//!
//! A request that fits nowhere does not block the requests behind it: the next few requests are tried as well
//! (backfill). To prevent them from overtaking it forever, a replica is reserved for the first request of the queue if
//! this request has waited for two seconds. The policy picks that replica; the default policy picks the one that is
//! expected to answer the request first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::picker::{Picker, Search, SearchResult};
use crate::queue::Ticket;
use crate::replica::Replica;
use crate::served_model::ServedModel;
use crate::waiting::{Assignment, WaitingList};

/// Number of requests at the head of a queue that are considered when room becomes free.
pub(super) const BACKFILL_MAX: usize = 16;
/// The time after which a replica is reserved for the first request of a queue.
pub(super) const RESERVE_AFTER: Duration = Duration::from_secs(2);
/// The time after which a reservation also excludes the requests of other tenants. If it excluded them from the start,
/// a tenant with large requests could block everyone else; if it never did, a tenant with many small requests could
/// block a large request of another tenant forever.
pub(super) const RESERVE_AGAINST_ALL_AFTER: Duration = Duration::from_secs(30);

/// The result of an attempt to place a waiting request.
pub(super) enum BackfillResult {
    /// The request has left the queue. `unclaimed` is its assignment if its task stopped waiting before it received the
    /// assignment.
    Dequeued { unclaimed: Option<Assignment> },
    /// The request can be tried again immediately: its list of failed replicas was cleared.
    TryAgain,
    /// No replica has room for the request.
    Full,
    /// No replica accepts requests.
    NoReplica,
}

/// Places the requests that wait for a model.
pub(super) struct Backfill<'a> {
    pub(super) picker: &'a Picker,
    pub(super) served_model: &'a Arc<ServedModel>,
    pub(super) now: Instant,
}

impl Backfill<'_> {
    /// Tries to place the next [`BACKFILL_MAX`] requests one by one, until an attempt returns a result other than
    /// [`BackfillResult::Full`]. If `at` is given, only this replica is considered.
    pub(super) fn place_next(&self, waiting: &mut WaitingList, at: Option<&Arc<Replica>>) -> BackfillResult {
        for (position, ticket) in waiting.queue.upcoming(BACKFILL_MAX).into_iter().enumerate() {
            match self.try_place(waiting, ticket, at) {
                BackfillResult::Full if position == 0 && at.is_none() => self.reserve_for(waiting, ticket),
                BackfillResult::Full => {}
                result => return result,
            }
        }
        BackfillResult::Full
    }

    /// Tries to place a request that has just entered the queue, if it is among the next [`BACKFILL_MAX`] requests. The
    /// first request of the queue is tried before it, in case a replica has room that no event has announced.
    pub(super) fn place_newcomer(&self, waiting: &mut WaitingList, ticket: Ticket) -> BackfillResult {
        let upcoming = waiting.queue.upcoming(BACKFILL_MAX);
        if !upcoming.contains(&ticket) {
            return BackfillResult::Full;
        }
        let first = upcoming.first().copied().filter(|&first| first != ticket);
        match first.map_or(BackfillResult::Full, |first| self.try_place(waiting, first, None)) {
            BackfillResult::Full => self.try_place(waiting, ticket, None),
            result => result,
        }
    }

    /// Tries to place one waiting request.
    fn try_place(
        &self,
        waiting: &mut WaitingList,
        ticket: Ticket,
        at: Option<&Arc<Replica>>,
    ) -> BackfillResult {
        let Self { picker, served_model, now } = *self;
        let reserved = waiting.reserved_for(ticket).cloned();
        let waiter = waiting.waiters.get_mut(&ticket).filter(|waiter| !waiter.wake.is_closed());
        let Some(waiter) = waiter else {
            waiting.cancel(ticket, now);
            return BackfillResult::Dequeued { unclaimed: None };
        };
        let search = Search { served_model, request: &waiter.request, at, reserved: reserved.as_ref() };
        match picker.book(search, now) {
            SearchResult::Booked(assignment) => {
                let waiter = waiting.dequeue(ticket, now).expect("invariant: the list contains the waiter");
                BackfillResult::Dequeued { unclaimed: waiter.wake.send(assignment).err() }
            }
            SearchResult::NoReplica if !waiter.request.failed_replicas.is_empty() => {
                // No replica is available except, perhaps, those that have failed to answer this request. Permit them
                // again, so that the request does not block the requests behind it.
                waiter.request.failed_replicas.clear();
                BackfillResult::TryAgain
            }
            SearchResult::NoReplica => BackfillResult::NoReplica,
            SearchResult::Full => BackfillResult::Full,
        }
    }

    /// Reserves a replica for the first request of a queue once the request has waited for [`RESERVE_AFTER`]. If the
    /// reserved replica can no longer serve the request, another replica is reserved instead. After
    /// [`RESERVE_AGAINST_ALL_AFTER`], the reservation excludes the requests of all other tenants.
    fn reserve_for(&self, waiting: &mut WaitingList, ticket: Ticket) {
        let Self { picker, served_model, now } = *self;
        let Some(waiter) = waiting.waiters.get(&ticket) else { return };
        if now.saturating_duration_since(waiter.since) < RESERVE_AFTER {
            return;
        }
        let reserved = waiting.reserved_for(ticket);
        if reserved.is_some_and(|reserved| picker.can_fit(served_model, &waiter.request, reserved, now)) {
            if now.saturating_duration_since(waiter.since) >= RESERVE_AGAINST_ALL_AFTER
                && let Some((_, reservation)) = &waiting.reservation
            {
                reservation.extend_to_all_tenants();
            }
            return;
        }
        let reservation = picker.reserve(served_model, &waiter.request, now);
        waiting.reservation = reservation.map(|reservation| (ticket, reservation));
    }
}

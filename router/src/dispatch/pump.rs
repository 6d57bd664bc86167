//! Gives places to the requests that wait, in order, whenever there may be room.
//!
//! A report, or the end of a request, makes room at one replica, and only that one is compared with the requests
//! that wait: the work of an event does not grow with the number of replicas. Room that nobody announces (a
//! report that has become too old, an ejection that is over) is found by [`Dispatch::pump_all`], which runs at
//! fixed intervals.
//!
//! A request that fits nowhere does not hold up the requests behind it: the next few are tried as well (backfill).
//! So that they do not overtake it for ever, the replica on which it is likely to fit first is reserved for it once
//! it has waited at the head of the queue for [`RESERVE_AFTER`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Attempt, Dispatch, Placed, SCRATCH, Search, Wanted};
use crate::fleet::{Fleet, Waiting};
use crate::policy::Capacity;
use crate::queue::Ticket;
use crate::replicas::{Replica, Reservation};

/// Requests at the head of a queue that are compared with the room there is.
pub(super) const BACKFILL_MAX: usize = 16;
/// The time after which a replica is reserved for the first request of a queue.
pub(super) const RESERVE_AFTER: Duration = Duration::from_secs(2);

/// What became of a request that was offered a place.
enum Offer {
    /// It left the queue with a place. A place comes back if nobody waits for it any more.
    Left(Option<Placed>),
    /// It may be offered again at once: its list of replicas that failed was cleared.
    Again,
    /// There is no room for it.
    Full,
    /// No replica takes requests.
    Nobody,
}

impl Offer {
    /// Whether something has changed in the queue. To be called outside of its lock: a place that nobody waits for
    /// any more ends here, and makes room for the next request.
    fn settle(self) -> bool {
        match self {
            Self::Left(unclaimed) => {
                drop(unclaimed);
                true
            }
            Self::Again => true,
            Self::Full | Self::Nobody => false,
        }
    }
}

impl Dispatch {
    /// Gives room to those who wait for any model.
    pub fn pump_all(self: &Arc<Self>) {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return;
        }
        for fleet in self.replicas.fleets().values() {
            self.pump(fleet, None);
        }
    }

    /// Gives room that has appeared at `replica` to those who wait for a model that it serves.
    pub fn pump_at(self: &Arc<Self>, replica: &Arc<Replica>) {
        if self.waiting.load(Ordering::Acquire) == 0 || replica.is_removed() {
            return;
        }
        for fleet in replica.fleets() {
            self.pump(&fleet, Some(replica));
        }
    }

    /// Gives room to those who wait for a model, for as long as there is some: at any replica, or `at` one.
    pub(super) fn pump(self: &Arc<Self>, fleet: &Arc<Fleet>, at: Option<&Arc<Replica>>) {
        while fleet.waiters() > 0 && self.pump_once(fleet, at, Instant::now()) {}
    }

    /// Offers places to the next requests until one of them leaves the queue. Returns whether there may be more to do.
    pub(super) fn pump_once(
        self: &Arc<Self>,
        fleet: &Arc<Fleet>,
        at: Option<&Arc<Replica>>,
        now: Instant,
    ) -> bool {
        let offer = fleet.with_waiting(|waiting| {
            let upcoming: Vec<Ticket> = waiting.queue.upcoming(BACKFILL_MAX).collect();
            for (position, &ticket) in upcoming.iter().enumerate() {
                match self.offer(fleet, waiting, ticket, at, now) {
                    Offer::Full if position == 0 && at.is_none() => {
                        self.reserve_for(fleet, waiting, ticket, now);
                    }
                    Offer::Full => {}
                    offer => return offer,
                }
            }
            Offer::Full
        });
        offer.settle()
    }

    /// Offers a place to a request that has just entered the queue, if it is among those that are next. The first one
    /// of the queue is asked before it, for room that nobody has announced.
    pub(super) fn pump_newcomer(self: &Arc<Self>, fleet: &Arc<Fleet>, ticket: Ticket) {
        let now = Instant::now();
        let offer = fleet.with_waiting(|waiting| {
            let first = waiting.queue.head().filter(|&first| first != ticket);
            if !waiting.queue.is_upcoming(ticket, BACKFILL_MAX) {
                return Offer::Full;
            }
            match first.map_or(Offer::Full, |first| self.offer(fleet, waiting, first, None, now)) {
                Offer::Full => self.offer(fleet, waiting, ticket, None, now),
                offer => offer,
            }
        });
        if offer.settle() {
            self.pump(fleet, None);
        }
    }

    fn offer(
        self: &Arc<Self>,
        fleet: &Arc<Fleet>,
        waiting: &mut Waiting,
        ticket: Ticket,
        at: Option<&Arc<Replica>>,
        now: Instant,
    ) -> Offer {
        let reserved = waiting.reserved_for(ticket).cloned();
        let waiter = waiting.waiters.get_mut(&ticket).filter(|waiter| !waiter.wake.is_closed());
        let Some(waiter) = waiter else {
            waiting.cancel(ticket, now);
            return Offer::Left(None);
        };
        let search = Search { at, reserved: reserved.as_ref() };
        match self.try_place(fleet, &waiter.wanted, search, now) {
            Attempt::Placed(placed) => {
                let waiter = waiting.take(ticket, now).expect("invariant: it was just there");
                Offer::Left(waiter.wake.send(placed).err())
            }
            Attempt::Nobody if !waiter.wanted.tried.is_empty() => {
                // Only replicas that failed it are left: it must not hold up the others.
                waiter.wanted.tried.clear();
                Offer::Again
            }
            Attempt::Nobody => Offer::Nobody,
            Attempt::Full => Offer::Full,
        }
    }

    /// Reserves a replica for the first request of a queue if it has waited long enough, or another one if the
    /// reserved replica takes no requests any more.
    fn reserve_for(&self, fleet: &Arc<Fleet>, waiting: &mut Waiting, ticket: Ticket, now: Instant) {
        let Some(waiter) = waiting.waiters.get(&ticket) else { return };
        if now.saturating_duration_since(waiter.since) < RESERVE_AFTER {
            return;
        }
        let reserved = waiting.reserved_for(ticket).cloned();
        if reserved.is_some_and(|reserved| self.may_fit(fleet, &waiter.wanted, &reserved, now)) {
            return;
        }
        let reservation = self.soonest(fleet, &waiter.wanted, now);
        waiting.reservation = reservation.map(|reservation| (ticket, reservation));
    }

    /// Whether a replica that is reserved for a request will have room for it.
    fn may_fit(&self, fleet: &Fleet, wanted: &Wanted, reserved: &Arc<Replica>, now: Instant) -> bool {
        SCRATCH.with_borrow_mut(|scratch| {
            let search = Search { at: Some(reserved), reserved: Some(reserved) };
            self.gather(scratch, (fleet, wanted), search, now);
            let serves = fleet.replicas().iter().any(|replica| Arc::ptr_eq(replica, reserved));
            let candidate = scratch.candidates.first();
            serves && candidate.is_some_and(|candidate| candidate.capacity(&wanted.demand) != Capacity::Never)
        })
    }

    /// Reserves the replica that is judged to have room for a request first.
    fn soonest(&self, fleet: &Fleet, wanted: &Wanted, now: Instant) -> Option<Reservation> {
        SCRATCH.with_borrow_mut(|scratch| {
            self.gather(scratch, (fleet, wanted), Search::default(), now);
            let index = self.pick(&self.settings.load().policy, &wanted.demand, scratch).ok()?;
            scratch.replicas[index].reserve()
        })
    }
}

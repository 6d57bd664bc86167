//! The order in which the waiting requests of several tenants are served: start-time fair queueing (Goyal, Vin and
//! Cheng, 1996), with the tokens of the prompts as the cost.
//!
//! Each tenant with waiting requests has a virtual clock. Whenever one of its requests is served, the clock advances by
//! the number of tokens of the prompt. The tenant with the earliest clock is served next, so a tenant with a backlog
//! does not delay the requests of another. When a request arrives from a tenant without waiting requests, the clock of
//! this tenant advances to that of the tenant that was served last, unless it is already ahead. A tenant therefore
//! earns no credit while it has no requests. The caller determines the order of the requests of one tenant.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Instant;

use super::ticket::Ticket;

/// While requests wait, the clocks of tenants without waiting requests are removed only if their number exceeds this
/// limit plus the number of tenants with waiting requests.
const IDLE_CLOCKS_MAX: usize = 64;

/// The position of a request among the requests of its tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position {
    pub(super) rank: Instant,
    pub(super) ticket: Ticket,
}

/// The position of a tenant in the order of service: by its clock, or by its first request if the clocks are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    clock: u64,
    first: Position,
    tenant: u64,
}

/// The waiting requests of one tenant.
#[derive(Clone, Debug, Default)]
pub(super) struct TenantQueue {
    clock: u64,
    tokens: u64,
    /// The number of prompt tokens of each request, in the order of service.
    requests: BTreeMap<Position, u32>,
}

/// The waiting requests of all tenants.
#[derive(Clone, Debug, Default)]
pub(super) struct FairOrder {
    /// The clock of the tenant that was served last, before this tenant was charged for the request.
    now: u64,
    tenants: BTreeMap<u64, TenantQueue>,
    /// The turns of the tenants with waiting requests.
    turns: BTreeSet<Turn>,
}

/// The amount by which a clock advances for a prompt with this number of tokens.
fn cost(tokens: u32) -> u64 {
    u64::from(tokens.max(1))
}

impl TenantQueue {
    /// The number of waiting requests.
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    /// The number of prompt tokens of the waiting requests.
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    fn turn(&self, tenant: u64) -> Option<Turn> {
        let (&first, _) = self.requests.first_key_value()?;
        Some(Turn { clock: self.clock, first, tenant })
    }
}

impl FairOrder {
    pub(super) fn insert(&mut self, tenant: u64, position: Position, tokens: u32) {
        let now = self.now;
        self.update(tenant, |queue| {
            if queue.requests.is_empty() {
                queue.clock = queue.clock.max(now);
            }
            queue.requests.insert(position, tokens);
            queue.tokens += u64::from(tokens);
        });
    }

    /// Removes a request. A tenant is charged only for requests that are [served](Self::charge).
    pub(super) fn remove(&mut self, tenant: u64, position: Position) {
        self.update(tenant, |queue| {
            let tokens = queue.requests.remove(&position).unwrap_or(0);
            queue.tokens -= u64::from(tokens);
        });
        self.remove_idle_clocks();
    }

    /// Charges a tenant for a request that is served now.
    pub(super) fn charge(&mut self, tenant: u64, tokens: u32) {
        let mut served_at = 0;
        self.update(tenant, |queue| {
            served_at = queue.clock;
            queue.clock += cost(tokens);
        });
        self.now = self.now.max(served_at);
    }

    /// The waiting requests of a tenant, or `None` if the tenant has none and its clock was removed.
    pub(super) fn of_tenant(&self, tenant: u64) -> Option<&TenantQueue> {
        self.tenants.get(&tenant)
    }

    /// The first `count` requests in the order in which they would be served.
    pub(super) fn upcoming(&self, count: usize) -> Vec<Ticket> {
        let first_turns = self.turns.iter().take(count).copied();
        let mut turns: BinaryHeap<Reverse<Turn>> = first_turns.map(Reverse).collect();
        let mut upcoming = Vec::with_capacity(count.min(self.turns.len()));
        while upcoming.len() < count
            && let Some(Reverse(turn)) = turns.pop()
        {
            upcoming.push(turn.first.ticket);
            let mut rest = self.tenants[&turn.tenant].requests.range(turn.first..);
            if let (Some((_, &tokens)), Some((&first, _))) = (rest.next(), rest.next()) {
                turns.push(Reverse(Turn { clock: turn.clock + cost(tokens), first, ..turn }));
            }
        }
        upcoming
    }

    /// Changes the queue of a tenant, and updates the tenant's turn.
    fn update(&mut self, tenant: u64, change: impl FnOnce(&mut TenantQueue)) {
        let queue = self.tenants.entry(tenant).or_default();
        if let Some(turn) = queue.turn(tenant) {
            self.turns.remove(&turn);
        }
        change(queue);
        self.turns.extend(queue.turn(tenant));
    }

    /// Removes the clocks of tenants without requests. As long as any tenant waits, a clock that is ahead of `now` must
    /// be retained, because its tenant might return.
    fn remove_idle_clocks(&mut self) {
        if self.turns.is_empty() {
            *self = Self::default();
        } else if self.tenants.len() > IDLE_CLOCKS_MAX + 2 * self.turns.len() {
            let now = self.now;
            self.tenants.retain(|_, queue| !queue.requests.is_empty() || queue.clock > now);
        }
    }

    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        let turns: BTreeSet<Turn> =
            self.tenants.iter().filter_map(|(&tenant, queue)| queue.turn(tenant)).collect();
        assert_eq!(self.turns, turns);
        for queue in self.tenants.values() {
            assert_eq!(queue.tokens, queue.requests.values().map(|&tokens| u64::from(tokens)).sum::<u64>());
        }
    }
}

//! The order in which the requests of several tenants are served: start-time fair queueing (Goyal, Vin and Cheng,
//! 1996), with the weights of the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models",
//! 2024).
//!
//! Each tenant has a virtual clock that advances by the tokens that the tenant uses. A request is ordered by its
//! tenant's clock at the time it arrives, so a request does not wait behind the whole backlog of another tenant. The
//! requests of a single tenant are ordered by their arrival.

use std::collections::BTreeMap;

/// The weight of a generated token, in prompt tokens.
const GENERATED_TOKEN_WEIGHT: u64 = 2;

/// Number of clocks below which the clocks of idle tenants are not removed.
const IDLE_CLOCKS_MAX: usize = 1024;

/// The virtual clocks of the tenants.
#[derive(Clone, Debug, Default)]
pub(crate) struct FairQueue {
    /// The largest start time of a request that has begun to run.
    now: u64,
    /// The clocks that are ahead of `now` or have queued requests, and possibly some idle clocks.
    clocks: BTreeMap<u128, TenantClock>,
    /// The number of clocks at which idle clocks are removed next.
    clocks_max: usize,
}

/// The virtual clock of a tenant.
#[derive(Clone, Copy, Debug)]
struct TenantClock {
    time: u64,
    /// Number of requests that have arrived and have neither begun to run nor ended.
    num_queued: u32,
    /// The start time of the latest request that arrived. A refund can set the clock back to an earlier time.
    last_start: u64,
}

impl TenantClock {
    fn at(time: u64) -> Self {
        Self { time, num_queued: 0, last_start: time }
    }
}

impl FairQueue {
    /// Returns the virtual start time of an arriving request, and charges its tenant for the prompt.
    pub(crate) fn arrive(&mut self, tenant: u128, prompt_tokens: u32) -> u64 {
        self.remove_idle();
        let clock = self.clocks.entry(tenant).or_insert(TenantClock::at(self.now));
        let time = self.now.max(clock.time);
        clock.time = time.saturating_add(u64::from(prompt_tokens));
        // No request overtakes an earlier one of its tenant, even if the clock was set back in the meantime.
        let start = if clock.num_queued > 0 { time.max(clock.last_start) } else { time };
        clock.last_start = start;
        clock.num_queued += 1;
        start
    }

    /// Records that a request with this virtual start time has begun to run. Each request begins at most once.
    pub(crate) fn begin(&mut self, tenant: u128, start: u64) {
        self.dequeue(tenant);
        self.now = self.now.max(start);
    }

    /// Refunds the prompt of a request that ends before it has begun to run.
    pub(crate) fn refund(&mut self, tenant: u128, prompt_tokens: u32) {
        let clock = self.dequeue(tenant);
        clock.time = clock.time.saturating_sub(u64::from(prompt_tokens));
    }

    /// Charges a tenant for the tokens that one of its requests has generated.
    pub(crate) fn charge_generated(&mut self, tenant: u128, tokens: u32) {
        let clock = self.clocks.entry(tenant).or_insert(TenantClock::at(self.now));
        clock.time = self.now.max(clock.time).saturating_add(GENERATED_TOKEN_WEIGHT * u64::from(tokens));
    }

    /// Panics unless `tenants` has the tenant of each queued request, once for each request.
    pub(crate) fn check_invariants(&self, tenants: impl Iterator<Item = u128>) {
        let mut queued: BTreeMap<u128, u32> = BTreeMap::new();
        for tenant in tenants {
            *queued.entry(tenant).or_default() += 1;
        }
        let counted = self.clocks.iter().map(|(&tenant, clock)| (tenant, clock.num_queued));
        assert!(
            counted.filter(|&(_, num_queued)| num_queued > 0).eq(queued),
            "invariant: the queued requests of a tenant are counted"
        );
    }

    /// Counts a request as no longer queued. Returns the clock of its tenant.
    fn dequeue(&mut self, tenant: u128) -> &mut TenantClock {
        let clock =
            self.clocks.get_mut(&tenant).expect("invariant: a tenant with a queued request has a clock");
        clock.num_queued -= 1;
        clock
    }

    /// If the number of clocks has doubled since the last removal, removes the clocks that are not ahead of `now` and
    /// have no queued requests.
    fn remove_idle(&mut self) {
        if self.clocks.len() < self.clocks_max.max(IDLE_CLOCKS_MAX) {
            return;
        }
        let now = self.now;
        self.clocks.retain(|_, clock| clock.time > now || clock.num_queued > 0);
        self.clocks_max = 2 * self.clocks.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_one_tenant_keep_their_order() {
        let mut queue = FairQueue::default();
        let starts: Vec<u64> = [5, 1, 900, 3].map(|tokens| queue.arrive(7, tokens)).to_vec();
        assert!(starts.is_sorted(), "{starts:?}");
        queue.begin(7, starts[3]);
        queue.charge_generated(7, 100);
        assert!(queue.arrive(7, 1) >= starts[3]);
    }

    #[test]
    fn a_refund_does_not_let_later_requests_overtake_earlier_ones() {
        let mut queue = FairQueue::default();
        let _first = queue.arrive(7, 1000);
        let second = queue.arrive(7, 10);
        queue.refund(7, 1000);
        let third = queue.arrive(7, 10);
        assert!(third >= second, "{third} < {second}");
        // Without queued requests, nothing can be overtaken, so the refunds apply in full.
        queue.refund(7, 10);
        queue.refund(7, 10);
        assert_eq!(queue.arrive(7, 10), queue.arrive(8, 10));
    }

    #[test]
    fn a_tenant_that_arrives_late_goes_before_the_backlog_of_another() {
        let mut queue = FairQueue::default();
        let backlog: Vec<u64> = (0..10).map(|_| queue.arrive(1, 1000)).collect();
        queue.begin(1, backlog[0]);
        queue.begin(1, backlog[1]);
        let late = queue.arrive(2, 10);
        assert_eq!(late, backlog[1], "an idle tenant gets no credit");
        let next = queue.arrive(2, 10);
        assert!(next < backlog[2], "{next} < {}", backlog[2]);
    }

    #[test]
    fn generated_tokens_are_charged() {
        let mut queue = FairQueue::default();
        let [one, other] = [1, 2].map(|tenant| queue.arrive(tenant, 10));
        assert_eq!(one, other);
        queue.charge_generated(1, 50);
        assert!(queue.arrive(1, 10) > queue.arrive(2, 10));
    }

    #[test]
    fn requests_that_never_run_cost_nothing() {
        let mut queue = FairQueue::default();
        for _ in 0..60 {
            queue.arrive(1, 30_000);
            queue.refund(1, 30_000);
        }
        // Clients that wait at the same time may disconnect in the order of their requests.
        for _ in 0..60 {
            queue.arrive(1, 30_000);
        }
        for _ in 0..60 {
            queue.refund(1, 30_000);
        }
        assert_eq!(queue.arrive(1, 10), queue.arrive(2, 10));
    }

    #[test]
    fn clocks_of_idle_tenants_are_removed() {
        let mut queue = FairQueue::default();
        for tenant in 0..100_000 {
            let start = queue.arrive(tenant, 10);
            queue.begin(tenant, start + 10);
        }
        assert!(queue.clocks.len() <= IDLE_CLOCKS_MAX, "{}", queue.clocks.len());
    }
}

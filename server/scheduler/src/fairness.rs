//! The order in which the requests of several tenants are served: start-time fair queueing (Goyal, Vin and Cheng, 1996), with
//! the weights of the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", 2024).
//!
//! Each tenant has a virtual clock that advances by the tokens it uses. A request is ordered by its tenant's clock at the
//! time it arrives, so a tenant with many or long requests does not delay those of another tenant. The requests of a
//! single tenant are served in the order in which they arrive.

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
    /// The clocks that are ahead of `now`, and some that no longer are.
    clocks: BTreeMap<u128, u64>,
    /// The number of clocks at which idle clocks are removed next.
    clocks_max: usize,
}

impl FairQueue {
    /// Returns the virtual start time of an arriving request, and charges its tenant for the prompt.
    pub(crate) fn arrive(&mut self, tenant: u128, prompt_tokens: u32) -> u64 {
        self.remove_idle();
        let clock = self.clocks.entry(tenant).or_insert(self.now);
        let start = self.now.max(*clock);
        *clock = start.saturating_add(u64::from(prompt_tokens));
        start
    }

    /// Records that a request with this virtual start time has begun to run.
    pub(crate) fn begin(&mut self, start: u64) {
        self.now = self.now.max(start);
    }

    /// Refunds the prompt of a request that ends before it has begun to run.
    pub(crate) fn refund(&mut self, tenant: u128, prompt_tokens: u32) {
        if let Some(clock) = self.clocks.get_mut(&tenant) {
            *clock = clock.saturating_sub(u64::from(prompt_tokens));
        }
    }

    /// Charges a tenant for the tokens that one of its requests has generated.
    pub(crate) fn charge_generated(&mut self, tenant: u128, tokens: u32) {
        let clock = self.clocks.entry(tenant).or_insert(self.now);
        *clock = self.now.max(*clock).saturating_add(GENERATED_TOKEN_WEIGHT * u64::from(tokens));
    }

    /// Removes the clocks that are not ahead of `now` when the number of clocks has doubled.
    fn remove_idle(&mut self) {
        if self.clocks.len() < self.clocks_max.max(IDLE_CLOCKS_MAX) {
            return;
        }
        let now = self.now;
        self.clocks.retain(|_, clock| *clock > now);
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
        queue.begin(starts[3]);
        queue.charge_generated(7, 100);
        assert!(queue.arrive(7, 1) >= starts[3]);
    }

    #[test]
    fn a_tenant_that_arrives_late_goes_before_the_backlog_of_another() {
        let mut queue = FairQueue::default();
        let backlog: Vec<u64> = (0..10).map(|_| queue.arrive(1, 1000)).collect();
        queue.begin(backlog[0]);
        queue.begin(backlog[1]);
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
        assert_eq!(queue.arrive(1, 10), queue.arrive(2, 10));
    }

    #[test]
    fn clocks_of_idle_tenants_are_removed() {
        let mut queue = FairQueue::default();
        for tenant in 0..100_000 {
            let start = queue.arrive(tenant, 10);
            queue.begin(start + 10);
        }
        assert!(queue.clocks.len() <= IDLE_CLOCKS_MAX, "{}", queue.clocks.len());
    }
}

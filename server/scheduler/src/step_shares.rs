//! How tenants share the time of steps.
//!
//! A step serves the sequences of all tenants, so one tenant's long prompts or many sequences make every step longer for
//! everybody. Each tenant is charged for the time that its sequences take, and a tenant that has used more time than another
//! one with work to do pauses until the other has caught up. Tenants that use little therefore keep short steps, and a tenant
//! that is alone has the whole machine.

use std::collections::BTreeMap;

/// How far a tenant may be ahead of another one with work to do, in times of a step without any token. Tenants with almost
/// equal work seldom pause, because each pause makes steps less efficient.
pub(crate) const LEAD_STEPS_MAX: f64 = 4.0;

/// Number of steps after which a tenant without sequences no longer counts as present.
const PRESENCE_STEPS: u64 = 256;

/// The time that each tenant has used.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepShares {
    tenants: BTreeMap<u128, Usage>,
    /// The time of the tenant with work that has used the least, in the latest step. New tenants start from it.
    floor: f64,
    /// Number of steps so far.
    steps: u64,
}

#[derive(Clone, Copy, Debug)]
struct Usage {
    /// Seconds of step time, plus those that the tenant gave up because it had no work.
    seconds: f64,
    /// Sequences that wait or run.
    sequences: u32,
    /// The latest step at which it had a sequence.
    last_step: u64,
    is_paused: bool,
}

impl StepShares {
    /// Learns of a sequence that waits or runs from now on.
    pub(crate) fn add_sequence(&mut self, tenant: u128) {
        let least = self.least_seconds().unwrap_or(self.floor);
        let steps = self.steps;
        let usage = self.tenants.entry(tenant).or_insert(Usage {
            seconds: 0.0,
            sequences: 0,
            last_step: steps,
            is_paused: false,
        });
        if usage.sequences == 0 {
            // Idle time is no credit, and time used before remains charged.
            usage.seconds = usage.seconds.max(least);
        }
        usage.sequences += 1;
    }

    /// Learns that a sequence has ended.
    pub(crate) fn remove_sequence(&mut self, tenant: u128) {
        if let Some(usage) = self.tenants.get_mut(&tenant) {
            usage.sequences -= 1;
            usage.last_step = self.steps;
        }
    }

    /// Decides who pauses in the next step. `step_seconds` is the time of a step without any token, if it is known: nobody
    /// pauses before.
    pub(crate) fn begin_step(&mut self, step_seconds: Option<f64>) {
        self.steps += 1;
        let oldest = self.steps.saturating_sub(PRESENCE_STEPS);
        self.tenants.retain(|_, usage| usage.sequences > 0 || usage.last_step >= oldest);
        let Some(least) = self.least_seconds() else { return };
        self.floor = least;
        let lead_max = step_seconds.map_or(f64::INFINITY, |seconds| LEAD_STEPS_MAX * seconds);
        for usage in self.tenants.values_mut() {
            usage.is_paused = usage.seconds - least > lead_max;
        }
    }

    /// Whether more than one tenant has sequences, or had some until a short time ago.
    pub(crate) fn is_shared(&self) -> bool {
        self.tenants.len() > 1
    }

    /// Whether the sequences of this tenant take no part in the step.
    pub(crate) fn is_paused(&self, tenant: u128) -> bool {
        self.tenants.get(&tenant).is_some_and(|usage| usage.is_paused)
    }

    /// Lets everybody take part in the step, because those who should have nothing to compute. Returns whether that makes a
    /// difference.
    pub(crate) fn resume_all(&mut self) -> bool {
        let mut any = false;
        for usage in self.tenants.values_mut() {
            any |= std::mem::take(&mut usage.is_paused) && usage.sequences > 0;
        }
        any
    }

    /// Charges the tenants that took part in a step of `seconds`, in proportion to the estimated cost of each one's work.
    /// `had_room` tells whether the step had room for more work.
    pub(crate) fn end_step(
        &mut self,
        seconds: f64,
        had_room: bool,
        costs: &(impl Iterator<Item = (u128, f64)> + Clone),
    ) {
        let total: f64 = costs.clone().map(|(_, cost)| cost).sum();
        let mut least = f64::INFINITY;
        for (tenant, cost) in costs.clone() {
            let fraction = if total > 0.0 { cost / total } else { 1.0 / costs.clone().count() as f64 };
            if let Some(usage) = self.tenants.get_mut(&tenant) {
                usage.seconds += seconds * fraction;
                least = least.min(usage.seconds);
            }
        }
        if !had_room {
            return;
        }
        // A tenant that could have taken part and had nothing to compute, as it waits for memory, gets no credit for that.
        for (tenant, usage) in &mut self.tenants {
            let took_part = costs.clone().any(|(other, _)| other == *tenant);
            if !took_part && !usage.is_paused && least.is_finite() {
                usage.seconds = usage.seconds.max(least);
            }
        }
    }

    /// The time of the tenant that has used the least, of those with sequences.
    fn least_seconds(&self) -> Option<f64> {
        let busy = self.tenants.values().filter(|usage| usage.sequences > 0);
        busy.map(|usage| usage.seconds).min_by(f64::total_cmp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: f64 = 0.01;

    /// Runs steps in which each tenant that does not pause does work of so many seconds, and returns in how many each took
    /// part.
    fn run(shares: &mut StepShares, work: &[(u128, f64)], steps: usize) -> Vec<usize> {
        let mut counts = vec![0; work.len()];
        for _ in 0..steps {
            shares.begin_step(Some(STEP));
            let mut costs = Vec::new();
            for (index, &(tenant, cost)) in work.iter().enumerate() {
                if !shares.is_paused(tenant) {
                    counts[index] += 1;
                    costs.push((tenant, cost));
                }
            }
            assert!(!costs.is_empty(), "somebody takes part in every step");
            let overhead = STEP / costs.len() as f64;
            costs.iter_mut().for_each(|(_, cost)| *cost += overhead);
            let seconds = costs.iter().map(|(_, cost)| cost).sum();
            shares.end_step(seconds, true, &costs.into_iter());
        }
        counts
    }

    #[test]
    fn a_single_tenant_never_pauses() {
        let mut shares = StepShares::default();
        shares.add_sequence(1);
        assert_eq!(run(&mut shares, &[(1, 0.5)], 100), [100]);
        assert!(!shares.is_shared());
    }

    #[test]
    fn tenants_with_equal_work_run_together() {
        let mut shares = StepShares::default();
        shares.add_sequence(1);
        shares.add_sequence(2);
        let counts = run(&mut shares, &[(1, 0.001), (2, 0.0012)], 1000);
        assert!(counts.iter().all(|&count| count > 950), "{counts:?}");
    }

    #[test]
    fn a_tenant_with_much_work_gets_half_of_the_time_and_not_half_of_the_steps() {
        let mut shares = StepShares::default();
        shares.add_sequence(1);
        shares.add_sequence(2);
        let counts = run(&mut shares, &[(1, 0.1), (2, 0.001)], 1000);
        assert_eq!(counts[1], 1000, "the small one never pauses");
        assert!((70..140).contains(&counts[0]), "{counts:?}");
    }

    #[test]
    fn idle_time_is_no_credit_and_leaving_no_escape() {
        let mut shares = StepShares::default();
        shares.add_sequence(1);
        run(&mut shares, &[(1, 0.1)], 100);
        shares.add_sequence(2);
        let counts = run(&mut shares, &[(1, 0.001), (2, 0.001)], 100);
        assert!(counts[0] > 90, "the tenant that was alone does not pay for it: {counts:?}");
        run(&mut shares, &[(1, 0.5), (2, 0.001)], 1);
        shares.begin_step(Some(STEP));
        assert!(shares.is_paused(1));
        shares.remove_sequence(1);
        shares.add_sequence(1);
        shares.begin_step(Some(STEP));
        assert!(shares.is_paused(1), "a new request does not end the pause");
    }

    #[test]
    fn a_tenant_that_arrives_while_nobody_has_work_does_not_make_the_others_pause() {
        let mut shares = StepShares::default();
        shares.add_sequence(1);
        run(&mut shares, &[(1, 0.1)], 100);
        shares.remove_sequence(1);
        shares.add_sequence(2);
        shares.add_sequence(1);
        let counts = run(&mut shares, &[(1, 0.001), (2, 0.1)], 100);
        assert!(counts[0] > 98, "{counts:?}");
    }

    #[test]
    fn a_tenant_that_cannot_run_gets_no_credit() {
        let mut shares = StepShares::default();
        shares.add_sequence(1);
        shares.add_sequence(2);
        for _ in 0..100 {
            shares.begin_step(Some(STEP));
            assert!(!shares.is_paused(1));
            shares.end_step(0.1, true, &[(1, 0.1)].into_iter());
        }
        shares.end_step(0.1, false, &[(1, 0.1)].into_iter());
        shares.begin_step(Some(STEP));
        assert!(shares.is_paused(1), "the other one had no room");
    }

    #[test]
    fn absent_tenants_are_forgotten() {
        let mut shares = StepShares::default();
        for tenant in 0..10_000 {
            shares.add_sequence(tenant);
            run(&mut shares, &[(tenant, 0.001)], 1);
            shares.remove_sequence(tenant);
        }
        assert!(shares.tenants.len() <= PRESENCE_STEPS as usize + 1, "{}", shares.tenants.len());
    }
}

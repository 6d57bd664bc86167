//! Divides the time of steps among tenants.
//!
//! A step serves the sequences of all tenants, so one tenant's long prompts or many sequences make every step longer
//! for all tenants. Each tenant is charged for the time that its sequences take. A tenant pauses while the time that it
//! has used exceeds that of another tenant with sequences by more than a limit. Tenants that use little time therefore
//! get short steps, and a tenant that is alone can use the whole machine.
//!
//! A pause cannot shorten a step that has begun. Therefore, while other tenants are present, a tenant with many
//! generating sequences may decode only some of them in a step, and the others in the following steps.

use std::collections::BTreeMap;

use crate::sequence::Priority;
use crate::step_time::StepWork;

/// A tenant pauses if it has used more time than another tenant with sequences and the difference exceeds this multiple
/// of the time of a step without any token. With this value, tenants with almost equal work seldom pause, which matters
/// because each pause makes steps less efficient.
pub(crate) const LEAD_STEPS_MAX: f64 = 4.0;

/// Number of steps after which a tenant without sequences no longer counts as present.
const PRESENCE_STEPS: u64 = 256;

/// The time that each tenant has used.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepShares {
    tenants: BTreeMap<u128, Usage>,
    /// The least time that any tenant with sequences had used, at the beginning of the latest step in which there was
    /// such a tenant. A tenant that arrives while no tenant has sequences starts with at least this time.
    floor: f64,
    /// Number of steps so far.
    steps: u64,
}

#[derive(Clone, Copy, Debug)]
struct Usage {
    /// Seconds of step time that the tenant has used, plus those that it has forgone because it had nothing to compute.
    seconds: f64,
    /// Number of sequences that wait or run.
    sequences: u32,
    /// The number of steps when a sequence of the tenant last ended or, if none has ended, when the tenant arrived.
    last_step: u64,
    is_paused: bool,
    /// The work of the tenant's sequences in the latest step.
    work: StepWork,
    /// The first sequence that generates a token in this step, if the tenant's previous step had no time for it.
    first_decode: Option<Priority>,
    /// The first sequence for which this step has no time.
    next_decode: Option<Priority>,
}

impl Usage {
    fn defers(&self, sequence: Priority) -> bool {
        self.first_decode.is_some_and(|first| sequence < first)
            || self.next_decode.is_some_and(|next| sequence >= next)
    }
}

impl StepShares {
    /// Records a new sequence of a tenant.
    pub(crate) fn add_sequence(&mut self, tenant: u128) {
        let least = self.least_seconds().unwrap_or(self.floor);
        let steps = self.steps;
        let usage = self.tenants.entry(tenant).or_insert(Usage {
            seconds: 0.0,
            sequences: 0,
            last_step: steps,
            is_paused: false,
            work: StepWork::default(),
            first_decode: None,
            next_decode: None,
        });
        if usage.sequences == 0 {
            // Idle time earns no credit, and the time that the tenant has already used remains charged.
            usage.seconds = usage.seconds.max(least);
        }
        usage.sequences += 1;
    }

    /// Records that a sequence has ended.
    pub(crate) fn remove_sequence(&mut self, tenant: u128) {
        if let Some(usage) = self.tenants.get_mut(&tenant) {
            usage.sequences -= 1;
            usage.last_step = self.steps;
        }
    }

    /// Decides which tenants pause in the next step. `step_seconds` is the time of a step without any token. Until it
    /// is known, no tenant pauses.
    pub(crate) fn begin_step(&mut self, step_seconds: Option<f64>) {
        self.steps += 1;
        let oldest = self.steps.saturating_sub(PRESENCE_STEPS);
        self.tenants.retain(|_, usage| usage.sequences > 0 || usage.last_step >= oldest);
        for usage in self.tenants.values_mut() {
            usage.work = StepWork::default();
            if !usage.is_paused {
                usage.first_decode = usage.next_decode.take();
            }
        }
        let Some(least) = self.least_seconds() else { return };
        self.floor = least;
        let lead_max = step_seconds.map_or(f64::INFINITY, |seconds| LEAD_STEPS_MAX * seconds);
        for usage in self.tenants.values_mut() {
            usage.is_paused = usage.seconds - least > lead_max;
        }
    }

    /// Whether more than one tenant has sequences or had some recently.
    pub(crate) fn is_shared(&self) -> bool {
        self.tenants.len() > 1
    }

    /// Whether this tenant is paused, so that its sequences take no part in the step.
    pub(crate) fn is_paused(&self, tenant: u128) -> bool {
        self.tenants.get(&tenant).is_some_and(|usage| usage.is_paused)
    }

    /// Ends all pauses for this step, and the deferral of sequences that have had their turn. The scheduler calls this
    /// function if no other tenant has anything to compute. Returns whether a tenant with sequences was paused or had
    /// deferred decodes.
    pub(crate) fn resume_all(&mut self) -> bool {
        let mut any = false;
        for usage in self.tenants.values_mut() {
            let was_paused = std::mem::take(&mut usage.is_paused);
            let began_late = usage.first_decode.take().is_some();
            any |= (was_paused || began_late) && usage.sequences > 0;
        }
        any
    }

    /// Whether a sequence generates no token in this step although its tenant does not pause: the sequence had its turn
    /// in the previous step, or the `cost` of the tenant's earlier sequences has reached the lead that a tenant may
    /// have. The caller must pass the sequences in the order of their priority.
    pub(crate) fn defer_decode(
        &mut self,
        tenant: u128,
        sequence: Priority,
        step_seconds: Option<f64>,
        cost: impl Fn(StepWork) -> f64,
    ) -> bool {
        let is_shared = self.is_shared();
        let Some(usage) = self.tenants.get_mut(&tenant) else { return false };
        if !usage.defers(sequence)
            && is_shared
            && usage.work.tokens > 0
            && step_seconds.is_some_and(|seconds| cost(usage.work) >= LEAD_STEPS_MAX * seconds)
        {
            usage.next_decode = Some(sequence);
        }
        usage.defers(sequence)
    }

    /// Whether this sequence generates no token in this step, according to the calls of [`Self::defer_decode`] so far.
    pub(crate) fn is_decode_deferred(&self, tenant: u128, sequence: Priority) -> bool {
        self.tenants.get(&tenant).is_some_and(|usage| usage.defers(sequence))
    }

    /// Records the work of a tenant's sequence in this step: `tokens` tokens that follow `computed_tokens` computed
    /// ones.
    pub(crate) fn add_work(&mut self, tenant: u128, tokens: u32, computed_tokens: u32) {
        if let Some(usage) = self.tenants.get_mut(&tenant) {
            usage.work.add(tokens, computed_tokens);
        }
    }

    /// Charges the duration of a step, `seconds`, to the tenants that took part in it, in proportion to the estimated
    /// cost of each tenant's work. The `overhead` of the step is divided equally among them. `had_room` is true if the
    /// step had room for more work.
    pub(crate) fn end_step(
        &mut self,
        seconds: f64,
        had_room: bool,
        overhead: f64,
        cost: impl Fn(StepWork) -> f64,
    ) {
        let took_part = |usage: &Usage| usage.work.tokens > 0;
        let participants = self.tenants.values().filter(|usage| took_part(usage)).count() as f64;
        let cost = |usage: &Usage| overhead / participants + cost(usage.work);
        let total: f64 = self.tenants.values().filter(|usage| took_part(usage)).map(cost).sum();
        let mut least = f64::INFINITY;
        for usage in self.tenants.values_mut().filter(|usage| took_part(usage)) {
            let fraction = if total > 0.0 { cost(usage) / total } else { 1.0 / participants };
            usage.seconds += seconds * fraction;
            least = least.min(usage.seconds);
        }
        if !had_room || participants == 0.0 {
            return;
        }
        // A tenant that could have taken part but had nothing to compute, for example because it waits for memory, gets
        // no credit.
        for usage in self.tenants.values_mut().filter(|usage| !took_part(usage) && !usage.is_paused) {
            usage.seconds = usage.seconds.max(least);
        }
    }

    /// The least time that a tenant with sequences has used.
    fn least_seconds(&self) -> Option<f64> {
        let busy = self.tenants.values().filter(|usage| usage.sequences > 0);
        busy.map(|usage| usage.seconds).min_by(f64::total_cmp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The time of a step without any token, in seconds. Each token adds 0.1 ms.
    const STEP: f64 = 0.01;

    fn cost(work: StepWork) -> f64 {
        f64::from(work.tokens) * 1e-4
    }

    /// Runs steps in which each tenant that does not pause computes the number of tokens that `tenants` specifies.
    /// Returns the number of steps in which each tenant took part.
    fn run(shares: &mut StepShares, tenants: &[(u128, u32)], steps: usize) -> Vec<usize> {
        let mut counts = vec![0; tenants.len()];
        for _ in 0..steps {
            shares.begin_step(Some(STEP));
            let mut seconds = 0.0;
            for (count, &(tenant, tokens)) in counts.iter_mut().zip(tenants) {
                if !shares.is_paused(tenant) {
                    *count += 1;
                    shares.add_work(tenant, tokens, 0);
                    seconds += f64::from(tokens) * 1e-4;
                }
            }
            assert!(seconds > 0.0, "every step has a participant");
            shares.end_step(STEP + seconds, true, STEP, cost);
        }
        counts
    }

    #[test]
    fn a_single_tenant_never_pauses() {
        let mut shares = StepShares::default();
        shares.add_sequence(1);
        assert_eq!(run(&mut shares, &[(1, 5000)], 100), [100]);
        assert!(!shares.is_shared());
    }

    #[test]
    fn tenants_with_equal_work_run_together() {
        let mut shares = StepShares::default();
        shares.add_sequence(1);
        shares.add_sequence(2);
        let counts = run(&mut shares, &[(1, 10), (2, 12)], 1000);
        assert!(counts.iter().all(|&count| count > 950), "{counts:?}");
    }

    #[test]
    fn a_tenant_with_much_work_gets_half_of_the_time_and_not_half_of_the_steps() {
        let mut shares = StepShares::default();
        shares.add_sequence(1);
        shares.add_sequence(2);
        let counts = run(&mut shares, &[(1, 1000), (2, 10)], 1000);
        assert_eq!(counts[1], 1000, "the tenant with little work never pauses");
        assert!((70..140).contains(&counts[0]), "{counts:?}");
    }

    #[test]
    fn the_sequences_of_a_tenant_take_turns_while_there_are_other_tenants() {
        let mut shares = StepShares::default();
        let step = |shares: &mut StepShares| {
            shares.begin_step(Some(STEP));
            let mut generating = Vec::new();
            for index in 0..10 {
                let sequence = Priority { start: 0, arrival: 0, index };
                if !shares.defer_decode(1, sequence, Some(STEP), cost) {
                    shares.add_work(1, 100, 0);
                    generating.push(index);
                }
                assert_eq!(shares.is_decode_deferred(1, sequence), !generating.contains(&index));
            }
            generating
        };
        shares.add_sequence(1);
        assert_eq!(step(&mut shares), Vec::from_iter(0..10), "the tenant is alone");
        shares.add_sequence(2);
        for expected in [0..4, 4..8, 8..10, 0..4] {
            assert_eq!(step(&mut shares), Vec::from_iter(expected));
        }
        shares.begin_step(Some(STEP));
        assert!(
            shares.resume_all(),
            "the first sequences wait for the next step unless no other sequence uses this step"
        );
        assert!(!shares.is_decode_deferred(1, Priority { start: 0, arrival: 0, index: 0 }));
    }

    #[test]
    fn idle_time_earns_no_credit_and_leaving_does_not_end_a_pause() {
        let mut shares = StepShares::default();
        shares.add_sequence(1);
        run(&mut shares, &[(1, 1000)], 100);
        shares.add_sequence(2);
        let counts = run(&mut shares, &[(1, 10), (2, 10)], 100);
        assert!(counts[0] > 90, "the tenant does not pay for the time when it was alone: {counts:?}");
        run(&mut shares, &[(1, 5000), (2, 10)], 1);
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
        run(&mut shares, &[(1, 1000)], 100);
        shares.remove_sequence(1);
        shares.add_sequence(2);
        shares.add_sequence(1);
        let counts = run(&mut shares, &[(1, 10), (2, 1000)], 100);
        assert!(counts[0] > 98, "{counts:?}");
    }

    #[test]
    fn a_tenant_that_cannot_run_gets_no_credit() {
        let mut shares = StepShares::default();
        shares.add_sequence(1);
        shares.add_sequence(2);
        let mut step = |had_room| {
            shares.begin_step(Some(STEP));
            let is_paused = shares.is_paused(1);
            shares.add_work(1, 1000, 0);
            shares.end_step(0.11, had_room, STEP, cost);
            is_paused
        };
        assert!((0..100).all(|_| !step(true)));
        step(false);
        assert!(step(true), "the other tenant keeps its credit if the previous step had no room for it");
    }

    #[test]
    fn absent_tenants_are_forgotten() {
        let mut shares = StepShares::default();
        for tenant in 0..10_000 {
            shares.add_sequence(tenant);
            run(&mut shares, &[(tenant, 10)], 1);
            shares.remove_sequence(tenant);
        }
        assert!(shares.tenants.len() <= PRESENCE_STEPS as usize + 1, "{}", shares.tenants.len());
    }
}

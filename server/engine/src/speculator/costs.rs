//! The measured costs of steps with and without drafts, and the time that drafts have saved recently.
//!
//! An accepted draft saves the cost of a sequence in a step that computes one token of each sequence. The cost of a
//! draft is the time that it adds to a step, plus the time of the draft model if that model proposed it.

/// The measured costs, by the number of sequences in a step: see [`bucket`].
#[derive(Debug)]
pub(super) struct CostModel {
    by_sequences: [MeasuredCosts; BUCKETS],
    /// Seconds per sequence in a run of the draft model that computes at most three tokens per sequence on average.
    runs: [Estimate; BUCKETS],
    /// Seconds per token that the draft model reads without proposing a draft after it.
    reading: Estimate,
    net_savings: NetSavings,
}

#[derive(Clone, Copy, Debug, Default)]
struct MeasuredCosts {
    /// Seconds per sequence in a step without drafts.
    sequence: Estimate,
    /// Seconds that a draft adds to a step, without the time of the draft model.
    draft: Estimate,
    /// Number of steps with drafts since the last step without drafts. Steps that compute prompts are not counted.
    steps_with_drafts: u32,
}

/// The costs of sequences and drafts in a step with a given number of sequences.
#[derive(Clone, Copy, Debug)]
pub(super) struct MarginalCosts {
    /// Seconds per sequence. The value is 0 in a simulation without time, in which every draft is worth its cost.
    pub(super) sequence: f64,
    /// Seconds that a draft adds to a step, without the time of the draft model.
    pub(super) draft: f64,
}

/// The work of a step and its time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepMeasurement {
    pub(super) num_sequences: u32,
    pub(super) drafts: u32,
    pub(super) accepted: u32,
    /// Whether the step computed prompts as well.
    pub(super) has_prompts: bool,
    /// Seconds that the whole step took, including the time of the draft model.
    pub(super) step_seconds: f64,
    /// Seconds that the draft model took.
    pub(super) draft_seconds: f64,
}

/// Number of steps with drafts after which a step without drafts measures the cost of a sequence again.
const PLAIN_INTERVAL: u32 = 64;
/// Number of steps without drafts that are measured before the first step with drafts, because a single step might be
/// an outlier.
const PLAIN_STEPS_MIN: usize = 2;
/// The factor by which the probability of a draft must exceed the break-even probability, because measurements are not
/// exact.
const MARGIN: f64 = 1.15;
/// The assumed cost of a draft before it is measured, as a fraction of the cost of a sequence.
const INITIAL_DRAFT_COST: f64 = 0.4;
/// The weight of a new measurement in an average.
const WEIGHT: f64 = 0.2;

const EXACT_BUCKETS: usize = 16;
const BUCKETS: usize = EXACT_BUCKETS + 4 * 16;

/// The index of the costs of steps with this number of sequences. Each number up to [`EXACT_BUCKETS`] has its own
/// bucket, and larger numbers have four buckets per power of two.
fn bucket(num_sequences: u32) -> usize {
    let num_sequences = num_sequences.max(1) as usize;
    if num_sequences <= EXACT_BUCKETS {
        return num_sequences - 1;
    }
    let octaves = (num_sequences as f64 / EXACT_BUCKETS as f64).log2();
    (EXACT_BUCKETS + (octaves * 4.0) as usize).min(BUCKETS - 1)
}

/// An average of the medians of the last three values, so that a single slow step hardly changes it.
#[derive(Clone, Copy, Debug, Default)]
struct Estimate {
    recent: [f64; 3],
    seen: usize,
    average: f64,
}

impl Estimate {
    fn add(&mut self, value: f64) {
        self.recent[self.seen % self.recent.len()] = value;
        self.seen += 1;
        let mut sorted = self.recent;
        let sorted = &mut sorted[..self.seen.min(self.recent.len())];
        sorted.sort_unstable_by(f64::total_cmp);
        // Of two values, the smaller one is used as the median, because outliers are slow steps.
        let median = sorted[(sorted.len() - 1) / 2];
        if self.seen <= self.recent.len() {
            self.average = median;
        } else {
            self.average += WEIGHT * (median - self.average);
        }
    }

    fn get(&self) -> Option<f64> {
        (self.seen > 0).then_some(self.average)
    }
}

/// The time that drafts have saved minus their costs, and the time of all steps. Both decay exponentially.
#[derive(Debug, Default)]
struct NetSavings {
    saved: f64,
    time: f64,
}

/// The maximum net time that drafts may lose, as a fraction of the time of all steps.
const LOSS_MAX: f64 = 0.03;
/// The time constant of the decay, in steps.
const WINDOW: f64 = 1024.0;
/// The number of steps without loss that are assumed at the start.
const CREDIT: f64 = 100.0;

impl NetSavings {
    fn add(&mut self, time: f64, saved: f64) {
        if self.time == 0.0 {
            self.time = CREDIT * time;
        }
        self.time += time - self.time / WINDOW;
        self.saved += saved - self.saved / WINDOW;
    }

    fn allows_drafts(&self) -> bool {
        self.saved >= -LOSS_MAX * self.time
    }
}

impl Default for CostModel {
    fn default() -> Self {
        Self {
            by_sequences: [MeasuredCosts::default(); BUCKETS],
            runs: [Estimate::default(); BUCKETS],
            reading: Estimate::default(),
            net_savings: NetSavings::default(),
        }
    }
}

impl CostModel {
    pub(super) fn record_step(&mut self, step: StepMeasurement) {
        let StepMeasurement { num_sequences, drafts, accepted, has_prompts, step_seconds, draft_seconds } =
            step;
        let cost = &mut self.by_sequences[bucket(num_sequences)];
        let (sequence, draft) = (cost.sequence.get(), cost.draft.get());
        let mut measured = None;
        if !has_prompts {
            let time = step_seconds - draft_seconds;
            if drafts == 0 {
                cost.sequence.add(time / f64::from(num_sequences));
                cost.steps_with_drafts = 0;
            } else if let Some(sequence) = sequence {
                let draft_cost = time - sequence * f64::from(num_sequences);
                measured = Some(draft_cost);
                cost.draft.add(draft_cost.max(0.0) / f64::from(drafts));
                cost.steps_with_drafts += 1;
            }
        }
        let sequence = sequence.unwrap_or(0.0);
        let saved = match (drafts, measured) {
            (0, _) => -draft_seconds,
            (_, Some(measured)) => sequence * f64::from(accepted) - measured - draft_seconds,
            // The time that the step would have taken without drafts is unknown, so estimate the cost of its drafts.
            (_, None) => {
                let draft = draft.unwrap_or(INITIAL_DRAFT_COST * sequence);
                sequence * f64::from(accepted) - draft * f64::from(drafts) - draft_seconds
            }
        };
        self.net_savings.add(step_seconds, saved);
    }

    /// Records a run of the draft model.
    pub(super) fn record_run(&mut self, num_sequences: u32, tokens: u32, seconds: f64) {
        let run = &mut self.runs[bucket(num_sequences)];
        // If all drafts were accepted, the next run reads the last draft and the token after it. Computing these tokens
        // counts as drafting, not as reading.
        if tokens <= 3 * num_sequences {
            run.add(seconds / f64::from(num_sequences));
        } else {
            let drafting = run.get().unwrap_or(0.0) * f64::from(num_sequences);
            self.reading.add((seconds - drafting).max(0.0) / f64::from(tokens - num_sequences));
        }
    }

    /// The costs in a step with this number of sequences. `None` if the next step should have no drafts, because the
    /// cost of a sequence must be measured or because drafts have lost too much time recently.
    pub(super) fn marginal_costs(&self, num_sequences: u32) -> Option<MarginalCosts> {
        let MeasuredCosts { sequence: measured, draft, steps_with_drafts } =
            self.by_sequences[bucket(num_sequences)];
        let sequence = measured.get().filter(|_| measured.seen >= PLAIN_STEPS_MIN)?;
        let is_plain_due = steps_with_drafts >= PLAIN_INTERVAL && sequence > 0.0;
        let draft = draft.get().unwrap_or(INITIAL_DRAFT_COST * sequence);
        (!is_plain_due && self.net_savings.allows_drafts()).then_some(MarginalCosts { sequence, draft })
    }

    /// Seconds per sequence in a run of the draft model. An unknown cost is 0, so that the model is used and its cost
    /// is measured.
    pub(super) fn run(&self, num_sequences: u32) -> f64 {
        self.runs[bucket(num_sequences)].get().unwrap_or(0.0)
    }

    /// Whether the cost of reading has been measured.
    pub(super) fn has_reading_cost(&self) -> bool {
        self.reading.get().is_some()
    }

    /// Seconds per token that the draft model reads without proposing a draft after it, or 0 if the cost is not known.
    pub(super) fn reading(&self) -> f64 {
        self.reading.get().unwrap_or(0.0)
    }
}

impl MarginalCosts {
    /// The smallest probability at which a draft that takes `proposal_seconds` to propose is worth its cost.
    pub(super) fn threshold(&self, proposal_seconds: f64) -> f32 {
        if self.sequence > 0.0 {
            (MARGIN * (self.draft + proposal_seconds) / self.sequence) as f32
        } else {
            0.0
        }
    }

    /// The largest number of seconds per token that a sequence can save with up to `max_drafts` drafts per step. Each
    /// draft takes `proposal_seconds` to propose and, if all drafts before it are accepted, is accepted with the
    /// probability `acceptance`.
    pub(super) fn gain(&self, acceptance: f32, max_drafts: usize, proposal_seconds: f64) -> f64 {
        let (mut tokens, mut time, mut probability) = (1.0, self.sequence, 1.0);
        let mut best: f64 = 0.0;
        for _ in 0..max_drafts {
            probability *= f64::from(acceptance);
            tokens += probability;
            time += self.draft + proposal_seconds;
            best = best.max(self.sequence - time / tokens);
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(num_sequences: u32, drafts: u32, step_seconds: f64) -> StepMeasurement {
        StepMeasurement {
            num_sequences,
            drafts,
            accepted: drafts,
            step_seconds,
            ..StepMeasurement::default()
        }
    }

    fn threshold(costs: &CostModel, num_sequences: u32) -> Option<f32> {
        costs.marginal_costs(num_sequences).map(|marginal_costs| marginal_costs.threshold(0.0))
    }

    #[test]
    fn costs_are_measured_by_the_number_of_sequences() {
        let buckets: Vec<usize> = (1..2000).map(bucket).collect();
        assert!(buckets.is_sorted() && buckets[..16].iter().copied().eq(0..16) && buckets[16] == 16);
        assert_eq!((bucket(32), bucket(64), bucket(u32::MAX)), (20, 24, BUCKETS - 1));
    }

    #[test]
    fn a_draft_is_worth_its_cost_if_it_saves_more() {
        let close = |threshold: Option<f32>, cost: f64| {
            assert!((f64::from(threshold.unwrap()) - MARGIN * cost).abs() < 1e-6, "{threshold:?}");
        };
        let mut costs = CostModel::default();
        for _ in 0..PLAIN_STEPS_MIN {
            assert_eq!(threshold(&costs, 4), None, "too few steps have been measured");
            costs.record_step(step(4, 0, 0.040));
        }
        close(threshold(&costs, 4), INITIAL_DRAFT_COST);
        // Each of the six drafts costs half as much as a sequence.
        costs.record_step(step(4, 6, 0.070));
        close(threshold(&costs, 4), 0.5);
        close(costs.marginal_costs(4).map(|marginal_costs| marginal_costs.threshold(0.002)), 0.7);
        assert_eq!(threshold(&costs, 5), None);
        for _ in 0..PLAIN_INTERVAL {
            costs.record_step(step(4, 6, 0.070));
        }
        assert_eq!(threshold(&costs, 4), None, "a step without drafts is due");
        costs.record_step(step(4, 0, 0.040));
        assert!(threshold(&costs, 4).unwrap() < 1.0);
    }

    #[test]
    fn a_single_slow_step_changes_nothing() {
        let mut costs = CostModel::default();
        for seconds in [0.9, 0.010, 0.010, 0.010, 0.5, 0.010] {
            costs.record_step(step(1, 0, seconds));
        }
        assert!((costs.marginal_costs(1).unwrap().sequence - 0.010).abs() < 1e-9);
    }

    #[test]
    fn drafts_that_lose_time_stop_until_the_loss_is_small() {
        let mut costs = CostModel::default();
        (0..PLAIN_STEPS_MIN).for_each(|_| costs.record_step(step(1, 0, 0.010)));
        let (mut plain, mut lost) = (0, 0);
        for _ in 0..20_000 {
            if costs.marginal_costs(1).is_some() {
                // The run of the draft model takes as long as a step without drafts, and its draft is rejected.
                costs.record_step(StepMeasurement { accepted: 0, draft_seconds: 0.010, ..step(1, 1, 0.020) });
                lost += 1;
            } else {
                costs.record_step(step(1, 0, 0.010));
                plain += 1;
            }
        }
        assert!(
            lost > 100 && f64::from(lost) < 0.04 * f64::from(plain),
            "{lost} steps with drafts and {plain} without"
        );
    }

    #[test]
    fn predicts_the_gain_before_the_prompt_is_read() {
        let marginal_costs = MarginalCosts { sequence: 1.0, draft: 0.1 };
        assert_eq!(marginal_costs.gain(0.0, 5, 0.1), 0.0);
        assert_eq!(marginal_costs.gain(0.9, 0, 0.1), 0.0);
        // Two tokens take 1.2 seconds instead of 2 seconds.
        assert!((marginal_costs.gain(1.0, 1, 0.1) - 0.4).abs() < 1e-9);
        assert!(marginal_costs.gain(0.9, 5, 0.1) > marginal_costs.gain(0.9, 1, 0.1));
    }
}

//! A model of the duration of steps, which predicts how many tokens of a prompt fit into a step of limited duration.
//!
//! The time of a step is modeled as a sum of three costs: one for the step, one for each of its tokens, and one for
//! each attention pair, which consists of a token and a token to which it attends. A Kalman filter (Kalman, 1960)
//! estimates the three costs from recorded steps. Each step changes the least certain of its costs the most. The
//! estimate of a cost hardly changes in steps to which this cost contributes little, and a single outlier has little
//! effect.
//!
//! The module makes no decisions and reads no clock: the caller records the times.

use std::time::Duration;

use crate::batch::Batch;

/// The estimated costs of a step.
#[derive(Clone, Debug)]
pub(crate) struct StepTimeModel {
    /// Seconds for each unit of [`StepWork::features`].
    costs: [f64; 3],
    /// The covariance of the costs: how uncertain they are.
    covariance: [[f64; 3]; 3],
    /// Number of recorded steps with a prompt, up to [`PROMPT_STEPS_MIN`].
    prompt_steps: u32,
}

/// The quantities that determine the duration of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepWork {
    pub(crate) tokens: u32,
    /// The number of tokens that each token attends to, summed over all tokens.
    pub(crate) attention_pairs: u64,
}

/// Standard deviation of a step's time from the predicted time, as a fraction of the measured time. Times vary because
/// other programs use the processors as well.
const STEP_NOISE: f64 = 0.1;
/// Standard deviation of a cost's change from step to step, as a fraction of the cost.
const DRIFT: f64 = 0.01;
/// Position in a prompt. A chunk after this position should take as long as a chunk at this position.
const REFERENCE_POSITION: u32 = 512;
/// Initial standard deviation of each cost, in seconds.
const INITIAL_DEVIATION: f64 = 1.0;
/// Number of steps with prompts that must be recorded before the estimate is used.
const PROMPT_STEPS_MIN: u32 = 8;
/// Numbers of tokens and of attention pairs in one unit of [`StepWork::features`], chosen so that the orders of
/// magnitude of the three costs are similar.
const TOKENS_SCALE: f64 = 64.0;
const PAIRS_SCALE: f64 = 65_536.0;

impl StepWork {
    /// The work of a whole batch.
    pub(crate) fn of(batch: &Batch) -> Self {
        let mut work = Self::default();
        for sequence in &batch.sequences {
            work.add(sequence.tokens.len() as u32, sequence.computed_tokens);
        }
        work
    }

    /// Adds `tokens` tokens of a sequence that follow `computed_tokens` computed ones.
    pub(crate) fn add(&mut self, tokens: u32, computed_tokens: u32) {
        self.tokens += tokens;
        let (tokens, computed) = (u64::from(tokens), u64::from(computed_tokens));
        self.attention_pairs += tokens * computed + tokens * (tokens + 1) / 2;
    }

    fn features(self) -> [f64; 3] {
        [1.0, f64::from(self.tokens) / TOKENS_SCALE, self.attention_pairs as f64 / PAIRS_SCALE]
    }
}

impl StepTimeModel {
    /// Updates the estimate with the measured time of a step.
    pub(crate) fn record_step(&mut self, batch: &Batch, time: Duration) {
        let has_prompt = batch
            .sequences
            .iter()
            .any(|sequence| sequence.tokens.len() as u32 > 1 + sequence.num_draft_tokens);
        self.prompt_steps = (self.prompt_steps + u32::from(has_prompt)).min(PROMPT_STEPS_MIN);
        let work = StepWork::of(batch);
        let error = time.as_secs_f64() - self.seconds(work);
        let features = work.features();
        for (index, cost) in self.costs.iter().enumerate() {
            self.covariance[index][index] += (DRIFT * cost).powi(2);
        }
        let gain = self.covariance.map(|row| dot(row, features));
        let noise = (STEP_NOISE * time.as_secs_f64()).powi(2).max(f64::MIN_POSITIVE);
        let variance = dot(gain, features) + noise;
        for row in 0..3 {
            self.costs[row] = (self.costs[row] + gain[row] / variance * error).max(0.0);
            for column in 0..3 {
                self.covariance[row][column] -= gain[row] * gain[column] / variance;
            }
        }
    }

    /// The predicted time of a step without any token, in seconds. `None` until enough steps have been recorded.
    pub(crate) fn overhead(&self) -> Option<f64> {
        (self.prompt_steps >= PROMPT_STEPS_MIN).then_some(self.costs[0])
    }

    /// The predicted time that `work` adds to a step, in seconds.
    pub(crate) fn cost(&self, work: StepWork) -> f64 {
        self.seconds(work) - self.costs[0]
    }

    /// The predicted time of a step.
    fn seconds(&self, work: StepWork) -> f64 {
        dot(self.costs, work.features())
    }

    /// Returns how many tokens of a prompt, after the first `computed_tokens`, fit into a step that also does `work`
    /// and takes at most `time_max`. Returns `None` until enough steps have been recorded.
    pub(crate) fn tokens_within(
        &self,
        time_max: Duration,
        work: StepWork,
        computed_tokens: u32,
    ) -> Option<u32> {
        if self.prompt_steps < PROMPT_STEPS_MIN {
            return None;
        }
        let remaining = time_max.as_secs_f64() - self.seconds(work);
        Some(self.tokens_in(remaining, computed_tokens))
    }

    /// Returns the number of prompt tokens after the first `computed_tokens` that take as long to compute as `tokens`
    /// tokens after the first [`REFERENCE_POSITION`]. The number is at most `tokens`. Returns `None` until enough steps
    /// have been recorded.
    pub(crate) fn equal_time_tokens(&self, tokens: u32, computed_tokens: u32) -> Option<u32> {
        if self.prompt_steps < PROMPT_STEPS_MIN {
            return None;
        }
        let mut work = StepWork::default();
        work.add(tokens, REFERENCE_POSITION);
        Some(self.tokens_in(self.seconds(work) - self.costs[0], computed_tokens).min(tokens))
    }

    /// Returns how many tokens of a prompt, after the first `computed_tokens`, can be computed in this many seconds.
    fn tokens_in(&self, seconds: f64, computed_tokens: u32) -> u32 {
        if seconds <= 0.0 {
            return 0;
        }
        // n tokens have about n (computed + n / 2) attention pairs, so a n² + b n = seconds.
        let pair = self.costs[2] / PAIRS_SCALE;
        let a = pair / 2.0;
        let b = self.costs[1] / TOKENS_SCALE + pair * f64::from(computed_tokens);
        // This form of the root is accurate for a small `a` as well. If tokens cost nothing, `as` saturates.
        (2.0 * seconds / (b + (b * b + 4.0 * a * seconds).sqrt())) as u32
    }
}

impl Default for StepTimeModel {
    fn default() -> Self {
        let variance = INITIAL_DEVIATION * INITIAL_DEVIATION;
        let covariance = [[variance, 0.0, 0.0], [0.0, variance, 0.0], [0.0, 0.0, variance]];
        Self { costs: [0.0; 3], covariance, prompt_steps: 0 }
    }
}

fn dot(left: [f64; 3], right: [f64; 3]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::ScheduledSequence;
    use crate::request::SequenceId;

    /// Returns a batch of eight decoding sequences with 300 computed tokens each and, unless `chunk` is 0, a chunk of a
    /// prompt.
    fn batch(chunk: u32, computed_tokens: u32) -> Batch {
        let mut batch = Batch::default();
        let mut push = |tokens: u32, computed_tokens: u32| {
            let start = batch.sequences.last().map_or(0, |last: &ScheduledSequence| last.tokens.end);
            batch.sequences.push(ScheduledSequence {
                id: SequenceId::new(0, 0),
                computed_tokens,
                evicted_tokens: 0,
                tokens: start..start + tokens,
                blocks: 0..0,
                samples: 0..0,
                scored_tokens: 0..0,
                num_draft_tokens: 0,
                adapter: 0,
            });
        };
        (0..8).for_each(|_| push(1, 300));
        if chunk > 0 {
            push(chunk, computed_tokens);
        }
        batch
    }

    /// Returns the time of a step on some processor: 5 ms, plus 1.4 ms for each token and 0.4 µs for each attention
    /// pair.
    fn actual_time(batch: &Batch) -> Duration {
        let StepWork { tokens, attention_pairs } = StepWork::of(batch);
        Duration::from_secs_f64(5e-3 + 1.4e-3 * f64::from(tokens) + 0.4e-6 * attention_pairs as f64)
    }

    #[test]
    fn the_work_of_a_step_is_its_tokens_and_the_pairs_that_attend() {
        let mut work = StepWork::default();
        work.add(1, 300);
        assert_eq!(work, StepWork { tokens: 1, attention_pairs: 301 });
        work.add(3, 10);
        assert_eq!(work, StepWork { tokens: 4, attention_pairs: 301 + 11 + 12 + 13 });
    }

    #[test]
    fn predicts_nothing_before_steps_with_prompts_were_recorded() {
        let mut model = StepTimeModel::default();
        for _ in 0..100 {
            model.record_step(&batch(0, 0), Duration::from_millis(30));
        }
        assert_eq!(model.tokens_within(Duration::from_secs(1), StepWork::default(), 0), None);
    }

    #[test]
    fn chunks_of_a_long_prompt_use_the_time_limit_of_a_step() {
        let limit = Duration::from_millis(80);
        let mut model = StepTimeModel::default();
        for _ in 0..50 {
            model.record_step(&batch(0, 0), actual_time(&batch(0, 0)));
        }
        let (mut position, mut fractions) = (0, Vec::new());
        while position < 8_192 {
            let fits = model.tokens_within(limit, StepWork::of(&batch(0, 0)), position);
            let chunk = fits.unwrap_or(128).clamp(1, 512);
            let time = actual_time(&batch(chunk, position));
            model.record_step(&batch(chunk, position), time);
            fractions.push(time.as_secs_f64() / limit.as_secs_f64());
            position += chunk;
        }
        let late = &fractions[24..];
        let worst = late.iter().copied().fold(0.0, f64::max);
        let mean = late.iter().sum::<f64>() / late.len() as f64;
        assert!(worst < 1.1, "a step took {worst} times the limit");
        assert!(mean > 0.85, "steps took {mean} times the limit on average");
    }

    #[test]
    fn late_chunks_of_a_long_prompt_take_as_long_as_early_ones() {
        let mut model = StepTimeModel::default();
        let expected = actual_time(&batch(120, REFERENCE_POSITION)).as_secs_f64();
        let (mut position, mut times) = (0, Vec::new());
        while position < 8_192 {
            let chunk = model.equal_time_tokens(120, position).unwrap_or(120);
            assert!((20..=120).contains(&chunk), "{chunk} tokens after {position}");
            let time = actual_time(&batch(chunk, position));
            model.record_step(&batch(chunk, position), time);
            times.push((position, time.as_secs_f64() / expected));
            position += chunk;
        }
        let late = times.iter().filter(|(position, _)| *position > REFERENCE_POSITION).map(|(_, time)| *time);
        let longest = times[9..].iter().map(|(_, time)| *time).fold(0.0, f64::max);
        let shortest = late.fold(1.0, f64::min);
        assert!(
            shortest > 0.9 && longest < 1.1,
            "steps took {shortest} to {longest} times the expected time"
        );
        let whole = actual_time(&batch(120, 8_000)).as_secs_f64() / expected;
        assert!(whole > 1.7, "a whole chunk would take {whole} times the expected time");
    }

    #[test]
    fn nothing_fits_when_decodes_use_all_of_the_time() {
        let mut model = StepTimeModel::default();
        for position in (0..4096).step_by(128) {
            model.record_step(&batch(128, position), actual_time(&batch(128, position)));
        }
        let decodes = StepWork::of(&batch(0, 0));
        assert_eq!(model.tokens_within(Duration::from_millis(1), decodes, 0), Some(0));
        assert!(model.tokens_within(Duration::from_secs(10), decodes, 0) > Some(1_000));
    }
}

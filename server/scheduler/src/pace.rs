//! How long steps take, and how many tokens of a prompt fit into one that is not to take longer than so much.
//!
//! A step's time is thought of as a sum: something for the step, something for each of its tokens, and something for
//! each pair of a token and one that it attends to. The three are learnt from the steps there are, by a Kalman filter
//! (1960): what a step tells goes to those of the three that are least known, what is not varied for long is not
//! forgotten, and one odd step moves little.
//!
//! It decides nothing, and reads no clock: it is told what took how long.

use std::time::Duration;

use crate::Batch;

/// What is known of the time of steps.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    /// Seconds for [`Work::weighed`].
    costs: [f64; 3],
    /// How far they may be off: their covariance.
    doubt: [[f64; 3]; 3],
    /// Steps seen in which there was a prompt, up to [`PROMPTS_SEEN_MIN`].
    prompts_seen: u32,
}

/// What a step computes, as far as its time depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) tokens: u32,
    /// For each token, the tokens it attends to, all together.
    pub(crate) pairs: u64,
}

/// By how much of itself the time of a step is off what is computed in it: processors are shared.
const STEP_NOISE: f64 = 0.1;
/// By how much of itself a cost changes from step to step.
const DRIFT: f64 = 0.01;
/// Tokens of a prompt behind which what is to be even is as long as it is there.
const EVEN_FROM: u32 = 512;
/// Seconds that a cost may be off at first.
const DOUBT: f64 = 1.0;
/// Steps with prompts after which the estimate is taken at its word.
const PROMPTS_SEEN_MIN: u32 = 8;
/// So many tokens, and pairs, cost about what a step costs at least.
const TOKENS_SCALE: f64 = 64.0;
const PAIRS_SCALE: f64 = 65_536.0;

impl Work {
    /// All of a batch.
    pub(crate) fn of(batch: &Batch) -> Self {
        let mut work = Self::default();
        batch.rows.iter().for_each(|row| work.add(row.tokens.len() as u32, row.past));
        work
    }

    /// `tokens` more, after `past` of the same sequence.
    fn add(&mut self, tokens: u32, past: u32) {
        self.tokens += tokens;
        self.pairs += u64::from(tokens) * u64::from(past) + u64::from(tokens) * u64::from(tokens + 1) / 2;
    }

    fn weighed(self) -> [f64; 3] {
        [1.0, f64::from(self.tokens) / TOKENS_SCALE, self.pairs as f64 / PAIRS_SCALE]
    }
}

impl Pace {
    /// Learns from a step.
    pub(crate) fn took(&mut self, batch: &Batch, time: Duration) {
        let has_prompt = batch.rows.iter().any(|row| row.tokens.len() as u32 > 1 + row.drafts);
        self.prompts_seen = (self.prompts_seen + u32::from(has_prompt)).min(PROMPTS_SEEN_MIN);
        let work = Work::of(batch);
        let error = time.as_secs_f64() - self.seconds(work);
        let weighed = work.weighed();
        for (index, cost) in self.costs.iter().enumerate() {
            self.doubt[index][index] += (DRIFT * cost).powi(2);
        }
        let doubt = self.doubt.map(|row| product(row, weighed));
        let noise = (STEP_NOISE * time.as_secs_f64()).powi(2).max(f64::MIN_POSITIVE);
        let all = product(doubt, weighed) + noise;
        for row in 0..3 {
            self.costs[row] = (self.costs[row] + doubt[row] / all * error).max(0.0);
            for column in 0..3 {
                self.doubt[row][column] -= doubt[row] * doubt[column] / all;
            }
        }
    }

    /// How long a step is thought to take.
    fn seconds(&self, work: Work) -> f64 {
        product(self.costs, work.weighed())
    }

    /// How many tokens of a prompt, of which there are `past` already, fit into a step of at most `time_max` beside
    /// `work`. `None` before enough was seen.
    pub(crate) fn tokens_within(&self, time_max: Duration, work: Work, past: u32) -> Option<u32> {
        if self.prompts_seen < PROMPTS_SEEN_MIN {
            return None;
        }
        let left = time_max.as_secs_f64() - self.seconds(work);
        Some(self.tokens_in(left, past))
    }

    /// How many tokens of a prompt, of which there are `past` already, take as long as `tokens` behind the first
    /// [`EVEN_FROM`] of one, and at most `tokens`. `None` before enough was seen.
    pub(crate) fn tokens_as_even(&self, tokens: u32, past: u32) -> Option<u32> {
        if self.prompts_seen < PROMPTS_SEEN_MIN {
            return None;
        }
        let mut work = Work::default();
        work.add(tokens, EVEN_FROM);
        Some(self.tokens_in(self.seconds(work) - self.costs[0], past).min(tokens))
    }

    /// How many tokens of a prompt, of which there are `past` already, take so many seconds.
    fn tokens_in(&self, seconds: f64, past: u32) -> u32 {
        if seconds <= 0.0 {
            return 0;
        }
        // n tokens attend to n (past + n / 2) others: a n² + b n = seconds.
        let pair = self.costs[2] / PAIRS_SCALE;
        let a = pair / 2.0;
        let b = self.costs[1] / TOKENS_SCALE + pair * f64::from(past);
        // The root, in the form that is right for a small `a` too. What costs nothing has no end: `as` saturates.
        (2.0 * seconds / (b + (b * b + 4.0 * a * seconds).sqrt())) as u32
    }
}

impl Default for Pace {
    fn default() -> Self {
        let doubt = DOUBT * DOUBT;
        let doubt = [[doubt, 0.0, 0.0], [0.0, doubt, 0.0], [0.0, 0.0, doubt]];
        Self { costs: [0.0; 3], doubt, prompts_seen: 0 }
    }
}

fn product(left: [f64; 3], right: [f64; 3]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Row, SequenceId};

    /// Eight sequences of 300 tokens that decode, and a chunk of a prompt.
    fn batch(chunk: u32, past: u32) -> Batch {
        let mut batch = Batch::default();
        let mut push = |tokens: u32, past: u32| {
            let begin = batch.rows.last().map_or(0, |row: &Row| row.tokens.end);
            batch.rows.push(Row {
                sequence: SequenceId(0),
                past,
                tokens: begin..begin + tokens,
                blocks: 0..0,
                samples: 0..0,
                scored: 0..0,
                drafts: 0,
                left: 0,
                adapter: 0,
            });
        };
        (0..8).for_each(|_| push(1, 300));
        if chunk > 0 {
            push(chunk, past);
        }
        batch
    }

    /// What a step takes on some processor: 5 ms, 1.4 ms for a token and 0.4 us for a pair.
    fn truth(batch: &Batch) -> Duration {
        let Work { tokens, pairs } = Work::of(batch);
        Duration::from_secs_f64(5e-3 + 1.4e-3 * f64::from(tokens) + 0.4e-6 * pairs as f64)
    }

    #[test]
    fn what_a_step_computes_is_its_tokens_and_what_they_attend_to() {
        let mut work = Work::default();
        work.add(1, 300);
        assert_eq!(work, Work { tokens: 1, pairs: 301 });
        work.add(3, 10);
        assert_eq!(work, Work { tokens: 4, pairs: 301 + 11 + 12 + 13 });
    }

    #[test]
    fn nothing_is_said_before_prompts_were_seen() {
        let mut pace = Pace::default();
        for _ in 0..100 {
            pace.took(&batch(0, 0), Duration::from_millis(30));
        }
        assert_eq!(pace.tokens_within(Duration::from_secs(1), Work::default(), 0), None);
    }

    #[test]
    fn a_long_prompt_is_cut_so_that_steps_take_as_long_as_they_may() {
        let limit = Duration::from_millis(80);
        let mut pace = Pace::default();
        for _ in 0..50 {
            pace.took(&batch(0, 0), truth(&batch(0, 0)));
        }
        let (mut past, mut shares) = (0, Vec::new());
        while past < 8_192 {
            let fits = pace.tokens_within(limit, Work::of(&batch(0, 0)), past);
            let chunk = fits.unwrap_or(128).clamp(1, 512);
            let time = truth(&batch(chunk, past));
            pace.took(&batch(chunk, past), time);
            shares.push(time.as_secs_f64() / limit.as_secs_f64());
            past += chunk;
        }
        let late = &shares[24..];
        let worst = late.iter().copied().fold(0.0, f64::max);
        let mean = late.iter().sum::<f64>() / late.len() as f64;
        assert!(worst < 1.1, "a step took {worst} of what it may");
        assert!(mean > 0.85, "steps took {mean} of what they may");
    }

    #[test]
    fn a_long_prompt_is_cut_so_that_its_last_steps_take_as_long_as_those_after_its_beginning() {
        let mut pace = Pace::default();
        let even = truth(&batch(120, EVEN_FROM)).as_secs_f64();
        let (mut past, mut times) = (0, Vec::new());
        while past < 8_192 {
            let chunk = pace.tokens_as_even(120, past).unwrap_or(120);
            assert!((20..=120).contains(&chunk), "{chunk} tokens after {past}");
            let time = truth(&batch(chunk, past));
            pace.took(&batch(chunk, past), time);
            times.push((past, time.as_secs_f64() / even));
            past += chunk;
        }
        let late = times.iter().filter(|(past, _)| *past > EVEN_FROM).map(|(_, time)| *time);
        let longest = times[9..].iter().map(|(_, time)| *time).fold(0.0, f64::max);
        let shortest = late.fold(1.0, f64::min);
        assert!(shortest > 0.9 && longest < 1.1, "steps took {shortest} to {longest} of what they should");
        let whole = truth(&batch(120, 8_000)).as_secs_f64() / even;
        assert!(whole > 1.7, "a whole chunk would take {whole} of it");
    }

    #[test]
    fn where_decodes_take_all_there_is_nothing_fits() {
        let mut pace = Pace::default();
        for past in (0..4096).step_by(128) {
            pace.took(&batch(128, past), truth(&batch(128, past)));
        }
        let decodes = Work::of(&batch(0, 0));
        assert_eq!(pace.tokens_within(Duration::from_millis(1), decodes, 0), Some(0));
        assert!(pace.tokens_within(Duration::from_secs(10), decodes, 0) > Some(1_000));
    }
}

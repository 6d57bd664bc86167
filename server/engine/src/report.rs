//! What the engine tells of itself: a report of each step, and its load.

use std::time::Duration;

use server_scheduler::Load;

use crate::sleep::SleepLevel;

/// What one step did, or a waking, for metrics. All counts are of this step alone. A report without rows is not of a step:
/// it is of a waking, or of sequences of earlier steps that were sampled later.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Rows of the batch: sequences that took part.
    pub rows: u32,
    /// Tokens computed, [`Self::prefill_tokens`] included.
    pub batch_tokens: u32,
    /// Tokens computed that sequences had already: of prompts, and of outputs that are computed anew after a
    /// preemption.
    pub prefill_tokens: u32,
    /// Tokens of the prompts of the requests that started, cached ones included.
    pub prompt_tokens: u32,
    /// Tokens of these prompts that were taken from the prefix cache.
    pub cached_tokens: u32,
    /// Tokens generated.
    pub generated_tokens: u32,
    /// Tokens computed that were guessed, [`Self::accepted_tokens`] included.
    pub drafted_tokens: u32,
    /// Those of them that were right, and so are among [`Self::generated_tokens`].
    pub accepted_tokens: u32,
    /// Sequences that were sent back to wait because blocks ran out.
    pub preemptions: u32,
    /// For each request that started: the time from its submission to the beginning of this step.
    pub queue_times: Vec<Duration>,
    /// Requests that failed with the step, or for their logits in it.
    pub requests_failed: u32,
    /// The time in which the draft model guessed.
    pub draft_time: Duration,
    /// The time the model ran.
    pub run_time: Duration,
    /// Sequences whose guides were asked what may come next.
    pub guided_sequences: u32,
    /// Sequences that were not sampled because their guides were not ready: they skip steps until these are.
    pub suspended_sequences: u32,
    /// The time that sampling waited, after the model, to know what guides allow.
    pub guide_time: Duration,
    /// The time of the whole step: scheduling, running, sampling and sending events.
    pub step_time: Duration,
    /// The time it took to wake, if that is what was done.
    pub wake_time: Option<Duration>,
}

impl StepReport {
    /// Zero everywhere; keeps the memory.
    pub(crate) fn clear(&mut self) {
        let mut queue_times = std::mem::take(&mut self.queue_times);
        queue_times.clear();
        *self = Self { queue_times, ..Self::default() };
    }
}

/// Called on the engine's thread once a step, and once a waking: it is to be quick, and must not panic.
pub type Observer = Box<dyn FnMut(&StepReport) + Send>;

/// What the engine does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineState {
    /// Its thread is not up yet. Requests are taken.
    #[default]
    Starting,
    /// It serves.
    Serving,
    /// It finishes what it has and takes nothing more.
    Draining,
    /// It has finished, or was stopped.
    Stopped,
    /// Its runner failed for good, or something panicked.
    Dead,
}

/// How busy the engine is, and how fast. Compared and published as one value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLoad {
    /// What the engine does.
    pub state: EngineState,
    /// What it has given back while it sleeps. Waking included: until it is awake.
    pub asleep: Option<SleepLevel>,
    /// Its sequences and its cache.
    pub load: Load,
    /// Tokens of prompts computed per second, while there are such: a moving average over [`RATE_WINDOW`].
    pub prefill_tokens_per_second: f32,
    /// Tokens generated per second, while there are such: a moving average over [`RATE_WINDOW`].
    pub decode_tokens_per_second: f32,
    /// Requests that the engine has taken so far, which `load` takes into account: see
    /// [`EngineHandle::submissions`](crate::EngineHandle::submissions).
    pub submissions: u64,
}

/// The time constant of the moving averages in [`EngineLoad`]: time in steps, idle time does not count.
pub const RATE_WINDOW: Duration = Duration::from_secs(5);

/// Tokens per second over the last while. Tokens and time fade alike, and their ratio is the rate: a first step that is
/// slow because the machine is cold counts for its own time, and not for all the time before it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rate {
    tokens: f64,
    seconds: f64,
}

impl Rate {
    /// Counts `tokens` that took `time`. Nothing changes without either.
    pub(crate) fn add(&mut self, tokens: u32, time: Duration) {
        if tokens == 0 || time.is_zero() {
            return;
        }
        let kept = (-time.as_secs_f64() / RATE_WINDOW.as_secs_f64()).exp();
        self.tokens = self.tokens * kept + f64::from(tokens);
        self.seconds = self.seconds * kept + time.as_secs_f64();
    }

    /// Zero before anything was counted.
    pub(crate) fn per_second(self) -> f32 {
        if self.seconds > 0.0 { (self.tokens / self.seconds) as f32 } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_follows_what_is_counted_and_forgets_by_time() {
        let mut rate = Rate::default();
        assert_eq!(rate.per_second(), 0.0);
        rate.add(10, Duration::from_secs(1));
        assert_eq!(rate.per_second(), 10.0);
        rate.add(0, Duration::from_secs(100));
        rate.add(5, Duration::ZERO);
        assert_eq!(rate.per_second(), 10.0);
        rate.add(100, RATE_WINDOW);
        let kept = (-1f32).exp();
        let expected = (10.0 * kept + 100.0) / (kept + RATE_WINDOW.as_secs_f32());
        assert!((rate.per_second() - expected).abs() < 1e-3, "{rate:?} is not {expected}");
    }

    #[test]
    fn one_slow_first_step_is_soon_made_up_for() {
        let mut rate = Rate::default();
        rate.add(25, Duration::from_secs(1));
        // Twenty short prompts, at 500 tokens a second.
        for _ in 0..20 {
            rate.add(25, Duration::from_millis(50));
        }
        assert!(rate.per_second() > 250.0, "{rate:?}");
    }
}

//! The reports of the engine: statistics of each step, and the load.

use std::time::Duration;

use server_scheduler::Load;

use crate::sleep::SleepLevel;

/// A report about one step, for metrics. All counts refer to this step alone. If [`Self::num_sequences`] is 0, the
/// report does not describe a step: the engine woke or failed to wake, sampled sequences that were suspended in earlier
/// steps, or received results from the image encoder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Number of sequences in the batch.
    pub num_sequences: u32,
    /// Number of computed tokens, including [`Self::prefill_tokens`].
    pub batch_tokens: u32,
    /// Number of computed tokens of prompts, and of outputs that are recomputed after a preemption.
    pub prefill_tokens: u32,
    /// Number of prompt tokens of the requests that started, including cached ones.
    pub prompt_tokens: u32,
    /// Number of these prompt tokens that were in the prefix cache.
    pub cached_tokens: u32,
    /// Number of generated tokens.
    pub generated_tokens: u32,
    /// Number of computed draft tokens, including [`Self::accepted_tokens`].
    pub drafted_tokens: u32,
    /// Number of accepted draft tokens, which are included in [`Self::generated_tokens`].
    pub accepted_tokens: u32,
    /// Number of sequences that were preempted because blocks ran out.
    pub preemptions: u32,
    /// The time from submission to the start of this step, for each request that started.
    pub queue_times: Vec<Duration>,
    /// Number of requests that failed in this step, except those whose parameters caused the failure.
    pub requests_failed: u32,
    /// The time spent on the draft model, if the step has draft tokens.
    pub draft_time: Duration,
    /// The time that the model took.
    pub run_time: Duration,
    /// Number of image encoder runs that encoded at least one image.
    pub encoder_runs: u32,
    /// Number of images that were encoded.
    pub encoded_images: u32,
    /// The time that the image encoder took to encode these images. The encoder runs concurrently with the steps.
    pub encode_time: Duration,
    /// Number of sequences in the batch for which guides compute the allowed next tokens.
    pub guided_sequences: u32,
    /// Number of times that a sequence was suspended because its guide was not ready or another thread used the guide's
    /// shared state.
    pub sequence_suspensions: u32,
    /// The time for which sampling waited for guides after the model had run.
    pub structured_output_wait: Duration,
    /// The time of the whole step: scheduling, drafting, running, waiting for guides, sampling and sending events.
    pub step_time: Duration,
    /// The time that the engine took to wake, if this report describes a wake-up.
    pub wake_time: Option<Duration>,
}

impl StepReport {
    /// Resets all fields without releasing the memory of `queue_times`.
    pub(crate) fn clear(&mut self) {
        let mut queue_times = std::mem::take(&mut self.queue_times);
        queue_times.clear();
        *self = Self { queue_times, ..Self::default() };
    }
}

/// A function that is called on the engine's thread with each report. It must be quick and must not panic.
pub type Observer = Box<dyn FnMut(&StepReport) + Send>;

/// The state of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineState {
    /// The thread is starting. Requests are accepted.
    #[default]
    Starting,
    /// The engine serves requests.
    Serving,
    /// The engine finishes its requests and accepts no new ones.
    Draining,
    /// The engine has drained or was stopped.
    Stopped,
    /// The runner failed permanently, or the thread panicked.
    Dead,
}

/// The load and the speed of an engine, published as one value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLoad {
    /// The state of the engine.
    pub state: EngineState,
    /// The sleep level while the engine is asleep or is waking.
    pub sleep_level: Option<SleepLevel>,
    /// The load of the scheduler and of the cache.
    pub load: Load,
    /// Bytes of the stored outputs of the image encoder.
    pub image_cache_bytes: u64,
    /// Number of [prefill tokens](StepReport::prefill_tokens) computed per second in steps with such tokens: a moving
    /// average over [`RATE_WINDOW`].
    pub prefill_tokens_per_second: f32,
    /// Number of tokens generated per second: a moving average over [`RATE_WINDOW`]. The average includes only the time
    /// of steps that generate tokens and of the pauses before these steps.
    pub decode_tokens_per_second: f32,
    /// Number of image tokens encoded per second while the encoder runs: a moving average over [`RATE_WINDOW`].
    pub image_tokens_per_second: f32,
    /// Number of requests that the engine had received when it determined `load`: see
    /// [`EngineHandle::submissions`](crate::EngineHandle::submissions).
    pub submissions: u64,
}

/// The time constant of the moving averages in [`EngineLoad`]. The averages include only the time spent in steps or in
/// the encoder. The decode rate also includes the pauses for the encoder.
pub const RATE_WINDOW: Duration = Duration::from_secs(5);

/// A moving average of tokens per second. The rate is the ratio of tokens to time. Both decay equally, so each step is
/// weighted by its duration, and a slow first step soon has little weight.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rate {
    tokens: f64,
    seconds: f64,
}

impl Rate {
    /// Adds `tokens` tokens that were computed in `time`. Does nothing if either argument is zero.
    pub(crate) fn add(&mut self, tokens: u32, time: Duration) {
        if tokens == 0 || time.is_zero() {
            return;
        }
        let decay = (-time.as_secs_f64() / RATE_WINDOW.as_secs_f64()).exp();
        self.tokens = self.tokens * decay + f64::from(tokens);
        self.seconds = self.seconds * decay + time.as_secs_f64();
    }

    /// The rate, or zero if nothing has been added yet.
    pub(crate) fn per_second(self) -> f32 {
        if self.seconds > 0.0 { (self.tokens / self.seconds) as f32 } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_decays_with_time_in_steps() {
        let mut rate = Rate::default();
        assert_eq!(rate.per_second(), 0.0);
        rate.add(10, Duration::from_secs(1));
        assert_eq!(rate.per_second(), 10.0);
        rate.add(0, Duration::from_secs(100));
        rate.add(5, Duration::ZERO);
        assert_eq!(rate.per_second(), 10.0);
        rate.add(100, RATE_WINDOW);
        let decay = (-1f32).exp();
        let expected = (10.0 * decay + 100.0) / (decay + RATE_WINDOW.as_secs_f32());
        assert!((rate.per_second() - expected).abs() < 1e-3, "{rate:?} is not {expected}");
    }

    #[test]
    fn a_slow_first_step_has_little_weight_soon() {
        let mut rate = Rate::default();
        rate.add(25, Duration::from_secs(1));
        // Add twenty short prompts, computed at 500 tokens per second.
        for _ in 0..20 {
            rate.add(25, Duration::from_millis(50));
        }
        assert!(rate.per_second() > 250.0, "{rate:?}");
    }
}

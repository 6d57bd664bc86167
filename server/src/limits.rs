//! How much the server takes on, and what it tells those it turns away.
//!
//! Every queue and buffer has its limit here or in the engine's configuration; over it a request is refused
//! at once and never waits.

mod budget;
mod preparation;
mod tokenizer;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub(crate) use budget::{BudgetExhausted, ByteBudget, ByteClaim};
pub(crate) use preparation::{NoSlot, Preparations};
pub(crate) use tokenizer::{TextTooLong, TokenizerMemory};

use crate::error::Error;

/// The limits of the HTTP side.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a request's body.
    pub body_bytes_max: usize,
    /// Bytes of all request bodies that are in memory at once: while they arrive, and until they are prepared.
    pub buffered_body_bytes_max: usize,
    /// Requests in work, from their body's arrival to their answer's last byte.
    pub requests_max: usize,
    /// Open connections; more wait to be accepted, in the operating system's queue.
    pub connections_max: usize,
    /// Time a client may take to send the head of a request, and again its body.
    pub read_timeout: Duration,
    /// Time in which a client has to take part of its answer, once the connection's buffers are full.
    pub write_timeout: Duration,
}

impl Default for Limits {
    /// As on the command line.
    fn default() -> Self {
        Self {
            body_bytes_max: 8 << 20,
            buffered_body_bytes_max: 256 << 20,
            requests_max: 1024,
            connections_max: 4096,
            read_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
        }
    }
}

impl Limits {
    /// Refuses limits that contradict each other.
    ///
    /// # Errors
    /// A body that is allowed would never fit its budget.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let (body, all) = (self.body_bytes_max, self.buffered_body_bytes_max);
        anyhow::ensure!(
            all >= body,
            "--max-buffered-body-bytes: {all} bytes are less than --max-body-bytes, {body} bytes"
        );
        Ok(())
    }

    /// The limits of the port of metrics and probes, whose requests are few and short.
    pub(crate) fn of_admin_port(self) -> Self {
        /// Number of open connections to the port given by `--admin-port`.
        ///
        /// Beyond it: further connections wait, and connections without a request are closed after one second to make
        /// room for them.
        const CONNECTIONS_MAX: usize = 256;
        /// Time in which a client of the port given by `--admin-port` must send a request, and again read the answer.
        ///
        /// Beyond it: the connection is closed.
        const TIMEOUT: Duration = Duration::from_secs(5);
        Self { connections_max: CONNECTIONS_MAX, read_timeout: TIMEOUT, write_timeout: TIMEOUT, ..self }
    }
}

/// Bytes of memory for texts that are being tokenized, where the command line does not say.
pub(crate) const TOKENIZER_MEMORY: usize = 512 << 20;

/// Number of choices of one request, over all its prompts.
///
/// Beyond it: 400, `integer_above_max_value`; for a list of more prompts than that 400, `array_above_max_length`.
pub(crate) const CHOICES_MAX: u32 = 128;
/// Number of stop strings of a request (`stop`).
///
/// Beyond it: 400, `array_above_max_length`.
pub(crate) const STOPS_MAX: usize = 16;
/// Size of a stop string or of a bad word.
///
/// Beyond it: 400, `string_above_max_length`.
pub(crate) const STOP_BYTES_MAX: usize = 1024;
/// Number of stop tokens of a request (`stop_token_ids`).
///
/// Beyond it: 400, `array_above_max_length`.
pub(crate) const STOP_TOKENS_MAX: usize = 256;
/// Number of tokens in `logit_bias`.
///
/// Beyond it: 400, `object_above_max_properties`.
pub(crate) const BIASES_MAX: usize = 1024;
/// Number of texts in `bad_words`. Each has at most [`STOP_BYTES_MAX`] bytes.
///
/// Beyond it: 400, `array_above_max_length`.
pub(crate) const BAD_WORDS_MAX: usize = 256;
/// Number of tokens in `allowed_token_ids`.
///
/// Beyond it: 400, `array_above_max_length`.
pub(crate) const ALLOWED_TOKENS_MAX: usize = 1 << 18;
/// Size of an identifier in a request, such as `user`, `cache_salt` or `request_id`.
///
/// Beyond it: 400, `string_above_max_length`.
pub(crate) const NAME_BYTES_MAX: usize = 512;
/// Number of texts in one tokenize request.
///
/// Beyond it: 400, `array_above_max_length`.
pub(crate) const TEXTS_MAX: usize = 1024;
/// The least `repetition_penalty`: logits that are divided or multiplied by it stay finite.
pub(crate) const REPETITION_PENALTY_MIN: f64 = 0.001;
/// Greatest `repetition_penalty`.
///
/// Beyond it: 400, `decimal_above_max_value`.
pub(crate) const REPETITION_PENALTY_MAX: f64 = 1000.0;
/// Number of most probable tokens reported at a position (`top_logprobs`, `logprobs`, `prompt_logprobs`).
///
/// Beyond it: 400, `integer_above_max_value`.
pub(crate) const TOP_LOGPROBS_MAX: u32 = 20;

/// Number of concurrent requests about stored responses and conversations.
///
/// Beyond it: 429, `too_many_requests`, with `Retry-After`.
pub(crate) const STORED_OBJECT_REQUESTS_MAX: usize = 64;

/// Greatest `Retry-After` of the server, in seconds.
///
/// Beyond it: the header has this value even if the wait may be longer.
pub const RETRY_AFTER_MAX: u64 = 60;

/// Admits requests up to a limit.
#[derive(Debug)]
pub(crate) struct Admission {
    requests_max: usize,
    permits: Arc<Semaphore>,
    ends: Mutex<Ends>,
}

/// A request in work. Dropping it makes room for another.
#[derive(Debug)]
pub(crate) struct Admitted {
    _permit: OwnedSemaphorePermit,
}

impl Admission {
    pub(crate) fn new(requests_max: usize) -> Self {
        let requests_max = requests_max.min(Semaphore::MAX_PERMITS);
        Self { requests_max, permits: Arc::new(Semaphore::new(requests_max)), ends: Mutex::default() }
    }

    /// Takes a request on.
    ///
    /// # Errors
    /// There are as many as may be.
    pub(crate) fn admit(&self) -> Result<Admitted, Error> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().map_err(|_| Error::TooManyRequests {
            limit: self.requests_max,
            retry_after: self.retry_after(Instant::now()),
        })?;
        Ok(Admitted { _permit: permit })
    }

    pub(crate) fn requests_max(&self) -> usize {
        self.requests_max
    }

    /// Requests in work.
    pub(crate) fn requests(&self) -> usize {
        self.requests_max - self.permits.available_permits()
    }

    /// Counts a request that was answered to the end.
    pub(crate) fn ended(&self, now: Instant) {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).push(now);
    }

    /// How long it takes, at the pace requests ended lately, until half of those in work have ended: then
    /// there is surely room, without everybody coming back for the first free place.
    pub(crate) fn retry_after(&self, now: Instant) -> Duration {
        let ahead = self.requests() as f64 / 2.0;
        let pace = self.ends.lock().unwrap_or_else(PoisonError::into_inner).per_second(now);
        let seconds = pace.map_or(1.0, |pace| ahead / pace);
        Duration::from_secs_f64(seconds.clamp(1.0, RETRY_AFTER_MAX as f64))
    }
}

/// When requests ended lately.
#[derive(Debug, Default)]
struct Ends(VecDeque<Instant>);

impl Ends {
    /// As many as are remembered.
    const COUNT: usize = 64;

    fn push(&mut self, now: Instant) {
        if self.0.len() == Self::COUNT {
            self.0.pop_front();
        }
        self.0.push_back(now);
    }

    /// Unknown until two have ended.
    fn per_second(&self, now: Instant) -> Option<f64> {
        let first = *self.0.front().filter(|_| self.0.len() > 1)?;
        let seconds = now.saturating_duration_since(first).as_secs_f64().max(1e-3);
        Some(self.0.len() as f64 / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admits_no_more_than_the_limit_and_makes_room_again() {
        let admission = Admission::new(2);
        let first = admission.admit().unwrap();
        let _second = admission.admit().unwrap();
        assert!(matches!(admission.admit(), Err(Error::TooManyRequests { limit: 2, .. })));
        drop(first);
        assert_eq!(admission.requests(), 1);
        admission.admit().unwrap();
    }

    #[test]
    fn the_time_to_retry_follows_the_pace_within_bounds() {
        let admission = Admission::new(100);
        let _admitted: Vec<_> = (0..100).map(|_| admission.admit().unwrap()).collect();
        let start = Instant::now();
        assert_eq!(admission.retry_after(start), Duration::from_secs(1), "nothing is known yet");
        for second in 0..10 {
            admission.ended(start + Duration::from_secs(second));
        }
        // One a second, and fifty to wait for.
        assert_eq!(admission.retry_after(start + Duration::from_secs(10)), Duration::from_secs(50));
        assert_eq!(admission.retry_after(start + Duration::from_secs(500)), Duration::from_secs(60));
    }
}

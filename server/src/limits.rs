//! The limits of the server and the admission of requests.
//!
//! Every queue and buffer has a limit, here or in the engine's configuration. The documentation of a limit says whether a
//! request that exceeds it is rejected or waits.

mod budget;
mod fair_slots;
mod json;
mod preparation;
mod tokenizer;
mod trial;
mod waiting;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub(crate) use budget::{BudgetExhausted, ByteBudget, ByteReservation};
pub(crate) use fair_slots::{FairSlot, FairSlots, NoSlot};
pub(crate) use json::{VALUES_BYTES_MAX, ValuesMemory};
pub(crate) use preparation::{PreparationSlots, preparation_slots};
pub(crate) use tokenizer::TokenizerMemory;
pub(crate) use trial::{InvalidGrammar, TrialProcesses, run_trial};
pub(crate) use waiting::{AboveBudget, WaitingBudget};

use crate::error::Error;

/// The limits of the HTTP listeners. They have the names of the flags.
#[derive(Clone, Copy, Debug)]
pub struct HttpLimits {
    /// Size of a request body in bytes.
    pub max_body_bytes: usize,
    /// Total size in bytes of the request bodies and of their values in memory, from their arrival until the requests are
    /// prepared.
    pub max_buffered_body_bytes: usize,
    /// Number of concurrent requests, each from the arrival of its body until its answer fits into the buffers of its
    /// connection.
    pub max_concurrent_requests: usize,
    /// Number of open connections. Further connections wait in the operating system's queue.
    pub max_connections: usize,
    /// Time within which a client must send the head of a request, and the same time again for its body.
    pub read_timeout: Duration,
    /// Time within which a client must read part of its answer, once the connection's buffers are full.
    pub write_timeout: Duration,
}

impl Default for HttpLimits {
    /// Returns the defaults of the flags.
    fn default() -> Self {
        Self {
            max_body_bytes: 32 << 20,
            max_buffered_body_bytes: 256 << 20,
            max_concurrent_requests: 1024,
            max_connections: 4096,
            read_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
        }
    }
}

impl HttpLimits {
    /// Rejects limits that contradict each other.
    ///
    /// # Errors
    /// The largest body would not fit into the buffer of all bodies.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let (body, all) = (self.max_body_bytes, self.max_buffered_body_bytes);
        anyhow::ensure!(
            all >= body,
            "--max-buffered-body-bytes ({all} bytes) must be at least --max-body-bytes ({body} bytes)"
        );
        Ok(())
    }

    /// Returns the limits of the admin port, whose requests are few and small.
    pub(crate) fn of_admin_port(self) -> Self {
        /// Number of open connections to the port given by `--admin-port`.
        ///
        /// If exceeded: further connections wait, and connections without a request are closed after one second to make
        /// room for them.
        const CONNECTIONS_MAX: usize = 256;
        /// Time within which a client of the port given by `--admin-port` must send a request, and again read the
        /// answer.
        ///
        /// If exceeded: the connection is closed.
        const TIMEOUT: Duration = Duration::from_secs(5);
        Self { max_connections: CONNECTIONS_MAX, read_timeout: TIMEOUT, write_timeout: TIMEOUT, ..self }
    }
}

/// The default of `--max-tokenizer-memory` in bytes.
pub(crate) const TOKENIZER_MEMORY_DEFAULT: usize = 512 << 20;

/// Number of choices of one request, over all its prompts.
///
/// If exceeded: 400, `integer_above_max_value`; for a list of more prompts than that 400, `array_above_max_length`.
pub(crate) const CHOICES_MAX: u32 = 128;
/// Number of log probabilities in an answer, separately for the prompts and for the generated text: the tokens of all
/// choices, times the alternatives and the token itself.
///
/// If exceeded: 400, `integer_above_max_value`; if the request does not limit the length of the answer, the choices end with
/// `length` before they have more.
pub(crate) const LOGPROBS_TOTAL_MAX: u64 = 1 << 21;
/// Size of the prompts that the choices of a request repeat with `echo`, in bytes.
///
/// If exceeded: 400, `integer_above_max_value`.
pub(crate) const ECHO_BYTES_MAX: u64 = 64 << 20;
/// Number of stop strings of a request (`stop`).
///
/// If exceeded: 400, `array_above_max_length`.
pub(crate) const STOPS_MAX: usize = 16;
/// Size of a stop string or of a bad word.
///
/// If exceeded: 400, `string_above_max_length`.
pub(crate) const STOP_BYTES_MAX: usize = 1024;
/// Number of stop tokens of a request (`stop_token_ids`).
///
/// If exceeded: 400, `array_above_max_length`.
pub(crate) const STOP_TOKENS_MAX: usize = 256;
/// Number of tokens in `logit_bias`.
///
/// If exceeded: 400, `object_above_max_properties`.
pub(crate) const BIASES_MAX: usize = 1024;
/// Number of texts in `bad_words`. Each has at most [`STOP_BYTES_MAX`] bytes.
///
/// If exceeded: 400, `array_above_max_length`.
pub(crate) const BAD_WORDS_MAX: usize = 256;
/// Number of tokens in `allowed_token_ids`.
///
/// If exceeded: 400, `array_above_max_length`.
pub(crate) const ALLOWED_TOKENS_MAX: usize = 1 << 18;
/// Size of an identifier in a request, such as `user`, `cache_salt` or `request_id`.
///
/// If exceeded: 400, `string_above_max_length`.
pub(crate) const NAME_BYTES_MAX: usize = 512;
/// Number of texts in one tokenize request.
///
/// If exceeded: 400, `array_above_max_length`.
pub(crate) const TEXTS_MAX: usize = 1024;
/// Smallest `repetition_penalty`, so that logits that are divided or multiplied by it stay finite.
pub(crate) const REPETITION_PENALTY_MIN: f64 = 0.001;
/// Maximum `repetition_penalty`.
///
/// If exceeded: 400, `decimal_above_max_value`.
pub(crate) const REPETITION_PENALTY_MAX: f64 = 1000.0;
/// Number of most probable tokens reported at a position (`top_logprobs`, `logprobs`, `prompt_logprobs`).
///
/// If exceeded: 400, `integer_above_max_value`.
pub(crate) const TOP_LOGPROBS_MAX: u32 = 20;

/// Number of concurrent requests about stored responses and conversations.
///
/// If exceeded: 429, `too_many_requests`, with `Retry-After`.
pub(crate) const STORED_OBJECT_REQUESTS_MAX: usize = 64;
/// Total size in bytes of the answers about tokens, stored responses and conversations that clients have not read yet.
/// Answers of up to 64 KiB do not count.
///
/// If exceeded: 429, `answer_buffer_full`, with `Retry-After`.
pub(crate) const UNREAD_ANSWER_BYTES_MAX: usize = 64 << 20;

/// Maximum `Retry-After` of the server, in seconds.
///
/// If exceeded: the header has this value even if the wait may be longer.
pub const RETRY_AFTER_MAX: u64 = 60;

/// Admits requests up to a limit.
#[derive(Debug)]
pub(crate) struct Admission {
    max_requests: usize,
    permits: Arc<Semaphore>,
    completions: Arc<Mutex<CompletionTimes>>,
}

/// A request in progress. Dropping it makes room for another request.
#[derive(Debug)]
pub(crate) struct AdmittedRequest {
    completions: Arc<Mutex<CompletionTimes>>,
    _permit: OwnedSemaphorePermit,
    /// The memory of the images, until the answer is complete.
    image_memory: Option<ByteReservation>,
}

impl Admission {
    pub(crate) fn new(max_requests: usize) -> Self {
        let max_requests = max_requests.min(Semaphore::MAX_PERMITS);
        Self { max_requests, permits: Arc::new(Semaphore::new(max_requests)), completions: Arc::default() }
    }

    /// Admits a request.
    ///
    /// # Errors
    /// The limit is reached.
    pub(crate) fn admit(&self) -> Result<AdmittedRequest, Error> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().map_err(|_| Error::TooManyRequests {
            limit: self.max_requests,
            retry_after: self.retry_after(Instant::now()),
        })?;
        let completions = Arc::clone(&self.completions);
        Ok(AdmittedRequest { completions, _permit: permit, image_memory: None })
    }

    pub(crate) fn max_requests(&self) -> usize {
        self.max_requests
    }

    /// Returns the number of requests in progress.
    pub(crate) fn requests(&self) -> usize {
        self.max_requests - self.permits.available_permits()
    }

    /// Returns the time until half of the requests in progress will have ended, at the current completion rate. By then
    /// there is room, and not all clients return for the first free place.
    pub(crate) fn retry_after(&self, now: Instant) -> Duration {
        let ahead = self.requests() as f64 / 2.0;
        let rate = lock(&self.completions).per_second(now);
        let seconds = rate.map_or(1.0, |rate| ahead / rate);
        Duration::from_secs_f64(seconds.clamp(1.0, RETRY_AFTER_MAX as f64))
    }
}

impl AdmittedRequest {
    /// Keeps the memory of the images until the answer is complete.
    pub(crate) fn with_image_memory(self, image_memory: Option<ByteReservation>) -> Self {
        Self { image_memory, ..self }
    }

    /// Records that the answer is complete. It may not have been sent yet.
    pub(crate) fn ended(&mut self, now: Instant) {
        drop(self.image_memory.take());
        lock(&self.completions).push(now);
    }
}

fn lock(completions: &Mutex<CompletionTimes>) -> MutexGuard<'_, CompletionTimes> {
    completions.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The times at which the latest requests were completed.
#[derive(Debug, Default)]
struct CompletionTimes(VecDeque<Instant>);

impl CompletionTimes {
    /// Number of times that are remembered.
    const COUNT: usize = 64;

    fn push(&mut self, now: Instant) {
        if self.0.len() == Self::COUNT {
            self.0.pop_front();
        }
        self.0.push_back(now);
    }

    /// Returns the completion rate, which is unknown until two requests are complete.
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
    fn admits_up_to_the_limit_and_makes_room_again() {
        let admission = Admission::new(2);
        let first = admission.admit().unwrap();
        let _second = admission.admit().unwrap();
        assert!(matches!(admission.admit(), Err(Error::TooManyRequests { limit: 2, .. })));
        drop(first);
        assert_eq!(admission.requests(), 1);
        admission.admit().unwrap();
    }

    #[test]
    fn the_time_to_retry_follows_the_completion_rate_within_bounds() {
        let admission = Admission::new(100);
        let mut admitted: Vec<_> = (0..100).map(|_| admission.admit().unwrap()).collect();
        let start = Instant::now();
        assert_eq!(admission.retry_after(start), Duration::from_secs(1), "the completion rate is unknown");
        for second in 0..10 {
            admitted[0].ended(start + Duration::from_secs(second));
        }
        // One request is completed per second, and fifty requests have to be completed first.
        assert_eq!(admission.retry_after(start + Duration::from_secs(10)), Duration::from_secs(50));
        assert_eq!(admission.retry_after(start + Duration::from_secs(500)), Duration::from_secs(60));
    }
}

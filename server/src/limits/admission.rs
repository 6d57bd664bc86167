//! Admits requests up to a limit, and estimates the time after which a rejected request should be retried.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::budget::ByteReservation;
use crate::error::Error;

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

/// A request in progress. Dropping this value makes room for another request.
#[derive(Debug)]
pub(crate) struct AdmittedRequest {
    completions: Arc<Mutex<CompletionTimes>>,
    _permit: OwnedSemaphorePermit,
    /// The memory that the images of the request occupy until the answer is complete.
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

    /// Returns the time until half of the requests in progress will have ended, at the current completion rate. Clients
    /// that retry after this time find several free slots instead of competing for the first one. The time is between 1
    /// and [`RETRY_AFTER_MAX`] seconds.
    pub(crate) fn retry_after(&self, now: Instant) -> Duration {
        let ahead = self.requests() as f64 / 2.0;
        let rate = lock(&self.completions).per_second(now);
        let seconds = rate.map_or(1.0, |rate| ahead / rate);
        Duration::from_secs_f64(seconds.clamp(1.0, RETRY_AFTER_MAX as f64))
    }
}

impl AdmittedRequest {
    /// Holds the memory of the images until the answer is complete.
    pub(crate) fn with_image_memory(self, image_memory: Option<ByteReservation>) -> Self {
        Self { image_memory, ..self }
    }

    /// Records that the answer is complete, although it may not have been sent yet, and frees the memory of the images.
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
    /// Number of requests whose completion times are stored.
    const COUNT: usize = 64;

    fn push(&mut self, now: Instant) {
        if self.0.len() == Self::COUNT {
            self.0.pop_front();
        }
        self.0.push_back(now);
    }

    /// Returns the number of completed requests per second, or `None` until two requests are complete.
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
        // One request is completed per second, so half of the 100 requests in progress end within 50 seconds.
        assert_eq!(admission.retry_after(start + Duration::from_secs(10)), Duration::from_secs(50));
        assert_eq!(admission.retry_after(start + Duration::from_secs(500)), Duration::from_secs(60));
    }
}

//! The lifecycle of the process. Readiness, the load reports and the health service all depend on one value.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// A phase of the process. The phases follow each other in this order; some may be skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The model is being loaded.
    Starting,
    /// The server accepts requests.
    Serving,
    /// The server accepts requests, but none should be sent, because the process will be stopped soon.
    Draining,
    /// The process has received a signal to stop, and is finishing its requests.
    Stopping,
    /// The engine has stopped.
    Stopped,
}

/// The phase of the process. Clones share the same phase.
#[derive(Clone, Debug)]
pub struct Lifecycle {
    phase: watch::Sender<Phase>,
    /// The time when the process first received a request to drain or to stop.
    drains_since: Arc<OnceLock<Instant>>,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self { phase: watch::Sender::new(Phase::Starting), drains_since: Arc::default() }
    }
}

impl Lifecycle {
    /// Returns the current phase.
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Advances to `phase`. Has no effect if the process has already reached this phase or a later one.
    pub fn advance(&self, phase: Phase) {
        if phase >= Phase::Draining {
            self.drains_since.get_or_init(Instant::now);
        }
        self.phase.send_if_modified(|present| {
            let later = phase > *present;
            if later {
                *present = phase;
            }
            later
        });
    }

    /// Returns the rest of `timeout`, which starts with the first request to drain or to stop. A `preStop` hook and
    /// the time after SIGTERM share this timeout, as they share a pod's grace period.
    pub fn drain_time_left(&self, timeout: Duration) -> Duration {
        self.drains_since.get().map_or(timeout, |since| timeout.saturating_sub(since.elapsed()))
    }

    /// Returns a receiver of phase changes.
    pub fn watch(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_phase_never_returns() {
        let lifecycle = Lifecycle::default();
        lifecycle.advance(Phase::Draining);
        lifecycle.advance(Phase::Serving);
        assert_eq!(lifecycle.phase(), Phase::Draining);
    }

    #[test]
    fn the_time_to_drain_counts_from_the_first_request_to_drain() {
        const HOUR: Duration = Duration::from_secs(3600);
        let lifecycle = Lifecycle::default();
        lifecycle.advance(Phase::Serving);
        assert_eq!(lifecycle.drain_time_left(HOUR), HOUR);
        lifecycle.advance(Phase::Draining);
        let since = *lifecycle.drains_since.get().unwrap();
        lifecycle.advance(Phase::Stopping);
        assert_eq!(*lifecycle.drains_since.get().unwrap(), since, "SIGTERM does not reset the time");
        assert!(lifecycle.drain_time_left(HOUR) <= HOUR);
        assert_eq!(lifecycle.drain_time_left(Duration::ZERO), Duration::ZERO);
    }
}

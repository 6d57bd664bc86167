//! Where the process is between start and end. One value; readiness, the load report and the health service
//! all follow it.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Where the process is. It only ever moves down this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The model is being loaded.
    Starting,
    /// Requests are taken.
    Serving,
    /// Requests are taken, but none should be sent: the process is about to be asked to end.
    Draining,
    /// The process was asked to end and finishes what it has.
    Stopping,
    /// The engine has ended.
    Stopped,
}

/// The process's phase. Clones are of the same.
#[derive(Clone, Debug)]
pub struct Lifecycle {
    phase: watch::Sender<Phase>,
    /// When it was first asked to drain or to end.
    drains_since: Arc<OnceLock<Instant>>,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self { phase: watch::Sender::new(Phase::Starting), drains_since: Arc::default() }
    }
}

impl Lifecycle {
    /// The present phase.
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Moves on to `phase`; never back.
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

    /// What is left of `timeout`, counted from when the process was first asked to drain or to end: the time in which a
    /// `preStop` hook drains and the time after SIGTERM are one, as a pod's grace period is.
    pub fn drain_time_left(&self, timeout: Duration) -> Duration {
        self.drains_since.get().map_or(timeout, |since| timeout.saturating_sub(since.elapsed()))
    }

    /// Tells of changes.
    pub fn watch(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_never_comes_back() {
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
        assert_eq!(*lifecycle.drains_since.get().unwrap(), since, "SIGTERM does not start it anew");
        assert!(lifecycle.drain_time_left(HOUR) <= HOUR);
        assert_eq!(lifecycle.drain_time_left(Duration::ZERO), Duration::ZERO);
    }
}

//! The clock of the engine, which is either real or advanced by a simulated model.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A clock that measures the time since its creation. Clones show the same time.
#[derive(Clone, Debug)]
pub struct Clock(ClockKind);

#[derive(Clone, Debug)]
enum ClockKind {
    Real(Instant),
    Simulated(Arc<AtomicU64>),
}

impl Clock {
    /// Creates a clock that follows the monotonic clock of the machine.
    pub fn real() -> Self {
        Self(ClockKind::Real(Instant::now()))
    }

    /// Creates a clock at zero that advances only by [`Self::spend`].
    pub fn simulated() -> Self {
        Self(ClockKind::Simulated(Arc::new(AtomicU64::new(0))))
    }

    /// The time since this clock was created.
    pub fn now(&self) -> Duration {
        match &self.0 {
            ClockKind::Real(beginning) => beginning.elapsed(),
            ClockKind::Simulated(nanoseconds) => Duration::from_nanos(nanoseconds.load(Ordering::Acquire)),
        }
    }

    /// Advances the clock by `duration`. A simulated clock advances immediately; with a real clock, the calling thread
    /// sleeps.
    pub fn spend(&self, duration: Duration) {
        match &self.0 {
            ClockKind::Real(_) => std::thread::sleep(duration),
            ClockKind::Simulated(nanoseconds) => {
                let spent = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
                nanoseconds.fetch_add(spent, Ordering::AcqRel);
            }
        }
    }
}

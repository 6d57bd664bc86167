//! The time the engine measures and a simulated model spends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The time since some beginning. Clones show the same time.
#[derive(Clone, Debug)]
pub struct Clock(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Real(Instant),
    Simulated(Arc<AtomicU64>),
}

impl Clock {
    /// The machine's monotonic clock.
    pub fn real() -> Self {
        Self(Kind::Real(Instant::now()))
    }

    /// A clock at zero that stands still except for what is spent on it.
    pub fn simulated() -> Self {
        Self(Kind::Simulated(Arc::new(AtomicU64::new(0))))
    }

    /// The time since this clock was made.
    pub fn now(&self) -> Duration {
        match &self.0 {
            Kind::Real(beginning) => beginning.elapsed(),
            Kind::Simulated(nanoseconds) => Duration::from_nanos(nanoseconds.load(Ordering::Acquire)),
        }
    }

    /// Lets `duration` pass: at once on a simulated clock, by sleeping on a real one.
    pub fn spend(&self, duration: Duration) {
        match &self.0 {
            Kind::Real(_) => std::thread::sleep(duration),
            Kind::Simulated(nanoseconds) => {
                let spent = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
                nanoseconds.fetch_add(spent, Ordering::AcqRel);
            }
        }
    }
}

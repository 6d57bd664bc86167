//! How many requests are prepared at once: preparation is computation, and more threads than cores only take time from
//! the model and memory from everybody.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Time that a request waits until its preparation (parsing, rendering, tokenizing) begins.
///
/// Beyond it: 429, `preparation_busy`, with `Retry-After`.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Number of requests that are prepared at the same time: as many as there are cores, but no more than this.
///
/// Beyond it: further requests wait.
const SLOTS_MAX: usize = 16;
/// Fewest: one long prompt does not hold up all others on a machine with one core.
const SLOTS_MIN: usize = 2;

/// Bounds the requests that are prepared at once.
#[derive(Debug)]
pub(crate) struct Preparations {
    count: usize,
    slots: Arc<Semaphore>,
}

/// A request that is being prepared. Dropping it lets the next one begin.
#[derive(Debug)]
pub(crate) struct PreparationSlot {
    _permit: OwnedSemaphorePermit,
}

/// No slot became free in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoSlot;

impl Preparations {
    /// As many as the process has cores, within bounds.
    pub(crate) fn of_this_machine() -> Self {
        let cores = std::thread::available_parallelism().map_or(SLOTS_MIN, usize::from);
        Self::new(cores.clamp(SLOTS_MIN, SLOTS_MAX))
    }

    fn new(count: usize) -> Self {
        Self { count, slots: Arc::new(Semaphore::new(count)) }
    }

    /// Waits for a slot, first come first served.
    ///
    /// # Errors
    /// None became free in time.
    pub(crate) async fn slot(&self) -> Result<PreparationSlot, NoSlot> {
        let permit = tokio::time::timeout(WAIT_MAX, Arc::clone(&self.slots).acquire_owned()).await;
        let permit = permit.map_err(|_| NoSlot)?.expect("invariant: it is never closed");
        Ok(PreparationSlot { _permit: permit })
    }
}

impl std::fmt::Display for Preparations {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} at once, each waiting up to {} s", self.count, WAIT_MAX.as_secs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn no_more_requests_are_prepared_at_once_than_there_are_slots() {
        let preparations = Preparations::new(2);
        let first = preparations.slot().await.unwrap();
        let _second = preparations.slot().await.unwrap();
        assert_eq!(preparations.slot().await.unwrap_err(), NoSlot);
        drop(first);
        preparations.slot().await.unwrap();
    }
}

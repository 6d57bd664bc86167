//! The slots in which requests are prepared. Preparation is CPU-bound, so more threads than cores would slow down the
//! model and use more memory.

use std::time::Duration;

use tokio::sync::oneshot;

use super::fair_slots::{FairSlot, FairSlots, NoSlot};
use crate::blocking;
use crate::tenant::Tenant;

/// Time that a request waits for its preparation (parsing, rendering, tokenizing) to begin.
///
/// If exceeded: 429, `preparation_busy`, with `Retry-After`.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Number of requests that are prepared at the same time: one for each core, but at least two and at most this number.
///
/// If exceeded: further requests wait.
const SLOTS_MAX: usize = 16;
/// The minimum number of slots. With two slots, one long prompt does not delay all others on a machine with one core.
const SLOTS_MIN: usize = 2;

/// Returns the number of slots on this machine: one for each core that the process may use, between [`SLOTS_MIN`] and
/// [`SLOTS_MAX`].
pub(crate) fn preparation_slots() -> usize {
    let cores = std::thread::available_parallelism().map_or(SLOTS_MIN, usize::from);
    cores.clamp(SLOTS_MIN, SLOTS_MAX)
}

/// Limits the number of requests that are prepared at the same time. Tenants take turns, and the requests of one tenant
/// are prepared in the order of their arrival.
#[derive(Debug)]
pub(crate) struct PreparationSlots {
    count: usize,
    slots: FairSlots,
}

/// The slot of a request that is being prepared. Dropping this value passes the slot on to the next request.
#[derive(Debug)]
pub(crate) struct PreparationSlot {
    _slot: FairSlot,
}

impl PreparationSlots {
    /// Creates as many slots as [`preparation_slots`] returns.
    pub(crate) fn for_this_machine() -> Self {
        Self::new(preparation_slots())
    }

    fn new(count: usize) -> Self {
        Self { count, slots: FairSlots::new(count) }
    }

    /// Waits for a slot. Dropping the future gives up the position in the queue.
    ///
    /// # Errors
    /// No slot became free in time.
    pub(crate) async fn slot(&self, tenant: Tenant) -> Result<PreparationSlot, NoSlot> {
        Ok(PreparationSlot { _slot: self.slots.slot(tenant, WAIT_MAX).await? })
    }
}

impl PreparationSlot {
    /// Runs `work` on a separate thread and returns its result, or `None` if it panics or no thread can be started.
    /// Dropping the future does not end the work, which occupies the slot until it returns.
    ///
    /// The thread runs with the priority that [`blocking::lower_priority`] sets.
    pub(crate) async fn run<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (sender, receiver) = oneshot::channel();
        let thread = std::thread::Builder::new().name("prepare".to_owned()).spawn(move || {
            let _slot = self;
            blocking::lower_priority();
            // Sending fails if the request was canceled.
            let _ = sender.send(work());
        });
        if let Err(error) = thread {
            tracing::error!(error = &error as &dyn std::error::Error, "failed to start a preparation thread");
            return None;
        }
        receiver.await.ok()
    }
}

impl std::fmt::Display for PreparationSlots {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} at the same time; others wait up to {} s", self.count, WAIT_MAX.as_secs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_slot_is_free_again_after_work_that_panics() {
        let preparation_slots = PreparationSlots::new(1);
        let slot = preparation_slots.slot(tenant(1)).await.unwrap();
        assert_eq!(slot.run(|| 7).await, Some(7));
        let slot = preparation_slots.slot(tenant(1)).await.unwrap();
        assert_eq!(slot.run(|| panic!("as intended")).await, None::<()>);
        preparation_slots.slot(tenant(1)).await.unwrap();
    }

    fn tenant(number: u32) -> Tenant {
        Tenant::parse(&format!("{number:032x}")).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn the_slots_limit_the_requests_that_are_prepared_at_the_same_time() {
        let preparation_slots = PreparationSlots::new(2);
        let first = preparation_slots.slot(tenant(1)).await.unwrap();
        let _second = preparation_slots.slot(tenant(1)).await.unwrap();
        assert_eq!(preparation_slots.slot(tenant(1)).await.unwrap_err(), NoSlot);
        drop(first);
        preparation_slots.slot(tenant(1)).await.unwrap();
    }
}

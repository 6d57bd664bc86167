//! Slots that limit how many requests do the same kind of work at the same time. Tenants take turns, and the requests
//! of one tenant receive slots in the order of their arrival.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::tenant::Tenant;

/// A fixed number of slots for which requests wait in a fair order.
#[derive(Debug)]
pub(crate) struct FairSlots {
    queue: Arc<Mutex<Queue>>,
}

#[derive(Debug)]
struct Queue {
    /// Number of free slots; 0 while a request waits.
    free: usize,
    /// The tenants with waiting requests, in the order of their turns.
    tenants: VecDeque<(Tenant, VecDeque<oneshot::Sender<FairSlot>>)>,
}

/// The slot of a request. Dropping this value passes the slot on to the next request.
#[derive(Debug)]
pub(crate) struct FairSlot {
    queue: Arc<Mutex<Queue>>,
}

/// The error if no slot became free in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoSlot;

impl FairSlots {
    /// Creates `count` free slots.
    pub(crate) fn new(count: usize) -> Self {
        Self { queue: Arc::new(Mutex::new(Queue { free: count, tenants: VecDeque::new() })) }
    }

    /// Waits for a slot, for at most `wait_max`. Dropping the future gives up the position in the queue.
    ///
    /// # Errors
    /// No slot became free in time.
    pub(crate) async fn slot(&self, tenant: Tenant, wait_max: Duration) -> Result<FairSlot, NoSlot> {
        let waiting = {
            let mut queue = lock(&self.queue);
            if queue.free > 0 {
                queue.free -= 1;
                return Ok(FairSlot { queue: Arc::clone(&self.queue) });
            }
            queue.push(tenant)
        };
        let slot = tokio::time::timeout(wait_max, waiting).await.map_err(|_| NoSlot)?;
        Ok(slot.expect("invariant: a request in the queue gets a slot unless it is canceled"))
    }
}

impl Queue {
    fn push(&mut self, tenant: Tenant) -> oneshot::Receiver<FairSlot> {
        self.remove_canceled();
        let (sender, receiver) = oneshot::channel();
        match self.tenants.iter_mut().find(|(other, _)| *other == tenant) {
            Some((_, requests)) => requests.push_back(sender),
            None => self.tenants.push_back((tenant, VecDeque::from([sender]))),
        }
        receiver
    }

    /// Removes the requests that were canceled. They would accumulate while no slot becomes free, for example if the
    /// requests in all slots read from a file system that hangs.
    fn remove_canceled(&mut self) {
        self.tenants.retain_mut(|(_, requests)| {
            requests.retain(|request| !request.is_closed());
            !requests.is_empty()
        });
    }

    /// Removes the request whose turn is next and moves its tenant behind the others. Canceled requests do not use a
    /// turn.
    fn pop(&mut self) -> Option<oneshot::Sender<FairSlot>> {
        loop {
            let (tenant, mut requests) = self.tenants.pop_front()?;
            requests.retain(|request| !request.is_closed());
            let Some(next) = requests.pop_front() else { continue };
            if !requests.is_empty() {
                self.tenants.push_back((tenant, requests));
            }
            return Some(next);
        }
    }
}

impl Drop for FairSlot {
    fn drop(&mut self) {
        let next = {
            let mut queue = lock(&self.queue);
            let next = queue.pop();
            queue.free += usize::from(next.is_none());
            next
        };
        if let Some(next) = next {
            // If the request was canceled in the meantime, sending fails, and dropping the slot passes it to the next
            // request.
            let _ = next.send(Self { queue: Arc::clone(&self.queue) });
        }
    }
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use futures_util::future::LocalBoxFuture;

    use super::*;

    const WAIT_MAX: Duration = Duration::from_secs(30);

    fn tenant(number: u32) -> Tenant {
        Tenant::parse(&format!("{number:032x}")).unwrap()
    }

    #[tokio::test]
    async fn tenants_take_turns() {
        let slots = FairSlots::new(1);
        let mut slot = slots.slot(tenant(1), WAIT_MAX).await.ok();
        let mut waiting: Vec<(&str, LocalBoxFuture<'_, _>)> =
            [("a1", 1), ("a2", 1), ("a3", 1), ("a4", 1), ("b1", 2), ("b2", 2), ("c1", 3)]
                .map(|(name, number)| (name, slots.slot(tenant(number), WAIT_MAX).boxed_local()))
                .into();
        for (_, request) in &mut waiting {
            assert!(request.now_or_never().is_none());
        }
        // A request that was canceled is skipped.
        drop(waiting.remove(1));
        let mut order = Vec::new();
        while !waiting.is_empty() {
            drop(slot.take());
            let next = waiting
                .iter_mut()
                .enumerate()
                .find_map(|(index, (_, request))| Some((index, request.now_or_never()?)));
            let (index, granted) = next.expect("a waiting request gets the free slot");
            slot = granted.ok();
            order.push(waiting.remove(index).0);
        }
        assert_eq!(order, ["a1", "b1", "c1", "a3", "b2", "a4"]);
        drop(slot);
        slots.slot(tenant(1), WAIT_MAX).now_or_never().expect("a slot is free").unwrap();
    }

    #[tokio::test]
    async fn canceled_requests_do_not_accumulate_while_no_slot_becomes_free() {
        let slots = FairSlots::new(1);
        let _slot = slots.slot(tenant(1), WAIT_MAX).await.unwrap();
        let mut waiting = Box::pin(slots.slot(tenant(1), WAIT_MAX));
        assert!(waiting.as_mut().now_or_never().is_none());
        for number in 0..100 {
            assert!(slots.slot(tenant(1 + number % 3), WAIT_MAX).now_or_never().is_none());
        }
        let count: usize = lock(&slots.queue).tenants.iter().map(|(_, requests)| requests.len()).sum();
        assert!(count <= 2, "{count} requests are in the queue, but only one waits");
    }
}

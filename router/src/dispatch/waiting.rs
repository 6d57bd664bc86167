//! Waiting for a place: in a model's queue while its replicas are full, and in the waiting room while there is
//! no replica at all. Who waits is woken by `pump`; nothing is picked here but by it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::timeout_at;

use super::{Attempt, Dispatch, Placed, Wanted};
use crate::fleet::{Fleet, Waiter, Waiting};
use crate::queue::{self, QueueConfig, RETRY_AFTER_MIN, Ticket};
use crate::replicas::Replica;

/// How often a request that waits for a replica looks whether one is to be trusted again.
const ROOM_TICK: Duration = Duration::from_millis(200);

/// Why a request has no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The queue is full.
    QueueFull {
        /// When there should be room.
        retry_after: Duration,
    },
    /// It has waited as long as it may for room.
    WaitedTooLong {
        /// When there should be room.
        retry_after: Duration,
    },
    /// There is no replica, and none came in time, or as many wait for one as may.
    NoReplica,
    /// The one replica that would do is gone, or does not serve the model.
    Gone,
}

impl Dispatch {
    /// Waits in the queue.
    pub(super) async fn queue(
        self: &Arc<Self>,
        fleet: &Arc<Fleet>,
        wanted: Wanted,
        waiter: queue::Waiter,
    ) -> Result<Placed, Refused> {
        let now = Instant::now();
        let (config, wait_max) = self.queue_config();
        let (wake, mut woken) = oneshot::channel();
        let pushed = fleet.with_waiting(|Waiting { queue, waiters }| {
            queue.configure(config);
            let ticket = queue.push(waiter, now)?;
            waiters.insert(ticket, Waiter { wanted, wake });
            Ok(ticket)
        });
        let ticket = pushed.map_err(|queue::QueueFull { retry_after }| Refused::QueueFull { retry_after })?;
        let place_in_queue = InQueue::new(self, fleet, ticket);
        // There may have been room between the attempt and the queue.
        self.pump(fleet);
        let deadline = waiter.deadline.unwrap_or(now + wait_max).min(now + wait_max);
        let placed = match timeout_at(deadline.into(), &mut woken).await {
            Ok(Ok(placed)) => Some(placed),
            // It may have been woken in the last moment.
            _ => woken.try_recv().ok(),
        };
        drop(place_in_queue);
        self.metrics.queue_wait(now.elapsed());
        placed.ok_or_else(|| {
            let retry_after = fleet.with_waiting(|waiting| waiting.queue.retry_after(Instant::now()));
            if self.is_able(fleet) { Refused::WaitedTooLong { retry_after } } else { Refused::NoReplica }
        })
    }

    fn queue_config(&self) -> (QueueConfig, Duration) {
        let settings = self.settings.load();
        let config = QueueConfig {
            requests_max: settings.queue_requests as usize,
            tokens_max: settings.queue_tokens,
            wait_max: settings.queue_timeout,
            ..QueueConfig::default()
        };
        (config, settings.queue_timeout)
    }

    /// Waits for a replica that takes requests.
    pub(super) async fn await_replica(
        self: &Arc<Self>,
        fleet: &Arc<Fleet>,
        mut wanted: Wanted,
    ) -> Result<Placed, Refused> {
        let deadline = tokio::time::Instant::now() + self.settings.load().waiting_room_timeout;
        let _room = self.enter_room()?;
        let mut changes = self.replicas.changes();
        loop {
            let changed =
                timeout_at(deadline.min(tokio::time::Instant::now() + ROOM_TICK), changes.changed());
            // Sooner or later replicas that failed are trusted again, of which nobody tells.
            let _ = changed.await;
            // What it was tried on may have recovered, and there is nothing else.
            wanted.tried.clear();
            if let Attempt::Placed(placed) = self.try_place(fleet, &wanted, Instant::now()) {
                return Ok(placed);
            }
            if tokio::time::Instant::now() >= deadline {
                return Err(Refused::NoReplica);
            }
        }
    }

    /// Waits until a replica serves `model`; `None` once it is known that none does.
    ///
    /// # Errors
    /// Nothing is known in time.
    pub async fn await_model(&self, model: Option<&str>) -> Result<Option<Arc<Fleet>>, Refused> {
        let find = || match model {
            Some(model) => self.replicas.fleet(model),
            None => self.replicas.only_fleet(),
        };
        if let Some(fleet) = find() {
            return Ok(Some(fleet));
        }
        if self.replicas.are_known() {
            return Ok(None);
        }
        let deadline = tokio::time::Instant::now() + self.settings.load().waiting_room_timeout;
        let _room = self.enter_room()?;
        let mut changes = self.replicas.changes();
        loop {
            if let Some(fleet) = find() {
                return Ok(Some(fleet));
            }
            if self.replicas.are_known() {
                return Ok(None);
            }
            if timeout_at(deadline, changes.changed()).await.is_err() {
                return Err(Refused::NoReplica);
            }
        }
    }

    /// A place at the one replica that will do. If it did not answer, it may be about to come back.
    pub(super) async fn place_at(
        self: &Arc<Self>,
        fleet: &Arc<Fleet>,
        replica: &Arc<Replica>,
        wanted: &Wanted,
    ) -> Result<Placed, Refused> {
        if wanted.tried.contains(&replica.identity) {
            tokio::time::sleep(ROOM_TICK).await;
        }
        if replica.is_removed() {
            return Err(Refused::Gone);
        }
        self.book_at(fleet, wanted, Instant::now()).ok_or(Refused::Gone)
    }

    /// Waits until it is known which replica keeps what has this number in its name; `None` once it is known that
    /// none does.
    ///
    /// # Errors
    /// Not all is known in time.
    pub async fn await_keeper(&self, keeper: u64) -> Result<Option<Arc<Replica>>, Refused> {
        if let Some(replica) = self.replicas.keeper(keeper) {
            return Ok(Some(replica));
        }
        let deadline = tokio::time::Instant::now() + self.settings.load().waiting_room_timeout;
        let mut changes = self.replicas.changes();
        let mut room = None;
        loop {
            if let Some(replica) = self.replicas.keeper(keeper) {
                return Ok(Some(replica));
            }
            if self.replicas.are_known() {
                return Ok(None);
            }
            if room.is_none() {
                room = Some(self.enter_room()?);
            }
            if timeout_at(deadline, changes.changed()).await.is_err() {
                return Err(Refused::NoReplica);
            }
        }
    }

    fn enter_room(&self) -> Result<InRoom<'_>, Refused> {
        let room = InRoom(&self.room);
        let before = self.room.fetch_add(1, Ordering::Relaxed);
        if before >= self.settings.load().waiting_room as usize { Err(Refused::NoReplica) } else { Ok(room) }
    }
}

/// A request in the queue; dropping it takes it out.
struct InQueue<'a> {
    dispatch: &'a Arc<Dispatch>,
    fleet: &'a Arc<Fleet>,
    ticket: Ticket,
}

impl<'a> InQueue<'a> {
    fn new(dispatch: &'a Arc<Dispatch>, fleet: &'a Arc<Fleet>, ticket: Ticket) -> Self {
        dispatch.waiting.fetch_add(1, Ordering::AcqRel);
        Self { dispatch, fleet, ticket }
    }
}

impl Drop for InQueue<'_> {
    fn drop(&mut self) {
        let removed = self.fleet.with_waiting(|Waiting { queue, waiters }| {
            queue.cancel(self.ticket, Instant::now());
            waiters.remove(&self.ticket)
        });
        self.dispatch.waiting.fetch_sub(1, Ordering::AcqRel);
        drop(removed);
        // It may have been what those behind it waited for.
        self.dispatch.pump(self.fleet);
    }
}

/// A request in the waiting room.
struct InRoom<'a>(&'a AtomicUsize);

impl Drop for InRoom<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Refused {
    /// When the client may come again.
    #[must_use]
    pub fn retry_after(self) -> Duration {
        match self {
            Self::QueueFull { retry_after } | Self::WaitedTooLong { retry_after } => retry_after,
            Self::NoReplica | Self::Gone => RETRY_AFTER_MIN,
        }
    }
}

//! Waiting for a place in a model's queue: while its replicas are full, or while there is none (which has a limit
//! and a time-out of its own, the waiting room's). Both wait in the same order, so that a replica that appears
//! serves those who waited for it before newcomers. Requests that wait are woken by `pump`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::timeout_at;

use super::{Dispatch, Placed, Wanted};
use crate::fleet::{Fleet, Waiter};
use crate::queue::{self, QueueConfig, RETRY_AFTER_MIN, Ticket};
use crate::replicas::Replica;

/// The pause before a request is sent to a replica that has just failed it, if there is no other.
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
    /// Waits in the queue until a replica has room.
    pub(super) async fn await_room(
        self: &Arc<Self>,
        fleet: &Arc<Fleet>,
        wanted: Wanted,
        waiter: queue::Waiter,
    ) -> Result<Placed, Refused> {
        let config = self.queue_config();
        let mut place_in_queue = self.enqueue(fleet, wanted, waiter, config, Reason::Full)?;
        place_in_queue.wait(deadline(waiter, config.wait_max)).await;
        place_in_queue.leave()
    }

    /// Waits in the queue while no replica takes requests. When one does, it is served before those who come later,
    /// and if that replica is full it goes on waiting as [`Self::await_room`] does.
    pub(super) async fn await_replica(
        self: &Arc<Self>,
        fleet: &Arc<Fleet>,
        mut wanted: Wanted,
        waiter: queue::Waiter,
    ) -> Result<Placed, Refused> {
        let entered = Instant::now();
        let replica_deadline = deadline(waiter, self.settings.load().waiting_room_timeout);
        let room = self.enter_room()?;
        if !wanted.tried.is_empty() {
            // Only replicas that have just failed are left: wait a moment before they are tried again.
            let mut changes = self.replicas.changes();
            let _ = tokio::time::timeout(ROOM_TICK, changes.changed()).await;
            wanted.tried.clear();
        }
        let config = self.queue_config();
        // The room's own limit counts here, not the queue's.
        let unlimited = QueueConfig { requests_max: usize::MAX, ..config };
        let mut place_in_queue = self.enqueue(fleet, wanted, waiter, unlimited, Reason::NoReplica(room))?;
        if !place_in_queue.wait(replica_deadline).await && self.is_able(fleet) {
            place_in_queue.is_full();
            place_in_queue.wait(deadline(waiter, config.wait_max).min(entered + config.wait_max)).await;
        }
        place_in_queue.leave()
    }

    fn enqueue<'a>(
        self: &'a Arc<Self>,
        fleet: &'a Arc<Fleet>,
        wanted: Wanted,
        waiter: queue::Waiter,
        config: QueueConfig,
        reason: Reason<'a>,
    ) -> Result<InQueue<'a>, Refused> {
        let since = Instant::now();
        let (wake, woken) = oneshot::channel();
        let pushed = fleet.with_waiting(|waiting| {
            waiting.queue.configure(config);
            let ticket = waiting.queue.push(waiter, since)?;
            waiting.waiters.insert(ticket, Waiter { wanted, wake, since });
            Ok(ticket)
        });
        let ticket = pushed.map_err(|queue::QueueFull { retry_after }| Refused::QueueFull { retry_after })?;
        self.waiting.fetch_add(1, Ordering::AcqRel);
        self.held.fetch_add(usize::from(reason.is_no_replica()), Ordering::AcqRel);
        let place_in_queue =
            InQueue { dispatch: self, fleet, ticket, woken, placed: None, reason, since, has_left: false };
        // There may have been room between the attempt and the queue.
        self.pump_newcomer(fleet, ticket);
        Ok(place_in_queue)
    }

    fn queue_config(&self) -> QueueConfig {
        let settings = self.settings.load();
        QueueConfig {
            requests_max: settings.queue_requests as usize,
            tokens_max: settings.queue_tokens,
            wait_max: settings.queue_timeout,
            ..QueueConfig::default()
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

/// The moment at which a request that waits from now on is refused.
fn deadline(waiter: queue::Waiter, wait_max: Duration) -> Instant {
    let latest = Instant::now() + wait_max;
    waiter.deadline.map_or(latest, |wanted| wanted.min(latest))
}

/// Why a request is in the queue.
enum Reason<'a> {
    /// All replicas are full.
    Full,
    /// No replica takes requests. It counts against the limit of such requests.
    NoReplica(#[expect(dead_code, reason = "dropping it makes room for another")] InRoom<'a>),
}

impl Reason<'_> {
    fn is_no_replica(&self) -> bool {
        matches!(self, Self::NoReplica(_))
    }
}

/// A request in the queue; dropping it takes it out.
struct InQueue<'a> {
    dispatch: &'a Arc<Dispatch>,
    fleet: &'a Arc<Fleet>,
    ticket: Ticket,
    woken: oneshot::Receiver<Placed>,
    placed: Option<Placed>,
    reason: Reason<'a>,
    since: Instant,
    has_left: bool,
}

impl InQueue<'_> {
    /// Waits for a place until `deadline`, and returns whether the request has one.
    async fn wait(&mut self, deadline: Instant) -> bool {
        if self.placed.is_none() {
            self.placed = timeout_at(deadline.into(), &mut self.woken).await.ok().and_then(Result::ok);
        }
        self.placed.is_some()
    }

    /// From now on it waits because all replicas are full.
    fn is_full(&mut self) {
        if self.reason.is_no_replica() {
            self.dispatch.held.fetch_sub(1, Ordering::AcqRel);
            self.reason = Reason::Full;
        }
    }

    /// Takes the request out, with its place if it has one.
    fn leave(mut self) -> Result<Placed, Refused> {
        self.remove();
        // It may have got one in the last moment.
        let placed = self.placed.take().or_else(|| self.woken.try_recv().ok());
        self.dispatch.metrics.queue_wait(self.since.elapsed());
        placed.ok_or_else(|| {
            let retry_after = self.fleet.with_waiting(|waiting| waiting.queue.retry_after(Instant::now()));
            if self.dispatch.is_able(self.fleet) {
                Refused::WaitedTooLong { retry_after }
            } else {
                Refused::NoReplica
            }
        })
    }

    fn remove(&mut self) {
        if std::mem::replace(&mut self.has_left, true) {
            return;
        }
        let (removed, was_first) = self.fleet.with_waiting(|waiting| {
            let was_first = waiting.queue.head() == Some(self.ticket);
            (waiting.cancel(self.ticket, Instant::now()), was_first)
        });
        self.dispatch.waiting.fetch_sub(1, Ordering::AcqRel);
        self.dispatch.held.fetch_sub(usize::from(self.reason.is_no_replica()), Ordering::AcqRel);
        drop(removed);
        if was_first {
            // It may have been what those behind it waited for.
            self.dispatch.pump(self.fleet, None);
        }
    }
}

impl Drop for InQueue<'_> {
    fn drop(&mut self) {
        self.remove();
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

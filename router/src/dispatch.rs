//! Assigns replicas to requests. A request gets a [`Placement`] immediately if a replica has room, and otherwise waits
//! in the queue of its model. The proxy sends the request; this module sends nothing.
//!
//! ```text
//! place ─► Picker::book ─► a Placement (RAII) ─► the proxy sends the request
//!   └► queue (all replicas are full, or there is none) ─► place_waiting, when there may be room ─► a Placement
//! ```
//!
//! Requests that are waiting because all replicas are full and requests that are waiting because the model has no
//! replica are in the same queue, so that a new replica serves the requests that have waited for it before newcomers.
//! Requests of the second kind have a separate limit and timeout: those of the waiting room.
//!
//! A load report, or the end of a request, frees room at one replica. Only this replica is then offered to the waiting
//! requests, so the work of an event does not grow with the number of replicas. Room that no event announces (for
//! example, because a report has become too old or an ejection has ended) is used by
//! [`Dispatcher::place_all_waiting`], which runs periodically.
//!
//! The module `backfill` decides which waiting request gets the room, and `picker` decides which replica a request
//! gets.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::timeout_at;

use crate::args::Settings;
use crate::health::{Health, RetryBudget, SentRequest};
use crate::ledger::BookingGuard;
use crate::metrics::Metrics;
use crate::queue::{QueueConfig, QueueFull, QueuedRequest, Ticket};
use crate::replica::Replica;
use crate::replicas::Replicas;
use crate::served_model::ServedModel;
use crate::waiting::{Assignment, PlacementRequest, Waiter};

mod backfill;
mod pick_log;
mod picker;

use backfill::{Backfill, BackfillResult};
pub use pick_log::{Pick, PickLog, ScoredCandidate};
use picker::{Picker, Search, SearchResult};

/// Number of unused retries that the router saves under `--retry-budget-percent`. The router starts with this number.
///
/// If exceeded: further unused retries are lost.
const SAVED_RETRIES_MAX: u32 = 256;
/// The pause before the router sends a request again to a replica that failed to answer it, if the model has no other
/// replica.
const FAILED_REPLICA_PAUSE: Duration = Duration::from_millis(200);

/// Assigns replicas to requests. The process has one dispatcher.
#[derive(Debug)]
pub struct Dispatcher {
    /// The replicas among which the dispatch chooses.
    pub replicas: Replicas,
    /// The secret seed for the hashes of prompts.
    pub seed: u64,
    settings: Settings,
    metrics: Metrics,
    picker: Picker,
    retries: Mutex<RetryBudget>,
    /// The number of requests in the queues of all models, including those that wait for a replica to become
    /// available.
    queued: AtomicUsize,
    /// The number of queued requests that wait for a replica to appear.
    queued_without_replica: AtomicUsize,
    /// The number of requests that wait for a replica to appear, in a queue or because their model is not known yet.
    in_waiting_room: AtomicUsize,
}

/// The reason why a request got no replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementError {
    /// The queue is full.
    QueueFull {
        /// The time after which a replica is expected to have room.
        retry_after: Duration,
    },
    /// The request has waited for room until its timeout.
    QueueTimeout {
        /// The time after which a replica is expected to have room.
        retry_after: Duration,
    },
    /// The model has no replica, and either none appeared in time or the waiting room is full.
    NoReplica,
    /// No replica became available within the time that the client has set.
    ClientTimeout(WaitTarget),
    /// The only replica that could answer the request is gone, or does not serve the model.
    ReplicaGone,
}

/// The replicas that a request without a replica waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitTarget {
    /// The replicas of the model.
    Model,
    /// The replica that has the stored object.
    StoredObject,
}

impl Dispatcher {
    /// A dispatch without replicas.
    pub fn new(settings: Settings, metrics: Metrics) -> Arc<Self> {
        // The standard library seeds the hash from the random numbers of the operating system.
        let random = RandomState::new();
        let retry_budget_percent = settings.load().retry_budget_percent;
        Arc::new(Self {
            replicas: Replicas::new(random.hash_one("router").max(1)),
            seed: random.hash_one("prompts"),
            picker: Picker::new(Arc::clone(&settings), metrics.clone()),
            settings,
            metrics,
            retries: Mutex::new(RetryBudget::new(retry_budget_percent, SAVED_RETRIES_MAX)),
            queued: AtomicUsize::new(0),
            queued_without_replica: AtomicUsize::new(0),
            in_waiting_room: AtomicUsize::new(0),
        })
    }

    /// The health of the replicas, as determined from their answers.
    pub fn health(&self) -> MutexGuard<'_, Health> {
        self.picker.health()
    }

    /// The log of the last picks.
    pub fn pick_log(&self) -> MutexGuard<'_, PickLog> {
        self.picker.log()
    }

    /// The settings that are in effect now.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The metrics of the process.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The number of requests that wait because all replicas are full.
    pub fn queued(&self) -> usize {
        let without_replica = self.queued_without_replica.load(Ordering::Relaxed);
        self.queued.load(Ordering::Relaxed).saturating_sub(without_replica)
    }

    /// The number of requests that wait for a replica to appear.
    pub fn in_waiting_room(&self) -> usize {
        self.in_waiting_room.load(Ordering::Relaxed)
    }

    /// Counts a request toward the retry budget.
    pub fn deposit_retry(&self) {
        self.lock_retries().deposit();
    }

    /// Whether the retry budget permits another retry; if so, the retry is charged to it.
    pub fn withdraw_retry(&self) -> bool {
        self.lock_retries().withdraw()
    }

    fn lock_retries(&self) -> MutexGuard<'_, RetryBudget> {
        self.retries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies settings that have changed.
    pub fn reconfigure(self: &Arc<Self>) {
        let retry_budget_percent = self.settings.load().retry_budget_percent;
        self.lock_retries().configure(retry_budget_percent);
        self.place_all_waiting();
    }

    /// Whether any replica of a model accepts requests, as far as the router knows.
    pub fn is_available(&self, served_model: &ServedModel) -> bool {
        self.picker.is_available(served_model)
    }

    /// Books a replica for a request, after waiting for one if necessary.
    ///
    /// # Errors
    /// The request got no replica in time, or is not allowed to wait.
    ///
    /// # Cancel safety
    /// Dropping the future removes the request from the queue. If a replica has just been booked for it, the next
    /// request gets that replica.
    pub async fn place(
        self: &Arc<Self>,
        served_model: &Arc<ServedModel>,
        request: PlacementRequest,
        queued: QueuedRequest,
    ) -> Result<Placement, PlacementError> {
        if let Some(replica) = request.required_replica.clone() {
            return self.place_at(served_model, &replica, &request).await;
        }
        // A new request queues behind those that wait. A retried request, which has waited already, does not.
        if served_model.waiters() == 0 || !request.failed_replicas.is_empty() {
            match self.picker.book(Search::everywhere(served_model, &request), Instant::now()) {
                SearchResult::Booked(assignment) => {
                    return Ok(Placement::new(self, served_model, assignment));
                }
                SearchResult::NoReplica => return self.await_replica(served_model, request, queued).await,
                SearchResult::Full => {}
            }
        } else if !self.is_available(served_model) {
            return self.await_replica(served_model, request, queued).await;
        }
        self.await_room(served_model, request, queued).await
    }

    /// Books the only replica that can answer the request. If the replica has just failed to answer, it may be about to
    /// restart.
    async fn place_at(
        self: &Arc<Self>,
        served_model: &Arc<ServedModel>,
        replica: &Arc<Replica>,
        request: &PlacementRequest,
    ) -> Result<Placement, PlacementError> {
        if request.failed_replicas.contains(&replica.identity) {
            tokio::time::sleep(FAILED_REPLICA_PAUSE).await;
        }
        if replica.is_removed() {
            return Err(PlacementError::ReplicaGone);
        }
        let assignment = self.picker.book_required(served_model, request, Instant::now());
        let assignment = assignment.ok_or(PlacementError::ReplicaGone)?;
        Ok(Placement::new(self, served_model, assignment))
    }

    /// Waits in the queue until a replica has room.
    async fn await_room(
        self: &Arc<Self>,
        served_model: &Arc<ServedModel>,
        request: PlacementRequest,
        queued: QueuedRequest,
    ) -> Result<Placement, PlacementError> {
        let config = self.queue_config();
        let mut queue_guard = self.enqueue(served_model, request, queued, config, WaitReason::Full)?;
        let deadline = Deadline::after(config.queue_timeout, queued);
        queue_guard.wait(deadline).await;
        queue_guard.leave(deadline)
    }

    /// Waits in the queue while no replica accepts requests. When a replica appears, the request is served before later
    /// ones; if that replica is full, the request continues to wait as in [`Self::await_room`].
    async fn await_replica(
        self: &Arc<Self>,
        served_model: &Arc<ServedModel>,
        mut request: PlacementRequest,
        queued: QueuedRequest,
    ) -> Result<Placement, PlacementError> {
        let entered = Instant::now();
        let mut deadline = Deadline::after(self.settings.load().waiting_room_timeout, queued);
        let room = self.enter_waiting_room()?;
        if !request.failed_replicas.is_empty() {
            // Only replicas that have just failed are left. Pause before they are tried again.
            let mut changes = self.replicas.changes();
            let _ = tokio::time::timeout(FAILED_REPLICA_PAUSE, changes.changed()).await;
            request.failed_replicas.clear();
        }
        let config = self.queue_config();
        // The limit of the waiting room applies instead of the limits of the queue.
        let unlimited = QueueConfig { queue_requests: usize::MAX, queue_tokens: u64::MAX, ..config };
        let mut queue_guard =
            self.enqueue(served_model, request, queued, unlimited, WaitReason::NoReplica(room))?;
        if !queue_guard.wait(deadline).await && self.is_available(served_model) {
            queue_guard.set_full();
            deadline = Deadline::at(entered + config.queue_timeout, queued);
            queue_guard.wait(deadline).await;
        }
        queue_guard.leave(deadline)
    }

    fn enqueue<'a>(
        self: &'a Arc<Self>,
        served_model: &'a Arc<ServedModel>,
        request: PlacementRequest,
        queued: QueuedRequest,
        config: QueueConfig,
        reason: WaitReason<'a>,
    ) -> Result<QueueGuard<'a>, PlacementError> {
        let since = Instant::now();
        let (wake, woken) = oneshot::channel();
        let pushed = served_model.with_waiting(|waiting| {
            waiting.queue.configure(config);
            let ticket = waiting.queue.push(queued, since)?;
            waiting.waiters.insert(ticket, Waiter { request, wake, since });
            Ok(ticket)
        });
        let ticket = pushed.map_err(|QueueFull { retry_after }| PlacementError::QueueFull { retry_after })?;
        self.queued.fetch_add(1, Ordering::AcqRel);
        self.queued_without_replica.fetch_add(usize::from(reason.is_no_replica()), Ordering::AcqRel);
        let queue_guard = QueueGuard {
            dispatcher: self,
            served_model,
            ticket,
            woken,
            placement: None,
            reason,
            since,
            has_left: false,
        };
        // Room may have appeared between the search and the moment when the request entered the queue.
        self.place_newcomer(served_model, ticket);
        Ok(queue_guard)
    }

    fn queue_config(&self) -> QueueConfig {
        let settings = self.settings.load();
        QueueConfig {
            queue_requests: settings.queue_requests as usize,
            queue_tokens: settings.queue_tokens,
            queue_timeout: settings.queue_timeout,
            ..QueueConfig::default()
        }
    }

    /// Waits until a replica serves `model`. Returns `None` if none serves it once every replica has reported its
    /// models, or if only some have reported them within the timeout of the waiting room: a replica that cannot start
    /// must not make every wrong name wait for it.
    ///
    /// # Errors
    /// No replica has reported its models in time, or the waiting room is full and none has. If the client has set a
    /// shorter timeout, some replicas may have reported their models: another may still serve this one.
    pub async fn await_model(
        &self,
        model: Option<&str>,
        queued: QueuedRequest,
    ) -> Result<Option<Arc<ServedModel>>, PlacementError> {
        let find = |replicas: &Replicas| match model {
            Some(model) => replicas.served_model(model),
            None => replicas.only_served_model(),
        };
        if let Some(served_model) = find(&self.replicas) {
            return Ok(Some(served_model));
        }
        let deadline = Deadline::after(self.settings.load().waiting_room_timeout, queued);
        match self.await_known(WaitTarget::Model, deadline, find).await {
            Err(PlacementError::NoReplica)
                if !deadline.is_set_by_client && self.replicas.has_any_reported() =>
            {
                Ok(None)
            }
            result => result,
        }
    }

    /// Waits until a replica reports that it has the store with this number. Returns `None` once every replica has
    /// reported its store and none has this one.
    ///
    /// # Errors
    /// Not every replica has reported its store in time, or the waiting room is full.
    pub async fn await_store(
        &self,
        store_id: u64,
        queued: QueuedRequest,
    ) -> Result<Option<Arc<Replica>>, PlacementError> {
        let deadline = Deadline::after(self.settings.load().waiting_room_timeout, queued);
        self.await_known(WaitTarget::StoredObject, deadline, |replicas| replicas.by_store(store_id)).await
    }

    /// Waits until `find` returns a result, or every replica has reported.
    ///
    /// # Errors
    /// Not every replica has reported by the deadline, or the waiting room is full.
    async fn await_known<T>(
        &self,
        target: WaitTarget,
        deadline: Deadline,
        find: impl Fn(&Replicas) -> Option<T>,
    ) -> Result<Option<T>, PlacementError> {
        let mut changes = self.replicas.changes();
        let mut room = None;
        loop {
            if let Some(result) = find(&self.replicas) {
                return Ok(Some(result));
            }
            if self.replicas.have_all_reported() {
                return Ok(None);
            }
            if room.is_none() {
                room = Some(self.enter_waiting_room()?);
            }
            if timeout_at(deadline.at.into(), changes.changed()).await.is_err() {
                return Err(deadline.no_replica(target));
            }
        }
    }

    fn enter_waiting_room(&self) -> Result<WaitingRoomGuard<'_>, PlacementError> {
        let guard = WaitingRoomGuard(&self.in_waiting_room);
        let before = self.in_waiting_room.fetch_add(1, Ordering::Relaxed);
        let limit = self.settings.load().waiting_room as usize;
        if before >= limit { Err(PlacementError::NoReplica) } else { Ok(guard) }
    }

    /// Assigns replicas with room to the waiting requests of all models.
    pub fn place_all_waiting(self: &Arc<Self>) {
        if self.queued.load(Ordering::Acquire) == 0 {
            return;
        }
        for served_model in self.replicas.served_models().values() {
            self.place_waiting(served_model, None);
        }
    }

    /// Assigns the room that has appeared at `replica` to the requests that wait for a model that it serves.
    pub fn place_waiting_at(self: &Arc<Self>, replica: &Arc<Replica>) {
        if self.queued.load(Ordering::Acquire) == 0 || replica.is_removed() {
            return;
        }
        for served_model in self.replicas.served_models_of(replica) {
            self.place_waiting(&served_model, Some(replica));
        }
    }

    /// Assigns replicas to the requests that wait for a model until no room is left. Considers all replicas, or only
    /// `at`.
    fn place_waiting(self: &Arc<Self>, served_model: &Arc<ServedModel>, at: Option<&Arc<Replica>>) {
        while served_model.waiters() > 0 && self.place_next_waiting(served_model, at, Instant::now()) {}
    }

    /// Tries to place the next requests until one of them leaves the queue. Returns whether more room may be available.
    fn place_next_waiting(
        self: &Arc<Self>,
        served_model: &Arc<ServedModel>,
        at: Option<&Arc<Replica>>,
        now: Instant,
    ) -> bool {
        let backfill = Backfill { picker: &self.picker, served_model, now };
        let result = served_model.with_waiting(|waiting| backfill.place_next(waiting, at));
        self.settle(served_model, result)
    }

    /// Tries to place a request that has just entered the queue.
    fn place_newcomer(self: &Arc<Self>, served_model: &Arc<ServedModel>, ticket: Ticket) {
        let backfill = Backfill { picker: &self.picker, served_model, now: Instant::now() };
        let result = served_model.with_waiting(|waiting| backfill.place_newcomer(waiting, ticket));
        if self.settle(served_model, result) {
            self.place_waiting(served_model, None);
        }
    }

    /// Completes a placement outside of the lock of the queue. Returns whether the queue has changed.
    fn settle(self: &Arc<Self>, served_model: &Arc<ServedModel>, result: BackfillResult) -> bool {
        match result {
            BackfillResult::Dequeued { unclaimed } => {
                // Dropping an unclaimed placement frees the room for the next request.
                drop(unclaimed.map(|assignment| Placement::new(self, served_model, assignment)));
                true
            }
            BackfillResult::TryAgain => true,
            BackfillResult::Full | BackfillResult::NoReplica => false,
        }
    }
}

/// The time until which a request waits.
#[derive(Clone, Copy, Debug)]
struct Deadline {
    at: Instant,
    /// Whether the timeout of the client ends the wait, and not a timeout of the router.
    is_set_by_client: bool,
}

impl Deadline {
    /// The deadline of a request that begins to wait now and has this timeout.
    fn after(timeout: Duration, queued: QueuedRequest) -> Self {
        Self::at(Instant::now() + timeout, queued)
    }

    /// The deadline of a request that waits until `latest`, or until its client does not wait any longer.
    fn at(latest: Instant, queued: QueuedRequest) -> Self {
        match queued.deadline {
            Some(deadline) if deadline <= latest => Self { at: deadline, is_set_by_client: true },
            _ => Self { at: latest, is_set_by_client: false },
        }
    }

    /// The error of a request for which no replica was available until the deadline.
    fn no_replica(self, target: WaitTarget) -> PlacementError {
        if self.is_set_by_client { PlacementError::ClientTimeout(target) } else { PlacementError::NoReplica }
    }
}

/// The reason why a request is in the queue.
enum WaitReason<'a> {
    /// All replicas are full.
    Full,
    /// No replica accepts requests. The request counts toward the limit of the waiting room.
    NoReplica(
        #[expect(dead_code, reason = "dropping it makes room for another request")] WaitingRoomGuard<'a>,
    ),
}

impl WaitReason<'_> {
    fn is_no_replica(&self) -> bool {
        matches!(self, Self::NoReplica(_))
    }
}

/// A request in the queue. Dropping it removes the request.
struct QueueGuard<'a> {
    dispatcher: &'a Arc<Dispatcher>,
    served_model: &'a Arc<ServedModel>,
    ticket: Ticket,
    woken: oneshot::Receiver<Assignment>,
    placement: Option<Placement>,
    reason: WaitReason<'a>,
    since: Instant,
    has_left: bool,
}

impl QueueGuard<'_> {
    /// Waits for a replica until `deadline`. Returns whether the request has one.
    async fn wait(&mut self, deadline: Deadline) -> bool {
        if self.placement.is_none() {
            let assignment = timeout_at(deadline.at.into(), &mut self.woken).await.ok().and_then(Result::ok);
            self.placement =
                assignment.map(|assignment| Placement::new(self.dispatcher, self.served_model, assignment));
        }
        self.placement.is_some()
    }

    /// Records that the request now waits because all replicas are full.
    fn set_full(&mut self) {
        if self.reason.is_no_replica() {
            self.dispatcher.queued_without_replica.fetch_sub(1, Ordering::AcqRel);
            self.reason = WaitReason::Full;
        }
    }

    /// Leaves the queue, and returns the assignment if the request got a replica before `deadline`.
    fn leave(mut self, deadline: Deadline) -> Result<Placement, PlacementError> {
        self.remove();
        let placement = self.placement.take().or_else(|| self.late_placement());
        self.dispatcher.metrics.record_queue_time(self.since.elapsed());
        placement.ok_or_else(|| {
            let retry_after =
                self.served_model.with_waiting(|waiting| waiting.queue.retry_after(Instant::now()));
            if self.dispatcher.is_available(self.served_model) {
                PlacementError::QueueTimeout { retry_after }
            } else {
                deadline.no_replica(WaitTarget::Model)
            }
        })
    }

    fn remove(&mut self) {
        if std::mem::replace(&mut self.has_left, true) {
            return;
        }
        let (waiter, was_first) = self.served_model.with_waiting(|waiting| {
            let was_first = waiting.queue.head() == Some(self.ticket);
            (waiting.cancel(self.ticket, Instant::now()), was_first)
        });
        self.dispatcher.queued.fetch_sub(1, Ordering::AcqRel);
        let without_replica = usize::from(self.reason.is_no_replica());
        self.dispatcher.queued_without_replica.fetch_sub(without_replica, Ordering::AcqRel);
        drop(waiter);
        if was_first {
            // The requests behind this one may have waited only because it was first.
            self.dispatcher.place_waiting(self.served_model, None);
        }
    }

    /// The assignment that arrived after the last wait. No assignment arrives after [`Self::remove`].
    fn late_placement(&mut self) -> Option<Placement> {
        let assignment = self.woken.try_recv().ok()?;
        Some(Placement::new(self.dispatcher, self.served_model, assignment))
    }
}

impl Drop for QueueGuard<'_> {
    fn drop(&mut self) {
        self.remove();
        drop(self.late_placement());
    }
}

/// A request in the waiting room. Dropping it makes room for another request.
struct WaitingRoomGuard<'a>(&'a AtomicUsize);

impl Drop for WaitingRoomGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The result of a request with regard to the health of its replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The replica answered, or failed for a reason that it did not cause.
    Answered,
    /// The replica failed to answer.
    Failed,
    /// The replica did not answer in time. This counts as a failure only if the replica has computed nothing in the
    /// meantime.
    TimedOut,
    /// The result says nothing about the replica, for example because the client left.
    Unknown,
}

/// The booking of a request at a replica, which lasts until the last byte of the answer. Dropping it ends the booking
/// and reports the outcome to the health check.
#[derive(Debug)]
pub struct Placement {
    /// The replica that the request is booked at.
    pub replica: Arc<Replica>,
    /// The model that the request is for.
    pub served_model: Arc<ServedModel>,
    dispatcher: Arc<Dispatcher>,
    /// `None` only while the placement is being dropped.
    booking: Option<BookingGuard>,
    sent: SentRequest,
    at: Instant,
    outcome: Outcome,
}

impl Placement {
    fn new(dispatcher: &Arc<Dispatcher>, served_model: &Arc<ServedModel>, assignment: Assignment) -> Self {
        let Assignment { replica, booking, sent } = assignment;
        Self {
            replica,
            served_model: Arc::clone(served_model),
            dispatcher: Arc::clone(dispatcher),
            booking: Some(booking),
            sent,
            at: Instant::now(),
            outcome: Outcome::Unknown,
        }
    }

    /// The value of the header `x-ovfleet-dispatch`.
    pub(crate) fn header(&self) -> String {
        self.booking.as_ref().map_or_else(String::new, BookingGuard::header)
    }

    /// Records that the answer has begun.
    pub(crate) fn record_first_token(&self) {
        self.replica.record_progress(Instant::now());
        if let Some(booking) = &self.booking {
            booking.record_first_token();
        }
    }

    /// Records that the client receives the answer from now on.
    pub(crate) fn record_answer_began(&mut self) {
        self.dispatcher.health().answer_began(self.replica.identity, &mut self.sent);
    }

    /// Sets the outcome to report when the placement is dropped.
    pub(crate) fn set_outcome(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        let Self { replica, served_model, dispatcher, sent, .. } = self;
        let outcome = match self.outcome {
            Outcome::TimedOut if replica.has_progressed_since(self.at) => Outcome::Unknown,
            Outcome::TimedOut => Outcome::Failed,
            outcome => outcome,
        };
        match outcome {
            Outcome::Answered => {
                replica.answered.fetch_add(1, Ordering::Relaxed);
                dispatcher.health().succeeded(replica.identity, *sent);
            }
            Outcome::Failed => {
                replica.failed.fetch_add(1, Ordering::Relaxed);
                let replicas = served_model.replicas();
                let identities = replicas.iter().map(|replica| replica.identity);
                if dispatcher.health().failed(replica.identity, *sent, identities, Instant::now()) {
                    dispatcher.metrics().record_ejection();
                    tracing::warn!(
                        replica = replica.discovered.name,
                        "ejected the replica: its requests fail"
                    );
                }
            }
            Outcome::Unknown | Outcome::TimedOut => dispatcher.health().unknown(replica.identity, *sent),
        }
        // End the booking first, so that the waiting requests can use the freed room.
        self.booking = None;
        dispatcher.place_waiting_at(replica);
    }
}

#[cfg(test)]
mod tests;

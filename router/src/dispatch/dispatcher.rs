//! Holds the state that the placements of all requests share, and assigns room that becomes free at a replica to
//! waiting requests.
//!
//! A load report, or the end of a request, indicates that one replica may have free room. Only this replica is then
//! offered to the waiting requests, so the work per event does not grow with the number of replicas. Room that no event
//! announces (for example, because a report has become too old or an ejection has ended) is assigned by
//! [`Dispatcher::place_all_waiting`], which runs periodically.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::backfill::{Backfill, BackfillResult};
use super::pick_log::PickLog;
use super::picker::Picker;
use crate::args::Settings;
use crate::health::{Health, RetryBudget};
use crate::metrics::Metrics;
use crate::queue::Ticket;
use crate::replica::Replica;
use crate::replicas::Replicas;
use crate::served_model::ServedModel;
use crate::waiting::Assignment;

/// Number of unused retries that the retry budget (`--retry-budget-percent`) saves. The budget starts with this number.
///
/// If exceeded: further unused retries are lost.
pub(super) const SAVED_RETRIES_MAX: u32 = 256;

/// Assigns replicas to requests. The process has one dispatcher.
#[derive(Debug)]
pub struct Dispatcher {
    /// The replicas among which the dispatcher chooses.
    pub replicas: Replicas,
    /// The secret seed for the hashes of prompts.
    pub seed: u64,
    settings: Settings,
    metrics: Metrics,
    pub(super) picker: Picker,
    retries: Mutex<RetryBudget>,
    /// The number of requests in the queues of all models, including those that wait for a replica to become
    /// available.
    pub(super) queued: AtomicUsize,
    /// The number of queued requests that wait for a replica to become available.
    pub(super) queued_without_replica: AtomicUsize,
    /// The number of requests that wait for a replica to become available, or to report its models or its store.
    pub(super) requests_without_replica: AtomicUsize,
}

impl Dispatcher {
    /// Creates a dispatcher without replicas.
    pub fn new(settings: Settings, metrics: Metrics) -> Arc<Self> {
        // The standard library seeds the hasher with random numbers from the operating system.
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
            requests_without_replica: AtomicUsize::new(0),
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

    /// The number of requests that wait for a replica to become available, or to report its models or its store.
    pub fn requests_without_replica(&self) -> usize {
        self.requests_without_replica.load(Ordering::Relaxed)
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
    pub fn reconfigure(&self) {
        let retry_budget_percent = self.settings.load().retry_budget_percent;
        self.lock_retries().configure(retry_budget_percent);
        self.place_all_waiting();
    }

    /// Whether any replica of a model accepts requests, as far as the router knows.
    pub fn is_available(&self, served_model: &ServedModel) -> bool {
        self.picker.is_available(served_model)
    }

    /// Assigns replicas with room to the waiting requests of all models.
    pub fn place_all_waiting(&self) {
        if self.queued.load(Ordering::Acquire) == 0 {
            return;
        }
        for served_model in self.replicas.served_models().values() {
            self.place_waiting(served_model, None);
        }
    }

    /// Assigns the room that has become free at `replica` to the waiting requests for the models that the replica
    /// serves.
    pub fn place_waiting_at(&self, replica: &Arc<Replica>) {
        if self.queued.load(Ordering::Acquire) == 0 || replica.is_removed() {
            return;
        }
        for served_model in self.replicas.served_models_of(replica) {
            self.place_waiting(&served_model, Some(replica));
        }
    }

    /// Assigns replicas to the waiting requests for a model until no further request can be placed. If `at` is given,
    /// only this replica is considered.
    pub(super) fn place_waiting(&self, served_model: &Arc<ServedModel>, at: Option<&Arc<Replica>>) {
        while served_model.waiters() > 0 && self.place_next_waiting(served_model, at, Instant::now()) {}
    }

    /// Tries to place the next requests as [`Backfill::place_next`] does. Returns whether another attempt could place a
    /// request.
    pub(super) fn place_next_waiting(
        &self,
        served_model: &Arc<ServedModel>,
        at: Option<&Arc<Replica>>,
        now: Instant,
    ) -> bool {
        let backfill = Backfill { picker: &self.picker, served_model, now };
        let result = served_model.with_waiting(|waiting| backfill.place_next(waiting, at));
        self.settle(result)
    }

    /// Tries to place a request that has just entered the queue.
    pub(super) fn place_newcomer(&self, served_model: &Arc<ServedModel>, ticket: Ticket) {
        let backfill = Backfill { picker: &self.picker, served_model, now: Instant::now() };
        let result = served_model.with_waiting(|waiting| backfill.place_newcomer(waiting, ticket));
        if self.settle(result) {
            self.place_waiting(served_model, None);
        }
    }

    /// Completes an attempt to place a request, without holding the lock of the queue. Returns whether another attempt
    /// could place a request.
    fn settle(&self, result: BackfillResult) -> bool {
        match result {
            BackfillResult::Dequeued { unclaimed } => {
                if let Some(assignment) = unclaimed {
                    self.release(assignment);
                }
                true
            }
            BackfillResult::TryAgain => true,
            BackfillResult::Full | BackfillResult::NoReplica => false,
        }
    }

    /// Ends the assignment of a request that has stopped waiting for it, and offers the room to the next request.
    fn release(&self, assignment: Assignment) {
        let Assignment { replica, booking, sent } = assignment;
        self.health().unknown(replica.identity, sent);
        // End the booking first, so that the waiting requests can use the freed room.
        drop(booking);
        self.place_waiting_at(&replica);
    }
}

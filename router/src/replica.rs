//! One replica as the router knows it: the information from discovery, from its load reports and from its answers. This
//! module does not decide which requests are sent to the replica.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::HeaderValue;
use proto::v1alpha1::{Load, State};
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_64;

use crate::discovery::DiscoveredReplica;
use crate::ledger::{Ledger, ReportOutcome};
use crate::prefix::PrefixIndex;

/// Number of models of one replica.
///
/// If exceeded: further models of the replica are ignored.
const REPLICA_MODELS_MAX: usize = 64;

/// A replica that discovery lists or has listed.
#[derive(Debug)]
pub struct Replica {
    /// The addresses and the name that discovery has reported.
    pub discovered: DiscoveredReplica,
    /// The name of the replica as a header value of answers.
    pub name: HeaderValue,
    /// The address of the replica as the `Host` header of requests.
    pub authority: HeaderValue,
    /// A hash of the address, which does not change when the replica restarts.
    pub identity: u64,
    /// The dispatches to the replica, and its last load report.
    pub ledger: Arc<Ledger>,
    /// The prefixes of prompts that are expected to be in the replica's cache.
    pub prefixes: Mutex<PrefixIndex>,
    /// The sequence number of the last pick that chose this replica.
    pub last_pick: AtomicU64,
    /// The number of requests that the replica has answered.
    pub answered: AtomicU64,
    /// The number of requests that the replica has failed to answer.
    pub failed: AtomicU64,
    /// The ID of the replica's store of responses and conversations, or 0 if the replica has no store or has not
    /// reported one.
    store_id: AtomicU64,
    status: Mutex<ReplicaStatus>,
    /// The time when the last report arrived, in milliseconds after `since`; [`NEVER`] before the first.
    reported: AtomicU64,
    /// The time of the last evidence that the replica computed something, in milliseconds after `since`; [`NEVER`] if
    /// there has been none.
    progressed: AtomicU64,
    since: Instant,
    is_removed: AtomicBool,
    /// The tenant for whose request the replica is reserved, [`ALL_TENANTS`] or [`UNRESERVED`].
    reserved_against: AtomicU64,
    is_draining: AtomicBool,
    /// Whether the models that the replica reported can be looked up. This becomes true only after the lists of
    /// [`crate::replicas`] contain them, because requests look up models while reports arrive.
    is_listed: AtomicBool,
}

/// Marks the time of an event that has not happened yet.
const NEVER: u64 = u64::MAX;

/// The models and the last load report of a replica, and the state of the connection to it.
#[derive(Clone, Debug, Default)]
pub struct ReplicaStatus {
    /// The names of the models that it serves.
    pub models: Vec<String>,
    /// The properties of its models, by name, from its list of models. Empty until the replica has returned the list.
    pub listed_models: BTreeMap<String, ListedModel>,
    /// The complete last load report.
    pub load: Load,
    /// Whether a stream of load reports is open or, for a replica that does not report its load, the last request for
    /// its models succeeded.
    pub is_connected: bool,
    /// The reason why the replica is not connected, once an attempt has failed.
    pub problem: Option<String>,
}

/// The properties of a model in a replica's list of models. Load reports contain only the names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ListedModel {
    /// The number of tokens that a prompt and its answer may have together.
    pub max_model_len: Option<u64>,
    /// The path of the model's files at the replica. `ovfleet-server` reports it only for adapters.
    pub root: Option<String>,
    /// The name of the base model, if the model is an adapter.
    pub parent: Option<String>,
}

/// The changes that a load report has caused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportChanges {
    /// Whether another process has replaced the replica, so that all earlier information about it is obsolete.
    pub is_new_process: bool,
    /// Whether the replica serves different models than before, or has begun or stopped accepting requests.
    pub affects_routing: bool,
}

impl Replica {
    pub(crate) fn new(discovered: DiscoveredReplica, router: u64) -> Arc<Self> {
        let header =
            |text: String| HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("replica"));
        Arc::new(Self {
            name: header(discovered.name.clone()),
            authority: header(discovered.http.to_string()),
            identity: identity(discovered.http),
            ledger: Ledger::new(router),
            prefixes: Mutex::default(),
            last_pick: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            store_id: AtomicU64::new(0),
            status: Mutex::default(),
            reported: AtomicU64::new(NEVER),
            progressed: AtomicU64::new(NEVER),
            since: Instant::now(),
            is_removed: AtomicBool::new(false),
            reserved_against: AtomicU64::new(UNRESERVED),
            is_draining: AtomicBool::new(false),
            is_listed: AtomicBool::new(false),
            discovered,
        })
    }

    /// Locks and returns the status of the replica.
    pub fn status(&self) -> MutexGuard<'_, ReplicaStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether discovery no longer lists the replica.
    pub fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Relaxed)
    }

    pub(crate) fn set_removed(&self) {
        self.is_removed.store(true, Ordering::Relaxed);
    }

    /// Whether the models that the replica has reported can be looked up.
    pub(crate) fn is_listed(&self) -> bool {
        self.is_listed.load(Ordering::Acquire)
    }

    pub(crate) fn set_listed(&self, is_listed: bool) {
        self.is_listed.store(is_listed, Ordering::Release);
    }

    /// Whether the replica has the store with this ID.
    pub(crate) fn has_store(&self, store_id: u64) -> bool {
        store_id != 0 && self.store_id.load(Ordering::Relaxed) == store_id
    }

    /// Whether the replica used to report and has been silent for `limit` although it should report. The reports of a
    /// draining or removed replica may end before its requests do, so its silence does not mean that it hangs.
    pub fn hangs(&self, now: Instant, limit: Duration) -> bool {
        let reported = self.reported.load(Ordering::Relaxed);
        reported != NEVER
            && !self.is_removed()
            && !self.is_draining.load(Ordering::Relaxed)
            && now.saturating_duration_since(self.since + Duration::from_millis(reported)) >= limit
    }

    /// Records that the replica is computing: one of its answers has begun, or its reported figures have changed.
    pub(crate) fn record_progress(&self, now: Instant) {
        self.progressed.store(self.millis(now), Ordering::Relaxed);
    }

    /// Whether the replica was seen to compute something after `moment`. Such a replica is not broken, regardless of
    /// how long one of its requests takes.
    #[must_use]
    pub fn has_progressed_since(&self, moment: Instant) -> bool {
        let progressed = self.progressed.load(Ordering::Relaxed);
        progressed != NEVER && progressed > self.millis(moment)
    }

    fn millis(&self, moment: Instant) -> u64 {
        let after = moment.saturating_duration_since(self.since).as_millis();
        u64::try_from(after).unwrap_or(NEVER - 1)
    }

    /// Whether the replica is reserved for a request that has waited too long, so that other requests of this tenant
    /// may not be placed there.
    #[must_use]
    pub fn is_reserved_against(&self, tenant: u64) -> bool {
        match self.reserved_against.load(Ordering::Relaxed) {
            UNRESERVED => false,
            ALL_TENANTS => true,
            reserved => reserved == digest(tenant),
        }
    }

    /// Reserves the replica for one request of a tenant, unless it is reserved already. Requests of other tenants may
    /// still be placed there until [`Reservation::extend_to_all_tenants`] is called.
    pub(crate) fn reserve(self: &Arc<Self>, tenant: u64) -> Option<Reservation> {
        let tenant = digest(tenant);
        let swap =
            self.reserved_against.compare_exchange(UNRESERVED, tenant, Ordering::Relaxed, Ordering::Relaxed);
        swap.is_ok().then(|| Reservation(Arc::clone(self)))
    }

    /// Applies a load report. Returns `None` if it is out of date.
    pub(crate) fn observe(&self, load: Load, now: Instant) -> Option<ReportChanges> {
        let outcome = self.ledger.observe(&load, now);
        if outcome == ReportOutcome::Outdated {
            return None;
        }
        let blocks = load.blocks_active as usize + load.blocks_evictable as usize;
        {
            let mut prefixes = self.prefixes.lock().unwrap_or_else(PoisonError::into_inner);
            if outcome == ReportOutcome::NewEpoch {
                prefixes.reset();
            }
            // Zero means that the replica has not reported the size of its cache.
            if load.blocks_total > 0 {
                prefixes.set_capacity(load.blocks_total as usize);
            }
            // Requests without a first token may not have their blocks yet, so add the blocks that they need.
            let expected = self.ledger.snapshot(now, Duration::MAX).booked.blocks_without_token;
            prefixes.trim(blocks.saturating_add(usize::try_from(expected).unwrap_or(usize::MAX)));
        }
        self.store_id.store(load.store_id, Ordering::Relaxed);
        self.is_draining.store(load.state() == State::Draining, Ordering::Relaxed);
        let mut status = self.status();
        let is_serving = |load: &Load| load.state() == State::Serving;
        let models = &load.models[..load.models.len().min(REPLICA_MODELS_MAX)];
        let affects_routing = status.models != models || is_serving(&status.load) != is_serving(&load);
        if status.models != models {
            status.models = models.to_vec();
        }
        if shows_progress(&status.load, &load) {
            self.record_progress(now);
        }
        status.load = load;
        drop(status);
        self.reported.store(self.millis(now), Ordering::Relaxed);
        Some(ReportChanges { is_new_process: outcome == ReportOutcome::NewEpoch, affects_routing })
    }

    /// Applies the list of models of a replica that does not report its load, and the ID of its store. Returns
    /// whether the models differ from the previous ones.
    pub(crate) fn observe_models(&self, mut models: Vec<String>, store_id: u64) -> bool {
        self.store_id.store(store_id, Ordering::Relaxed);
        let mut status = self.status();
        status.is_connected = true;
        status.problem = None;
        models.truncate(REPLICA_MODELS_MAX);
        let differ = status.models != models;
        status.models = models;
        differ
    }
}

/// A replica that is reserved for one request. Dropping it ends the reservation.
#[derive(Debug)]
pub(crate) struct Reservation(Arc<Replica>);

impl Reservation {
    /// Excludes the requests of other tenants too.
    pub(crate) fn extend_to_all_tenants(&self) {
        self.0.reserved_against.store(ALL_TENANTS, Ordering::Relaxed);
    }

    pub(crate) fn replica(&self) -> &Arc<Replica> {
        &self.0
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.0.reserved_against.store(UNRESERVED, Ordering::Relaxed);
    }
}

/// The value of [`Replica::reserved_against`] without a reservation.
const UNRESERVED: u64 = 0;
/// The value of [`Replica::reserved_against`] if the requests of all tenants are excluded.
const ALL_TENANTS: u64 = u64::MAX;

/// Converts a tenant to a value of [`Replica::reserved_against`].
fn digest(tenant: u64) -> u64 {
    tenant.clamp(UNRESERVED + 1, ALL_TENANTS - 1)
}

/// Whether the figures of two reports show that the replica computed something in between.
fn shows_progress(before: &Load, after: &Load) -> bool {
    let figures = |load: &Load| (load.running, load.waiting, load.uncomputed_tokens, load.blocks_active);
    figures(before) != figures(after)
}

/// A number that depends only on the address, so that it does not change when the process at the address restarts.
fn identity(address: SocketAddr) -> u64 {
    xxh3_64(address.to_string().as_bytes())
}

//! Picks a replica for a request and books the request there. The module builds the candidates from ledgers, health and
//! prefixes, lets the policy choose one, and books it. If another thread has booked the same replica in the meantime,
//! the module picks again. It neither waits nor sends anything.

use std::cell::RefCell;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use proto::v1alpha1::State;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::pick_log::{Pick, PickLog};
use crate::args::Settings;
use crate::deferred::defer;
use crate::health::{Health, HealthConfig, HealthState};
use crate::ledger::{BookingGuard, Cost};
use crate::metrics::Metrics;
use crate::policy::{Candidate, Capacity, Demand, NoReplica, Policy, Terms, capacity};
use crate::replica::{Replica, Reservation};
use crate::served_model::ServedModel;
use crate::waiting::{Assignment, PlacementRequest};

/// The number of times that a booking by another thread may invalidate the pick for a request. The next pick is booked
/// unconditionally.
const RACES_MAX: u32 = 3;
/// The number of tokens per block that is assumed for a replica that has not reported this number.
const BLOCK_TOKENS_DEFAULT: u32 = 16;

/// A request, and the replicas that are candidates for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Search<'a> {
    pub(super) served_model: &'a Arc<ServedModel>,
    pub(super) request: &'a PlacementRequest,
    /// The only replica to consider, because room has become free there. With `None`, all replicas of the model are
    /// considered.
    pub(super) at: Option<&'a Arc<Replica>>,
    /// The replica that is reserved for this request.
    pub(super) reserved: Option<&'a Arc<Replica>>,
}

impl<'a> Search<'a> {
    /// Creates a search among all replicas of a model.
    pub(super) fn everywhere(served_model: &'a Arc<ServedModel>, request: &'a PlacementRequest) -> Self {
        Self { served_model, request, at: None, reserved: None }
    }
}

/// The result of a search.
pub(super) enum SearchResult {
    /// The request is booked at a replica.
    Booked(Assignment),
    /// None of the considered replicas has room now.
    Full,
    /// No replica accepts requests.
    NoReplica,
}

/// Picks and books replicas.
#[derive(Debug)]
pub(super) struct Picker {
    settings: Settings,
    metrics: Metrics,
    health: Mutex<Health>,
    rng: Mutex<StdRng>,
    /// The sequence number of the next pick.
    picks: AtomicU64,
    log: Arc<Mutex<PickLog>>,
}

/// The working memory of a pick. Each thread reuses its own, so that collecting and scoring the candidates rarely
/// allocates memory.
#[derive(Default)]
struct Scratch {
    candidates: Vec<Candidate>,
    replicas: Vec<Arc<Replica>>,
    terms: Vec<Terms>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[cfg(test)]
thread_local! {
    /// The number of candidates that this thread has examined, which measures the work of its searches.
    pub(super) static EXAMINED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// The smallest possible demand. It replaces the demand of a request that can never fit.
fn least(demand: &Demand) -> Demand {
    Demand { prompt_tokens: 1, output_tokens: 1, output_tokens_max: Some(1), sequences: 1, ..*demand }
}

/// The load to book for a request. A request that can never fit the replica is booked with the smallest demand: the
/// replica will reject it, and until then, it should take as little room as possible from other requests.
fn cost_of(candidate: &Candidate, demand: &Demand) -> Cost {
    match candidate.capacity(demand) {
        Capacity::Never => candidate.cost(&least(demand)),
        Capacity::Now | Capacity::Later => candidate.cost(demand),
    }
}

impl Picker {
    pub(super) fn new(settings: Settings, metrics: Metrics) -> Self {
        Self {
            settings,
            metrics,
            health: Mutex::new(Health::new(HealthConfig::default())),
            // The standard library seeds the hasher with random numbers from the operating system.
            rng: Mutex::new(StdRng::seed_from_u64(RandomState::new().hash_one("picks"))),
            picks: AtomicU64::new(1),
            log: Arc::default(),
        }
    }

    pub(super) fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn log(&self) -> MutexGuard<'_, PickLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether any replica of a model accepts requests, as far as the router knows.
    pub(super) fn is_available(&self, served_model: &ServedModel) -> bool {
        let now = Instant::now();
        let settings = self.settings.load();
        let replicas = served_model.replicas();
        let is_serving = |replica: &&Arc<Replica>| {
            let state = replica.ledger.snapshot(now, settings.report_ttl).state;
            state.is_none_or(|state| state == State::Serving)
        };
        let health = self.health();
        let mut serving = replicas.iter().filter(is_serving).peekable();
        serving.peek().is_some()
            && (serving.any(|replica| health.state(replica.identity, now) != HealthState::Ejected)
                || health.is_panicking(identities(&replicas), now))
    }

    /// Picks and books a replica if any has room now. If no replica can ever fit the request, this method nevertheless
    /// picks and books one, because that replica then rejects the request with an exact message.
    pub(super) fn book(&self, search: Search<'_>, now: Instant) -> SearchResult {
        let demand = &search.request.demand;
        SCRATCH.with_borrow_mut(|scratch| {
            let settings = self.settings.load();
            let started = Instant::now();
            for race in 0.. {
                self.collect_candidates(scratch, search, now);
                match capacity(demand, &scratch.candidates) {
                    Capacity::Later => return SearchResult::Full,
                    // A request that can never fit this replica may fit other replicas.
                    Capacity::Never if search.at.is_some() => return SearchResult::Full,
                    Capacity::Now | Capacity::Never => {}
                }
                let Ok(index) = self.pick(&settings.policy, demand, scratch) else {
                    return SearchResult::NoReplica;
                };
                let candidate = &scratch.candidates[index];
                let replica = &scratch.replicas[index];
                let cost = cost_of(candidate, demand);
                let booking = if race < RACES_MAX {
                    replica.ledger.book_if(candidate.snapshot.version, cost, now)
                } else {
                    Some(replica.ledger.book(cost, now))
                };
                let Some(booking) = booking else { continue };
                let (latency, terms) = (started.elapsed(), scratch.terms[index]);
                let report_age = candidate.snapshot.report_age;
                let metrics = self.metrics.clone();
                defer(move || metrics.record_pick(latency, &terms, report_age));
                return SearchResult::Booked(self.assign(search, scratch, index, booking));
            }
            unreachable!("the pick after the last race is booked unconditionally")
        })
    }

    /// Books the request at the only replica that can answer it, even if that replica has no room: a full replica
    /// rejects the request itself.
    pub(super) fn book_required(
        &self,
        served_model: &Arc<ServedModel>,
        request: &PlacementRequest,
        now: Instant,
    ) -> Option<Assignment> {
        let search = Search::everywhere(served_model, request);
        SCRATCH.with_borrow_mut(|scratch| {
            self.collect_candidates(scratch, search, now);
            let (candidate, replica) = (scratch.candidates.first()?, scratch.replicas.first()?);
            let booking = replica.ledger.book(cost_of(candidate, &request.demand), now);
            scratch.terms.clear();
            scratch.terms.push(Terms::default());
            Some(self.assign(search, scratch, 0, booking))
        })
    }

    /// Whether the replica that is reserved for a request can still serve the request, now or later.
    pub(super) fn can_fit(
        &self,
        served_model: &Arc<ServedModel>,
        request: &PlacementRequest,
        reserved: &Arc<Replica>,
        now: Instant,
    ) -> bool {
        SCRATCH.with_borrow_mut(|scratch| {
            let search = Search { served_model, request, at: Some(reserved), reserved: Some(reserved) };
            self.collect_candidates(scratch, search, now);
            let candidate = scratch.candidates.first();
            let can_fit =
                candidate.is_some_and(|candidate| candidate.capacity(&request.demand) != Capacity::Never);
            can_fit && served_model.contains(reserved)
        })
    }

    /// Reserves the replica that the policy picks for a request.
    pub(super) fn reserve(
        &self,
        served_model: &Arc<ServedModel>,
        request: &PlacementRequest,
        now: Instant,
    ) -> Option<Reservation> {
        SCRATCH.with_borrow_mut(|scratch| {
            self.collect_candidates(scratch, Search::everywhere(served_model, request), now);
            let index = self.pick(&self.settings.load().policy, &request.demand, scratch).ok()?;
            scratch.replicas[index].reserve(request.demand.tenant)
        })
    }

    fn collect_candidates(&self, scratch: &mut Scratch, search: Search<'_>, now: Instant) {
        let Search { served_model, request, at, reserved } = search;
        let settings = self.settings.load();
        let bytes_per_token = served_model.expectations().estimates.bytes_per_token();
        let uses_prefixes = settings.policy.uses_prefixes() && request.prefix_hashes.blocks() > 0;
        scratch.candidates.clear();
        scratch.replicas.clear();
        let all = served_model.replicas();
        let replicas = at.map_or(all.as_slice(), std::slice::from_ref);
        let is_candidate = |replica: &&Arc<Replica>| match &request.required_replica {
            Some(required) => Arc::ptr_eq(required, replica),
            None => !request.failed_replicas.contains(&replica.identity),
        };
        let candidates = || replicas.iter().filter(is_candidate);
        let hangs = |replica: &Arc<Replica>| replica.hangs(now, settings.hang_timeout);
        // If all replicas seem to hang, the reports are more likely at fault than the replicas. This does not apply if
        // only the replica `at` is examined, because the other replicas may not hang.
        let all_hang = at.is_none() && candidates().all(hangs);
        let health = self.health();
        // This value is computed at most once, and only if a replica is ejected.
        let mut is_panicking = None;
        for replica in candidates() {
            let cached_tokens = if uses_prefixes {
                let prefixes = replica.prefixes.lock().unwrap_or_else(PoisonError::into_inner);
                request
                    .prefix_hashes
                    .tokens_of(prefixes.cached_blocks(&request.prefix_hashes), bytes_per_token)
            } else {
                0
            };
            let weight = match health.state(replica.identity, now) {
                _ if hangs(replica) && !all_hang => 0.0,
                HealthState::Ejected
                    if *is_panicking.get_or_insert_with(|| health.is_panicking(identities(&all), now)) =>
                {
                    1.0
                }
                state => state.weight(),
            };
            let is_reserved_for_this = reserved.is_some_and(|reserved| Arc::ptr_eq(reserved, replica));
            scratch.candidates.push(Candidate {
                identity: replica.identity,
                snapshot: replica.ledger.snapshot(now, settings.report_ttl),
                tenant_load: replica.ledger.tenant_load(request.demand.tenant),
                cached_tokens,
                weight,
                is_reserved: replica.is_reserved_against(request.demand.tenant) && !is_reserved_for_this,
                last_pick: replica.last_pick.load(Ordering::Relaxed),
            });
            scratch.replicas.push(Arc::clone(replica));
        }
        #[cfg(test)]
        EXAMINED.set(EXAMINED.get() + scratch.candidates.len());
    }

    fn pick(&self, policy: &Policy, demand: &Demand, scratch: &mut Scratch) -> Result<usize, NoReplica> {
        let Scratch { candidates, terms, .. } = scratch;
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        match policy.pick(demand, candidates, terms, &mut *rng) {
            // The router only estimates the size of the request. Let a replica decide: it knows the exact size, and if
            // it rejects the request, it can give the client the exact reason.
            Err(NoReplica::NeverFits) => policy.pick(&least(demand), candidates, terms, &mut *rng),
            result => result,
        }
    }

    /// Assigns the request to the candidate with this index.
    fn assign(
        &self,
        search: Search<'_>,
        scratch: &Scratch,
        index: usize,
        booking: BookingGuard,
    ) -> Assignment {
        let Search { served_model, request, .. } = search;
        let replica = Arc::clone(&scratch.replicas[index]);
        replica.last_pick.store(self.picks.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        let sent = self.health().sent(replica.identity, Instant::now());
        if request.prefix_hashes.blocks() > 0 {
            let reported = scratch.candidates[index].snapshot.reported.map(|reported| reported.block_tokens);
            let block_tokens = reported.filter(|&tokens| tokens > 0).unwrap_or(BLOCK_TOKENS_DEFAULT);
            let output_blocks = request.demand.output_tokens.div_ceil(block_tokens) as usize;
            let mut prefixes = replica.prefixes.lock().unwrap_or_else(PoisonError::into_inner);
            prefixes.record(&request.prefix_hashes, output_blocks);
        }
        let pick = Pick::new(served_model, &request.demand, &scratch.replicas, &scratch.terms, index);
        let log = Arc::clone(&self.log);
        defer(move || log.lock().unwrap_or_else(PoisonError::into_inner).record(pick));
        Assignment { replica, booking, sent }
    }
}

fn identities(replicas: &[Arc<Replica>]) -> impl Iterator<Item = u64> {
    replicas.iter().map(|replica| replica.identity)
}

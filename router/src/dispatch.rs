//! From a request's demand to a booked place: candidates are put together from ledgers, health and prefixes,
//! the policy picks, the place is booked before anybody else picks; and where there is no room, the request
//! waits here. Nothing is sent from here.
//!
//! ```text
//! place ─► try_place ─► a Placed (RAII) ─► the proxy sends
//!   └► queue (all replicas are full, or there is none) ─► pump, when there is room ─► Placed
//! ```

use std::cell::RefCell;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use proto::v1alpha1::State;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use crate::app::Settings;
use crate::fleet::Fleet;
use crate::health::{Health, HealthConfig, RetryBudget, Standing};
use crate::later::later;
use crate::ledger::Booking;
use crate::metrics::Metrics;
use crate::policy::{Candidate, Capacity, Demand, NoReplica, Policy, Terms, capacity};
use crate::prefix::Chain;
use crate::queue;
use crate::replicas::{Replica, Replicas};

mod placed;
mod pump;
mod recent;
mod waiting;

pub use placed::{Outcome, Placed};
pub use recent::{Judged, Pick, Recent};
pub use waiting::Refused;

/// Number of unused retries that the router saves under `--retry-share`. It starts with that many.
///
/// Beyond it: further unused retries are lost.
const RETRIES_SAVED_MAX: u32 = 256;
/// Picks that may find the ledger changed under them before one books all the same.
const RACES_MAX: u32 = 3;

/// What a request needs of a replica.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// In tokens and sequences.
    pub demand: Demand,
    /// The beginning of its prompt.
    pub chain: Arc<Chain>,
    /// Replicas, by identity, that it was tried on without success.
    pub tried: Vec<u64>,
    /// The one that will do, if no other will: it keeps what the request refers to.
    pub only: Option<Arc<Replica>>,
}

/// Which replicas are candidates for a request.
#[derive(Clone, Copy, Debug, Default)]
struct Search<'a> {
    /// Only this one, where room is known to have appeared. Without it all replicas of the model are.
    at: Option<&'a Arc<Replica>>,
    /// The one whose room is reserved for this request.
    reserved: Option<&'a Arc<Replica>>,
}

/// What a single attempt came to.
enum Attempt {
    Placed(Placed),
    Full,
    Nobody,
}

/// Picks and books. One for the process.
#[derive(Debug)]
pub struct Dispatch {
    /// Among which it picks.
    pub replicas: Replicas,
    settings: Settings,
    metrics: Metrics,
    health: Mutex<Health>,
    retries: Mutex<RetryBudget>,
    rng: Mutex<StdRng>,
    picks: AtomicU64,
    /// Requests in the queues of all models, for whatever reason.
    waiting: AtomicUsize,
    /// Of them, those that wait for a replica to appear.
    held: AtomicUsize,
    /// Requests that wait for a replica to appear, in a queue or because their model is not known yet.
    room: AtomicUsize,
    recent: Mutex<Recent>,
    /// For hashes of prompts.
    pub seed: u64,
}

/// What a pick works with, kept by each thread so that nothing is allocated for it.
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
    /// Candidates that this thread has looked at: the work of a search.
    static GATHERED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

impl Dispatch {
    /// Without replicas as yet.
    pub fn new(settings: Settings, metrics: Metrics) -> Arc<Self> {
        // The standard library seeds it from the operating system's random numbers.
        let random = RandomState::new();
        let retry_share = settings.load().retry_share;
        Arc::new(Self {
            replicas: Replicas::new(random.hash_one("router").max(1)),
            settings,
            metrics,
            health: Mutex::new(Health::new(HealthConfig::default())),
            retries: Mutex::new(RetryBudget::new(f64::from(retry_share), RETRIES_SAVED_MAX)),
            rng: Mutex::new(StdRng::seed_from_u64(random.hash_one("picks"))),
            picks: AtomicU64::new(1),
            waiting: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            room: AtomicUsize::new(0),
            recent: Mutex::default(),
            seed: random.hash_one("prompts"),
        })
    }

    /// What answers have shown of replicas.
    pub fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last picks.
    pub fn recent(&self) -> MutexGuard<'_, Recent> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The present settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What is counted.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Requests that wait for room, and for a replica.
    pub fn waiters(&self) -> (usize, usize) {
        let queued = self.waiting.load(Ordering::Relaxed).saturating_sub(self.held.load(Ordering::Relaxed));
        (queued, self.room.load(Ordering::Relaxed))
    }

    /// Counts a request, for the budget of retries.
    pub fn earn_retry(&self) {
        self.retries.lock().unwrap_or_else(PoisonError::into_inner).earn();
    }

    /// Whether a request may be sent once more; if so, that is counted.
    pub fn spend_retry(&self) -> bool {
        self.retries.lock().unwrap_or_else(PoisonError::into_inner).spend()
    }

    /// The rules have changed.
    pub fn reconfigure(self: &Arc<Self>) {
        let retry_share = self.settings.load().retry_share;
        *self.retries.lock().unwrap_or_else(PoisonError::into_inner) =
            RetryBudget::new(f64::from(retry_share), RETRIES_SAVED_MAX);
        self.pump_all();
    }

    /// A booked place for a request, waiting for one if there is none.
    ///
    /// # Errors
    /// There is none, in time.
    ///
    /// # Cancel safety
    /// Dropping it takes the request out of the queue, and gives a place that it just got to the next.
    pub async fn place(
        self: &Arc<Self>,
        fleet: &Arc<Fleet>,
        wanted: Wanted,
        waiter: queue::Waiter,
    ) -> Result<Placed, Refused> {
        if let Some(replica) = wanted.only.clone() {
            return self.place_at(fleet, &replica, &wanted).await;
        }
        // Newcomers queue behind those who wait, but a request that has waited already and comes back does not.
        if fleet.waiters() == 0 || !wanted.tried.is_empty() {
            match self.try_place(fleet, &wanted, Search::default(), Instant::now()) {
                Attempt::Placed(placed) => return Ok(placed),
                Attempt::Nobody => return self.await_replica(fleet, wanted, waiter).await,
                Attempt::Full => {}
            }
        } else if !self.is_able(fleet) {
            return self.await_replica(fleet, wanted, waiter).await;
        }
        self.await_room(fleet, wanted, waiter).await
    }

    /// Whether any replica of a model takes requests, as far as is known.
    pub fn is_able(&self, fleet: &Fleet) -> bool {
        let now = Instant::now();
        let settings = self.settings.load();
        let replicas = fleet.replicas();
        let is_serving = |replica: &&Arc<Replica>| {
            let state = replica.ledger.view(now, settings.report_ttl).state;
            state.is_none_or(|state| state == State::Serving)
        };
        let health = self.health();
        let mut serving = replicas.iter().filter(is_serving).peekable();
        serving.peek().is_some()
            && (serving.any(|replica| health.standing(replica.identity, now) != Standing::Ejected)
                || health.is_panicking(identities(&replicas), now))
    }

    /// Picks and books, if there is room now.
    fn try_place(
        self: &Arc<Self>,
        fleet: &Arc<Fleet>,
        wanted: &Wanted,
        search: Search<'_>,
        now: Instant,
    ) -> Attempt {
        SCRATCH.with_borrow_mut(|scratch| {
            let settings = self.settings.load();
            let started = Instant::now();
            for race in 0.. {
                self.gather(scratch, (fleet, wanted), search, now);
                match capacity(&wanted.demand, &scratch.candidates) {
                    Capacity::Later => return Attempt::Full,
                    // Other replicas may take what this one never will.
                    Capacity::Never if search.at.is_some() => return Attempt::Full,
                    Capacity::Now | Capacity::Never => {}
                }
                let Ok(index) = self.pick(&settings.policy, &wanted.demand, scratch) else {
                    return Attempt::Nobody;
                };
                let candidate = &scratch.candidates[index];
                let replica = &scratch.replicas[index];
                let cost = candidate.cost(&wanted.demand);
                let booking = if race < RACES_MAX {
                    replica.ledger.book_if(candidate.view.version, cost, now)
                } else {
                    Some(replica.ledger.book(cost, now))
                };
                let Some(booking) = booking else { continue };
                let (took, terms, report_age) =
                    (started.elapsed(), scratch.terms[index], candidate.view.report_age);
                let dispatch = Arc::clone(self);
                later(move || dispatch.metrics.picked(took, &terms, report_age));
                return Attempt::Placed(self.placed((fleet, wanted), scratch, index, booking));
            }
            unreachable!("the last race books")
        })
    }

    /// Books at the one replica that will do. There is nothing to wait for here: it says itself if it is full.
    fn book_at(self: &Arc<Self>, fleet: &Arc<Fleet>, wanted: &Wanted, now: Instant) -> Option<Placed> {
        SCRATCH.with_borrow_mut(|scratch| {
            self.gather(scratch, (fleet, wanted), Search::default(), now);
            let (candidate, replica) = (scratch.candidates.first()?, scratch.replicas.first()?);
            let booking = replica.ledger.book(candidate.cost(&wanted.demand), now);
            scratch.terms.clear();
            scratch.terms.push(Terms::default());
            Some(self.placed((fleet, wanted), scratch, 0, booking))
        })
    }

    /// The candidates for a request as they are known now.
    fn gather(
        &self,
        scratch: &mut Scratch,
        (fleet, wanted): (&Fleet, &Wanted),
        search: Search<'_>,
        now: Instant,
    ) {
        let settings = self.settings.load();
        let bytes_per_token = fleet.expectations().estimates.bytes_per_token();
        let looks_up = settings.policy.uses_prefixes() && wanted.chain.blocks() > 0;
        scratch.candidates.clear();
        scratch.replicas.clear();
        let all = fleet.replicas();
        let replicas = search.at.map_or(all.as_slice(), std::slice::from_ref);
        let will_do = |replica: &Arc<Replica>| match &wanted.only {
            Some(only) => Arc::ptr_eq(only, replica),
            None => !wanted.tried.contains(&replica.identity),
        };
        let untried = || replicas.iter().filter(|replica| will_do(replica));
        let hangs = |replica: &Arc<Replica>| replica.hangs(now, settings.hang_timeout);
        // That all seem to hang says more about the reports than about the replicas. Of one alone it says nothing.
        let all_hang = search.at.is_none() && untried().all(hangs);
        let health = self.health();
        // Found out once, and only if there is a replica for which it matters.
        let mut is_panicking = None;
        for replica in untried() {
            let cached_tokens = if looks_up {
                let prefixes = replica.prefixes.lock().unwrap_or_else(PoisonError::into_inner);
                wanted.chain.tokens_of(prefixes.cached_blocks(&wanted.chain), bytes_per_token)
            } else {
                0
            };
            let weight = match health.standing(replica.identity, now) {
                _ if hangs(replica) && !all_hang => 0.0,
                Standing::Ejected
                    if *is_panicking.get_or_insert_with(|| health.is_panicking(identities(&all), now)) =>
                {
                    1.0
                }
                standing => standing.weight(),
            };
            let is_own = search.reserved.is_some_and(|reserved| Arc::ptr_eq(reserved, replica));
            scratch.candidates.push(Candidate {
                identity: replica.identity,
                view: replica.ledger.view(now, settings.report_ttl),
                cached_tokens,
                weight,
                is_reserved: replica.is_reserved() && !is_own,
                last_pick: replica.last_pick.load(Ordering::Relaxed),
            });
            scratch.replicas.push(Arc::clone(replica));
        }
        #[cfg(test)]
        GATHERED.set(GATHERED.get() + scratch.candidates.len());
    }

    fn pick(&self, policy: &Policy, demand: &Demand, scratch: &mut Scratch) -> Result<usize, NoReplica> {
        let Scratch { candidates, terms, .. } = scratch;
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        match policy.pick(demand, candidates, terms, &mut *rng) {
            // What is known of the request is an estimate. A replica says for sure, and says it better.
            Err(NoReplica::NeverFits) => {
                let least = Demand { prompt_tokens: 1, output_tokens_max: Some(1), sequences: 1, ..*demand };
                policy.pick(&least, candidates, terms, &mut *rng)
            }
            picked => picked,
        }
    }

    fn placed(
        self: &Arc<Self>,
        (fleet, wanted): (&Arc<Fleet>, &Wanted),
        scratch: &Scratch,
        index: usize,
        booking: Booking,
    ) -> Placed {
        let replica = Arc::clone(&scratch.replicas[index]);
        replica.last_pick.store(self.picks.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        let sent = self.health().sent(replica.identity, Instant::now());
        if wanted.chain.blocks() > 0 {
            let reported =
                scratch.candidates[index].view.reported.map_or(0, |reported| reported.block_tokens);
            let block_tokens = if reported == 0 { 16 } else { reported };
            let output = wanted.demand.output_tokens.div_ceil(block_tokens) as usize;
            let mut prefixes = replica.prefixes.lock().unwrap_or_else(PoisonError::into_inner);
            prefixes.record(&wanted.chain, output);
        }
        let pick = Pick::new(fleet, &wanted.demand, (&scratch.replicas, &scratch.terms), index);
        let dispatch = Arc::clone(self);
        later(move || dispatch.recent().record(pick));
        Placed::new(self, Arc::clone(fleet), replica, (booking, sent))
    }
}

fn identities(replicas: &[Arc<Replica>]) -> impl Iterator<Item = u64> {
    replicas.iter().map(|replica| replica.identity)
}

#[cfg(test)]
mod tests;

//! The replicas as they are known now, and which models they serve. It follows discovery and the replicas'
//! reports; picking among them is not for here.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use http::{HeaderMap, HeaderValue};
use proto::replica_token::ReplicaTokenFile;
use proto::v1alpha1::{Load, State};
use tokio::sync::watch;
use xxhash_rust::xxh3::xxh3_64;

use crate::discovery::Found;
use crate::fleet::Fleet;
use crate::ledger::{Ledger, Observed};
use crate::prefix::PrefixIndex;

/// Number of models that the router knows, including those that no replica serves any more.
///
/// Beyond it: models without a replica are forgotten; if that is not enough, the new model is not served: 404,
/// `model_not_found`.
pub const MODELS_MAX: usize = 4096;
/// Number of models of one replica.
///
/// Beyond it: further models of the replica are ignored.
const REPLICA_MODELS_MAX: usize = 64;

/// One replica.
#[derive(Debug)]
pub struct Replica {
    /// What discovery says of it.
    pub found: Found,
    /// Its name, for the header of answers.
    pub name: HeaderValue,
    /// Its address, for the header of requests.
    pub authority: HeaderValue,
    /// A hash of its address: the same after a restart.
    pub identity: u64,
    /// What was sent to it, and what it has reported.
    pub ledger: Arc<Ledger>,
    /// What is believed to be in its cache.
    pub prefixes: Mutex<PrefixIndex>,
    /// When it was picked last, counted in picks.
    pub last_pick: AtomicU64,
    /// Requests answered and failed.
    pub answered: AtomicU64,
    /// Failures.
    pub failed: AtomicU64,
    /// The number in the names of what it keeps; 0 if it keeps nothing, or has not said.
    keeper: AtomicU64,
    told: Mutex<Told>,
    /// The models it serves, for those who look for requests that wait for it.
    fleets: ArcSwap<Vec<Weak<Fleet>>>,
    /// When the last report came, in milliseconds after `since`; [`NEVER`] before the first.
    reported: AtomicU64,
    /// When it was last seen to compute something, in milliseconds after `since`; [`NEVER`] before that.
    progressed: AtomicU64,
    since: Instant,
    is_removed: AtomicBool,
    is_reserved: AtomicBool,
    is_draining: AtomicBool,
    /// Whether the models that it reported can be looked up: reports arrive while requests look up models.
    is_listed: AtomicBool,
}

/// No report has come.
const NEVER: u64 = u64::MAX;

/// What a replica has said of itself beside the figures that picking goes by.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// The models it serves.
    pub models: Vec<String>,
    /// Of models, the most tokens that a prompt and its answer may have together, where its own list says.
    pub lengths: BTreeMap<String, u64>,
    /// The last report, whole.
    pub load: Load,
    /// Whether a stream of reports is open.
    pub is_connected: bool,
    /// Why not.
    pub problem: Option<String>,
}

impl Replica {
    fn new(found: Found, router: u64) -> Arc<Self> {
        let header =
            |text: String| HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("replica"));
        Arc::new(Self {
            name: header(found.name.clone()),
            authority: header(found.http.to_string()),
            identity: identity(found.http),
            ledger: Ledger::new(router),
            prefixes: Mutex::default(),
            last_pick: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            keeper: AtomicU64::new(0),
            told: Mutex::default(),
            fleets: ArcSwap::default(),
            reported: AtomicU64::new(NEVER),
            progressed: AtomicU64::new(NEVER),
            since: Instant::now(),
            is_removed: AtomicBool::new(false),
            is_reserved: AtomicBool::new(false),
            is_draining: AtomicBool::new(false),
            is_listed: AtomicBool::new(false),
            found,
        })
    }

    /// What it has said of itself.
    pub fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether discovery does not know it any more.
    pub fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Relaxed)
    }

    /// Whether it used to report and has been silent for `limit` although it should report. A replica that leaves
    /// finishes its requests, and its reports may end before them: that nobody listens to them any more, or that it
    /// stops to send them, says nothing about the requests.
    pub fn hangs(&self, now: Instant, limit: Duration) -> bool {
        let reported = self.reported.load(Ordering::Relaxed);
        reported != NEVER
            && !self.is_removed()
            && !self.is_draining.load(Ordering::Relaxed)
            && now.saturating_duration_since(self.since + Duration::from_millis(reported)) >= limit
    }

    fn has_reported(&self, now: Instant) {
        self.reported.store(self.millis(now), Ordering::Relaxed);
    }

    /// Notes that it computes: an answer of it began, or its reported figures changed.
    pub(crate) fn has_progressed(&self, now: Instant) {
        self.progressed.store(self.millis(now), Ordering::Relaxed);
    }

    /// Whether it was seen to compute something after `moment`. A replica that did is not broken, however long one
    /// of its requests takes.
    #[must_use]
    pub fn has_progressed_since(&self, moment: Instant) -> bool {
        let progressed = self.progressed.load(Ordering::Relaxed);
        progressed != NEVER && progressed > self.millis(moment)
    }

    fn millis(&self, moment: Instant) -> u64 {
        let after = moment.saturating_duration_since(self.since).as_millis();
        u64::try_from(after).unwrap_or(NEVER - 1)
    }

    /// The models it serves.
    pub(crate) fn fleets(&self) -> impl Iterator<Item = Arc<Fleet>> + use<> {
        let fleets = self.fleets.load_full();
        (0..fleets.len()).filter_map(move |index| fleets[index].upgrade())
    }

    /// Whether its room is reserved for a request that has waited too long.
    #[must_use]
    pub fn is_reserved(&self) -> bool {
        self.is_reserved.load(Ordering::Relaxed)
    }

    /// Reserves its room for one request, unless it is reserved already.
    pub(crate) fn reserve(self: &Arc<Self>) -> Option<Reservation> {
        let was_reserved = self.is_reserved.swap(true, Ordering::Relaxed);
        (!was_reserved).then(|| Reservation(Arc::clone(self)))
    }
}

/// A replica whose room is reserved. Dropping it ends the reservation.
#[derive(Debug)]
pub(crate) struct Reservation(Arc<Replica>);

impl Reservation {
    pub(crate) fn replica(&self) -> &Arc<Replica> {
        &self.0
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.0.is_reserved.store(false, Ordering::Relaxed);
    }
}

/// Whether the figures of two reports show that the replica computed something in between.
fn shows_progress(before: &Load, after: &Load) -> bool {
    let figures = |load: &Load| (load.running, load.waiting, load.uncomputed_tokens, load.blocks_active);
    figures(before) != figures(after)
}

/// The same for the same address, whatever happens to the process there.
fn identity(address: SocketAddr) -> u64 {
    xxh3_64(address.to_string().as_bytes())
}

/// What a report has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// Another process has the replica's place: nothing is known of it.
    pub is_new_process: bool,
    /// It serves other models than before, or takes requests again.
    pub is_routing: bool,
}

/// All replicas, by model.
#[derive(Debug)]
pub struct Replicas {
    router: u64,
    all: ArcSwap<Vec<Arc<Replica>>>,
    fleets: ArcSwap<BTreeMap<String, Arc<Fleet>>>,
    /// One at a time changes the two.
    writing: Mutex<()>,
    changes: watch::Sender<u64>,
    /// The tokens by which replicas recognize this router, if they need any.
    token_file: OnceLock<ReplicaTokenFile>,
}

impl Replicas {
    /// None as yet. `router` is the number that this router goes by.
    #[must_use]
    pub fn new(router: u64) -> Self {
        Self {
            router,
            all: ArcSwap::default(),
            fleets: ArcSwap::default(),
            writing: Mutex::default(),
            changes: watch::Sender::new(0),
            token_file: OnceLock::new(),
        }
    }

    /// Sets the file with the tokens by which replicas recognize this router. A second call has no effect.
    pub fn set_token_file(&self, file: ReplicaTokenFile) {
        let _ = self.token_file.set(file);
    }

    /// The file with the tokens by which replicas recognize this router, if there is one.
    #[must_use]
    pub fn token_file(&self) -> Option<&ReplicaTokenFile> {
        self.token_file.get()
    }

    /// Adds to the headers of a request or call to a replica what shows that it comes from this router.
    pub fn authenticate(&self, headers: &mut HeaderMap) {
        if let Some(file) = self.token_file() {
            file.tokens().add_to(headers);
        }
    }

    /// The number that this router goes by.
    #[must_use]
    pub fn router(&self) -> u64 {
        self.router
    }

    /// All that there are.
    pub fn all(&self) -> Arc<Vec<Arc<Replica>>> {
        self.all.load_full()
    }

    /// The replicas of a model; `None` if no replica has ever served it.
    pub fn fleet(&self, model: &str) -> Option<Arc<Fleet>> {
        self.fleets.load().get(model).cloned()
    }

    /// The replica that keeps what has this number in its name.
    pub fn keeper(&self, keeper: u64) -> Option<Arc<Replica>> {
        let all = self.all.load();
        let keeps = |replica: &&Arc<Replica>| {
            replica.is_listed.load(Ordering::Acquire) && replica.keeper.load(Ordering::Relaxed) == keeper
        };
        all.iter().find(|replica| keeper != 0 && keeps(replica)).cloned()
    }

    /// A model that a replica serves.
    pub fn fleet_of(&self, replica: &Arc<Replica>) -> Option<Arc<Fleet>> {
        let serves = |fleet: &&Arc<Fleet>| fleet.replicas().iter().any(|other| Arc::ptr_eq(other, replica));
        self.fleets.load().values().find(serves).cloned()
    }

    /// The only model there is, if there is one.
    pub fn only_fleet(&self) -> Option<Arc<Fleet>> {
        let fleets = self.fleets.load();
        let mut served = fleets.values().filter(|fleet| !fleet.replicas().is_empty());
        let first = served.next()?;
        // Several names of the same replicas are the same model.
        let same = |other: &Arc<Fleet>| same_replicas(&other.replicas(), &first.replicas());
        served.all(same).then(|| Arc::clone(first))
    }

    /// All models that were ever served.
    pub fn fleets(&self) -> Arc<BTreeMap<String, Arc<Fleet>>> {
        self.fleets.load_full()
    }

    /// Whether every replica has said what it serves, so that a model unknown now is one that is not served.
    pub fn are_known(&self) -> bool {
        let all = self.all.load();
        !all.is_empty() && all.iter().all(|replica| replica.is_listed.load(Ordering::Acquire))
    }

    /// Tells of replicas that come, go, or begin to serve.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Takes over what discovery has found, and gives the replicas that are new and those that are gone.
    pub fn update(&self, found: &[Found]) -> (Vec<Arc<Replica>>, Vec<Arc<Replica>>) {
        let writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let present = self.all.load_full();
        let known: HashMap<&Found, &Arc<Replica>> =
            present.iter().map(|replica| (&replica.found, replica)).collect();
        let mut new = Vec::new();
        let all: Vec<Arc<Replica>> = found
            .iter()
            .map(|found| {
                known.get(found).map_or_else(
                    || {
                        let replica = Replica::new(found.clone(), self.router);
                        new.push(Arc::clone(&replica));
                        replica
                    },
                    |replica| Arc::clone(replica),
                )
            })
            .collect();
        let wanted: BTreeSet<&Found> = found.iter().collect();
        let gone: Vec<Arc<Replica>> =
            present.iter().filter(|replica| !wanted.contains(&replica.found)).cloned().collect();
        for replica in &gone {
            replica.is_removed.store(true, Ordering::Relaxed);
        }
        self.all.store(Arc::new(all));
        self.rebuild();
        drop(writing);
        self.changes.send_modify(|number| *number += 1);
        (new, gone)
    }

    /// Takes a report of `replica` in.
    pub fn observe(&self, replica: &Replica, load: Load, now: Instant) -> Option<Changed> {
        let observed = replica.ledger.observe(&load, now);
        if observed == Observed::Outdated {
            return None;
        }
        let blocks = load.blocks_active as usize + load.blocks_evictable as usize;
        {
            let mut prefixes = replica.prefixes.lock().unwrap_or_else(PoisonError::into_inner);
            if observed == Observed::NewEpoch {
                prefixes.reset();
            }
            // What waits there has no blocks yet, and will.
            let to_come = replica.ledger.view(now, Duration::MAX).booked.blocks_without_token;
            prefixes.trim(blocks.saturating_add(usize::try_from(to_come).unwrap_or(usize::MAX)));
        }
        replica.keeper.store(load.keeper, Ordering::Relaxed);
        replica.is_draining.store(load.state() == State::Draining, Ordering::Relaxed);
        let mut told = replica.told();
        let serves = |load: &Load| load.state() == State::Serving;
        let models = &load.models[..load.models.len().min(REPLICA_MODELS_MAX)];
        let is_routing = told.models != models || serves(&told.load) != serves(&load);
        if told.models != models {
            told.models = models.to_vec();
        }
        if shows_progress(&told.load, &load) {
            replica.has_progressed(now);
        }
        told.load = load;
        drop(told);
        replica.has_reported(now);
        if is_routing {
            self.models_changed();
        }
        Some(Changed { is_new_process: observed == Observed::NewEpoch, is_routing })
    }

    /// Takes over the models of a replica that was asked over HTTP for want of reports, and what it says of what it
    /// keeps.
    pub fn observe_models(&self, replica: &Replica, mut models: Vec<String>, keeper: u64) {
        replica.keeper.store(keeper, Ordering::Relaxed);
        let mut told = replica.told();
        told.is_connected = true;
        told.problem = None;
        models.truncate(REPLICA_MODELS_MAX);
        if told.models == models {
            return;
        }
        told.models = models;
        drop(told);
        self.models_changed();
    }

    fn models_changed(&self) {
        let writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.rebuild();
        drop(writing);
        self.changes.send_modify(|number| *number += 1);
    }

    /// Makes the fleets anew. What is known of a model stays while it has no replica.
    fn rebuild(&self) {
        let mut members: BTreeMap<String, Vec<Arc<Replica>>> = BTreeMap::new();
        for replica in self.all.load().iter() {
            for model in &replica.told().models {
                members.entry(model.clone()).or_default().push(Arc::clone(replica));
            }
        }
        let mut fleets = BTreeMap::clone(&self.fleets.load());
        for (model, fleet) in &fleets {
            if !members.contains_key(model) {
                fleet.set_replicas(Vec::new());
            }
        }
        for (model, replicas) in members {
            if !fleets.contains_key(&model) && fleets.len() >= MODELS_MAX {
                fleets.retain(|_, fleet| !fleet.replicas().is_empty());
                if fleets.len() >= MODELS_MAX {
                    tracing::warn!(model, "more models than may be: this one is not served");
                    continue;
                }
            }
            let fleet = fleets.entry(model.clone()).or_insert_with(|| Arc::new(Fleet::new(model)));
            fleet.set_replicas(replicas);
        }
        let mut listed = Vec::new();
        for replica in self.all.load().iter() {
            let models = replica.told().models.clone();
            let served = models.iter().filter_map(|model| fleets.get(model)).map(Arc::downgrade);
            replica.fleets.store(Arc::new(served.collect()));
            listed.push((Arc::clone(replica), !models.is_empty()));
        }
        self.fleets.store(Arc::new(fleets));
        for (replica, has_models) in listed {
            replica.is_listed.store(has_models, Ordering::Release);
        }
    }
}

fn same_replicas(a: &[Arc<Replica>], b: &[Arc<Replica>]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(port: u16) -> Found {
        let http = SocketAddr::from(([127, 0, 0, 1], port));
        Found { http, grpc: None, name: format!("r{port}"), pod: None }
    }

    fn load(epoch: u64, report: u64, models: &[&str]) -> Load {
        let models = models.iter().map(|&model| model.to_owned()).collect();
        Load { epoch, report, models, state: State::Serving.into(), ..Load::default() }
    }

    #[test]
    fn replicas_are_found_by_the_models_that_they_say_they_serve() {
        let replicas = Replicas::new(1);
        let (new, _) = replicas.update(&[found(1), found(2)]);
        assert!(replicas.fleet("a").is_none() && !replicas.are_known());
        let now = Instant::now();
        replicas.observe(&new[0], load(1, 1, &["a", "alias"]), now).unwrap();
        assert!(!replicas.are_known());
        assert!(replicas.only_fleet().is_some(), "two names of one replica");
        let changed = replicas.observe(&new[1], load(2, 1, &["b"]), now).unwrap();
        assert!(changed.is_routing && replicas.are_known());
        assert!(replicas.only_fleet().is_none());
        assert_eq!(replicas.fleet("a").unwrap().replicas().len(), 1);
        assert!(!replicas.observe(&new[1], load(2, 2, &["b"]), now).unwrap().is_routing);
        assert!(replicas.observe(&new[1], load(2, 2, &["c"]), now).is_none(), "outdated");
        assert!(replicas.observe(&new[1], load(3, 1, &["b"]), now).unwrap().is_new_process);
    }

    #[test]
    fn a_replica_that_leaves_does_not_hang_though_it_reports_no_more() {
        let limit = Duration::from_secs(10);
        let replicas = Replicas::new(1);
        let (new, _) = replicas.update(&[found(1), found(2)]);
        let (draining, removed) = (&new[0], &new[1]);
        let now = Instant::now();
        assert!(!draining.hangs(now + limit, limit), "it never reported");
        for replica in &new {
            replicas.observe(replica, load(1, 1, &["a"]), now).unwrap();
            assert!(!replica.hangs(now + limit / 2, limit) && replica.hangs(now + limit, limit));
        }
        let drains = Load { state: State::Draining.into(), ..load(1, 2, &["a"]) };
        replicas.observe(draining, drains, now).unwrap();
        replicas.update(&[found(1)]);
        assert!(!draining.hangs(now + limit, limit) && !removed.hangs(now + limit, limit));
        // Another process in its place serves again.
        replicas.observe(draining, load(2, 1, &["a"]), now).unwrap();
        assert!(draining.hangs(now + limit, limit));
    }

    #[test]
    fn what_is_kept_is_found_where_it_is_kept_and_not_when_another_process_is_there() {
        let replicas = Replicas::new(1);
        let (new, _) = replicas.update(&[found(1), found(2)]);
        let kept = |epoch, keeper| Load { keeper, ..load(epoch, 1, &["a"]) };
        replicas.observe(&new[0], kept(1, 7), Instant::now()).unwrap();
        // One that keeps nothing, or does not say.
        replicas.observe(&new[1], kept(2, 0), Instant::now()).unwrap();
        assert!(Arc::ptr_eq(&replicas.keeper(7).unwrap(), &new[0]));
        assert_eq!(replicas.fleet_of(&new[0]).unwrap().model, "a");
        assert!(replicas.keeper(8).is_none() && replicas.keeper(0).is_none());
        replicas.observe(&new[0], kept(3, 9), Instant::now()).unwrap();
        assert!(replicas.keeper(7).is_none() && replicas.keeper(9).is_some());
        replicas.update(&[found(2)]);
        assert!(replicas.keeper(9).is_none(), "it is gone");
    }

    #[test]
    fn a_replica_that_can_be_found_by_what_it_stores_can_be_found_by_its_model() {
        for _ in 0..500 {
            let replicas = Replicas::new(1);
            let (new, _) = replicas.update(&[found(1)]);
            std::thread::scope(|scope| {
                let report = Load { keeper: 7, ..load(1, 1, &["a"]) };
                scope.spawn(|| replicas.observe(&new[0], report, Instant::now()));
                let stored = loop {
                    let is_known = replicas.are_known();
                    let stored = replicas.keeper(7);
                    assert!(!is_known || stored.is_some() && replicas.fleet("a").is_some());
                    if let Some(stored) = stored {
                        break stored;
                    }
                };
                assert!(replicas.fleet_of(&stored).is_some());
            });
        }
    }

    #[test]
    fn a_replica_makes_progress_when_its_figures_change_and_not_by_reporting_alone() {
        let replicas = Replicas::new(1);
        let (new, _) = replicas.update(&[found(1)]);
        let (replica, sent) = (&new[0], Instant::now());
        let report = |number, uncomputed_tokens, seconds| {
            let load = Load { uncomputed_tokens, running: 1, ..load(1, number, &["a"]) };
            replicas.observe(replica, load, sent + Duration::from_secs(seconds)).unwrap();
        };
        assert!(!replica.has_progressed_since(sent));
        report(1, 9000, 1);
        report(2, 8000, 2);
        report(3, 8000, 3);
        assert!(replica.has_progressed_since(sent));
        assert!(!replica.has_progressed_since(sent + Duration::from_secs(2)), "its engine stands still");
    }

    #[test]
    fn a_replica_is_reserved_for_one_request_at_a_time() {
        let replicas = Replicas::new(1);
        let (new, _) = replicas.update(&[found(1)]);
        let reservation = new[0].reserve().unwrap();
        assert!(new[0].is_reserved() && new[0].reserve().is_none());
        drop(reservation);
        assert!(!new[0].is_reserved());
    }

    #[test]
    fn a_model_is_remembered_when_its_last_replica_goes_and_others_stay_the_same() {
        let replicas = Replicas::new(1);
        let (new, _) = replicas.update(&[found(1), found(2)]);
        replicas.observe(&new[0], load(1, 1, &["a"]), Instant::now());
        let (more, gone) = replicas.update(&[found(2), found(3)]);
        assert_eq!((more[0].found.http.port(), gone[0].found.http.port()), (3, 1));
        assert!(gone[0].is_removed() && !new[1].is_removed());
        assert!(Arc::ptr_eq(&replicas.all()[0], &new[1]));
        assert!(replicas.fleet("a").unwrap().replicas().is_empty());
    }
}

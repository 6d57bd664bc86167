//! The replicas as they are known now, and which models they serve. It follows discovery and the replicas'
//! reports; picking among them is not for here.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use http::HeaderValue;
use proto::v1alpha1::{Load, State};
use tokio::sync::watch;
use xxhash_rust::xxh3::xxh3_64;

use crate::discovery::Found;
use crate::fleet::Fleet;
use crate::ledger::{Ledger, Observed};
use crate::prefix::PrefixIndex;

/// Most models that are known at a time, those included that no replica serves any more.
pub const MODELS_MAX: usize = 4096;
/// Most models of one replica; further ones are ignored.
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
    /// When the last report came, in milliseconds after `since`; [`NEVER`] before the first.
    reported: AtomicU64,
    since: Instant,
    is_removed: AtomicBool,
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
            reported: AtomicU64::new(NEVER),
            since: Instant::now(),
            is_removed: AtomicBool::new(false),
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

    /// Whether it used to report and has been silent for `limit` although it is still wanted.
    pub fn hangs(&self, now: Instant, limit: Duration) -> bool {
        let reported = self.reported.load(Ordering::Relaxed);
        reported != NEVER
            && now.saturating_duration_since(self.since + Duration::from_millis(reported)) >= limit
    }

    fn has_reported(&self, now: Instant) {
        let after = now.saturating_duration_since(self.since).as_millis();
        self.reported.store(u64::try_from(after).unwrap_or(NEVER - 1), Ordering::Relaxed);
    }
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
        all.iter().find(|replica| keeper != 0 && replica.keeper.load(Ordering::Relaxed) == keeper).cloned()
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
        !all.is_empty() && all.iter().all(|replica| !replica.told().models.is_empty())
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
        let mut told = replica.told();
        let serves = |load: &Load| load.state() == State::Serving;
        let models = &load.models[..load.models.len().min(REPLICA_MODELS_MAX)];
        let is_routing = told.models != models || serves(&told.load) != serves(&load);
        if told.models != models {
            told.models = models.to_vec();
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
        self.fleets.store(Arc::new(fleets));
    }
}

fn same_replicas(a: &[Arc<Replica>], b: &[Arc<Replica>]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(port: u16) -> Found {
        Found { http: SocketAddr::from(([127, 0, 0, 1], port)), grpc: None, name: format!("r{port}") }
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

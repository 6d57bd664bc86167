//! All replicas, and the models that they serve. Discovery and the reports of the replicas update the lists. This
//! module does not choose replicas for requests.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use http::HeaderMap;
use proto::replica_token::ReplicaTokenFile;
use proto::v1alpha1::Load;
use tokio::sync::watch;

use crate::discovery::DiscoveredReplica;
use crate::replica::{Replica, ReportChanges};
use crate::served_model::ServedModel;

/// Number of models that the router knows, including those that no replica serves anymore.
///
/// If exceeded: models without a replica and without waiting requests are forgotten; if this is not enough, the new
/// model is not served: 404, `model_not_found`.
pub const MODELS_MAX: usize = 4096;

/// All replicas, by model.
#[derive(Debug)]
pub struct Replicas {
    router: u64,
    all: ArcSwap<Vec<Arc<Replica>>>,
    served_models: ArcSwap<BTreeMap<String, Arc<ServedModel>>>,
    served_models_by_replica: ArcSwap<HashMap<SocketAddr, Vec<Arc<ServedModel>>>>,
    /// Serializes changes of `all`, `served_models` and `served_models_by_replica`.
    writing: Mutex<()>,
    changes: watch::Sender<u64>,
    /// The tokens with which this router authenticates itself to replicas, if they require any.
    token_file: OnceLock<ReplicaTokenFile>,
}

/// The changes that an update by discovery has caused.
#[derive(Debug)]
pub struct ReplicasUpdate {
    /// The replicas that were not known before.
    pub added: Vec<Arc<Replica>>,
    /// The replicas that discovery no longer lists.
    pub removed: Vec<Arc<Replica>>,
}

impl Replicas {
    /// Creates an empty list. `router` is the ID of this router, by which replicas identify it.
    #[must_use]
    pub fn new(router: u64) -> Self {
        Self {
            router,
            all: ArcSwap::default(),
            served_models: ArcSwap::default(),
            served_models_by_replica: ArcSwap::default(),
            writing: Mutex::default(),
            changes: watch::Sender::new(0),
            token_file: OnceLock::new(),
        }
    }

    /// Sets the file with the tokens with which this router authenticates itself to replicas. A second call has no
    /// effect.
    pub fn set_token_file(&self, file: ReplicaTokenFile) {
        let _ = self.token_file.set(file);
    }

    /// The file with the tokens with which this router authenticates itself to replicas, if it was set.
    #[must_use]
    pub fn token_file(&self) -> Option<&ReplicaTokenFile> {
        self.token_file.get()
    }

    /// Adds the replica tokens to the headers of a request or call to a replica.
    pub fn authenticate(&self, headers: &mut HeaderMap) {
        if let Some(file) = self.token_file() {
            file.tokens().add_to(headers);
        }
    }

    /// The ID by which replicas identify this router.
    #[must_use]
    pub fn router(&self) -> u64 {
        self.router
    }

    /// All replicas that discovery lists.
    pub fn all(&self) -> Arc<Vec<Arc<Replica>>> {
        self.all.load_full()
    }

    /// The replicas of a model, or `None` if the model is unknown.
    pub fn served_model(&self, model: &str) -> Option<Arc<ServedModel>> {
        self.served_models.load().get(model).cloned()
    }

    /// The replica whose store has this ID.
    pub fn by_store(&self, store_id: u64) -> Option<Arc<Replica>> {
        let all = self.all.load();
        all.iter().find(|replica| replica.is_listed() && replica.has_store(store_id)).cloned()
    }

    /// The first model, in alphabetical order, that a replica serves.
    pub fn served_model_of(&self, replica: &Arc<Replica>) -> Option<Arc<ServedModel>> {
        self.served_models.load().values().find(|served_model| served_model.contains(replica)).cloned()
    }

    /// The models that a replica serves.
    pub(crate) fn served_models_of(&self, replica: &Replica) -> Vec<Arc<ServedModel>> {
        self.served_models_by_replica.load().get(&replica.discovered.http).cloned().unwrap_or_default()
    }

    /// The model that is served, if there is exactly one. All names that the same replicas serve count as one model.
    pub fn only_served_model(&self) -> Option<Arc<ServedModel>> {
        let served_models = self.served_models.load();
        let mut served = served_models.values().filter(|served_model| !served_model.replicas().is_empty());
        let first = served.next()?;
        // Names that are served by the same replicas count as one model.
        served.all(|other| have_same_replicas(other, first)).then(|| Arc::clone(first))
    }

    /// All known models, including those that no replica serves anymore.
    pub fn served_models(&self) -> Arc<BTreeMap<String, Arc<ServedModel>>> {
        self.served_models.load_full()
    }

    /// Whether any replica has reported its models.
    pub fn has_any_reported(&self) -> bool {
        self.all.load().iter().any(|replica| replica.is_listed())
    }

    /// Whether every replica has reported its models, so that a model that is still unknown is not served.
    pub fn have_all_reported(&self) -> bool {
        let all = self.all.load();
        !all.is_empty() && all.iter().all(|replica| replica.is_listed())
    }

    /// A channel whose value changes when replicas are added or removed, serve different models, or begin or stop
    /// accepting requests.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Replaces the list of replicas with the list from discovery.
    pub fn update(&self, discovered: &[DiscoveredReplica]) -> ReplicasUpdate {
        let writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let present = self.all.load_full();
        let known: HashMap<&DiscoveredReplica, &Arc<Replica>> =
            present.iter().map(|replica| (&replica.discovered, replica)).collect();
        let mut added = Vec::new();
        let mut known_or_new = |discovered: &DiscoveredReplica| {
            if let Some(&replica) = known.get(discovered) {
                return Arc::clone(replica);
            }
            let replica = Replica::new(discovered.clone(), self.router);
            added.push(Arc::clone(&replica));
            replica
        };
        let all: Vec<Arc<Replica>> = discovered.iter().map(&mut known_or_new).collect();
        let listed: BTreeSet<&DiscoveredReplica> = discovered.iter().collect();
        let is_removed = |replica: &&Arc<Replica>| !listed.contains(&replica.discovered);
        let removed: Vec<Arc<Replica>> = present.iter().filter(is_removed).cloned().collect();
        for replica in &removed {
            replica.set_removed();
        }
        self.all.store(Arc::new(all));
        self.rebuild();
        drop(writing);
        self.changes.send_modify(|number| *number += 1);
        ReplicasUpdate { added, removed }
    }

    /// Applies a load report of `replica`. Returns `None` if it is out of date.
    pub fn observe(&self, replica: &Replica, load: Load, now: Instant) -> Option<ReportChanges> {
        let changes = replica.observe(load, now)?;
        if changes.affects_routing {
            self.update_models();
        }
        Some(changes)
    }

    /// Applies the list of models of a replica that does not report its load, and the ID of its store.
    pub fn observe_models(&self, replica: &Replica, models: Vec<String>, store_id: u64) {
        if replica.observe_models(models, store_id) {
            self.update_models();
        }
    }

    fn update_models(&self) {
        let writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.rebuild();
        drop(writing);
        self.changes.send_modify(|number| *number += 1);
    }

    /// Assigns the replicas to their models. A model without a replica keeps its queue and its statistics, unless it is
    /// forgotten because of [`MODELS_MAX`].
    fn rebuild(&self) {
        let all = self.all.load();
        let mut members: BTreeMap<String, Vec<Arc<Replica>>> = BTreeMap::new();
        for replica in all.iter() {
            for model in &replica.status().models {
                members.entry(model.clone()).or_default().push(Arc::clone(replica));
            }
        }
        let mut served_models = BTreeMap::clone(&self.served_models.load());
        for (model, served_model) in &served_models {
            if !members.contains_key(model) {
                served_model.set_replicas(Vec::new());
            }
        }
        for (model, replicas) in members {
            if !served_models.contains_key(&model) && served_models.len() >= MODELS_MAX {
                // Do not remove a model with waiting requests: they would never get a replica, and would time out.
                served_models.retain(|_, served_model| {
                    !served_model.replicas().is_empty() || served_model.waiters() > 0
                });
                if served_models.len() >= MODELS_MAX {
                    tracing::warn!(model, "the model is not served: too many models (limit: {MODELS_MAX})");
                    continue;
                }
            }
            let served_model =
                served_models.entry(model.clone()).or_insert_with(|| Arc::new(ServedModel::new(model)));
            served_model.set_replicas(replicas);
        }
        let mut served_models_by_replica = HashMap::new();
        let mut listed = Vec::new();
        for replica in all.iter() {
            let models = replica.status().models.clone();
            let served = models.iter().filter_map(|model| served_models.get(model)).cloned().collect();
            served_models_by_replica.insert(replica.discovered.http, served);
            listed.push((replica, !models.is_empty()));
        }
        self.served_models.store(Arc::new(served_models));
        self.served_models_by_replica.store(Arc::new(served_models_by_replica));
        // Mark the replicas only now: if `by_store` finds a replica, `served_model_of` must find a model for it.
        for (replica, has_models) in listed {
            replica.set_listed(has_models);
        }
    }
}

fn have_same_replicas(a: &ServedModel, b: &ServedModel) -> bool {
    let (a, b) = (a.replicas(), b.replicas());
    a.len() == b.len() && a.iter().zip(b.iter()).all(|(a, b)| Arc::ptr_eq(a, b))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proto::v1alpha1::State;

    use super::*;
    use crate::queue::{NO_TENANT, PriorityClass, QueuedRequest};

    fn discovered(port: u16) -> DiscoveredReplica {
        let http = SocketAddr::from(([127, 0, 0, 1], port));
        DiscoveredReplica { http, grpc: None, name: format!("r{port}"), pod: None }
    }

    fn load(epoch: u64, report: u64, models: &[&str]) -> Load {
        let models = models.iter().map(|&model| model.to_owned()).collect();
        Load { epoch, report, models, state: State::Serving.into(), ..Load::default() }
    }

    #[test]
    fn replicas_are_found_by_the_models_that_they_report() {
        let replicas = Replicas::new(1);
        let new = replicas.update(&[discovered(1), discovered(2)]).added;
        assert!(replicas.served_model("a").is_none() && !replicas.have_all_reported());
        let now = Instant::now();
        replicas.observe(&new[0], load(1, 1, &["a", "alias"]), now).unwrap();
        assert!(!replicas.have_all_reported());
        assert!(replicas.only_served_model().is_some(), "two names of one replica");
        let changed = replicas.observe(&new[1], load(2, 1, &["b"]), now).unwrap();
        assert!(changed.affects_routing && replicas.have_all_reported());
        assert!(replicas.only_served_model().is_none());
        assert_eq!(replicas.served_model("a").unwrap().replicas().len(), 1);
        assert!(!replicas.observe(&new[1], load(2, 2, &["b"]), now).unwrap().affects_routing);
        assert!(replicas.observe(&new[1], load(2, 2, &["c"]), now).is_none(), "outdated");
        assert!(replicas.observe(&new[1], load(3, 1, &["b"]), now).unwrap().is_new_process);
    }

    #[test]
    fn a_leaving_replica_without_reports_does_not_count_as_hung() {
        let limit = Duration::from_secs(10);
        let replicas = Replicas::new(1);
        let new = replicas.update(&[discovered(1), discovered(2)]).added;
        let (draining, removed) = (&new[0], &new[1]);
        let now = Instant::now();
        assert!(!draining.hangs(now + limit, limit), "a replica without a report does not hang");
        for replica in &new {
            replicas.observe(replica, load(1, 1, &["a"]), now).unwrap();
            assert!(!replica.hangs(now + limit / 2, limit) && replica.hangs(now + limit, limit));
        }
        let drains = Load { state: State::Draining.into(), ..load(1, 2, &["a"]) };
        replicas.observe(draining, drains, now).unwrap();
        replicas.update(&[discovered(1)]);
        assert!(!draining.hangs(now + limit, limit) && !removed.hangs(now + limit, limit));
        // The process of the draining replica is replaced, so silence counts as a hang again.
        replicas.observe(draining, load(2, 1, &["a"]), now).unwrap();
        assert!(draining.hangs(now + limit, limit));
    }

    #[test]
    fn a_store_is_found_until_another_process_takes_the_place_of_its_replica() {
        let replicas = Replicas::new(1);
        let new = replicas.update(&[discovered(1), discovered(2)]).added;
        let with_store = |epoch, store_id| Load { store_id, ..load(epoch, 1, &["a"]) };
        replicas.observe(&new[0], with_store(1, 7), Instant::now()).unwrap();
        // The other replica has no store, or has not reported it.
        replicas.observe(&new[1], with_store(2, 0), Instant::now()).unwrap();
        assert!(Arc::ptr_eq(&replicas.by_store(7).unwrap(), &new[0]));
        assert_eq!(replicas.served_model_of(&new[0]).unwrap().name, "a");
        assert!(replicas.by_store(8).is_none() && replicas.by_store(0).is_none());
        replicas.observe(&new[0], with_store(3, 9), Instant::now()).unwrap();
        assert!(replicas.by_store(7).is_none() && replicas.by_store(9).is_some());
        replicas.update(&[discovered(2)]);
        assert!(replicas.by_store(9).is_none(), "the replica is removed");
    }

    #[test]
    fn a_replica_that_is_found_by_its_store_is_found_by_its_model() {
        for _ in 0..500 {
            let replicas = Replicas::new(1);
            let new = replicas.update(&[discovered(1)]).added;
            std::thread::scope(|scope| {
                let report = Load { store_id: 7, ..load(1, 1, &["a"]) };
                scope.spawn(|| replicas.observe(&new[0], report, Instant::now()));
                let stored = loop {
                    let have_all_reported = replicas.have_all_reported();
                    let stored = replicas.by_store(7);
                    assert!(!have_all_reported || stored.is_some() && replicas.served_model("a").is_some());
                    if let Some(stored) = stored {
                        break stored;
                    }
                };
                assert!(replicas.served_model_of(&stored).is_some());
            });
        }
    }

    #[test]
    fn a_replica_makes_progress_when_its_figures_change_and_not_by_reporting_alone() {
        let replicas = Replicas::new(1);
        let new = replicas.update(&[discovered(1)]).added;
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
        assert!(!replica.has_progressed_since(sent + Duration::from_secs(2)), "its engine makes no progress");
    }

    #[test]
    fn a_replica_is_reserved_for_one_request_at_a_time() {
        let replicas = Replicas::new(1);
        let new = replicas.update(&[discovered(1)]).added;
        let reservation = new[0].reserve(0).unwrap();
        assert!(new[0].is_reserved_against(0) && new[0].reserve(0).is_none());
        drop(reservation);
        assert!(!new[0].is_reserved_against(0));
    }

    #[test]
    fn a_model_stays_known_when_its_last_replica_is_removed() {
        let replicas = Replicas::new(1);
        let new = replicas.update(&[discovered(1), discovered(2)]).added;
        replicas.observe(&new[0], load(1, 1, &["a"]), Instant::now());
        let ReplicasUpdate { added, removed } = replicas.update(&[discovered(2), discovered(3)]);
        assert_eq!((added[0].discovered.http.port(), removed[0].discovered.http.port()), (3, 1));
        assert!(removed[0].is_removed() && !new[1].is_removed());
        assert!(Arc::ptr_eq(&replicas.all()[0], &new[1]));
        assert!(replicas.served_model("a").unwrap().replicas().is_empty());
    }

    #[test]
    fn a_model_without_replicas_is_remembered_while_requests_wait_for_it() {
        const MODELS_PER_REPORT: usize = 64;
        let (replicas, now) = (Replicas::new(1), Instant::now());
        let new = replicas.update(&[discovered(1)]).added;
        let name = |report: u64, model: usize| format!("{report}-{model}");
        let report = |number: u64| {
            let models = (0..MODELS_PER_REPORT).map(|model| name(number, model)).collect();
            replicas.observe(&new[0], Load { models, ..load(1, number, &[]) }, now).unwrap();
        };
        let last = (MODELS_MAX / MODELS_PER_REPORT) as u64;
        (1..=last).for_each(&report);
        assert_eq!(replicas.served_models().len(), MODELS_MAX);
        let awaited = replicas.served_model(&name(1, 0)).unwrap();
        let class = PriorityClass::Standard;
        let request = QueuedRequest { tenant: NO_TENANT, class, tokens: 1, arrived: now, deadline: None };
        awaited.with_waiting(|waiting| waiting.queue.push(request, now)).unwrap();
        report(last + 1);
        assert!(Arc::ptr_eq(&replicas.served_model(&name(1, 0)).unwrap(), &awaited));
        assert!(replicas.served_model(&name(1, 1)).is_none(), "no request waits for it");
        assert_eq!(replicas.served_models().len(), MODELS_PER_REPORT + 1);
    }
}

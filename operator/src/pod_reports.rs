//! The reports of pods: routers report which replicas they have admitted and the usage of the replicas' KV caches, and
//! fetching containers report their progress. A background task per pod requests the reports while they are needed, and
//! reconciles read the latest ones from memory. A router that does not respond therefore delays only its own resource.
//! A missing report never counts as an admission.
//!
//! ```text
//! reconcile ─ reports() ─► follow the routers while replicas wait for admission ─► task: stream, backoff ─┐
//!     ▲                                                                                                   │
//!     └────────────────────────── a changed report triggers a reconcile ◄─────────────────────────────────┘
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::runtime::reflector::ObjectRef;
use operator_api::LlmDeployment;
use rand::RngExt as _;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use crate::names::Component;
use crate::pod::{PodState, awaiting_admission};

mod client;

pub(crate) use client::watch_replicas;
pub use client::{CacheUsage, FetchProgress, NetworkClient, PodClient, ReportedReplica, RouterReport};

/// Timeout for the response of a pod to the operator.
///
/// If exceeded: the operator retries later; a router counts as unreachable until it responds.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time without a report from a router, which reports at least once a second.
///
/// If exceeded: the router counts as unreachable, and the operator reconnects.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(5);
/// The shortest pause, without jitter, before the next attempt to reach a router.
const BACKOFF_MIN: Duration = Duration::from_millis(250);
/// The longest pause, without jitter, before the next attempt to reach a pod.
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// The pause between two requests for the progress of a fetch while the pod responds.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(3);
/// Number of open connections from the operator to pods. If `--namespace` is repeated, the limit applies to each
/// namespace.
///
/// If exceeded: further connections wait.
const CONNECTIONS_MAX: usize = 1024;

/// The reports of the pods of a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodReports {
    /// The names of the replicas that every reachable router has admitted.
    pub admitted: BTreeSet<String>,
    /// The usage of the KV caches of all replicas, if a router has reported it.
    pub cache_usage: Option<CacheUsage>,
    /// The progress of the fetch, if one is running.
    pub progress: Option<FetchProgress>,
}

/// Whether the usage of KV caches is requested from routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheSampling {
    /// The usage is requested only while replicas wait for admission.
    Skip,
    /// The usage is also requested if no replica waits for admission, from one ready router.
    Sample,
}

/// Follows the reports of pods. Dropping it aborts all its tasks.
pub struct ReportCollector {
    state: Arc<CollectorState>,
    tasks: Mutex<JoinSet<()>>,
}

struct CollectorState {
    client: Arc<dyn PodClient>,
    /// The channel to which the resources whose reports have changed are sent.
    changes: mpsc::Sender<ObjectRef<LlmDeployment>>,
    connections: Semaphore,
    /// The tasks and the reports of each resource, by its UID.
    resources: Mutex<HashMap<String, ResourceReports>>,
}

/// The tasks that follow the pods of a resource, and their latest reports.
#[derive(Default)]
struct ResourceReports {
    tasks: HashMap<ReportSource, AbortHandle>,
    /// The states of the routers, by address.
    routers: BTreeMap<String, RouterState>,
    cache_usage: Option<CacheUsage>,
    progress: Option<FetchProgress>,
}

impl Drop for ResourceReports {
    fn drop(&mut self) {
        self.tasks.values().for_each(AbortHandle::abort);
    }
}

/// A report that is requested from a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct ReportSource {
    report: ReportKind,
    /// The address of the pod.
    address: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum ReportKind {
    /// The replicas that a router has admitted, as a stream.
    Admission,
    /// The usage of KV caches, once, from a router.
    CacheUsage,
    /// The progress of a fetch.
    Progress,
}

/// The state of a router while replicas wait to be admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RouterState {
    /// The router has not responded yet.
    Connecting,
    /// The router cannot be reached, so admission does not depend on it.
    Unreachable,
    /// The names of the pods that the router has admitted.
    Admits(BTreeSet<String>),
}

/// A pod that is followed.
struct Pod {
    owner: ObjectRef<LlmDeployment>,
    uid: String,
    address: String,
}

impl ReportCollector {
    /// Creates a collector that connects to pods with `client`, and sends the resources whose reports have changed to
    /// `changes`.
    #[must_use]
    pub fn new(client: Arc<dyn PodClient>, changes: mpsc::Sender<ObjectRef<LlmDeployment>>) -> Self {
        let connections = Semaphore::new(CONNECTIONS_MAX);
        let state = CollectorState { client, changes, connections, resources: Mutex::default() };
        Self { state: Arc::new(state), tasks: Mutex::default() }
    }

    /// Returns the latest reports of the pods of the resource `owner`, and requests the missing ones in the background.
    /// A report that differs from the previous one triggers another reconcile.
    #[must_use]
    pub fn reports(
        &self,
        owner: &ObjectRef<LlmDeployment>,
        uid: &str,
        pods: &[PodState],
        sampling: CacheSampling,
    ) -> PodReports {
        let sources = sources(pods, sampling);
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        let mut resources = self.state.resources();
        if sources.is_empty() && !resources.contains_key(uid) {
            return PodReports::default();
        }
        let reports = resources.entry(uid.to_owned()).or_default();
        reports.tasks.retain(|source, task| {
            // The task that samples the cache usage ends on its own.
            let is_needed = source.report == ReportKind::CacheUsage || sources.contains(source);
            let stays = !task.is_finished() && is_needed;
            if !stays {
                task.abort();
            }
            stays
        });
        let is_followed = |address: &String| {
            sources.contains(&ReportSource { report: ReportKind::Admission, address: address.clone() })
        };
        reports.routers.retain(|address, _| is_followed(address));
        if !sources.iter().any(|source| source.report == ReportKind::Progress) {
            reports.progress = None;
        }
        for source in sources {
            if reports.tasks.contains_key(&source) {
                continue;
            }
            let ReportSource { report, address } = source.clone();
            if report == ReportKind::Admission {
                reports.routers.insert(address.clone(), RouterState::Connecting);
            }
            let pod = Pod { owner: owner.clone(), uid: uid.to_owned(), address };
            let state = Arc::clone(&self.state);
            reports.tasks.insert(source, tasks.spawn(follow(state, pod, report)));
        }
        reports.summary()
    }

    /// Forgets the resources whose UID is not in `present`.
    pub fn retain(&self, present: &HashSet<String>) {
        self.state.resources().retain(|uid, _| present.contains(uid));
    }
}

/// The reports that are needed, given the pods of a resource.
fn sources(pods: &[PodState], sampling: CacheSampling) -> BTreeSet<ReportSource> {
    let alive = pods.iter().filter(|pod| !pod.is_terminating && !pod.is_finished);
    let mut sources = BTreeSet::new();
    let is_waiting = !awaiting_admission(pods).is_empty();
    for pod in alive {
        let Some(address) = &pod.address else { continue };
        let mut insert = |report| sources.insert(ReportSource { report, address: address.clone() });
        if pod.is_fetching {
            insert(ReportKind::Progress);
        }
        if pod.component == Component::Router.name() {
            if is_waiting {
                insert(ReportKind::Admission);
            } else if sampling == CacheSampling::Sample && pod.is_ready {
                insert(ReportKind::CacheUsage);
            }
        }
    }
    // The progress of one pod that fetches the model is enough, because the other pods fetch the same model. The cache
    // usage from one ready router is enough, because each router reports on all replicas.
    let mut seen = HashSet::new();
    sources.retain(|source| source.report == ReportKind::Admission || seen.insert(source.report));
    sources
}

async fn follow(state: Arc<CollectorState>, pod: Pod, report: ReportKind) {
    match report {
        ReportKind::Admission => state.follow_router(&pod).await,
        ReportKind::CacheUsage => state.sample_router(&pod).await,
        ReportKind::Progress => state.follow_fetch(&pod).await,
    }
}

impl CollectorState {
    fn resources(&self) -> MutexGuard<'_, HashMap<String, ResourceReports>> {
        self.resources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows a router until the task is aborted.
    async fn follow_router(&self, pod: &Pod) {
        let mut pause = BACKOFF_MIN;
        loop {
            if let Ok(_connection) = self.connections.acquire().await
                && let Ok(Some(mut reports)) =
                    timeout(RESPONSE_TIMEOUT, self.client.watch_replicas(&pod.address)).await
            {
                while let Ok(Some(report)) = timeout(SILENCE_TIMEOUT, reports.next()).await {
                    pause = BACKOFF_MIN;
                    self.update(pod, |reports| reports.record_admission(pod, &report)).await;
                }
            }
            self.update(pod, |reports| {
                let former = reports.routers.insert(pod.address.clone(), RouterState::Unreachable);
                former != Some(RouterState::Unreachable)
            })
            .await;
            let jittered = pause.mul_f64(rand::rng().random_range(0.75..1.25));
            sleep(jittered).await;
            pause = (pause * 2).min(BACKOFF_MAX);
        }
    }

    async fn sample_router(&self, pod: &Pod) {
        let Ok(_connection) = self.connections.acquire().await else { return };
        let first = async { self.client.watch_replicas(&pod.address).await?.next().await };
        if let Ok(Some(report)) = timeout(RESPONSE_TIMEOUT, first).await {
            self.update(pod, |reports| reports.record_cache_usage(&report)).await;
        }
    }

    async fn follow_fetch(&self, pod: &Pod) {
        let mut pause = PROGRESS_INTERVAL;
        loop {
            let progress = match self.connections.acquire().await {
                Ok(_connection) => {
                    timeout(RESPONSE_TIMEOUT, self.client.progress(&pod.address)).await.ok().flatten()
                }
                Err(_) => None,
            };
            pause = if progress.is_some() { PROGRESS_INTERVAL } else { (pause * 2).min(BACKOFF_MAX) };
            if progress.is_some() {
                let record = |reports: &mut ResourceReports| {
                    std::mem::replace(&mut reports.progress, progress) != progress
                };
                self.update(pod, record).await;
            }
            sleep(pause).await;
        }
    }

    /// Records a report with `record`, and requests a reconcile if `record` returns that something has changed.
    async fn update(&self, pod: &Pod, record: impl FnOnce(&mut ResourceReports) -> bool) {
        let has_changed = self.resources().get_mut(&pod.uid).is_some_and(record);
        if has_changed {
            // Sending fails only while the operator shuts down.
            let _ = self.changes.send(pod.owner.clone()).await;
        }
    }
}

impl ResourceReports {
    fn summary(&self) -> PodReports {
        let mut admitted: Option<BTreeSet<String>> = None;
        let all_have_responded = !self.routers.values().any(|state| *state == RouterState::Connecting);
        for state in self.routers.values().filter(|_| all_have_responded) {
            let RouterState::Admits(names) = state else { continue };
            admitted = Some(match admitted {
                None => names.clone(),
                Some(admitted) => admitted.intersection(names).cloned().collect(),
            });
        }
        PodReports {
            admitted: admitted.unwrap_or_default(),
            cache_usage: self.cache_usage,
            progress: self.progress,
        }
    }

    fn record_admission(&mut self, pod: &Pod, report: &RouterReport) -> bool {
        let namespace = pod.owner.namespace.as_deref().unwrap_or_default();
        let ready = report.replicas.iter().filter(|replica| replica.is_ready);
        let pods = ready.filter_map(|replica| replica.pod.as_ref());
        let names = pods.filter(|(of, _)| of == namespace).map(|(_, name)| name.clone()).collect();
        let has_usage_changed = self.record_cache_usage(report);
        let state = RouterState::Admits(names);
        self.routers.insert(pod.address.clone(), state.clone()) != Some(state) || has_usage_changed
    }

    fn record_cache_usage(&mut self, report: &RouterReport) -> bool {
        let usage = report.cache_usage();
        let former = self.cache_usage.replace(usage);
        former.and_then(CacheUsage::percent) != usage.percent()
    }
}

#[cfg(test)]
mod tests;

//! What pods report: routers, which replicas they have admitted and how full those are; fetches, how far they are. All of it
//! is asked for in the background, by a task for each pod of which there is something to learn, and read from memory by
//! reconciles: a router that does not answer costs nobody but its own resource. What is not reported is not known, and
//! nothing is concluded from that.
//!
//! ```text
//! reconcile ─ reports() ─► follow the routers of replicas that wait ─► task: stream, backoff ─┐
//!     ▲                                                                                       │
//!     └──────────────────────── what has changed leads to its resource ◄──────────────────────┘
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

use crate::desired::names::Component;
use crate::observe::awaiting;
use crate::pod::PodState;
use crate::status::percent;

mod client;

pub(crate) use client::watch_replicas;
pub use client::{Network, PodClient, Progress, ReportedReplica, RouterReport};

/// Time in which a pod must answer the operator.
///
/// Beyond it: the operator asks again later; a router counts as unreachable until it answers.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Time for which a router may report nothing. It reports once a second.
///
/// Beyond it: the router counts as unreachable, and the operator connects again.
const SILENCE_LIMIT: Duration = Duration::from_secs(5);
/// The pauses between attempts to reach a pod: the first, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// The pause before a fetch is asked again how far it is.
const PROGRESS_PAUSE: Duration = Duration::from_secs(3);
/// Number of open connections from the operator to pods.
///
/// Beyond it: further connections wait.
const CONNECTIONS_MAX: usize = 1024;

/// What the pods of a resource have reported.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodReports {
    /// Replicas, by their pods' names, that every router that answers has admitted.
    pub admitted: BTreeSet<String>,
    /// Blocks of the KV cache that requests hold, and blocks in all, over all replicas; if a router has reported them.
    pub blocks: Option<(f64, f64)>,
    /// How far a fetch is, if one is under way.
    pub progress: Option<Progress>,
}

/// How much is asked of routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sample {
    /// What must be known to go on.
    Needed,
    /// How full the KV caches are, too.
    All,
}

/// Follows what pods report. Dropping it ends all its tasks.
pub struct Fleet {
    shared: Arc<Shared>,
    tasks: Mutex<JoinSet<()>>,
}

struct Shared {
    client: Arc<dyn PodClient>,
    /// Who has to be told that something has changed.
    changes: mpsc::Sender<ObjectRef<LlmDeployment>>,
    connections: Semaphore,
    /// By the identity of the resource.
    followed: Mutex<HashMap<String, Followed>>,
}

/// What is known of the pods of a resource.
#[derive(Default)]
struct Followed {
    tasks: HashMap<(Subject, String), AbortHandle>,
    /// By the address of the router.
    routers: BTreeMap<String, RouterState>,
    blocks: Option<(f64, f64)>,
    progress: Option<Progress>,
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.tasks.values().for_each(AbortHandle::abort);
    }
}

/// What is asked of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Subject {
    /// Of a router, which replicas it has admitted, for as long as that is wanted.
    Admission,
    /// Of a router, how full the KV caches are, once.
    Load,
    /// Of a fetch, how far it is.
    Progress,
}

/// What a router has reported while replicas wait to be admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RouterState {
    /// Nothing yet.
    Connecting,
    /// It cannot be reached: it has no say.
    Unreachable,
    /// The names of the pods that it has admitted.
    Admits(BTreeSet<String>),
}

/// A pod of which something is asked.
struct Pod {
    owner: ObjectRef<LlmDeployment>,
    uid: String,
    address: String,
}

impl Fleet {
    /// Asks pods by `client`, and sends those whose pods have reported something new to `changes`.
    #[must_use]
    pub fn new(client: Arc<dyn PodClient>, changes: mpsc::Sender<ObjectRef<LlmDeployment>>) -> Self {
        let connections = Semaphore::new(CONNECTIONS_MAX);
        let shared = Shared { client, changes, connections, followed: Mutex::default() };
        Self { shared: Arc::new(shared), tasks: Mutex::default() }
    }

    /// What the pods of the resource `owner` have reported so far. What more there is to learn is asked for in the
    /// background, and leads to another reconcile.
    #[must_use]
    pub fn reports(
        &self,
        owner: &ObjectRef<LlmDeployment>,
        uid: &str,
        pods: &[PodState],
        sample: Sample,
    ) -> PodReports {
        let wanted = wanted(pods, sample);
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        let mut all = self.shared.followed();
        if wanted.is_empty() && !all.contains_key(uid) {
            return PodReports::default();
        }
        let followed = all.entry(uid.to_owned()).or_default();
        followed.tasks.retain(|key, task| {
            // A sample ends by itself.
            let stays = !task.is_finished() && (key.0 == Subject::Load || wanted.contains(key));
            if !stays {
                task.abort();
            }
            stays
        });
        followed.routers.retain(|address, _| wanted.contains(&(Subject::Admission, address.clone())));
        if !wanted.iter().any(|(subject, _)| *subject == Subject::Progress) {
            followed.progress = None;
        }
        for (subject, address) in wanted {
            let key = (subject, address.clone());
            if followed.tasks.contains_key(&key) {
                continue;
            }
            if subject == Subject::Admission {
                followed.routers.insert(address.clone(), RouterState::Connecting);
            }
            let pod = Pod { owner: owner.clone(), uid: uid.to_owned(), address };
            let shared = Arc::clone(&self.shared);
            followed.tasks.insert(key, tasks.spawn(follow(shared, pod, subject)));
        }
        followed.reports()
    }

    /// Forgets the resources whose identity is not in `present`.
    pub fn retain(&self, present: &HashSet<String>) {
        self.shared.followed().retain(|uid, _| present.contains(uid));
    }
}

/// Of whom something is to be asked.
fn wanted(pods: &[PodState], sample: Sample) -> BTreeSet<(Subject, String)> {
    let alive = pods.iter().filter(|pod| !pod.is_terminating && !pod.is_finished);
    let mut wanted = BTreeSet::new();
    let is_waiting = !awaiting(pods).is_empty();
    for pod in alive {
        let Some(address) = &pod.address else { continue };
        if pod.is_fetching {
            wanted.insert((Subject::Progress, address.clone()));
        }
        if pod.component == Component::Router.name() {
            if is_waiting {
                wanted.insert((Subject::Admission, address.clone()));
            } else if sample == Sample::All {
                wanted.insert((Subject::Load, address.clone()));
            }
        }
    }
    // One fetch stands for all, and one router knows all replicas.
    let mut seen = HashSet::new();
    wanted.retain(|(subject, _)| *subject == Subject::Admission || seen.insert(*subject));
    wanted
}

impl Followed {
    fn reports(&self) -> PodReports {
        let mut admitted: Option<BTreeSet<String>> = None;
        let is_settled = !self.routers.values().any(|state| *state == RouterState::Connecting);
        for state in self.routers.values().filter(|_| is_settled) {
            let RouterState::Admits(names) = state else { continue };
            admitted = Some(match admitted {
                None => names.clone(),
                Some(admitted) => admitted.intersection(names).cloned().collect(),
            });
        }
        PodReports { admitted: admitted.unwrap_or_default(), blocks: self.blocks, progress: self.progress }
    }
}

async fn follow(shared: Arc<Shared>, pod: Pod, subject: Subject) {
    match subject {
        Subject::Admission => shared.follow_router(&pod).await,
        Subject::Load => shared.sample_router(&pod).await,
        Subject::Progress => shared.follow_fetch(&pod).await,
    }
}

impl Shared {
    fn followed(&self) -> MutexGuard<'_, HashMap<String, Followed>> {
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows a router until the task is aborted.
    async fn follow_router(&self, pod: &Pod) {
        let mut pause = BACKOFF.0;
        loop {
            if let Ok(_connection) = self.connections.acquire().await
                && let Ok(Some(mut reports)) =
                    timeout(ANSWER_LIMIT, self.client.watch_replicas(&pod.address)).await
            {
                while let Ok(Some(report)) = timeout(SILENCE_LIMIT, reports.next()).await {
                    pause = BACKOFF.0;
                    self.learn(pod, |followed| followed.router(pod, &report)).await;
                }
            }
            self.learn(pod, |followed| {
                followed.routers.insert(pod.address.clone(), RouterState::Unreachable)
                    != Some(RouterState::Unreachable)
            })
            .await;
            let jittered = pause.mul_f64(rand::rng().random_range(0.75..1.25));
            sleep(jittered).await;
            pause = (pause * 2).min(BACKOFF.1);
        }
    }

    async fn sample_router(&self, pod: &Pod) {
        let Ok(_connection) = self.connections.acquire().await else { return };
        let first = async { self.client.watch_replicas(&pod.address).await?.next().await };
        if let Ok(Some(report)) = timeout(ANSWER_LIMIT, first).await {
            self.learn(pod, |followed| followed.load(&report)).await;
        }
    }

    async fn follow_fetch(&self, pod: &Pod) {
        let mut pause = PROGRESS_PAUSE;
        loop {
            let progress = match self.connections.acquire().await {
                Ok(_connection) => {
                    timeout(ANSWER_LIMIT, self.client.progress(&pod.address)).await.ok().flatten()
                }
                Err(_) => None,
            };
            pause = if progress.is_some() { PROGRESS_PAUSE } else { (pause * 2).min(BACKOFF.1) };
            if progress.is_some() {
                self.learn(pod, |followed| std::mem::replace(&mut followed.progress, progress) != progress)
                    .await;
            }
            sleep(pause).await;
        }
    }

    /// Takes note of something, and tells if that was news.
    async fn learn(&self, pod: &Pod, note: impl FnOnce(&mut Followed) -> bool) {
        let is_news = self.followed().get_mut(&pod.uid).is_some_and(note);
        if is_news {
            // Nobody listens any more: the operator is about to end.
            let _ = self.changes.send(pod.owner.clone()).await;
        }
    }
}

impl Followed {
    fn router(&mut self, pod: &Pod, report: &RouterReport) -> bool {
        let namespace = pod.owner.namespace.as_deref().unwrap_or_default();
        let ready = report.replicas.iter().filter(|replica| replica.is_ready);
        let pods = ready.filter_map(|replica| replica.pod.as_ref());
        let names = pods.filter(|(of, _)| of == namespace).map(|(_, name)| name.clone()).collect();
        let is_more_full = self.load(report);
        let state = RouterState::Admits(names);
        self.routers.insert(pod.address.clone(), state.clone()) != Some(state) || is_more_full
    }

    fn load(&mut self, report: &RouterReport) -> bool {
        let sum =
            |of: fn(&ReportedReplica) -> u32| report.replicas.iter().map(of).map(f64::from).sum::<f64>();
        let blocks = (sum(|replica| replica.blocks_active), sum(|replica| replica.blocks_total));
        let former = self.blocks.replace(blocks);
        former.and_then(percent) != percent(blocks)
    }
}

#[cfg(test)]
mod tests;

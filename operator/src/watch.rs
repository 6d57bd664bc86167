//! The watches: one for each kind that the operator owns and one for pods, in each namespace that is looked after, and
//! what they know, found by whose it is. A change leads to whoever owns what has changed. What is known may be a moment
//! old, and nobody takes it for more.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{Event as ReportedEvent, Pod};
use kube::api::{Api, DynamicObject};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Resource as _, ResourceExt as _};
use operator_api::LlmDeployment;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::desired::names::{INSTANCE, MANAGED_BY, OPERATOR};
use crate::manifest::Kind;
use crate::pod::{PodState, Problem, look};

mod failures;

use failures::{Failure, FailureKind};

/// Changes that wait to be looked at. Beyond, watches wait.
const CHANGES_MAX: usize = 1024;

/// What the watches know.
#[derive(Debug, Default)]
pub struct Stores {
    known: Mutex<Known>,
    monitors: bool,
}

#[derive(Debug, Default)]
struct Known {
    /// Objects, by the identity of their owner.
    owned: HashMap<String, BTreeMap<(Kind, String), Compact>>,
    /// Pods, by namespace and name of the resource they belong to.
    pods: HashMap<(String, String), BTreeMap<String, PodState>>,
    /// What keeps Jobs from creating pods and pods from mounting volumes, by namespace and name of the Job or pod.
    failures: HashMap<(String, String), Failure>,
}

/// An object as text. As a tree of values it would take ten times the memory, for as long as the operator runs; it is
/// looked at when its resource is reconciled and at no other time.
#[derive(Clone, Debug)]
struct Compact {
    owner: ObjectRef<LlmDeployment>,
    text: Arc<str>,
}

impl Compact {
    fn new(owner: ObjectRef<LlmDeployment>, mut object: DynamicObject) -> Option<Self> {
        object.managed_fields_mut().clear();
        Some(Self { owner, text: serde_json::to_string(&object).ok()?.into() })
    }

    fn object(&self) -> Option<DynamicObject> {
        serde_json::from_str(&self.text).ok()
    }
}

impl Stores {
    /// Empty ones. `monitors` says whether the cluster knows ServiceMonitors.
    #[must_use]
    pub fn new(monitors: bool) -> Self {
        Self { known: Mutex::default(), monitors }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The objects owned by the resource `uid`.
    #[must_use]
    pub fn owned(&self, uid: &str) -> BTreeMap<(Kind, String), Arc<DynamicObject>> {
        let owned = self.known().owned.get(uid).cloned().unwrap_or_default();
        let object = |(key, compact): (_, Compact)| Some((key, Arc::new(compact.object()?)));
        owned.into_iter().filter_map(object).collect()
    }

    /// The pods that belong to a resource, in the order of their names.
    #[must_use]
    pub fn pods(&self, namespace: &str, name: &str) -> Vec<PodState> {
        let key = (namespace.to_owned(), name.to_owned());
        let known = self.known();
        let mut pods: Vec<PodState> =
            known.pods.get(&key).into_iter().flat_map(BTreeMap::values).cloned().collect();
        // A failure may have passed since: it counts while the pod still waits.
        for pod in pods.iter_mut().filter(|pod| pod.awaits.is_some() && pod.problem.is_none()) {
            let failure = known.failures.get(&(namespace.to_owned(), pod.name.clone()));
            pod.problem = failure.map(|failure| failure.problem.clone());
        }
        pods
    }

    /// Why the Job `name` with the identity `uid` could not create its last pod, if it could not.
    #[must_use]
    pub fn job_failure(&self, namespace: &str, name: &str, uid: &str) -> Option<Problem> {
        let known = self.known();
        let failure = known.failures.get(&(namespace.to_owned(), name.to_owned()))?;
        (failure.uid == uid).then(|| failure.problem.clone())
    }

    /// Whether the cluster knows ServiceMonitors.
    #[must_use]
    pub fn has_monitors(&self) -> bool {
        self.monitors
    }

    /// Takes note of an object, and gives its owner.
    pub fn insert(&self, kind: Kind, object: DynamicObject) -> Option<ObjectRef<LlmDeployment>> {
        let (owner, uid) = owner(&object)?;
        let name = object.name_any();
        let compact = Compact::new(owner.clone(), object)?;
        self.known().owned.entry(uid).or_default().insert((kind, name), compact);
        Some(owner)
    }

    /// Forgets an object, and gives its owner.
    pub fn remove(&self, kind: Kind, object: &DynamicObject) -> Option<ObjectRef<LlmDeployment>> {
        let (owner, uid) = owner(object)?;
        let mut known = self.known();
        let owned = known.owned.get_mut(&uid)?;
        owned.remove(&(kind, object.name_any()));
        if owned.is_empty() {
            known.owned.remove(&uid);
        }
        Some(owner)
    }

    /// Forgets all objects of a kind and a namespace that are not in `seen`, and gives their owners.
    fn retain(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        seen: &HashSet<(String, String)>,
    ) -> Vec<ObjectRef<LlmDeployment>> {
        let mut owners = Vec::new();
        self.known().owned.retain(|uid, owned| {
            owned.retain(|(of, name), compact| {
                let elsewhere =
                    namespace.is_some_and(|namespace| compact.owner.namespace.as_deref() != Some(namespace));
                let stays = *of != kind || elsewhere || seen.contains(&(uid.clone(), name.clone()));
                if !stays {
                    owners.push(compact.owner.clone());
                }
                stays
            });
            !owned.is_empty()
        });
        owners
    }

    /// Takes note of a pod, and gives whose it is if that makes a difference.
    fn insert_pod(&self, pod: &Pod) -> Option<ObjectRef<LlmDeployment>> {
        let key = pod_key(pod)?;
        let state = look(pod);
        let mut known = self.known();
        let pods = known.pods.entry(key.clone()).or_default();
        if pods.get(&state.name) == Some(&state) {
            return None;
        }
        pods.insert(state.name.clone(), state);
        Some(ObjectRef::new(&key.1).within(&key.0))
    }

    fn remove_pod(&self, pod: &Pod) -> Option<ObjectRef<LlmDeployment>> {
        let key = pod_key(pod)?;
        let mut known = self.known();
        let pods = known.pods.get_mut(&key)?;
        pods.remove(&pod.name_any());
        if pods.is_empty() {
            known.pods.remove(&key);
        }
        Some(ObjectRef::new(&key.1).within(&key.0))
    }

    fn retain_pods(
        &self,
        namespace: Option<&str>,
        seen: &HashSet<(String, String)>,
    ) -> Vec<ObjectRef<LlmDeployment>> {
        let mut owners = Vec::new();
        self.known().pods.retain(|(of, instance), pods| {
            if namespace.is_some_and(|namespace| namespace != of) {
                return true;
            }
            let before = pods.len();
            pods.retain(|name, _| seen.contains(&(of.clone(), name.clone())));
            if pods.len() != before {
                owners.push(ObjectRef::new(instance).within(of));
            }
            !pods.is_empty()
        });
        owners
    }
}

/// The resource that owns an object, and that resource's identity.
fn owner(object: &DynamicObject) -> Option<(ObjectRef<LlmDeployment>, String)> {
    let kind = LlmDeployment::kind(&());
    let owner = object
        .owner_references()
        .iter()
        .find(|owner| owner.controller == Some(true) && owner.kind == kind)?;
    Some((ObjectRef::new(&owner.name).within(&object.namespace()?), owner.uid.clone()))
}

fn pod_key(pod: &Pod) -> Option<(String, String)> {
    Some((pod.namespace()?, pod.labels().get(INSTANCE)?.clone()))
}

/// Running watches.
#[derive(Debug)]
pub struct Watches {
    /// Whoever owns something that has changed.
    pub changes: mpsc::Receiver<ObjectRef<LlmDeployment>>,
    /// For others who learn of changes.
    pub sender: mpsc::Sender<ObjectRef<LlmDeployment>>,
    /// How many watches have told all there is.
    ready: watch::Receiver<usize>,
    count: usize,
}

impl Watches {
    /// Starts them on `tasks`. Dropping those ends them.
    pub fn start(
        client: &Client,
        namespace: Option<&str>,
        stores: &Arc<Stores>,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> Self {
        let (sender, changes) = mpsc::channel(CHANGES_MAX);
        let (counter, ready) = watch::channel(0);
        let counter = Arc::new(counter);
        let monitor = stores.has_monitors().then_some(Kind::ServiceMonitor);
        let kinds: Vec<Kind> = Kind::BUILT_IN.into_iter().chain(monitor).collect();
        for kind in &kinds {
            let resource = kind.resource();
            let api: Api<DynamicObject> = match namespace {
                Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
                None => Api::all_with(client.clone(), &resource),
            };
            let follow = Follow {
                namespace: namespace.map(str::to_owned),
                sender: sender.clone(),
                ready: counter.clone(),
            };
            tasks.spawn(follow.objects(*kind, api, stores.clone()));
        }
        let pods: Api<Pod> = match namespace {
            Some(namespace) => Api::namespaced(client.clone(), namespace),
            None => Api::all(client.clone()),
        };
        let follow =
            Follow { namespace: namespace.map(str::to_owned), sender: sender.clone(), ready: counter };
        tasks.spawn(follow.pods(pods, stores.clone()));
        for kind in FailureKind::ALL {
            let events: Api<ReportedEvent> = match namespace {
                Some(namespace) => Api::namespaced(client.clone(), namespace),
                None => Api::all(client.clone()),
            };
            tasks.spawn(failures::follow(kind, events, stores.clone(), sender.clone()));
        }
        Self { changes, sender, ready, count: kinds.len() + 1 }
    }

    /// Waits until all of them have told all there is.
    pub async fn ready(&mut self) {
        let count = self.count;
        // That nobody counts any more means that the watches have ended, which their tasks report.
        let _ = self.ready.wait_for(|ready| *ready >= count).await;
    }
}

/// A watch, and whom it tells.
struct Follow {
    namespace: Option<String>,
    sender: mpsc::Sender<ObjectRef<LlmDeployment>>,
    ready: Arc<watch::Sender<usize>>,
}

fn config() -> watcher::Config {
    watcher::Config::default().labels(&format!("{MANAGED_BY}={OPERATOR}"))
}

impl Follow {
    async fn objects(self, kind: Kind, api: Api<DynamicObject>, stores: Arc<Stores>) -> anyhow::Result<()> {
        let strip = |object: &mut DynamicObject| object.managed_fields_mut().clear();
        let mut events = watcher(api, config()).modify(strip).default_backoff().boxed();
        let mut seen = HashSet::new();
        let mut is_first = true;
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => seen.clear(),
                Ok(Event::InitApply(object)) => {
                    seen.extend(owner(&object).map(|(_, uid)| (uid, object.name_any())));
                    self.tell(stores.insert(kind, object)).await;
                }
                Ok(Event::InitDone) => {
                    for owner in stores.retain(kind, self.namespace.as_deref(), &seen) {
                        self.tell(Some(owner)).await;
                    }
                    self.done(&mut is_first);
                }
                Ok(Event::Apply(object)) => self.tell(stores.insert(kind, object)).await,
                Ok(Event::Delete(object)) => self.tell(stores.remove(kind, &object)).await,
                Err(error) => tracing::warn!(kind = kind.name(), %error, "failed to watch"),
            }
        }
        anyhow::bail!("the watch of {} has ended", kind.name())
    }

    async fn pods(self, api: Api<Pod>, stores: Arc<Stores>) -> anyhow::Result<()> {
        let strip = |pod: &mut Pod| pod.managed_fields_mut().clear();
        let mut events = watcher(api, config()).modify(strip).default_backoff().boxed();
        let mut seen = HashSet::new();
        let mut is_first = true;
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => seen.clear(),
                Ok(Event::InitApply(pod)) => {
                    seen.insert((pod.namespace().unwrap_or_default(), pod.name_any()));
                    self.tell(stores.insert_pod(&pod)).await;
                }
                Ok(Event::InitDone) => {
                    for owner in stores.retain_pods(self.namespace.as_deref(), &seen) {
                        self.tell(Some(owner)).await;
                    }
                    self.done(&mut is_first);
                }
                Ok(Event::Apply(pod)) => self.tell(stores.insert_pod(&pod)).await,
                Ok(Event::Delete(pod)) => self.tell(stores.remove_pod(&pod)).await,
                Err(error) => tracing::warn!(kind = "Pod", %error, "failed to watch"),
            }
        }
        anyhow::bail!("the watch of Pod has ended")
    }

    fn done(&self, is_first: &mut bool) {
        if std::mem::take(is_first) {
            self.ready.send_modify(|ready| *ready += 1);
        }
    }

    async fn tell(&self, owner: Option<ObjectRef<LlmDeployment>>) {
        if let Some(owner) = owner {
            // Nobody listens any more: the operator is about to end.
            let _ = self.sender.send(owner).await;
        }
    }
}

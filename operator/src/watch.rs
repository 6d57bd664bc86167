//! The watches: one for each kind of object that the operator creates, one for pods and one for each kind of failure,
//! in each namespace that the operator manages. They fill the caches in [`Stores`]. A change of the caches usually
//! triggers a reconcile of the resource to which the changed object belongs.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{Event as KubernetesEvent, Pod};
use kube::api::{Api, ApiResource, DynamicObject};
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Resource, ResourceExt as _};
use operator_api::LlmDeployment;
use process::error::chain;
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::client::objects_api;
use crate::manifest::Kind;
use crate::metrics::Metrics;
use crate::names::{MANAGED_BY, OPERATOR};

mod failures;
mod stores;

use failures::FailureKind;
pub use stores::Stores;
use stores::owner;

/// Number of changes that the watches have reported and the controller has not received yet.
///
/// If exceeded: the watches wait.
const CHANGES_MAX: usize = 1024;

/// A resource as the API server stores it. Decoding can fail if the resource was stored under another schema; the value
/// then contains the error, so that the error does not end the watch of the other resources.
pub type StoredDeployment = DeserializeGuard<LlmDeployment>;

/// Decodes the resource in an event of a watch.
pub(crate) fn stored_deployment(event: Event<DynamicObject>) -> Event<StoredDeployment> {
    let stored = |object: DynamicObject| {
        let metadata = object.metadata.clone();
        let invalid = |error: serde_json::Error| InvalidObject { error: error.to_string(), metadata };
        DeserializeGuard(decode(object).map_err(invalid))
    };
    match event {
        Event::Apply(object) => Event::Apply(stored(object)),
        Event::Delete(object) => Event::Delete(stored(object)),
        Event::Init => Event::Init,
        Event::InitApply(object) => Event::InitApply(stored(object)),
        Event::InitDone => Event::InitDone,
    }
}

/// The objects that are watched, and the client, the caches and the metrics that the watches use.
#[derive(Clone, Copy)]
pub struct WatchScope<'a> {
    /// The client for the API server.
    pub client: &'a Client,
    /// The namespace of the objects; `None` for all namespaces.
    pub namespace: Option<&'a str>,
    /// The caches that the watches fill.
    pub stores: &'a Arc<Stores>,
    /// The metrics that count failures.
    pub metrics: &'a Metrics,
    /// The interval at which a cluster without the kind ServiceMonitor is checked for it.
    pub discovery_interval: Duration,
}

/// The running watches of a controller.
#[derive(Debug)]
pub struct Watches {
    /// Receives the resources to which a changed object belongs.
    pub changes: mpsc::Receiver<ObjectRef<LlmDeployment>>,
    /// A sender to `changes`, for other sources of changes.
    pub sender: mpsc::Sender<ObjectRef<LlmDeployment>>,
    /// The number of watches that have listed all existing objects.
    ready: watch::Receiver<usize>,
    count: usize,
}

impl Watches {
    /// Starts the watches on `tasks`. Dropping `tasks` ends the watches.
    pub fn start(scope: WatchScope<'_>, tasks: &mut JoinSet<anyhow::Result<()>>) -> Self {
        let WatchScope { client, namespace, stores, metrics, discovery_interval } = scope;
        let (sender, changes) = mpsc::channel(CHANGES_MAX);
        let (counter, ready) = watch::channel(0);
        let follower = Follower {
            namespace: namespace.map(str::to_owned),
            stores: stores.clone(),
            metrics: metrics.clone(),
            sender: sender.clone(),
            ready: Arc::new(counter),
        };
        let monitor = stores.has_service_monitors().then_some(Kind::ServiceMonitor);
        let kinds: Vec<Kind> = Kind::BUILT_IN.into_iter().chain(monitor).collect();
        for kind in &kinds {
            let api = objects_api(client, namespace, &kind.api_resource());
            tasks.spawn(follower.clone().objects(*kind, api));
        }
        if monitor.is_none() {
            tasks.spawn(follower.clone().service_monitors(client.clone(), discovery_interval));
        }
        let pods = objects_api(client, namespace, &ApiResource::erase::<Pod>(&()));
        tasks.spawn(follower.clone().pods(pods));
        let events = objects_api(client, namespace, &ApiResource::erase::<KubernetesEvent>(&()));
        for kind in FailureKind::ALL {
            tasks.spawn(follower.clone().failures(kind, events.clone()));
        }
        Self { changes, sender, ready, count: kinds.len() + 1 }
    }

    /// Waits until the watches have listed all existing objects and pods.
    ///
    /// Until then, this function discards the changes, so that a watch with more objects than the channel holds can
    /// list them all. No change is lost if the caller lists the resources afterward: the list triggers a reconcile of
    /// each resource, and the caches already contain the discarded changes.
    pub async fn ready(&mut self) {
        let Self { changes, ready, count, .. } = self;
        let listed = async {
            // An error means that the watches have ended, which their tasks report.
            let _ = ready.wait_for(|ready| *ready >= *count).await;
        };
        tokio::pin!(listed);
        loop {
            tokio::select! {
                () = &mut listed => return,
                Some(_) = changes.recv() => {}
            }
        }
    }
}

fn decode<K: DeserializeOwned>(object: DynamicObject) -> serde_json::Result<K> {
    serde_json::from_value(serde_json::to_value(object)?)
}

/// Decodes an object of a kind that is built into Kubernetes. An object that cannot be decoded is logged and ignored.
fn decode_built_in<K>(object: DynamicObject) -> Option<K>
where
    K: Resource<DynamicType = ()> + DeserializeOwned,
{
    let name = object.name_any();
    let decoded = decode(object);
    if let Err(error) = &decoded {
        tracing::warn!(kind = %K::kind(&()), name, error = chain(error), "failed to decode an object");
    }
    decoded.ok()
}

/// Returns whether the cluster has the kind ServiceMonitor, which belongs to the Prometheus operator.
///
/// # Errors
/// The API server rejected the request or did not respond.
pub async fn has_service_monitors(client: &Client) -> kube::Result<bool> {
    let kind = Kind::ServiceMonitor;
    match client.list_api_group_resources(&kind.api_version()).await {
        Ok(list) => Ok(list.resources.iter().any(|resource| resource.kind == kind.name())),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error),
    }
}

/// Logs and counts a failed attempt to list or watch the objects of a kind. The watcher tries again.
pub(crate) fn record_failure(metrics: &Metrics, kind: &'static str, error: &watcher::Error) {
    metrics.record_watch_failure(kind);
    tracing::warn!(kind, error = chain(error), "failed to list or watch objects");
}

fn config() -> watcher::Config {
    watcher::Config::default().labels(&format!("{MANAGED_BY}={OPERATOR}"))
}

/// Follows a watch: stores the reported objects, and sends the resources whose objects have changed.
#[derive(Clone)]
struct Follower {
    namespace: Option<String>,
    stores: Arc<Stores>,
    metrics: Metrics,
    sender: mpsc::Sender<ObjectRef<LlmDeployment>>,
    ready: Arc<watch::Sender<usize>>,
}

impl Follower {
    async fn objects(self, kind: Kind, api: Api<DynamicObject>) -> anyhow::Result<()> {
        let mut events = watcher(api, config()).default_backoff().boxed();
        let mut seen = HashSet::new();
        let mut is_first = true;
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => seen.clear(),
                Ok(Event::InitApply(object)) => {
                    seen.extend(owner(&object).map(|(_, uid)| (uid, object.name_any())));
                    self.send(self.stores.insert(kind, object)).await;
                }
                Ok(Event::InitDone) => {
                    for owner in self.stores.retain(kind, self.namespace.as_deref(), &seen) {
                        self.send(Some(owner)).await;
                    }
                    self.count_ready(&mut is_first);
                }
                Ok(Event::Apply(object)) => self.send(self.stores.insert(kind, object)).await,
                Ok(Event::Delete(object)) => self.send(self.stores.remove(kind, &object)).await,
                Err(error) => record_failure(&self.metrics, kind.name(), &error),
            }
        }
        anyhow::bail!("the watch of the kind {} has ended", kind.name())
    }

    /// Waits until the cluster has the kind ServiceMonitor, because the Prometheus operator may be installed later.
    /// Then triggers reconciles of the resources, so that their ServiceMonitors are created, and watches the
    /// ServiceMonitors.
    async fn service_monitors(self, client: Client, interval: Duration) -> anyhow::Result<()> {
        loop {
            tokio::time::sleep(interval).await;
            match has_service_monitors(&client).await {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => tracing::warn!(
                    error = chain(&error),
                    "failed to list the API resources of the Prometheus operator"
                ),
            }
        }
        tracing::info!("the kind ServiceMonitor has become available");
        for owner in self.stores.add_service_monitors() {
            self.send(Some(owner)).await;
        }
        let kind = Kind::ServiceMonitor;
        let api = objects_api(&client, self.namespace.as_deref(), &kind.api_resource());
        // The readiness of the operator does not depend on this watch, so this channel has no receiver.
        let ready = Arc::new(watch::channel(0).0);
        Self { ready, ..self }.objects(kind, api).await
    }

    async fn pods(self, api: Api<DynamicObject>) -> anyhow::Result<()> {
        let mut events = watcher(api, config()).default_backoff().boxed();
        let mut seen = HashSet::new();
        let mut is_first = true;
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => seen.clear(),
                Ok(Event::InitApply(pod)) => {
                    seen.insert((pod.namespace().unwrap_or_default(), pod.name_any()));
                    self.insert_pod(pod).await;
                }
                Ok(Event::InitDone) => {
                    for owner in self.stores.retain_pods(self.namespace.as_deref(), &seen) {
                        self.send(Some(owner)).await;
                    }
                    self.count_ready(&mut is_first);
                }
                Ok(Event::Apply(pod)) => self.insert_pod(pod).await,
                Ok(Event::Delete(pod)) => self.send(self.stores.remove_pod(&pod)).await,
                Err(error) => record_failure(&self.metrics, "Pod", &error),
            }
        }
        anyhow::bail!("the watch of Pods has ended")
    }

    async fn insert_pod(&self, pod: DynamicObject) {
        let owners = decode_built_in(pod).map(|pod| self.stores.insert_pod(&pod));
        for owner in owners.into_iter().flatten() {
            self.send(Some(owner)).await;
        }
    }

    /// Follows the events about a kind of failure. The operator does not wait for this watch, because the operator also
    /// works without the permission to read events. Its messages about failures are then less specific.
    async fn failures(self, kind: FailureKind, api: Api<DynamicObject>) -> anyhow::Result<()> {
        let selector = format!("involvedObject.kind={},reason={}", kind.object_kind(), kind.reason());
        let config = watcher::Config::default().fields(&selector);
        let mut events = watcher(api, config).default_backoff().boxed();
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => self.stores.clear_failures(kind, self.namespace.as_deref()),
                Ok(Event::InitApply(event) | Event::Apply(event)) => {
                    let owner =
                        decode_built_in(event).and_then(|event| self.stores.insert_failure(kind, &event));
                    self.send(owner).await;
                }
                Ok(Event::InitDone) => {}
                Ok(Event::Delete(event)) => self.stores.remove_failure(&event),
                Err(error) => record_failure(&self.metrics, "Event", &error),
            }
        }
        anyhow::bail!("the watch of Events with {selector} has ended")
    }

    fn count_ready(&self, is_first: &mut bool) {
        if std::mem::take(is_first) {
            self.ready.send_modify(|ready| *ready += 1);
        }
    }

    async fn send(&self, owner: Option<ObjectRef<LlmDeployment>>) {
        if let Some(owner) = owner {
            // Sending fails only while the operator shuts down.
            let _ = self.sender.send(owner).await;
        }
    }
}

#[cfg(test)]
mod tests;

//! Failures that Kubernetes reports in events only: a Job that may not create its pod (a quota, Pod Security), and a pod
//! whose volumes cannot be mounted (a Secret that does not exist). The API server selects these events, so that a busy
//! namespace costs the operator nothing.

use std::sync::Arc;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Event as ReportedEvent;
use kube::api::Api;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Resource as _, ResourceExt as _};
use operator_api::LlmDeployment;
use tokio::sync::mpsc;

use super::{Known, Stores};
use crate::desired::names::Component;
use crate::manifest::Kind;
use crate::pod::{Problem, creation_error};

/// Number of times that mounting must have failed before it counts as a failure: a volume that is created together with
/// its pod may come a moment later. The kubelet tries this often within about two seconds.
const MOUNT_ATTEMPTS_MIN: i32 = 3;

/// Which failures a watch is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureKind {
    /// A Job that cannot create its pod.
    JobFailedCreate,
    /// A pod whose volumes cannot be mounted.
    PodFailedMount,
}

impl FailureKind {
    pub(super) const ALL: [Self; 2] = [Self::JobFailedCreate, Self::PodFailedMount];

    /// The kind of the object that an event is about, and the event's reason.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::JobFailedCreate => ("Job", "FailedCreate"),
            Self::PodFailedMount => ("Pod", "FailedMount"),
        }
    }
}

/// The last failure of a Job or a pod.
#[derive(Debug)]
pub(super) struct Failure {
    kind: FailureKind,
    /// The event that reports it. When that expires, the failure does.
    event: String,
    /// The identity of the Job or pod.
    pub(super) uid: String,
    pub(super) problem: Problem,
}

impl Failure {
    /// What an event reports, and the namespace and name of the object that it is about.
    fn new(kind: FailureKind, event: &ReportedEvent) -> Option<((String, String), Self)> {
        let object = &event.involved_object;
        let key = (object.namespace.clone()?, object.name.clone()?);
        // Events have no labels to select by. Whose they are is known by the names that the operator gives.
        let is_named = |component: Component| key.1.contains(&format!("-{}-", component.name()));
        if ![Component::Server, Component::Router, Component::Fetch].into_iter().any(is_named) {
            return None;
        }
        let message = event.message.clone().unwrap_or_default();
        let message = match kind {
            FailureKind::JobFailedCreate => creation_error(&message),
            FailureKind::PodFailedMount if event.count.unwrap_or(1) < MOUNT_ATTEMPTS_MIN => return None,
            FailureKind::PodFailedMount => message,
        };
        let problem = Problem { reason: kind.names().1.to_owned(), message };
        let uid = object.uid.clone().unwrap_or_default();
        Some((key, Self { kind, event: event.name_any(), uid, problem }))
    }
}

impl Known {
    /// Whose a Job or a pod is.
    fn owner_of(&self, (namespace, name): &(String, String)) -> Option<ObjectRef<LlmDeployment>> {
        let job = (Kind::Job, name.clone());
        let mut owners = self.owned.values().filter_map(|owned| Some(&owned.get(&job)?.owner));
        if let Some(owner) = owners.find(|owner| owner.namespace.as_ref() == Some(namespace)) {
            return Some(owner.clone());
        }
        let mut pods = self.pods.iter();
        let (key, _) = pods.find(|((of, _), pods)| of == namespace && pods.contains_key(name))?;
        Some(ObjectRef::new(&key.1).within(&key.0))
    }
}

impl Stores {
    /// Records what an event reports, and returns whose resource that concerns if it is news.
    fn insert_failure(&self, kind: FailureKind, event: &ReportedEvent) -> Option<ObjectRef<LlmDeployment>> {
        let (key, failure) = Failure::new(kind, event)?;
        let mut known = self.known();
        let problem = failure.problem.clone();
        let former = known.failures.insert(key.clone(), failure);
        let is_news = former.is_none_or(|former| former.problem != problem);
        if is_news { known.owner_of(&key) } else { None }
    }

    /// Forgets what an expired event reported.
    fn remove_failure(&self, event: &ReportedEvent) {
        let name = event.name_any();
        self.known().failures.retain(|_, failure| failure.event != name);
    }

    /// Forgets all failures of a kind and a namespace: the watch is about to list those that remain.
    fn clear_failures(&self, kind: FailureKind, namespace: Option<&str>) {
        self.known().failures.retain(|(of, _), failure| {
            failure.kind != kind || namespace.is_some_and(|namespace| namespace != of)
        });
    }
}

/// Follows the failures of a kind until the operator ends. Nobody waits for it: without the right to read events, failures
/// are only less well explained.
pub(super) async fn follow(
    kind: FailureKind,
    api: Api<ReportedEvent>,
    stores: Arc<Stores>,
    sender: mpsc::Sender<ObjectRef<LlmDeployment>>,
) -> anyhow::Result<()> {
    let (object, reason) = kind.names();
    let selector = format!("involvedObject.kind={object},reason={reason}");
    let namespace = api.namespace().map(str::to_owned);
    let config = watcher::Config::default().fields(&selector);
    let mut events = watcher(api, config).default_backoff().boxed();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => stores.clear_failures(kind, namespace.as_deref()),
            Ok(Event::InitApply(event) | Event::Apply(event)) => {
                if let Some(owner) = stores.insert_failure(kind, &event) {
                    // Nobody listens any more: the operator is about to end.
                    let _ = sender.send(owner).await;
                }
            }
            Ok(Event::InitDone) => {}
            Ok(Event::Delete(event)) => stores.remove_failure(&event),
            Err(error) => {
                let kind = ReportedEvent::kind(&());
                tracing::warn!(kind = &*kind, selector, %error, "failed to watch");
            }
        }
    }
    anyhow::bail!("the watch of events with {selector} has ended")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(object: &str, count: i32, message: &str) -> ReportedEvent {
        let event = json!({
            "metadata": {"name": format!("{object}.1"), "namespace": "models"},
            "involvedObject": {"namespace": "models", "name": object, "uid": "7"},
            "count": count,
            "message": message,
        });
        serde_json::from_value(event).unwrap()
    }

    #[test]
    fn a_job_that_may_not_create_a_pod_is_known_until_the_event_expires() {
        let stores = Stores::new(false);
        let kind = FailureKind::JobFailedCreate;
        let message = |pod: &str| format!("Error creating: pods \"{pod}\" is forbidden: exceeded quota: q");
        let failed = event("chat-fetch-1", 1, &message("chat-fetch-1-abcde"));
        stores.insert_failure(kind, &failed);
        let problem = stores.job_failure("models", "chat-fetch-1", "7").unwrap();
        assert_eq!(problem.message, "pods cannot be created: exceeded quota: q");
        assert_eq!(stores.job_failure("models", "chat-fetch-1", "8"), None, "another Job of that name");
        stores.clear_failures(FailureKind::PodFailedMount, None);
        stores.clear_failures(kind, Some("other"));
        assert!(stores.job_failure("models", "chat-fetch-1", "7").is_some());
        stores.remove_failure(&failed);
        assert_eq!(stores.job_failure("models", "chat-fetch-1", "7"), None);
    }

    #[test]
    fn a_volume_counts_as_missing_once_mounting_it_has_failed_repeatedly() {
        let failure = |object: &str, count| {
            Failure::new(FailureKind::PodFailedMount, &event(object, count, "secret \"keys\" not found"))
        };
        assert!(failure("chat-router-5d9f-x7k2p", 2).is_none());
        let (_, failure_of_router) = failure("chat-router-5d9f-x7k2p", 3).unwrap();
        assert_eq!(failure_of_router.problem.reason, "FailedMount");
        assert!(failure("nginx-5d9f-x7k2p", 9).is_none(), "the pods of others do not take memory");
    }
}

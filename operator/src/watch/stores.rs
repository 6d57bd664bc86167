//! The caches that the watches fill: owned objects by the UID of their resource, pods by the namespace and name of
//! their resource, and the failures that Kubernetes reports in events.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::{Event as KubernetesEvent, Pod};
use kube::api::DynamicObject;
use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt as _};
use operator_api::LlmDeployment;

use super::failures::{Failure, FailureKind};
use crate::manifest::Kind;
use crate::names::{INSTANCE, NAME, OVFLEET};
use crate::pod::{PodState, Problem, pod_state};

/// The caches of the watches of one scope. They may lag behind the API server.
#[derive(Debug, Default)]
pub struct Stores {
    caches: Mutex<Caches>,
    has_service_monitors: AtomicBool,
}

#[derive(Debug, Default)]
struct Caches {
    /// Objects, by the UID of their owner.
    owned: HashMap<String, BTreeMap<(Kind, String), CompactObject>>,
    /// Pods, by the namespace and name of the resource that they belong to.
    pods: HashMap<(String, String), BTreeMap<String, PodState>>,
    /// The name of the resource that each pod in `pods` belongs to, by the namespace and name of the pod.
    instances: HashMap<(String, String), String>,
    /// The failures of Jobs and pods, by the namespace and name of the Job or pod.
    failures: HashMap<(String, String), Failure>,
}

/// An object as JSON text. A parsed object would use ten times as much memory, and it is needed only while its resource
/// is reconciled.
#[derive(Clone, Debug)]
struct CompactObject {
    owner: ObjectRef<LlmDeployment>,
    /// The version of the object, which increases with each change.
    version: Option<u64>,
    text: Arc<str>,
}

impl CompactObject {
    fn new(owner: ObjectRef<LlmDeployment>, mut object: DynamicObject) -> Option<Self> {
        object.managed_fields_mut().clear();
        let version = object.resource_version().and_then(|version| version.parse().ok());
        Some(Self { owner, version, text: serde_json::to_string(&object).ok()?.into() })
    }

    fn parse(&self) -> Option<DynamicObject> {
        serde_json::from_str(&self.text).ok()
    }
}

impl Stores {
    /// Creates empty caches. `has_service_monitors` is true if the cluster has the kind ServiceMonitor.
    #[must_use]
    pub fn new(has_service_monitors: bool) -> Self {
        Self { caches: Mutex::default(), has_service_monitors: AtomicBool::new(has_service_monitors) }
    }

    fn caches(&self) -> MutexGuard<'_, Caches> {
        self.caches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the objects that the resource with this UID owns.
    #[must_use]
    pub fn owned(&self, uid: &str) -> BTreeMap<(Kind, String), Arc<DynamicObject>> {
        let owned = self.caches().owned.get(uid).cloned().unwrap_or_default();
        let object = |(key, compact): (_, CompactObject)| Some((key, Arc::new(compact.parse()?)));
        owned.into_iter().filter_map(object).collect()
    }

    /// Returns the pods that belong to a resource, sorted by name.
    #[must_use]
    pub fn pods(&self, namespace: &str, name: &str) -> Vec<PodState> {
        let key = (namespace.to_owned(), name.to_owned());
        let caches = self.caches();
        let mut pods: Vec<PodState> =
            caches.pods.get(&key).into_iter().flat_map(BTreeMap::values).cloned().collect();
        // An event outlives the failure that it reports, so use it only if the containers of the pod have not been
        // created yet.
        for pod in pods.iter_mut().filter(|pod| pod.awaits.is_some() && pod.problem.is_none()) {
            let failure = caches.failures.get(&(namespace.to_owned(), pod.name.clone()));
            pod.problem = failure.map(|failure| failure.problem.clone());
        }
        pods
    }

    /// Returns the reason why the Job `name` with this UID could not create its last pod.
    #[must_use]
    pub fn job_failure(&self, namespace: &str, name: &str, uid: &str) -> Option<Problem> {
        let caches = self.caches();
        let failure = caches.failures.get(&(namespace.to_owned(), name.to_owned()))?;
        (failure.uid == uid).then(|| failure.problem.clone())
    }

    /// Whether the cluster has the kind ServiceMonitor.
    #[must_use]
    pub fn has_service_monitors(&self) -> bool {
        self.has_service_monitors.load(Ordering::Relaxed)
    }

    /// Records that the cluster has the kind ServiceMonitor, and returns the resources that own objects.
    pub(super) fn add_service_monitors(&self) -> HashSet<ObjectRef<LlmDeployment>> {
        self.has_service_monitors.store(true, Ordering::Relaxed);
        let caches = self.caches();
        caches.owned.values().flat_map(BTreeMap::values).map(|compact| compact.owner.clone()).collect()
    }

    /// Stores an object, and returns its owner. An object that no longer has an owner is removed from the caches, and
    /// its former owner is returned.
    pub fn insert(&self, kind: Kind, object: DynamicObject) -> Option<ObjectRef<LlmDeployment>> {
        let Some((owner, uid)) = owner(&object) else { return self.remove(kind, &object) };
        let name = object.name_any();
        let compact = CompactObject::new(owner.clone(), object)?;
        self.caches().owned.entry(uid).or_default().insert((kind, name), compact);
        Some(owner)
    }

    /// Stores an object that the API server has returned for an apply, unless the watch has already reported a later
    /// version. That version would otherwise be hidden until the next change.
    pub fn insert_applied(&self, kind: Kind, object: DynamicObject) {
        let Some((owner, uid)) = owner(&object) else { return };
        let key = (kind, object.name_any());
        let Some(compact) = CompactObject::new(owner, object) else { return };
        let mut caches = self.caches();
        let owned = caches.owned.entry(uid).or_default();
        let known = owned.get(&key).and_then(|known| known.version);
        let is_outdated = known.zip(compact.version).is_some_and(|(known, applied)| known > applied);
        if !is_outdated {
            owned.insert(key, compact);
        }
    }

    /// Removes an object, and returns its owner.
    pub fn remove(&self, kind: Kind, object: &DynamicObject) -> Option<ObjectRef<LlmDeployment>> {
        let mut caches = self.caches();
        let (owner, uid) = match owner(object) {
            Some(found) => found,
            // A user or `kubectl delete --cascade=orphan` may have removed the owner reference of the object.
            None => caches.former_owner(kind, object)?,
        };
        let owned = caches.owned.get_mut(&uid)?;
        owned.remove(&(kind, object.name_any()));
        if owned.is_empty() {
            caches.owned.remove(&uid);
        }
        Some(owner)
    }

    /// Removes all objects of a kind and a namespace that are not in `seen`, and returns their owners.
    pub(super) fn retain(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        seen: &HashSet<(String, String)>,
    ) -> Vec<ObjectRef<LlmDeployment>> {
        let mut owners = Vec::new();
        self.caches().owned.retain(|uid, owned| {
            owned.retain(|(of, name), compact| {
                let is_elsewhere =
                    namespace.is_some_and(|namespace| compact.owner.namespace.as_deref() != Some(namespace));
                let stays = *of != kind || is_elsewhere || seen.contains(&(uid.clone(), name.clone()));
                if !stays {
                    owners.push(compact.owner.clone());
                }
                stays
            });
            !owned.is_empty()
        });
        owners
    }

    /// Stores the state of a pod, and returns the resources whose pods have changed. If the pod now belongs to another
    /// resource, both resources are returned.
    pub(super) fn insert_pod(&self, pod: &Pod) -> Vec<ObjectRef<LlmDeployment>> {
        let Some(namespace) = pod.namespace() else { return Vec::new() };
        let (instance, state) = (instance(pod), pod_state(pod));
        let mut caches = self.caches();
        let mut changed = Vec::new();
        // A user may change the labels of a pod, for example to detach a replica from its Deployment and debug it.
        let former = caches.instances.get(&(namespace.clone(), state.name.clone()));
        if former.map(String::as_str) != instance {
            changed.extend(caches.remove_pod(&namespace, &state.name));
        }
        let Some(instance) = instance else { return changed };
        caches.instances.insert((namespace.clone(), state.name.clone()), instance.to_owned());
        let pods = caches.pods.entry((namespace.clone(), instance.to_owned())).or_default();
        if pods.get(&state.name) != Some(&state) {
            pods.insert(state.name.clone(), state);
            changed.push(ObjectRef::new(instance).within(&namespace));
        }
        changed
    }

    /// Removes a pod, and returns its resource.
    pub(super) fn remove_pod(&self, pod: &impl Resource) -> Option<ObjectRef<LlmDeployment>> {
        self.caches().remove_pod(&pod.namespace()?, &pod.name_any())
    }

    /// Removes all pods of a namespace that are not in `seen`, and returns their resources.
    pub(super) fn retain_pods(
        &self,
        namespace: Option<&str>,
        seen: &HashSet<(String, String)>,
    ) -> Vec<ObjectRef<LlmDeployment>> {
        let mut caches = self.caches();
        let is_gone = |pod: &&(String, String)| {
            namespace.is_none_or(|namespace| namespace == pod.0) && !seen.contains(*pod)
        };
        let gone: Vec<(String, String)> = caches.instances.keys().filter(is_gone).cloned().collect();
        gone.iter().filter_map(|(namespace, name)| caches.remove_pod(namespace, name)).collect()
    }

    /// Stores the failure that an event reports, and returns the resource that the failure concerns, unless the same
    /// failure is already known.
    pub(super) fn insert_failure(
        &self,
        kind: FailureKind,
        event: &KubernetesEvent,
    ) -> Option<ObjectRef<LlmDeployment>> {
        let (key, failure) = Failure::new(kind, event)?;
        let mut caches = self.caches();
        let problem = failure.problem.clone();
        let former = caches.failures.insert(key.clone(), failure);
        let is_new = former.is_none_or(|former| former.problem != problem);
        if is_new { caches.owner_of(&key.0, &key.1) } else { None }
    }

    /// Removes the failure that an expired event has reported.
    pub(super) fn remove_failure(&self, event: &impl Resource) {
        let name = event.name_any();
        self.caches().failures.retain(|_, failure| failure.event != name);
    }

    /// Removes all failures of a kind and a namespace, before the watch lists the current ones.
    pub(super) fn clear_failures(&self, kind: FailureKind, namespace: Option<&str>) {
        self.caches().failures.retain(|(of, _), failure| {
            failure.kind != kind || namespace.is_some_and(|namespace| namespace != of)
        });
    }
}

impl Caches {
    /// The resource that owned an object when it was stored, and the UID of that resource.
    fn former_owner(&self, kind: Kind, object: &DynamicObject) -> Option<(ObjectRef<LlmDeployment>, String)> {
        let key = (kind, object.name_any());
        let namespace = object.namespace();
        self.owned.iter().find_map(|(uid, owned)| {
            let owner = &owned.get(&key)?.owner;
            (owner.namespace == namespace).then(|| (owner.clone(), uid.clone()))
        })
    }

    /// The resource that a Job or a pod belongs to.
    fn owner_of(&self, namespace: &str, name: &str) -> Option<ObjectRef<LlmDeployment>> {
        let job = (Kind::Job, name.to_owned());
        let mut owners = self.owned.values().filter_map(|owned| Some(&owned.get(&job)?.owner));
        if let Some(owner) = owners.find(|owner| owner.namespace.as_deref() == Some(namespace)) {
            return Some(owner.clone());
        }
        let instance = self.instances.get(&(namespace.to_owned(), name.to_owned()))?;
        Some(ObjectRef::new(instance).within(namespace))
    }

    /// Removes a pod, and returns the resource that it belonged to.
    fn remove_pod(&mut self, namespace: &str, name: &str) -> Option<ObjectRef<LlmDeployment>> {
        let instance = self.instances.remove(&(namespace.to_owned(), name.to_owned()))?;
        let owner = ObjectRef::new(&instance).within(namespace);
        let key = (namespace.to_owned(), instance);
        let pods = self.pods.get_mut(&key)?;
        pods.remove(name);
        if pods.is_empty() {
            self.pods.remove(&key);
        }
        Some(owner)
    }
}

/// The resource that owns an object, and the UID of that resource.
pub(super) fn owner(object: &DynamicObject) -> Option<(ObjectRef<LlmDeployment>, String)> {
    let kind = LlmDeployment::kind(&());
    let owner = object
        .owner_references()
        .iter()
        .find(|owner| owner.controller == Some(true) && owner.kind == kind)?;
    Some((ObjectRef::new(&owner.name).within(&object.namespace()?), owner.uid.clone()))
}

/// The name of the resource that a pod belongs to; `None` if the pod lacks the labels of an ovfleet pod.
fn instance(pod: &Pod) -> Option<&str> {
    let labels = pod.labels();
    labels.get(INSTANCE).filter(|_| labels.get(NAME).is_some_and(|name| name == OVFLEET)).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A Service of the resource with the UID 7.
    fn service() -> DynamicObject {
        let object = json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": "chat",
                "namespace": "models",
                "managedFields": [{"manager": "ovfleet-operator", "operation": "Apply"}],
                "ownerReferences": [{
                    "apiVersion": "ovfleet.dev/v1alpha1",
                    "kind": "LLMDeployment",
                    "name": "chat",
                    "uid": "7",
                    "controller": true,
                }],
            },
            "spec": {"clusterIP": "None"},
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn objects_are_stored_without_their_managed_fields() {
        let stores = Stores::new(false);
        stores.insert(Kind::Service, service()).unwrap();
        let owned = stores.owned("7");
        let stored = &owned[&(Kind::Service, "chat".to_owned())];
        assert!(stored.managed_fields().is_empty(), "{stored:?}");
        assert_eq!(stored.data["spec"]["clusterIP"], "None");
    }

    #[test]
    fn an_applied_object_does_not_replace_a_later_version() {
        let stores = Stores::new(false);
        let with_version = |version: &str| {
            let mut object = service();
            object.metadata.resource_version = Some(version.to_owned());
            object
        };
        let stored = || stores.owned("7")[&(Kind::Service, "chat".to_owned())].resource_version().unwrap();
        stores.insert_applied(Kind::Service, with_version("9"));
        assert_eq!(stored(), "9");
        stores.insert(Kind::Service, with_version("11"));
        stores.insert_applied(Kind::Service, with_version("10"));
        assert_eq!(stored(), "11");
        stores.insert_applied(Kind::Service, with_version("12"));
        assert_eq!(stored(), "12");
        // The watch is authoritative even if the version decreases, for example because the cluster was restored from a
        // backup.
        stores.insert(Kind::Service, with_version("3"));
        assert_eq!(stored(), "3");
    }

    #[test]
    fn an_object_that_loses_its_owner_is_removed() {
        let stores = Stores::new(false);
        let owner = ObjectRef::<LlmDeployment>::new("chat").within("models");
        let mut orphan = service();
        orphan.metadata.owner_references = None;
        let mut other = orphan.clone();
        other.metadata.namespace = Some("others".to_owned());
        let check = |remove: &dyn Fn(DynamicObject) -> Option<ObjectRef<LlmDeployment>>| {
            assert_eq!(stores.insert(Kind::Service, service()), Some(owner.clone()));
            assert_eq!(remove(other.clone()), None, "an object of another namespace");
            assert_eq!(stores.owned("7").len(), 1);
            assert_eq!(remove(orphan.clone()), Some(owner.clone()));
            assert!(stores.owned("7").is_empty());
            assert_eq!(remove(orphan.clone()), None);
        };
        check(&|object| stores.insert(Kind::Service, object));
        check(&|object| stores.remove(Kind::Service, &object));
    }

    /// A pod of the resource `instance`. `name` is the value of the label `app.kubernetes.io/name`.
    fn pod(instance: &str, name: &str) -> Pod {
        let labels = json!({INSTANCE: instance, NAME: name});
        let pod = json!({"metadata": {"name": "a", "namespace": "models", "labels": labels}});
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn a_pod_whose_labels_change_belongs_to_the_resource_of_its_current_labels() {
        let stores = Stores::new(false);
        let resource = |name: &str| ObjectRef::<LlmDeployment>::new(name).within("models");
        let pods = |name: &str| stores.pods("models", name).len();
        assert_eq!(stores.insert_pod(&pod("chat", OVFLEET)), [resource("chat")]);
        assert!(stores.insert_pod(&pod("chat", OVFLEET)).is_empty(), "the state has not changed");
        assert_eq!(stores.insert_pod(&pod("debug", OVFLEET)), [resource("chat"), resource("debug")]);
        assert_eq!((pods("chat"), pods("debug")), (0, 1));
        assert_eq!(stores.insert_pod(&pod("debug", "mine")), [resource("debug")]);
        assert_eq!(pods("debug"), 0);
        assert_eq!(stores.remove_pod(&pod("debug", "mine")), None);

        assert_eq!(stores.insert_pod(&pod("chat", OVFLEET)), [resource("chat")]);
        assert!(stores.retain_pods(Some("others"), &HashSet::new()).is_empty());
        assert_eq!(stores.retain_pods(Some("models"), &HashSet::new()), [resource("chat")]);
        assert_eq!(stores.insert_pod(&pod("chat", OVFLEET)), [resource("chat")]);
        // A deletion event contains the last labels of the pod, which the watch may not have reported before.
        assert_eq!(stores.remove_pod(&pod("debug", "mine")), Some(resource("chat")));
        assert_eq!(pods("chat"), 0);
    }

    #[test]
    fn the_failure_of_a_job_is_known_until_its_event_expires() {
        let stores = Stores::new(false);
        let kind = FailureKind::JobFailedCreate;
        let event = json!({
            "metadata": {"name": "chat-fetch-1.1", "namespace": "models"},
            "involvedObject": {"namespace": "models", "name": "chat-fetch-1", "uid": "7"},
            "count": 1,
            "message": "Error creating: pods \"chat-fetch-1-abcde\" is forbidden: exceeded quota: q",
        });
        let event: KubernetesEvent = serde_json::from_value(event).unwrap();
        stores.insert_failure(kind, &event);
        let problem = stores.job_failure("models", "chat-fetch-1", "7").unwrap();
        assert_eq!(problem.message, "pods cannot be created: exceeded quota: q");
        assert_eq!(stores.job_failure("models", "chat-fetch-1", "8"), None, "another Job of that name");
        stores.clear_failures(FailureKind::PodFailedMount, None);
        stores.clear_failures(kind, Some("other"));
        assert!(stores.job_failure("models", "chat-fetch-1", "7").is_some());
        stores.remove_failure(&event);
        assert_eq!(stores.job_failure("models", "chat-fetch-1", "7"), None);
    }
}

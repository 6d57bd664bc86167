//! The part of a pod's state that the operator uses, derived from the pod's metadata, spec and status. This module is
//! pure.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus, Volume};
use kube::ResourceExt as _;

use crate::names::{COMPONENT, Component, REVISION_VARIABLE, ROUTABLE, TEMPLATE};
use crate::source::{ModelSourceKey, source_of_pod};

mod containers;
mod exit_reason;
mod fetch_report;
mod problem;

use containers::{containers, fetch_container, fetch_status};
pub(crate) use exit_reason::exit_reason;
pub use fetch_report::FetchReport;
use fetch_report::last_report;
pub use problem::Problem;
pub(crate) use problem::creation_error;
use problem::problem;

/// The state of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodState {
    /// The name of the pod.
    pub name: String,
    /// The IP address of the pod, once it has one.
    pub address: Option<String>,
    /// The component that the pod belongs to, from its label.
    pub component: String,
    /// The hash of the pod template that the pod was created from, from its label.
    pub template_hash: String,
    /// The name of the Job that owns the pod, if a Job does.
    pub job: Option<String>,
    /// The source of the model that the pod's server serves.
    pub source: ModelSourceKey,
    /// Whether the pod is being deleted.
    pub is_terminating: bool,
    /// Whether all containers of the pod have exited and will not be restarted.
    pub is_finished: bool,
    /// Whether all containers of the pod are ready.
    pub containers_ready: bool,
    /// Whether the pod is ready, including its readiness gates.
    pub is_ready: bool,
    /// The value of the readiness gate; `None` if it was never set.
    pub is_routable: Option<bool>,
    /// Whether the pod is fetching a model.
    pub is_fetching: bool,
    /// Whether the server runs but has not started yet, within the time that its startup probe allows.
    pub is_starting: bool,
    /// The key in the ConfigMap of revisions under which the pod reads the revision to fetch.
    pub revision_key: Option<String>,
    /// A message about the objects that must exist before the containers can be created; `None` once a container has
    /// been created.
    pub awaits: Option<String>,
    /// The report of the last fetch in the pod, once the fetch has ended.
    pub fetched: Option<FetchReport>,
    /// The problem that prevents the pod from working, if it will not resolve on its own.
    pub problem: Option<Problem>,
}

impl PodState {
    /// Whether routers send requests to the pod. The gate alone does not show this: if a node fails, its pods become
    /// unready, but their gates remain set, and their containers still count as ready.
    #[must_use]
    pub fn receives_requests(&self) -> bool {
        self.is_routable == Some(true) && self.is_ready
    }
}

/// Returns the names of the replicas whose containers are ready and whose readiness gate is not set yet, except for
/// replicas that are being deleted.
#[must_use]
pub fn awaiting_admission(pods: &[PodState]) -> BTreeSet<&str> {
    let servers = pods.iter().filter(|pod| pod.component == Component::Server.name());
    let waiting =
        servers.filter(|pod| pod.containers_ready && !pod.is_terminating && pod.is_routable != Some(true));
    waiting.map(|pod| pod.name.as_str()).collect()
}

/// Returns the state of `pod`.
#[must_use]
pub fn pod_state(pod: &Pod) -> PodState {
    let label = |name: &str| pod.labels().get(name).cloned().unwrap_or_default();
    let default = PodStatus::default();
    let status = pod.status.as_ref().unwrap_or(&default);
    let condition = |name: &str| {
        let condition = status.conditions.iter().flatten().find(|condition| condition.type_ == name);
        condition.map(|condition| condition.status == "True")
    };
    let fetch = fetch_status(pod, status);
    let state = fetch.and_then(|container| container.state.as_ref());
    let owner = pod.owner_references().iter().find(|owner| owner.kind == "Job");
    PodState {
        name: pod.name_any(),
        address: status.pod_ip.clone().filter(|address| !address.is_empty()),
        component: label(COMPONENT),
        template_hash: label(TEMPLATE),
        job: owner.map(|owner| owner.name.clone()),
        source: source_of_pod(pod),
        is_terminating: pod.metadata.deletion_timestamp.is_some(),
        is_finished: matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")),
        containers_ready: condition("ContainersReady") == Some(true),
        is_ready: condition("Ready") == Some(true),
        is_routable: condition(ROUTABLE),
        is_fetching: state.is_some_and(|state| state.running.is_some()),
        is_starting: is_starting(status),
        revision_key: revision_key(pod),
        awaits: awaits(pod, status),
        fetched: fetch.and_then(last_report),
        problem: problem(pod, status),
    }
}

fn revision_key(pod: &Pod) -> Option<String> {
    let mut variables = fetch_container(pod)?.env.iter().flatten();
    let variable = variables.find(|variable| variable.name == REVISION_VARIABLE)?;
    Some(variable.value_from.as_ref()?.config_map_key_ref.as_ref()?.key.clone())
}

/// Whether the server runs and has not started yet. The kubelet kills a container that does not start within the time
/// of its startup probe, so a running container that has not started is within that time.
fn is_starting(status: &PodStatus) -> bool {
    let server = status.container_statuses.iter().flatten().find(|container| container.name == "server");
    server.is_some_and(|server| {
        let is_running = server.state.as_ref().is_some_and(|state| state.running.is_some());
        is_running && server.started != Some(true)
    })
}

/// Returns a message with the objects that a pod mounts, as long as none of its containers has been created. Kubernetes
/// reports a missing object in events only, which expire; the status of the pod shows only that no container was
/// created.
fn awaits(pod: &Pod, status: &PodStatus) -> Option<String> {
    let is_creating = |container: &ContainerStatus| {
        let waiting = container.state.as_ref().and_then(|state| state.waiting.as_ref());
        waiting.is_some_and(|waiting| {
            matches!(waiting.reason.as_deref(), Some("ContainerCreating" | "PodInitializing"))
        })
    };
    if pod.metadata.deletion_timestamp.is_some()
        || status.container_statuses.iter().flatten().next().is_none()
        || !containers(status).all(is_creating)
    {
        return None;
    }
    let objects = mounted_objects(pod);
    (!objects.is_empty()).then(|| {
        format!(
            "the containers of the pod have not been created yet; the pod mounts these objects, which must exist: {}",
            objects.join(", ")
        )
    })
}

/// The Secrets, the ConfigMap with certificates and the PersistentVolumeClaims that the volumes of a pod refer to.
fn mounted_objects(pod: &Pod) -> Vec<String> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let object = |volume: &Volume| {
        let secret = volume.secret.as_ref().and_then(|secret| secret.secret_name.as_ref());
        let bundle = volume.config_map.as_ref().filter(|_| volume.name == "ca-bundle");
        let claim = volume.persistent_volume_claim.as_ref().map(|claim| &claim.claim_name);
        secret
            .map(|name| format!("the Secret {name:?}"))
            .or_else(|| bundle.map(|bundle| format!("the ConfigMap {:?}", bundle.name)))
            .or_else(|| claim.map(|name| format!("the PersistentVolumeClaim {name:?}")))
    };
    volumes.filter_map(object).collect()
}

#[cfg(test)]
mod tests;

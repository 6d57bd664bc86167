//! The state of a pod that the operator uses, derived from the pod's status. Pure. Kubernetes reports some problems
//! with alternating reasons, such as `ErrImagePull` and `ImagePullBackOff`; here each of them has a single reason and
//! message.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStatus, Pod, PodCondition, PodStatus, Volume,
};
use kube::ResourceExt as _;
use serde::{Deserialize, Serialize};

use crate::names::{COMPONENT, Component, REVISION_VARIABLE, ROUTABLE, TEMPLATE};
use crate::source::{ModelSourceKey, source_of_pod};

mod exit_reason;

pub(crate) use exit_reason::exit_reason;

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
    /// The source of the model that its server serves.
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
    /// The key of the ConfigMap of revisions from which the pod reads the revision to fetch.
    pub revision_key: Option<String>,
    /// A message about the volumes that must exist before the containers can be created; `None` once they have been
    /// created.
    pub awaits: Option<String>,
    /// The report of the last fetch in the pod, once it has ended.
    pub fetched: Option<FetchReport>,
    /// The problem that prevents the pod from working, if it will not resolve on its own.
    pub problem: Option<Problem>,
}

impl PodState {
    /// Whether routers send requests to the pod. If a node fails, its pods become unready, but their gates remain set, and
    /// their containers still count as ready.
    #[must_use]
    pub fn receives_requests(&self) -> bool {
        self.is_routable == Some(true) && self.is_ready
    }
}

/// Returns the names of the replicas that work and that no router has admitted yet.
#[must_use]
pub fn awaiting_admission(pods: &[PodState]) -> BTreeSet<&str> {
    let servers = pods.iter().filter(|pod| pod.component == Component::Server.name());
    let waiting =
        servers.filter(|pod| pod.containers_ready && !pod.is_terminating && pod.is_routable != Some(true));
    waiting.map(|pod| pod.name.as_str()).collect()
}

/// A problem that prevents a pod from working.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The reason for conditions: stable and in CamelCase.
    pub reason: String,
    /// The message, in human-readable form.
    pub message: String,
}

/// The report of a fetch, which `ovfleet-server fetch` writes as the termination message of its container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FetchReport {
    /// `Fetched`, or the reason of the failure: stable and in CamelCase.
    pub reason: String,
    /// The message, in human-readable form.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// The digest of all files, as `sha256:…`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// The commit of the repository that was fetched, if the source has commits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// The number of bytes that were fetched.
    pub bytes: i64,
    /// The total number of bytes, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_total: Option<i64>,
}

impl FetchReport {
    /// The reason that a successful fetch reports.
    pub const FETCHED: &str = "Fetched";

    /// Whether the fetch succeeded.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.reason == Self::FETCHED
    }
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
    let fetch = containers(status).find(|container| container.name == "fetch");
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
        fetched: fetch.and_then(report),
        problem: problem(pod, status),
    }
}

fn revision_key(pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let key = |container: &Container| {
        let variable = container.env.iter().flatten().find(|variable| variable.name == REVISION_VARIABLE)?;
        Some(variable.value_from.as_ref()?.config_map_key_ref.as_ref()?.key.clone())
    };
    containers.filter(|container| container.name == "fetch").find_map(key)
}

/// Whether the server runs and has not started yet. The kubelet kills a container that does not start within the time of
/// its startup probe, so a running container that has not started is within that time.
fn is_starting(status: &PodStatus) -> bool {
    let server = status.container_statuses.iter().flatten().find(|container| container.name == "server");
    server.is_some_and(|server| {
        let is_running = server.state.as_ref().is_some_and(|state| state.running.is_some());
        is_running && server.started != Some(true)
    })
}

/// Names the volumes that a pod needs while none of its containers could be created. Kubernetes reports a missing
/// volume in events only, which expire; the status of the pod only says that no container was created.
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
    (!objects.is_empty())
        .then(|| format!("the containers of the pod cannot be created yet; they need {}", objects.join(", ")))
}

/// The objects that the volumes of a pod refer to and that the operator does not create itself.
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

fn containers(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten())
}

/// The last report of a fetching container.
fn report(container: &ContainerStatus) -> Option<FetchReport> {
    let terminated = |state: &Option<ContainerState>| state.as_ref()?.terminated.clone();
    let terminated = terminated(&container.state).or_else(|| terminated(&container.last_state))?;
    let message = terminated.message.unwrap_or_default();
    let code = terminated.exit_code;
    Some(serde_json::from_str(message.trim()).unwrap_or_else(|_| FetchReport {
        reason: if code == 0 { FetchReport::FETCHED.to_owned() } else { "FetchFailed".to_owned() },
        message: if code == 0 { String::new() } else { exit_message(&message, code) },
        ..FetchReport::default()
    }))
}

fn problem(pod: &Pod, status: &PodStatus) -> Option<Problem> {
    if pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let scheduled = status.conditions.iter().flatten().find(|condition| condition.type_ == "PodScheduled");
    if let Some(condition) =
        scheduled.filter(|condition| condition.reason.as_deref() == Some("Unschedulable"))
    {
        return Some(Problem { reason: "Unschedulable".to_owned(), message: unschedulable(pod, condition) });
    }
    let fetch = containers(status).find(|container| container.name == "fetch").and_then(report);
    if let Some(FetchReport { reason, message, .. }) = fetch.filter(|report| !report.is_complete()) {
        return Some(Problem { reason, message });
    }
    if status.phase.as_deref() == Some("Failed") {
        let reason = status.reason.clone().unwrap_or_else(|| "PodFailed".to_owned());
        let message = status.message.clone().unwrap_or_else(|| "a pod has failed".to_owned());
        return Some(Problem { reason, message });
    }
    containers(status).find_map(|container| container_problem(pod, container))
}

/// The reason why the scheduler finds no node. The scheduler's message does not name unbound claims, so this function
/// adds their names.
fn unschedulable(pod: &Pod, condition: &PodCondition) -> String {
    let message = condition.message.clone().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let claims: Vec<String> = volumes
        .filter_map(|volume| Some(format!("{:?}", volume.persistent_volume_claim.as_ref()?.claim_name)))
        .collect();
    if claims.is_empty() || !message.to_lowercase().contains("persistentvolumeclaim") {
        return message;
    }
    format!("the PersistentVolumeClaim {} must exist and be bound: {message}", claims.join(", "))
}

fn container_problem(pod: &Pod, container: &ContainerStatus) -> Option<Problem> {
    let name = &container.name;
    let state = container.state.as_ref();
    let waiting = state.and_then(|state| state.waiting.as_ref());
    if let Some(waiting) = waiting {
        let reported = waiting.message.clone().unwrap_or_default();
        match waiting.reason.as_deref() {
            // The kubelet alternates between these reasons, with varying messages.
            Some("ErrImagePull" | "ImagePullBackOff") => {
                let (image, user) = image_volume(pod, &reported)
                    .unwrap_or_else(|| (container.image.clone(), format!("container {name}")));
                let message =
                    format!("the image {image} of the {user} cannot be pulled{}", pull_secrets(pod));
                return Some(Problem { reason: "ImagePullBackOff".to_owned(), message });
            }
            Some(
                reason @ ("InvalidImageName"
                | "ErrImageNeverPull"
                | "CreateContainerConfigError"
                | "CreateContainerError"
                | "RunContainerError"),
            ) => {
                return Some(Problem { reason: reason.to_owned(), message: format!("{name}: {reported}") });
            }
            _ => {}
        }
    }
    if container.ready {
        return None;
    }
    // The container has failed and has not been ready since. It may be running again or wait for its restart.
    let terminated = |state: Option<&ContainerState>| state.and_then(|state| state.terminated.clone());
    let terminated = terminated(state).or_else(|| terminated(container.last_state.as_ref()))?;
    if terminated.reason.as_deref() == Some("OOMKilled") {
        let message = format!("{name} was killed because it needs more memory than its limit");
        return Some(Problem { reason: "OOMKilled".to_owned(), message });
    }
    if terminated.exit_code == 0 {
        return None;
    }
    let reason = exit_message(&terminated.message.unwrap_or_default(), terminated.exit_code);
    Some(Problem { reason: "Crashing".to_owned(), message: format!("{name}: {reason}") })
}

/// The image volume that a message of the kubelet concerns: its image, and a description of the volume. A container
/// waits for the images of its volumes with the same reasons as for its own image.
fn image_volume(pod: &Pod, message: &str) -> Option<(String, String)> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let mut images =
        volumes.filter_map(|volume| Some((volume.image.as_ref()?.reference.clone()?, &volume.name)));
    let (image, name) = images.find(|(image, _)| message.contains(&format!("{image:?}")))?;
    Some((image, format!("volume {name}")))
}

/// A hint about the Secrets for pulling the images of a pod. The kubelet ignores a Secret that does not exist, so the
/// only symptom is that the registry denies access.
fn pull_secrets(pod: &Pod) -> String {
    let secrets = pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten());
    let names: Vec<String> = secrets.map(|secret| format!("{:?}", secret.name)).collect();
    match names.as_slice() {
        [] => String::new(),
        [name] => {
            format!("; it is pulled with the Secret {name}, which must exist and be valid for the registry")
        }
        _ => format!(
            "; it is pulled with the Secrets {}, which must exist and be valid for the registry",
            names.join(", ")
        ),
    }
}

/// The reason why a pod could not be created, from the message of a controller. It omits the name of the pod, which
/// differs for each attempt.
pub(crate) fn creation_error(message: &str) -> String {
    let message = message.strip_prefix("(combined from similar events): ").unwrap_or(message);
    let message = message.strip_prefix("Error creating: ").unwrap_or(message);
    let rest = message.strip_prefix("pods \"").and_then(|rest| rest.split_once("\" is forbidden: "));
    rest.map_or_else(|| message.to_owned(), |(_, reason)| format!("pods cannot be created: {reason}"))
}

/// The reason why a container has exited, from its last output and its exit code.
fn exit_message(output: &str, code: i32) -> String {
    /// Length of the last output of a container in a condition, in characters.
    ///
    /// If exceeded: the text is truncated.
    const LENGTH_MAX: usize = 400;
    let reason: String = exit_reason(output).chars().take(LENGTH_MAX).collect();
    if reason.is_empty() {
        format!("exited with code {code}")
    } else {
        format!("{reason} (exit code {code})")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn state(status: &Value) -> PodState {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "status": status});
        pod_state(&serde_json::from_value(pod).unwrap())
    }

    fn container(name: &str, state: &Value, last: &Value) -> Value {
        json!({
            "name": name, "image": "image", "imageID": "", "ready": false, "restartCount": 1,
            "state": state, "lastState": last,
        })
    }

    #[test]
    fn an_image_that_cannot_be_pulled_has_the_same_message_for_both_reasons() {
        let waiting = |reason: &str, message: &str| {
            let waiting = json!({"waiting": {"reason": reason, "message": message}});
            state(&json!({"containerStatuses": [container("server", &waiting, &json!({}))]}))
        };
        let first = waiting("ErrImagePull", "rpc error: not found");
        assert_eq!(first, waiting("ImagePullBackOff", "Back-off pulling image"));
        assert_eq!(
            first.problem.unwrap().message,
            "the image image of the container server cannot be pulled"
        );
    }

    #[test]
    fn the_message_about_an_image_names_the_pull_secrets() {
        let waiting = json!({"waiting": {"reason": "ErrImagePull", "message": "401 Unauthorized"}});
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
            "spec": {"containers": [], "imagePullSecrets": [{"name": "registry"}]},
            "status": {"containerStatuses": [container("server", &waiting, &json!({}))]},
        });
        let problem = pod_state(&serde_json::from_value(pod).unwrap()).problem.unwrap();
        assert!(problem.message.contains("with the Secret \"registry\", which must exist"), "{problem:?}");
    }

    #[test]
    fn the_image_of_a_volume_is_distinguished_from_the_image_of_the_container() {
        let waiting = |image: &str| {
            let message = format!("Back-off pulling image \"{image}\": ErrImagePull: failed to pull");
            let waiting = json!({"waiting": {"reason": "ImagePullBackOff", "message": message}});
            let pod = json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
                "spec": {"containers": [], "volumes": [{"name": "model", "image": {"reference": "models/m:1"}}]},
                "status": {"containerStatuses": [container("server", &waiting, &json!({}))]},
            });
            pod_state(&serde_json::from_value(pod).unwrap()).problem.unwrap().message
        };
        assert_eq!(waiting("models/m:1"), "the image models/m:1 of the volume model cannot be pulled");
        assert_eq!(waiting("image"), "the image image of the container server cannot be pulled");
    }

    #[test]
    fn a_crashing_container_has_the_same_message_while_it_runs_and_while_it_waits() {
        let ended = json!({"terminated": {"exitCode": 1, "message": "x\nerror: no model\n"}});
        let at = |present: &Value, last: &Value| {
            state(&json!({"containerStatuses": [container("server", present, last)]})).problem
        };
        let running = at(&json!({"running": {}}), &ended);
        assert_eq!(running, at(&json!({"waiting": {"reason": "CrashLoopBackOff"}}), &ended));
        assert_eq!(running, at(&ended, &json!({})));
        assert_eq!(running.unwrap().message, "server: no model (exit code 1)");
    }

    #[test]
    fn the_report_of_a_fetch_is_the_termination_message() {
        let message = json!({"reason": "DigestMismatch", "message": "another file", "bytes": 7}).to_string();
        let ended = json!({"terminated": {"exitCode": 11, "message": message}});
        let waiting = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        let pod = state(&json!({"initContainerStatuses": [container("fetch", &waiting, &ended)]}));
        let report = pod.fetched.unwrap();
        assert_eq!(
            (report.reason.as_str(), report.bytes, report.is_complete()),
            ("DigestMismatch", 7, false)
        );
        let killed = json!({"terminated": {"exitCode": 137, "message": "gone"}});
        let pod = state(&json!({"initContainerStatuses": [container("fetch", &killed, &json!({}))]}));
        assert_eq!(pod.fetched.unwrap().message, "gone (exit code 137)");
    }

    #[test]
    fn a_claim_that_is_not_bound_is_named() {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
            "spec": {"containers": [], "volumes": [
                {"name": "model", "persistentVolumeClaim": {"claimName": "models"}},
                {"name": "keys", "secret": {"secretName": "keys"}},
            ]},
            "status": {"conditions": [{
                "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                "message": "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
            }]},
        });
        let problem = pod_state(&serde_json::from_value(pod).unwrap()).problem.unwrap();
        assert!(
            problem.message.starts_with("the PersistentVolumeClaim \"models\" must exist"),
            "{problem:?}"
        );
    }

    #[test]
    fn the_volumes_that_containers_wait_for_are_named() {
        let waiting = json!({"waiting": {"reason": "ContainerCreating"}});
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
            "spec": {"containers": [], "volumes": [{"name": "keys", "secret": {"secretName": "my-keys"}}]},
            "status": {"containerStatuses": [container("router", &waiting, &json!({}))]},
        });
        let awaits = |pod: &Value| pod_state(&serde_json::from_value(pod.clone()).unwrap()).awaits;
        assert!(awaits(&pod).unwrap().contains("the Secret \"my-keys\""));
        pod["status"]["containerStatuses"][0]["state"] = json!({"running": {}});
        assert_eq!(awaits(&pod), None);
    }

    #[test]
    fn a_server_starts_until_its_startup_probe_has_succeeded() {
        let mut server = container("server", &json!({"running": {}}), &json!({}));
        let is_starting = |server: &Value| state(&json!({"containerStatuses": [server]})).is_starting;
        assert!(is_starting(&server));
        server["started"] = json!(true);
        assert!(!is_starting(&server));
    }
}

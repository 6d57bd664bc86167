//! What a pod is worth, read off its status. Pure. What Kubernetes says in turns while nothing changes, as it does of an
//! image that cannot be had and of a container that keeps failing, is one and the same here.

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod, PodCondition, PodStatus, Volume};
use kube::ResourceExt as _;
use serde::{Deserialize, Serialize};

use crate::desired::fetch::revision;
use crate::desired::names::{COMPONENT, ROUTABLE, TEMPLATE};

mod last_words;

pub(crate) use last_words::last_words;

/// What a pod is worth.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodState {
    /// Its name.
    pub name: String,
    /// Its address, once it has one.
    pub address: Option<String>,
    /// Which part it belongs to, by its label.
    pub component: String,
    /// Which template it was made from, by its label.
    pub template: String,
    /// Its Job, if it belongs to one.
    pub job: Option<String>,
    /// What its server was told to serve: a path in it.
    pub model: Option<String>,
    /// Whether it is about to go.
    pub is_terminating: bool,
    /// Whether it has ended.
    pub is_finished: bool,
    /// Whether its containers are ready.
    pub containers_ready: bool,
    /// Whether it is ready, gates included.
    pub is_ready: bool,
    /// What its gate says, if that was set.
    pub is_routable: Option<bool>,
    /// Whether it is fetching a model just now.
    pub is_fetching: bool,
    /// Whether its server runs and has not started yet, within the time that its startup probe allows.
    pub is_starting: bool,
    /// Under which key of the ConfigMap of revisions it found what to fetch.
    pub revision_key: Option<String>,
    /// What its containers wait for before they can be created: the volumes that have to exist.
    pub awaits: Option<String>,
    /// How the last fetch in it ended.
    pub fetched: Option<FetchReport>,
    /// What keeps it from working, if that does not pass by itself.
    pub problem: Option<Problem>,
}

/// What keeps a pod from working.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// For conditions: stable, in CamelCase.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// How a fetch ended, as `server fetch` leaves it in the termination message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FetchReport {
    /// `Fetched`, or why not: stable, in CamelCase.
    pub reason: String,
    /// For people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// The digest of all files, `sha256:…`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// The commit of the repository that the files are of, where the source has commits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Bytes that are there.
    pub bytes: i64,
    /// Bytes in all, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_total: Option<i64>,
}

impl FetchReport {
    /// The reason of a fetch that has brought everything.
    pub const FETCHED: &str = "Fetched";

    /// Whether all is there.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.reason == Self::FETCHED
    }
}

/// What `pod` is worth.
#[must_use]
pub fn look(pod: &Pod) -> PodState {
    let label = |name: &str| pod.labels().get(name).cloned().unwrap_or_default();
    let nothing = PodStatus::default();
    let status = pod.status.as_ref().unwrap_or(&nothing);
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
        template: label(TEMPLATE),
        job: owner.map(|owner| owner.name.clone()),
        model: model(pod),
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

fn model(pod: &Pod) -> Option<String> {
    let server = pod.spec.as_ref()?.containers.iter().find(|container| container.name == "server")?;
    let mut args = server.args.iter().flatten();
    args.find_map(|argument| argument.strip_prefix("--model=")).map(str::to_owned)
}

fn revision_key(pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    containers.filter(|container| container.name == "fetch").find_map(revision::key_of)
}

/// The kubelet ends a container that does not start within the time of its startup probe, so one that runs and has not
/// started is still within it.
fn is_starting(status: &PodStatus) -> bool {
    let server = status.container_statuses.iter().flatten().find(|container| container.name == "server");
    server.is_some_and(|server| {
        let is_running = server.state.as_ref().is_some_and(|state| state.running.is_some());
        is_running && server.started != Some(true)
    })
}

/// The volumes that a pod on a node needs before its containers can be created. Kubernetes reports that one is missing in
/// events only, which come and go; its status says no more than that nothing was created.
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
        format!("the pod waits for its containers to be created, which needs {}", objects.join(", "))
    })
}

/// The objects that the volumes of a pod are made from, and that others have to create.
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

/// The last report of a container that fetches.
fn report(container: &ContainerStatus) -> Option<FetchReport> {
    let ended = |state: &Option<ContainerState>| state.as_ref()?.terminated.clone();
    let ended = ended(&container.state).or_else(|| ended(&container.last_state))?;
    let message = ended.message.unwrap_or_default();
    Some(serde_json::from_str(message.trim()).unwrap_or_else(|_| FetchReport {
        reason: if ended.exit_code == 0 { FetchReport::FETCHED.to_owned() } else { "FetchFailed".to_owned() },
        message: if ended.exit_code == 0 { String::new() } else { why(&message, ended.exit_code) },
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

/// Why the scheduler finds no node, with the names of the claims where it is about claims: it mentions them without.
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
        let said = waiting.message.clone().unwrap_or_default();
        match waiting.reason.as_deref() {
            // Said in turns, in ever other words.
            Some("ErrImagePull" | "ImagePullBackOff") => {
                let (image, user) =
                    image_volume(pod, &said).unwrap_or_else(|| (container.image.clone(), name.to_owned()));
                let message = format!("the image {image} of {user} cannot be pulled{}", pull_secrets(pod));
                return Some(Problem { reason: "ImagePullBackOff".to_owned(), message });
            }
            Some(
                reason @ ("InvalidImageName"
                | "ErrImageNeverPull"
                | "CreateContainerConfigError"
                | "CreateContainerError"
                | "RunContainerError"),
            ) => {
                return Some(Problem { reason: reason.to_owned(), message: format!("{name}: {said}") });
            }
            _ => {}
        }
    }
    if container.ready {
        return None;
    }
    // It has failed and has not worked since, whether it is just being tried again or waits for that.
    let ended = |state: Option<&ContainerState>| state.and_then(|state| state.terminated.clone());
    let ended = ended(state).or_else(|| ended(container.last_state.as_ref()))?;
    if ended.exit_code == 0 && ended.reason.as_deref() != Some("OOMKilled") {
        return None;
    }
    if ended.reason.as_deref() == Some("OOMKilled") {
        let message = format!("{name} needs more memory than its limit allows");
        return Some(Problem { reason: "OOMKilled".to_owned(), message });
    }
    let message = format!("{name}: {}", why(&ended.message.unwrap_or_default(), ended.exit_code));
    Some(Problem { reason: "Crashing".to_owned(), message })
}

/// The image of a volume that a message of the kubelet is about, and the volume: a container waits for these as it does for
/// its own image.
fn image_volume(pod: &Pod, message: &str) -> Option<(String, String)> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let mut images =
        volumes.filter_map(|volume| Some((volume.image.as_ref()?.reference.clone()?, &volume.name)));
    let (image, name) = images.find(|(image, _)| message.contains(&format!("{image:?}")))?;
    Some((image, format!("the volume {name}")))
}

/// The Secrets that the images of a pod are pulled with. The kubelet pulls without one that does not exist, so a registry
/// only says that it refuses.
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

/// Why a pod could not be created, from what a controller reports. The name of the pod, which is another one for each
/// attempt, is left out.
pub(crate) fn creation_error(message: &str) -> String {
    let message = message.strip_prefix("(combined from similar events): ").unwrap_or(message);
    let message = message.strip_prefix("Error creating: ").unwrap_or(message);
    let rest = message.strip_prefix("pods \"").and_then(|rest| rest.split_once("\" is forbidden: "));
    rest.map_or_else(|| message.to_owned(), |(_, reason)| format!("pods cannot be created: {reason}"))
}

/// Why a container has ended, from what it wrote last.
fn why(text: &str, code: i32) -> String {
    /// Length of the last output of a container in a condition, in characters.
    ///
    /// Beyond it: the text is truncated.
    const LENGTH_MAX: usize = 400;
    let words: String = last_words(text).chars().take(LENGTH_MAX).collect();
    if words.is_empty() { format!("ended with code {code}") } else { format!("{words} (code {code})") }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn state(status: &Value) -> PodState {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "status": status});
        look(&serde_json::from_value(pod).unwrap())
    }

    fn container(name: &str, state: &Value, last: &Value) -> Value {
        json!({
            "name": name, "image": "image", "imageID": "", "ready": false, "restartCount": 1,
            "state": state, "lastState": last,
        })
    }

    #[test]
    fn an_image_that_cannot_be_had_reads_the_same_each_time() {
        let waiting = |reason: &str, message: &str| {
            let waiting = json!({"waiting": {"reason": reason, "message": message}});
            state(&json!({"containerStatuses": [container("server", &waiting, &json!({}))]}))
        };
        let first = waiting("ErrImagePull", "rpc error: not found");
        assert_eq!(first, waiting("ImagePullBackOff", "Back-off pulling image"));
        assert_eq!(first.problem.unwrap().message, "the image image of server cannot be pulled");
    }

    #[test]
    fn an_image_that_cannot_be_had_names_the_secrets_it_is_pulled_with() {
        let waiting = json!({"waiting": {"reason": "ErrImagePull", "message": "401 Unauthorized"}});
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
            "spec": {"containers": [], "imagePullSecrets": [{"name": "registry"}]},
            "status": {"containerStatuses": [container("server", &waiting, &json!({}))]},
        });
        let problem = look(&serde_json::from_value(pod).unwrap()).problem.unwrap();
        assert!(problem.message.contains("with the Secret \"registry\", which must exist"), "{problem:?}");
    }

    #[test]
    fn an_image_that_is_a_volume_is_told_from_the_container_s_own() {
        let waiting = |image: &str| {
            let message = format!("Back-off pulling image \"{image}\": ErrImagePull: failed to pull");
            let waiting = json!({"waiting": {"reason": "ImagePullBackOff", "message": message}});
            let pod = json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
                "spec": {"containers": [], "volumes": [{"name": "model", "image": {"reference": "models/m:1"}}]},
                "status": {"containerStatuses": [container("server", &waiting, &json!({}))]},
            });
            look(&serde_json::from_value(pod).unwrap()).problem.unwrap().message
        };
        assert_eq!(waiting("models/m:1"), "the image models/m:1 of the volume model cannot be pulled");
        assert_eq!(waiting("image"), "the image image of server cannot be pulled");
    }

    #[test]
    fn a_container_that_keeps_failing_reads_the_same_while_it_runs_and_while_it_waits() {
        let ended = json!({"terminated": {"exitCode": 1, "message": "x\nerror: no model\n"}});
        let at = |present: &Value, last: &Value| {
            state(&json!({"containerStatuses": [container("server", present, last)]})).problem
        };
        let running = at(&json!({"running": {}}), &ended);
        assert_eq!(running, at(&json!({"waiting": {"reason": "CrashLoopBackOff"}}), &ended));
        assert_eq!(running, at(&ended, &json!({})));
        assert_eq!(running.unwrap().message, "server: no model (code 1)");
    }

    #[test]
    fn the_report_of_a_fetch_is_read_from_where_it_ended() {
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
        assert_eq!(pod.fetched.unwrap().message, "gone (code 137)");
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
        let problem = look(&serde_json::from_value(pod).unwrap()).problem.unwrap();
        assert!(
            problem.message.starts_with("the PersistentVolumeClaim \"models\" must exist"),
            "{problem:?}"
        );
    }

    #[test]
    fn what_containers_wait_for_is_named() {
        let waiting = json!({"waiting": {"reason": "ContainerCreating"}});
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
            "spec": {"containers": [], "volumes": [{"name": "keys", "secret": {"secretName": "my-keys"}}]},
            "status": {"containerStatuses": [container("router", &waiting, &json!({}))]},
        });
        let awaits = |pod: &Value| look(&serde_json::from_value(pod.clone()).unwrap()).awaits;
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

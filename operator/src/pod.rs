//! What a pod is worth, read off its status. Pure. What Kubernetes says in turns while nothing changes, as it does of an
//! image that cannot be had and of a container that keeps failing, is one and the same here.

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod, PodStatus};
use kube::ResourceExt as _;
use serde::{Deserialize, Serialize};

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
        fetched: fetch.and_then(report),
        problem: problem(pod, status),
    }
}

fn model(pod: &Pod) -> Option<String> {
    let server = pod.spec.as_ref()?.containers.iter().find(|container| container.name == "server")?;
    let mut args = server.args.iter().flatten();
    args.find_map(|argument| argument.strip_prefix("--model=")).map(str::to_owned)
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
        let message = condition.message.clone().unwrap_or_default();
        return Some(Problem { reason: "Unschedulable".to_owned(), message });
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
    containers(status).find_map(container_problem)
}

fn container_problem(container: &ContainerStatus) -> Option<Problem> {
    let name = &container.name;
    let state = container.state.as_ref();
    let waiting = state.and_then(|state| state.waiting.as_ref());
    if let Some(waiting) = waiting {
        let said = waiting.message.clone().unwrap_or_default();
        match waiting.reason.as_deref() {
            // Said in turns, in ever other words.
            Some("ErrImagePull" | "ImagePullBackOff") => {
                let message = format!("the image {} of {name} cannot be pulled", container.image);
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

/// Why a container has ended, from what it wrote last.
fn why(text: &str, code: i32) -> String {
    /// Characters of it that go into a condition.
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
}

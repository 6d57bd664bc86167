//! The problems that prevent pods from working. Kubernetes reports some of them with alternating reasons, such as
//! `ErrImagePull` and `ImagePullBackOff`; here each of them has a single reason and message. This module is pure.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition, PodStatus};

use super::containers::{containers, fetch_status, last_exit};
use super::exit_reason::exit_message;
use super::fetch_report::{FetchReport, last_report};

/// A problem that prevents a pod from working.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The reason for conditions: stable and in CamelCase.
    pub reason: String,
    /// The message, in human-readable form.
    pub message: String,
}

/// Returns the problem that prevents a pod from working, if it will not resolve on its own.
pub(super) fn problem(pod: &Pod, status: &PodStatus) -> Option<Problem> {
    if pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let scheduled = status.conditions.iter().flatten().find(|condition| condition.type_ == "PodScheduled");
    if let Some(condition) =
        scheduled.filter(|condition| condition.reason.as_deref() == Some("Unschedulable"))
    {
        return Some(Problem { reason: "Unschedulable".to_owned(), message: unschedulable(pod, condition) });
    }
    let fetch = fetch_status(pod, status).and_then(last_report);
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
/// adds the names of the pod's claims.
fn unschedulable(pod: &Pod, condition: &PodCondition) -> String {
    let message = condition.message.clone().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let claims: Vec<String> = volumes
        .filter_map(|volume| Some(format!("{:?}", volume.persistent_volume_claim.as_ref()?.claim_name)))
        .collect();
    if claims.is_empty() || !message.to_lowercase().contains("persistentvolumeclaim") {
        return message;
    }
    let plural = if claims.len() == 1 { "" } else { "s" };
    format!("the PersistentVolumeClaim{plural} {} must exist and be bound: {message}", claims.join(", "))
}

fn container_problem(pod: &Pod, container: &ContainerStatus) -> Option<Problem> {
    let name = &container.name;
    let waiting = container.state.as_ref().and_then(|state| state.waiting.as_ref());
    if let Some(waiting) = waiting {
        let reported = waiting.message.clone().unwrap_or_default();
        match waiting.reason.as_deref() {
            // The kubelet alternates between these reasons, with varying messages.
            Some("ErrImagePull" | "ImagePullBackOff") => {
                let (image, user) = image_volume(pod, &reported)
                    .unwrap_or_else(|| (container.image.clone(), format!("container {name:?}")));
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
    // If the container has exited, it has not been ready since. It may be running again or waiting for its restart.
    let exit = last_exit(container)?;
    if exit.reason.as_deref() == Some("OOMKilled") {
        let message = format!(
            "the container {name} was killed because it exceeded its memory limit, or because the node ran out of \
             memory"
        );
        return Some(Problem { reason: "OOMKilled".to_owned(), message });
    }
    if exit.exit_code == 0 {
        return None;
    }
    let reason = exit_message(exit.message.as_deref().unwrap_or_default(), exit.exit_code);
    Some(Problem { reason: "Crashing".to_owned(), message: format!("{name}: {reason}") })
}

/// The image volume that a message of the kubelet concerns: its image, and a description of the volume. The kubelet
/// reports the same reasons for a container whose image volume cannot be pulled as for a container whose own image
/// cannot be pulled.
fn image_volume(pod: &Pod, message: &str) -> Option<(String, String)> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let mut images =
        volumes.filter_map(|volume| Some((volume.image.as_ref()?.reference.clone()?, &volume.name)));
    let (image, name) = images.find(|(image, _)| message.contains(&format!("{image:?}")))?;
    Some((image, format!("volume {name:?}")))
}

/// A hint about the Secrets for pulling the images of a pod. The kubelet ignores a Secret that does not exist, so the
/// only symptom is that the registry denies access.
fn pull_secrets(pod: &Pod) -> String {
    let secrets = pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten());
    let names: Vec<String> = secrets.map(|secret| format!("{:?}", secret.name)).collect();
    match names.as_slice() {
        [] => String::new(),
        [name] => {
            format!(
                "; the kubelet pulls it with the Secret {name}, which must exist and be valid for the registry"
            )
        }
        _ => format!(
            "; the kubelet pulls it with the Secrets {}, of which at least one must exist and be valid for the \
             registry",
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

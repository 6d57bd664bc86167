//! Failures that Kubernetes reports only in events: a Job that cannot create its pod (for example, because of a quota
//! or Pod Security), and a pod whose volumes cannot be mounted (for example, because a Secret does not exist). The API
//! server filters the events by kind and reason, so that most events of a busy namespace do not reach the operator.

use k8s_openapi::api::core::v1::Event as KubernetesEvent;
use kube::ResourceExt as _;

use crate::names::Component;
use crate::pod::{Problem, creation_error};

/// Number of failed attempts to mount after which a volume counts as missing: a volume that is created together with
/// its pod may exist a moment later. The kubelet makes this number of attempts within about two seconds.
const MOUNT_ATTEMPTS_MIN: i32 = 3;

/// The kind of failures that a watch selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureKind {
    /// A Job that cannot create its pod.
    JobFailedCreate,
    /// A pod whose volumes cannot be mounted.
    PodFailedMount,
}

impl FailureKind {
    pub(super) const ALL: [Self; 2] = [Self::JobFailedCreate, Self::PodFailedMount];

    /// The kind of the object that the events concern.
    pub(super) fn object_kind(self) -> &'static str {
        match self {
            Self::JobFailedCreate => "Job",
            Self::PodFailedMount => "Pod",
        }
    }

    /// The reason of the events.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::JobFailedCreate => "FailedCreate",
            Self::PodFailedMount => "FailedMount",
        }
    }
}

/// The last failure of a Job or a pod.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) kind: FailureKind,
    /// The name of the event that reports the failure. The failure is forgotten when the event expires.
    pub(super) event: String,
    /// The UID of the Job or pod.
    pub(super) uid: String,
    pub(super) problem: Problem,
}

impl Failure {
    /// Returns the failure that an event reports, with the namespace and name of the object that the event concerns.
    /// `None` if the object is not one of the operator's, or if the failure may be temporary.
    pub(super) fn new(kind: FailureKind, event: &KubernetesEvent) -> Option<((String, String), Self)> {
        let object = &event.involved_object;
        let key = (object.namespace.clone()?, object.name.clone()?);
        // Events lack the labels of the objects that they concern, so the objects of the operator are recognized by
        // their names.
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
        let problem = Problem { reason: kind.reason().to_owned(), message };
        let uid = object.uid.clone().unwrap_or_default();
        Some((key, Self { kind, event: event.name_any(), uid, problem }))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_volume_counts_as_missing_after_repeated_attempts_to_mount_it() {
        let failure = |object: &str, count| {
            let event = json!({
                "metadata": {"name": format!("{object}.1"), "namespace": "models"},
                "involvedObject": {"namespace": "models", "name": object, "uid": "7"},
                "count": count,
                "message": "secret \"keys\" not found",
            });
            Failure::new(FailureKind::PodFailedMount, &serde_json::from_value(event).unwrap())
        };
        assert!(failure("chat-router-5d9f-x7k2p", 2).is_none());
        let (_, failure_of_router) = failure("chat-router-5d9f-x7k2p", 3).unwrap();
        assert_eq!(failure_of_router.problem.reason, "FailedMount");
        assert!(failure("nginx-5d9f-x7k2p", 9).is_none(), "failures of other pods are not stored");
    }
}

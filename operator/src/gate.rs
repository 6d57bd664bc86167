//! Decides when the readiness gate of a replica is set or cleared. This module is pure.
//!
//! A gate is latched: it is set once, when the routers have admitted the replica, and cleared only when the replica is
//! deleted. Later reports of routers do not change it, so that a failing router cannot make replicas unready.

use std::collections::BTreeSet;

use crate::pod::{PodState, awaiting_admission};

/// A change of a readiness gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateChange {
    /// The routers have admitted the replica.
    Admit,
    /// The replica is being deleted.
    Leave,
}

impl GateChange {
    /// Returns the new status of the pod condition.
    #[must_use]
    pub fn status(self) -> &'static str {
        match self {
            Self::Admit => "True",
            Self::Leave => "False",
        }
    }

    /// Returns the reason of the pod condition.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::Admit => "Admitted",
            Self::Leave => "Leaving",
        }
    }

    /// Returns the message of the pod condition.
    #[must_use]
    pub fn message(self) -> &'static str {
        match self {
            Self::Admit => "the routers send requests to the replica",
            Self::Leave => "the replica finishes its requests and receives no new ones",
        }
    }
}

/// Returns the gates that must change, by the name of the pod.
#[must_use]
pub fn gate_changes<'a>(pods: &'a [PodState], admitted: &BTreeSet<String>) -> Vec<(&'a str, GateChange)> {
    let waiting = awaiting_admission(pods).into_iter().filter(|name| admitted.contains(*name));
    let leaving = pods.iter().filter(|pod| pod.is_terminating && pod.is_routable == Some(true));
    let leaving = leaving.map(|pod| (pod.name.as_str(), GateChange::Leave));
    waiting.map(|name| (name, GateChange::Admit)).chain(leaving).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replica(name: &str) -> PodState {
        PodState {
            name: name.to_owned(),
            component: "server".to_owned(),
            containers_ready: true,
            ..PodState::default()
        }
    }

    #[test]
    fn a_gate_is_set_on_admission_and_cleared_on_deletion_only() {
        let admitted = BTreeSet::from(["new".to_owned(), "loading".to_owned()]);
        let pods = [
            replica("new"),
            replica("unknown"),
            PodState { containers_ready: false, ..replica("loading") },
            // The gate remains set even if no router reports the replica anymore.
            PodState { is_routable: Some(true), ..replica("old") },
            PodState { is_routable: Some(true), is_terminating: true, ..replica("gone") },
            PodState { is_routable: Some(false), is_terminating: true, ..replica("long gone") },
        ];
        assert_eq!(gate_changes(&pods, &admitted), [("new", GateChange::Admit), ("gone", GateChange::Leave)]);
    }
}

//! Whether a replica's gate is to be set or cleared. Pure.
//!
//! A gate is latched: it is set once, when routers have admitted the replica, and cleared only when the replica leaves.
//! What routers say later does not matter, so a router that fails cannot make a fleet unready.

use std::collections::BTreeSet;

use crate::observe::awaiting;
use crate::pod::PodState;

/// What is to become of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Routers have admitted the replica.
    Admitted,
    /// It leaves.
    Leaving,
}

impl Turn {
    /// Status, reason and message of the pod's condition.
    #[must_use]
    pub fn condition(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Admitted => ("True", "Admitted", "the routers send it requests"),
            Self::Leaving => ("False", "Leaving", "it finishes its requests and gets no more"),
        }
    }
}

/// Which gates are to be turned.
#[must_use]
pub fn turns<'a>(pods: &'a [PodState], admitted: &BTreeSet<String>) -> Vec<(&'a str, Turn)> {
    let waiting = awaiting(pods).into_iter().filter(|name| admitted.contains(*name));
    let leaving = pods.iter().filter(|pod| pod.is_terminating && pod.is_routable == Some(true));
    let leaving = leaving.map(|pod| (pod.name.as_str(), Turn::Leaving));
    waiting.map(|name| (name, Turn::Admitted)).chain(leaving).collect()
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
    fn a_gate_is_set_once_and_cleared_by_leaving_only() {
        let admitted = BTreeSet::from(["new".to_owned(), "loading".to_owned()]);
        let pods = [
            replica("new"),
            replica("unknown"),
            PodState { containers_ready: false, ..replica("loading") },
            // Routers do not know it any more: that is no reason.
            PodState { is_routable: Some(true), ..replica("old") },
            PodState { is_routable: Some(true), is_terminating: true, ..replica("gone") },
            PodState { is_routable: Some(false), is_terminating: true, ..replica("long gone") },
        ];
        assert_eq!(turns(&pods, &admitted), [("new", Turn::Admitted), ("gone", Turn::Leaving)]);
    }
}

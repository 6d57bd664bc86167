//! What maintenance of the cluster may take away.

use serde_json::{Value, json};

use super::names::Component;
use super::pod::json_of;
use crate::manifest::{Kind, Manifest};
use crate::validate::ValidDeployment;

/// The budgets of replicas and of routers.
#[must_use]
pub(super) fn manifests(valid: &ValidDeployment) -> Vec<Manifest> {
    let disruption = &valid.server.disruption;
    let (field, amount) = match (&disruption.min_available, &disruption.max_unavailable) {
        (Some(amount), _) => ("minAvailable", json_of(amount)),
        (None, Some(amount)) => ("maxUnavailable", json_of(amount)),
        (None, None) => ("maxUnavailable", json!(1)),
    };
    vec![
        budget(valid, Component::Server, field, amount),
        budget(valid, Component::Router, "maxUnavailable", json!(1)),
    ]
}

fn budget(valid: &ValidDeployment, component: Component, field: &str, amount: Value) -> Manifest {
    let owner = &valid.owner;
    let mut spec = json!({
        "selector": {"matchLabels": owner.selector(component)},
        // A pod that does not work protects nothing.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    });
    spec[field] = amount;
    owner.manifest(Kind::PodDisruptionBudget, &owner.part(component), component, json!({"spec": spec}))
}

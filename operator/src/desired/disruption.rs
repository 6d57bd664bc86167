//! The PodDisruptionBudgets, which limit the number of pods that node drains may evict at the same time.

use serde_json::{Value, json};

use crate::manifest::{Kind, Manifest, to_json};
use crate::names::Component;
use crate::valid_deployment::{DisruptionLimit, ValidDeployment};

/// Returns the budgets of the replicas and of the routers.
pub(super) fn manifests(valid: &ValidDeployment) -> Vec<Manifest> {
    let (field, amount) = match &valid.server.disruption {
        DisruptionLimit::MinAvailable(amount) => ("minAvailable", amount),
        DisruptionLimit::MaxUnavailable(amount) => ("maxUnavailable", amount),
    };
    vec![
        budget(valid, Component::Server, field, to_json(amount)),
        budget(valid, Component::Router, "maxUnavailable", json!(1)),
    ]
}

fn budget(valid: &ValidDeployment, component: Component, field: &str, amount: Value) -> Manifest {
    let owner = &valid.owner;
    let mut spec = json!({
        "selector": {"matchLabels": owner.selector(component)},
        // A pod that is not ready receives no new requests, so evicting it does little harm.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    });
    spec[field] = amount;
    let name = owner.component_name(component);
    owner.manifest(Kind::PodDisruptionBudget, &name, component, json!({"spec": spec}))
}

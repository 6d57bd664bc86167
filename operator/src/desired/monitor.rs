//! What Prometheus scrapes, where the Prometheus operator is there.

use serde_json::json;

use super::flags::time;
use super::names::{Component, INSTANCE};
use crate::manifest::{Kind, Manifest};
use crate::validate::ValidDeployment;

/// The ServiceMonitor, if it is wanted.
#[must_use]
pub(super) fn manifests(valid: &ValidDeployment) -> Vec<Manifest> {
    let Some(interval) = valid.monitor else { return Vec::new() };
    let owner = &valid.owner;
    let content = json!({"spec": {
        "selector": {"matchLabels": {"app.kubernetes.io/name": "ovfleet", INSTANCE: owner.name}},
        "endpoints": [{"port": "http", "path": "/metrics", "interval": time(interval)}],
    }});
    vec![owner.manifest(Kind::ServiceMonitor, &owner.name, Component::Router, content)]
}

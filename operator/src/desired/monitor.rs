//! What Prometheus scrapes, where the Prometheus operator is there.

use serde_json::json;

use super::flags::time;
use super::names::{Component, INSTANCE};
use super::overlay::lay_over;
use crate::manifest::{Kind, Manifest};
use crate::validate::ValidDeployment;

/// The label of metrics that says which LLMDeployment they are of. Alerts and dashboards group by it.
const LLMDEPLOYMENT: &str = "llmdeployment";

/// The ServiceMonitor, if it is wanted.
#[must_use]
pub(super) fn manifests(valid: &ValidDeployment) -> Vec<Manifest> {
    let Some(monitor) = &valid.monitor else { return Vec::new() };
    let owner = &valid.owner;
    let content = json!({"spec": {
        "selector": {"matchLabels": {"app.kubernetes.io/name": "ovfleet", INSTANCE: owner.name}},
        "endpoints": [{
            "port": "admin",
            "path": "/metrics",
            "interval": time(monitor.interval),
            "relabelings": [{
                "action": "replace",
                "sourceLabels": ["__meta_kubernetes_service_label_app_kubernetes_io_instance"],
                "targetLabel": LLMDEPLOYMENT,
            }],
        }],
    }});
    let mut manifest = owner.manifest(Kind::ServiceMonitor, &owner.name, Component::Router, content);
    // The operator's own labels are last: it finds its objects by them.
    let mut labels = json!(monitor.labels);
    lay_over(&mut labels, &manifest.body["metadata"]["labels"]);
    manifest.body["metadata"]["labels"] = labels;
    vec![manifest]
}

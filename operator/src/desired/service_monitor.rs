//! The ServiceMonitor, which defines the endpoints that Prometheus scrapes.

use serde_json::json;

use super::flags::time;
use super::merge::merge;
use crate::manifest::{Kind, Manifest};
use crate::names::{Component, INSTANCE, NAME, OVFLEET};
use crate::valid_deployment::ValidDeployment;

/// The metric label that contains the name of the LLMDeployment. Alerts and dashboards group by this label.
const LLMDEPLOYMENT: &str = "llmdeployment";

/// Returns the ServiceMonitor, if the resource requests one.
pub(super) fn manifest(valid: &ValidDeployment) -> Option<Manifest> {
    let monitor = valid.service_monitor.as_ref()?;
    let owner = &valid.owner;
    let content = json!({"spec": {
        "selector": {"matchLabels": {NAME: OVFLEET, INSTANCE: owner.name}},
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
    // The operator's own labels take precedence, because the operator selects its objects by them.
    let mut labels = json!(monitor.labels);
    merge(&mut labels, &manifest.body["metadata"]["labels"]);
    manifest.body["metadata"]["labels"] = labels;
    Some(manifest)
}

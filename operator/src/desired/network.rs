//! The NetworkPolicies, which restrict the connections of pods.

use serde_json::{Value, json};

use crate::manifest::{Kind, Manifest};
use crate::names::{Component, NAME, OPERATOR};
use crate::ports::{ADMIN_PORT, GRPC_PORT, HTTP_PORT, PROGRESS_PORT};
use crate::valid_deployment::ValidDeployment;

/// Returns the NetworkPolicies, if the resource enables them.
pub(super) fn manifests(valid: &ValidDeployment) -> Vec<Manifest> {
    if !valid.security.network_policy {
        return Vec::new();
    }
    let mut manifests = vec![server(valid), router(valid)];
    if valid.files.shared().is_some() {
        manifests.push(fetch(valid));
    }
    manifests
}

/// The policy of replicas. Only routers can reach the API and the gRPC port of replicas. Replicas can open connections
/// only if they fetch their model, or images for requests.
fn server(valid: &ValidDeployment) -> Manifest {
    let owner = &valid.owner;
    let routers = json!({
        "from": [{"podSelector": {"matchLabels": owner.selector(Component::Router)}}],
        "ports": [port(HTTP_PORT), port(GRPC_PORT)],
    });
    let fetches_model = valid.files.fetched().is_some() && valid.files.shared().is_none();
    let fetches_images = !valid.server.engine.media.allowed_domains.is_empty();
    let ingress =
        if fetches_model { json!([routers, metrics(), progress()]) } else { json!([routers, metrics()]) };
    let egress = if fetches_model || fetches_images { json!([{}]) } else { json!([]) };
    policy(
        valid,
        Component::Server,
        json!({"ingress": ingress, "egress": egress, "policyTypes": ["Ingress", "Egress"]}),
    )
}

/// The policy of routers. All clients can reach the API of the routers, and the operator can reach their gRPC port, on
/// which they report the replicas that they have admitted. The connections that routers open are not restricted,
/// because a policy cannot select the API server or trace collectors.
fn router(valid: &ValidDeployment) -> Manifest {
    policy(
        valid,
        Component::Router,
        json!({
            "ingress": [{"ports": [port(HTTP_PORT)]}, metrics(), operator(GRPC_PORT)],
            "policyTypes": ["Ingress"],
        }),
    )
}

fn fetch(valid: &ValidDeployment) -> Manifest {
    policy(valid, Component::Fetch, json!({"ingress": [progress()], "policyTypes": ["Ingress"]}))
}

/// The rule for metrics and probes. The port serves nothing else, so all clients may connect to it.
fn metrics() -> Value {
    json!({"ports": [port(ADMIN_PORT)]})
}

/// The rule that allows the operator to request the progress of a fetch.
fn progress() -> Value {
    operator(PROGRESS_PORT)
}

/// The rule that allows connections from the operator, in any namespace, to a port.
fn operator(to: u16) -> Value {
    json!({
        "from": [{
            "namespaceSelector": {},
            "podSelector": {"matchLabels": {NAME: OPERATOR}},
        }],
        "ports": [port(to)],
    })
}

fn port(port: u16) -> Value {
    json!({"port": port, "protocol": "TCP"})
}

fn policy(valid: &ValidDeployment, component: Component, mut spec: Value) -> Manifest {
    let owner = &valid.owner;
    spec["podSelector"] = json!({"matchLabels": owner.selector(component)});
    owner.manifest(Kind::NetworkPolicy, &owner.component_name(component), component, json!({"spec": spec}))
}

//! Who may talk to whom.

use serde_json::{Value, json};

use super::fetch::PROGRESS_PORT;
use super::names::Component;
use super::server::{ADMIN_PORT, GRPC_PORT, HTTP_PORT};
use crate::manifest::{Kind, Manifest};
use crate::validate::{Cache, Files, ValidDeployment};

/// The label of the operator's own pods.
const OPERATOR: (&str, &str) = ("app.kubernetes.io/name", "ovfleet-operator");

/// The policies, if they are wanted.
#[must_use]
pub(super) fn manifests(valid: &ValidDeployment) -> Vec<Manifest> {
    if !valid.security.network_policy {
        return Vec::new();
    }
    let mut manifests = vec![server(valid), router(valid)];
    if matches!(&valid.files, Files::Fetched(fetched) if matches!(fetched.cache, Cache::Shared(_))) {
        manifests.push(fetch(valid));
    }
    manifests
}

/// The API of replicas is for routers. Replicas open no connections, except to fetch their model.
fn server(valid: &ValidDeployment) -> Manifest {
    let owner = &valid.owner;
    let routers = json!({
        "from": [{"podSelector": {"matchLabels": owner.selector(Component::Router)}}],
        "ports": [port(HTTP_PORT), port(GRPC_PORT)],
    });
    let own_fetch =
        matches!(&valid.files, Files::Fetched(fetched) if !matches!(fetched.cache, Cache::Shared(_)));
    let (ingress, egress) = if own_fetch {
        (json!([routers, metrics(), progress()]), json!([{}]))
    } else {
        (json!([routers, metrics()]), json!([]))
    };
    policy(
        valid,
        Component::Server,
        json!({"ingress": ingress, "egress": egress, "policyTypes": ["Ingress", "Egress"]}),
    )
}

/// Everybody may use routers, and the operator may ask which replicas they have admitted. Their own connections are not
/// restricted: a policy cannot know where the API server and collectors of traces are.
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

/// Whoever scrapes or probes reaches this port, which serves metrics and probes and nothing else.
fn metrics() -> Value {
    json!({"ports": [port(ADMIN_PORT)]})
}

/// The operator asks how far a fetch is.
fn progress() -> Value {
    operator(PROGRESS_PORT)
}

/// The operator, wherever it runs.
fn operator(to: u16) -> Value {
    let (label, value) = OPERATOR;
    json!({
        "from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {label: value}}}],
        "ports": [port(to)],
    })
}

fn port(port: u16) -> Value {
    json!({"port": port, "protocol": "TCP"})
}

fn policy(valid: &ValidDeployment, component: Component, mut spec: Value) -> Manifest {
    let owner = &valid.owner;
    spec["podSelector"] = json!({"matchLabels": owner.selector(component)});
    owner.manifest(Kind::NetworkPolicy, &owner.part(component), component, json!({"spec": spec}))
}

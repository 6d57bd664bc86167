//! Addresses: the Service that clients use, the one by which routers find replicas, and the one by which Prometheus finds
//! routers.

use serde_json::json;

use super::names::Component;
use super::pod::put;
use super::server::{ADMIN_PORT, GRPC_PORT, HTTP_PORT};
use crate::manifest::{Kind, Manifest};
use crate::validate::ValidDeployment;

/// All Services.
#[must_use]
pub(super) fn manifests(valid: &ValidDeployment) -> Vec<Manifest> {
    vec![clients(valid), replicas(valid), routers(valid)]
}

fn clients(valid: &ValidDeployment) -> Manifest {
    let owner = &valid.owner;
    let service = &valid.router.service;
    let mut port = json!({"name": "http", "port": service.port, "targetPort": "http", "protocol": "TCP"});
    put(&mut port, "nodePort", service.node_port);
    let content = json!({
        "spec": {
            "type": service.r#type.name(),
            "selector": owner.selector(Component::Router),
            "ports": [port],
        },
    });
    let mut manifest = owner.manifest(Kind::Service, &owner.name, Component::Router, content);
    manifest.body["metadata"]["annotations"] = json!(service.annotations);
    manifest
}

/// It has no address of its own, and it names replicas that are not ready yet: it is by asking them that routers find
/// out when they are, and by the routers' word that they become so.
fn replicas(valid: &ValidDeployment) -> Manifest {
    let owner = &valid.owner;
    let port =
        |name: &str, port: u16| json!({"name": name, "port": port, "targetPort": name, "protocol": "TCP"});
    let content = json!({
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": true,
            "selector": owner.selector(Component::Server),
            "ports": [port("http", HTTP_PORT), port("grpc", GRPC_PORT), port("admin", ADMIN_PORT)],
        },
    });
    owner.manifest(Kind::Service, &owner.replicas(), Component::Server, content)
}

/// By which Prometheus finds the metrics of routers. Clients have a Service of their own, without this port.
fn routers(valid: &ValidDeployment) -> Manifest {
    let owner = &valid.owner;
    let content = json!({
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "selector": owner.selector(Component::Router),
            "ports": [{"name": "admin", "port": ADMIN_PORT, "targetPort": "admin", "protocol": "TCP"}],
        },
    });
    owner.manifest(Kind::Service, &owner.part(Component::Router), Component::Router, content)
}

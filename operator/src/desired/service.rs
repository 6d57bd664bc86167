//! The Services: one for clients, one through which routers discover replicas, and one through which Prometheus
//! discovers routers.

use serde_json::json;

use super::pod::set_member;
use crate::manifest::{Kind, Manifest};
use crate::names::Component;
use crate::ports::{ADMIN_PORT, GRPC_PORT, HTTP_PORT};
use crate::valid_deployment::ValidDeployment;

/// Returns the Services of a resource.
pub(super) fn manifests(valid: &ValidDeployment) -> Vec<Manifest> {
    vec![for_clients(valid), for_routers(valid), for_prometheus(valid)]
}

fn for_clients(valid: &ValidDeployment) -> Manifest {
    let owner = &valid.owner;
    let service = &valid.router.service;
    let mut port = json!({"name": "http", "port": service.port, "targetPort": "http", "protocol": "TCP"});
    set_member(&mut port, "nodePort", service.node_port);
    let content = json!({
        "spec": {
            "type": service.service_type.name(),
            "selector": owner.selector(Component::Router),
            "ports": [port],
        },
    });
    let mut manifest = owner.manifest(Kind::Service, &owner.name, Component::Router, content);
    manifest.body["metadata"]["annotations"] = json!(service.annotations);
    manifest
}

/// The Service through which routers discover replicas. It is headless and includes replicas that are not ready:
/// routers connect to them to detect when they can serve, and replicas become ready once routers have admitted
/// them.
fn for_routers(valid: &ValidDeployment) -> Manifest {
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
    owner.manifest(Kind::Service, &owner.replicas_service(), Component::Server, content)
}

/// The Service through which Prometheus discovers routers. The Service for clients does not have the admin port.
fn for_prometheus(valid: &ValidDeployment) -> Manifest {
    let owner = &valid.owner;
    let content = json!({
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "selector": owner.selector(Component::Router),
            "ports": [{"name": "admin", "port": ADMIN_PORT, "targetPort": "admin", "protocol": "TCP"}],
        },
    });
    let name = owner.component_name(Component::Router);
    owner.manifest(Kind::Service, &name, Component::Router, content)
}

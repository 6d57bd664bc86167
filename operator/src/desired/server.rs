//! The replicas: a Deployment, whose pods are ready only once a router has admitted them, and leave by draining.

use std::time::Duration;

use serde_json::{Value, json};

use super::fetch::{self, MODEL};
use super::flags::{self, Listen};
use super::names::{Component, ROUTABLE, TEMPLATE};
use super::overlay::{lay_over, lay_template_over};
use super::pod::{Volumes, container_security, image_pull_secrets, json_of, put, security_context, spread};
use super::replica_token;
use crate::manifest::{Kind, Manifest, digest, quantity};
use crate::validate::{Server, ValidDeployment};

/// The port of HTTP in every pod.
pub const HTTP_PORT: u16 = 8000;
/// The port of gRPC in every pod.
pub const GRPC_PORT: u16 = 50051;
/// The port of probes and metrics in every pod.
pub const ADMIN_PORT: u16 = 8081;
/// Time that the pod of a server has to end, beyond `drain.timeout`.
///
/// Beyond it: Kubernetes kills the pod.
const FAREWELL: Duration = Duration::from_secs(15);
/// Time in which a server starts that has nothing to load.
const START_MIN: Duration = Duration::from_secs(120);
/// The slowest storage that a start is to survive, in bytes per second.
const LOAD_BYTES_PER_SECOND: u64 = 50_000_000;
/// What a model is taken to have where no memory limit says how much it can have, in bytes.
const MODEL_BYTES: u64 = 64 << 30;

/// The Deployment of the replicas.
#[must_use]
pub fn deployment(valid: &ValidDeployment) -> Manifest {
    let owner = &valid.owner;
    let server = &valid.server;
    let mut template = template(valid);
    let hash = digest(&template);
    template["metadata"]["labels"][TEMPLATE] = json!(hash);
    let mut content = json!({
        "spec": {
            "replicas": server.replicas,
            "selector": {"matchLabels": owner.selector(Component::Server)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {
                "maxSurge": json_of(&server.surge_max),
                "maxUnavailable": json_of(&server.unavailable_max),
            }},
            // A replica that loads its model makes no progress that Kubernetes can see.
            "progressDeadlineSeconds": (server.progress_deadline + start_time(server)).as_secs(),
            // For undoing there is the resource itself.
            "revisionHistoryLimit": 2,
            "template": template,
        },
    });
    // The API server leaves out what is zero, and what is left out would look like a change by somebody else.
    put(&mut content["spec"], "paused", server.paused.then_some(true));
    put(
        &mut content["spec"],
        "minReadySeconds",
        (server.min_ready_seconds > 0).then_some(server.min_ready_seconds),
    );
    owner.manifest(Kind::Deployment, &owner.part(Component::Server), Component::Server, content)
}

fn template(valid: &ValidDeployment) -> Value {
    let owner = &valid.owner;
    let server = &valid.server;
    let parts = fetch::pod_parts(valid);
    let written = if parts.written { Volumes::Written } else { Volumes::Read };
    let mut volumes = parts.volumes.clone();
    volumes.push(json!({"name": "tmp", "emptyDir": {}}));
    volumes.push(replica_token::volume(valid));
    let mut spec = json!({
        "serviceAccountName": owner.part(Component::Server),
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "readinessGates": [{"conditionType": ROUTABLE}],
        "securityContext": security_context(&valid.security, written),
        "terminationGracePeriodSeconds": (server.drain_timeout + FAREWELL).as_secs(),
        "containers": [container(valid, &parts.path)],
        "volumes": volumes,
    });
    put(&mut spec, "initContainers", Some(parts.before));
    put(&mut spec, "imagePullSecrets", Some(image_pull_secrets(&valid.security)));
    place(&mut spec, valid);
    let mut template = json!({"metadata": {"labels": {}, "annotations": {}}, "spec": spec});
    if let Some(overlay) = &server.overlay {
        lay_template_over(&mut template, overlay);
    }
    // Last, as these may not be changed.
    lay_over(&mut template["metadata"]["labels"], &owner.labels(Component::Server));
    template
}

fn place(spec: &mut Value, valid: &ValidDeployment) {
    let placement = &valid.server.placement;
    let selector = valid.owner.selector(Component::Server);
    let spread = spread(&placement.topology_spread_constraints, &selector);
    put(spec, "topologySpreadConstraints", Some(spread));
    put(spec, "nodeSelector", Some(json_of(&placement.node_selector)));
    put(spec, "tolerations", Some(json_of(&placement.tolerations)));
    put(spec, "affinity", fetch::affinity(valid));
    put(spec, "priorityClassName", placement.priority_class_name.clone());
    put(spec, "runtimeClassName", placement.runtime_class_name.clone());
}

fn container(valid: &ValidDeployment, path: &str) -> Value {
    let server = &valid.server;
    let host = valid.listen.to_string();
    let listen = Listen {
        host: &host,
        port: HTTP_PORT,
        grpc_port: GRPC_PORT,
        admin_port: Some(ADMIN_PORT),
        replica_token_file: Some(replica_token::FILE),
        log_format: "json",
    };
    let drain = flags::time(server.drain_timeout);
    let health = |path: &str| json!({"path": format!("/v2/health/{path}"), "port": "admin"});
    let mut container = json!({
        "name": "server",
        "image": server.image,
        "args": flags::server(server, path, &valid.model_names, listen),
        "ports": ports(),
        "resources": resources(server),
        "securityContext": container_security(),
        "startupProbe": {
            "httpGet": health("ready"),
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": start_time(server).as_secs(),
        },
        "readinessProbe": {"httpGet": health("ready"), "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
        // A busy server is not a dead one: only long silence is.
        "livenessProbe": {"httpGet": health("live"), "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
        "lifecycle": {"preStop": {"exec": {"command": [
            "/usr/local/bin/server",
            "drain",
            format!("--grpc-port={GRPC_PORT}"),
            format!("--timeout={drain}"),
            format!("--replica-token-file={}", replica_token::FILE),
        ]}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "model", "mountPath": MODEL, "readOnly": true},
            {"name": "tmp", "mountPath": "/tmp"},
            replica_token::mount(),
        ],
    });
    put(&mut container, "imagePullPolicy", valid.image_pull_policy.clone());
    container
}

/// The ports of a server, and of a router.
pub(super) fn ports() -> Value {
    let port = |name: &str, port: u16| json!({"name": name, "containerPort": port, "protocol": "TCP"});
    json!([port("http", HTTP_PORT), port("grpc", GRPC_PORT), port("admin", ADMIN_PORT)])
}

/// With processors of its own, requests are what limits are.
fn resources(server: &Server) -> Value {
    let mut resources = json_of(&server.resources);
    if server.placement.cpu_pinning {
        resources["requests"] = resources["limits"].clone();
    }
    resources
}

/// How long a start may take: as long as it takes to read as much as the memory limit lets it hold.
fn start_time(server: &Server) -> Duration {
    let limit = server.resources.limits.as_ref().and_then(|limits| limits.get("memory"));
    let bytes = limit.and_then(|limit| quantity(&limit.0)).and_then(|limit| u64::try_from(limit / 1000).ok());
    START_MIN + Duration::from_secs(bytes.unwrap_or(MODEL_BYTES) / LOAD_BYTES_PER_SECOND)
}

/// Which template the pods should be of.
#[must_use]
pub fn template_hash(deployment: &Value) -> Option<&str> {
    deployment.pointer("/spec/template/metadata/labels")?.get(TEMPLATE)?.as_str()
}

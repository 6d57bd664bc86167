//! The Deployment of the replicas. A replica becomes ready once the routers have admitted it, and drains before it
//! stops.

use std::time::Duration;

use serde_json::{Value, json};

use super::fetch;
use super::flags::{self, ProcessOptions};
use super::pod::{
    container_security_context, health, image_pull_secrets, ports, security_context, set_member,
    set_placement,
};
use super::replica_token;
use super::template::{PodTemplate, RenderedDeployment};
use crate::manifest::{Kind, to_json};
use crate::names::{Component, ROUTABLE};
use crate::quantity::QuantityValue;
use crate::source::MODEL_PATH;
use crate::valid_deployment::{ServerSettings, ValidDeployment};

/// Time that the pod of a server has to exit, in addition to `drain.timeout`.
///
/// If exceeded: Kubernetes kills the pod.
const EXIT_TIME: Duration = Duration::from_secs(15);
/// Time that a server has to start, in addition to the time for reading its model.
const START_TIME_MIN: Duration = Duration::from_secs(120);
/// The upper bound of the time within which a server must start. The time is computed from the memory limit, which may
/// be any quantity, and Kubernetes stores it in seconds as a 32-bit integer.
const START_TIME_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// The lowest speed, in bytes per second, at which a server must be able to read its model.
const READ_BYTES_PER_SECOND: u64 = 50_000_000;
/// The assumed size of a model in bytes if no memory limit bounds it.
const MODEL_BYTES: u64 = 64 << 30;

/// Renders the Deployment of the replicas.
pub(super) fn deployment(valid: &ValidDeployment) -> RenderedDeployment {
    let owner = &valid.owner;
    let server = &valid.server;
    let template = PodTemplate::render(owner, Component::Server, &pod(valid), server.pod_template.as_ref());
    let mut content = json!({
        "spec": {
            "replicas": server.replicas,
            "selector": {"matchLabels": owner.selector(Component::Server)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {
                "maxSurge": to_json(&server.max_surge),
                "maxUnavailable": to_json(&server.max_unavailable),
            }},
            // Kubernetes sees no progress while a replica loads its model.
            "progressDeadlineSeconds": (server.progress_deadline + start_time(server)).as_secs(),
            // Users undo a rollout by changing the resource, so a short history is sufficient.
            "revisionHistoryLimit": 2,
            "template": template.body,
        },
    });
    // The API server omits these fields if they are false or 0, which would look like a change by another field
    // manager.
    set_member(&mut content["spec"], "paused", server.paused.then_some(true));
    let min_ready_seconds = (server.min_ready_seconds > 0).then_some(server.min_ready_seconds);
    set_member(&mut content["spec"], "minReadySeconds", min_ready_seconds);
    let name = owner.component_name(Component::Server);
    let manifest = owner.manifest(Kind::Deployment, &name, Component::Server, content);
    let mut deployment = RenderedDeployment::new(manifest, template.hash, &valid.inputs.server);
    deployment.former_inputs = Some(valid.inputs.former_server.clone());
    if let Some((fetched, _)) = valid.files.shared() {
        deployment.set_source(&fetch::source_key(fetched));
    }
    deployment
}

fn pod(valid: &ValidDeployment) -> Value {
    let owner = &valid.owner;
    let server = &valid.server;
    let model = fetch::model_mount(valid);
    let mut volumes = model.volumes;
    volumes.push(json!({"name": "tmp", "emptyDir": {}}));
    volumes.push(replica_token::volume(valid));
    let mut spec = json!({
        "serviceAccountName": owner.component_name(Component::Server),
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "readinessGates": [{"conditionType": ROUTABLE}],
        "securityContext": security_context(&valid.security, model.volume_use),
        "terminationGracePeriodSeconds": (server.drain_timeout + EXIT_TIME).as_secs(),
        "containers": [container(valid, &model.path)],
        "volumes": volumes,
    });
    set_member(&mut spec, "initContainers", Some(model.init_containers));
    set_member(&mut spec, "imagePullSecrets", Some(image_pull_secrets(&valid.security)));
    set_placement(&mut spec, &server.placement, fetch::affinity(valid), &owner.selector(Component::Server));
    spec
}

fn container(valid: &ValidDeployment, model_path: &str) -> Value {
    let server = &valid.server;
    let mut container = json!({
        "name": "server",
        "image": server.image,
        "args": flags::server(server, model_path, &valid.model_names, ProcessOptions::in_pod(valid.host)),
        "ports": ports(),
        "resources": to_json(&server.resources),
        "securityContext": container_security_context(),
        "startupProbe": {
            "httpGet": health("ready"),
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": start_time(server).as_secs(),
        },
        "readinessProbe": {"httpGet": health("ready"), "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
        // A busy server may respond slowly, so only a minute without a response counts as a failure.
        "livenessProbe": {"httpGet": health("live"), "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
        "lifecycle": {"preStop": {"exec": {"command": flags::drain(server)}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "model", "mountPath": MODEL_PATH, "readOnly": true},
            {"name": "tmp", "mountPath": "/tmp"},
            replica_token::mount(),
        ],
    });
    set_member(&mut container, "imagePullPolicy", valid.image_pull_policy.clone());
    container
}

/// Time within which a server must start: enough to read as many bytes as its memory limit allows, but at most
/// [`START_TIME_MAX`].
fn start_time(server: &ServerSettings) -> Duration {
    let limit = server.resources.limits.as_ref().and_then(|limits| limits.get("memory"));
    let value = limit.and_then(|limit| limit.0.parse::<QuantityValue>().ok());
    let bytes = value.and_then(|value| u64::try_from(value.units()).ok());
    let read_time = Duration::from_secs(bytes.unwrap_or(MODEL_BYTES) / READ_BYTES_PER_SECOND);
    (START_TIME_MIN + read_time).min(START_TIME_MAX)
}

//! The Deployment of the routers, and the ConfigMap with the options that routers reload while they run.

use serde_json::{Map, Value, json};

use super::flags::{self, ProcessOptions, RouterFiles};
use super::pod::{
    VolumeUse, container_security_context, health, image_pull_secrets, ports, security_context, set_member,
    set_placement,
};
use super::replica_token;
use super::template::{PodTemplate, RenderedDeployment};
use crate::manifest::{Kind, Manifest, to_json};
use crate::names::Component;
use crate::valid_deployment::ValidDeployment;

/// The path at which the ConfigMap is mounted.
const CONFIG_PATH: &str = "/etc/ovfleet";
/// The path at which the Secret with API keys is mounted.
const API_KEYS_PATH: &str = "/etc/ovfleet-keys";
/// The name of the configuration file.
const CONFIG_FILE: &str = "router.yaml";
/// Time in seconds for which a router still accepts requests while its removal from the endpoints propagates.
const ENDPOINT_REMOVAL_SECONDS: u64 = 5;
/// Time in seconds that the pod of a router has to exit, in addition to `drain.timeout` and the 5 s in which its
/// removal from the endpoints propagates.
///
/// If exceeded: Kubernetes kills the pod.
const EXIT_SECONDS: u64 = 10;

/// Renders the ConfigMap with the options that routers reload when the ConfigMap changes.
pub(super) fn config_map(valid: &ValidDeployment) -> Manifest {
    let owner = &valid.owner;
    let service = format!("{}/{}", owner.namespace, owner.replicas_service());
    let replicas = Map::from_iter([("replicas-service".to_owned(), json!(service))]);
    let content = json!({"data": {CONFIG_FILE: flags::router_config(&valid.router, replicas)}});
    let name = owner.component_name(Component::Router);
    owner.manifest(Kind::ConfigMap, &name, Component::Router, content)
}

/// Renders the Deployment of the routers.
pub(super) fn deployment(valid: &ValidDeployment) -> RenderedDeployment {
    let owner = &valid.owner;
    let router = &valid.router;
    let template = PodTemplate::render(owner, Component::Router, &pod(valid), router.pod_template.as_ref());
    let content = json!({
        "spec": {
            "replicas": router.replicas,
            "selector": {"matchLabels": owner.selector(Component::Router)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "revisionHistoryLimit": 2,
            "template": template.body,
        },
    });
    let name = owner.component_name(Component::Router);
    let manifest = owner.manifest(Kind::Deployment, &name, Component::Router, content);
    RenderedDeployment::new(manifest, template.hash, &valid.inputs.router)
}

fn pod(valid: &ValidDeployment) -> Value {
    let owner = &valid.owner;
    let router = &valid.router;
    let drain_seconds = valid.server.drain_timeout.as_secs();
    let config = json!({"name": "options", "configMap": {"name": owner.component_name(Component::Router)}});
    let mut volumes = vec![config, replica_token::volume(valid)];
    let config = json!({"name": "options", "mountPath": CONFIG_PATH, "readOnly": true});
    let mut mounts = vec![config, replica_token::mount()];
    let mut volume_use = VolumeUse::Shared;
    if let Some(keys) = &router.api_keys {
        // Mode 0440: only root and the group of the pod can read the keys.
        volumes.push(json!({"name": "keys", "secret": {"secretName": keys.name, "defaultMode": 0o440}}));
        mounts.push(json!({"name": "keys", "mountPath": API_KEYS_PATH, "readOnly": true}));
        volume_use = VolumeUse::Owned;
    }
    let mut pod = json!({
        "serviceAccountName": owner.component_name(Component::Router),
        "automountServiceAccountToken": true,
        "enableServiceLinks": false,
        "securityContext": security_context(&valid.security, volume_use),
        "terminationGracePeriodSeconds": drain_seconds + ENDPOINT_REMOVAL_SECONDS + EXIT_SECONDS,
        "containers": [container(valid, &mounts)],
        "volumes": volumes,
    });
    set_member(&mut pod, "imagePullSecrets", Some(image_pull_secrets(&valid.security)));
    set_placement(&mut pod, &router.placement, None, &owner.selector(Component::Router));
    pod
}

fn container(valid: &ValidDeployment, mounts: &[Value]) -> Value {
    let router = &valid.router;
    let config = format!("{CONFIG_PATH}/{CONFIG_FILE}");
    let api_keys = router.api_keys.as_ref().map(|keys| format!("{API_KEYS_PATH}/{}", keys.key));
    let files = RouterFiles { config: &config, api_keys: api_keys.as_deref() };
    let options = ProcessOptions::in_pod(valid.host);
    let mut container = json!({
        "name": "router",
        "image": router.image,
        "args": flags::router(router, files, options, valid.server.drain_timeout),
        "ports": ports(),
        "resources": resources(valid),
        "securityContext": container_security_context(),
        "startupProbe": {"httpGet": health("live"), "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 60},
        // The probe does not request "ready", which fails without replicas: a router without replicas still queues
        // requests, or rejects them with an error that clients understand.
        "readinessProbe": {"httpGet": health("live"), "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {"httpGet": health("live"), "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
        // Clients send requests to the router until its removal from the endpoints has propagated.
        "lifecycle": {"preStop": {"sleep": {"seconds": ENDPOINT_REMOVAL_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    });
    set_member(&mut container, "imagePullPolicy", valid.image_pull_policy.clone());
    container
}

fn resources(valid: &ValidDeployment) -> Value {
    match &valid.router.resources {
        Some(resources) => to_json(resources),
        None => json!({"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}),
    }
}

//! The routers: a Deployment and the options that it takes up while it runs.

use serde_json::{Map, Value, json};

use super::flags::{self, Listen};
use super::names::{Component, TEMPLATE};
use super::overlay::{lay_over, lay_template_over};
use super::pod::{Volumes, container_security, image_pull_secrets, json_of, put, security_context, spread};
use super::replica_token;
use super::server::{ADMIN_PORT, GRPC_PORT, HTTP_PORT, ports};
use crate::manifest::{Kind, Manifest, digest};
use crate::validate::ValidDeployment;

/// Where the options are mounted.
const OPTIONS: &str = "/etc/ovfleet";
/// Where API keys are mounted.
const KEYS: &str = "/etc/ovfleet-keys";
/// The name of the file of options.
const OPTIONS_FILE: &str = "router.yaml";
/// Time that the rest of the cluster has for hearing that a router is about to leave, in seconds.
const LEAVE_SECONDS: u64 = 5;
/// Time in seconds that the pod of a router has to end, beyond `drain.timeout` and the 5 s in which the cluster
/// learns that it leaves.
///
/// Beyond it: Kubernetes kills the pod.
const FAREWELL_SECONDS: u64 = 10;

/// The options, which routers read again when they change.
#[must_use]
pub(super) fn options(valid: &ValidDeployment) -> Manifest {
    let owner = &valid.owner;
    let service = format!("{}/{}", owner.namespace, owner.replicas());
    let replicas = Map::from_iter([("replicas-service".to_owned(), json!(service))]);
    let content = json!({"data": {OPTIONS_FILE: flags::router_options(&valid.router, replicas)}});
    owner.manifest(Kind::ConfigMap, &owner.part(Component::Router), Component::Router, content)
}

/// The Deployment.
#[must_use]
pub(super) fn deployment(valid: &ValidDeployment) -> Manifest {
    let owner = &valid.owner;
    let mut template = json!({"metadata": {"labels": {}, "annotations": {}}, "spec": pod(valid)});
    if let Some(overlay) = &valid.router.overlay {
        lay_template_over(&mut template, overlay);
    }
    // Last, as these may not be changed.
    lay_over(&mut template["metadata"]["labels"], &owner.labels(Component::Router));
    template["metadata"]["labels"][TEMPLATE] = json!(digest(&template));
    let content = json!({
        "spec": {
            "replicas": valid.router.replicas,
            "selector": {"matchLabels": owner.selector(Component::Router)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "revisionHistoryLimit": 2,
            "template": template,
        },
    });
    owner.manifest(Kind::Deployment, &owner.part(Component::Router), Component::Router, content)
}

fn pod(valid: &ValidDeployment) -> Value {
    let owner = &valid.owner;
    let drain = valid.server.drain_timeout;
    let options = json!({"name": "options", "configMap": {"name": owner.part(Component::Router)}});
    let mut volumes = vec![options, replica_token::volume(valid)];
    let options = json!({"name": "options", "mountPath": OPTIONS, "readOnly": true});
    let mut mounts = vec![options, replica_token::mount()];
    let keys = valid.router.keys.as_ref().map(|keys| {
        // 0440: the pod's group may read, nobody else.
        volumes.push(json!({"name": "keys", "secret": {"secretName": keys.name, "defaultMode": 0o440}}));
        mounts.push(json!({"name": "keys", "mountPath": KEYS, "readOnly": true}));
        format!("{KEYS}/{}", keys.key)
    });
    let options = format!("{OPTIONS}/{OPTIONS_FILE}");
    let host = valid.listen.to_string();
    let listen = Listen {
        host: &host,
        port: HTTP_PORT,
        grpc_port: GRPC_PORT,
        admin_port: Some(ADMIN_PORT),
        replica_token_file: Some(replica_token::FILE),
        log_format: "json",
    };
    let args = flags::router(&valid.router, [Some(&options), keys.as_deref()], listen, drain);
    let volumes_used = if keys.is_some() { Volumes::Written } else { Volumes::Read };
    let health = |path: &str| json!({"path": format!("/v2/health/{path}"), "port": "admin"});
    let mut container = json!({
        "name": "router",
        "image": valid.router.image,
        "args": args,
        "ports": ports(),
        "resources": resources(valid),
        "securityContext": container_security(),
        "startupProbe": {"httpGet": health("live"), "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 60},
        // Not "ready", which a router is while it has replicas: without any it still is who lets requests wait for
        // one, or refuses them in time and in words.
        "readinessProbe": {"httpGet": health("live"), "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {"httpGet": health("live"), "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
        // Until all have heard that its address is going away, it goes on.
        "lifecycle": {"preStop": {"sleep": {"seconds": LEAVE_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    });
    put(&mut container, "imagePullPolicy", valid.image_pull_policy.clone());
    let mut pod = json!({
        "serviceAccountName": owner.part(Component::Router),
        "automountServiceAccountToken": true,
        "enableServiceLinks": false,
        "securityContext": security_context(&valid.security, volumes_used),
        "terminationGracePeriodSeconds": drain.as_secs() + LEAVE_SECONDS + FAREWELL_SECONDS,
        "containers": [container],
        "volumes": volumes,
    });
    put(&mut pod, "imagePullSecrets", Some(image_pull_secrets(&valid.security)));
    let placement = &valid.router.placement;
    let spread = spread(&placement.topology_spread_constraints, &owner.selector(Component::Router));
    put(&mut pod, "topologySpreadConstraints", Some(spread));
    put(&mut pod, "nodeSelector", Some(json_of(&placement.node_selector)));
    put(&mut pod, "tolerations", Some(json_of(&placement.tolerations)));
    put(&mut pod, "priorityClassName", placement.priority_class_name.clone());
    pod
}

fn resources(valid: &ValidDeployment) -> Value {
    match &valid.router.resources {
        Some(resources) => json_of(resources),
        None => json!({"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}),
    }
}

//! The container that fetches a model with `ovfleet-server fetch`, and the volume from which replicas read the model. A
//! model is fetched into each pod by an init container, or once by a Job into a volume that all replicas mount. When
//! the fetch is complete, the link `current` points to the model.

use operator_api::AccessMode;
use serde_json::{Value, json};

use super::flags::{self, Expansion};
use super::pod::{VolumeUse, container_security_context, set_member};
use crate::manifest::{digest, to_json};
use crate::names::{COMPONENT, Component, INSTANCE, REVISION_VARIABLE};
use crate::ports::{PROGRESS_PORT, PROGRESS_PORT_NAME};
use crate::source::MODEL_PATH;
use crate::valid_deployment::{
    CacheVolume, FetchedModel, ModelCache, ModelFiles, MountedModel, ValidDeployment,
};

pub mod job;
pub mod revision;

/// The path at which the Secret with credentials is mounted.
const CREDENTIALS_PATH: &str = "/credentials";
/// The path at which the ConfigMap with certificates is mounted.
const CA_BUNDLE_PATH: &str = "/etc/ovfleet-ca";

/// The parts of a replica's pod that provide its model.
#[derive(Debug)]
pub(super) struct ModelMount {
    /// The path of the model in the server's container.
    pub(super) path: String,
    /// The volume called `model`, and the volumes of the init container.
    pub(super) volumes: Vec<Value>,
    /// The container that fetches the model, if the pod fetches it.
    pub(super) init_containers: Vec<Value>,
    /// The way in which the pod accesses its volumes.
    pub(super) volume_use: VolumeUse,
}

/// Returns the parts of a replica's pod that provide its model.
pub(super) fn model_mount(valid: &ValidDeployment) -> ModelMount {
    let path_of = |path: &Option<String>| {
        path.as_ref().map_or(MODEL_PATH.to_owned(), |path| format!("{MODEL_PATH}/{path}"))
    };
    let mounted = |path, volume| ModelMount {
        path,
        volumes: vec![volume],
        init_containers: Vec::new(),
        volume_use: VolumeUse::Shared,
    };
    match &valid.files {
        ModelFiles::Mounted(MountedModel::Claim { claim, path }) => mounted(
            path_of(path),
            json!({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": true}}),
        ),
        // The configured pull policy applies to the images of containers, not to this image, which is a volume.
        ModelFiles::Mounted(MountedModel::Image { image, path }) => {
            mounted(path_of(path), json!({"name": "model", "image": {"reference": image}}))
        }
        ModelFiles::Fetched(fetched) => match &fetched.cache {
            ModelCache::Shared(_) => mounted(
                format!("{}/current", source_directory(fetched)),
                json!({
                    "name": "model",
                    "persistentVolumeClaim": {"claimName": valid.owner.cache_claim(), "readOnly": true},
                }),
            ),
            ModelCache::Scratch { size_limit } => {
                let mut scratch = json!({});
                set_member(&mut scratch, "sizeLimit", size_limit.clone());
                fetched_by_pod(valid, fetched, json!({"name": "model", "emptyDir": scratch}))
            }
            ModelCache::PerPod(volume) => {
                let template = json!({"spec": claim_spec(volume, "ReadWriteOnce")});
                let volume = json!({"name": "model", "ephemeral": {"volumeClaimTemplate": template}});
                fetched_by_pod(valid, fetched, volume)
            }
        },
    }
}

fn fetched_by_pod(valid: &ValidDeployment, fetched: &FetchedModel, volume: Value) -> ModelMount {
    let mut volumes = vec![volume];
    volumes.extend(container_volumes(fetched));
    ModelMount {
        path: format!("{MODEL_PATH}/current"),
        volumes,
        init_containers: vec![container(valid, fetched, MODEL_PATH)],
        volume_use: VolumeUse::Owned,
    }
}

/// Returns the key of the source of a model. A shared volume has a directory for each source, with the key as its name,
/// so that replicas can still serve the previous model while the next one is fetched.
pub(super) fn source_key(fetched: &FetchedModel) -> String {
    digest(&json!(flags::source(fetched, Expansion::None)))
}

/// The path of the source's directory in the containers that mount the shared volume.
fn source_directory(fetched: &FetchedModel) -> String {
    format!("{MODEL_PATH}/{}", source_key(fetched))
}

/// The container that fetches a model into the directory `into`.
fn container(valid: &ValidDeployment, fetched: &FetchedModel, into: &str) -> Value {
    let settings = &fetched.container;
    let mut args = vec![
        "fetch".to_owned(),
        format!("--into={into}"),
        format!("--progress-port={PROGRESS_PORT}"),
        "--report=/dev/termination-log".to_owned(),
    ];
    let mut mounts = vec![json!({"name": "model", "mountPath": MODEL_PATH})];
    if fetched.credentials.is_some() {
        args.push(format!("--credentials={CREDENTIALS_PATH}"));
        mounts.push(json!({"name": "credentials", "mountPath": CREDENTIALS_PATH, "readOnly": true}));
    }
    args.extend(flags::source(fetched, Expansion::Container));
    let variable = |(name, value): (&String, &String)| json!({"name": name, "value": value});
    let mut env: Vec<Value> = settings.env.iter().map(variable).collect();
    env.extend(fetched.revision().map(|revision| {
        let reference = json!({"name": valid.owner.revisions(), "key": revision.key});
        json!({"name": REVISION_VARIABLE, "valueFrom": {"configMapKeyRef": reference}})
    }));
    if let Some(bundle) = &settings.ca_bundle {
        mounts.push(json!({"name": "ca-bundle", "mountPath": CA_BUNDLE_PATH, "readOnly": true}));
        env.push(json!({"name": "SSL_CERT_FILE", "value": format!("{CA_BUNDLE_PATH}/{}", bundle.key)}));
    }
    let mut container = json!({
        "name": "fetch",
        "image": valid.server.image,
        "args": args,
        "ports": [{"name": PROGRESS_PORT_NAME, "containerPort": PROGRESS_PORT, "protocol": "TCP"}],
        "resources": resources(fetched),
        "securityContext": container_security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    });
    set_member(&mut container, "imagePullPolicy", valid.image_pull_policy.clone());
    set_member(&mut container, "env", Some(env));
    container
}

fn resources(fetched: &FetchedModel) -> Value {
    if let Some(resources) = &fetched.container.resources {
        return to_json(resources);
    }
    // A pod can have exclusive CPUs only if the CPU and memory requests of all its containers equal their limits.
    let limits = json!({"cpu": "500m", "memory": "256Mi"});
    let mut requests = limits.clone();
    if let ModelCache::Scratch { size_limit: Some(size) } = &fetched.cache {
        // Without this request, the pod could be placed on a node whose disk is too small, and then be evicted.
        requests["ephemeral-storage"] = json!(size);
    }
    json!({"requests": requests, "limits": limits})
}

/// The volumes of the container that fetches a model, except for the volume of the model.
fn container_volumes(fetched: &FetchedModel) -> Vec<Value> {
    // Mode 0440: only root and the group of the pod can read the credentials.
    let credentials = fetched
        .credentials
        .as_ref()
        .map(|secret| json!({"name": "credentials", "secret": {"secretName": secret, "defaultMode": 0o440}}));
    let bundle = fetched.container.ca_bundle.as_ref();
    let bundle = bundle.map(|bundle| json!({"name": "ca-bundle", "configMap": {"name": bundle.name}}));
    credentials.into_iter().chain(bundle).collect()
}

/// Returns the affinity of the replicas and of the Job that fetches their model. If only one node can mount the shared
/// volume, all of these pods must be on the same node. Otherwise, the Job for the next model could wait on another node
/// for the volume that the replicas of the previous model use, and these replicas are replaced only after the Job has
/// completed.
pub(super) fn affinity(valid: &ValidDeployment) -> Option<Value> {
    let affinity = valid.server.placement.affinity.as_ref().map(to_json);
    let shared = valid.files.shared();
    if !shared.is_some_and(|(_, volume)| volume.access_mode == AccessMode::ReadWriteOnce) {
        return affinity;
    }
    let mut affinity = affinity.unwrap_or_else(|| json!({}));
    // The scheduler places the first pod despite this term, because the pod itself matches the term.
    let term = json!({
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {
            "matchLabels": {INSTANCE: valid.owner.name},
            "matchExpressions": [{
                "key": COMPONENT,
                "operator": "In",
                "values": [Component::Fetch.name(), Component::Server.name()],
            }],
        },
    });
    let terms = &mut affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    match terms.as_array_mut() {
        Some(terms) => terms.push(term),
        None => *terms = json!([term]),
    }
    Some(affinity)
}

fn claim_spec(volume: &CacheVolume, access_mode: &str) -> Value {
    let mut spec = json!({
        "accessModes": [access_mode],
        "resources": {"requests": {"storage": volume.size}},
    });
    set_member(&mut spec, "storageClassName", volume.storage_class.clone());
    spec
}

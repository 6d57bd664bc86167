//! Fetching the model: into a pod by a container that runs before the server, or into a volume of all replicas by a
//! Job. Either runs `server fetch`, which leaves a path that leads to the model once all of it is there and checked.

use std::collections::BTreeSet;

use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::names::{COMPONENT, Component, FETCHED, INSTANCE, RETRY};
use super::pod::{Volumes, container_security, image_pull_secrets, json_of, put, security_context};
use crate::manifest::{Kind, Manifest, canonical, digest};
use crate::observe::Observed;
use crate::validate::{Cache, Fetched, Files, Mounted, ValidDeployment, Volume};

pub mod revision;

/// Where the model's volume is mounted.
pub const MODEL: &str = "/model";
/// In a volume that was fetched into, what leads to the model.
const CURRENT: &str = "/model/current";
/// Where the Secret with credentials is mounted.
const CREDENTIALS: &str = "/credentials";
/// Where certificates of further authorities are mounted.
const CA_BUNDLE: &str = "/etc/ovfleet-ca";
/// The port on which progress is told.
pub const PROGRESS_PORT: u16 = 8080;
/// The exit codes of `server fetch` after which trying again is in vain: what is asked for is wrong.
pub const FATAL_CODES: [i32; 4] = [10, 11, 12, 13];
/// Number of times that the Job of a fetch is repeated after a failure that may be transient.
///
/// Beyond it: the Job fails.
const ATTEMPTS_MAX: i32 = 8;

/// What a replica's pod needs for its model.
#[derive(Clone, Debug)]
pub struct PodParts {
    /// The path to give to the server.
    pub path: String,
    /// The volume called `model`, and others.
    pub volumes: Vec<Value>,
    /// Containers that run before.
    pub before: Vec<Value>,
    /// Whether something is written to volumes.
    pub written: bool,
}

/// What a replica's pod needs for its model.
#[must_use]
pub fn pod_parts(valid: &ValidDeployment) -> PodParts {
    let at = |path: &Option<String>| path.as_ref().map_or(MODEL.to_owned(), |path| format!("{MODEL}/{path}"));
    let mounted = |path, volume| PodParts { path, volumes: vec![volume], before: Vec::new(), written: false };
    match &valid.files {
        Files::Mounted(Mounted::Claim(claim, path)) => mounted(
            at(path),
            json!({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": true}}),
        ),
        // When it is pulled is left to Kubernetes: what the operator is told about that is about our own images.
        Files::Mounted(Mounted::Image(image, path)) => {
            mounted(at(path), json!({"name": "model", "image": {"reference": image}}))
        }
        Files::Fetched(fetched) => match &fetched.cache {
            Cache::Shared(_) => mounted(
                format!("{}/current", folder(fetched)),
                json!({"name": "model", "persistentVolumeClaim": {"claimName": valid.owner.claim(), "readOnly": true}}),
            ),
            Cache::Scratch(size) => {
                let mut scratch = json!({});
                put(&mut scratch, "sizeLimit", size.clone());
                own(valid, fetched, json!({"name": "model", "emptyDir": scratch}))
            }
            Cache::PerPod(volume) => {
                let template = json!({"spec": claim_spec(volume, "ReadWriteOnce")});
                own(valid, fetched, json!({"name": "model", "ephemeral": {"volumeClaimTemplate": template}}))
            }
        },
    }
}

fn own(valid: &ValidDeployment, fetched: &Fetched, volume: Value) -> PodParts {
    let mut volumes = vec![volume];
    volumes.extend(inputs(fetched));
    PodParts {
        path: CURRENT.to_owned(),
        volumes,
        before: vec![container(valid, fetched, MODEL)],
        written: true,
    }
}

/// The claim and the Job of a shared cache, if there is one.
#[must_use]
pub fn shared(valid: &ValidDeployment, observed: &Observed) -> Vec<Manifest> {
    let Files::Fetched(fetched) = &valid.files else { return Vec::new() };
    let Cache::Shared(volume) = &fetched.cache else { return Vec::new() };
    let access = match volume.access {
        operator_api::AccessMode::ReadWriteMany => "ReadWriteMany",
        operator_api::AccessMode::ReadWriteOnce => "ReadWriteOnce",
    };
    let claim = json!({"spec": claim_spec(volume, access)});
    let owner = &valid.owner;
    let claim = owner.manifest(Kind::PersistentVolumeClaim, &owner.claim(), Component::Fetch, claim);
    let job = job(valid, fetched, observed);
    // One at a time: each removes what nobody uses, and must not find another one about to use it.
    let is_there = |wanted: bool| {
        observed.owned.keys().any(|(kind, name)| *kind == Kind::Job && (*name == job.name) == wanted)
    };
    if is_there(true) || !is_there(false) { vec![claim, job] } else { vec![claim] }
}

/// The name of the Job that fetches for a shared cache, if there is one.
#[must_use]
pub fn job_name(valid: &ValidDeployment, observed: &Observed) -> Option<String> {
    match &valid.files {
        Files::Fetched(fetched) if matches!(fetched.cache, Cache::Shared(_)) => {
            Some(job(valid, fetched, observed).name)
        }
        _ => None,
    }
}

/// The folder of a shared volume into which a source is fetched: another source is another folder, so that replicas
/// that still serve the former one keep it.
fn key(fetched: &Fetched) -> String {
    digest(&json!(fetched.flags))
}

/// The path of that folder in the containers that mount the volume.
fn folder(fetched: &Fetched) -> String {
    format!("{MODEL}/{}", key(fetched))
}

/// What a Job is told of former sources: to remove them from the volume, but for those that replicas use. Nothing if it
/// cannot be known which those are. What a Job was told stays, as its template does.
fn former(valid: &ValidDeployment, observed: &Observed, job: &str) -> Vec<String> {
    const REMOVE: &str = "--remove-former";
    const KEEP: &str = "--keep=";
    if let Some(job) = observed.owned.get(&(Kind::Job, job.to_owned())) {
        let args = args_of(&job.data, "fetch");
        return args
            .filter(|argument| *argument == REMOVE || argument.starts_with(KEEP))
            .map(str::to_owned)
            .collect();
    }
    let deployment = observed.owned.get(&(Kind::Deployment, valid.owner.part(Component::Server)));
    let template = deployment.map(|deployment| {
        args_of(&deployment.data, "server").find_map(|argument| argument.strip_prefix("--model="))
    });
    let pods = observed.pods_of(Component::Server).filter(|pod| !pod.is_finished);
    let models = pods.map(|pod| pod.model.as_deref()).chain(template);
    let Some(models) = models.collect::<Option<Vec<&str>>>() else { return Vec::new() };
    let folders = models
        .into_iter()
        .filter_map(|path| path.strip_prefix(MODEL)?.strip_prefix('/')?.strip_suffix("/current"));
    let folders: BTreeSet<&str> = folders.collect();
    let keep = folders.into_iter().map(|folder| format!("{KEEP}{folder}"));
    std::iter::once(REMOVE.to_owned()).chain(keep).collect()
}

/// The arguments of a container in the template of an object.
fn args_of<'a>(data: &'a Value, container: &str) -> impl Iterator<Item = &'a str> {
    let containers = data.pointer("/spec/template/spec/containers").and_then(Value::as_array);
    let found = containers.into_iter().flatten().find(|found| found["name"] == container);
    found.and_then(|found| found["args"].as_array()).into_iter().flatten().filter_map(Value::as_str)
}

fn job(valid: &ValidDeployment, fetched: &Fetched, observed: &Observed) -> Manifest {
    completed_job(valid, fetched, observed).unwrap_or_else(|| new_job(valid, fetched, observed))
}

/// The Job that has fetched this source already, whatever its pod looked like: another image of the server, another
/// toleration or another Secret is no reason to fetch the same files again.
fn completed_job(valid: &ValidDeployment, fetched: &Fetched, observed: &Observed) -> Option<Manifest> {
    let into = format!("--into={}", folder(fetched));
    let is_of_source = |name: &str, job: &DynamicObject| {
        observed.job_complete(name)
            && job.annotations().get(RETRY) == observed.retry.as_ref()
            && args_of(&job.data, "fetch").any(|argument| argument == into)
    };
    let (name, job) = observed.owned.iter().find_map(|((kind, name), job)| {
        (*kind == Kind::Job && is_of_source(name, job)).then_some((name, job))
    })?;
    // The API server refuses changes of a Job's template, so it is applied as it is.
    let mut spec = json!({"template": job.data["spec"]["template"]});
    for field in ["backoffLimit", "podFailurePolicy"] {
        put(&mut spec, field, job.data["spec"].get(field).cloned());
    }
    let manifest = valid.owner.manifest(Kind::Job, name, Component::Fetch, json!({"spec": spec}));
    Some(annotated(manifest, observed))
}

/// The Job for a source that has not been fetched. An incomplete Job whose pod is to change (its image, its Secret, its
/// node selector) is replaced; the next one continues with the files that are there.
fn new_job(valid: &ValidDeployment, fetched: &Fetched, observed: &Observed) -> Manifest {
    let owner = &valid.owner;
    let mut volumes = vec![json!({"name": "model", "persistentVolumeClaim": {"claimName": owner.claim()}})];
    volumes.extend(inputs(fetched));
    let mut pod = json!({
        "serviceAccountName": owner.part(Component::Fetch),
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "restartPolicy": "Never",
        "securityContext": security_context(&valid.security, Volumes::Written),
        "containers": [container(valid, fetched, &folder(fetched))],
        "volumes": volumes,
    });
    put(&mut pod, "imagePullSecrets", Some(image_pull_secrets(&valid.security)));
    put(&mut pod, "nodeSelector", Some(json_of(&valid.server.placement.node_selector)));
    put(&mut pod, "tolerations", Some(json_of(&valid.server.placement.tolerations)));
    put(&mut pod, "affinity", affinity(valid));
    // The API server refuses changes of a Job's template, so another template is another Job.
    let name = format!("{}-{}", owner.part(Component::Fetch), digest(&json!([pod, observed.retry])));
    if let Some(args) = pod["containers"][0]["args"].as_array_mut() {
        args.extend(former(valid, observed, &name).into_iter().map(Value::String));
    }
    let content = json!({
        "spec": {
            "backoffLimit": ATTEMPTS_MAX,
            "podFailurePolicy": {"rules": [{
                "action": "FailJob",
                "onExitCodes": {"containerName": "fetch", "operator": "In", "values": FATAL_CODES},
            }]},
            "template": {
                "metadata": {"labels": owner.labels(Component::Fetch)},
                "spec": pod,
            },
        },
    });
    annotated(owner.manifest(Kind::Job, &name, Component::Fetch, content), observed)
}

/// `job` with its annotations: the report of its pod, which outlives the pod, and the value of the retry annotation.
fn annotated(mut manifest: Manifest, observed: &Observed) -> Manifest {
    if let Some(fetched) = observed.fetched(&manifest.name) {
        manifest.body["metadata"]["annotations"][FETCHED] = json!(canonical(&json!(fetched)).to_string());
    }
    if let Some(retry) = &observed.retry {
        manifest.body["metadata"]["annotations"][RETRY] = json!(retry);
    }
    manifest
}

fn container(valid: &ValidDeployment, fetched: &Fetched, into: &str) -> Value {
    let mut args = vec![
        "fetch".to_owned(),
        format!("--into={into}"),
        format!("--progress-port={PROGRESS_PORT}"),
        "--report=/dev/termination-log".to_owned(),
    ];
    let mut mounts = vec![json!({"name": "model", "mountPath": MODEL})];
    if fetched.secret.is_some() {
        args.push(format!("--credentials={CREDENTIALS}"));
        mounts.push(json!({"name": "credentials", "mountPath": CREDENTIALS, "readOnly": true}));
    }
    args.extend(revision::flags(fetched));
    let variable = |(name, value): (&String, &String)| json!({"name": name, "value": value});
    let mut env: Vec<Value> = fetched.container.env.iter().map(variable).collect();
    env.extend(revision::variable(valid, fetched));
    if let Some(bundle) = &fetched.container.ca_bundle {
        mounts.push(json!({"name": "ca-bundle", "mountPath": CA_BUNDLE, "readOnly": true}));
        env.push(json!({"name": "SSL_CERT_FILE", "value": format!("{CA_BUNDLE}/{}", bundle.key)}));
    }
    let mut container = json!({
        "name": "fetch",
        "image": valid.server.image,
        "args": args,
        "ports": [{"name": "progress", "containerPort": PROGRESS_PORT, "protocol": "TCP"}],
        "resources": resources(fetched),
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    });
    put(&mut container, "imagePullPolicy", valid.image_pull_policy.clone());
    put(&mut container, "env", Some(env));
    container
}

fn resources(fetched: &Fetched) -> Value {
    if let Some(resources) = &fetched.container.resources {
        return json_of(resources);
    }
    // Limits equal to requests, so that a pod with processors of its own remains one.
    let limits = json!({"cpu": "500m", "memory": "256Mi"});
    let mut requests = limits.clone();
    if let Cache::Scratch(Some(size)) = &fetched.cache {
        // Or the pod is placed where the model does not fit on the node's disk, and evicted when that is full.
        requests["ephemeral-storage"] = json!(size);
    }
    json!({"requests": requests, "limits": limits})
}

/// The volumes of the container that fetches, but for the model's.
fn inputs(fetched: &Fetched) -> Vec<Value> {
    // 0440: the pod's group may read, nobody else.
    let credentials = fetched
        .secret
        .as_ref()
        .map(|secret| json!({"name": "credentials", "secret": {"secretName": secret, "defaultMode": 0o440}}));
    let bundle = fetched.container.ca_bundle.as_ref();
    let bundle = bundle.map(|bundle| json!({"name": "ca-bundle", "configMap": {"name": bundle.config_map}}));
    credentials.into_iter().chain(bundle).collect()
}

/// The affinity of replicas and of the Job that fetches for them: the resource's own, and where the shared volume can be
/// mounted on one node only, to each other. Otherwise the Job for the next model could wait on another node for a volume
/// that the replicas of the present one hold, and they for the Job.
#[must_use]
pub(super) fn affinity(valid: &ValidDeployment) -> Option<Value> {
    let own = valid.server.placement.affinity.as_ref().map(json_of);
    let is_on_one_node = match &valid.files {
        Files::Fetched(fetched) => match &fetched.cache {
            Cache::Shared(volume) => volume.access == operator_api::AccessMode::ReadWriteOnce,
            Cache::Scratch(_) | Cache::PerPod(_) => false,
        },
        Files::Mounted(_) => false,
    };
    if !is_on_one_node {
        return own;
    }
    let mut affinity = own.unwrap_or_else(|| json!({}));
    // A term that the pod itself matches does not keep the first pod from being placed.
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

fn claim_spec(volume: &Volume, access: &str) -> Value {
    let mut spec = json!({
        "accessModes": [access],
        "resources": {"requests": {"storage": volume.size}},
    });
    put(&mut spec, "storageClassName", volume.class.clone());
    spec
}

//! The Job that fetches a model into the volume that all replicas mount, and the claim of that volume. This module is
//! pure.

use std::collections::BTreeSet;

use kube::ResourceExt as _;
use kube::api::DynamicObject;
use operator_api::AccessMode;
use serde_json::{Value, json};

use super::{affinity, claim_spec, container, container_volumes, source_directory, source_key};
use crate::desired::pod::{VolumeUse, image_pull_secrets, security_context, set_member};
use crate::manifest::{Kind, Manifest, canonical, digest, to_json};
use crate::names::{Component, FETCHED, RETRY, SOURCE};
use crate::observe::ObservedState;
use crate::source::{ModelSourceKey, source_of_object};
use crate::valid_deployment::{FetchedModel, ValidDeployment};

/// The exit codes of `ovfleet-server fetch` for errors that a retry cannot resolve.
const PERMANENT_EXIT_CODES: [i32; 4] = [10, 11, 12, 13];
/// Number of times that Kubernetes retries a fetch Job after a failure that may be transient.
///
/// If exceeded: the Job fails.
const RETRIES_MAX: i32 = 8;

/// Returns the claim and the Job of a shared volume. Empty if the model is not fetched into a shared volume.
pub(crate) fn manifests(valid: &ValidDeployment, observed: &ObservedState) -> Vec<Manifest> {
    let Some((fetched, volume)) = valid.files.shared() else { return Vec::new() };
    let access_mode = match volume.access_mode {
        AccessMode::ReadWriteMany => "ReadWriteMany",
        AccessMode::ReadWriteOnce => "ReadWriteOnce",
    };
    let claim = json!({"spec": claim_spec(volume, access_mode)});
    let owner = &valid.owner;
    let claim = owner.manifest(Kind::PersistentVolumeClaim, &owner.cache_claim(), Component::Fetch, claim);
    let job = job(valid, fetched, observed);
    // Run only one Job at a time, because a Job removes unused directories, which another Job could be about to use.
    let mut others = observed.owned.keys().filter(|(kind, name)| *kind == Kind::Job && *name != job.name);
    let may_exist = observed.job(&job.name).is_some() || others.next().is_none();
    if may_exist { vec![claim, job] } else { vec![claim] }
}

/// Returns the name of the Job that fetches the model, if a Job fetches it.
pub(crate) fn job_name(valid: &ValidDeployment, observed: &ObservedState) -> Option<String> {
    let (fetched, _) = valid.files.shared()?;
    Some(job(valid, fetched, observed).name)
}

/// Whether replicas mount the shared volume, or will mount it, even if the resource no longer uses it.
pub(crate) fn is_claim_in_use(valid: &ValidDeployment, observed: &ObservedState) -> bool {
    used_sources(valid, observed).any(|source| source != ModelSourceKey::NotShared)
}

/// The sources of the models that replicas serve, and of the model in the template of their Deployment.
fn used_sources(valid: &ValidDeployment, observed: &ObservedState) -> impl Iterator<Item = ModelSourceKey> {
    let deployment = observed.deployment(&valid.owner.component_name(Component::Server));
    let pods = observed.pods_of(Component::Server).filter(|pod| !pod.is_finished);
    pods.map(|pod| pod.source.clone()).chain(deployment.map(source_of_object))
}

/// The arguments with which a Job removes the directories of previous sources from the volume, except for those that
/// replicas use. If the sources of some replicas are unknown, the Job removes no directories.
fn cleanup_args(valid: &ValidDeployment, observed: &ObservedState) -> Vec<String> {
    let mut used = BTreeSet::new();
    for source in used_sources(valid, observed) {
        match source {
            ModelSourceKey::Unknown => return Vec::new(),
            ModelSourceKey::NotShared => {}
            ModelSourceKey::Shared(key) => drop(used.insert(key)),
        }
    }
    let keep = used.into_iter().map(|key| format!("--keep={key}"));
    std::iter::once("--remove-previous".to_owned()).chain(keep).collect()
}

fn job(valid: &ValidDeployment, fetched: &FetchedModel, observed: &ObservedState) -> Manifest {
    let key = source_key(fetched);
    let mut manifest =
        completed_job(valid, &key, observed).unwrap_or_else(|| new_job(valid, fetched, observed));
    let annotations = &mut manifest.body["metadata"]["annotations"];
    annotations[SOURCE] = json!(key);
    // Copy the pod's report to the Job, because the pod may be deleted before the Job.
    if let Some(report) = observed.fetch_report(&manifest.name) {
        annotations[FETCHED] = json!(canonical(&json!(report)).to_string());
    }
    if let Some(retry) = &observed.retry {
        annotations[RETRY] = json!(retry);
    }
    manifest
}

/// The Job that has already fetched the source with this key. It is retained when the image of the server, the
/// tolerations or the Secret changes, because the fetched files remain the same.
fn completed_job(valid: &ValidDeployment, key: &str, observed: &ObservedState) -> Option<Manifest> {
    let source = ModelSourceKey::Shared(key.to_owned());
    let (name, job) = observed.owned.iter().find_map(|((kind, name), job)| {
        let is_of_source = *kind == Kind::Job
            && observed.is_job_complete(name)
            && job.annotations().get(RETRY) == observed.retry.as_ref()
            && source_of_object(job) == source;
        is_of_source.then_some((name, job))
    })?;
    Some(existing_job(valid, name, job))
}

/// Returns the manifest of an existing Job with its live pod template, which is immutable.
fn existing_job(valid: &ValidDeployment, name: &str, job: &DynamicObject) -> Manifest {
    let mut spec = json!({"template": job.data["spec"]["template"]});
    for field in ["backoffLimit", "podFailurePolicy"] {
        set_member(&mut spec, field, job.data["spec"].get(field).cloned());
    }
    valid.owner.manifest(Kind::Job, name, Component::Fetch, json!({"spec": spec}))
}

/// The Job for a source that has not been fetched yet. An incomplete Job is replaced when its pod template changes (for
/// example, the image, the Secret or the node selector); the next Job resumes the fetch.
fn new_job(valid: &ValidDeployment, fetched: &FetchedModel, observed: &ObservedState) -> Manifest {
    let owner = &valid.owner;
    let placement = &valid.server.placement;
    let mut volumes =
        vec![json!({"name": "model", "persistentVolumeClaim": {"claimName": owner.cache_claim()}})];
    volumes.extend(container_volumes(fetched));
    let mut pod = json!({
        "serviceAccountName": owner.component_name(Component::Fetch),
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "restartPolicy": "Never",
        "securityContext": security_context(&valid.security, VolumeUse::Owned),
        "containers": [container(valid, fetched, &source_directory(fetched))],
        "volumes": volumes,
    });
    set_member(&mut pod, "imagePullSecrets", Some(image_pull_secrets(&valid.security)));
    set_member(&mut pod, "nodeSelector", Some(to_json(&placement.node_selector)));
    set_member(&mut pod, "tolerations", Some(to_json(&placement.tolerations)));
    set_member(&mut pod, "affinity", affinity(valid));
    // The template of a Job is immutable, so another template needs a Job with another name.
    let digest = digest(&json!([pod, observed.retry]));
    let name = format!("{}-{digest}", owner.component_name(Component::Fetch));
    if let Some(job) = observed.job(&name) {
        return existing_job(valid, &name, job);
    }
    if let Some(args) = pod["containers"][0]["args"].as_array_mut() {
        args.extend(cleanup_args(valid, observed).into_iter().map(Value::String));
    }
    let content = json!({
        "spec": {
            "backoffLimit": RETRIES_MAX,
            "podFailurePolicy": {"rules": [{
                "action": "FailJob",
                "onExitCodes": {"containerName": "fetch", "operator": "In", "values": PERMANENT_EXIT_CODES},
            }]},
            "template": {
                "metadata": {"labels": owner.labels(Component::Fetch)},
                "spec": pod,
            },
        },
    });
    owner.manifest(Kind::Job, &name, Component::Fetch, content)
}

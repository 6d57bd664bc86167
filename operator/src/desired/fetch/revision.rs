//! Pins the commit of a repository on the Hugging Face Hub. A branch can move, so the first pod that fetches it
//! reports the commit, and all later pods fetch that commit. This module is pure.
//!
//! The commit is stored in a ConfigMap, which the container reads as an environment variable when it starts. If the
//! commit were an argument instead, it would change the pod template, and the replicas that have already fetched the
//! commit would be replaced.

use std::collections::{BTreeMap, BTreeSet};

use kube::api::DynamicObject;
use serde_json::{Value, json};

use crate::manifest::{Kind, Manifest};
use crate::names::{Component, REVISION_VARIABLE};
use crate::observe::ObservedState;
use crate::valid_deployment::{Revision, ValidDeployment};

/// The numbers of hexadecimal digits of a commit hash in SHA-1 and in SHA-256.
const COMMIT_DIGITS: [usize; 2] = [40, 64];

/// Returns the revision of the model's repository, if the model is fetched from the Hugging Face Hub.
#[must_use]
pub fn requested_revision(valid: &ValidDeployment) -> Option<&Revision> {
    valid.files.fetched()?.revision()
}

/// Returns the ConfigMap with the revisions that replicas fetch, if the source of the model has revisions. `pinned` is
/// the commit that all replicas fetch, once it is known.
pub(crate) fn config_map(
    valid: &ValidDeployment,
    observed: &ObservedState,
    pinned: Option<&str>,
) -> Option<Manifest> {
    let revision = requested_revision(valid)?;
    let stored = stored(valid, observed);
    let used = used_keys(valid, observed);
    let mut data: BTreeMap<&str, &str> =
        stored.iter().filter(|(key, _)| used.contains(*key)).map(|(key, value)| (*key, *value)).collect();
    data.insert(&revision.key, pinned.unwrap_or(&revision.requested));
    let content = json!({"data": data});
    Some(valid.owner.manifest(Kind::ConfigMap, &valid.owner.revisions(), Component::Fetch, content))
}

/// Whether pods read the ConfigMap with the revisions, or will read it, even if the resource no longer has a revision.
pub(crate) fn is_config_map_in_use(valid: &ValidDeployment, observed: &ObservedState) -> bool {
    !used_keys(valid, observed).is_empty()
}

/// The keys of the entries that pods refer to, and the key in the template of the Deployment. The containers of pods
/// with a former template may restart, and then read their entries again.
fn used_keys<'a>(valid: &ValidDeployment, observed: &'a ObservedState) -> BTreeSet<&'a str> {
    let live = observed.deployment(&valid.owner.component_name(Component::Server));
    let pods = observed.pods.iter().filter(|pod| !pod.is_finished);
    pods.filter_map(|pod| pod.revision_key.as_deref()).chain(live.and_then(template_key)).collect()
}

/// Returns the commit that all replicas fetch, once it is known. `fetch_job` is the name of the Job that fetches the
/// model, if a Job fetches it.
pub(crate) fn pinned(
    valid: &ValidDeployment,
    observed: &ObservedState,
    fetch_job: Option<&str>,
) -> Option<String> {
    let revision = requested_revision(valid)?;
    if is_commit(&revision.requested) {
        return Some(revision.requested.clone());
    }
    let stored =
        stored(valid, observed).get(revision.key.as_str()).filter(|stored| is_commit(stored)).copied();
    if let Some(stored) = stored {
        return Some(stored.to_owned());
    }
    let pods = observed.pods.iter().filter(|pod| pod.revision_key.as_ref() == Some(&revision.key));
    let reported =
        pods.filter_map(|pod| pod.fetched.as_ref()?.revision.clone()).find(|reported| is_commit(reported));
    // After the pod of the Job has been deleted, the Job still contains the pod's report.
    let of_job = || observed.fetch_report(fetch_job?)?.revision.filter(|reported| is_commit(reported));
    reported.or_else(of_job)
}

/// The entries of the existing ConfigMap.
fn stored<'a>(valid: &ValidDeployment, observed: &'a ObservedState) -> BTreeMap<&'a str, &'a str> {
    let live = observed.owned.get(&(Kind::ConfigMap, valid.owner.revisions()));
    let data = live.and_then(|live| live.data["data"].as_object());
    data.into_iter().flatten().filter_map(|(key, value)| Some((key.as_str(), value.as_str()?))).collect()
}

/// The key in the ConfigMap that the pod template of a Deployment refers to.
fn template_key(deployment: &DynamicObject) -> Option<&str> {
    let containers = deployment.data.pointer("/spec/template/spec/initContainers")?.as_array()?;
    let variables = containers.iter().filter_map(|container| container["env"].as_array()).flatten();
    variables
        .filter(|variable| variable["name"] == REVISION_VARIABLE)
        .find_map(|variable| variable.pointer("/valueFrom/configMapKeyRef/key").and_then(Value::as_str))
}

fn is_commit(text: &str) -> bool {
    COMMIT_DIGITS.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

//! Which commit of a repository of the Hub is fetched. A branch moves; so the first pod that fetches it reports the commit
//! that it was, and all later ones fetch that commit. Pure.
//!
//! The commit is in a ConfigMap that the container reads as an environment variable when it starts: unlike a changed
//! argument, that does not replace the replicas that have fetched it already.

use std::collections::{BTreeMap, BTreeSet};

use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::job_name;
use crate::desired::names::Component;
use crate::manifest::{Kind, Manifest};
use crate::observe::Observed;
use crate::validate::{Fetched, Files, Owner, Revision, ValidDeployment};

/// The variable with the revision, in the container that fetches.
const VARIABLE: &str = "OVFLEET_HF_REVISION";
/// The flag that it is the value of.
const FLAG: &str = "--hf-revision=";
/// Digits of the hash of a commit: of SHA-1, and of SHA-256.
const COMMIT_DIGITS: [usize; 2] = [40, 64];

/// The flags of the source, with the revision taken from the variable.
pub(super) fn flags(fetched: &Fetched) -> impl Iterator<Item = String> {
    // Kubernetes puts the variable in.
    let flag =
        |flag: &String| if flag.starts_with(FLAG) { format!("{FLAG}$({VARIABLE})") } else { flag.clone() };
    fetched.flags.iter().map(flag)
}

/// The variable, if the source has revisions.
pub(super) fn variable(valid: &ValidDeployment, fetched: &Fetched) -> Option<Value> {
    let revision = fetched.revision.as_ref()?;
    let reference = json!({"name": name(&valid.owner), "key": revision.key});
    Some(json!({"name": VARIABLE, "valueFrom": {"configMapKeyRef": reference}}))
}

fn name(owner: &Owner) -> String {
    format!("{}-revisions", owner.name)
}

fn source(valid: &ValidDeployment) -> Option<&Revision> {
    match &valid.files {
        Files::Fetched(fetched) => fetched.revision.as_ref(),
        Files::Mounted(_) => None,
    }
}

/// The ConfigMap with the commits, if the source has revisions.
#[must_use]
pub(in crate::desired) fn manifest(valid: &ValidDeployment, observed: &Observed) -> Option<Manifest> {
    let revision = source(valid)?;
    let known = known(valid, observed);
    // Containers of former pods may start again, and need what they had.
    let live = observed.owned.get(&(Kind::Deployment, valid.owner.part(Component::Server)));
    let mut used: BTreeSet<&str> =
        observed.pods.iter().filter_map(|pod| pod.revision_key.as_deref()).collect();
    used.extend(live.and_then(|live| template_key(live)));
    let mut data: BTreeMap<&str, &str> =
        known.iter().filter(|(key, _)| used.contains(*key)).map(|(key, value)| (*key, *value)).collect();
    let pinned = pinned(valid, observed);
    data.insert(&revision.key, pinned.as_deref().unwrap_or(&revision.requested));
    let content = json!({"data": data});
    Some(valid.owner.manifest(Kind::ConfigMap, &name(&valid.owner), Component::Fetch, content))
}

/// The commit that all replicas are to fetch, once it is known.
#[must_use]
pub fn pinned(valid: &ValidDeployment, observed: &Observed) -> Option<String> {
    let revision = source(valid)?;
    if is_commit(&revision.requested) {
        return Some(revision.requested.clone());
    }
    if let Some(known) = known(valid, observed).get(revision.key.as_str()).filter(|known| is_commit(known)) {
        return Some((*known).to_owned());
    }
    let of_pods = observed.pods.iter().filter(|pod| pod.revision_key.as_ref() == Some(&revision.key));
    let reported =
        of_pods.filter_map(|pod| pod.fetched.as_ref()?.revision.clone()).find(|found| is_commit(found));
    // The Job's pod may be gone.
    let of_job = || observed.fetched(&job_name(valid, observed)?)?.revision.filter(|found| is_commit(found));
    reported.or_else(of_job)
}

/// Pods whose files are of another commit than `pinned`: of those that start at the same time, each may find another one.
pub fn strays<'a>(
    valid: &'a ValidDeployment,
    observed: &'a Observed,
    pinned: &'a str,
) -> impl Iterator<Item = &'a str> {
    let key = source(valid).map(|revision| revision.key.as_str());
    let pods = observed.pods_of(Component::Server).filter(|pod| !pod.is_terminating && !pod.is_finished);
    let pods = pods.filter(move |pod| key.is_some() && pod.revision_key.as_deref() == key);
    let is_stray = move |found: &str| found != pinned;
    pods.filter(move |pod| {
        pod.fetched.as_ref().and_then(|report| report.revision.as_deref()).is_some_and(is_stray)
    })
    .map(|pod| pod.name.as_str())
}

/// What the ConfigMap has.
fn known<'a>(valid: &ValidDeployment, observed: &'a Observed) -> BTreeMap<&'a str, &'a str> {
    let live = observed.owned.get(&(Kind::ConfigMap, name(&valid.owner)));
    let data = live.and_then(|live| live.data["data"].as_object());
    data.into_iter().flatten().filter_map(|(key, value)| Some((key.as_str(), value.as_str()?))).collect()
}

/// The key that the template of a Deployment reads.
fn template_key(deployment: &DynamicObject) -> Option<&str> {
    let containers = deployment.data.pointer("/spec/template/spec/initContainers")?.as_array()?;
    let variables = containers.iter().filter_map(|container| container["env"].as_array()).flatten();
    variables
        .filter(|variable| variable["name"] == VARIABLE)
        .find_map(|variable| variable.pointer("/valueFrom/configMapKeyRef/key")?.as_str())
}

/// The key that a container reads.
#[must_use]
pub fn key_of(container: &k8s_openapi::api::core::v1::Container) -> Option<String> {
    let variable = container.env.iter().flatten().find(|variable| variable.name == VARIABLE)?;
    Some(variable.value_from.as_ref()?.config_map_key_ref.as_ref()?.key.clone())
}

fn is_commit(text: &str) -> bool {
    COMMIT_DIGITS.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

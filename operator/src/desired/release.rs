//! Upgrades: whether a Deployment takes the pod template that this version of the operator renders, or keeps the one it
//! has. Pure.
//!
//! A pod template changes for one of two reasons. The user has changed the resource: then the Deployment takes the new
//! template at once. Or only the operator has changed, by a new default image or by rendering the same resource
//! differently: that is an upgrade, which waits for its turn or for approval, so that a new release of the operator does
//! not restart every model of a cluster at the same time. The two are told apart by a digest of the fields of the resource
//! that the template was rendered from, which each Deployment carries as an annotation.

use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::names::INPUTS;
use super::server::template_hash;
use crate::manifest::{Kind, Manifest, digest};
use crate::observe::Observed;
use crate::validate::ValidDeployment;

/// Whether upgrades may begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Permission {
    /// They may.
    #[default]
    Granted,
    /// `upgradePolicy` is `Manual`, and the release has not been approved.
    AwaitsApproval,
    /// As many resources as may be are being upgraded.
    AwaitsTurn,
}

/// What becomes of the upgrade of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Upgrade {
    /// The templates are those of this version of the operator.
    #[default]
    None,
    /// Former templates stay.
    Waits(Permission),
    /// The templates of this version of the operator are being applied.
    Begins,
}

/// The release that `valid` waits for: a digest of the pod templates of this version of the operator. `None` if nothing
/// but what the user has changed differs from the live templates.
#[must_use]
pub fn pending(valid: &ValidDeployment, observed: &Observed) -> Option<String> {
    let deployments = super::deployments(valid);
    let is_upgrade = |rendered: &Manifest| is_upgrade(rendered, live(rendered, observed));
    deployments.iter().any(is_upgrade).then(|| identity(&deployments))
}

/// Identifies the pod templates of `deployments`.
fn identity(deployments: &[Manifest]) -> String {
    let hashes: Vec<_> = deployments.iter().map(|deployment| template_hash(&deployment.body)).collect();
    digest(&json!(hashes))
}

/// The Deployment as it is.
pub(super) fn live<'a>(rendered: &Manifest, observed: &'a Observed) -> Option<&'a DynamicObject> {
    observed.owned.get(&(Kind::Deployment, rendered.name.clone())).map(AsRef::as_ref)
}

/// Whether the template of `rendered` differs from the one of `live` though the user has changed nothing.
pub(super) fn is_upgrade(rendered: &Manifest, live: Option<&DynamicObject>) -> bool {
    let Some(live) = live else { return false };
    if template_hash(&live.data) == template_hash(&rendered.body) {
        return false;
    }
    // Routers without this port cannot report which replicas they have admitted: no new replica would become ready.
    if !has_grpc_port(&live.data) {
        return false;
    }
    let inputs = rendered.body.pointer("/metadata/annotations").and_then(|all| all.get(INPUTS));
    // Without the annotation, a former version of the operator has made it: nobody knows from what.
    live.annotations().get(INPUTS).is_none_or(|live| inputs.and_then(Value::as_str) == Some(live))
}

fn has_grpc_port(deployment: &Value) -> bool {
    let containers = deployment.pointer("/spec/template/spec/containers").and_then(Value::as_array);
    let ports = containers.into_iter().flatten().filter_map(|container| container["ports"].as_array());
    ports.flatten().any(|port| port["name"] == "grpc")
}

/// `rendered` with the pod template of `live`. `None` if there is no live Deployment, and so no pods to keep.
pub(super) fn with_live_template(mut rendered: Manifest, live: Option<&DynamicObject>) -> Option<Manifest> {
    rendered.body["spec"]["template"] = live?.data.pointer("/spec/template")?.clone();
    Some(rendered)
}

/// `rendered` with the pod template of `live` and what that template was rendered from.
pub(super) fn with_live_inputs(rendered: Manifest, live: Option<&DynamicObject>) -> Option<Manifest> {
    let mut manifest = with_live_template(rendered, live)?;
    let annotations = manifest.body["metadata"]["annotations"].as_object_mut()?;
    match live?.annotations().get(INPUTS) {
        Some(inputs) => drop(annotations.insert(INPUTS.to_owned(), json!(inputs))),
        None => drop(annotations.remove(INPUTS)),
    }
    Some(manifest)
}

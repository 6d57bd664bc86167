//! Decides whether a Deployment changes to the pod template that this version of the operator renders, or retains its
//! current one. This module is pure.
//!
//! A pod template changes for one of two reasons. If the user has changed the resource, the Deployment changes to the
//! new template immediately or, if a Job must fetch the model first, after the fetch. If only the operator has changed,
//! because it has another default image or renders the same resource differently, the change is an upgrade. An upgrade
//! waits for a slot or for approval, so that a new release of the operator does not restart all models of a cluster at
//! the same time. To distinguish the two cases, an annotation of each Deployment stores a digest of the fields of the
//! resource that the template was rendered from.

use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::template::RenderedDeployment;
use super::{replica_token, router, server};
use crate::manifest::{Manifest, digest};
use crate::names::{INPUTS, SOURCE, TEMPLATE};
use crate::observe::ObservedState;
use crate::source::{ModelSourceKey, source_of_object};
use crate::valid_deployment::ValidDeployment;

/// Whether the upgrade of a resource may start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpgradePermission {
    /// The upgrade may start. It holds a slot.
    #[default]
    Granted,
    /// The upgrade may start. It holds no slot, because the resource serves no requests.
    GrantedWithoutSlot,
    /// `upgradePolicy` is `Manual`, and the release has not been approved.
    AwaitsApproval,
    /// The maximum number of resources is already being upgraded.
    AwaitsSlot,
    /// The operator has not listed all resources yet, so it does not know how many are being upgraded.
    AwaitsLists,
}

impl UpgradePermission {
    /// Returns the first step of an upgrade with this permission.
    fn step(self) -> UpgradeStep {
        match self {
            Self::Granted => UpgradeStep::Start,
            Self::GrantedWithoutSlot => UpgradeStep::StartWithoutSlot,
            Self::AwaitsApproval | Self::AwaitsSlot | Self::AwaitsLists => UpgradeStep::Wait(self),
        }
    }
}

/// The next step of the upgrade of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpgradeStep {
    /// No upgrade is needed: the templates are those of this version of the operator.
    #[default]
    None,
    /// The Deployments retain their current templates.
    Wait(UpgradePermission),
    /// The templates of this version of the operator are applied.
    Start,
    /// The templates of this version of the operator are applied, and the upgrade holds no slot.
    StartWithoutSlot,
}

/// The Deployments of a resource, and the step of its upgrade.
#[derive(Debug)]
pub(super) struct UpgradePlan {
    pub(super) manifests: Vec<Manifest>,
    /// The hash of the pod template that replicas should have.
    pub(super) template_hash: String,
    pub(super) step: UpgradeStep,
    /// The release that waits for a slot or for approval.
    pub(super) available: Option<String>,
}

/// Returns the identifier of the release that a resource can be upgraded to: a digest of the pod templates of this
/// version of the operator. `None` if no upgrade is needed.
#[must_use]
pub fn available_release(valid: &ValidDeployment, observed: &ObservedState) -> Option<String> {
    let deployments = render(valid);
    let is_upgrade = |rendered: &RenderedDeployment| is_upgrade(rendered, live(rendered, observed));
    deployments.iter().any(is_upgrade).then(|| release_id(&deployments))
}

/// Renders the Deployments of the replicas and of the routers.
fn render(valid: &ValidDeployment) -> [RenderedDeployment; 2] {
    [server::deployment(valid), router::deployment(valid)]
}

/// Whether new pods can obtain the files of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelState {
    /// The Job that fetches the model is not complete.
    Fetching,
    /// The model has been fetched, or each pod fetches it or mounts it.
    Available,
}

/// Decides which pod templates are applied to the Deployments. While the model is being fetched, the replicas serve the
/// previous model.
pub(super) fn plan_upgrade(
    valid: &ValidDeployment,
    observed: &ObservedState,
    model: ModelState,
    permission: UpgradePermission,
) -> UpgradePlan {
    let [server, router] = render(valid);
    let release = release_id(&[&server, &router]);
    let mut plan = UpgradePlan {
        manifests: Vec::new(),
        template_hash: server.template_hash.clone(),
        step: UpgradeStep::None,
        available: None,
    };
    let live_server = live(&server, observed);
    if model == ModelState::Available {
        if is_upgrade(&server, live_server) && matches!(permission.step(), UpgradeStep::Wait(_)) {
            plan.template_hash = live_server.and_then(template_hash).unwrap_or_default().to_owned();
        }
        plan.add(server, live_server, permission);
    } else {
        // Everything except the template follows the resource, so that scaling, suspending and rollout settings take
        // effect during the fetch.
        plan.manifests.extend(with_live_inputs(server.manifest, live_server));
    }
    let live_router = live(&router, observed);
    let replicas_need_token =
        plan.manifests.first().is_some_and(|server| replica_token::is_mounted(&server.body));
    let sends_token = live_router.is_some_and(|live| replica_token::is_mounted(&live.data));
    if replicas_need_token && !sends_token {
        // Replicas reject the requests of routers without a token, so the upgrade of the routers cannot wait.
        plan.manifests.push(router.manifest);
    } else {
        plan.add(router, live_router, permission);
    }
    if matches!(plan.step, UpgradeStep::Wait(_)) {
        plan.available = Some(release);
    }
    plan
}

impl UpgradePlan {
    /// Adds a Deployment with the rendered template, or with its live template while an upgrade waits.
    fn add(
        &mut self,
        rendered: RenderedDeployment,
        live: Option<&DynamicObject>,
        permission: UpgradePermission,
    ) {
        if !is_upgrade(&rendered, live) {
            self.manifests.push(without_restart(rendered, live));
            return;
        }
        self.step = permission.step();
        if matches!(self.step, UpgradeStep::Wait(_)) {
            self.manifests.extend(with_live_template(rendered.manifest, live));
        } else {
            self.manifests.push(rendered.manifest);
        }
    }
}

/// Returns the identifier of a release: a digest of the pod templates of its Deployments.
fn release_id(deployments: &[impl std::borrow::Borrow<RenderedDeployment>]) -> String {
    let hashes: Vec<&str> =
        deployments.iter().map(|deployment| deployment.borrow().template_hash.as_str()).collect();
    digest(&json!(hashes))
}

/// The existing Deployment with the name of `rendered`.
fn live<'a>(rendered: &RenderedDeployment, observed: &'a ObservedState) -> Option<&'a DynamicObject> {
    observed.deployment(&rendered.manifest.name)
}

/// The hash of the pod template of an existing Deployment.
fn template_hash(deployment: &DynamicObject) -> Option<&str> {
    deployment.data.pointer("/spec/template/metadata/labels")?.get(TEMPLATE)?.as_str()
}

/// Whether the template of `rendered` differs from that of `live` although the user has not changed anything, and the
/// Deployment can retain its template until the upgrade starts.
fn is_upgrade(rendered: &RenderedDeployment, live: Option<&DynamicObject>) -> bool {
    let Some(live) = live else { return false };
    if template_hash(live) == Some(&rendered.template_hash) {
        return false;
    }
    // Routers without the gRPC port cannot report which replicas they have admitted, so no new replica would become
    // ready. The template of such routers is therefore changed immediately.
    if !has_grpc_port(&live.data) {
        return false;
    }
    // A Deployment without the annotation is from a release that did not record its inputs, so the difference counts as
    // an upgrade.
    let inputs = live.annotations().get(INPUTS);
    inputs.is_none_or(|inputs| *inputs == rendered.inputs || rendered.former_inputs.as_ref() == Some(inputs))
}

fn has_grpc_port(deployment: &Value) -> bool {
    let containers = deployment.pointer("/spec/template/spec/containers").and_then(Value::as_array);
    let ports = containers.into_iter().flatten().filter_map(|container| container["ports"].as_array());
    ports.flatten().any(|port| port["name"] == "grpc")
}

/// Returns the manifest of `rendered`. If the live pod template differs only because it lacks the annotation with the
/// source, the manifest omits the annotation, because adding it would restart the pods of earlier releases.
fn without_restart(rendered: RenderedDeployment, live: Option<&DynamicObject>) -> Manifest {
    let mut manifest = rendered.manifest;
    let is_same = live.and_then(template_hash) == Some(&rendered.template_hash);
    let annotations = "/spec/template/metadata/annotations";
    let is_annotated = |live: &DynamicObject| {
        live.data.pointer(annotations).is_some_and(|annotations| annotations.get(SOURCE).is_some())
    };
    if is_same
        && !live.is_some_and(is_annotated)
        && let Some(annotations) = manifest.body.pointer_mut(annotations).and_then(Value::as_object_mut)
    {
        annotations.remove(SOURCE);
    }
    manifest
}

/// Returns `manifest` with the pod template of `live`, or `None` if the Deployment does not exist.
fn with_live_template(mut manifest: Manifest, live: Option<&DynamicObject>) -> Option<Manifest> {
    let live = live?;
    manifest.body["spec"]["template"] = live.data.pointer("/spec/template")?.clone();
    set_annotation(&mut manifest, SOURCE, live_source(live).as_ref());
    Some(manifest)
}

/// The key of the source that the pods of an existing Deployment mount, if it is known.
fn live_source(live: &DynamicObject) -> Option<String> {
    match source_of_object(live) {
        ModelSourceKey::Shared(key) => Some(key),
        ModelSourceKey::NotShared | ModelSourceKey::Unknown => None,
    }
}

/// Sets an annotation of a manifest, or removes it.
fn set_annotation(manifest: &mut Manifest, name: &str, value: Option<&String>) {
    let Some(annotations) = manifest.body["metadata"]["annotations"].as_object_mut() else { return };
    match value {
        Some(value) => drop(annotations.insert(name.to_owned(), json!(value))),
        None => drop(annotations.remove(name)),
    }
}

/// Returns `manifest` with the pod template of `live`, and with the digest of the settings from which that template was
/// rendered.
fn with_live_inputs(manifest: Manifest, live: Option<&DynamicObject>) -> Option<Manifest> {
    let mut manifest = with_live_template(manifest, live)?;
    set_annotation(&mut manifest, INPUTS, live?.annotations().get(INPUTS));
    Some(manifest)
}

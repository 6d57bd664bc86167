//! Computes the release that a resource runs, and the state of its upgrade.

use operator_api::{LlmDeploymentStatus, ReleaseStatus, UpgradeState};

use super::conditions::routers_are_updated;
use super::summary::{Summary, deployment};
use crate::apply::ApplyResult;
use crate::desired::release::{UpgradePermission, UpgradeStep};
use crate::names::{Component, UPGRADE};

/// Returns the status of the release, given the previous status of the resource.
pub(super) fn release_status(
    applied: &ApplyResult,
    summary: &Summary,
    previous: Option<&LlmDeploymentStatus>,
) -> ReleaseStatus {
    let was_rolling = previous
        .and_then(|previous| previous.release.as_ref())
        .is_some_and(|release| release.state == UpgradeState::Rolling);
    let desired = &applied.desired;
    let state = match desired.upgrade {
        UpgradeStep::Wait(_) => UpgradeState::Waiting,
        UpgradeStep::Start => UpgradeState::Rolling,
        // In the state `Rolling`, the resource would hold a slot.
        UpgradeStep::StartWithoutSlot => UpgradeState::Current,
        UpgradeStep::None if was_rolling && !is_rolled_out(applied, summary) => UpgradeState::Rolling,
        UpgradeStep::None => UpgradeState::Current,
    };
    let message = match desired.upgrade {
        UpgradeStep::Wait(UpgradePermission::AwaitsApproval) => Some(format!(
            "upgradePolicy is Manual: to approve the upgrade, set the annotation {UPGRADE} to the value of \
             status.release.available"
        )),
        UpgradeStep::Wait(UpgradePermission::AwaitsLists) => {
            Some("the upgrade waits until the operator has listed the resources of all namespaces".to_owned())
        }
        UpgradeStep::Wait(_) => Some("the upgrade waits for the upgrades of other resources".to_owned()),
        _ => None,
    };
    ReleaseStatus {
        state,
        server_image: image(applied, Component::Server),
        router_image: image(applied, Component::Router),
        template: desired.template_hash.clone(),
        available: desired.available_release.clone(),
        message,
    }
}

/// Whether the desired number of replicas exists, all replicas have the applied template and receive requests, and the
/// routers are up to date.
fn is_rolled_out(applied: &ApplyResult, summary: &Summary) -> bool {
    let replicas_are_updated = summary.updated == summary.desired
        && summary.present == summary.desired
        && summary.updated_routable >= summary.desired;
    replicas_are_updated && routers_are_updated(applied)
}

/// The image in the Deployment of a component.
fn image(applied: &ApplyResult, component: Component) -> String {
    let containers = deployment(applied, component)
        .and_then(|deployment| deployment.data.pointer("/spec/template/spec/containers")?.as_array());
    let found = containers.into_iter().flatten().find(|container| container["name"] == component.name());
    found.and_then(|container| container["image"].as_str()).unwrap_or_default().to_owned()
}

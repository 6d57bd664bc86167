//! Which release of images and pod templates a resource runs, and where its upgrade is. Pure.

use operator_api::{LlmDeploymentStatus, ReleaseStatus, UpgradeState};

use super::judge::{Facts, routers_are_updated};
use crate::apply::Applied;
use crate::desired::names::Component;
use crate::desired::release::{Permission, Upgrade, pending};
use crate::manifest::Kind;

/// The release, given the status before.
pub(super) fn release(
    applied: &Applied,
    facts: &Facts,
    previous: Option<&LlmDeploymentStatus>,
) -> ReleaseStatus {
    let was_rolling = previous
        .and_then(|previous| previous.release.as_ref())
        .is_some_and(|release| release.state == UpgradeState::Rolling);
    let state = match applied.resources.upgrade {
        Upgrade::Waits(_) => UpgradeState::Waiting,
        Upgrade::Begins => UpgradeState::Rolling,
        Upgrade::None if was_rolling && !is_rolled_out(applied, facts) => UpgradeState::Rolling,
        Upgrade::None => UpgradeState::Current,
    };
    let message = match applied.resources.upgrade {
        Upgrade::Waits(Permission::AwaitsApproval) => Some(
            "upgradePolicy is Manual: the annotation ovfleet.dev/upgrade has to name this release".to_owned(),
        ),
        Upgrade::Waits(_) => Some("other resources are being upgraded".to_owned()),
        _ => None,
    };
    let available = matches!(applied.resources.upgrade, Upgrade::Waits(_))
        .then(|| pending(&applied.valid, &applied.observed))
        .flatten();
    ReleaseStatus {
        state,
        server_image: image(applied, Component::Server),
        router_image: image(applied, Component::Router),
        template: applied.resources.template.clone(),
        available,
        message,
    }
}

/// Whether all pods are of the templates that were applied, and work.
fn is_rolled_out(applied: &Applied, facts: &Facts) -> bool {
    let replicas = facts.updated == facts.wanted
        && facts.present == facts.wanted
        && facts.updated_routable >= facts.wanted;
    replicas && routers_are_updated(applied)
}

/// The image of the Deployment of a part, as it was applied.
fn image(applied: &Applied, component: Component) -> String {
    let deployment = applied.objects.get(&(Kind::Deployment, applied.valid.owner.part(component)));
    let containers =
        deployment.and_then(|deployment| deployment.data.pointer("/spec/template/spec/containers"));
    let containers = containers.and_then(|containers| containers.as_array());
    let found = containers.into_iter().flatten().find(|container| container["name"] == component.name());
    found.and_then(|container| container["image"].as_str()).unwrap_or_default().to_owned()
}

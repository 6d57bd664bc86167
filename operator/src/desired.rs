//! Renders the desired state of a resource, which consists of all its objects, from the validated resource and the
//! observed state. This module is pure and deterministic: equal arguments produce equal bytes.

use serde_json::json;

use crate::manifest::{Kind, Manifest, digest};
use crate::names::APPLIED;
use crate::observe::ObservedState;
use crate::valid_deployment::ValidDeployment;

mod access;
mod disruption;
pub mod fetch;
pub mod flags;
mod merge;
mod network;
mod pod;
pub mod release;
pub mod replica_token;
mod router;
mod server;
mod service;
mod service_monitor;
mod template;

use fetch::{job, revision};
use release::{ModelState, UpgradePermission, UpgradeStep};

/// The desired state of a resource.
#[derive(Clone, Debug, PartialEq)]
pub struct DesiredState {
    /// The desired objects, in the order in which they are applied.
    pub manifests: Vec<Manifest>,
    /// The objects of an earlier desired state that must not be deleted yet, because pods need them.
    pub in_use: Vec<(Kind, String)>,
    /// The Secret with the replica token, without its data: it is created if it does not exist. `None` if the user
    /// provides it.
    pub replica_token: Option<Manifest>,
    /// The hash of the pod template that replicas should have. This is the template for the next model while that model
    /// is being fetched, and the live template while an upgrade waits.
    pub template_hash: String,
    /// The next step of the resource's upgrade.
    pub upgrade: UpgradeStep,
    /// The release that waits for a slot or for approval.
    pub available_release: Option<String>,
    /// The name of the Job that fetches the model, if one does.
    pub fetch_job: Option<String>,
    /// The commit of the model's repository that all replicas fetch, once it is known.
    pub model_revision: Option<String>,
}

/// Returns the desired state of a resource. `permission` determines whether an upgrade may start.
#[must_use]
pub fn desired(
    valid: &ValidDeployment,
    observed: &ObservedState,
    permission: UpgradePermission,
) -> DesiredState {
    let fetch_job = job::job_name(valid, observed);
    let model_revision = revision::pinned(valid, observed, fetch_job.as_deref());
    let mut manifests = Vec::new();
    manifests.extend(access::manifests(valid));
    manifests.extend(network::manifests(valid));
    manifests.extend(service::manifests(valid));
    manifests.extend(disruption::manifests(valid));
    manifests.extend(job::manifests(valid, observed));
    manifests.extend(revision::config_map(valid, observed, model_revision.as_deref()));
    manifests.push(router::config_map(valid));
    manifests.extend(service_monitor::manifest(valid));
    let is_fetching = fetch_job.as_ref().is_some_and(|job| !observed.is_job_complete(job));
    let model = if is_fetching { ModelState::Fetching } else { ModelState::Available };
    let plan = release::plan_upgrade(valid, observed, model, permission);
    manifests.extend(plan.manifests);
    manifests.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
    for manifest in &mut manifests {
        let digest = digest(&manifest.body);
        manifest.body["metadata"]["annotations"][APPLIED] = json!(digest);
    }
    let claim = (Kind::PersistentVolumeClaim, valid.owner.cache_claim());
    let revisions = (Kind::ConfigMap, valid.owner.revisions());
    let in_use = [
        job::is_claim_in_use(valid, observed).then_some(claim),
        revision::is_config_map_in_use(valid, observed).then_some(revisions),
    ];
    DesiredState {
        manifests,
        in_use: in_use.into_iter().flatten().collect(),
        replica_token: replica_token::secret(valid),
        template_hash: plan.template_hash,
        upgrade: plan.step,
        available_release: plan.available,
        fetch_job,
        model_revision,
    }
}

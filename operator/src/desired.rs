//! What there should be: all objects of a deployment, from what was validated and what was seen. Pure, and the same for
//! the same arguments, to the byte.

use kube::api::DynamicObject;
use serde_json::json;

use crate::manifest::{Manifest, digest};
use crate::observe::Observed;
use crate::validate::ValidDeployment;

mod access;
mod disruption;
pub mod fetch;
pub mod flags;
mod monitor;
pub mod names;
mod network;
mod overlay;
pub mod pod;
pub mod release;
pub mod replica_token;
mod router;
pub mod server;
mod service;

use names::{APPLIED, Component, INPUTS};
use release::{Permission, Upgrade};

/// What there should be.
#[derive(Clone, Debug, PartialEq)]
pub struct Resources {
    /// In the order in which it is applied.
    pub manifests: Vec<Manifest>,
    /// The Secret with the replica token, which is created if it does not exist, and gets its data then. `None` if the
    /// user provides it.
    pub replica_token: Option<Manifest>,
    /// The hash of the pod template that replicas should have: of the next model while that is still being fetched, and
    /// the live one while an upgrade waits.
    pub template: String,
    /// What becomes of an upgrade.
    pub upgrade: Upgrade,
}

/// What there should be.
#[must_use]
pub fn desired(valid: &ValidDeployment, observed: &Observed) -> Resources {
    let mut manifests = Vec::new();
    manifests.extend(access::manifests(valid));
    manifests.extend(network::manifests(valid));
    manifests.extend(service::manifests(valid));
    manifests.extend(disruption::manifests(valid));
    manifests.extend(fetch::shared(valid, observed));
    manifests.extend(fetch::revision::manifest(valid, observed));
    manifests.push(router::options(valid));
    manifests.extend(monitor::manifests(valid));
    let is_fetching = fetch::job_name(valid, observed).is_some_and(|job| !observed.job_complete(&job));
    let mut upgrade = Upgrade::None;
    let [server, router] = deployments(valid);
    let mut template = server::template_hash(&server.body).unwrap_or_default().to_owned();
    // Whether replicas with these templates reject routers without the replica token.
    let mut replicas_need_token = false;
    for rendered in [server, router] {
        let live = release::live(&rendered, observed);
        let is_server = rendered.name == valid.owner.part(Component::Server);
        if is_server && is_fetching {
            // The replicas serve the former model until the new one is fetched. Everything but their template follows
            // the resource meanwhile, so that scaling, suspending and rollout settings take effect.
            manifests.extend(release::with_live_inputs(rendered, live));
        } else if !release::is_upgrade(&rendered, live) || replicas_need_token && !sends_token(live) {
            manifests.push(rendered);
        } else if observed.upgrade == Permission::Granted {
            upgrade = Upgrade::Begins;
            manifests.push(rendered);
        } else {
            upgrade = Upgrade::Waits(observed.upgrade);
            if let (true, Some(live)) = (is_server, live) {
                template = server::template_hash(&live.data).unwrap_or_default().to_owned();
            }
            manifests.extend(release::with_live_template(rendered, live));
        }
        let applied = manifests.last().map(|manifest| &manifest.body);
        replicas_need_token = is_server && applied.is_some_and(replica_token::is_mounted);
    }
    manifests.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
    for manifest in &mut manifests {
        let digest = digest(&manifest.body);
        manifest.body["metadata"]["annotations"][APPLIED] = json!(digest);
    }
    Resources { manifests, replica_token: replica_token::secret(valid), template, upgrade }
}

/// Whether the routers of this Deployment send the replica token.
fn sends_token(live: Option<&DynamicObject>) -> bool {
    live.is_some_and(|live| replica_token::is_mounted(&live.data))
}

/// The Deployments of the replicas and of the routers, as this version of the operator renders them.
fn deployments(valid: &ValidDeployment) -> [Manifest; 2] {
    let inputs = [&valid.inputs.server, &valid.inputs.router];
    let mut deployments = [server::deployment(valid), router::deployment(valid)];
    for (deployment, inputs) in deployments.iter_mut().zip(inputs) {
        deployment.body["metadata"]["annotations"][INPUTS] = json!(inputs);
    }
    deployments
}

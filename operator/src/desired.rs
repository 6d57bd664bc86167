//! What there should be: all objects of a deployment, from what was validated and what was seen. Pure, and the same for
//! the same arguments, to the byte.

use serde_json::json;

use crate::manifest::{Kind, Manifest, digest};
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
mod router;
pub mod server;
mod service;

use names::{APPLIED, Component};

/// What there should be.
#[derive(Clone, Debug, PartialEq)]
pub struct Resources {
    /// In the order in which it is applied.
    pub manifests: Vec<Manifest>,
    /// What is left as it is, be it there or not.
    pub kept: Vec<(Kind, String)>,
}

/// What there should be.
#[must_use]
pub fn desired(valid: &ValidDeployment, observed: &Observed) -> Resources {
    let owner = &valid.owner;
    let mut manifests = Vec::new();
    let mut kept = Vec::new();
    manifests.extend(access::manifests(valid));
    manifests.extend(network::manifests(valid));
    manifests.extend(service::manifests(valid));
    manifests.extend(disruption::manifests(valid));
    manifests.extend(fetch::shared(valid, observed));
    manifests.extend(router::manifests(valid));
    match fetch::job_name(valid, observed) {
        // Replicas of the model that is served so far stay until the new one is there.
        Some(job) if !observed.job_complete(&job) => {
            kept.push((Kind::Deployment, owner.part(Component::Server)));
        }
        _ => manifests.push(server::deployment(valid)),
    }
    manifests.extend(monitor::manifests(valid));
    manifests.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
    for manifest in &mut manifests {
        let digest = digest(&manifest.body);
        manifest.body["metadata"]["annotations"][APPLIED] = json!(digest);
    }
    Resources { manifests, kept }
}

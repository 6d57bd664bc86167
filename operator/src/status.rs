//! Computes the status of a resource from the result of the apply. This module is pure: the time is a
//! parameter.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Resource as _;
use operator_api::{LlmDeployment, LlmDeploymentStatus, Phase, conditions as types};

use crate::apply::ApplyResult;
use crate::names::Component;
use crate::pod_reports::CacheUsage;

mod conditions;
mod refused;
mod release;
mod summary;
mod transition_times;

use conditions::BasicConditions;
pub use refused::{RefusedResource, refused_status};
use summary::Summary;
use transition_times::with_transition_times;

/// Returns the status of a resource after the apply. `previous` is the previous status of the resource. The phase, the
/// state of the upgrade, the usage of the KV caches and the transition times of the conditions also depend on it.
#[must_use]
pub fn status(
    object: &LlmDeployment,
    previous: Option<&LlmDeploymentStatus>,
    applied: &ApplyResult,
    now: Timestamp,
) -> LlmDeploymentStatus {
    let summary = Summary::new(applied);
    let owner = &applied.valid.owner;
    let basic = BasicConditions::new(applied, &summary);
    let progressing = conditions::progressing(applied, &summary, &basic);
    let degraded = conditions::degraded(applied, &summary, &basic);
    let available = conditions::available(summary.desired, summary.routable, &basic.router);
    let ready = conditions::ready(&summary, &basic);
    let previous_phase = previous.map_or(Phase::Pending, |previous| previous.phase);
    let phase = conditions::phase(applied, &summary, &basic, &degraded, &ready, previous_phase);
    let states = [
        (types::ACCEPTED, basic.accepted),
        (types::MODEL_AVAILABLE, basic.model),
        (types::REPLICAS_READY, basic.replicas),
        (types::ROUTER_READY, basic.router),
        (types::AVAILABLE, available),
        (types::PROGRESSING, progressing),
        (types::DEGRADED, degraded),
        (types::READY, ready),
    ];
    let port = applied.valid.router.service.port;
    LlmDeploymentStatus {
        observed_generation: object.meta().generation.unwrap_or(0),
        phase,
        replicas: summary.present,
        ready_replicas: summary.ready,
        routable_replicas: summary.routable,
        updated_replicas: summary.updated,
        draining_replicas: summary.draining,
        ready: format!("{}/{}", summary.ready, summary.desired),
        selector: owner.selector_text(Component::Server),
        endpoint: Some(format!("http://{}.{}.svc:{port}/v3", owner.name, owner.namespace)),
        model: applied.valid.model_names[0].clone(),
        model_revision: applied.desired.model_revision.clone(),
        kv_cache_percent: kv_cache_percent(applied, previous, &summary),
        release: Some(release::release_status(applied, &summary, previous)),
        conditions: with_transition_times(states, object.meta().generation, previous, now),
        model_digest: summary.model_digest,
        cache: summary.cache,
    }
}

/// Returns the usage of the KV caches in percent, or the previous value if no router has reported the usage. `None` if
/// no replica receives requests.
fn kv_cache_percent(
    applied: &ApplyResult,
    previous: Option<&LlmDeploymentStatus>,
    summary: &Summary,
) -> Option<i32> {
    if summary.routable == 0 {
        return None;
    }
    match applied.observed.pod_reports.cache_usage {
        Some(usage) => CacheUsage::percent(usage),
        None => previous.and_then(|previous| previous.kv_cache_percent),
    }
}

/// Whether two statuses are equal except for their transition times.
#[must_use]
pub fn is_same_except_times(a: &LlmDeploymentStatus, b: &LlmDeploymentStatus) -> bool {
    let without_times = |status: &LlmDeploymentStatus| {
        let mut status = status.clone();
        for condition in &mut status.conditions {
            condition.last_transition_time = Time(Timestamp::UNIX_EPOCH);
        }
        status
    };
    without_times(a) == without_times(b)
}

#[cfg(test)]
mod tests;

//! Computes the status of a resource from the result of the apply. This module is pure: the time is a
//! parameter.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use kube::{Resource as _, ResourceExt as _};
use operator_api::{LlmDeployment, LlmDeploymentStatus, Phase, conditions as types};

use crate::apply::ApplyResult;
use crate::names::Component;
use crate::pod_reports::CacheUsage;
use crate::validate::ValidationError;

mod conditions;
mod release;
mod summary;

use conditions::{BasicConditions, ConditionState};
use summary::Summary;

/// Returns the status of a resource after the apply. `previous` is its previous status, from which unchanged values
/// are kept.
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
    let available = conditions::available(&summary, &basic.router);
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

/// Returns the status of an invalid resource. All other fields keep their previous values, because the objects of
/// the resource are not changed.
#[must_use]
pub fn invalid_status(
    object: &LlmDeployment,
    previous: Option<&LlmDeploymentStatus>,
    error: &ValidationError,
    now: Timestamp,
) -> LlmDeploymentStatus {
    LlmDeploymentStatus {
        model: object.spec.model.name.clone().unwrap_or_else(|| object.name_any()),
        ready: previous
            .map_or_else(|| format!("0/{}", object.spec.replicas), |previous| previous.ready.clone()),
        ..refused_status(object.meta(), previous, error, now)
    }
}

/// Returns the status of an invalid resource whose `spec` is unknown. All other fields keep their previous values.
#[must_use]
pub fn refused_status(
    metadata: &ObjectMeta,
    previous: Option<&LlmDeploymentStatus>,
    error: &ValidationError,
    now: Timestamp,
) -> LlmDeploymentStatus {
    let message = error.to_string();
    let mut states = vec![
        (types::ACCEPTED, ConditionState::new(false, error.reason(), message.clone())),
        (types::READY, ConditionState::new(false, "NotAccepted", message)),
    ];
    let before = previous.map(|previous| previous.conditions.as_slice()).unwrap_or_default();
    for condition in before {
        if ![types::ACCEPTED, types::READY].contains(&condition.type_.as_str()) {
            let holds = match condition.status.as_str() {
                "True" => Some(true),
                "False" => Some(false),
                _ => None,
            };
            let name = types::ALL.into_iter().find(|name| *name == condition.type_);
            let state = ConditionState::new(holds, &condition.reason, condition.message.clone());
            states.extend(name.map(|name| (name, state)));
        }
    }
    states.sort_by_key(|(name, _)| types::ALL.iter().position(|known| known == name));
    LlmDeploymentStatus {
        observed_generation: metadata.generation.unwrap_or(0),
        phase: Phase::Refused,
        conditions: with_transition_times(states, metadata.generation, previous, now),
        ..previous.cloned().unwrap_or_default()
    }
}

/// Adds the times at which the conditions last changed.
fn with_transition_times(
    states: impl IntoIterator<Item = (&'static str, ConditionState)>,
    generation: Option<i64>,
    previous: Option<&LlmDeploymentStatus>,
    now: Timestamp,
) -> Vec<Condition> {
    /// Length of the message of a condition, in characters, so that the API server accepts it.
    ///
    /// If exceeded: the message is truncated.
    const MESSAGE_MAX: usize = 2000;
    let before = previous.map(|previous| previous.conditions.as_slice()).unwrap_or_default();
    // The API server stores times in seconds.
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let conditions = states.into_iter().map(|(name, state)| {
        let status = state.holds.map_or("Unknown", |holds| if holds { "True" } else { "False" });
        let same = before.iter().find(|condition| condition.type_ == name && condition.status == status);
        Condition {
            type_: name.to_owned(),
            status: status.to_owned(),
            reason: state.reason,
            message: state.message.chars().take(MESSAGE_MAX).collect(),
            observed_generation: generation,
            last_transition_time: same.map_or(Time(now), |condition| condition.last_transition_time.clone()),
        }
    });
    conditions.collect()
}

/// Returns the usage of the KV caches, or the previous value if it was not requested.
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

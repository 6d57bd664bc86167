//! What is told: the status of a resource, from what was applied and nothing else. Pure; the time is an argument.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{Resource as _, ResourceExt as _};
use operator_api::{CacheState, CacheStatus, LlmDeployment, LlmDeploymentStatus, Phase, conditions};

use crate::apply::Applied;
use crate::desired::fetch::revision;
use crate::desired::names::Component;
use crate::validate::Invalid;

mod judge;
mod release;

use judge::Facts;

/// A condition without its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// `None` is unknown.
    pub(crate) holds: Option<bool>,
    pub(crate) reason: String,
    pub(crate) message: String,
}

impl Finding {
    pub(crate) fn new(holds: impl Into<Option<bool>>, reason: &str, message: impl Into<String>) -> Self {
        Self { holds: holds.into(), reason: reason.to_owned(), message: message.into() }
    }
}

/// The status of a resource that was applied. `previous` is the one before, for what has not changed since.
#[must_use]
pub fn status(
    object: &LlmDeployment,
    previous: Option<&LlmDeploymentStatus>,
    applied: &Applied,
    now: Timestamp,
) -> LlmDeploymentStatus {
    let facts = Facts::gather(applied);
    let owner = &applied.valid.owner;
    let accepted = judge::accepted(applied);
    let model = judge::model(applied, &facts);
    let replicas = judge::replicas(&facts);
    let router = judge::router(applied);
    let progressing = judge::progressing(&facts, &model, &replicas, &router);
    let degraded = judge::degraded(applied, &facts, &model);
    let available = judge::available(&facts, &router);
    let ready = judge::ready(&facts, [&accepted, &model, &replicas, &router]);
    let before = previous.map_or(Phase::Pending, |previous| previous.phase);
    let phase = judge::phase(applied, (&facts, before), [&accepted, &model, &degraded, &ready]);
    let findings = [
        (conditions::ACCEPTED, accepted),
        (conditions::MODEL_AVAILABLE, model),
        (conditions::REPLICAS_READY, replicas),
        (conditions::ROUTER_READY, router),
        (conditions::AVAILABLE, available),
        (conditions::PROGRESSING, progressing),
        (conditions::DEGRADED, degraded),
        (conditions::READY, ready),
    ];
    let port = applied.valid.router.service.port;
    LlmDeploymentStatus {
        observed_generation: object.meta().generation.unwrap_or(0),
        phase,
        replicas: facts.present,
        ready_replicas: facts.ready,
        routable_replicas: facts.routable,
        updated_replicas: facts.updated,
        draining_replicas: facts.draining,
        ready: format!("{}/{}", facts.ready, facts.wanted),
        selector: owner.selector_text(Component::Server),
        endpoint: Some(format!("http://{}.{}.svc:{port}/v3", owner.name, owner.namespace)),
        model: applied.valid.model_names[0].clone(),
        model_digest: facts.digest.clone(),
        model_revision: revision::pinned(&applied.valid, &applied.observed),
        kv_cache_percent: kv_percent(applied, previous, &facts),
        cache: facts.cache.clone(),
        release: Some(release::release(applied, &facts, previous)),
        conditions: stamp(findings, object, previous, now),
    }
}

/// The status of a resource that cannot be carried out. What was there before is as it was.
#[must_use]
pub fn refused(
    object: &LlmDeployment,
    previous: Option<&LlmDeploymentStatus>,
    invalid: &Invalid,
    now: Timestamp,
) -> LlmDeploymentStatus {
    let message = invalid.to_string();
    let mut findings = vec![
        (conditions::ACCEPTED, Finding::new(false, invalid.reason(), message.clone())),
        (conditions::READY, Finding::new(false, "NotAccepted", message)),
    ];
    let before = previous.map(|previous| previous.conditions.as_slice()).unwrap_or_default();
    for condition in before {
        if ![conditions::ACCEPTED, conditions::READY].contains(&condition.type_.as_str()) {
            let holds = match condition.status.as_str() {
                "True" => Some(true),
                "False" => Some(false),
                _ => None,
            };
            let name = conditions::ALL.into_iter().find(|name| *name == condition.type_);
            let finding = Finding::new(holds, &condition.reason, condition.message.clone());
            findings.extend(name.map(|name| (name, finding)));
        }
    }
    findings.sort_by_key(|(name, _)| conditions::ALL.iter().position(|known| known == name));
    LlmDeploymentStatus {
        observed_generation: object.meta().generation.unwrap_or(0),
        phase: Phase::Refused,
        model: object.spec.model.name.clone().unwrap_or_else(|| object.name_any()),
        ready: previous
            .map_or_else(|| format!("0/{}", object.spec.replicas), |previous| previous.ready.clone()),
        conditions: stamp(findings, object, previous, now),
        ..previous.cloned().unwrap_or_default()
    }
}

/// Conditions with the times at which they last changed.
fn stamp(
    findings: impl IntoIterator<Item = (&'static str, Finding)>,
    object: &LlmDeployment,
    previous: Option<&LlmDeploymentStatus>,
    now: Timestamp,
) -> Vec<Condition> {
    /// Length of the message of a condition, in characters, so that the API server accepts it.
    ///
    /// Beyond it: the message is truncated.
    const MESSAGE_MAX: usize = 2000;
    let before = previous.map(|previous| previous.conditions.as_slice()).unwrap_or_default();
    // To the second, as it is stored.
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let stamped = findings.into_iter().map(|(name, finding)| {
        let status = finding.holds.map_or("Unknown", |holds| if holds { "True" } else { "False" });
        let same = before.iter().find(|condition| condition.type_ == name && condition.status == status);
        Condition {
            type_: name.to_owned(),
            status: status.to_owned(),
            reason: finding.reason,
            message: finding.message.chars().take(MESSAGE_MAX).collect(),
            observed_generation: object.meta().generation,
            last_transition_time: same.map_or(Time(now), |condition| condition.last_transition_time.clone()),
        }
    });
    stamped.collect()
}

/// How much of the cache is in use, or what it was when nobody was asked.
fn kv_percent(applied: &Applied, previous: Option<&LlmDeploymentStatus>, facts: &Facts) -> Option<i32> {
    if facts.routable == 0 {
        return None;
    }
    match applied.observed.pod_reports.blocks {
        Some(blocks) => percent(blocks),
        None => previous.and_then(|previous| previous.kv_cache_percent),
    }
}

/// How much of a cache is in use of which so many blocks of so many are, in steps; nothing if it has none.
pub(crate) fn percent((active, total): (f64, f64)) -> Option<i32> {
    /// Percent. Finer would be written all the time and tell nobody more.
    const STEP: f64 = 5.0;
    (total > 0.0).then(|| ((active / total * 100.0 / STEP).round() * STEP) as i32)
}

/// Whether two statuses say the same, whenever it came to be so.
#[must_use]
pub fn says_the_same(a: &LlmDeploymentStatus, b: &LlmDeploymentStatus) -> bool {
    let timeless = |status: &LlmDeploymentStatus| {
        let mut status = status.clone();
        for condition in &mut status.conditions {
            condition.last_transition_time = Time(Timestamp::UNIX_EPOCH);
        }
        status
    };
    timeless(a) == timeless(b)
}

/// A cache's state for the status.
pub(crate) fn cache(state: CacheState, bytes: Option<i64>, total: Option<i64>) -> CacheStatus {
    let progress = match (bytes, total) {
        (Some(bytes), Some(total)) => Some(format!("{} of {}", size(bytes), size(total))),
        (Some(bytes), None) => Some(size(bytes)),
        _ => None,
    };
    CacheStatus { state, bytes, bytes_total: total, progress }
}

/// Bytes for people.
fn size(bytes: i64) -> String {
    const UNITS: [(&str, i64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests;

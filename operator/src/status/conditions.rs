//! Computes the conditions and the phase of a resource, each in a function of its own.

use operator_api::{CacheState, Phase};
use serde_json::Value;

use super::summary::{Summary, deployment, present_pods, router_problem, status_count};
use crate::apply::ApplyResult;
use crate::desired::fetch::revision::requested_revision;
use crate::names::Component;
use crate::pod::PodState;
use crate::valid_deployment::ModelFiles;
use crate::validate::ValidationError;

/// A condition without its transition time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ConditionState {
    /// `None` means unknown.
    pub(super) holds: Option<bool>,
    pub(super) reason: String,
    pub(super) message: String,
}

impl ConditionState {
    pub(super) fn new(holds: impl Into<Option<bool>>, reason: &str, message: impl Into<String>) -> Self {
        Self { holds: holds.into(), reason: reason.to_owned(), message: message.into() }
    }
}

/// The conditions on which other conditions and the phase depend.
pub(super) struct BasicConditions {
    pub(super) accepted: ConditionState,
    pub(super) model: ConditionState,
    pub(super) replicas: ConditionState,
    pub(super) router: ConditionState,
}

impl BasicConditions {
    pub(super) fn new(applied: &ApplyResult, summary: &Summary) -> Self {
        Self {
            accepted: accepted(applied),
            model: model(applied, summary),
            replicas: replicas(summary),
            router: router(applied),
        }
    }
}

fn accepted(applied: &ApplyResult) -> ConditionState {
    if let Some(failure) = applied.failures.iter().find(|failure| failure.source.is_permanent()) {
        let error = ValidationError::Rejected { kind: failure.kind, message: failure.source.message() };
        return ConditionState::new(false, error.reason(), error.to_string());
    }
    let warnings = applied.valid.warnings.join("; ");
    let message = if warnings.is_empty() { "the resource is valid".to_owned() } else { warnings };
    ConditionState::new(true, "Accepted", message)
}

fn model(applied: &ApplyResult, summary: &Summary) -> ConditionState {
    if let ModelFiles::Mounted(_) = &applied.valid.files {
        // The operator cannot read the volume or the image: only a replica that loads the model shows that it exists.
        return if summary.updated_loaded > 0 {
            let message = "an up-to-date replica has loaded the model from its volume or image";
            ConditionState::new(true, "Mounted", message)
        } else {
            let message = "no up-to-date replica has loaded the model from its volume or image yet";
            ConditionState::new(None::<bool>, "NotLoaded", message)
        };
    }
    let observed = &applied.observed;
    let state = summary.cache.as_ref().map_or(CacheState::Pending, |cache| cache.state);
    match state {
        CacheState::Ready => ConditionState::new(true, "Fetched", "the model has been fetched"),
        CacheState::Failed => {
            let mut failed = observed.pods.iter().filter_map(|pod| pod.fetched.as_ref());
            match failed.rfind(|report| !report.is_complete()) {
                Some(report) => ConditionState::new(false, &report.reason, report.message.clone()),
                None => ConditionState::new(false, "FetchFailed", "the model could not be fetched"),
            }
        }
        CacheState::Fetching => {
            let progress = summary.cache.as_ref().and_then(|cache| cache.progress.clone());
            let message = progress
                .map_or("the model is being fetched".to_owned(), |progress| format!("fetched {progress}"));
            ConditionState::new(false, "Fetching", message)
        }
        CacheState::Pending => match &summary.fetch_problem {
            Some(problem) => ConditionState::new(false, &problem.reason, problem.message.clone()),
            None => {
                let awaits = observed.pods_of(Component::Fetch).find_map(|pod| pod.awaits.clone());
                let awaits = awaits.or_else(|| summary.awaits.clone());
                let message = awaits.unwrap_or_else(|| "the fetch of the model has not started".to_owned());
                ConditionState::new(false, "Pending", message)
            }
        },
    }
}

fn replicas(summary: &Summary) -> ConditionState {
    let Summary { desired, present, routable, updated_routable, updated, .. } = *summary;
    if desired == 0 && present == 0 {
        return ConditionState::new(true, "ScaledToZero", "the desired number of replicas is 0");
    }
    if updated_routable >= desired && present == desired && updated == desired {
        let message = match desired {
            1 => "the replica is ready and receives requests".to_owned(),
            desired => format!("all {desired} replicas are ready and receive requests"),
        };
        return ConditionState::new(true, "AllReady", message);
    }
    if let Some(problem) = &summary.problem {
        return ConditionState::new(false, &problem.reason, problem.message.clone());
    }
    if summary.not_admitted > 0 {
        let message =
            format!("the routers have not admitted {} of {present} replicas yet", summary.not_admitted);
        return ConditionState::new(false, "NotAdmitted", message);
    }
    let outdated = routable - updated_routable;
    // While replicas are being removed, more replicas than desired may be up to date.
    let mut message = format!(
        "{} of {desired} desired replicas are up to date and receive requests",
        updated_routable.min(desired)
    );
    if outdated > 0 {
        message.push_str(&format!("; outdated replicas that still receive requests: {outdated}"));
    }
    if let Some(awaits) = &summary.awaits {
        message.push_str(&format!("; {awaits}"));
    }
    let reason = if present > desired || updated < present { "Replacing" } else { "Starting" };
    ConditionState::new(false, reason, message)
}

fn router(applied: &ApplyResult) -> ConditionState {
    if applied.valid.router.replicas == 0 {
        return ConditionState::new(false, "Suspended", "the desired number of routers is 0");
    }
    let deployment = deployment(applied, Component::Router);
    let ready = deployment.map_or(0, |deployment| status_count(deployment, "readyReplicas"));
    if ready > 0 {
        return ConditionState::new(true, "Answering", "at least one router is ready");
    }
    match router_problem(applied) {
        Some(problem) => ConditionState::new(false, &problem.reason, problem.message),
        None => {
            let mut pods = present_pods(&applied.observed, Component::Router);
            let awaits = pods.find_map(|pod| pod.awaits.clone());
            let message = awaits.unwrap_or_else(|| "no router is ready yet".to_owned());
            ConditionState::new(false, "Starting", message)
        }
    }
}

/// Whether the desired number of routers exists and all of them have the current pod template of their Deployment.
pub(super) fn routers_are_updated(applied: &ApplyResult) -> bool {
    let Some(deployment) = deployment(applied, Component::Router) else { return false };
    let desired = applied.valid.router.replicas;
    let is_observed = deployment.data.pointer("/status/observedGeneration").and_then(Value::as_i64)
        == deployment.metadata.generation;
    is_observed
        && status_count(deployment, "updatedReplicas") == desired
        && status_count(deployment, "replicas") == desired
}

fn deadline_exceeded(holds: bool) -> ConditionState {
    ConditionState::new(
        holds,
        "DeadlineExceeded",
        "the rollout made no progress within rollout.progressDeadline plus the estimated load time of the model",
    )
}

fn router_deadline_exceeded(holds: bool) -> ConditionState {
    ConditionState::new(
        holds,
        "DeadlineExceeded",
        "the rollout of the routers made no progress within the deadline of their Deployment",
    )
}

pub(super) fn progressing(
    applied: &ApplyResult,
    summary: &Summary,
    basic: &BasicConditions,
) -> ConditionState {
    let is_replacing = summary.updated < summary.present || summary.updated < summary.desired;
    if summary.paused && is_replacing {
        return ConditionState::new(false, "Paused", "the rollout is paused by rollout.pause");
    }
    if summary.deadline_exceeded {
        return deadline_exceeded(false);
    }
    let is_fetching = match summary.cache.as_ref().map(|cache| cache.state) {
        Some(CacheState::Fetching) => true,
        Some(CacheState::Pending) => summary.desired > 0,
        _ => false,
    };
    if is_fetching {
        return ConditionState::new(true, "Fetching", basic.model.message.clone());
    }
    if basic.replicas.holds != Some(true) {
        let (reason, verb) = match (summary.updated < summary.present, summary.present > summary.desired) {
            (true, _) => ("Replacing", "replaced"),
            (false, true) => ("ScalingDown", "removed"),
            (false, false) => ("Starting", "started"),
        };
        let message = format!("replicas are being {verb}: {}", basic.replicas.message);
        return ConditionState::new(true, reason, message);
    }
    if summary.router_deadline_exceeded {
        return router_deadline_exceeded(false);
    }
    if basic.router.holds == Some(false) && basic.router.reason == "Starting" {
        return ConditionState::new(true, "Starting", basic.router.message.clone());
    }
    if !routers_are_updated(applied) {
        return ConditionState::new(
            true,
            "ReplacingRouters",
            "routers are being started, replaced or removed",
        );
    }
    ConditionState::new(false, "Done", "no change is in progress")
}

pub(super) fn degraded(applied: &ApplyResult, summary: &Summary, basic: &BasicConditions) -> ConditionState {
    if let Some(failure) = applied.failures.first() {
        let message = format!("{failure}: {}", failure.source.message());
        return ConditionState::new(true, "ApplyFailed", message);
    }
    if summary.cache.as_ref().is_some_and(|cache| cache.state == CacheState::Failed) {
        return ConditionState::new(true, &basic.model.reason, basic.model.message.clone());
    }
    // An unschedulable pod may become schedulable when nodes are added or volumes are bound, so it counts as a problem
    // only after the deadline.
    let problems = [&summary.fetch_problem, &summary.problem];
    let mut lasting = problems
        .into_iter()
        .flatten()
        .filter(|problem| problem.reason != "Unschedulable" || summary.deadline_exceeded);
    if let Some(problem) = lasting.next() {
        return ConditionState::new(true, &problem.reason, problem.message.clone());
    }
    let router_problem = router_problem(applied)
        .filter(|problem| problem.reason != "Unschedulable" || summary.router_deadline_exceeded);
    if let Some(problem) = router_problem {
        return ConditionState::new(true, &problem.reason, problem.message);
    }
    if summary.deadline_exceeded {
        return deadline_exceeded(true);
    }
    if summary.router_deadline_exceeded {
        return router_deadline_exceeded(true);
    }
    if let Some(pinned) = &applied.desired.model_revision
        && let Some(pod) = pods_with_other_revision(applied, pinned).next()
    {
        let message = format!(
            "the pod {} has fetched a commit other than {pinned}: delete the pod, so that its replacement \
             fetches {pinned}",
            pod.name
        );
        return ConditionState::new(true, "RevisionMismatch", message);
    }
    ConditionState::new(false, "AsExpected", "no problem is known")
}

/// The replicas that have fetched a commit other than `pinned`: replicas that start at the same time can resolve a
/// branch to different commits.
fn pods_with_other_revision<'a>(
    applied: &'a ApplyResult,
    pinned: &'a str,
) -> impl Iterator<Item = &'a PodState> {
    let key = requested_revision(&applied.valid).map(|revision| revision.key.as_str());
    present_pods(&applied.observed, Component::Server)
        .filter(move |pod| key.is_some() && pod.revision_key.as_deref() == key)
        .filter(move |pod| {
            let revision = pod.fetched.as_ref().and_then(|report| report.revision.as_deref());
            revision.is_some_and(|revision| revision != pinned)
        })
}

/// Returns the condition `Available`, which reports whether replicas of any version serve requests.
pub(super) fn available(desired: i32, routable: i32, router: &ConditionState) -> ConditionState {
    if desired == 0 && routable == 0 {
        return ConditionState::new(false, "ScaledToZero", "the desired number of replicas is 0");
    }
    if router.holds != Some(true) {
        return ConditionState::new(false, &format!("Router{}", router.reason), router.message.clone());
    }
    match routable {
        0 => ConditionState::new(false, "NoReplica", "no replica receives requests"),
        1 => ConditionState::new(true, "Serving", "1 replica receives requests"),
        routable => ConditionState::new(true, "Serving", format!("{routable} replicas receive requests")),
    }
}

/// Returns the condition `Ready`, which reports whether the resource is accepted, a router is ready, and enough
/// up-to-date replicas receive requests. A resource that is scaled to zero is ready once no replica exists: a client
/// that waits for readiness would otherwise wait forever. The condition `Available` reports whether requests are
/// served.
pub(super) fn ready(summary: &Summary, basic: &BasicConditions) -> ConditionState {
    let BasicConditions { accepted, model, replicas, router } = basic;
    if accepted.holds == Some(false) {
        return ConditionState::new(false, "NotAccepted", accepted.message.clone());
    }
    if summary.desired == 0 {
        return if summary.present == 0 {
            ConditionState::new(true, "ScaledToZero", "the desired number of replicas is 0")
        } else {
            ConditionState::new(false, "ScalingDown", "replicas are being removed")
        };
    }
    if router.holds != Some(true) {
        return ConditionState::new(false, &format!("Router{}", router.reason), router.message.clone());
    }
    if summary.updated_routable >= summary.desired {
        return ConditionState::new(true, "Serving", "enough replicas are up to date and receive requests");
    }
    let cause = if model.holds == Some(false) { model } else { replicas };
    ConditionState::new(false, &cause.reason, cause.message.clone())
}

pub(super) fn phase(
    applied: &ApplyResult,
    summary: &Summary,
    basic: &BasicConditions,
    degraded: &ConditionState,
    ready: &ConditionState,
    previous: Phase,
) -> Phase {
    if basic.accepted.holds == Some(false) {
        return Phase::Refused;
    }
    if summary.desired == 0 && summary.present == 0 && applied.failures.is_empty() {
        return Phase::Suspended;
    }
    if degraded.holds == Some(true) {
        return Phase::Degraded;
    }
    if ready.holds == Some(true) && summary.present == summary.desired && summary.desired > 0 {
        return Phase::Ready;
    }
    // Until a new or resumed resource is ready, its phase is not `Updating`, even if some replicas receive requests.
    let is_first = matches!(previous, Phase::Pending | Phase::Fetching | Phase::Starting | Phase::Suspended);
    if summary.routable > 0 && !is_first {
        return Phase::Updating;
    }
    if basic.model.holds == Some(false) { Phase::Fetching } else { Phase::Starting }
}

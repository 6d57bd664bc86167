//! Summarizes the state of a resource's replicas and of its fetch. The conditions and the status are derived from this
//! summary.

use std::sync::Arc;

use kube::api::DynamicObject;
use operator_api::{CacheState, CacheStatus};
use serde_json::Value;

use crate::apply::ApplyResult;
use crate::manifest::Kind;
use crate::names::Component;
use crate::observe::ObservedState;
use crate::pod::{FetchReport, PodState, Problem, creation_error};

/// The state of a resource's replicas and of its fetch, and whether the rollout of its routers is stuck.
#[derive(Clone, Debug)]
pub(super) struct Summary {
    /// The desired number of replicas.
    pub(super) desired: i32,
    /// The number of replicas that exist and are not being deleted.
    pub(super) present: i32,
    pub(super) ready: i32,
    pub(super) routable: i32,
    /// The number of existing replicas with the desired pod template.
    pub(super) updated: i32,
    /// The number of updated replicas that are ready and admitted.
    pub(super) updated_routable: i32,
    /// The number of updated replicas whose containers are ready, which they are only after loading the model.
    pub(super) updated_loaded: i32,
    /// The number of replicas that are being deleted.
    pub(super) draining: i32,
    /// The reason why pods of replicas cannot be created, or otherwise the most frequent problem of the replicas.
    pub(super) problem: Option<Problem>,
    /// The problem that prevents the Job from fetching the model.
    pub(super) fetch_problem: Option<Problem>,
    /// A message about the objects that a replica mounts, while its containers wait to be created.
    pub(super) awaits: Option<String>,
    /// The number of replicas that work but have not been admitted by the routers.
    pub(super) not_admitted: i32,
    pub(super) deadline_exceeded: bool,
    /// Whether the rollout of the routers has made no progress within the deadline of their Deployment.
    pub(super) router_deadline_exceeded: bool,
    pub(super) paused: bool,
    pub(super) model_digest: Option<String>,
    pub(super) cache: Option<CacheStatus>,
}

impl Summary {
    pub(super) fn new(applied: &ApplyResult) -> Self {
        let observed = &applied.observed;
        let deployment = deployment(applied, Component::Server);
        let pods: Vec<&PodState> = present_pods(observed, Component::Server).collect();
        let count = |test: &dyn Fn(&PodState) -> bool| pods.iter().filter(|pod| test(pod)).count() as i32;
        let is_updated = |pod: &PodState| pod.template_hash == applied.desired.template_hash;
        let FetchState { cache, model_digest } = fetch_state(applied);
        Self {
            desired: applied.valid.server.replicas,
            present: pods.len() as i32,
            ready: count(&|pod| pod.is_ready),
            routable: count(&PodState::receives_requests),
            updated: count(&is_updated),
            updated_routable: count(&|pod| is_updated(pod) && pod.receives_requests()),
            updated_loaded: count(&|pod| is_updated(pod) && pod.containers_ready),
            draining: observed
                .pods_of(Component::Server)
                .filter(|pod| pod.is_terminating && !pod.is_finished)
                .count() as i32,
            problem: replica_failure(deployment).or_else(|| most_frequent_problem(&pods)),
            fetch_problem: fetch_problem(applied, cache.as_ref()),
            awaits: pods.iter().find_map(|pod| pod.awaits.clone()),
            not_admitted: count(&|pod| pod.containers_ready && pod.is_routable != Some(true)),
            // The deadline of the Deployment can also expire while a pod fetches the model or a server loads it,
            // although the rollout makes progress.
            deadline_exceeded: has_exceeded_deadline(deployment)
                && !pods.iter().any(|pod| pod.is_fetching || pod.is_starting),
            router_deadline_exceeded: has_exceeded_deadline(self::deployment(applied, Component::Router)),
            paused: applied.valid.server.paused,
            model_digest,
            cache,
        }
    }
}

/// The pods of a component that have not finished and are not being deleted. A finished pod, such as an evicted one,
/// remains for a long time after its Deployment has replaced it.
pub(super) fn present_pods(
    observed: &ObservedState,
    component: Component,
) -> impl Iterator<Item = &PodState> {
    observed.pods_of(component).filter(|pod| !pod.is_terminating && !pod.is_finished)
}

/// The Deployment of a component after the apply.
pub(super) fn deployment(applied: &ApplyResult, component: Component) -> Option<&Arc<DynamicObject>> {
    let name = applied.valid.owner.component_name(component);
    applied.objects.get(&(Kind::Deployment, name))
}

/// Returns a number from the status of a Deployment.
pub(super) fn status_count(deployment: &DynamicObject, field: &str) -> i32 {
    let count = deployment.data.pointer(&format!("/status/{field}")).and_then(Value::as_i64);
    count.and_then(|count| i32::try_from(count).ok()).unwrap_or(0)
}

/// Whether the rollout of a Deployment has made no progress within its deadline.
fn has_exceeded_deadline(deployment: Option<&Arc<DynamicObject>>) -> bool {
    let conditions =
        deployment.and_then(|deployment| deployment.data.pointer("/status/conditions")?.as_array());
    conditions.into_iter().flatten().any(|condition| {
        condition["type"] == "Progressing" && condition["reason"] == "ProgressDeadlineExceeded"
    })
}

/// The problem of the routers, if their pods cannot be created or do not work.
pub(super) fn router_problem(applied: &ApplyResult) -> Option<Problem> {
    let pods: Vec<&PodState> = present_pods(&applied.observed, Component::Router).collect();
    replica_failure(deployment(applied, Component::Router)).or_else(|| most_frequent_problem(&pods))
}

/// The most frequent problem of the pods. If several problems are equally frequent, the first of them in sort order is
/// returned.
fn most_frequent_problem(pods: &[&PodState]) -> Option<Problem> {
    let mut problems: Vec<&Problem> = pods.iter().filter_map(|pod| pod.problem.as_ref()).collect();
    problems.sort();
    problems.chunk_by(|a, b| a == b).rev().max_by_key(|same| same.len()).map(|same| same[0].clone())
}

/// The reason why the pods of a Deployment cannot be created, such as a quota or Pod Security.
fn replica_failure(deployment: Option<&Arc<DynamicObject>>) -> Option<Problem> {
    let conditions = deployment?.data.pointer("/status/conditions")?.as_array()?;
    let is_failure =
        |condition: &&Value| condition["type"] == "ReplicaFailure" && condition["status"] == "True";
    let failure = conditions.iter().find(is_failure)?;
    let reason = match failure["reason"].as_str() {
        Some(reason) if !reason.is_empty() => reason.to_owned(),
        _ => "ReplicaFailure".to_owned(),
    };
    Some(Problem { reason, message: creation_error(failure["message"].as_str().unwrap_or_default()) })
}

/// The problem that prevents the Job of a shared cache from fetching: it cannot create its pod, or its pod cannot
/// start.
fn fetch_problem(applied: &ApplyResult, cache: Option<&CacheStatus>) -> Option<Problem> {
    cache.filter(|cache| cache.state == CacheState::Pending)?;
    let observed = &applied.observed;
    let job = applied.desired.fetch_job.as_deref()?;
    let pods = observed.pods.iter().filter(|pod| pod.job.as_deref() == Some(job));
    observed.job_failure(job).or_else(|| pods.filter_map(|pod| pod.problem.as_ref()).next()).cloned()
}

/// The state of the fetch of a model.
#[derive(Default)]
struct FetchState {
    /// `None` if the model is mounted instead of fetched.
    cache: Option<CacheStatus>,
    model_digest: Option<String>,
}

impl FetchState {
    fn new(state: CacheState, bytes: Option<i64>, bytes_total: Option<i64>) -> Self {
        Self { cache: Some(cache_status(state, bytes, bytes_total)), model_digest: None }
    }

    fn complete(report: FetchReport) -> Self {
        let total = report.bytes_total.or(Some(report.bytes));
        Self { model_digest: report.digest, ..Self::new(CacheState::Ready, Some(report.bytes), total) }
    }
}

fn fetch_state(applied: &ApplyResult) -> FetchState {
    if applied.valid.files.fetched().is_none() {
        return FetchState::default();
    }
    let observed = &applied.observed;
    let pending = FetchState::new(CacheState::Pending, None, None);
    let failed = FetchState::new(CacheState::Failed, None, None);
    let fetching = match observed.pod_reports.progress {
        Some(progress) => FetchState::new(CacheState::Fetching, Some(progress.bytes), progress.bytes_total),
        None => FetchState::new(CacheState::Fetching, None, None),
    };
    if let Some(job) = &applied.desired.fetch_job {
        return match observed.fetch_report(job) {
            Some(report) if observed.is_job_complete(job) => FetchState::complete(report),
            _ if observed.is_job_complete(job) => FetchState::new(CacheState::Ready, None, None),
            _ if observed.is_job_failed(job) => failed,
            _ if observed.pods.iter().any(|pod| pod.is_fetching) => fetching,
            // The Job retries with increasing pauses, so the failed attempt may remain the last one for a while.
            _ if observed.pods_of(Component::Fetch).any(has_failed_fetch) => failed,
            // The pod has finished, and Kubernetes will soon report the completion of the Job.
            Some(report) => {
                let total = report.bytes_total.or(Some(report.bytes));
                FetchState::new(CacheState::Fetching, Some(report.bytes), total)
            }
            _ => pending,
        };
    }
    // Pods with an earlier template may have fetched another model, so they count only if no pod with the current
    // template has started a fetch.
    let is_current = |pod: &&PodState| pod.template_hash == applied.desired.template_hash;
    let has_fetch = |pod: &PodState| pod.is_fetching || pod.fetched.is_some();
    let all = || present_pods(observed, Component::Server);
    let has_current = all().filter(is_current).any(has_fetch);
    let pods = || all().filter(|pod| !has_current || is_current(pod));
    if let Some(report) = pods().filter_map(|pod| pod.fetched.clone()).find(FetchReport::is_complete) {
        FetchState::complete(report)
    } else if pods().any(has_failed_fetch) {
        failed
    } else if pods().any(|pod| pod.is_fetching) {
        fetching
    } else {
        pending
    }
}

fn has_failed_fetch(pod: &PodState) -> bool {
    pod.fetched.as_ref().is_some_and(|report| !report.is_complete())
}

fn cache_status(state: CacheState, bytes: Option<i64>, bytes_total: Option<i64>) -> CacheStatus {
    let progress = match (bytes, bytes_total) {
        (Some(bytes), Some(total)) => Some(format!("{} of {}", size(bytes), size(total))),
        (Some(bytes), None) => Some(size(bytes)),
        _ => None,
    };
    CacheStatus { state, bytes, bytes_total, progress }
}

/// Formats a number of bytes with a unit.
fn size(bytes: i64) -> String {
    const UNITS: [(&str, i64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

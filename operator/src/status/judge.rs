//! Each condition of a resource, from what was applied. One function for each, none of which looks at another's facts.

use std::sync::Arc;

use kube::api::DynamicObject;
use operator_api::{CacheState, CacheStatus, Phase};
use serde_json::Value;

use super::{Finding, cache};
use crate::apply::Applied;
use crate::desired::fetch::{job_name, revision};
use crate::desired::names::Component;
use crate::manifest::Kind;
use crate::observe::count;
use crate::pod::{PodState, Problem, creation_error};
use crate::validate::{Files, Invalid};

/// What the conditions are judged by.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// Replicas that should be there.
    pub(crate) wanted: i32,
    /// Replicas that are there and do not leave.
    pub(crate) present: i32,
    pub(crate) ready: i32,
    pub(crate) routable: i32,
    /// Those of the present template.
    pub(crate) updated: i32,
    /// Those of them that are ready and admitted.
    pub(crate) updated_routable: i32,
    /// Those that leave.
    pub(crate) draining: i32,
    /// What is wrong with pods, the most frequent first.
    pub(crate) problem: Option<Problem>,
    /// What keeps the Job that fetches for all replicas from doing so.
    pub(crate) fetch_problem: Option<Problem>,
    /// What the containers of a pod wait for.
    pub(crate) awaits: Option<String>,
    /// How many work but wait for a router's word.
    pub(crate) not_admitted: i32,
    pub(crate) deadline_exceeded: bool,
    pub(crate) paused: bool,
    pub(crate) digest: Option<String>,
    pub(crate) cache: Option<CacheStatus>,
}

impl Facts {
    pub(crate) fn gather(applied: &Applied) -> Self {
        let observed = &applied.observed;
        let name = applied.valid.owner.part(Component::Server);
        let deployment = applied.objects.get(&(Kind::Deployment, name));
        let template = Some(applied.resources.template.as_str());
        let here = |pod: &&PodState| !pod.is_terminating && !pod.is_finished;
        let pods: Vec<&PodState> = observed.pods_of(Component::Server).filter(here).collect();
        let number = |test: &dyn Fn(&PodState) -> bool| pods.iter().filter(|pod| test(pod)).count() as i32;
        let is_updated = |pod: &PodState| Some(pod.template.as_str()) == template;
        let is_routable = |pod: &PodState| pod.is_routable == Some(true) && pod.containers_ready;
        let progressing = deployment
            .and_then(|deployment| deployment.data.pointer("/status/conditions")?.as_array())
            .and_then(|conditions| conditions.iter().find(|condition| condition["type"] == "Progressing"));
        let (cache, digest) = fetched(applied);
        Self {
            wanted: applied.valid.server.replicas,
            present: pods.len() as i32,
            ready: number(&|pod| pod.is_ready),
            routable: number(&is_routable),
            updated: number(&is_updated),
            updated_routable: number(&|pod| is_updated(pod) && is_routable(pod) && pod.is_ready),
            draining: observed
                .pods_of(Component::Server)
                .filter(|pod| pod.is_terminating && !pod.is_finished)
                .count() as i32,
            problem: replica_failure(deployment).or_else(|| worst(&pods)),
            fetch_problem: fetch_problem(applied, cache.as_ref()),
            awaits: pods.iter().find_map(|pod| pod.awaits.clone()),
            not_admitted: number(&|pod| pod.containers_ready && pod.is_routable != Some(true)),
            // The Deployment's clock runs while a pod fetches its model, and is not set back when it begins to load it.
            deadline_exceeded: progressing
                .is_some_and(|condition| condition["reason"] == "ProgressDeadlineExceeded")
                && !pods.iter().any(|pod| pod.is_fetching || pod.is_starting),
            paused: applied.valid.server.paused,
            digest,
            cache,
        }
    }
}

/// The problem that most pods have; of those that as many have, the first by name.
fn worst(pods: &[&PodState]) -> Option<Problem> {
    let mut problems: Vec<&Problem> = pods.iter().filter_map(|pod| pod.problem.as_ref()).collect();
    problems.sort();
    problems.chunk_by(|a, b| a == b).rev().max_by_key(|same| same.len()).map(|same| same[0].clone())
}

/// Why the pods of a Deployment cannot be created: a quota, Pod Security or another admission rejects them.
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

/// What keeps the Job of a shared cache from fetching: it cannot create its pod, or its pod cannot start.
fn fetch_problem(applied: &Applied, cache: Option<&CacheStatus>) -> Option<Problem> {
    cache.filter(|cache| cache.state == CacheState::Pending)?;
    let observed = &applied.observed;
    let job = job_name(&applied.valid, observed)?;
    let pods = observed.pods.iter().filter(|pod| pod.job.as_deref() == Some(&*job));
    observed.job_failure(&job).or_else(|| pods.filter_map(|pod| pod.problem.as_ref()).next()).cloned()
}

/// How far the files have come, and their digest.
fn fetched(applied: &Applied) -> (Option<CacheStatus>, Option<String>) {
    let Files::Fetched(_) = &applied.valid.files else { return (None, None) };
    let observed = &applied.observed;
    let progress = observed.pod_reports.progress;
    let underway = || match progress {
        Some(progress) => cache(CacheState::Fetching, Some(progress.bytes), progress.bytes_total),
        None => cache(CacheState::Fetching, None, None),
    };
    let whole = |report: crate::pod::FetchReport| {
        let total = report.bytes_total.or(Some(report.bytes));
        (Some(cache(CacheState::Ready, Some(report.bytes), total)), report.digest)
    };
    if let Some(job) = job_name(&applied.valid, observed) {
        return match observed.fetched(&job) {
            Some(report) if observed.job_complete(&job) => whole(report),
            _ if observed.job_complete(&job) => (Some(cache(CacheState::Ready, None, None)), None),
            _ if observed.job_failed(&job) => (Some(cache(CacheState::Failed, None, None)), None),
            _ if observed.pods.iter().any(|pod| pod.is_fetching) => (Some(underway()), None),
            // It is tried again, later and later.
            _ if observed.pods_of(Component::Fetch).any(has_failed) => {
                (Some(cache(CacheState::Failed, None, None)), None)
            }
            // Its pod has finished; that the Job is complete, its controller reports a moment later.
            Some(report) => {
                let total = report.bytes_total.or(Some(report.bytes));
                (Some(cache(CacheState::Fetching, Some(report.bytes), total)), None)
            }
            _ => (Some(CacheStatus::default()), None),
        };
    }
    let pods = || observed.pods_of(Component::Server).filter(|pod| !pod.is_terminating && !pod.is_finished);
    if let Some(report) =
        pods().filter_map(|pod| pod.fetched.clone()).find(crate::pod::FetchReport::is_complete)
    {
        return whole(report);
    }
    if pods().any(has_failed) {
        return (Some(cache(CacheState::Failed, None, None)), None);
    }
    let is_underway = pods().any(|pod| pod.is_fetching);
    (Some(if is_underway { underway() } else { CacheStatus::default() }), None)
}

/// Whether the last attempt of a pod to fetch its model has failed.
fn has_failed(pod: &PodState) -> bool {
    pod.fetched.as_ref().is_some_and(|report| !report.is_complete())
}

pub(crate) fn accepted(applied: &Applied) -> Finding {
    if let Some(failure) = applied.failures.iter().find(|failure| failure.source.is_final()) {
        let refused = Invalid::Refused { kind: failure.kind, message: failure.source.message() };
        return Finding::new(false, refused.reason(), refused.to_string());
    }
    let remarks = applied.valid.remarks.join("; ");
    Finding::new(
        true,
        "Accepted",
        if remarks.is_empty() { "it can be carried out".to_owned() } else { remarks },
    )
}

pub(crate) fn model(applied: &Applied, facts: &Facts) -> Finding {
    let Files::Fetched(_) = &applied.valid.files else {
        return Finding::new(true, "Mounted", "the model is in a volume or an image");
    };
    let observed = &applied.observed;
    let state = facts.cache.as_ref().map_or(CacheState::Pending, |cache| cache.state);
    match state {
        CacheState::Ready => Finding::new(true, "Fetched", "the model's files are there and checked"),
        CacheState::Failed => {
            let mut failed = observed.pods.iter().filter_map(|pod| pod.fetched.as_ref());
            match failed.rfind(|report| !report.is_complete()) {
                Some(report) => Finding::new(false, &report.reason, report.message.clone()),
                None => Finding::new(false, "FetchFailed", "the model could not be fetched"),
            }
        }
        CacheState::Fetching => {
            let progress = facts.cache.as_ref().and_then(|cache| cache.progress.clone());
            let message = progress
                .map_or("the model is being fetched".to_owned(), |progress| format!("fetched {progress}"));
            Finding::new(false, "Fetching", message)
        }
        CacheState::Pending => match &facts.fetch_problem {
            Some(problem) => Finding::new(false, &problem.reason, problem.message.clone()),
            None => {
                let awaits = observed.pods_of(Component::Fetch).find_map(|pod| pod.awaits.clone());
                let awaits = awaits.or_else(|| facts.awaits.clone());
                let message = awaits.unwrap_or_else(|| "the model has yet to be fetched".to_owned());
                Finding::new(false, "Pending", message)
            }
        },
    }
}

pub(crate) fn replicas(facts: &Facts) -> Finding {
    let Facts { wanted, present, routable, updated_routable, updated, .. } = *facts;
    if wanted == 0 && present == 0 {
        return Finding::new(true, "ScaledToZero", "no replicas are wanted and none are there");
    }
    if updated_routable >= wanted && present == wanted && updated == wanted {
        return Finding::new(true, "AllReady", format!("all {wanted} are ready and get requests"));
    }
    if let Some(problem) = &facts.problem {
        return Finding::new(false, &problem.reason, problem.message.clone());
    }
    if facts.not_admitted > 0 {
        let message = format!("{} wait for a router's word", facts.not_admitted);
        return Finding::new(false, "NotAdmitted", message);
    }
    let outdated = routable - updated_routable;
    let mut message = format!("{updated_routable} of {wanted} replicas are up to date and receive requests");
    if outdated > 0 {
        message.push_str(&format!("; {outdated} outdated ones receive requests until they are replaced"));
    }
    if let Some(awaits) = &facts.awaits {
        message.push_str(&format!("; {awaits}"));
    }
    let reason = if present > wanted || updated < present { "Replacing" } else { "Starting" };
    Finding::new(false, reason, message)
}

pub(crate) fn router(applied: &Applied) -> Finding {
    let wanted = applied.valid.router.replicas;
    let name = applied.valid.owner.part(Component::Router);
    let deployment = applied.objects.get(&(Kind::Deployment, name));
    let ready = deployment.map_or(0, |deployment| count(&deployment.data, "/status/readyReplicas"));
    if wanted == 0 {
        return Finding::new(false, "Suspended", "no routers are wanted");
    }
    if ready > 0 {
        return Finding::new(true, "Answering", "routers answer");
    }
    let pods: Vec<&PodState> =
        applied.observed.pods_of(Component::Router).filter(|pod| !pod.is_terminating).collect();
    match replica_failure(deployment).or_else(|| worst(&pods)) {
        Some(problem) => Finding::new(false, &problem.reason, problem.message),
        None => {
            let awaits = pods.iter().find_map(|pod| pod.awaits.clone());
            Finding::new(false, "Starting", awaits.unwrap_or_else(|| "no router answers yet".to_owned()))
        }
    }
}

/// Whether all routers are those of the Deployment's present template.
pub(crate) fn routers_are_updated(applied: &Applied) -> bool {
    let name = applied.valid.owner.part(Component::Router);
    let Some(deployment) = applied.objects.get(&(Kind::Deployment, name)) else { return false };
    let wanted = applied.valid.router.replicas;
    let number = |field: &str| count(&deployment.data, &format!("/status/{field}"));
    let is_seen = deployment.data.pointer("/status/observedGeneration").and_then(Value::as_i64)
        == deployment.metadata.generation;
    is_seen && number("updatedReplicas") == wanted && number("replicas") == wanted
}

pub(crate) fn progressing(facts: &Facts, model: &Finding, replicas: &Finding, router: &Finding) -> Finding {
    let replaces = facts.updated < facts.present || facts.updated < facts.wanted;
    if facts.paused && replaces {
        return Finding::new(false, "Paused", "the rollout stops where it is, as rollout.pause says");
    }
    if facts.deadline_exceeded {
        return Finding::new(
            false,
            "DeadlineExceeded",
            "there was no progress within rollout.progressDeadline",
        );
    }
    let is_fetching = match facts.cache.as_ref().map(|cache| cache.state) {
        Some(CacheState::Fetching) => true,
        Some(CacheState::Pending) => facts.wanted > 0,
        _ => false,
    };
    if is_fetching {
        return Finding::new(true, "Fetching", model.message.clone());
    }
    if replicas.holds != Some(true) {
        let (reason, verb) = match (facts.updated < facts.present, facts.present > facts.wanted) {
            (true, _) => ("Replacing", "replaced"),
            (false, true) => ("ScalingDown", "leaving"),
            (false, false) => ("Starting", "started"),
        };
        return Finding::new(true, reason, format!("replicas are being {verb}: {}", replicas.message));
    }
    if router.holds == Some(false) && router.reason == "Starting" {
        return Finding::new(true, "Starting", router.message.clone());
    }
    Finding::new(false, "Done", "nothing is left to do")
}

pub(crate) fn degraded(applied: &Applied, facts: &Facts, model: &Finding) -> Finding {
    if let Some(failure) = applied.failures.first() {
        let message = format!("{failure}: {}", failure.source.message());
        return Finding::new(true, "ApplyFailed", message);
    }
    if facts.cache.as_ref().is_some_and(|cache| cache.state == CacheState::Failed) {
        return Finding::new(true, &model.reason, model.message.clone());
    }
    // A place may yet be found: nodes come, volumes are bound.
    let is_lasting = |problem: &&Problem| problem.reason != "Unschedulable" || facts.deadline_exceeded;
    let problems = [&facts.fetch_problem, &facts.problem];
    if let Some(problem) = problems.into_iter().flatten().find(is_lasting) {
        return Finding::new(true, &problem.reason, problem.message.clone());
    }
    let routers: Vec<&PodState> =
        applied.observed.pods_of(Component::Router).filter(|pod| !pod.is_terminating).collect();
    let deployment = applied.objects.get(&(Kind::Deployment, applied.valid.owner.part(Component::Router)));
    let problem = replica_failure(deployment).or_else(|| worst(&routers));
    if let Some(problem) = problem.filter(|problem| problem.reason != "Unschedulable") {
        return Finding::new(true, &problem.reason, problem.message);
    }
    if facts.deadline_exceeded {
        return Finding::new(
            true,
            "DeadlineExceeded",
            "there was no progress within rollout.progressDeadline",
        );
    }
    if let Some(pinned) = revision::pinned(&applied.valid, &applied.observed)
        && let Some(stray) = revision::strays(&applied.valid, &applied.observed, &pinned).next()
    {
        let message =
            format!("{stray} has fetched another commit than {pinned}: delete the pod to fetch that one");
        return Finding::new(true, "RevisionMismatch", message);
    }
    Finding::new(false, "AsWanted", "nothing is wrong")
}

/// Whether requests are answered at all, by whatever replicas run.
pub(crate) fn available(facts: &Facts, router: &Finding) -> Finding {
    if facts.wanted == 0 && facts.routable == 0 {
        return Finding::new(false, "ScaledToZero", "no replicas are wanted");
    }
    if router.holds != Some(true) {
        return Finding::new(false, &format!("Router{}", router.reason), router.message.clone());
    }
    match facts.routable {
        0 => Finding::new(false, "NoReplica", "no replica receives requests"),
        routable => Finding::new(true, "Serving", format!("{routable} replicas receive requests")),
    }
}

/// Whether everything is as the resource says. That includes that nothing answers if it asks for no replicas: whoever
/// waits for the resource would wait forever otherwise. Whether requests are answered is the condition `Available`.
pub(crate) fn ready(facts: &Facts, [accepted, model, replicas, router]: [&Finding; 4]) -> Finding {
    if accepted.holds == Some(false) {
        return Finding::new(false, "NotAccepted", accepted.message.clone());
    }
    if facts.wanted == 0 {
        let is_done = facts.present == 0;
        let message = if is_done { "no replicas are wanted, and none exist" } else { "replicas are leaving" };
        return Finding::new(is_done, if is_done { "ScaledToZero" } else { "ScalingDown" }, message);
    }
    if router.holds != Some(true) {
        return Finding::new(false, &format!("Router{}", router.reason), router.message.clone());
    }
    if facts.updated_routable >= facts.wanted {
        return Finding::new(true, "Serving", "requests are answered");
    }
    let because = if model.holds == Some(true) { replicas } else { model };
    Finding::new(false, &because.reason, because.message.clone())
}

pub(crate) fn phase(
    applied: &Applied,
    (facts, before): (&Facts, Phase),
    [accepted, model, degraded, ready]: [&Finding; 4],
) -> Phase {
    if accepted.holds == Some(false) {
        return Phase::Refused;
    }
    if facts.wanted == 0 && facts.present == 0 && applied.failures.is_empty() {
        return Phase::Suspended;
    }
    if degraded.holds == Some(true) {
        return Phase::Degraded;
    }
    if ready.holds == Some(true) && facts.present == facts.wanted && facts.wanted > 0 {
        return Phase::Ready;
    }
    // What has never been ready is not updated but started.
    let is_first = matches!(before, Phase::Pending | Phase::Fetching | Phase::Starting | Phase::Suspended);
    if facts.routable > 0 && !is_first {
        return Phase::Updating;
    }
    if model.holds == Some(false) { Phase::Fetching } else { Phase::Starting }
}

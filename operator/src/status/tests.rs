//! Tests of the status for different states of replicas, routers and fetches.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::api::DynamicObject;
use operator_api::{CacheState, ReleaseStatus, UpgradeState};
use serde_json::{Value, json};

use super::*;
use crate::desired::desired;
use crate::desired::release::{UpgradePermission, UpgradeStep};
use crate::manifest::Kind;
use crate::names::TEMPLATE;
use crate::observe::ObservedState;
use crate::pod::{FetchReport, PodState, Problem};
use crate::validate::{Defaults, ValidationError, validate};

fn object(replicas: i32) -> LlmDeployment {
    let object = json!({
        "apiVersion": "ovfleet.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "namespace": "models", "uid": "1", "generation": 4},
        "spec": {"model": {"source": {"pvc": {"claim": "models"}}}, "replicas": replicas},
    });
    serde_json::from_value(object).unwrap()
}

fn fetching(replicas: i32) -> LlmDeployment {
    let mut object = object(replicas);
    object.spec.model.source =
        serde_json::from_value(json!({"http": {"url": "http://host/m.gguf"}})).unwrap();
    object
}

/// The result of an apply to a cluster in the state `observed`, with `routers` ready routers.
fn applied(object: &LlmDeployment, mut observed: ObservedState, routers: i32) -> ApplyResult {
    let defaults = Defaults::with_images("s", "r");
    let valid = validate(object, &observed, &defaults).unwrap();
    let desired = desired(&valid, &observed, UpgradePermission::Granted);
    let mut objects = BTreeMap::new();
    let mut template = String::new();
    for manifest in &desired.manifests {
        let mut live: DynamicObject = serde_json::from_value(manifest.body.clone()).unwrap();
        if manifest.name == "chat-router" && manifest.kind == Kind::Deployment {
            let replicas = &manifest.body["spec"]["replicas"];
            live.data["status"] =
                json!({"readyReplicas": routers, "updatedReplicas": replicas, "replicas": replicas});
        }
        if manifest.name == "chat-server" && manifest.kind == Kind::Deployment {
            let labels = &manifest.body["spec"]["template"]["metadata"]["labels"];
            template = labels[TEMPLATE].as_str().unwrap_or_default().to_owned();
        }
        objects.insert((manifest.kind, manifest.name.clone()), Arc::new(live));
    }
    for pod in observed.pods.iter_mut().filter(|pod| pod.template_hash == "new") {
        pod.template_hash.clone_from(&template);
    }
    ApplyResult { valid, desired, objects, observed, failures: Vec::new() }
}

fn replica(name: &str) -> PodState {
    PodState {
        name: name.to_owned(),
        component: "server".to_owned(),
        template_hash: "new".to_owned(),
        containers_ready: true,
        is_ready: true,
        is_routable: Some(true),
        ..PodState::default()
    }
}

fn observed(pods: &[PodState]) -> ObservedState {
    ObservedState { pods: pods.to_vec(), ..ObservedState::default() }
}

fn status_of(object: &LlmDeployment, observed: ObservedState, routers: i32) -> LlmDeploymentStatus {
    let before = LlmDeploymentStatus { phase: Phase::Ready, ..LlmDeploymentStatus::default() };
    status(object, Some(&before), &applied(object, observed, routers), Timestamp::UNIX_EPOCH)
}

fn reason(status: &LlmDeploymentStatus, name: &str) -> String {
    let condition = status.conditions.iter().find(|condition| condition.type_ == name).unwrap();
    format!("{} {}", condition.status, condition.reason)
}

#[test]
fn ready_is_when_all_updated_replicas_are_routable_and_a_router_answers() {
    let object = object(2);
    let both = [replica("a"), replica("b")];
    let status = status_of(&object, observed(&both), 1);
    assert_eq!((status.phase, status.ready.as_str()), (Phase::Ready, "2/2"));
    assert_eq!(reason(&status, "Ready"), "True Serving");
    assert_eq!(reason(&status, "Progressing"), "False Done");

    let waiting = PodState { is_routable: None, is_ready: false, ..replica("b") };
    let status = status_of(&object, observed(&[replica("a"), waiting]), 1);
    assert_eq!(reason(&status, "Ready"), "False NotAdmitted");
    assert_eq!(status.phase, Phase::Updating);

    let status = status_of(&object, observed(&both), 0);
    assert_eq!(reason(&status, "Ready"), "False RouterStarting");

    // Replicas with the former template do not count.
    let old = both.clone().map(|pod| PodState { template_hash: "old".to_owned(), ..pod });
    let status = status_of(&object, observed(&old), 1);
    assert_eq!(reason(&status, "Ready"), "False Replacing");
    assert_eq!((status.ready_replicas, status.updated_replicas, status.phase), (2, 0, Phase::Updating));
}

#[test]
fn a_replica_on_a_failed_node_does_not_receive_requests() {
    let lost = PodState { is_ready: false, ..replica("a") };
    let status = status_of(&object(1), observed(&[lost]), 1);
    assert_eq!((reason(&status, "Available"), status.routable_replicas), ("False NoReplica".to_owned(), 0));
}

/// The Deployment keeps its template until the new model is fetched, but its replicas count as outdated.
#[test]
fn replicas_of_a_former_model_are_not_ready_for_the_one_that_is_being_fetched() {
    let mut object = fetching(1);
    object.spec.model.cache = serde_json::from_value(json!({"mode": "shared", "size": "1Gi"})).unwrap();
    let former = PodState { template_hash: "former".to_owned(), ..replica("a") };
    let mut applied = applied(&object, observed(&[former]), 1);
    let deployment = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "chat-server"},
        "spec": {"template": {"metadata": {"labels": {TEMPLATE: "former"}}}},
    });
    let deployment: DynamicObject = serde_json::from_value(deployment).unwrap();
    applied.objects.insert((Kind::Deployment, "chat-server".to_owned()), Arc::new(deployment));
    let before = LlmDeploymentStatus { phase: Phase::Ready, ..LlmDeploymentStatus::default() };
    let status = status(&object, Some(&before), &applied, Timestamp::UNIX_EPOCH);
    assert_eq!(reason(&status, "Progressing"), "True Fetching");
    assert_eq!(reason(&status, "Ready"), "False Pending");
    assert_eq!((status.phase, status.ready_replicas, status.updated_replicas), (Phase::Updating, 1, 0));
}

#[test]
fn replicas_that_are_deleted_are_counted_separately() {
    let leaving = PodState { is_terminating: true, ..replica("b") };
    let status = status_of(&object(1), observed(&[replica("a"), leaving]), 1);
    assert_eq!((status.replicas, status.draining_replicas, status.phase), (1, 1, Phase::Ready));
}

#[test]
fn the_most_frequent_problem_is_reported() {
    let with = |name: &str, reason: &str| PodState {
        containers_ready: false,
        is_ready: false,
        is_routable: None,
        problem: Some(Problem { reason: reason.to_owned(), message: "why".to_owned() }),
        ..replica(name)
    };
    let pods = [with("a", "Crashing"), with("b", "OOMKilled"), with("c", "OOMKilled")];
    let status = status_of(&object(3), observed(&pods), 1);
    assert_eq!(reason(&status, "Degraded"), "True OOMKilled");
    assert_eq!(reason(&status, "Ready"), "False OOMKilled");
    assert_eq!(status.phase, Phase::Degraded);
}

#[test]
fn an_evicted_router_is_no_problem_once_it_is_replaced() {
    let evicted = PodState {
        component: "router".to_owned(),
        is_finished: true,
        awaits: Some("the containers need a Secret".to_owned()),
        problem: Some(Problem {
            reason: "Evicted".to_owned(),
            message: "the node was low on memory".to_owned(),
        }),
        ..PodState::default()
    };
    let pods = [replica("a"), evicted];
    let status = status_of(&object(1), observed(&pods), 1);
    assert_eq!((status.phase, reason(&status, "Degraded")), (Phase::Ready, "False AsExpected".to_owned()));
    // Until its replacement is ready, the router is starting.
    let status = status_of(&object(1), observed(&pods), 0);
    assert_eq!(reason(&status, "RouterReady"), "False Starting");
    let router = status.conditions.iter().find(|condition| condition.type_ == "RouterReady").unwrap();
    assert_eq!(router.message, "no router is ready yet");
}

#[test]
fn the_progress_and_the_result_of_a_fetch_are_reported() {
    let object = fetching(1);
    let starting = PodState { containers_ready: false, is_ready: false, is_routable: None, ..replica("a") };
    let mut fetching_pod = observed(&[PodState { is_fetching: true, ..starting.clone() }]);
    fetching_pod.pod_reports.progress =
        Some(crate::pod_reports::FetchProgress { bytes: 1 << 29, bytes_total: Some(1 << 30) });
    let status = status_of(&object, fetching_pod, 1);
    assert_eq!(status.phase, Phase::Fetching);
    assert_eq!(status.cache.unwrap().progress.as_deref(), Some("512.0 MiB of 1.0 GiB"));

    let report = |reason: &str| FetchReport { reason: reason.to_owned(), ..FetchReport::default() };
    let failed = PodState { fetched: Some(report("DigestMismatch")), ..starting };
    let status = status_of(&object, observed(&[failed]), 1);
    assert_eq!(reason(&status, "ModelAvailable"), "False DigestMismatch");
    assert_eq!(reason(&status, "Degraded"), "True DigestMismatch");

    let digest = Some("sha256:1".to_owned());
    let whole = PodState {
        fetched: Some(FetchReport { digest: digest.clone(), ..report("Fetched") }),
        ..replica("a")
    };
    let status = status_of(&object, observed(&[whole]), 1);
    assert_eq!(
        (status.model_digest.clone(), reason(&status, "ModelAvailable")),
        (digest, "True Fetched".to_owned())
    );
}

#[test]
fn a_mounted_model_is_available_once_an_updated_replica_has_loaded_it() {
    let object = object(1);
    let status = |pods: &[PodState]| status_of(&object, observed(pods), 1);
    let loading = PodState { containers_ready: false, is_ready: false, is_routable: None, ..replica("a") };
    let loading = status(&[loading]);
    assert_eq!(reason(&loading, "ModelAvailable"), "Unknown NotLoaded");
    assert_eq!(reason(&loading, "Ready"), "False Starting", "the reason is that of the replicas");
    assert_eq!(reason(&status(&[]), "ModelAvailable"), "Unknown NotLoaded");
    let former = PodState { template_hash: "former".to_owned(), ..replica("a") };
    assert_eq!(reason(&status(&[former]), "ModelAvailable"), "Unknown NotLoaded");
    assert_eq!(reason(&status(&[replica("a")]), "ModelAvailable"), "True Mounted");
}

#[test]
fn pods_of_a_former_model_do_not_hide_that_the_next_one_cannot_be_fetched() {
    let object = fetching(1);
    let report = |reason: &str| Some(FetchReport { reason: reason.to_owned(), ..FetchReport::default() });
    let old = PodState { template_hash: "old".to_owned(), fetched: report("Fetched"), ..replica("a") };
    let new = PodState { fetched: report("NotFound"), is_ready: false, is_routable: None, ..replica("b") };
    let status = status_of(&object, observed(&[old.clone(), new]), 1);
    assert_eq!(reason(&status, "ModelAvailable"), "False NotFound");
    let status = status_of(&object, observed(&[old, replica("b")]), 1);
    assert_eq!(reason(&status, "ModelAvailable"), "True Fetched");
}

#[test]
fn statuses_that_differ_only_in_times_are_the_same() {
    let object = object(1);
    let applied = applied(&object, observed(&[replica("a")]), 1);
    let first = status(&object, None, &applied, Timestamp::UNIX_EPOCH);
    let later = Timestamp::from_second(1000).unwrap();
    let again = status(&object, Some(&first), &applied, later);
    assert_eq!(first, again, "unchanged conditions keep their times");
    let fresh = status(&object, None, &applied, later);
    assert_ne!(first, fresh);
    assert!(is_same_except_times(&first, &fresh));
}

/// The status of `object` after it has been refused because of `error`.
fn refused(
    object: &LlmDeployment,
    previous: Option<&LlmDeploymentStatus>,
    observed: &ObservedState,
    error: &ValidationError,
) -> LlmDeploymentStatus {
    let is_decoded = !matches!(error, ValidationError::Undecodable(_));
    let spec = is_decoded.then_some(&object.spec);
    let resource = RefusedResource { metadata: &object.metadata, spec, previous, observed, error };
    refused_status(&resource, Timestamp::UNIX_EPOCH)
}

/// The observed state of `object` with a ready router, after the operator has applied its objects.
fn serving(object: &LlmDeployment, pods: &[PodState]) -> ObservedState {
    let applied = applied(object, observed(pods), 1);
    ObservedState { owned: applied.objects, ..applied.observed }
}

#[test]
fn an_invalid_resource_keeps_its_other_conditions() {
    let mut object = object(1);
    let before = status_of(&object, observed(&[replica("a")]), 1);
    let status =
        refused(&object, Some(&before), &serving(&object, &[replica("a")]), &ValidationError::Source);
    assert_eq!((status.phase, status.ready.as_str(), status.ready_replicas), (Phase::Refused, "1/1", 1));
    assert_eq!(reason(&status, "Accepted"), "False InvalidSource");
    assert_eq!(reason(&status, "ReplicasReady"), "True AllReady");
    assert_eq!(status.conditions.len(), types::ALL.len());
    let names: Vec<&str> = status.conditions.iter().map(|condition| condition.type_.as_str()).collect();
    assert_eq!(names, types::ALL);

    let status = refused(&object, None, &ObservedState::default(), &ValidationError::Source);
    assert_eq!((status.ready.as_str(), status.model.as_str()), ("0/1", "chat"));
    assert_eq!(status.conditions.len(), 2, "the other conditions of a new resource are unknown");
    object.spec.suspend = true;
    let status = refused(&object, None, &ObservedState::default(), &ValidationError::Source);
    assert_eq!(status.ready, "0/0", "a suspended resource has no replicas");
}

#[test]
fn the_replicas_of_a_refused_resource_are_still_counted() {
    let object = object(2);
    let both = [replica("a"), replica("b")];
    let before = status_of(&object, observed(&both), 1);
    let waiting = PodState { is_routable: None, is_ready: false, ..replica("c") };
    let leaving = PodState { is_terminating: true, ..replica("a") };
    for error in [ValidationError::Source, ValidationError::Undecodable("a number is too large".to_owned())] {
        let replaced = serving(&object, &[leaving.clone(), replica("b"), waiting.clone()]);
        let status = refused(&object, Some(&before), &replaced, &error);
        let counts = (status.replicas, status.ready_replicas, status.routable_replicas);
        assert_eq!((counts, status.ready.as_str()), ((2, 1, 1), "1/2"));
        assert_eq!((status.updated_replicas, status.draining_replicas), (2, 1));
        assert_eq!(reason(&status, "Available"), "True Serving");
        let unavailable = serving(&object, std::slice::from_ref(&waiting));
        let status = refused(&object, Some(&before), &unavailable, &error);
        assert_eq!((status.replicas, reason(&status, "Available").as_str()), (1, "False NoReplica"));
        let on_failed_node = serving(&object, &[PodState { is_ready: false, ..replica("a") }]);
        let status = refused(&object, Some(&before), &on_failed_node, &error);
        assert_eq!((status.routable_replicas, reason(&status, "Available").as_str()), (0, "False NoReplica"));
    }
}

#[test]
fn a_resource_that_cannot_be_decoded_keeps_its_former_status() {
    let object = object(1);
    let before = status_of(&object, observed(&[replica("a")]), 1);
    let error = ValidationError::Undecodable("a number is too large".to_owned());
    let status = refused(&object, Some(&before), &serving(&object, &[replica("a")]), &error);
    assert_eq!((status.phase, status.ready.as_str(), status.model.as_str()), (Phase::Refused, "1/1", "chat"));
    assert_eq!((status.observed_generation, &status.selector), (4, &before.selector));
    assert_eq!(reason(&status, "Accepted"), "False Undecodable");
    assert_eq!(reason(&status, "ReplicasReady"), "True AllReady");
}

#[test]
fn a_resource_without_desired_and_present_replicas_is_suspended() {
    let mut object = object(2);
    object.spec.suspend = true;
    let status = status_of(&object, ObservedState::default(), 0);
    assert_eq!((status.phase, reason(&status, "Ready")), (Phase::Suspended, "True ScaledToZero".to_owned()));
    assert_eq!(reason(&status, "Available"), "False ScaledToZero");
    assert_eq!(reason(&status, "Degraded"), "False AsExpected");
}

#[test]
fn a_fetch_that_has_finished_is_no_failure_while_its_job_is_not_complete() {
    let mut object = fetching(1);
    object.spec.model.cache = serde_json::from_value(json!({"mode": "shared", "size": "1Gi"})).unwrap();
    let report = |reason: &str| FetchReport { reason: reason.to_owned(), ..FetchReport::default() };
    let pod = |fetched: FetchReport| PodState {
        name: "fetch".to_owned(),
        component: "fetch".to_owned(),
        is_finished: true,
        job: job_of(&object),
        fetched: Some(fetched),
        ..PodState::default()
    };
    let status = status_of(&object, observed(&[pod(report("Fetched"))]), 1);
    assert_eq!(reason(&status, "Degraded"), "False AsExpected");
    assert_eq!(status.cache.unwrap().state, CacheState::Fetching);
    let status = status_of(&object, observed(&[pod(report("DiskFull"))]), 1);
    assert_eq!(reason(&status, "Degraded"), "True DiskFull");
}

/// The name of the Job that fetches the model of `object`.
fn job_of(object: &LlmDeployment) -> Option<String> {
    applied(object, ObservedState::default(), 1).desired.fetch_job
}

/// Returns the status of `object` when the replicas' Deployment has `condition`.
fn with_condition(object: &LlmDeployment, pods: &[PodState], condition: &Value) -> LlmDeploymentStatus {
    let mut applied = applied(object, observed(pods), 1);
    let key = (Kind::Deployment, "chat-server".to_owned());
    let mut deployment = DynamicObject::clone(&applied.objects[&key]);
    deployment.data["status"] = json!({"conditions": [condition]});
    applied.objects.insert(key, Arc::new(deployment));
    status(object, None, &applied, Timestamp::UNIX_EPOCH)
}

#[test]
fn the_progress_deadline_excludes_fetching_and_loading() {
    let exceeded = || json!({"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"});
    let starting = PodState { containers_ready: false, is_ready: false, is_routable: None, ..replica("a") };
    let object = object(1);
    for busy in [
        PodState { is_starting: true, ..starting.clone() },
        PodState { is_fetching: true, ..starting.clone() },
    ] {
        let status = with_condition(&object, &[busy], &exceeded());
        assert_eq!(reason(&status, "Degraded"), "False AsExpected");
        assert_eq!(reason(&status, "Progressing"), "True Starting");
    }
    let status = with_condition(&object, &[starting], &exceeded());
    assert_eq!(reason(&status, "Degraded"), "True DeadlineExceeded");
}

/// Returns the status of the resource when the routers' Deployment has the status `routers`.
fn with_routers(pods: &[PodState], routers: &Value) -> LlmDeploymentStatus {
    let object = object(1);
    let mut applied = applied(&object, observed(pods), 1);
    let key = (Kind::Deployment, "chat-router".to_owned());
    let mut deployment = DynamicObject::clone(&applied.objects[&key]);
    deployment.data["status"] = routers.clone();
    applied.objects.insert(key, Arc::new(deployment));
    status(&object, None, &applied, Timestamp::UNIX_EPOCH)
}

#[test]
fn a_rollout_of_routers_is_reported_until_it_is_complete_or_stuck() {
    let unschedulable = PodState {
        component: "router".to_owned(),
        problem: Some(Problem { reason: "Unschedulable".to_owned(), message: "no node".to_owned() }),
        ..PodState::default()
    };
    let pods = [replica("a"), unschedulable];
    let mut routers = json!({"readyReplicas": 2, "updatedReplicas": 1, "replicas": 3});
    let status = with_routers(&pods, &routers);
    assert_eq!(reason(&status, "Progressing"), "True ReplacingRouters");
    assert_eq!(reason(&status, "Degraded"), "False AsExpected");
    assert_eq!(reason(&status, "Ready"), "True Serving");

    routers["conditions"] =
        json!([{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]);
    let status = with_routers(&pods, &routers);
    assert_eq!(reason(&status, "Progressing"), "False DeadlineExceeded");
    assert_eq!(reason(&status, "Degraded"), "True Unschedulable");
    let status = with_routers(&pods[..1], &routers);
    assert_eq!(reason(&status, "Degraded"), "True DeadlineExceeded");

    let status = with_routers(&pods[..1], &json!({"readyReplicas": 2, "updatedReplicas": 2, "replicas": 2}));
    assert_eq!(reason(&status, "Progressing"), "False Done");
}

#[test]
fn pods_that_cannot_be_created_are_reported_with_the_reason() {
    let condition = json!({
        "type": "ReplicaFailure", "status": "True", "reason": "FailedCreate",
        "message": "pods \"chat-server-5d9f-x7k2p\" is forbidden: exceeded quota: compute",
    });
    let status = with_condition(&object(1), &[], &condition);
    assert_eq!(reason(&status, "Degraded"), "True FailedCreate");
    assert_eq!(reason(&status, "ReplicasReady"), "False FailedCreate");
    let degraded = status.conditions.iter().find(|condition| condition.type_ == "Degraded").unwrap();
    assert_eq!(
        degraded.message, "pods cannot be created: exceeded quota: compute",
        "the message omits the name of the pod, which varies"
    );
}

#[test]
fn a_fetch_whose_pod_cannot_be_created_is_reported_with_the_reason() {
    let mut object = fetching(1);
    object.spec.model.cache = serde_json::from_value(json!({"mode": "shared", "size": "1Gi"})).unwrap();
    let job = job_of(&object).unwrap();
    let problem =
        Problem { reason: "FailedCreate".to_owned(), message: "exceeded quota: compute".to_owned() };
    let failures = BTreeMap::from([(job.clone(), problem.clone())]);
    let pod = PodState {
        name: "fetch".to_owned(),
        component: "fetch".to_owned(),
        job: Some(job),
        ..PodState::default()
    };
    let status_of = |pods: &[PodState], failures: &BTreeMap<String, Problem>| {
        status_of(&object, ObservedState { job_failures: failures.clone(), ..observed(pods) }, 1)
    };
    let status = status_of(&[], &failures);
    assert_eq!(reason(&status, "ModelAvailable"), "False FailedCreate");
    assert_eq!(reason(&status, "Degraded"), "True FailedCreate");
    assert_eq!(status.phase, Phase::Degraded);
    // Once a pod exists, the failure to create pods is no longer reported.
    let status = status_of(std::slice::from_ref(&pod), &failures);
    assert_eq!(reason(&status, "ModelAvailable"), "False Pending");
    assert_eq!(reason(&status, "Degraded"), "False AsExpected");
    // A pod that cannot start delays the replicas as much as one that cannot be created.
    let stuck = PodState { problem: Some(Problem { reason: "FailedMount".to_owned(), ..problem }), ..pod };
    let status = status_of(&[stuck], &BTreeMap::new());
    assert_eq!(reason(&status, "ModelAvailable"), "False FailedMount");
    assert_eq!(reason(&status, "Degraded"), "True FailedMount");
}

#[test]
fn replicas_of_the_former_model_are_reported_as_serving() {
    let former = PodState { template_hash: "former".to_owned(), ..replica("a") };
    let status = status_of(&object(3), observed(&[former]), 1);
    let condition = status.conditions.iter().find(|condition| condition.type_ == "ReplicasReady").unwrap();
    assert_eq!(
        condition.message,
        "0 of 3 desired replicas are up to date and receive requests; outdated replicas that still receive requests: 1"
    );
    assert_eq!(reason(&status, "Available"), "True Serving");
}

#[test]
fn an_upgrade_is_rolling_until_its_pods_are_ready() {
    let object = object(1);
    let previous = |state| {
        let release = Some(ReleaseStatus { state, ..ReleaseStatus::default() });
        LlmDeploymentStatus { phase: Phase::Ready, release, ..LlmDeploymentStatus::default() }
    };
    let state = |pods: &[PodState], before: UpgradeState, upgrade: UpgradeStep| {
        let mut applied = applied(&object, observed(pods), 1);
        applied.desired.upgrade = upgrade;
        let key = (Kind::Deployment, "chat-router".to_owned());
        let mut router = DynamicObject::clone(&applied.objects[&key]);
        router.metadata.generation = Some(3);
        router.data["status"] =
            json!({"observedGeneration": 3, "updatedReplicas": 2, "replicas": 2, "readyReplicas": 2});
        applied.objects.insert(key, Arc::new(router));
        let status = status(&object, Some(&previous(before)), &applied, Timestamp::UNIX_EPOCH);
        status.release.unwrap().state
    };
    let old = [PodState { template_hash: "old".to_owned(), ..replica("a") }];
    use UpgradeState::{Current, Rolling, Waiting};
    assert_eq!(state(&old, Current, UpgradeStep::Wait(UpgradePermission::AwaitsSlot)), Waiting);
    assert_eq!(state(&old, Waiting, UpgradeStep::Start), Rolling);
    assert_eq!(state(&old, Current, UpgradeStep::StartWithoutSlot), Current);
    assert_eq!(state(&old, Rolling, UpgradeStep::StartWithoutSlot), Current, "the upgrade slot is released");
    assert_eq!(state(&old, Rolling, UpgradeStep::None), Rolling);
    assert_eq!(state(&[replica("a")], Rolling, UpgradeStep::None), Current);
    assert_eq!(state(&old, Current, UpgradeStep::None), Current, "a change by the user is not an upgrade");
}

#[test]
fn the_release_says_what_its_upgrade_waits_for() {
    let object = object(1);
    for (permission, text) in [
        (UpgradePermission::AwaitsSlot, "the upgrades of other resources"),
        (UpgradePermission::AwaitsLists, "has listed the resources of all namespaces"),
        (UpgradePermission::AwaitsApproval, "set the annotation ovfleet.dev/upgrade"),
    ] {
        let mut applied = applied(&object, observed(&[replica("a")]), 1);
        applied.desired.upgrade = UpgradeStep::Wait(permission);
        let release = status(&object, None, &applied, Timestamp::UNIX_EPOCH).release.unwrap();
        let message = release.message.unwrap();
        assert!(message.contains(text), "{message}");
    }
}

/// Checks the invariants of the status for random pods, and that computing the status again yields the same result.
#[test]
fn invariants_hold_for_random_states_of_pods() {
    use rand::{RngExt as _, SeedableRng as _};
    let seed = 7;
    let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
    for round in 0..2000 {
        let desired_replicas = rng.random_range(0..4);
        let object = if rng.random() { object(desired_replicas) } else { fetching(desired_replicas) };
        let pods: Vec<PodState> = (0..rng.random_range(0..5))
            .map(|number| {
                let is_routable = rng.random::<bool>().then(|| rng.random());
                let containers_ready = rng.random();
                PodState {
                    template_hash: if rng.random() { "new" } else { "old" }.to_owned(),
                    is_terminating: rng.random_bool(0.2),
                    is_finished: rng.random_bool(0.1),
                    containers_ready,
                    is_routable,
                    is_ready: containers_ready && is_routable == Some(true),
                    is_fetching: rng.random_bool(0.2),
                    ..replica(&format!("pod-{number}"))
                }
            })
            .collect();
        let routers = rng.random_range(0..2);
        let applied = applied(&object, observed(&pods), routers);
        let first = status(&object, None, &applied, Timestamp::UNIX_EPOCH);
        let again = status(&object, Some(&first), &applied, Timestamp::from_second(9).unwrap());
        assert_eq!(first, again, "seed {seed}, round {round}");
        assert!(first.routable_replicas <= first.replicas, "seed {seed}, round {round}");
        let is_ready = reason(&first, "Ready").starts_with("True");
        let updated = applied.observed.pods.iter().filter(|pod| {
            pod.is_ready && !pod.is_terminating && !pod.is_finished && pod.template_hash != "old"
        });
        assert_eq!(
            is_ready,
            if desired_replicas == 0 {
                first.replicas == 0
            } else {
                routers > 0 && updated.count() >= desired_replicas as usize
            },
            "seed {seed}, round {round}"
        );
        assert_eq!(first.conditions.len(), types::ALL.len());
        let problem = first.conditions.iter().find(|condition| condition.reason.is_empty());
        assert_eq!(problem.map(|condition| &condition.type_), None);
        let value: Value = serde_json::to_value(&first).unwrap();
        assert_eq!(serde_json::from_value::<LlmDeploymentStatus>(value).unwrap(), first);
    }
}

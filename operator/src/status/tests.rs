//! Statuses of fleets in all states.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::api::DynamicObject;
use operator_api::{ReleaseStatus, UpgradeState};
use serde_json::{Value, json};

use super::*;
use crate::desired::desired;
use crate::desired::names::TEMPLATE;
use crate::desired::release::{Permission, Upgrade};
use crate::manifest::Kind;
use crate::observe::Observed;
use crate::pod::{FetchReport, PodState, Problem};
use crate::validate::{Defaults, validate};

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

/// All as `observed` says, with `routers` of them ready.
fn applied(object: &LlmDeployment, mut observed: Observed, routers: i32) -> Applied {
    let defaults = Defaults::with_images("s", "r");
    let valid = validate(object, &observed, &defaults).unwrap();
    let resources = desired(&valid, &observed);
    let mut objects = BTreeMap::new();
    let mut template = String::new();
    for manifest in &resources.manifests {
        let mut live: DynamicObject = serde_json::from_value(manifest.body.clone()).unwrap();
        if manifest.name == "chat-router" && manifest.kind == Kind::Deployment {
            live.data["status"] = json!({"readyReplicas": routers});
        }
        if manifest.name == "chat-server" && manifest.kind == Kind::Deployment {
            let labels = &manifest.body["spec"]["template"]["metadata"]["labels"];
            template = labels[TEMPLATE].as_str().unwrap_or_default().to_owned();
        }
        objects.insert((manifest.kind, manifest.name.clone()), Arc::new(live));
    }
    for pod in observed.pods.iter_mut().filter(|pod| pod.template == "new") {
        pod.template.clone_from(&template);
    }
    Applied { valid, resources, objects, observed, failures: Vec::new() }
}

fn replica(name: &str) -> PodState {
    PodState {
        name: name.to_owned(),
        component: "server".to_owned(),
        template: "new".to_owned(),
        containers_ready: true,
        is_ready: true,
        is_routable: Some(true),
        ..PodState::default()
    }
}

fn seen(pods: &[PodState]) -> Observed {
    Observed { pods: pods.to_vec(), ..Observed::default() }
}

fn told(object: &LlmDeployment, observed: Observed, routers: i32) -> LlmDeploymentStatus {
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
    let status = told(&object, seen(&both), 1);
    assert_eq!((status.phase, status.ready.as_str()), (Phase::Ready, "2/2"));
    assert_eq!(reason(&status, "Ready"), "True Serving");
    assert_eq!(reason(&status, "Progressing"), "False Done");

    let waiting = PodState { is_routable: None, is_ready: false, ..replica("b") };
    let status = told(&object, seen(&[replica("a"), waiting]), 1);
    assert_eq!(reason(&status, "Ready"), "False NotAdmitted");
    assert_eq!(status.phase, Phase::Updating);

    let status = told(&object, seen(&both), 0);
    assert_eq!(reason(&status, "Ready"), "False RouterStarting");

    // Two replicas of what was before are not what is wanted now.
    let old = both.clone().map(|pod| PodState { template: "old".to_owned(), ..pod });
    let status = told(&object, seen(&old), 1);
    assert_eq!(reason(&status, "Ready"), "False Replacing");
    assert_eq!((status.ready_replicas, status.updated_replicas, status.phase), (2, 0, Phase::Updating));
}

/// The Deployment stays as it is until the new model is there: what it runs is not what is wanted any more.
#[test]
fn replicas_of_a_former_model_are_not_ready_for_the_one_that_is_being_fetched() {
    let mut object = fetching(1);
    object.spec.model.cache = serde_json::from_value(json!({"mode": "shared", "size": "1Gi"})).unwrap();
    let former = PodState { template: "former".to_owned(), ..replica("a") };
    let mut applied = applied(&object, seen(&[former]), 1);
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
fn what_leaves_is_not_counted_but_shown() {
    let leaving = PodState { is_terminating: true, ..replica("b") };
    let status = told(&object(1), seen(&[replica("a"), leaving]), 1);
    assert_eq!((status.replicas, status.draining_replicas, status.phase), (1, 1, Phase::Ready));
}

#[test]
fn a_problem_is_named_by_what_most_replicas_have() {
    let with = |name: &str, reason: &str| PodState {
        containers_ready: false,
        is_ready: false,
        is_routable: None,
        problem: Some(Problem { reason: reason.to_owned(), message: "why".to_owned() }),
        ..replica(name)
    };
    let pods = [with("a", "Crashing"), with("b", "OOMKilled"), with("c", "OOMKilled")];
    let status = told(&object(3), seen(&pods), 1);
    assert_eq!(reason(&status, "Degraded"), "True OOMKilled");
    assert_eq!(reason(&status, "Ready"), "False OOMKilled");
    assert_eq!(status.phase, Phase::Degraded);
}

#[test]
fn how_far_a_fetch_is_and_how_it_ended_is_told() {
    let object = fetching(1);
    let starting = PodState { containers_ready: false, is_ready: false, is_routable: None, ..replica("a") };
    let mut observed = seen(&[PodState { is_fetching: true, ..starting.clone() }]);
    observed.pod_reports.progress =
        Some(crate::fleet::Progress { bytes: 1 << 29, bytes_total: Some(1 << 30) });
    let status = told(&object, observed, 1);
    assert_eq!(status.phase, Phase::Fetching);
    assert_eq!(status.cache.unwrap().progress.as_deref(), Some("512.0 MiB of 1.0 GiB"));

    let report = |reason: &str| FetchReport { reason: reason.to_owned(), ..FetchReport::default() };
    let failed = PodState { fetched: Some(report("DigestMismatch")), ..starting };
    let status = told(&object, seen(&[failed]), 1);
    assert_eq!(reason(&status, "ModelAvailable"), "False DigestMismatch");
    assert_eq!(reason(&status, "Degraded"), "True DigestMismatch");

    let digest = Some("sha256:1".to_owned());
    let whole = PodState {
        fetched: Some(FetchReport { digest: digest.clone(), ..report("Fetched") }),
        ..replica("a")
    };
    let status = told(&object, seen(&[whole]), 1);
    assert_eq!(
        (status.model_digest.clone(), reason(&status, "ModelAvailable")),
        (digest, "True Fetched".to_owned())
    );
}

#[test]
fn a_status_that_differs_in_time_only_says_the_same() {
    let object = object(1);
    let applied = applied(&object, seen(&[replica("a")]), 1);
    let first = status(&object, None, &applied, Timestamp::UNIX_EPOCH);
    let later = Timestamp::from_second(1000).unwrap();
    let again = status(&object, Some(&first), &applied, later);
    assert_eq!(first, again, "times are kept for what has not changed");
    let anew = status(&object, None, &applied, later);
    assert_ne!(first, anew);
    assert!(says_the_same(&first, &anew));
}

#[test]
fn a_refused_resource_keeps_what_was_known_of_it() {
    let object = object(1);
    let before = told(&object, seen(&[replica("a")]), 1);
    let status = refused(&object, Some(&before), &Invalid::Source, Timestamp::UNIX_EPOCH);
    assert_eq!((status.phase, status.ready.as_str(), status.ready_replicas), (Phase::Refused, "1/1", 1));
    assert_eq!(reason(&status, "Accepted"), "False InvalidSource");
    assert_eq!(reason(&status, "ReplicasReady"), "True AllReady");
    assert_eq!(status.conditions.len(), conditions::ALL.len());
    let names: Vec<&str> = status.conditions.iter().map(|condition| condition.type_.as_str()).collect();
    assert_eq!(names, conditions::ALL);
}

#[test]
fn suspended_is_nothing_wanted_and_nothing_there() {
    let mut object = object(2);
    object.spec.suspend = true;
    let status = told(&object, Observed::default(), 0);
    assert_eq!((status.phase, reason(&status, "Ready")), (Phase::Suspended, "True ScaledToZero".to_owned()));
    assert_eq!(reason(&status, "Available"), "False ScaledToZero");
    assert_eq!(reason(&status, "Degraded"), "False AsWanted");
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
    let status = told(&object, seen(&[pod(report("Fetched"))]), 1);
    assert_eq!(reason(&status, "Degraded"), "False AsWanted");
    assert_eq!(status.cache.unwrap().state, CacheState::Fetching);
    let status = told(&object, seen(&[pod(report("DiskFull"))]), 1);
    assert_eq!(reason(&status, "Degraded"), "True DiskFull");
}

/// The name of the Job that fetches for `object`.
fn job_of(object: &LlmDeployment) -> Option<String> {
    let applied = applied(object, Observed::default(), 1);
    crate::desired::fetch::job_name(&applied.valid, &applied.observed)
}

/// As the conditions of the Deployment of the replicas say.
fn with_condition(object: &LlmDeployment, pods: &[PodState], condition: &Value) -> LlmDeploymentStatus {
    let mut applied = applied(object, seen(pods), 1);
    let key = (Kind::Deployment, "chat-server".to_owned());
    let mut deployment = DynamicObject::clone(&applied.objects[&key]);
    deployment.data["status"] = json!({"conditions": [condition]});
    applied.objects.insert(key, Arc::new(deployment));
    status(object, None, &applied, Timestamp::UNIX_EPOCH)
}

#[test]
fn loading_a_model_for_long_is_no_lack_of_progress() {
    let exceeded = || json!({"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"});
    let starting = PodState { containers_ready: false, is_ready: false, is_routable: None, ..replica("a") };
    let object = object(1);
    for busy in [
        PodState { is_starting: true, ..starting.clone() },
        PodState { is_fetching: true, ..starting.clone() },
    ] {
        let status = with_condition(&object, &[busy], &exceeded());
        assert_eq!(reason(&status, "Degraded"), "False AsWanted");
        assert_eq!(reason(&status, "Progressing"), "True Starting");
    }
    let status = with_condition(&object, &[starting], &exceeded());
    assert_eq!(reason(&status, "Degraded"), "True DeadlineExceeded");
}

#[test]
fn pods_that_may_not_be_created_are_reported_with_the_reason() {
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
        "without the name, which varies"
    );
}

#[test]
fn a_fetch_whose_pod_may_not_be_created_is_reported_with_the_reason() {
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
    let told = |pods: &[PodState], failures: &BTreeMap<String, Problem>| {
        told(&object, Observed { job_failures: failures.clone(), ..seen(pods) }, 1)
    };
    let status = told(&[], &failures);
    assert_eq!(reason(&status, "ModelAvailable"), "False FailedCreate");
    assert_eq!(reason(&status, "Degraded"), "True FailedCreate");
    assert_eq!(status.phase, Phase::Degraded);
    // Once a pod exists, the failure is over.
    let status = told(std::slice::from_ref(&pod), &failures);
    assert_eq!(reason(&status, "ModelAvailable"), "False Pending");
    assert_eq!(reason(&status, "Degraded"), "False AsWanted");
    // A pod that cannot start holds up the replicas as much as one that cannot be created.
    let stuck = PodState { problem: Some(Problem { reason: "FailedMount".to_owned(), ..problem }), ..pod };
    let status = told(&[stuck], &BTreeMap::new());
    assert_eq!(reason(&status, "ModelAvailable"), "False FailedMount");
    assert_eq!(reason(&status, "Degraded"), "True FailedMount");
}

#[test]
fn replicas_of_the_former_model_are_said_to_serve() {
    let former = PodState { template: "former".to_owned(), ..replica("a") };
    let status = told(&object(3), seen(&[former]), 1);
    let condition = status.conditions.iter().find(|condition| condition.type_ == "ReplicasReady").unwrap();
    assert_eq!(
        condition.message,
        "0 of 3 replicas are up to date and receive requests; 1 outdated ones receive requests until they are replaced"
    );
    assert_eq!(reason(&status, "Available"), "True Serving");
}

#[test]
fn an_upgrade_is_rolling_until_its_pods_work() {
    let object = object(1);
    let previous = |state| {
        let release = Some(ReleaseStatus { state, ..ReleaseStatus::default() });
        LlmDeploymentStatus { phase: Phase::Ready, release, ..LlmDeploymentStatus::default() }
    };
    let state = |pods: &[PodState], before: UpgradeState, upgrade: Upgrade| {
        let mut applied = applied(&object, seen(pods), 1);
        applied.resources.upgrade = upgrade;
        let key = (Kind::Deployment, "chat-router".to_owned());
        let mut router = DynamicObject::clone(&applied.objects[&key]);
        router.metadata.generation = Some(3);
        router.data["status"] =
            json!({"observedGeneration": 3, "updatedReplicas": 2, "replicas": 2, "readyReplicas": 2});
        applied.objects.insert(key, Arc::new(router));
        let status = status(&object, Some(&previous(before)), &applied, Timestamp::UNIX_EPOCH);
        status.release.unwrap().state
    };
    let old = [PodState { template: "old".to_owned(), ..replica("a") }];
    use UpgradeState::{Current, Rolling, Waiting};
    assert_eq!(state(&old, Current, Upgrade::Waits(Permission::AwaitsTurn)), Waiting);
    assert_eq!(state(&old, Waiting, Upgrade::Begins), Rolling);
    assert_eq!(state(&old, Rolling, Upgrade::None), Rolling);
    assert_eq!(state(&[replica("a")], Rolling, Upgrade::None), Current);
    assert_eq!(state(&old, Current, Upgrade::None), Current, "a change by the user is no upgrade");
}

/// Whatever pods there are: a status keeps its promises, and the next one says the same.
#[test]
fn no_state_of_pods_breaks_a_promise() {
    use rand::{RngExt as _, SeedableRng as _};
    let seed = 7;
    let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
    for round in 0..2000 {
        let wanted = rng.random_range(0..4);
        let object = if rng.random() { object(wanted) } else { fetching(wanted) };
        let pods: Vec<PodState> = (0..rng.random_range(0..5))
            .map(|number| {
                let is_routable = rng.random::<bool>().then(|| rng.random());
                let containers_ready = rng.random();
                PodState {
                    template: if rng.random() { "new" } else { "old" }.to_owned(),
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
        let applied = applied(&object, seen(&pods), routers);
        let first = status(&object, None, &applied, Timestamp::UNIX_EPOCH);
        let again = status(&object, Some(&first), &applied, Timestamp::from_second(9).unwrap());
        assert_eq!(first, again, "seed {seed}, round {round}");
        assert!(first.routable_replicas <= first.replicas, "seed {seed}, round {round}");
        let is_ready = reason(&first, "Ready").starts_with("True");
        let updated =
            applied.observed.pods.iter().filter(|pod| {
                pod.is_ready && !pod.is_terminating && !pod.is_finished && pod.template != "old"
            });
        assert_eq!(
            is_ready,
            if wanted == 0 { first.replicas == 0 } else { routers > 0 && updated.count() >= wanted as usize },
            "seed {seed}, round {round}"
        );
        assert_eq!(first.conditions.len(), conditions::ALL.len());
        let problem = first.conditions.iter().find(|condition| condition.reason.is_empty());
        assert_eq!(problem.map(|condition| &condition.type_), None);
        let value: Value = serde_json::to_value(&first).unwrap();
        assert_eq!(serde_json::from_value::<LlmDeploymentStatus>(value).unwrap(), first);
    }
}

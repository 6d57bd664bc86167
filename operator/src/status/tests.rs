//! Statuses of fleets in all states.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::*;
use crate::desired::desired;
use crate::desired::names::TEMPLATE;
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
    let defaults =
        Defaults { server_image: "s".to_owned(), router_image: "r".to_owned(), image_pull_policy: None };
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
    observed.told.progress = Some(crate::fleet::Progress { bytes: 1 << 29, bytes_total: Some(1 << 30) });
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
    assert_eq!(status.conditions.len(), 7);
    let names: Vec<&str> = status.conditions.iter().map(|condition| condition.type_.as_str()).collect();
    assert_eq!(names, conditions::ALL);
}

#[test]
fn suspended_is_nothing_wanted_and_nothing_there() {
    let mut object = object(2);
    object.spec.suspend = true;
    let status = told(&object, Observed::default(), 0);
    assert_eq!((status.phase, reason(&status, "Ready")), (Phase::Suspended, "False ScaledToZero".to_owned()));
    assert_eq!(reason(&status, "Degraded"), "False AsWanted");
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
            routers > 0 && wanted > 0 && updated.count() >= wanted as usize,
            "seed {seed}, round {round}"
        );
        assert_eq!(first.conditions.len(), 7);
        let problem = first.conditions.iter().find(|condition| condition.reason.is_empty());
        assert_eq!(problem.map(|condition| &condition.type_), None);
        let value: Value = serde_json::to_value(&first).unwrap();
        assert_eq!(serde_json::from_value::<LlmDeploymentStatus>(value).unwrap(), first);
    }
}

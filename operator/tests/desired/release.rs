//! What a new release leads to, and which commit of a model is fetched: what may restart replicas, and what may not.

use std::sync::Arc;

use operator::desired::release::{Permission, Upgrade};
use operator::desired::{Resources, desired};
use operator::manifest::Kind;
use operator::observe::Observed;
use operator::pod::{FetchReport, PodState};
use operator::validate::{Defaults, validate};
use operator_api::LlmDeployment;
use serde_json::json;

use crate::{deployment, fixture, live, made, template};

/// What the operator of another release leads to while `object` runs as this one has made it.
fn upgraded(object: &LlmDeployment, upgrade: Permission, image: &str) -> (Resources, Resources) {
    let before = made(object, &Observed::default());
    let observed = Observed { owned: live(&before, Kind::Deployment), upgrade, ..Observed::default() };
    let defaults = Defaults::with_images(image, "ovfleet/router:1");
    let mut valid = validate(object, &observed, &defaults).unwrap();
    valid.image_pull_policy = Some("IfNotPresent".to_owned());
    (before, desired(&valid, &observed))
}

#[test]
fn a_new_default_image_waits_for_its_turn_and_a_change_by_the_user_does_not() {
    let mut object = fixture("small");
    let (before, after) = upgraded(&object, Permission::AwaitsTurn, "ovfleet/server:2");
    assert_eq!(after.upgrade, Upgrade::Waits(Permission::AwaitsTurn));
    assert_eq!(template(&after, "small-server"), template(&before, "small-server"));
    assert_eq!(after.template, before.template, "replicas are as they should be meanwhile");

    let (_, after) = upgraded(&object, Permission::Granted, "ovfleet/server:2");
    assert_eq!(after.upgrade, Upgrade::Begins);
    let image = |resources: &Resources| {
        template(resources, "small-server")["spec"]["containers"][0]["image"].as_str().unwrap().to_owned()
    };
    assert_eq!(image(&after), "ovfleet/server:2");

    // The user asks for other pods, which are of the new release then.
    let before = made(&object, &Observed::default());
    let observed = Observed {
        owned: live(&before, Kind::Deployment),
        upgrade: Permission::AwaitsTurn,
        ..Observed::default()
    };
    object.spec.engine.max_num_seqs = 7;
    let defaults = Defaults::with_images("ovfleet/server:2", "ovfleet/router:1");
    let valid = validate(&object, &observed, &defaults).unwrap();
    let after = desired(&valid, &observed);
    assert_eq!(image(&after), "ovfleet/server:2");
    // Scaling restarts nothing.
    let mut object = fixture("small");
    object.spec.replicas = 9;
    let valid = validate(&object, &observed, &defaults).unwrap();
    let after = desired(&valid, &observed);
    assert_eq!(deployment(&after, "small-server")["spec"]["replicas"], 9);
    assert_eq!(template(&after, "small-server"), template(&before, "small-server"));
}

#[test]
fn an_image_that_the_resource_names_is_no_upgrade() {
    let mut object = fixture("small");
    object.spec.engine.image = Some("mine:1".to_owned());
    let (_, after) = upgraded(&object, Permission::AwaitsTurn, "ovfleet/server:2");
    assert_eq!(after.upgrade, Upgrade::None);
}

#[test]
fn routers_that_cannot_report_admission_are_replaced_at_once() {
    let object = fixture("small");
    let before = made(&object, &Observed::default());
    let mut observed = Observed {
        owned: live(&before, Kind::Deployment),
        upgrade: Permission::AwaitsTurn,
        ..Observed::default()
    };
    for (key, deployment) in &mut observed.owned {
        let live = Arc::make_mut(deployment);
        live.data["spec"]["template"]["metadata"]["labels"]["ovfleet.dev/template"] = json!("former");
        if key.1 == "small-router" {
            live.data["spec"]["template"]["spec"]["containers"][0]["ports"] =
                json!([{"name": "http", "containerPort": 8000}]);
        }
    }
    let after = made(&object, &observed);
    assert_eq!(template(&after, "small-router"), template(&before, "small-router"));
    let label = &template(&after, "small-server")["metadata"]["labels"]["ovfleet.dev/template"];
    assert_eq!(label, "former");
}

/// Takes the replica token from the Deployments, as a former release of the operator left them.
fn without_token(observed: &mut Observed) {
    for deployment in observed.owned.values_mut() {
        let template = &mut Arc::make_mut(deployment).data["spec"]["template"];
        template["metadata"]["labels"]["ovfleet.dev/template"] = json!("former");
        let volumes = template["spec"]["volumes"].as_array_mut().unwrap();
        volumes.retain(|volume| volume["name"] != "replica-token");
    }
}

#[test]
fn routers_that_send_no_token_are_replaced_together_with_replicas_that_need_one() {
    let mut object = fixture("small");
    let before = made(&object, &Observed::default());
    let mut observed = Observed {
        owned: live(&before, Kind::Deployment),
        upgrade: Permission::AwaitsApproval,
        ..Observed::default()
    };
    without_token(&mut observed);
    let is_former = |resources: &Resources, name: &str| {
        template(resources, name)["metadata"]["labels"]["ovfleet.dev/template"] == "former"
    };
    // An upgrade of both waits.
    let waiting = made(&object, &observed);
    assert_eq!(waiting.upgrade, Upgrade::Waits(Permission::AwaitsApproval));
    assert!(is_former(&waiting, "small-server") && is_former(&waiting, "small-router"));
    // The user changes the replicas: no former router could reach the new ones.
    object.spec.engine.max_num_seqs = 7;
    let changed = made(&object, &observed);
    assert!(!is_former(&changed, "small-server") && !is_former(&changed, "small-router"));
    // Routers may be the first: replicas that need no token ignore it.
    let mut object = fixture("small");
    object.spec.observability.access_log = true;
    let changed = made(&object, &observed);
    assert!(is_former(&changed, "small-server") && !is_former(&changed, "small-router"));
}

#[test]
fn the_commit_that_the_first_replica_found_is_what_all_others_fetch() {
    const COMMIT: &str = "0123456789012345678901234567890123456789";
    let object = fixture("small");
    let mut observed = Observed::default();
    let first = made(&object, &observed);
    let revisions = |resources: &Resources| {
        let map = resources.manifests.iter().find(|made| made.name == "small-revisions").unwrap();
        map.body["data"].clone()
    };
    let data = revisions(&first);
    let (key, revision) = data.as_object().unwrap().iter().next().unwrap();
    assert_eq!(revision, "main");
    let fetch = &template(&first, "small-server")["spec"]["initContainers"][0];
    assert!(
        fetch["args"].as_array().unwrap().contains(&json!("--hf-revision=$(OVFLEET_HF_REVISION)")),
        "{fetch}"
    );
    assert_eq!(fetch["env"][0]["valueFrom"]["configMapKeyRef"]["key"], key.as_str());

    let replica = |revision: &str| PodState {
        component: "server".to_owned(),
        revision_key: Some(key.clone()),
        fetched: Some(FetchReport {
            reason: FetchReport::FETCHED.to_owned(),
            revision: Some(revision.to_owned()),
            ..FetchReport::default()
        }),
        ..PodState::default()
    };
    observed.pods = vec![replica(COMMIT)];
    let second = made(&object, &observed);
    assert_eq!(revisions(&second)[key], COMMIT);
    assert_eq!(template(&second, "small-server"), template(&first, "small-server"), "nothing restarts");

    // It stays, whatever others find and however few are left of those that found it.
    observed.owned = live(&second, Kind::ConfigMap);
    observed.pods = vec![replica("ffffffffffffffffffffffffffffffffffffffff")];
    assert_eq!(revisions(&made(&object, &observed))[key], COMMIT);
    observed.pods.clear();
    assert_eq!(revisions(&made(&object, &observed))[key], COMMIT);

    // Another revision is looked up anew, and replicas of the former one can still start again.
    let mut next = object;
    next.spec.model.source.hf.as_mut().unwrap().revision = "v2".to_owned();
    observed.pods = vec![replica(COMMIT)];
    let data = revisions(&made(&next, &observed));
    assert_eq!((data.as_object().unwrap().len(), data[key].as_str()), (2, Some(COMMIT)));
    assert!(data.as_object().unwrap().values().any(|revision| revision == "v2"), "{data}");
}

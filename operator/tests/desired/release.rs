//! Tests of upgrades to a new release and of pinned commits: which changes restart replicas, and which do not.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use operator::desired::release::{UpgradePermission, UpgradeStep};
use operator::desired::{DesiredState, desired};
use operator::manifest::Kind;
use operator::observe::ObservedState;
use operator::pod::{FetchReport, PodState};
use operator::validate::{Defaults, validate};
use operator_api::{LlmDeployment, Model};
use serde_json::json;

use crate::{after_fetch, deployment, fixture, live, render, template, valid};

/// The desired state of `object` before and after the default image of the server changes to `image`.
fn upgraded(
    object: &LlmDeployment,
    permission: UpgradePermission,
    image: &str,
) -> (DesiredState, DesiredState) {
    let before = render(object, &ObservedState::default());
    let observed = ObservedState { owned: live(&before, Kind::Deployment), ..ObservedState::default() };
    let defaults = Defaults::with_images(image, "ovfleet/router:1");
    let mut valid = validate(object, &observed, &defaults).unwrap();
    valid.image_pull_policy = Some("IfNotPresent".to_owned());
    (before, desired(&valid, &observed, permission))
}

#[test]
fn a_new_default_image_waits_for_a_slot_and_a_change_by_the_user_does_not() {
    let mut object = fixture("small");
    let (before, after) = upgraded(&object, UpgradePermission::AwaitsSlot, "ovfleet/server:2");
    assert_eq!(after.upgrade, UpgradeStep::Wait(UpgradePermission::AwaitsSlot));
    assert_eq!(template(&after, "small-server"), template(&before, "small-server"));
    assert_eq!(after.template_hash, before.template_hash, "replicas count as updated meanwhile");

    let (_, after) = upgraded(&object, UpgradePermission::Granted, "ovfleet/server:2");
    assert_eq!(after.upgrade, UpgradeStep::Start);
    let image = |resources: &DesiredState| {
        template(resources, "small-server")["spec"]["containers"][0]["image"].as_str().unwrap().to_owned()
    };
    assert_eq!(image(&after), "ovfleet/server:2");
    let (_, after) = upgraded(&object, UpgradePermission::GrantedWithoutSlot, "ovfleet/server:2");
    assert_eq!(
        (after.upgrade, image(&after)),
        (UpgradeStep::StartWithoutSlot, "ovfleet/server:2".to_owned())
    );
    assert_eq!(after.available_release, None, "nothing waits");

    // A change by the user also performs the upgrade.
    let before = render(&object, &ObservedState::default());
    let observed = ObservedState { owned: live(&before, Kind::Deployment), ..ObservedState::default() };
    object.spec.engine.max_num_seqs = 7;
    let defaults = Defaults::with_images("ovfleet/server:2", "ovfleet/router:1");
    let valid = validate(&object, &observed, &defaults).unwrap();
    let after = desired(&valid, &observed, UpgradePermission::AwaitsSlot);
    assert_eq!(image(&after), "ovfleet/server:2");
    // Scaling restarts no pods.
    let mut object = fixture("small");
    object.spec.replicas = 9;
    let valid = validate(&object, &observed, &defaults).unwrap();
    let after = desired(&valid, &observed, UpgradePermission::AwaitsSlot);
    assert_eq!(deployment(&after, "small-server")["spec"]["replicas"], 9);
    assert_eq!(template(&after, "small-server"), template(&before, "small-server"));
}

#[test]
fn a_change_that_replaces_no_pods_does_not_include_the_upgrade() {
    let mut object = fixture("full");
    object.spec.engine.image = None;
    let mut observed = after_fetch(&render(&object, &ObservedState::default()));
    let before = render(&object, &observed);
    observed.owned.extend(live(&before, Kind::Deployment));
    let upgrade_waiting = |change: fn(&mut Model), observed: &ObservedState| {
        let mut object = object.clone();
        change(&mut object.spec.model);
        let mut defaults = Defaults::with_images("ovfleet/server:2", "ovfleet/router:1");
        defaults.image_pull_policy = Some("IfNotPresent".to_owned());
        let valid = validate(&object, observed, &defaults).unwrap();
        desired(&valid, observed, UpgradePermission::AwaitsApproval)
    };
    let unrendered: [fn(&mut Model); 4] = [
        |_| {},
        |model| model.cache.as_mut().unwrap().size = Some(Quantity("50Gi".to_owned())),
        |model| model.credentials_secret_ref = None,
        |model| model.fetch = None,
    ];
    for change in unrendered {
        let after = upgrade_waiting(change, &observed);
        assert_eq!(after.upgrade, UpgradeStep::Wait(UpgradePermission::AwaitsApproval));
        assert_eq!(template(&after, "full-server"), template(&before, "full-server"));
    }
    // An earlier version recorded a digest of all settings of the model.
    let former = valid(&object, &observed).inputs.former_server;
    let key = (Kind::Deployment, "full-server".to_owned());
    let live_server = Arc::make_mut(observed.owned.get_mut(&key).unwrap());
    let inputs =
        live_server.metadata.annotations.as_mut().unwrap().insert("ovfleet.dev/inputs".to_owned(), former);
    assert_eq!(inputs, Some(valid(&object, &observed).inputs.server));
    let after = upgrade_waiting(|_| {}, &observed);
    assert_eq!(template(&after, "full-server"), template(&before, "full-server"));
    // A change that replaces pods also performs the upgrade.
    let after = upgrade_waiting(|model| model.aliases.clear(), &observed);
    assert_eq!(template(&after, "full-server")["spec"]["containers"][0]["image"], "ovfleet/server:2");
}

#[test]
fn an_image_that_the_resource_names_is_no_upgrade() {
    let mut object = fixture("small");
    object.spec.engine.image = Some("mine:1".to_owned());
    let (_, after) = upgraded(&object, UpgradePermission::AwaitsSlot, "ovfleet/server:2");
    assert_eq!(after.upgrade, UpgradeStep::None);
}

#[test]
fn routers_that_cannot_report_admission_are_replaced_at_once() {
    let object = fixture("small");
    let before = render(&object, &ObservedState::default());
    let mut observed = ObservedState { owned: live(&before, Kind::Deployment), ..ObservedState::default() };
    for (key, deployment) in &mut observed.owned {
        let live = Arc::make_mut(deployment);
        live.data["spec"]["template"]["metadata"]["labels"]["ovfleet.dev/template"] = json!("former");
        if key.1 == "small-router" {
            live.data["spec"]["template"]["spec"]["containers"][0]["ports"] =
                json!([{"name": "http", "containerPort": 8000}]);
        }
    }
    let after = desired(&valid(&object, &observed), &observed, UpgradePermission::AwaitsSlot);
    assert_eq!(template(&after, "small-router"), template(&before, "small-router"));
    let label = &template(&after, "small-server")["metadata"]["labels"]["ovfleet.dev/template"];
    assert_eq!(label, "former");
}

/// Removes the replica token from the Deployments, as if an earlier release of the operator had created them.
fn without_token(observed: &mut ObservedState) {
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
    let before = render(&object, &ObservedState::default());
    let mut observed = ObservedState { owned: live(&before, Kind::Deployment), ..ObservedState::default() };
    without_token(&mut observed);
    let waiting = |object: &LlmDeployment| {
        let permission = UpgradePermission::AwaitsApproval;
        desired(&valid(object, &observed), &observed, permission)
    };
    let is_former = |resources: &DesiredState, name: &str| {
        template(resources, name)["metadata"]["labels"]["ovfleet.dev/template"] == "former"
    };
    // An upgrade of both replicas and routers waits.
    let upgrade = waiting(&object);
    assert_eq!(upgrade.upgrade, UpgradeStep::Wait(UpgradePermission::AwaitsApproval));
    assert!(is_former(&upgrade, "small-server") && is_former(&upgrade, "small-router"));
    // A change by the user replaces the replicas. The new ones would reject the requests of the former routers, so the
    // routers are replaced too.
    object.spec.engine.max_num_seqs = 7;
    let changed = waiting(&object);
    assert!(!is_former(&changed, "small-server") && !is_former(&changed, "small-router"));
    // Routers can be upgraded first, because the former replicas ignore the token that the new routers send.
    let mut object = fixture("small");
    object.spec.observability.access_log = true;
    let changed = waiting(&object);
    assert!(is_former(&changed, "small-server") && !is_former(&changed, "small-router"));
}

#[test]
fn all_replicas_fetch_the_commit_that_the_first_one_has_fetched() {
    const COMMIT: &str = "0123456789012345678901234567890123456789";
    let object = fixture("small");
    let mut observed = ObservedState::default();
    let first = render(&object, &observed);
    let revisions = |resources: &DesiredState| {
        let map = resources.manifests.iter().find(|manifest| manifest.name == "small-revisions").unwrap();
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
    let second = render(&object, &observed);
    assert_eq!(revisions(&second)[key], COMMIT);
    assert_eq!(template(&second, "small-server"), template(&first, "small-server"), "nothing restarts");

    // The commit remains pinned, even if other replicas report another one or the first replica is deleted.
    observed.owned = live(&second, Kind::ConfigMap);
    observed.pods = vec![replica("ffffffffffffffffffffffffffffffffffffffff")];
    assert_eq!(revisions(&render(&object, &observed))[key], COMMIT);
    observed.pods.clear();
    assert_eq!(revisions(&render(&object, &observed))[key], COMMIT);

    // Another revision has its own entry, and the entry of the former one remains for replicas that restart.
    let mut next = object;
    next.spec.model.source.hf.as_mut().unwrap().revision = "v2".to_owned();
    observed.pods = vec![replica(COMMIT)];
    let data = revisions(&render(&next, &observed));
    assert_eq!((data.as_object().unwrap().len(), data[key].as_str()), (2, Some(COMMIT)));
    assert!(data.as_object().unwrap().values().any(|revision| revision == "v2"), "{data}");
}

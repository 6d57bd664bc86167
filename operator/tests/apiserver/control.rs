//! Tests of the lifecycle of resources, and of the repair of objects that others change.

use k8s_openapi::api::core::v1::{Event, Pod, Service};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use operator::manifest::Kind;
use operator_api::{CacheState, Phase};
use serde_json::{Value, json};

use crate::support::{Stage, eventually, replace_replicas, smallest};

fn merge(mut spec: Value, more: Value) -> Value {
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    spec
}

#[tokio::test]
async fn a_resource_becomes_ready_can_change_and_is_deleted_completely() {
    let mut stage = Stage::new("life").await;
    stage.apply("chat", merge(smallest(), json!({"replicas": 2}))).await.unwrap();
    let object = stage.until("chat", "Ready=True").await;
    let status = object.status.unwrap();
    assert_eq!((status.phase, status.ready.as_str(), status.routable_replicas), (Phase::Ready, "2/2", 2));
    assert!(stage.owned().await.len() >= 12, "{:?}", stage.owned().await);

    // `kubectl scale` and autoscalers use the subresource `scale`.
    let scale = json!({"spec": {"replicas": 3}});
    let parameters = PatchParams::default();
    stage.resources().patch_scale("chat", &parameters, &Patch::Merge(&scale)).await.unwrap();
    let object = stage.until("chat", "Ready=True").await;
    assert_eq!(object.status.unwrap().ready, "3/3");

    // A changed command line changes the pod template.
    let spec = merge(smallest(), json!({"replicas": 2, "engine": {"maxNumSeqs": 8}}));
    stage.apply("chat", spec).await.unwrap();
    let object = stage.until("chat", "Ready=True").await;
    assert_eq!(object.status.unwrap().updated_replicas, 2);

    stage.apply("chat", merge(smallest(), json!({"suspend": true}))).await.unwrap();
    let suspended = async || {
        let status = stage.resources().get("chat").await.unwrap().status?;
        (status.phase == Phase::Suspended && status.replicas == 0).then_some(())
    };
    eventually(suspended).await.expect("the resource is suspended");

    let events: Api<Event> = Api::namespaced(stage.client.clone(), &stage.namespace);
    let is_published = async || {
        let list = events.list(&ListParams::default()).await.unwrap();
        let mut of =
            list.items.iter().filter(|event| event.involved_object.kind.as_deref() == Some("LLMDeployment"));
        of.any(|event| event.reason.as_deref() == Some("Serving")).then_some(())
    };
    eventually(is_published).await.expect("an event reports that the resource is ready");

    stage.resources().delete("chat", &DeleteParams::default()).await.unwrap();
    eventually(async || stage.owned().await.is_empty().then_some(())).await.expect("nothing is left");
    stage.check();
}

#[tokio::test]
async fn changed_fields_are_repaired_and_added_fields_are_kept() {
    let stage = Stage::new("drift").await;
    stage.apply("chat", smallest()).await.unwrap();
    stage.until("chat", "Ready=True").await;
    let parameters = PatchParams::default();
    let written = stage.metrics.api_calls("apply_status", "LLMDeployment");

    for kind in Kind::BUILT_IN {
        let api = stage.objects(kind);
        let names: Vec<String> = api
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
            .iter()
            .filter(|object| !object.owner_references().is_empty())
            .map(ResourceExt::name_any)
            .collect();
        for name in names {
            // The operator restores its own label and does not change the other one.
            let label =
                json!({"metadata": {"labels": {"app.kubernetes.io/managed-by": "me", "mine": "too"}}});
            api.patch(&name, &parameters, &Patch::Merge(&label)).await.unwrap();
            let repaired = async || {
                let labels = api.get(&name).await.ok()?.labels().clone();
                let is_back = labels.get("app.kubernetes.io/managed-by").map(String::as_str)
                    == Some("ovfleet-operator");
                (is_back && labels.contains_key("mine")).then_some(())
            };
            eventually(repaired).await.unwrap_or_else(|| panic!("{} {name} is not repaired", kind.name()));
            if kind == Kind::Deployment {
                continue;
            }
            let uid = api.get(&name).await.unwrap().uid();
            api.delete(&name, &DeleteParams::default()).await.unwrap();
            let again = async || (api.get_opt(&name).await.unwrap()?.uid() != uid).then_some(());
            eventually(again).await.unwrap_or_else(|| panic!("{} {name} is not created again", kind.name()));
        }
    }
    for (kind, name, change, pointer, expected) in [
        (Kind::Deployment, "chat-server", json!({"spec": {"replicas": 9}}), "/spec/replicas", json!(1)),
        (
            Kind::ConfigMap,
            "chat-router",
            json!({"data": {"router.yaml": "policy: best"}}),
            "/data/router.yaml",
            json!("policy: kv"),
        ),
        (
            Kind::Service,
            "chat",
            json!({"spec": {"selector": {"app.kubernetes.io/component": "x"}}}),
            "/spec/selector/app.kubernetes.io~1component",
            json!("router"),
        ),
        (
            Kind::Role,
            "chat-router",
            json!({"rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]}),
            "/rules/0/resources/0",
            json!("endpointslices"),
        ),
    ] {
        let api = stage.objects(kind);
        api.patch(name, &parameters, &Patch::Merge(&change)).await.unwrap();
        let mut last = Value::Null;
        let repaired = async || {
            last = api.get(name).await.ok()?.data.pointer(pointer)?.clone();
            let is_back =
                last == expected || last.as_str().zip(expected.as_str()).is_some_and(|(a, b)| a.contains(b));
            is_back.then_some(())
        };
        eventually(repaired)
            .await
            .unwrap_or_else(|| panic!("{} {name} is not repaired: {last}", kind.name()));
    }
    stage.until("chat", "Ready=True").await;
    // The operator does not write the status after each repair, but only if the status has changed.
    let more = stage.metrics.api_calls("apply_status", "LLMDeployment") - written;
    assert!(more < 60, "{more} writes of the status");
}

#[tokio::test]
async fn a_replica_is_ready_once_a_router_admits_it_and_stays_so() {
    let stage = Stage::new("gate").await;
    stage.kubelet.routers().close(true);
    stage.apply("chat", smallest()).await.unwrap();
    let seen = async || {
        let status = stage.resources().get("chat").await.unwrap().status?;
        status.conditions.iter().any(|known| known.reason == "NotAdmitted").then_some(status)
    };
    let status = eventually(seen).await.expect("the replica waits for admission");
    assert_eq!((status.ready_replicas, status.routable_replicas), (0, 0));
    stage.kubelet.routers().close(false);
    stage.until("chat", "Ready=True").await;
    // The gate remains set even if the routers no longer admit the replica. The operator does not connect to the
    // routers again.
    stage.kubelet.routers().close(true);
    let connections = stage.kubelet.routers().connections();
    let label = json!({"metadata": {"annotations": {"touched": "yes"}}});
    let api = stage.resources();
    api.patch("chat", &PatchParams::default(), &Patch::Merge(&label)).await.unwrap();
    stage.apply("other", merge(smallest(), json!({"replicas": 0}))).await.unwrap();
    stage.until("other", "ReplicasReady=True").await;
    let status = stage.until("chat", "Ready=True").await.status.unwrap();
    assert_eq!((status.routable_replicas, stage.kubelet.routers().connections()), (1, connections));
}

#[tokio::test]
async fn nothing_is_written_when_nothing_has_changed() {
    let stage = Stage::new("calm").await;
    stage.apply("chat", smallest()).await.unwrap();
    stage.until("chat", "Ready=True").await;
    stage.until("chat", "Progressing=False").await;
    let all = || {
        let mut calls = Vec::new();
        for kind in Kind::BUILT_IN {
            calls.push(stage.metrics.api_calls("apply", kind.name()));
        }
        calls.push(stage.metrics.api_calls("apply_status", "LLMDeployment"));
        calls
    };
    let before = all();
    let known = stage.resources().get("chat").await.unwrap();
    let services = stage.objects(Kind::Service);
    for number in 0..10 {
        // Patching the Service triggers a reconcile that changes nothing. Patching a Deployment would change the
        // status: a new annotation starts a new generation, and until the controller has observed it, the status
        // reports a change in progress.
        let touch = json!({"metadata": {"annotations": {"touched": number.to_string()}}});
        services.patch("chat", &PatchParams::default(), &Patch::Merge(&touch)).await.unwrap();
    }
    // Changes are reconciled in order, so once this one has been reconciled, so have the earlier ones.
    stage.apply("other", merge(smallest(), json!({"replicas": 0}))).await.unwrap();
    stage.until("other", "ReplicasReady=True").await;
    let unchanged = stage.resources().get("chat").await.unwrap();
    assert_eq!(unchanged.status, known.status);
    assert_eq!(unchanged.resource_version(), known.resource_version());
    let after = all();
    let created = stage.owned().await.iter().filter(|name| name.contains(" other")).count() as u64;
    let more: u64 =
        after.iter().zip(&before).take(Kind::BUILT_IN.len()).map(|(after, before)| after - before).sum();
    assert_eq!(
        more, created,
        "one call for each object of the other resource, and none for the first resource"
    );
}

#[tokio::test]
async fn a_shared_model_is_fetched_first_and_failures_are_reported() {
    let stage = Stage::new("fetch").await;
    let spec = |url: &str| json!({"model": {"source": {"http": {"url": url}}, "cache": {"mode": "shared", "size": "1Gi"}}});
    stage.kubelet.set_fetch_result(10, json!({"reason": "NotFound", "message": "it is not there"}));
    stage.apply("chat", spec("http://host/gone.gguf")).await.unwrap();
    let object = stage.until("chat", "Degraded=True").await;
    let failed = async || {
        let status = stage.resources().get("chat").await.unwrap().status?;
        let condition = status.conditions.into_iter().find(|known| known.type_ == "ModelAvailable")?;
        (condition.reason == "NotFound").then_some(condition.message)
    };
    assert_eq!(eventually(failed).await.as_deref(), Some("it is not there"), "{:#?}", object.status);
    assert!(stage.objects(Kind::Deployment).get_opt("chat-server").await.unwrap().is_none());
    // Each failure is reported with its reason, whether or not the Job retries, and another source starts a new fetch.
    for (code, reason) in
        [(11, "DigestMismatch"), (20, "DiskFull"), (12, "Unauthorized"), (21, "SourceTooSlow")]
    {
        stage
            .kubelet
            .set_fetch_result(code, json!({"reason": reason, "message": format!("that is {reason}")}));
        stage.apply("chat", spec(&format!("http://host/{reason}.gguf"))).await.unwrap();
        let reported = async || {
            let status = stage.resources().get("chat").await.unwrap().status?;
            let condition = |name: &str| status.conditions.iter().find(|known| known.type_ == name);
            let (model, degraded) = (condition("ModelAvailable")?, condition("Degraded")?);
            let is_reported =
                model.reason == reason && degraded.status == "True" && degraded.reason == reason;
            is_reported.then(|| model.message.clone())
        };
        assert_eq!(eventually(reported).await, Some(format!("that is {reason}")));
    }

    let report = json!({"reason": "Fetched", "digest": "sha256:1", "bytes": 5, "bytes_total": 5});
    stage.kubelet.set_fetch_result(0, report);
    stage.apply("chat", spec("http://host/model.gguf")).await.unwrap();
    let status = stage.until("chat", "Ready=True").await.status.unwrap();
    assert_eq!(status.model_digest.as_deref(), Some("sha256:1"));
    assert_eq!(status.cache.unwrap().state, CacheState::Ready);
    // While the fetch of the next model is being retried, the replicas of the current model can be scaled.
    stage
        .kubelet
        .set_fetch_result(20, json!({"reason": "SourceUnreachable", "message": "it does not answer"}));
    stage.apply("chat", merge(spec("http://host/next.gguf"), json!({"replicas": 3}))).await.unwrap();
    let scaled = async || {
        let server = stage.objects(Kind::Deployment).get("chat-server").await.ok()?;
        (server.data.pointer("/status/readyReplicas") == Some(&json!(3))).then_some(())
    };
    eventually(scaled).await.expect("the replicas of the previous model are scaled");
    let report = json!({"reason": "Fetched", "digest": "sha256:1", "bytes": 5, "bytes_total": 5});
    stage.kubelet.set_fetch_result(0, report);
    stage.apply("chat", spec("http://host/model.gguf")).await.unwrap();
    // The replicas remain ready in the meantime, so readiness does not show that the fetch is complete and recorded.
    let recorded = async || {
        let jobs = stage.objects(Kind::Job).list(&ListParams::default()).await.unwrap().items;
        let is_recorded = jobs.len() == 1 && jobs[0].annotations().contains_key("ovfleet.dev/fetched");
        let status = stage.resources().get("chat").await.unwrap().status?;
        (is_recorded && status.model_digest.is_some()).then_some(())
    };
    eventually(recorded).await.expect("the fetch is recorded");
    // The Job of the former source is deleted with its pods.
    let jobs = stage.objects(Kind::Job).list(&ListParams::default()).await.unwrap().items;
    assert_eq!(jobs.len(), 1);

    // The report of the Job outlives its pod.
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(stage.client.clone(), &stage.namespace);
    let fetch = ListParams::default().labels("app.kubernetes.io/component=fetch");
    pods.delete_collection(&DeleteParams::default(), &fetch).await.unwrap();
    eventually(async || pods.list(&fetch).await.unwrap().items.is_empty().then_some(())).await.unwrap();
    stage.apply("chat", merge(spec("http://host/model.gguf"), json!({"replicas": 2}))).await.unwrap();
    let status = stage.until("chat", "Ready=True").await.status.unwrap();
    assert_eq!((status.model_digest.as_deref(), status.ready.as_str()), (Some("sha256:1"), "2/2"));
}

#[tokio::test]
async fn a_shared_cache_is_not_deleted_while_replicas_mount_it() {
    let stage = Stage::new("revert").await;
    stage.kubelet.set_fetch_result(0, json!({"reason": "Fetched", "bytes": 5, "bytes_total": 5}));
    let shared = json!({"model": {"source": {"http": {"url": "http://host/model.gguf"}}, "cache": {"mode": "shared", "size": "1Gi"}}});
    stage.apply("chat", shared.clone()).await.unwrap();
    stage.until("chat", "Ready=True").await;
    let claims = stage.objects(Kind::PersistentVolumeClaim);
    let uid = claims.get("chat-model").await.unwrap().uid();

    // The replicas of the new template do not become ready, so those of the former model remain.
    stage.kubelet.routers().close(true);
    stage.apply("chat", smallest()).await.unwrap();
    let jobs = stage.objects(Kind::Job);
    let is_deleted = async || jobs.list(&ListParams::default()).await.unwrap().items.is_empty().then_some(());
    eventually(is_deleted).await.expect("the Job of the former model is deleted");
    stage.apply("chat", shared).await.unwrap();
    stage.kubelet.routers().close(false);
    stage.until("chat", "Ready=True").await;
    let present = claims.get("chat-model").await.unwrap();
    assert_eq!((present.uid(), present.metadata.deletion_timestamp), (uid, None));

    stage.apply("chat", smallest()).await.unwrap();
    let is_deleted = async || claims.get_opt("chat-model").await.unwrap().is_none().then_some(());
    eventually(is_deleted).await.expect("the claim is deleted after the last replica that mounts it");
}

#[tokio::test]
async fn a_quota_that_prevents_a_fetch_is_reported() {
    let stage = Stage::new("quota").await;
    let quotas: Api<k8s_openapi::api::core::v1::ResourceQuota> =
        Api::namespaced(stage.client.clone(), &stage.namespace);
    let quota = json!({"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}});
    quotas.create(&PostParams::default(), &serde_json::from_value(quota).unwrap()).await.unwrap();
    // The API server creates pods until it has observed the quota.
    let pods: Api<Pod> = Api::namespaced(stage.client.clone(), &stage.namespace);
    let pod =
        json!({"metadata": {"name": "dry-run"}, "spec": {"containers": [{"name": "any", "image": "any"}]}});
    let pod = serde_json::from_value(pod).unwrap();
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let is_exceeded = async || {
        let refused = pods.create(&dry_run, &pod).await.err()?;
        refused.to_string().contains("exceeded quota").then_some(())
    };
    eventually(is_exceeded).await.expect("the quota takes effect");
    stage.kubelet.set_fetch_result(0, json!({"reason": "Fetched", "bytes": 5, "bytes_total": 5}));
    let spec = json!({"model": {"source": {"http": {"url": "http://host/model.gguf"}}, "cache": {"mode": "shared", "size": "1Gi"}}});
    stage.apply("chat", spec).await.unwrap();
    let named = async || {
        let status = stage.resources().get("chat").await.unwrap().status?;
        let condition = |name: &str| status.conditions.iter().find(|known| known.type_ == name);
        let (model, degraded) = (condition("ModelAvailable")?, condition("Degraded")?);
        let is_named = model.reason == "FailedCreate" && degraded.status == "True";
        is_named.then(|| model.message.clone())
    };
    let message = eventually(named).await.expect("a Job that cannot create a pod is reported");
    assert!(message.starts_with("pods cannot be created: exceeded quota: none"), "{message}");
    quotas.delete("none", &DeleteParams::default()).await.unwrap();
    let status = stage.until("chat", "Ready=True").await.status.unwrap();
    let degraded = status.conditions.iter().find(|known| known.type_ == "Degraded").unwrap();
    assert_eq!(degraded.status, "False", "{degraded:?}");
}

#[tokio::test]
async fn a_service_monitor_is_created_once_the_cluster_has_the_kind() {
    let stage = Stage::new("monitors").await;
    let spec = json!({"observability": {"metrics": {"serviceMonitor": true}}});
    stage.apply("chat", merge(smallest(), spec)).await.unwrap();
    let status = stage.until("chat", "Ready=True").await.status.unwrap();
    assert!(status.conditions[0].message.contains("does not have the kind"), "{:?}", status.conditions[0]);
    // Installing the Prometheus operator creates this definition.
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "servicemonitors.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "names": {"kind": "ServiceMonitor", "plural": "servicemonitors"},
            "scope": "Namespaced",
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
            }],
        },
    });
    let definitions: Api<CustomResourceDefinition> = Api::all(stage.client.clone());
    definitions.create(&PostParams::default(), &serde_json::from_value(definition).unwrap()).await.unwrap();
    let monitors = stage.objects(Kind::ServiceMonitor);
    let uid = async || monitors.get_opt("chat").await.ok()??.uid();
    let created = eventually(uid).await.expect("the ServiceMonitor is created");
    let accepted = async || {
        let status = stage.resources().get("chat").await.unwrap().status?;
        (status.conditions[0].message == "the resource is valid").then_some(())
    };
    eventually(accepted).await.expect("the warning disappears");
    // The operator watches the ServiceMonitor like its other objects.
    monitors.delete("chat", &DeleteParams::default()).await.unwrap();
    let again = async || uid().await.filter(|uid| *uid != created);
    eventually(again).await.expect("the ServiceMonitor is created again");
}

#[tokio::test]
async fn mistakes_become_conditions_until_they_are_fixed() {
    let stage = Stage::new("mistakes").await;
    let overlay = |field: &str| merge(smallest(), json!({"podTemplate": {"spec": {field: "yes"}}}));
    stage.apply("chat", overlay("hostNetwrk")).await.unwrap();
    let status = stage.until("chat", "Accepted=False").await.status.unwrap();
    let accepted = &status.conditions[0];
    assert_eq!((status.phase, accepted.reason.as_str()), (Phase::Refused, "RefusedByCluster"));
    assert!(accepted.message.contains("hostNetwrk"), "{}", accepted.message);
    stage.apply("chat", smallest()).await.unwrap();
    stage.until("chat", "Ready=True").await;

    // The operator does not change an existing object that has the same name but does not belong to the resource.
    let services: Api<Service> = Api::namespaced(stage.client.clone(), &stage.namespace);
    let other = json!({"metadata": {"name": "taken"}, "spec": {"ports": [{"port": 1}]}});
    services.create(&PostParams::default(), &serde_json::from_value(other).unwrap()).await.unwrap();
    stage.apply("taken", smallest()).await.unwrap();
    let status = stage.until("taken", "Accepted=False").await.status.unwrap();
    assert!(status.conditions[0].message.contains("does not belong"), "{:?}", status.conditions[0]);
    assert!(services.get("taken").await.unwrap().owner_references().is_empty());
}

#[tokio::test]
async fn replicas_of_an_invalid_resource_are_admitted_and_counted() {
    let stage = Stage::new("invalid").await;
    stage.apply("chat", smallest()).await.unwrap();
    stage.until("chat", "Ready=True").await;
    let media = json!({"allowedDomains": ["all"], "allowedNetworks": ["10.0.0.1/8"]});
    stage.apply("chat", merge(smallest(), json!({"engine": {"media": media}}))).await.unwrap();
    stage.until("chat", "Accepted=False").await;
    replace_replicas(&stage.client, &stage.namespace).await;
    let status = stage.until("chat", "Available=True").await.status.unwrap();
    assert_eq!((status.phase, status.replicas), (Phase::Refused, 1));

    stage.objects(Kind::Deployment).delete("chat-server", &DeleteParams::default()).await.unwrap();
    let status = stage.until("chat", "Available=False").await.status.unwrap();
    assert_eq!(status.phase, Phase::Refused);
}

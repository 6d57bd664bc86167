//! Tests of resources that cannot be decoded, because they were stored under a schema without the current rules.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt as _;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use operator::manifest::Kind;
use operator::metrics::Metrics;
use operator_api::LlmDeployment;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::kubelet::Kubelet;
use crate::support::{Settings, eventually, operator_on, replace_replicas, smallest, start};

/// Returns a definition of LLMDeployment without the limits of `rollout.maxSurge`.
fn lax_definition() -> CustomResourceDefinition {
    let mut definition = serde_json::to_value(operator_api::crd()).unwrap();
    let field =
        "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/rollout/properties/maxSurge";
    let field = definition.pointer_mut(field).unwrap().as_object_mut().unwrap();
    field.remove("x-kubernetes-validations").unwrap();
    serde_json::from_value(definition).unwrap()
}

#[tokio::test]
async fn a_resource_that_cannot_be_decoded_is_refused_and_does_not_affect_others() {
    let cluster = start(lax_definition()).await.unwrap();
    let client = cluster.client().await.unwrap();
    let namespace = tests::cluster::namespace(&client, "undecodable").await.unwrap();
    let kind = ApiResource::erase::<LlmDeployment>(&());
    let resources: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &kind);
    let services: Api<DynamicObject> =
        Api::namespaced_with(client.clone(), &namespace, &Kind::Service.api_resource());
    let create = async |name: &str, rollout: Value| {
        let mut spec = smallest();
        spec["rollout"] = rollout;
        let object = json!({
            "apiVersion": "ovfleet.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": name}, "spec": spec,
        });
        resources.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    };
    let set_surge = async |name: &str, surge: Value| {
        let patch = json!({"spec": {"rollout": {"maxSurge": surge}}});
        resources.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    };
    // Waits until the condition `Accepted` has this reason and concerns the current generation.
    let accepted = async |name: &str, reason: &str| {
        let seen = eventually(async || {
            let object = resources.get(name).await.unwrap();
            let status = object.data["status"].clone();
            let conditions = status["conditions"].as_array()?;
            let condition = conditions.iter().find(|condition| condition["type"] == "Accepted")?;
            let is_current = status["observedGeneration"].as_i64() == object.metadata.generation;
            (condition["reason"] == reason && is_current).then_some(status)
        });
        seen.await.unwrap_or_else(|| panic!("the condition of {name} does not have the reason {reason}"))
    };
    create("old", json!({"maxSurge": 3_000_000_000_u32})).await;
    create("good", json!({})).await;
    // An earlier version of the operator has written a status.
    let status = json!({"status": {"replicas": 2, "selector": "a=b"}});
    resources.patch_status("old", &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();

    let kubelet = Kubelet::start(&client, &namespace);
    let mut tasks = JoinSet::new();
    let metrics = Metrics::default();
    let settings = Settings::default();
    tasks.spawn(operator_on(&cluster, &namespace, &metrics, kubelet.routers(), settings).await);
    accepted("good", "Accepted").await;
    let status = accepted("old", "Undecodable").await;
    assert_eq!((&status["phase"], &status["selector"]), (&json!("Refused"), &json!("a=b")), "{status:#}");
    assert_eq!(status["replicas"], 0, "no replica exists");
    let message = status["conditions"][0]["message"].as_str().unwrap();
    assert!(message.contains("3000000000"), "{message}");
    set_surge("old", json!(1)).await;
    accepted("old", "Accepted").await;

    // The objects of a resource that can no longer be decoded are not changed.
    let uid = async || services.get("good").await.unwrap().uid();
    let former = uid().await;
    set_surge("good", json!(3_000_000_000_u32)).await;
    let status = accepted("good", "Undecodable").await;
    assert_eq!(
        status["conditions"].as_array().map(Vec::len),
        Some(8),
        "the other conditions remain: {status:#}"
    );
    assert_eq!(uid().await, former);
    replace_replicas(&client, &namespace).await;
    // The objects of a deleted resource are not recreated, although its last state cannot be decoded.
    resources.delete("good", &DeleteParams::default()).await.unwrap();
    let is_gone = async || services.get_opt("good").await.unwrap().is_none().then_some(());
    eventually(is_gone).await.expect("its objects are deleted");
    create("other", json!({})).await;
    accepted("other", "Accepted").await;
    assert!(services.get_opt("good").await.unwrap().is_none());
    assert!(tasks.try_join_next().is_none(), "the operator runs");
}

//! Tests of the Secret with the replica token. The operator creates the Secret, and has no permission for Secrets
//! except to create them.

use k8s_openapi::api::core::v1::{Pod, ResourceQuota, Secret};
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use operator::manifest::Kind;
use operator::metrics::Metrics;
use serde_json::{Value, json};

use crate::support::{OPERATOR, Stage, cluster, eventually, operator, smallest};

/// Returns the Secrets that an LLMDeployment owns.
async fn owned(secrets: &Api<Secret>) -> Vec<Secret> {
    let list = secrets.list(&ListParams::default()).await.unwrap();
    let is_owned =
        |secret: &Secret| secret.owner_references().iter().any(|owner| owner.kind == "LLMDeployment");
    list.items.into_iter().filter(is_owned).collect()
}

fn token(secret: &Secret) -> String {
    String::from_utf8(secret.data.as_ref().unwrap()["token"].0.clone()).unwrap()
}

fn with_replicas(replicas: u32) -> Value {
    let mut spec = smallest();
    spec["replicas"] = json!(replicas);
    spec
}

/// Returns the pod templates of the replicas and of the routers.
async fn templates(stage: &Stage) -> [Value; 2] {
    let deployments = stage.objects(Kind::Deployment);
    let template = async |name| deployments.get(name).await.unwrap().data["spec"]["template"].clone();
    [template("chat-server").await, template("chat-router").await]
}

#[tokio::test]
async fn it_is_created_once_and_deleted_with_the_resource() {
    let stage = Stage::new("token").await;
    let secrets: Api<Secret> = Api::namespaced(stage.client.clone(), &stage.namespace);
    stage.apply("chat", smallest()).await.unwrap();
    let object = stage.until("chat", "Ready=True").await;
    let [secret] = owned(&secrets).await.try_into().unwrap();
    let name = secret.name_any();
    assert_eq!(secret.owner_references()[0].uid, object.uid().unwrap());
    assert_eq!(secret.owner_references()[0].controller, Some(true));
    let first = token(&secret);
    assert!(first.len() == 64 && first.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let before = templates(&stage).await;
    for template in &before {
        let volumes = template["spec"]["volumes"].as_array().unwrap();
        let volume = volumes.iter().find(|volume| volume["name"] == "replica-token").unwrap();
        assert_eq!(volume["secret"]["secretName"], name.as_str());
        assert!(!template.to_string().contains(&first), "the template does not contain the token");
    }

    // The user can rotate the token without restarting any pods.
    let both = format!("{}\n{first}\n", "n".repeat(64));
    let rotated = json!({"stringData": {"token": both}});
    secrets.patch(&name, &PatchParams::default(), &Patch::Merge(&rotated)).await.unwrap();
    stage.apply("chat", with_replicas(2)).await.unwrap();
    stage.until("chat", "Ready=True").await;
    assert_eq!(templates(&stage).await, before);
    assert_eq!(token(&secrets.get(&name).await.unwrap()), both);
    assert_eq!(stage.metrics.api_calls("create", "Secret"), 1, "no reconcile created the Secret again");

    // Another operator does not know that the Secret exists and tries to create it, but does not change it.
    let successor = Metrics::default();
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(operator(&stage.namespace, None, &successor, stage.kubelet.routers()).await);
    let has_tried = async || (successor.api_calls("create", "Secret") > 0).then_some(());
    eventually(has_tried).await.expect("the other operator has tried to create the Secret");
    stage.apply("chat", with_replicas(1)).await.unwrap();
    stage.until("chat", "Ready=True").await;
    assert_eq!(token(&secrets.get(&name).await.unwrap()), both);
    tasks.shutdown().await;

    stage.resources().delete("chat", &DeleteParams::default()).await.unwrap();
    eventually(async || owned(&secrets).await.is_empty().then_some(())).await.expect("no Secret is left");
}

#[tokio::test]
async fn it_is_created_again_when_a_pod_waits_for_it() {
    let stage = Stage::new("token-again").await;
    let secrets: Api<Secret> = Api::namespaced(stage.client.clone(), &stage.namespace);
    stage.apply("chat", smallest()).await.unwrap();
    stage.until("chat", "Ready=True").await;
    let name = owned(&secrets).await[0].name_any();
    secrets.delete(&name, &DeleteParams::default()).await.unwrap();
    // The simulated kubelet does not change the status of this pod.
    let pods: Api<Pod> = Api::namespaced(stage.client.clone(), &stage.namespace);
    let labels = json!({
        "app.kubernetes.io/name": "ovfleet", "app.kubernetes.io/instance": "chat",
        "app.kubernetes.io/component": "fetch", "app.kubernetes.io/managed-by": "ovfleet-operator",
    });
    let pod = json!({
        "metadata": {"name": "waits", "labels": labels},
        "spec": {
            "containers": [{"name": "fetch", "image": "ovfleet/server:1"}],
            "volumes": [{"name": "replica-token", "secret": {"secretName": name}}],
        },
    });
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    let status = json!({"status": {"phase": "Pending", "containerStatuses": [{
        "name": "fetch", "image": "", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"waiting": {"reason": "ContainerCreating"}},
    }]}});
    pods.patch_status("waits", &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
    eventually(async || secrets.get_opt(&name).await.unwrap()).await.expect("the Secret is created again");
}

#[tokio::test]
async fn a_secret_of_the_user_replaces_it() {
    let stage = Stage::new("token-own").await;
    let secrets: Api<Secret> = Api::namespaced(stage.client.clone(), &stage.namespace);
    let mut spec = smallest();
    spec["security"] = json!({"replicaTokenSecretRef": {"name": "mine", "key": "fleet"}});
    stage.apply("chat", spec).await.unwrap();
    stage.until("chat", "Ready=True").await;
    for template in templates(&stage).await {
        let volumes = template["spec"]["volumes"].as_array().unwrap();
        let volume = volumes.iter().find(|volume| volume["name"] == "replica-token").unwrap();
        assert_eq!(volume["secret"]["secretName"], "mine");
        assert_eq!(volume["secret"]["items"], json!([{"key": "fleet", "path": "token"}]));
    }
    assert_eq!((owned(&secrets).await.len(), stage.metrics.api_calls("create", "Secret")), (0, 0));
}

#[tokio::test]
async fn the_operator_can_neither_read_nor_change_secrets() {
    let stage = Stage::new("token-rights").await;
    let admin: Api<Secret> = Api::namespaced(stage.client.clone(), &stage.namespace);
    let secret = serde_json::from_value(json!({"metadata": {"name": "other"}})).unwrap();
    admin.create(&PostParams::default(), &secret).await.unwrap();
    let client = cluster().await.client_for(OPERATOR, None).await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(client, &stage.namespace);
    let patch = json!({"stringData": {"token": "x"}});
    let refusals = [
        secrets.get("other").await.map(drop),
        secrets.list(&ListParams::default()).await.map(drop),
        secrets.patch("other", &PatchParams::default(), &Patch::Merge(&patch)).await.map(drop),
        secrets.delete("other", &DeleteParams::default()).await.map(drop),
    ];
    for refusal in refusals {
        assert!(matches!(&refusal, Err(kube::Error::Api(status)) if status.code == 403), "{refusal:?}");
    }
}

#[tokio::test]
async fn pods_are_not_replaced_before_their_token_exists() {
    let stage = Stage::new("token-quota").await;
    let quotas: Api<ResourceQuota> = Api::namespaced(stage.client.clone(), &stage.namespace);
    let quota = json!({"metadata": {"name": "none"}, "spec": {"hard": {"count/secrets": "0"}}});
    quotas.create(&PostParams::default(), &serde_json::from_value(quota).unwrap()).await.unwrap();
    let is_counted = async || quotas.get("none").await.unwrap().status?.hard;
    eventually(is_counted).await.expect("the quota is in effect");

    stage.apply("chat", smallest()).await.unwrap();
    let is_refused = async || (stage.metrics.api_calls("create", "Secret") > 1).then_some(());
    eventually(is_refused).await.expect("creating it is retried");
    assert!(stage.objects(Kind::ConfigMap).get_opt("chat-router").await.unwrap().is_some());
    assert!(stage.objects(Kind::Deployment).list(&ListParams::default()).await.unwrap().items.is_empty());
    let status = json!(stage.resources().get("chat").await.unwrap().status);
    assert!(status.to_string().contains("exceeded quota"), "{status:#}");

    quotas.delete("none", &DeleteParams::default()).await.unwrap();
    stage.until("chat", "Ready=True").await;
}

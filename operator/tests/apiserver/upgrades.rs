//! Tests that a new release of the operator does not restart all resources at the same time.

use kube::api::{Api, Patch, PatchParams};
use operator::metrics::Metrics;
use operator_api::{LlmDeployment, UpgradeState};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::kubelet::Kubelet;
use crate::support::{Settings, cluster, eventually, operator_with, smallest};

const NAMES: [&str; 3] = ["first", "second", "manual"];

/// Returns the state of each resource's release, the image of its replicas, and whether it is ready.
async fn releases(resources: &Api<LlmDeployment>) -> Vec<(UpgradeState, String, bool)> {
    let mut releases = Vec::new();
    for name in NAMES {
        let status = resources.get(name).await.unwrap().status.unwrap_or_default();
        let is_ready = status.conditions.iter().any(|known| known.type_ == "Ready" && known.status == "True");
        let release = status.release.unwrap_or_default();
        releases.push((release.state, release.server_image, is_ready));
    }
    releases
}

#[tokio::test]
async fn a_new_default_image_is_rolled_out_to_one_resource_after_the_other() {
    let client = cluster().await.client().await.unwrap();
    let namespace = tests::cluster::namespace(&client, "upgrades").await.unwrap();
    let kubelet = Kubelet::start(&client, &namespace);
    let resources: Api<LlmDeployment> = Api::namespaced(client.clone(), &namespace);
    for name in NAMES {
        let mut spec = smallest();
        if name == "manual" {
            spec["upgradePolicy"] = json!("Manual");
        }
        let object: Value = json!({
            "apiVersion": "ovfleet.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": name}, "spec": spec,
        });
        resources.create(&Default::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    }
    let metrics = Metrics::default();
    let start = async |server_image: &'static str| {
        let mut tasks = JoinSet::new();
        let settings = Settings { server_image, ..Settings::default() };
        tasks.spawn(operator_with(&namespace, &metrics, kubelet.routers(), settings).await);
        tasks
    };
    let mut operator = start("ovfleet/server:1").await;
    let all_ready = async || {
        let all = releases(&resources).await;
        all.iter().all(|(_, image, is_ready)| *is_ready && image == "ovfleet/server:1").then_some(())
    };
    eventually(all_ready).await.expect("all are ready");
    operator.shutdown().await;

    let _operator = start("ovfleet/server:2").await;
    let mut rolling_at_once = 0;
    let upgraded = async || {
        let all = releases(&resources).await;
        let rolling = all.iter().filter(|(state, ..)| *state == UpgradeState::Rolling).count();
        rolling_at_once = rolling_at_once.max(rolling);
        let is_upgraded = |(state, image, is_ready): &(UpgradeState, String, bool)| {
            *state == UpgradeState::Current && *is_ready && image == "ovfleet/server:2"
        };
        all[..2].iter().all(is_upgraded).then_some(all)
    };
    let all = eventually(upgraded).await.expect("both resources with the policy Auto are upgraded");
    assert!(rolling_at_once <= 1, "{rolling_at_once} at the same time");
    assert_eq!(
        all[2],
        (UpgradeState::Waiting, "ovfleet/server:1".to_owned(), true),
        "it has not been approved"
    );

    let release = resources.get("manual").await.unwrap().status.unwrap().release.unwrap();
    let annotation = json!({"metadata": {"annotations": {"ovfleet.dev/upgrade": release.available}}});
    resources.patch("manual", &PatchParams::default(), &Patch::Merge(&annotation)).await.unwrap();
    let approved = async || {
        let (state, image, is_ready) = releases(&resources).await.remove(2);
        (state == UpgradeState::Current && image == "ovfleet/server:2" && is_ready).then_some(())
    };
    eventually(approved).await.expect("it is upgraded after its approval");
}

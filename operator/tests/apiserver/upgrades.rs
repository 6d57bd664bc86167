//! Tests that a new release of the operator does not restart the pods of all resources at the same time.

use kube::api::{Api, Patch, PatchParams};
use operator::metrics::Metrics;
use operator_api::{LlmDeployment, UpgradeState};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::kubelet::Kubelet;
use crate::support::{Settings, cluster, eventually, operator_with, smallest};

const NAMES: [&str; 3] = ["first", "second", "manual"];

/// A namespace in which operators of several releases run one after another.
struct Releases {
    namespace: String,
    kubelet: Kubelet,
    metrics: Metrics,
    resources: Api<LlmDeployment>,
}

impl Releases {
    async fn new(name: &str) -> Self {
        let client = cluster().await.client().await.unwrap();
        let namespace = tests::cluster::namespace(&client, name).await.unwrap();
        let kubelet = Kubelet::start(&client, &namespace);
        let resources = Api::namespaced(client, &namespace);
        Self { namespace, kubelet, metrics: Metrics::default(), resources }
    }

    async fn create(&self, name: &str, spec: Value) {
        let object: Value = json!({
            "apiVersion": "ovfleet.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": name}, "spec": spec,
        });
        self.resources.create(&Default::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    }

    /// Starts an operator with this default image of the server.
    async fn start(&self, server_image: &'static str) -> JoinSet<anyhow::Result<()>> {
        let mut tasks = JoinSet::new();
        let settings = Settings { server_image, ..Settings::default() };
        tasks.spawn(operator_with(&self.namespace, &self.metrics, self.kubelet.routers(), settings).await);
        tasks
    }

    /// Returns the state of a resource's release, the image of its replicas, and whether the resource is ready.
    async fn state(&self, name: &str) -> (UpgradeState, String, bool) {
        let status = self.resources.get(name).await.unwrap().status.unwrap_or_default();
        let is_ready = status.conditions.iter().any(|known| known.type_ == "Ready" && known.status == "True");
        let release = status.release.unwrap_or_default();
        (release.state, release.server_image, is_ready)
    }

    /// Returns the [`Self::state`] of each resource of [`NAMES`].
    async fn all(&self) -> Vec<(UpgradeState, String, bool)> {
        let mut states = Vec::new();
        for name in NAMES {
            states.push(self.state(name).await);
        }
        states
    }

    /// Waits until a resource that is not ready counts as upgraded to this image.
    async fn until_current(&self, name: &str, image: &str) {
        let expected = (UpgradeState::Current, image.to_owned(), false);
        let mut last = None;
        let reached = eventually(async || {
            let state = self.state(name).await;
            let is_reached = state == expected;
            last = Some(state);
            is_reached.then_some(())
        })
        .await;
        assert!(reached.is_some(), "{name} does not reach {expected:?}: {last:?}");
    }

    /// Approves the release that is available for a resource.
    async fn approve(&self, name: &str) {
        let release = self.resources.get(name).await.unwrap().status.unwrap().release.unwrap();
        let annotation = json!({"metadata": {"annotations": {"ovfleet.dev/upgrade": release.available}}});
        self.resources.patch(name, &PatchParams::default(), &Patch::Merge(&annotation)).await.unwrap();
    }
}

#[tokio::test]
async fn a_new_default_image_is_rolled_out_to_one_resource_after_the_other() {
    let releases = Releases::new("upgrades").await;
    for name in NAMES {
        let mut spec = smallest();
        if name == "manual" {
            spec["upgradePolicy"] = json!("Manual");
        }
        releases.create(name, spec).await;
    }
    let mut operator = releases.start("ovfleet/server:1").await;
    let all_ready = async || {
        let all = releases.all().await;
        all.iter().all(|(_, image, is_ready)| *is_ready && image == "ovfleet/server:1").then_some(())
    };
    eventually(all_ready).await.expect("all are ready");
    operator.shutdown().await;

    let _operator = releases.start("ovfleet/server:2").await;
    let mut rolling_at_once = 0;
    let upgraded = async || {
        let all = releases.all().await;
        let rolling = all.iter().filter(|(state, ..)| *state == UpgradeState::Rolling).count();
        rolling_at_once = rolling_at_once.max(rolling);
        let is_upgraded = |(state, image, is_ready): &(UpgradeState, String, bool)| {
            *state == UpgradeState::Current && *is_ready && image == "ovfleet/server:2"
        };
        all[..2].iter().all(is_upgraded).then_some(all)
    };
    let all = eventually(upgraded).await.expect("both resources with the policy Auto are upgraded");
    assert!(rolling_at_once <= 1, "{rolling_at_once} upgrades at the same time");
    assert_eq!(
        all[2],
        (UpgradeState::Waiting, "ovfleet/server:1".to_owned(), true),
        "the upgrade has not been approved"
    );

    releases.approve("manual").await;
    let approved = async || {
        let (state, image, is_ready) = releases.state("manual").await;
        (state == UpgradeState::Current && image == "ovfleet/server:2" && is_ready).then_some(())
    };
    eventually(approved).await.expect("the resource is upgraded after its approval");
}

#[tokio::test]
async fn a_resource_that_served_no_requests_before_the_upgrade_does_not_stop_the_others() {
    let releases = Releases::new("broken").await;
    let mut broken = smallest();
    // Nothing opens this gate, so the resource is never ready.
    broken["podTemplate"] = json!({"spec": {"readinessGates": [{"conditionType": "example.com/never"}]}});
    releases.create("broken", broken).await;
    let mut working = smallest();
    // With `Manual`, the upgrade of this resource waits for an approval, so "broken" is upgraded first.
    working["upgradePolicy"] = json!("Manual");
    releases.create("working", working).await;
    let mut operator = releases.start("ovfleet/server:1").await;
    let ready = async || releases.state("working").await.2.then_some(());
    eventually(ready).await.expect("the other resource is ready");
    releases.until_current("broken", "ovfleet/server:1").await;
    operator.shutdown().await;

    let mut operator = releases.start("ovfleet/server:2").await;
    releases.until_current("broken", "ovfleet/server:2").await;
    // After a restart, the operator knows of the upgrade only from the statuses.
    operator.shutdown().await;
    let _operator = releases.start("ovfleet/server:2").await;
    let waits = async || (releases.state("working").await.0 == UpgradeState::Waiting).then_some(());
    eventually(waits).await.expect("the release is available");
    releases.approve("working").await;
    let upgraded = async || {
        let (state, image, is_ready) = releases.state("working").await;
        (state == UpgradeState::Current && image == "ovfleet/server:2" && is_ready).then_some(())
    };
    eventually(upgraded).await.expect("the working resource is upgraded");
    releases.until_current("broken", "ovfleet/server:2").await;
}

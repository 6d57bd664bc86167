//! The LLMDeployment `chat` on the node of [`crate::node`], with continuous traffic through its Service.

use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;

use crate::hub::Hub;
use crate::node::{self, LIMIT, kubectl};
use crate::traffic::{Plan, Traffic, TrafficReport};

/// The number of requests that must end before and after each change, so that the change happens under traffic.
pub const REQUESTS_AROUND_CHANGE: usize = 12;
/// The pause of a client between two requests, so that replicas leave processor time for the tests on other nodes.
pub const PAUSE: Duration = Duration::from_secs(2);
/// The label selector of the replicas' pods.
pub const SERVER: &str = "app.kubernetes.io/instance=chat,app.kubernetes.io/component=server";
/// The label selector of the routers' pods.
pub const ROUTER: &str = "app.kubernetes.io/instance=chat,app.kubernetes.io/component=router";

/// The manifest of the resource, whose model is on `hub`. `more` is appended to its `spec`.
#[must_use]
pub fn manifest(namespace: &str, hub: &Hub, replicas: u32, more: &str) -> String {
    format!(
        "
apiVersion: ovfleet.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: chat, namespace: {namespace}}}
spec:
  model:
    name: chat
    source:
      hf:
        endpoint: {}
        repo: owner/model
        files: ['*.gguf']
  resources:
    requests: {{cpu: 50m}}
    limits: {{cpu: 1, memory: 1536Mi}}
  replicas: {replicas}
{more}
",
        hub.url()
    )
}

/// Starts a mock Hub with the sample model on an address that pods can reach.
///
/// # Errors
/// The model has not been fetched.
pub async fn hub() -> anyhow::Result<Hub> {
    Hub::start(node::ADDRESS, "owner/model", &[&crate::sample_model()]).await
}

/// Waits until the status is up to date, and exactly `replicas` replicas exist, all of them ready, routable and
/// updated.
///
/// # Errors
/// The wait takes longer than [`node::LIMIT`].
pub fn settled(namespace: &str, replicas: u32) -> anyhow::Result<()> {
    node::await_state("the deployment to be settled", LIMIT, || {
        let resource = node::get(&["llmd", "chat", "--namespace", namespace])?;
        let status = &resource["status"];
        let counts = ["replicas", "readyReplicas", "routableReplicas", "updatedReplicas"];
        let is_settled = status["observedGeneration"] == resource["metadata"]["generation"]
            && counts.iter().all(|name| status[*name] == replicas)
            && is_true(&resource, "Ready")
            && !is_true(&resource, "Progressing");
        anyhow::ensure!(is_settled, "{status:#}");
        Ok(Some(()))
    })
    .with_context(|| kubectl(&["get", "pods,events", "--namespace", namespace]).unwrap_or_default())
}

/// Whether the condition `condition` of an object is true.
#[must_use]
pub fn is_true(object: &Value, condition: &str) -> bool {
    let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    conditions.filter(|found| found["type"] == condition).any(|found| found["status"] == "True")
}

/// Changes the resource with a JSON merge patch.
///
/// # Errors
/// Returns the same errors as [`node::run`].
pub fn patch(namespace: &str, patch: &Value) -> anyhow::Result<()> {
    let patch = patch.to_string();
    kubectl(&["patch", "llmd/chat", "--namespace", namespace, "--type=merge", "--patch", &patch]).map(drop)
}

/// Waits until the Service responds, and returns its address.
///
/// # Errors
/// The Service does not respond within [`node::LIMIT`].
pub fn service_address(namespace: &str) -> anyhow::Result<String> {
    let address = node::service_address(namespace, "chat")?;
    node::await_state("the Service to respond", LIMIT, || {
        let status = crate::server::probe(&address, "/v3/models")?;
        // The probe sends no API key, so 401 also shows that the Service responds.
        Ok(matches!(status, 200 | 401).then_some(()))
    })?;
    Ok(address)
}

/// Starts traffic to the Service with `clients` clients, which pause for `pause` between requests, and waits until the
/// first requests have ended.
///
/// # Errors
/// Returns the same errors as [`service_address`].
pub async fn traffic(
    namespace: &str,
    clients: usize,
    key: Option<&str>,
    pause: Duration,
) -> anyhow::Result<Traffic> {
    let url = format!("http://{}", service_address(namespace)?);
    let plan = Plan { url, model: "chat".to_owned(), clients, tokens: 48, pause };
    let mut traffic = Traffic::start_with_key(&plan, key);
    traffic.await_requests(REQUESTS_AROUND_CHANGE).await;
    Ok(traffic)
}

/// Asserts that at least as many requests have ended as must end before and after one change, and that all succeeded.
/// The number of requests that end during the change depends on the speed of the machine, so it is not checked.
///
/// # Panics
/// Panics if there was too little traffic, or if a request failed.
pub fn assert_none_failed(report: &TrafficReport) {
    assert!(report.requests.len() >= 2 * REQUESTS_AROUND_CHANGE, "{}", report.summary());
    assert_eq!(report.failures().len(), 0, "{}", report.summary());
}

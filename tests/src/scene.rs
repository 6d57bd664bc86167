//! The LLMDeployment `chat` on the node of [`crate::node`], and continuous traffic through its Service.

use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;

use crate::hub::Hub;
use crate::node::{self, kubectl};
use crate::traffic::{Account, Plan, Traffic};

/// The longest time for which a test waits for a state.
pub const LIMIT: Duration = Duration::from_secs(300);
/// The number of requests that must end before and after each change, so that it happens under traffic.
pub const AROUND: usize = 12;
/// Selects the pods of the replicas.
pub const SERVER: &str = "app.kubernetes.io/instance=chat,app.kubernetes.io/component=server";
/// Selects the pods of the routers.
pub const ROUTER: &str = "app.kubernetes.io/instance=chat,app.kubernetes.io/component=router";

/// The resource, with its model on `hub`. `more` is added to its `spec`.
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
    limits: {{memory: 1536Mi}}
  replicas: {replicas}
{more}
",
        hub.url()
    )
}

/// A mirror of the Hub with the sample model, which pods reach.
///
/// # Errors
/// The model has not been fetched.
pub async fn hub() -> anyhow::Result<Hub> {
    Hub::start(node::ADDRESS, "owner/model", &[&crate::sample_model()]).await
}

/// Waits until the status is about the present generation of the resource, and all of its `replicas` are as specified.
///
/// # Errors
/// This does not happen within [`LIMIT`].
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

/// Whether a condition of an object is true.
#[must_use]
pub fn is_true(object: &Value, condition: &str) -> bool {
    let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    conditions.filter(|found| found["type"] == condition).any(|found| found["status"] == "True")
}

/// Changes the resource by a JSON merge patch.
///
/// # Errors
/// As [`node::run`].
pub fn patch(namespace: &str, patch: &Value) -> anyhow::Result<()> {
    let patch = patch.to_string();
    kubectl(&["patch", "llmd/chat", "--namespace", namespace, "--type=merge", "--patch", &patch]).map(drop)
}

/// The address of the Service that clients use, once it responds.
///
/// # Errors
/// It does not respond within [`LIMIT`].
pub fn service_address(namespace: &str) -> anyhow::Result<String> {
    let service = node::get(&["service", "chat", "--namespace", namespace])?;
    let address = service["spec"]["clusterIP"].as_str().context("a Service without an address")?;
    let address = format!("{address}:{}", service["spec"]["ports"][0]["port"]);
    node::await_state("the Service to respond", LIMIT, || {
        let status = crate::server::probe(&address, "/v3/models")?;
        // 401 is a response, too: the key is what the traffic has.
        Ok(matches!(status, 200 | 401).then_some(()))
    })?;
    Ok(address)
}

/// Starts traffic to the Service with `clients`, and waits until it flows.
///
/// # Errors
/// As [`service_address`].
pub async fn traffic(namespace: &str, clients: usize, key: Option<&str>) -> anyhow::Result<Traffic> {
    let url = format!("http://{}", service_address(namespace)?);
    let plan = Plan { url, model: "chat".to_owned(), clients, tokens: 48 };
    let mut traffic = Traffic::start_with_key(&plan, key);
    traffic.flow(AROUND).await;
    Ok(traffic)
}

/// Checks that there was traffic, and that each request was answered.
///
/// # Panics
/// If that is not so.
pub fn assert_none_failed(account: &Account) {
    assert!(account.requests.len() > 3 * AROUND, "{}", account.summary());
    assert_eq!(account.failures().len(), 0, "{}", account.summary());
}

//! Tests that a collector receives the spans of reconciles.

use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use operator::metrics::Metrics;
use process::trace::Tracer;
use tokio::task::JoinSet;

use crate::kubelet::Kubelet;
use crate::support::{Settings, cluster, eventually, operator_with, smallest};

/// Starts a collector that stores the bytes of the spans that it receives.
async fn collector(tasks: &mut JoinSet<anyhow::Result<()>>) -> (String, Arc<Mutex<Vec<u8>>>) {
    let received = Arc::new(Mutex::new(Vec::new()));
    let store = Arc::clone(&received);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let routes = axum::Router::new().fallback(move |body: Bytes| async move {
        store.lock().unwrap().extend_from_slice(&body);
        [("content-type", "application/grpc"), ("grpc-status", "0")]
    });
    tasks.spawn(async move { Ok(axum::serve(listener, routes).await?) });
    (address, received)
}

#[tokio::test]
async fn each_step_of_a_reconcile_has_a_span() {
    let mut tasks = JoinSet::new();
    let (endpoint, received) = collector(&mut tasks).await;
    let tracer = Tracer::new("ovfleet-operator", &endpoint, 1.0).unwrap();
    let client = cluster().await.client().await.unwrap();
    let namespace = tests::cluster::namespace(&client, "spans").await.unwrap();
    let kubelet = Kubelet::start(&client, &namespace);
    let metrics = Metrics::default();
    let settings = Settings { tracer: Some(tracer.clone()), ..Settings::default() };
    tasks.spawn(operator_with(&namespace, &metrics, kubelet.routers(), settings).await);
    let resources: kube::Api<operator_api::LlmDeployment> = kube::Api::namespaced(client, &namespace);
    let object = serde_json::json!({
        "apiVersion": "ovfleet.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": "chat"}, "spec": smallest(),
    });
    resources.create(&Default::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    // A reconcile is counted after its span has ended.
    let counted = "ovfleet_operator_reconciles_total{outcome=\"done\"}";
    let is_reconciled = async || metrics.scrape().lines().any(|line| line.starts_with(counted)).then_some(());
    eventually(is_reconciled).await.expect("the resource is reconciled");
    // Flushing blocks until the collector, which runs on this runtime, has responded.
    tokio::task::spawn_blocking(move || tracer.flush()).await.unwrap();
    let received = received.lock().unwrap();
    let contains = |text: &str| received.windows(text.len()).any(|window| window == text.as_bytes());
    for name in
        ["ovfleet-operator", "reconcile", "observe", "validate", "desired", "apply", "status", "done", "chat"]
    {
        assert!(contains(name), "{name} is not in {} bytes", received.len());
    }
    assert!(contains(&namespace) && !contains("models"), "spans contain names, and nothing of the spec");
}

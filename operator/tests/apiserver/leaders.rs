//! Tests of leader election between two operators.

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use operator::metrics::Metrics;
use serde_json::json;
use tokio::task::JoinSet;

use crate::kubelet::Kubelet;
use crate::support::{cluster, eventually, operator, smallest};

pub(crate) fn is_leader(metrics: &Metrics) -> bool {
    metrics.scrape().lines().any(|line| line == "ovfleet_operator_leader 1")
}

#[tokio::test]
async fn one_of_two_operators_is_the_leader_and_the_other_takes_over() {
    let client = cluster().await.client().await.unwrap();
    let namespace = tests::cluster::namespace(&client, "leaders").await.unwrap();
    let kubelet = Kubelet::start(&client, &namespace);
    let metrics = [Metrics::default(), Metrics::default()];
    let mut operators = [JoinSet::new(), JoinSet::new()];
    for (number, tasks) in operators.iter_mut().enumerate() {
        let identity = format!("operator-{number}");
        tasks.spawn(operator(&namespace, Some(&identity), &metrics[number], kubelet.routers()).await);
    }
    let first =
        eventually(async || metrics.iter().position(is_leader)).await.expect("an operator is the leader");
    let second = 1 - first;
    let resources: Api<operator_api::LlmDeployment> = Api::namespaced(client.clone(), &namespace);
    let create = async |name: &str| {
        let object = json!({
            "apiVersion": "ovfleet.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": name}, "spec": smallest(),
        });
        resources.create(&Default::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
        let ready = async || {
            let status = resources.get(name).await.unwrap().status?;
            status
                .conditions
                .iter()
                .any(|known| known.type_ == "Ready" && known.status == "True")
                .then_some(())
        };
        eventually(ready).await.expect("the resource becomes ready");
    };
    create("one").await;
    assert!(!is_leader(&metrics[second]));
    assert_eq!(metrics[second].api_calls("apply", "Deployment"), 0, "the other operator applies nothing");

    // The leader stops without releasing the Lease, as with kill -9.
    operators[first].shutdown().await;
    eventually(async || is_leader(&metrics[second]).then_some(()))
        .await
        .expect("the other operator becomes the leader");
    let leases: Api<Lease> = Api::namespaced(client.clone(), &namespace);
    let holder = leases.get("operator").await.unwrap().spec.unwrap().holder_identity;
    assert_eq!(holder, Some(format!("operator-{second}")));
    create("two").await;

    // Another holder acquires the Lease, so the current leader must stop.
    let mut lease = leases.get("operator").await.unwrap();
    lease.spec.as_mut().unwrap().holder_identity = Some("another".to_owned());
    while leases.replace("operator", &Default::default(), &lease).await.is_err() {
        lease = leases.get("operator").await.unwrap();
        lease.spec.as_mut().unwrap().holder_identity = Some("another".to_owned());
    }
    let ended = operators[second].join_next().await.expect("a task runs").expect("no task panics");
    assert!(ended.unwrap_err().to_string().contains("another operator has acquired the lease"));
}

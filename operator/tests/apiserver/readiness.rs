//! Tests of the readiness of the leader.

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use http::{Request, StatusCode};
use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::api::{Api, Patch, PatchParams};
use operator::admin::Admin;
use operator::metrics::Metrics;
use operator::pod_reports::NetworkClient;
use operator::run::{Services, manage};
use serde_json::json;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

use crate::leaders::is_leader;
use crate::support::{Settings, cluster, config, eventually, grant, permissions};

/// A user that initially lacks the permission to list Jobs.
const USER: &str = "restricted-operator";

async fn readiness(admin: &Admin) -> (StatusCode, String) {
    let request = Request::get("/readyz").body(Body::empty()).unwrap();
    let response = admin.clone().router().oneshot(request).await.unwrap();
    let status = response.status();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn the_leader_is_ready_once_it_has_listed_all_objects() {
    let client = cluster().await.client().await.unwrap();
    let mut restricted = permissions().unwrap();
    let jobs = restricted.iter_mut().find(|rule| rule["resources"] == json!(["jobs"])).unwrap();
    jobs["verbs"].as_array_mut().unwrap().retain(|verb| verb != "list");
    grant(&client, USER, &restricted).await.unwrap();
    let namespace = tests::cluster::namespace(&client, "readiness").await.unwrap();
    let metrics = Metrics::default();
    let admin = Admin::new(metrics.clone());
    let services =
        Services { admin: admin.clone(), metrics: metrics.clone(), pods: Arc::new(NetworkClient::default()) };
    let operator = cluster().await.client_for(USER, None).await.unwrap();
    let config = config(vec![namespace], Settings::default());
    let mut tasks = JoinSet::new();
    tasks.spawn(manage(operator, config, services, CancellationToken::new()));

    let counted = "ovfleet_operator_watch_failures_total{kind=\"Job\"}";
    let has_failed = async || metrics.scrape().lines().any(|line| line.starts_with(counted)).then_some(());
    eventually(has_failed).await.expect("the failed list is counted");
    assert!(is_leader(&metrics));
    let waiting = "waiting for the initial lists of objects".to_owned();
    assert_eq!(readiness(&admin).await, (StatusCode::SERVICE_UNAVAILABLE, waiting));

    let roles: Api<ClusterRole> = Api::all(client);
    let complete = json!({"rules": permissions().unwrap()});
    roles.patch(USER, &PatchParams::default(), &Patch::Merge(&complete)).await.unwrap();
    let is_ready = async || (readiness(&admin).await.0 == StatusCode::OK).then_some(());
    eventually(is_ready).await.expect("the leader becomes ready");
    assert!(tasks.try_join_next().is_none(), "the operator runs");
}

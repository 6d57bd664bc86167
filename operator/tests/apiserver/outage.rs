//! Tests of an operator that starts while the API server is down.

use std::sync::Arc;

use operator::admin::Admin;
use operator::metrics::Metrics;
use operator::pod_reports::NetworkClient;
use operator::run::{Services, manage};
use tests::cluster::ControlPlane;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::leaders::is_leader;
use crate::support::{OPERATOR, Settings, config, eventually, install};

/// An operator for all namespaces.
struct Operator {
    metrics: Metrics,
    stop: CancellationToken,
    tasks: JoinSet<anyhow::Result<()>>,
}

impl Operator {
    async fn start(cluster: &ControlPlane) -> Self {
        let client = cluster.client_for(OPERATOR, None).await.unwrap();
        let metrics = Metrics::default();
        let services = Services {
            admin: Admin::new(metrics.clone()),
            metrics: metrics.clone(),
            pods: Arc::new(NetworkClient::default()),
        };
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(manage(client, config(Vec::new(), Settings::default()), services, stop.clone()));
        Self { metrics, stop, tasks }
    }

    /// Accepts several connections of the operator to `port` and closes them. Panics if the operator stops or becomes
    /// the leader.
    async fn until_it_retries(&mut self, port: &TcpListener) {
        for _ in 0..3 {
            tokio::select! {
                ended = self.tasks.join_next() => panic!("the operator has stopped: {ended:?}"),
                connection = port.accept() => drop(connection.unwrap()),
            }
        }
        assert!(!is_leader(&self.metrics));
    }
}

#[tokio::test]
async fn an_operator_that_starts_during_an_outage_waits_for_the_api_server() {
    let mut cluster = ControlPlane::start().await.unwrap();
    install(&cluster.client().await.unwrap(), &operator_api::crd()).await.unwrap();
    cluster.kill_api_server().unwrap();
    // This listener closes each connection, so that attempts fail and can be counted.
    let port = TcpListener::bind(cluster.url().strip_prefix("https://").unwrap()).await.unwrap();

    let mut operator = Operator::start(&cluster).await;
    operator.until_it_retries(&port).await;
    operator.stop.cancel();
    let ended = operator.tasks.join_next().await.expect("a task runs").expect("no task panics");
    assert!(ended.is_ok(), "a stop signal ends the retries: {ended:?}");

    let mut operator = Operator::start(&cluster).await;
    operator.until_it_retries(&port).await;
    drop(port);
    cluster.start_api_server().await.unwrap();
    eventually(async || is_leader(&operator.metrics).then_some(()))
        .await
        .expect("the operator becomes the leader");
    assert!(operator.tasks.try_join_next().is_none(), "the operator runs");
}

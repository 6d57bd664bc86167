//! Connections to pods: gRPC to routers, as `router.proto` has it, and HTTP to fetches.

use std::net::IpAddr;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt as _, stream};
use proto::v1alpha1::router_client::RouterClient;
use proto::v1alpha1::{RouterReplica, RouterReplicas, RoutingState, WatchReplicasRequest};
use serde::Deserialize;
use tonic::transport::Endpoint;

use crate::desired::fetch::PROGRESS_PORT;
use crate::desired::server::GRPC_PORT;

/// Time in which a pod has to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Size of the progress report of a fetch.
///
/// Beyond it: the report is ignored.
const PROGRESS_BYTES_MAX: usize = 4 << 10;

/// What a router reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouterReport {
    /// The replicas that it knows.
    pub replicas: Vec<ReportedReplica>,
}

/// A replica as a router sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReportedReplica {
    /// The namespace and the name of its pod, if it has one.
    pub pod: Option<(String, String)>,
    /// The address of its API.
    pub address: String,
    /// Whether requests are routed to it.
    pub is_ready: bool,
    /// Blocks of its KV cache that requests hold.
    pub blocks_active: u32,
    /// Blocks of its KV cache.
    pub blocks_total: u32,
}

/// How far a fetch is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Progress {
    /// Bytes that are there.
    pub bytes: i64,
    /// Bytes in all, where that is known.
    pub bytes_total: Option<i64>,
}

/// Connects to pods.
pub trait PodClient: Send + Sync {
    /// The reports of the router at `address`: the first at once, and then one whenever something changes. The stream ends
    /// when the connection does. `None` if there is no connection.
    fn watch_replicas<'a>(
        &'a self,
        address: &'a str,
    ) -> BoxFuture<'a, Option<BoxStream<'static, RouterReport>>>;

    /// How far the fetch at `address` is. `None` if it does not answer.
    fn progress<'a>(&'a self, address: &'a str) -> BoxFuture<'a, Option<Progress>>;
}

/// Connects over the network.
#[derive(Clone, Debug)]
pub struct Network(reqwest::Client);

impl Default for Network {
    fn default() -> Self {
        // It asks nobody over TLS, but where it is built together with a crate that does, the library wants to know by
        // what. That fails if it is known already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // A pod that redirects the operator elsewhere would make it ask there, with the operator's place in the network.
        let client =
            reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).no_proxy().build();
        Self(client.expect("invariant: a client without TLS settings can be built"))
    }
}

impl PodClient for Network {
    fn watch_replicas<'a>(
        &'a self,
        address: &'a str,
    ) -> BoxFuture<'a, Option<BoxStream<'static, RouterReport>>> {
        Box::pin(watch_replicas(authority(address, GRPC_PORT)))
    }

    fn progress<'a>(&'a self, address: &'a str) -> BoxFuture<'a, Option<Progress>> {
        let url = format!("http://{}/progress", authority(address, PROGRESS_PORT));
        let request = self.0.get(url).timeout(ANSWER_LIMIT);
        Box::pin(async move {
            let mut answer = request.send().await.ok()?;
            if !answer.status().is_success() {
                return None;
            }
            let mut body = Vec::new();
            while let Some(chunk) = answer.chunk().await.ok()? {
                body.extend_from_slice(&chunk);
                if body.len() > PROGRESS_BYTES_MAX {
                    return None;
                }
            }
            serde_json::from_slice(&body).ok()
        })
    }
}

/// The reports of the router whose gRPC is at `authority`, written `HOST:PORT`.
pub(crate) async fn watch_replicas(authority: String) -> Option<BoxStream<'static, RouterReport>> {
    let endpoint = Endpoint::from_shared(format!("http://{authority}")).ok()?;
    let channel = endpoint.connect_timeout(ANSWER_LIMIT).connect().await.ok()?;
    let mut client = RouterClient::new(channel);
    let reports = client.watch_replicas(WatchReplicasRequest {}).await.ok()?.into_inner();
    let reports = stream::unfold(reports, async |mut reports| {
        let report = reports.message().await.ok()??;
        Some((RouterReport::from(report), reports))
    });
    Some(reports.boxed())
}

fn authority(address: &str, port: u16) -> String {
    match address.parse() {
        Ok(IpAddr::V6(address)) => format!("[{address}]:{port}"),
        _ => format!("{address}:{port}"),
    }
}

impl From<RouterReplicas> for RouterReport {
    fn from(report: RouterReplicas) -> Self {
        Self { replicas: report.replicas.into_iter().map(ReportedReplica::from).collect() }
    }
}

impl From<RouterReplica> for ReportedReplica {
    fn from(replica: RouterReplica) -> Self {
        Self {
            is_ready: replica.state() == RoutingState::Ready,
            pod: replica.pod.map(|pod| (pod.namespace, pod.name)),
            address: replica.address,
            blocks_active: replica.blocks_active,
            blocks_total: replica.blocks_total,
        }
    }
}

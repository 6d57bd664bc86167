//! Connections to pods: gRPC to routers, according to `router.proto`, and HTTP to containers that fetch models.

use std::net::IpAddr;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt as _, stream};
use proto::v1alpha1::router_client::RouterClient;
use proto::v1alpha1::{RouterReplica, RouterReplicas, RoutingState, WatchReplicasRequest};
use serde::Deserialize;
use tonic::transport::Endpoint;

use crate::ports::{GRPC_PORT, PROGRESS_PORT};

/// The timeout for the response of a pod.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Size of the progress report of a fetch.
///
/// If exceeded: the report is ignored.
const PROGRESS_BYTES_MAX: usize = 4 << 10;

/// The report of a router about its replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouterReport {
    /// The replicas that the router has discovered.
    pub replicas: Vec<ReportedReplica>,
}

/// A replica in the report of a router.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReportedReplica {
    /// The namespace and the name of its pod, if it has one.
    pub pod: Option<(String, String)>,
    /// The address of its API.
    pub address: String,
    /// Whether the router sends requests to it.
    pub is_ready: bool,
    /// The number of blocks of its KV cache that requests use.
    pub blocks_active: u32,
    /// The number of blocks of its KV cache.
    pub blocks_total: u32,
}

/// The usage of the KV caches of several replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUsage {
    /// The number of blocks that requests use.
    pub blocks_active: u64,
    /// The total number of blocks.
    pub blocks_total: u64,
}

impl CacheUsage {
    /// Returns the percentage of blocks that requests use, rounded to a multiple of 5. `None` if there are no blocks.
    #[must_use]
    pub fn percent(self) -> Option<i32> {
        /// The step in percentage points. With a smaller step, the value would change constantly, and the operator
        /// would write each change to the API server.
        const STEP: f64 = 5.0;
        let fraction = self.blocks_active as f64 / self.blocks_total as f64;
        (self.blocks_total > 0).then(|| ((fraction * 100.0 / STEP).round() * STEP) as i32)
    }
}

impl RouterReport {
    /// Returns the usage of the KV caches of all replicas in the report.
    #[must_use]
    pub fn cache_usage(&self) -> CacheUsage {
        let sum = |of: fn(&ReportedReplica) -> u32| self.replicas.iter().map(of).map(u64::from).sum();
        CacheUsage {
            blocks_active: sum(|replica| replica.blocks_active),
            blocks_total: sum(|replica| replica.blocks_total),
        }
    }
}

/// The progress of a fetch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct FetchProgress {
    /// The number of bytes that were fetched.
    pub bytes: i64,
    /// The total number of bytes, if it is known.
    pub bytes_total: Option<i64>,
}

/// A client that connects to pods.
pub trait PodClient: Send + Sync {
    /// Returns the reports of the router at `address`: the first one immediately, then one at least once a second. The
    /// stream ends with the connection. `None` if the router cannot be reached.
    fn watch_replicas<'a>(
        &'a self,
        address: &'a str,
    ) -> BoxFuture<'a, Option<BoxStream<'static, RouterReport>>>;

    /// Returns the progress of the fetch in the pod at `address`. `None` if the pod does not send a valid report.
    fn progress<'a>(&'a self, address: &'a str) -> BoxFuture<'a, Option<FetchProgress>>;
}

/// The client that connects to pods over the network.
#[derive(Clone, Debug)]
pub struct NetworkClient(reqwest::Client);

impl Default for NetworkClient {
    fn default() -> Self {
        // No connection uses TLS, but with the features that other crates enable, reqwest requires a TLS provider.
        // Installing a provider fails if one is already installed, which is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // A redirect could trick the operator into sending requests to hosts that only it can reach.
        let client =
            reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).no_proxy().build();
        Self(client.expect("invariant: a client without TLS settings can be built"))
    }
}

impl PodClient for NetworkClient {
    fn watch_replicas<'a>(
        &'a self,
        address: &'a str,
    ) -> BoxFuture<'a, Option<BoxStream<'static, RouterReport>>> {
        Box::pin(watch_replicas(authority(address, GRPC_PORT)))
    }

    fn progress<'a>(&'a self, address: &'a str) -> BoxFuture<'a, Option<FetchProgress>> {
        Box::pin(self.progress_at(authority(address, PROGRESS_PORT)))
    }
}

impl NetworkClient {
    /// Returns the progress of the fetch whose container serves it at `authority`, which has the form `HOST:PORT`.
    async fn progress_at(&self, authority: String) -> Option<FetchProgress> {
        let request = self.0.get(format!("http://{authority}/progress")).timeout(RESPONSE_TIMEOUT);
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
    }
}

/// Returns the reports of the router that provides gRPC at `authority`, which has the form `HOST:PORT`.
pub(crate) async fn watch_replicas(authority: String) -> Option<BoxStream<'static, RouterReport>> {
    let endpoint = Endpoint::from_shared(format!("http://{authority}")).ok()?;
    let channel = endpoint.connect_timeout(RESPONSE_TIMEOUT).connect().await.ok()?;
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

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    use super::*;

    /// Starts a simulated pod that sends the same response to every request. Returns the address of the pod.
    fn pod(answer: String) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            for mut connection in listener.incoming().map_while(Result::ok) {
                let mut request = Vec::new();
                let mut byte = [0];
                while !request.ends_with(b"\r\n\r\n") && connection.read(&mut byte).is_ok_and(|read| read > 0)
                {
                    request.push(byte[0]);
                }
                let _ = connection.write_all(answer.as_bytes());
            }
        });
        address
    }

    #[tokio::test]
    async fn a_redirect_of_a_pod_is_not_followed() {
        let body = r#"{"bytes":5}"#;
        let fetching = pod(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()));
        let redirecting = pod(format!(
            "HTTP/1.1 302 Found\r\nlocation: http://{fetching}/progress\r\ncontent-length: 0\r\n\r\n"
        ));
        let client = NetworkClient::default();
        assert_eq!(client.progress_at(fetching).await, Some(FetchProgress { bytes: 5, bytes_total: None }));
        assert_eq!(client.progress_at(redirecting).await, None);
    }
}

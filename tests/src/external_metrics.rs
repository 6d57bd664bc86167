//! A source of metrics for HorizontalPodAutoscalers, like the Prometheus adapter and KEDA. It serves the API group
//! `external.metrics.k8s.io` to the API server on the node ([`crate::node`]), with values from the `/metrics` of the
//! running routers.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use crate::http;
use crate::node::{self, kubectl};
use crate::scene;

/// The API group and its version.
const GROUP_VERSION: &str = "external.metrics.k8s.io/v1beta1";
/// The name of the served metric: the requests in flight of all routers of the namespace.
pub const METRIC: &str = "ovfleet_router_requests_in_flight";
/// The time after which an idle connection is closed.
const IDLE_LIMIT: Duration = Duration::from_secs(30);

/// A registered source of metrics. Dropping it removes the registration.
#[derive(Debug)]
pub struct ExternalMetrics;

impl ExternalMetrics {
    /// Serves the metric on a free port of the node, and registers the API with the API server.
    ///
    /// # Errors
    /// The registration fails, or the API server cannot reach the port.
    pub fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind((node::ADDRESS, 0))?;
        let port = listener.local_addr()?.port();
        let config = Arc::new(tls()?);
        let runtime = tokio::runtime::Handle::current();
        // The threads end with the test process.
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let (config, runtime) = (Arc::clone(&config), runtime.clone());
                std::thread::spawn(move || drop(serve(connection, config, &runtime)));
            }
        });
        node::apply("kube-system", &registration(port))?;
        let registered = Self;
        kubectl(&[
            "wait",
            "--for=condition=Available",
            "apiservice/v1beta1.external.metrics.k8s.io",
            "--timeout=60s",
        ])?;
        Ok(registered)
    }
}

impl Drop for ExternalMetrics {
    fn drop(&mut self) {
        // Namespaces cannot be deleted while a registered API is unavailable.
        drop(kubectl(&["delete", "apiservice", "v1beta1.external.metrics.k8s.io"]));
        drop(kubectl(&["delete", "service,endpointslice", "--namespace=kube-system", "external-metrics"]));
    }
}

fn registration(port: u16) -> String {
    format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: external-metrics}}
spec:
  ports: [{{name: https, port: 443}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: external-metrics, labels: {{kubernetes.io/service-name: external-metrics}}}}
addressType: IPv4
ports: [{{name: https, port: {port}}}]
endpoints: [{{addresses: [{address}]}}]
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {{name: v1beta1.external.metrics.k8s.io}}
spec:
  group: external.metrics.k8s.io
  version: v1beta1
  groupPriorityMinimum: 100
  versionPriority: 100
  insecureSkipTLSVerify: true
  service: {{name: external-metrics, namespace: kube-system}}
",
        address = node::ADDRESS
    )
}

fn tls() -> anyhow::Result<ServerConfig> {
    let identity = rcgen::generate_simple_self_signed([node::ADDRESS.to_owned()])?;
    let key = PrivateKeyDer::try_from(identity.signing_key.serialize_der()).map_err(anyhow::Error::msg)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(config.with_no_client_auth().with_single_cert(vec![identity.cert.der().clone()], key)?)
}

/// Answers GET requests, one at a time, until the API server closes the connection or the connection has been idle for
/// [`IDLE_LIMIT`].
fn serve(
    connection: TcpStream,
    config: Arc<ServerConfig>,
    runtime: &tokio::runtime::Handle,
) -> anyhow::Result<()> {
    connection.set_read_timeout(Some(IDLE_LIMIT))?;
    let mut stream = BufReader::new(StreamOwned::new(ServerConnection::new(config)?, connection));
    loop {
        let mut head = Vec::new();
        while head.last().is_none_or(|line: &String| !line.trim().is_empty()) {
            let mut line = String::new();
            anyhow::ensure!(stream.read_line(&mut line)? > 0, "the connection is closed");
            head.push(line);
        }
        let target = head[0].split(' ').nth(1).context("the request has no target")?.to_owned();
        let (status, body) = runtime.block_on(answer(&target))?;
        let body = body.to_string();
        let length = body.len();
        write!(
            stream.get_mut(),
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        )?;
        stream.get_mut().flush()?;
    }
}

async fn answer(target: &str) -> anyhow::Result<(&'static str, Value)> {
    let path = target.split('?').next().unwrap_or_default();
    let Some(path) = path.strip_prefix(&format!("/apis/{GROUP_VERSION}")) else {
        return Ok(("404 Not Found", json!({})));
    };
    let Some(path) = path.strip_prefix("/namespaces/") else {
        let resource = json!({
            "name": METRIC, "singularName": "", "namespaced": true, "kind": "ExternalMetricValueList", "verbs": ["get"],
        });
        let resources = json!({
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION, "resources": [resource],
        });
        return Ok(("200 OK", resources));
    };
    let namespace = path.split('/').next().unwrap_or_default();
    let value = requests_in_flight(namespace).await?;
    let item = json!({
        "metricName": METRIC,
        "metricLabels": {},
        "timestamp": k8s_openapi::jiff::Timestamp::now().to_string(),
        "value": value.to_string(),
    });
    let list = json!({
        "kind": "ExternalMetricValueList", "apiVersion": GROUP_VERSION, "metadata": {}, "items": [item],
    });
    Ok(("200 OK", list))
}

/// Returns the sum of [`METRIC`] over all routers of a namespace.
async fn requests_in_flight(namespace: &str) -> anyhow::Result<f64> {
    let mut sum = 0.0;
    for address in node::addresses(namespace, scene::ROUTER)? {
        let metrics = http::get(&format!("http://{address}:8081/metrics")).await?;
        let text = metrics.body.as_str().context("the router returned no metrics")?;
        sum += http::metric(text, METRIC).unwrap_or_default();
    }
    Ok(sum)
}

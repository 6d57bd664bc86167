//! Discovers replicas in Kubernetes by watching the EndpointSlices of a Service. [`replicas`] decides which endpoints
//! are replicas, without access to the cluster.
//!
//! A terminating endpoint is no longer a replica, regardless of its other conditions. An endpoint that is not ready is
//! not a replica yet.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use process::error::chain;

use super::client::with_request_timeout;
use super::names::{PortNames, ServiceName};
use super::replica::{DiscoveredReplica, Pod};

/// The pause before the router loads the Kubernetes configuration again, after this has failed or a watch has ended.
const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// Watches the slices of a Service, and calls `on_change` when the replicas change. While the cluster is unreachable,
/// the replicas do not change.
pub(super) async fn watch<F: Future<Output = ()>>(
    service: &ServiceName,
    ports: &PortNames,
    on_change: impl Fn(Vec<DiscoveredReplica>) -> F,
) {
    loop {
        match Client::try_default().await {
            Ok(client) => follow(client, service, ports, &on_change).await,
            Err(error) => {
                tracing::warn!(%service, error = chain(&error), "failed to load the Kubernetes configuration")
            }
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

/// Watches the slices with `client` until the watch ends. The time until the response to each request is limited.
pub async fn follow<F: Future<Output = ()>>(
    client: Client,
    service: &ServiceName,
    ports: &PortNames,
    on_change: impl Fn(Vec<DiscoveredReplica>) -> F,
) {
    let client = with_request_timeout(client);
    let slices: Api<EndpointSlice> = match &service.namespace {
        Some(namespace) => Api::namespaced(client, namespace),
        None => Api::default_namespaced(client),
    };
    let config = watcher::Config::default().labels(&format!("kubernetes.io/service-name={}", service.name));
    let mut events = watcher::watcher(slices, config).default_backoff().boxed();
    let mut known: BTreeMap<String, EndpointSlice> = BTreeMap::new();
    let mut listed: Option<BTreeMap<String, EndpointSlice>> = None;
    let mut last: Option<Vec<DiscoveredReplica>> = None;
    while let Some(event) = events.next().await {
        let name = |slice: &EndpointSlice| slice.metadata.name.clone().unwrap_or_default();
        match event {
            Ok(Event::Init) => listed = Some(BTreeMap::new()),
            Ok(Event::InitApply(slice)) => {
                listed.get_or_insert_default().insert(name(&slice), slice);
            }
            // The previous slices remain valid until the new list is complete.
            Ok(Event::InitDone) => known = listed.take().unwrap_or_default(),
            Ok(Event::Apply(slice)) => {
                known.insert(name(&slice), slice);
            }
            Ok(Event::Delete(slice)) => {
                known.remove(&name(&slice));
            }
            Err(error) => {
                tracing::warn!(%service, error = chain(&error), "failed to list or watch the EndpointSlices");
                continue;
            }
        }
        if listed.is_none() {
            let present = replicas(known.values(), ports);
            if last.as_ref() != Some(&present) {
                tracing::info!(%service, replicas = present.len(), "the endpoints of the Service have changed");
                last = Some(present.clone());
                on_change(present).await;
            }
        }
    }
}

/// The replicas among the endpoints of the slices.
#[must_use]
pub fn replicas<'a>(
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
    ports: &PortNames,
) -> Vec<DiscoveredReplica> {
    let mut by_address = BTreeMap::new();
    let mut terminating = BTreeSet::new();
    for slice in slices {
        let port = |name: &String| {
            let ports = slice.ports.as_deref().unwrap_or_default();
            let port = ports.iter().find(|port| port.name.as_ref() == Some(name))?.port?;
            u16::try_from(port).ok()
        };
        // If the slice has a single port, this is the port of the API regardless of its name, because Kubernetes does
        // not require a name for a single port.
        let only_port = || match slice.ports.as_deref() {
            Some([port]) => port.port.and_then(|port| u16::try_from(port).ok()),
            _ => None,
        };
        let Some(http) = port(&ports.http).or_else(only_port) else { continue };
        let grpc = port(&ports.grpc);
        for endpoint in &slice.endpoints {
            let conditions = endpoint.conditions.as_ref();
            let is_terminating = conditions.and_then(|conditions| conditions.terminating) == Some(true);
            let is_ready = conditions.and_then(|conditions| conditions.ready) != Some(false);
            for address in endpoint.addresses.iter().filter_map(|address| address.parse::<IpAddr>().ok()) {
                let http = SocketAddr::new(address, http);
                if is_terminating {
                    terminating.insert(http);
                }
                if is_ready && !is_terminating {
                    let pod = pod(slice, endpoint);
                    let name = pod.as_ref().map_or_else(|| http.to_string(), |pod| pod.name.clone());
                    let grpc = grpc.map(|port| SocketAddr::new(address, port));
                    by_address.insert(http, DiscoveredReplica { http, grpc, name, pod });
                }
            }
        }
    }
    // An endpoint that moves from one slice to another can be in both. Remove it if either slice marks it as
    // terminating.
    by_address.retain(|address, _| !terminating.contains(address));
    by_address.into_values().collect()
}

/// The pod behind an endpoint. If the endpoint names no namespace, the pod is in the namespace of the slice.
fn pod(slice: &EndpointSlice, endpoint: &Endpoint) -> Option<Pod> {
    let target = endpoint.target_ref.as_ref()?;
    let namespace = target.namespace.clone().or_else(|| slice.metadata.namespace.clone());
    Some(Pod {
        namespace: namespace.unwrap_or_default(),
        name: target.name.clone()?,
        uid: target.uid.clone().unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn slice(ports: &serde_json::Value, endpoints: &serde_json::Value) -> EndpointSlice {
        serde_json::from_value(json!({"addressType": "IPv4", "ports": ports, "endpoints": endpoints}))
            .unwrap()
    }

    fn port_names() -> PortNames {
        PortNames { http: "http".to_owned(), grpc: "grpc".to_owned() }
    }

    fn names(slices: &[EndpointSlice]) -> Vec<String> {
        replicas(slices, &port_names())
            .into_iter()
            .map(|replica| {
                format!("{} {} {:?}", replica.name, replica.http, replica.grpc.map(|grpc| grpc.port()))
            })
            .collect()
    }

    #[test]
    fn ready_endpoints_are_replicas_with_the_ports_of_the_slice() {
        let ports = json!([{"name": "http", "port": 8000}, {"name": "grpc", "port": 50051}]);
        let endpoints = json!([
            {"addresses": ["10.0.0.1"], "conditions": {"ready": true}, "targetRef": {"kind": "Pod", "name": "chat-0"}},
            {"addresses": ["10.0.0.2"], "conditions": {}},
            {"addresses": ["10.0.0.3"], "conditions": {"ready": false}},
            {"addresses": ["10.0.0.4"], "conditions": {"ready": true, "serving": true, "terminating": true}},
        ]);
        assert_eq!(
            names(&[slice(&ports, &endpoints)]),
            ["chat-0 10.0.0.1:8000 Some(50051)", "10.0.0.2:8000 10.0.0.2:8000 Some(50051)"]
        );
    }

    #[test]
    fn a_replica_has_the_pod_behind_its_endpoint() {
        let ports = json!([{"name": "http", "port": 8000}]);
        let target = json!({"kind": "Pod", "namespace": "models", "name": "chat-0", "uid": "u-1"});
        let slice = slice(&ports, &json!([{"addresses": ["10.0.0.1"], "targetRef": target}]));
        let discovered = replicas(&[slice], &port_names());
        let pod = Pod { namespace: "models".to_owned(), name: "chat-0".to_owned(), uid: "u-1".to_owned() };
        assert_eq!(discovered[0].pod, Some(pod));
    }

    #[test]
    fn a_terminating_endpoint_is_not_a_replica_even_if_another_slice_lists_it_as_ready() {
        let ports = json!([{"name": "http", "port": 1}]);
        let ready = slice(&ports, &json!([{"addresses": ["10.0.0.1"], "conditions": {"ready": true}}]));
        let ending =
            slice(&ports, &json!([{"addresses": ["10.0.0.1"], "conditions": {"terminating": true}}]));
        assert_eq!(names(&[ending.clone(), ready.clone()]), [""; 0]);
        assert_eq!(names(&[ready, ending]), [""; 0]);
    }

    #[test]
    fn a_single_port_needs_no_name_and_several_ports_need_the_configured_name() {
        let endpoints = json!([{"addresses": ["10.0.0.1"]}]);
        assert_eq!(names(&[slice(&json!([{"port": 80}]), &endpoints)]), ["10.0.0.1:80 10.0.0.1:80 None"]);
        let others = json!([{"name": "a", "port": 1}, {"name": "b", "port": 2}]);
        assert_eq!(names(&[slice(&others, &endpoints)]), [""; 0]);
    }
}

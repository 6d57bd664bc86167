//! Replicas as Kubernetes tells them: the EndpointSlices of a Service, watched. What endpoints are worth is
//! decided in [`replicas`], which knows no cluster; the rest follows the watch.
//!
//! An endpoint that terminates is gone at once, whatever else is said of it; one that is not ready is not
//! there yet.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};

use super::names::ServiceName;
use super::replica::{DiscoveredReplica, Pod};

/// The pause before a cluster that cannot be reached is tried again.
const PAUSE: Duration = Duration::from_secs(2);

/// Follows a Service's slices and tells the replicas whenever they change, for as long as it is polled. A
/// cluster that cannot be reached changes nothing.
pub(super) async fn watch<F: Future<Output = ()>>(
    service: &ServiceName,
    ports: &[String; 2],
    told: impl Fn(Vec<DiscoveredReplica>) -> F,
) {
    loop {
        match Client::try_default().await {
            Ok(client) => follow(client, service, ports, &told).await,
            Err(error) => tracing::warn!(%service, %error, "failed to reach Kubernetes"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Follows the slices by `client` until the watch ends.
pub async fn follow<F: Future<Output = ()>>(
    client: Client,
    service: &ServiceName,
    ports: &[String; 2],
    told: impl Fn(Vec<DiscoveredReplica>) -> F,
) {
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
            // Until the list is whole, what was known counts.
            Ok(Event::InitDone) => known = listed.take().unwrap_or_default(),
            Ok(Event::Apply(slice)) => {
                known.insert(name(&slice), slice);
            }
            Ok(Event::Delete(slice)) => {
                known.remove(&name(&slice));
            }
            Err(error) => {
                tracing::warn!(%service, %error, "failed to watch the endpoints");
                continue;
            }
        }
        if listed.is_none() {
            let present = replicas(known.values(), ports);
            if last.as_ref() != Some(&present) {
                tracing::info!(%service, replicas = present.len(), "the endpoints have changed");
                last = Some(present.clone());
                told(present).await;
            }
        }
    }
}

/// The replicas that slices name.
#[must_use]
pub fn replicas<'a>(
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
    ports: &[String; 2],
) -> Vec<DiscoveredReplica> {
    let mut found = BTreeMap::new();
    let mut terminating = BTreeSet::new();
    for slice in slices {
        let port = |name: &String| {
            let ports = slice.ports.as_deref().unwrap_or_default();
            let port = ports.iter().find(|port| port.name.as_ref() == Some(name))?.port?;
            u16::try_from(port).ok()
        };
        // A port without a name is the only one there is.
        let only = || match slice.ports.as_deref() {
            Some([port]) => port.port.and_then(|port| u16::try_from(port).ok()),
            _ => None,
        };
        let Some(http) = port(&ports[0]).or_else(only) else { continue };
        let grpc = port(&ports[1]);
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
                    found.insert(http, DiscoveredReplica { http, grpc, name, pod });
                }
            }
        }
    }
    // An endpoint may be in two slices while it moves; that it terminates counts.
    found.retain(|address, _| !terminating.contains(address));
    found.into_values().collect()
}

/// The pod behind an endpoint. A pod is in the namespace of its slice.
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

    fn names(slices: &[EndpointSlice]) -> Vec<String> {
        let ports = ["http".to_owned(), "grpc".to_owned()];
        replicas(slices, &ports)
            .into_iter()
            .map(|found| format!("{} {} {:?}", found.name, found.http, found.grpc.map(|grpc| grpc.port())))
            .collect()
    }

    #[test]
    fn takes_ready_endpoints_with_both_ports_from_the_slice() {
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
    fn names_the_pod_behind_an_endpoint() {
        let ports = json!([{"name": "http", "port": 8000}]);
        let target = json!({"kind": "Pod", "namespace": "models", "name": "chat-0", "uid": "u-1"});
        let slice = slice(&ports, &json!([{"addresses": ["10.0.0.1"], "targetRef": target}]));
        let found = replicas(&[slice], &["http".to_owned(), "grpc".to_owned()]);
        let pod = Pod { namespace: "models".to_owned(), name: "chat-0".to_owned(), uid: "u-1".to_owned() };
        assert_eq!(found[0].pod, Some(pod));
    }

    #[test]
    fn a_terminating_endpoint_is_gone_even_if_another_slice_still_has_it() {
        let ports = json!([{"name": "http", "port": 1}]);
        let ready = slice(&ports, &json!([{"addresses": ["10.0.0.1"], "conditions": {"ready": true}}]));
        let ending =
            slice(&ports, &json!([{"addresses": ["10.0.0.1"], "conditions": {"terminating": true}}]));
        assert_eq!(names(&[ending.clone(), ready.clone()]), [""; 0]);
        assert_eq!(names(&[ready, ending]), [""; 0]);
    }

    #[test]
    fn a_single_port_needs_no_name_and_one_without_the_right_name_is_none() {
        let endpoints = json!([{"addresses": ["10.0.0.1"]}]);
        assert_eq!(names(&[slice(&json!([{"port": 80}]), &endpoints)]), ["10.0.0.1:80 10.0.0.1:80 None"]);
        let others = json!([{"name": "a", "port": 1}, {"name": "b", "port": 2}]);
        assert_eq!(names(&[slice(&others, &endpoints)]), [""; 0]);
    }
}

//! Asking pods directly: routers, which replicas they have admitted and how busy those are; fetches, how far they are.
//! Nobody is asked without need. What is not answered is not known, and nothing is concluded from that.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use serde::Deserialize;

use crate::desired::fetch::PROGRESS_PORT;
use crate::desired::names::Component;
use crate::desired::server::HTTP_PORT;
use crate::observe::{Sample, awaiting};
use crate::pod::PodState;

/// Time in which a pod has to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Bytes of an answer that are read.
const ANSWER_BYTES_MAX: usize = 8 << 20;

/// What pods have said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    /// Replicas, by their pods' names, that every router that answered has admitted.
    pub admitted: BTreeSet<String>,
    /// Blocks of the KV cache that requests hold, and blocks in all, over all replicas; if routers were asked.
    pub blocks: Option<(f64, f64)>,
    /// How far a fetch is, if one was asked.
    pub progress: Option<Progress>,
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

/// Somebody who asks.
pub trait Ask: Send + Sync {
    /// The body of what `address` answers to GET `path`; nothing if it does not, or not in time.
    fn get<'a>(&'a self, address: &'a str, port: u16, path: &'a str) -> BoxFuture<'a, Option<String>>;
}

/// Asks over HTTP.
#[derive(Clone, Debug)]
pub struct Http(reqwest::Client);

impl Default for Http {
    fn default() -> Self {
        Self(client())
    }
}

/// Somebody who asks over HTTP. It asks nobody over TLS, but where it is built together with a crate that does, the
/// library wants to know by what.
pub(crate) fn client() -> reqwest::Client {
    // Fails if that is known already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::new()
}

impl Ask for Http {
    fn get<'a>(&'a self, address: &'a str, port: u16, path: &'a str) -> BoxFuture<'a, Option<String>> {
        let host = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
        let request = self.0.get(format!("http://{host}:{port}{path}")).timeout(ANSWER_LIMIT);
        Box::pin(async move {
            let mut answer = request.send().await.ok()?.error_for_status().ok()?;
            let mut body = Vec::new();
            while let Some(chunk) = answer.chunk().await.ok()? {
                body.extend_from_slice(&chunk);
                if body.len() > ANSWER_BYTES_MAX {
                    return None;
                }
            }
            String::from_utf8(body).ok()
        })
    }
}

/// Asks whom it takes to know what is to be known.
pub async fn ask(ask: &dyn Ask, pods: &[PodState], sample: Sample) -> Told {
    let mut told = Told::default();
    let addressed = |component: Component| {
        let pods = pods.iter().filter(move |pod| pod.component == component.name());
        pods.filter(|pod| !pod.is_terminating && !pod.is_finished).filter_map(|pod| pod.address.as_deref())
    };
    let fetching = pods.iter().filter(|pod| pod.is_fetching && !pod.is_terminating);
    if let Some(address) = fetching.filter_map(|pod| pod.address.as_deref()).next() {
        let answer = ask.get(address, PROGRESS_PORT, "/progress").await;
        told.progress = answer.and_then(|answer| serde_json::from_str(&answer).ok());
    }
    if sample == Sample::Needed && awaiting(pods).is_empty() {
        return told;
    }
    let routers = addressed(Component::Router);
    let answers = join_all(routers.map(|address| ask.get(address, HTTP_PORT, "/metrics"))).await;
    let views: Vec<BTreeMap<String, Replica>> =
        answers.iter().flatten().map(|answer| replicas(answer)).collect();
    if let Some((first, others)) = views.split_first() {
        let admitted =
            first.iter().filter(|(_, replica)| replica.is_admitted()).map(|(name, _)| name.clone());
        told.admitted = admitted
            .filter(|name| others.iter().all(|view| view.get(name).is_some_and(Replica::is_admitted)))
            .collect();
        let sum = |of: fn(&Replica) -> f64| first.values().map(of).sum::<f64>();
        told.blocks = Some((sum(|replica| replica.active), sum(Replica::blocks)));
    }
    told
}

/// A replica as a router sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Replica {
    is_trusted: bool,
    active: f64,
    evictable: f64,
    free: f64,
}

impl Replica {
    fn blocks(&self) -> f64 {
        self.active + self.evictable + self.free
    }

    /// It may be picked, and has reported its load: with a cache, as it has one once its model is loaded.
    fn is_admitted(&self) -> bool {
        self.is_trusted && self.blocks() > 0.0
    }
}

/// What the metrics of one router say: the replicas that it has admitted, and blocks of the KV cache that requests hold
/// and blocks in all.
pub(crate) fn view(metrics: &str) -> (BTreeSet<String>, (f64, f64)) {
    let replicas = replicas(metrics);
    let admitted = replicas.iter().filter(|(_, replica)| replica.is_admitted());
    let admitted = admitted.map(|(name, _)| name.clone()).collect();
    let sum = |of: fn(&Replica) -> f64| replicas.values().map(of).sum::<f64>();
    (admitted, (sum(|replica| replica.active), sum(Replica::blocks)))
}

/// What a router's metrics say of replicas. They are for everybody who reaches the router, which its other pages are
/// not where keys are asked for; and the operator knows no keys.
fn replicas(metrics: &str) -> BTreeMap<String, Replica> {
    const PREFIX: &str = "ovfleet_router_replica_";
    let mut replicas: BTreeMap<String, Replica> = BTreeMap::new();
    for line in metrics.lines().filter_map(|line| line.strip_prefix(PREFIX)) {
        let Some((metric, rest)) = line.split_once("{replica=\"") else { continue };
        let Some((name, value)) = rest.split_once("\"} ") else { continue };
        let Some(value) = value.split(' ').next().and_then(|value| value.parse::<f64>().ok()) else {
            continue;
        };
        let replica = replicas.entry(name.to_owned()).or_default();
        match metric {
            "trusted" => replica.is_trusted = value > 0.0,
            "blocks_active" => replica.active = value,
            "blocks_evictable" => replica.evictable = value,
            "blocks_free" => replica.free = value,
            _ => {}
        }
    }
    replicas
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Pages(BTreeMap<(String, u16), String>);

    impl Ask for Pages {
        fn get<'a>(&'a self, address: &'a str, port: u16, _: &'a str) -> BoxFuture<'a, Option<String>> {
            let page = self.0.get(&(address.to_owned(), port)).cloned();
            Box::pin(async move { page })
        }
    }

    fn metrics(replicas: &[(&str, u32, u32, u32)]) -> String {
        let mut text = String::from("# TYPE ovfleet_router_replica_trusted gauge\n");
        for (name, trusted, active, free) in replicas {
            for (metric, value) in [("trusted", trusted), ("blocks_active", active), ("blocks_free", free)] {
                text.push_str(&format!("ovfleet_router_replica_{metric}{{replica=\"{name}\"}} {value}\n"));
            }
        }
        text + "# EOF\n"
    }

    fn pod(name: &str, component: Component, address: &str) -> PodState {
        PodState {
            name: name.to_owned(),
            component: component.name().to_owned(),
            address: Some(address.to_owned()),
            containers_ready: true,
            ..PodState::default()
        }
    }

    #[tokio::test]
    async fn admitted_is_whom_all_routers_that_answer_would_pick() {
        let pages = Pages(BTreeMap::from([
            (("1".to_owned(), HTTP_PORT), metrics(&[("a", 1, 5, 5), ("b", 1, 0, 10), ("c", 1, 0, 0)])),
            (("2".to_owned(), HTTP_PORT), metrics(&[("a", 1, 5, 5), ("b", 0, 0, 10), ("c", 1, 0, 0)])),
        ]));
        let pods = [
            pod("a", Component::Server, "9"),
            pod("x", Component::Router, "1"),
            pod("y", Component::Router, "2"),
            pod("z", Component::Router, "3"),
        ];
        let told = ask(&pages, &pods, Sample::Needed).await;
        assert_eq!(told.admitted, BTreeSet::from(["a".to_owned()]));
        assert_eq!(told.blocks, Some((5.0, 20.0)));
        let told = ask(&pages, &pods[3..], Sample::All).await;
        assert_eq!(told, Told::default());
    }

    #[tokio::test]
    async fn nobody_is_asked_without_need() {
        struct Nobody;
        impl Ask for Nobody {
            fn get<'a>(&'a self, address: &'a str, _: u16, path: &'a str) -> BoxFuture<'a, Option<String>> {
                panic!("asked {address}{path}")
            }
        }
        let admitted = PodState { is_routable: Some(true), ..pod("a", Component::Server, "9") };
        let pods = [admitted, pod("x", Component::Router, "1")];
        assert_eq!(ask(&Nobody, &pods, Sample::Needed).await, Told::default());
    }
}

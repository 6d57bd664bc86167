//! Tests with routers that report, and with routers that do not respond.

use std::pin::Pin;

use futures_util::Stream;
use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use proto::v1alpha1::router_server::{Router, RouterServer};
use proto::v1alpha1::{PodReference, RouterReplica, RouterReplicas, RoutingState, WatchReplicasRequest};
use tokio::sync::watch;

use super::*;

/// The routers, by address. Any other router never responds.
struct Routers(BTreeMap<&'static str, watch::Receiver<RouterReport>>);

impl PodClient for Routers {
    fn watch_replicas<'a>(
        &'a self,
        address: &'a str,
    ) -> BoxFuture<'a, Option<BoxStream<'static, RouterReport>>> {
        let reports = self.0.get(address).cloned();
        Box::pin(async move {
            let Some(mut reports) = reports else { return std::future::pending().await };
            reports.mark_changed();
            let stream = futures_util::stream::unfold(reports, async |mut reports| {
                reports.changed().await.ok()?;
                let report = reports.borrow_and_update().clone();
                Some((report, reports))
            });
            Some(stream.boxed())
        })
    }

    fn progress<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Option<FetchProgress>> {
        Box::pin(async { Some(FetchProgress { bytes: 5, bytes_total: Some(10) }) })
    }
}

fn report(replicas: &[(&str, bool)]) -> RouterReport {
    let replica = |(name, is_ready): &(&str, bool)| ReportedReplica {
        pod: Some(("models".to_owned(), (*name).to_owned())),
        is_ready: *is_ready,
        blocks_active: 5,
        blocks_total: 10,
        ..ReportedReplica::default()
    };
    RouterReport { replicas: replicas.iter().map(replica).collect() }
}

fn pod(name: &str, component: Component, address: &str) -> PodState {
    PodState {
        name: name.to_owned(),
        component: component.name().to_owned(),
        address: Some(address.to_owned()),
        containers_ready: true,
        is_ready: component == Component::Router,
        ..PodState::default()
    }
}

fn owner() -> ObjectRef<LlmDeployment> {
    ObjectRef::new("chat").within("models")
}

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Waits for changes until the reports match `is_expected`.
async fn until(
    collector: &ReportCollector,
    changes: &mut mpsc::Receiver<ObjectRef<LlmDeployment>>,
    pods: &[PodState],
    is_expected: impl Fn(&PodReports) -> bool,
) -> PodReports {
    loop {
        let reports = collector.reports(&owner(), "1", pods, CacheSampling::Skip);
        if is_expected(&reports) {
            return reports;
        }
        assert_eq!(changes.recv().await, Some(owner()));
    }
}

#[tokio::test(start_paused = true)]
async fn replicas_are_admitted_when_all_reachable_routers_admit_them() {
    let (first, one) = watch::channel(report(&[("a", true), ("b", true), ("c", false)]));
    let (second, two) = watch::channel(report(&[("a", true), ("b", false)]));
    let (sender, mut changes) = mpsc::channel(16);
    let collector = ReportCollector::new(Arc::new(Routers(BTreeMap::from([("1", one), ("2", two)]))), sender);
    let pods = [
        pod("a", Component::Server, "9"),
        pod("x", Component::Router, "1"),
        pod("y", Component::Router, "2"),
        pod("silent", Component::Router, "3"),
    ];
    // The call does not wait for reports.
    assert_eq!(collector.reports(&owner(), "1", &pods, CacheSampling::Skip), PodReports::default());
    let reports = until(&collector, &mut changes, &pods, |reports| !reports.admitted.is_empty()).await;
    assert_eq!((reports.admitted, reports.cache_usage.is_some()), (names(&["a"]), true));
    second.send_replace(report(&[("a", true), ("b", true)]));
    let both = names(&["a", "b"]);
    until(&collector, &mut changes, &pods, |reports| reports.admitted == both).await;
    drop((first, second));
}

#[tokio::test(start_paused = true)]
async fn an_unreachable_router_is_ignored() {
    let (first, one) = watch::channel(report(&[("a", false)]));
    let (_second, two) = watch::channel(report(&[("a", true)]));
    let (sender, mut changes) = mpsc::channel(16);
    let collector = ReportCollector::new(Arc::new(Routers(BTreeMap::from([("1", one), ("2", two)]))), sender);
    let pods = [
        pod("a", Component::Server, "9"),
        pod("x", Component::Router, "1"),
        pod("y", Component::Router, "2"),
    ];
    until(&collector, &mut changes, &pods, |reports| reports.cache_usage.is_some()).await;
    drop(first);
    until(&collector, &mut changes, &pods, |reports| reports.admitted == names(&["a"])).await;
}

#[test]
fn the_cache_usage_is_that_of_a_ready_router() {
    let starting = PodState { is_ready: false, ..pod("x", Component::Router, "1") };
    let pods = [starting, pod("y", Component::Router, "2")];
    let addresses = sources(&pods, CacheSampling::Sample).into_iter().map(|source| source.address);
    assert_eq!(addresses.collect::<Vec<_>>(), ["2"]);
}

#[tokio::test(start_paused = true)]
async fn pods_are_followed_only_while_their_reports_are_needed() {
    let (sender, _changes) = mpsc::channel(16);
    let collector = ReportCollector::new(Arc::new(Routers(BTreeMap::new())), sender);
    let tasks = |collector: &ReportCollector| {
        collector.state.resources().values().map(|reports| reports.tasks.len()).sum::<usize>()
    };
    let mut pods = vec![pod("a", Component::Server, "9"), pod("x", Component::Router, "1")];
    let _ = collector.reports(&owner(), "1", &pods, CacheSampling::Skip);
    assert_eq!(tasks(&collector), 1);
    pods[0].is_routable = Some(true);
    let _ = collector.reports(&owner(), "1", &pods, CacheSampling::Skip);
    assert_eq!(tasks(&collector), 0, "all replicas are admitted");
    let _ = collector.reports(&owner(), "1", &pods, CacheSampling::Sample);
    assert_eq!(tasks(&collector), 1, "a sample of the cache usage");
    collector.retain(&HashSet::new());
    assert_eq!(tasks(&collector), 0, "the resource is gone");
}

#[tokio::test(start_paused = true)]
async fn the_progress_of_a_fetch_is_reported() {
    let (sender, mut changes) = mpsc::channel(16);
    let collector = ReportCollector::new(Arc::new(Routers(BTreeMap::new())), sender);
    let fetching = PodState { is_fetching: true, containers_ready: false, ..pod("f", Component::Fetch, "4") };
    let reports = until(&collector, &mut changes, &[fetching], |reports| reports.progress.is_some()).await;
    assert_eq!(reports.progress, Some(FetchProgress { bytes: 5, bytes_total: Some(10) }));
    assert_eq!(collector.reports(&owner(), "1", &[], CacheSampling::Skip).progress, None);
}

/// The gRPC service of a router, with a fixed report.
struct FixedRouter(RouterReplicas);

#[tonic::async_trait]
impl Router for FixedRouter {
    type WatchReplicasStream = Pin<Box<dyn Stream<Item = Result<RouterReplicas, tonic::Status>> + Send>>;

    async fn watch_replicas(
        &self,
        _: tonic::Request<WatchReplicasRequest>,
    ) -> Result<tonic::Response<Self::WatchReplicasStream>, tonic::Status> {
        Ok(tonic::Response::new(futures_util::stream::iter([Ok(self.0.clone())]).boxed()))
    }
}

#[tokio::test]
async fn reports_of_the_grpc_service_are_read() {
    let replica = |name: &str, state: RoutingState| RouterReplica {
        address: "10.0.0.7:8000".to_owned(),
        pod: Some(PodReference { namespace: "models".to_owned(), name: name.to_owned(), uid: String::new() }),
        state: state.into(),
        blocks_total: 10,
        blocks_active: 4,
        ..RouterReplica::default()
    };
    let states = [RoutingState::Ready, RoutingState::Starting, RoutingState::Draining, RoutingState::Ejected];
    let replicas = states.map(|state| replica(state.as_str_name(), state)).to_vec();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = futures_util::stream::unfold(listener, async |listener| {
        let accepted = listener.accept().await.map(|(stream, _)| stream);
        Some((accepted, listener))
    });
    let service = RouterServer::new(FixedRouter(RouterReplicas { replicas, ..RouterReplicas::default() }));
    let mut server = JoinSet::new();
    server.spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
    let mut reports = client::watch_replicas(address.to_string()).await.unwrap();
    let report = reports.next().await.unwrap();
    let ready: Vec<bool> = report.replicas.iter().map(|replica| replica.is_ready).collect();
    assert_eq!(ready, [true, false, false, false]);
    assert_eq!(report.replicas[0].pod, Some(("models".to_owned(), "ROUTING_STATE_READY".to_owned())));
    assert_eq!((report.replicas[0].blocks_active, report.replicas[0].blocks_total), (4, 10));
    assert!(reports.next().await.is_none(), "the stream ends with the connection");
}

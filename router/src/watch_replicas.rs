//! The gRPC service `Router` (`proto/router.proto`): it reports to the operator which replicas this router knows, and
//! which of them receive requests.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{Stream, stream};
use proto::v1alpha1::router_server::{Router, RouterServer};
use proto::v1alpha1::{
    PodReference, RouterReplica, RouterReplicas, RoutingState, State, WatchReplicasRequest,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::{Request, Response, Status};

use crate::app::App;
use crate::health::HealthState;
use crate::replica::Replica;

/// Number of open gRPC streams that report to operators.
///
/// If exceeded: the gRPC call fails with `RESOURCE_EXHAUSTED`.
const STREAMS_MAX: usize = 16;
/// Size of a gRPC request to the router. Requests have no fields yet.
///
/// If exceeded: the gRPC call fails with `OUT_OF_RANGE`.
const REQUEST_BYTES_MAX: usize = 4096;
/// The interval at which a stream checks for changes.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The time after which a message is sent even if nothing has changed.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The implementation of the service.
#[derive(Clone, Debug)]
pub(crate) struct RouterService {
    app: App,
    streams: Arc<Semaphore>,
}

/// The service for a gRPC server.
pub(crate) fn server(app: App) -> RouterServer<RouterService> {
    let service = RouterService { app, streams: Arc::new(Semaphore::new(STREAMS_MAX)) };
    RouterServer::new(service).max_decoding_message_size(REQUEST_BYTES_MAX)
}

#[tonic::async_trait]
impl Router for RouterService {
    type WatchReplicasStream = Pin<Box<dyn Stream<Item = Result<RouterReplicas, Status>> + Send>>;

    async fn watch_replicas(
        &self,
        _: Request<WatchReplicasRequest>,
    ) -> Result<Response<Self::WatchReplicasStream>, Status> {
        let permit = Arc::clone(&self.streams).try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!("too many streams are open (limit: {STREAMS_MAX})"))
        })?;
        let watcher = Watcher { app: self.app.clone(), last: None, _permit: permit };
        let messages = stream::unfold(watcher, async |mut watcher| {
            let message = watcher.next().await;
            Some((Ok(message), watcher))
        });
        Ok(Response::new(Box::pin(messages)))
    }
}

/// One open stream.
struct Watcher {
    app: App,
    /// The last message and the time when it was sent.
    last: Option<(RouterReplicas, Instant)>,
    _permit: OwnedSemaphorePermit,
}

impl Watcher {
    async fn next(&mut self) -> RouterReplicas {
        loop {
            let now = Instant::now();
            let message = snapshot(&self.app, now);
            let is_due = self.last.as_ref().is_none_or(|(last, sent)| {
                differs(last, &message) || now.saturating_duration_since(*sent) >= HEARTBEAT
            });
            if is_due {
                self.last = Some((message.clone(), now));
                return message;
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }
}

/// Whether the list of replicas has changed, apart from the counts, which change all the time.
fn differs(before: &RouterReplicas, after: &RouterReplicas) -> bool {
    let routing = |replica: &RouterReplica| RouterReplica {
        requests_in_flight: 0,
        blocks_total: 0,
        blocks_active: 0,
        ..replica.clone()
    };
    !before.replicas.iter().map(routing).eq(after.replicas.iter().map(routing))
}

fn snapshot(app: &App, now: Instant) -> RouterReplicas {
    let dispatcher = app.dispatcher();
    let mut replicas: Vec<_> = dispatcher.replicas.all().iter().cloned().collect();
    replicas.sort_by_key(|replica| replica.discovered.http);
    RouterReplicas {
        router: dispatcher.replicas.router(),
        replicas: replicas.iter().map(|replica| describe(app, replica, now)).collect(),
        requests_waiting: u32::try_from(dispatcher.queued() + dispatcher.requests_without_replica())
            .unwrap_or(u32::MAX),
    }
}

fn describe(app: &App, replica: &Arc<Replica>, now: Instant) -> RouterReplica {
    let snapshot = replica.ledger.snapshot(now, app.settings().report_ttl);
    let reported = snapshot.reported.unwrap_or_default();
    let pod = replica.discovered.pod.as_ref().map(|pod| PodReference {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: pod.uid.clone(),
    });
    RouterReplica {
        address: replica.discovered.http.to_string(),
        name: replica.discovered.name.clone(),
        pod,
        state: routing_state(app, replica, snapshot.state, now).into(),
        requests_in_flight: snapshot.booked.in_flight,
        models: replica.status().models.clone(),
        blocks_total: reported.blocks_total,
        blocks_active: reported.blocks_active,
    }
}

/// Whether requests are routed to a replica whose last report has this state, and if not, the reason.
fn routing_state(app: &App, replica: &Arc<Replica>, reported: Option<State>, now: Instant) -> RoutingState {
    match reported {
        Some(State::Starting) => return RoutingState::Starting,
        Some(State::Draining) => return RoutingState::Draining,
        Some(State::Stopped) => return RoutingState::Stopped,
        Some(State::Serving | State::Unspecified) | None => {}
    }
    if replica.status().models.is_empty() {
        return RoutingState::New;
    }
    if replica.hangs(now, app.settings().hang_timeout) {
        return RoutingState::Silent;
    }
    let health = app.dispatcher().health();
    let is_ejected = health.state(replica.identity, now) == HealthState::Ejected
        && !app.dispatcher().replicas.served_models_of(replica).iter().any(|served_model| {
            let replicas = served_model.replicas();
            health.is_panicking(replicas.iter().map(|replica| replica.identity), now)
        });
    if is_ejected { RoutingState::Ejected } else { RoutingState::Ready }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use clap::Parser as _;
    use futures_util::StreamExt as _;
    use proto::v1alpha1::Load;

    use super::*;
    use crate::args::Args;
    use crate::discovery::{DiscoveredReplica, Pod};

    fn discovered(port: u16) -> DiscoveredReplica {
        let pod =
            Pod { namespace: "models".to_owned(), name: format!("chat-{port}"), uid: format!("u{port}") };
        DiscoveredReplica {
            http: SocketAddr::from(([10, 0, 0, 1], port)),
            grpc: None,
            name: pod.name.clone(),
            pod: Some(pod),
        }
    }

    fn app(count: u16) -> (App, Vec<Arc<Replica>>) {
        let app = App::new(Args::try_parse_from(["router"]).unwrap(), None);
        let discovered: Vec<DiscoveredReplica> = (1..=count).map(discovered).collect();
        let replicas = app.dispatcher().replicas.update(&discovered).added;
        for replica in &replicas {
            app.dispatcher().health().add(replica.identity);
        }
        (app, replicas)
    }

    fn report(app: &App, replica: &Arc<Replica>, report: u64, state: State) {
        let models = if state == State::Starting { Vec::new() } else { vec!["m".to_owned()] };
        let load = Load { epoch: 1, report, state: state.into(), models, blocks_total: 9, ..Load::default() };
        app.dispatcher().replicas.observe(replica, load, Instant::now());
    }

    fn states(app: &App, now: Instant) -> Vec<RoutingState> {
        snapshot(app, now).replicas.iter().map(RouterReplica::state).collect()
    }

    #[test]
    fn the_state_explains_why_a_replica_gets_no_requests() {
        let (app, replicas) = app(7);
        let now = Instant::now();
        for (replica, state) in replicas[1..].iter().zip([
            State::Starting,
            State::Serving,
            State::Draining,
            State::Serving,
            State::Stopped,
            State::Serving,
        ]) {
            report(&app, replica, 1, state);
        }
        let ejected = replicas[4].identity;
        for _ in 0..3 {
            let mut health = app.dispatcher().health();
            let sent = health.sent(ejected, now);
            health.failed(ejected, sent, replicas.iter().map(|replica| replica.identity), now);
        }
        assert_eq!(
            states(&app, now),
            [
                RoutingState::New,
                RoutingState::Starting,
                RoutingState::Ready,
                RoutingState::Draining,
                RoutingState::Ejected,
                RoutingState::Stopped,
                RoutingState::Ready,
            ]
        );
        let silent = now + Duration::from_secs(60);
        report(&app, &replicas[6], 2, State::Serving);
        assert_eq!(states(&app, silent)[2], RoutingState::Silent);
        let replica = &snapshot(&app, now).replicas[2];
        let pod = replica.pod.clone().unwrap();
        assert_eq!((pod.namespace.as_str(), pod.name.as_str(), pod.uid.as_str()), ("models", "chat-3", "u3"));
        assert_eq!((replica.address.as_str(), replica.blocks_total), ("10.0.0.1:3", 9));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_starts_immediately_and_follows_changes() {
        let (app, replicas) = app(1);
        let service = RouterService { app: app.clone(), streams: Arc::new(Semaphore::new(1)) };
        let watch = || service.watch_replicas(Request::new(WatchReplicasRequest {}));
        let mut stream = watch().await.unwrap().into_inner();
        let first = stream.next().await.unwrap().unwrap();
        assert_eq!(first.replicas[0].state(), RoutingState::New);
        assert_ne!(first.router, 0);
        report(&app, &replicas[0], 1, State::Serving);
        assert_eq!(stream.next().await.unwrap().unwrap().replicas[0].state(), RoutingState::Ready);
        let rejected = watch().await.map(drop).unwrap_err();
        assert_eq!(rejected.code(), tonic::Code::ResourceExhausted);
        drop(stream);
        assert!(watch().await.is_ok());
    }
}

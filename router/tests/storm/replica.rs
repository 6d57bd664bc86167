//! A simulated replica that streams answers and reports its load as a real one does, and fails on demand.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State as Extract;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use futures_util::{Stream, StreamExt as _, stream};
use proto::v1alpha1::replica_server::{self, ReplicaServer};
use proto::v1alpha1::{
    DispatchRange, Dispatches, DrainProgress, DrainRequest, Load, State, WatchLoadRequest,
};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Status};

/// Number of events of a streamed answer before `[DONE]`.
pub(crate) const EVENTS: u32 = 6;

/// The fault of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// The replica sends no bytes and stops reporting.
    Hang,
    /// The replica delays its answers.
    Slow,
    /// Streams may break after any event.
    Reset,
    /// The replica stops reporting but answers requests.
    Stale,
    /// The replica answers 503 and reports that it is draining.
    Drain,
    /// The replica answers 500.
    Broken,
    /// Another process, without the state of the replica, replaces it.
    Replaced,
}

impl Fault {
    pub(crate) fn draw(rng: &mut StdRng) -> Self {
        use Fault::*;
        [Hang, Slow, Reset, Stale, Drain, Broken, Replaced][rng.random_range(0..7)]
    }
}

/// A simulated replica.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    state: watch::Sender<ReplicaState>,
    rng: Mutex<StdRng>,
    answered: AtomicUsize,
    unanswered: Arc<UnansweredRequests>,
}

/// The IDs of the requests whose connection a replica has broken before the first event. The replicas share this set, so
/// that they do this only once to each request: the router does not retry a request after two broken connections.
#[derive(Debug, Default)]
pub(crate) struct UnansweredRequests(Mutex<BTreeSet<String>>);

#[derive(Clone, Debug)]
struct ReplicaState {
    fault: Fault,
    epoch: u64,
    report: u64,
    router: u64,
    running: u32,
    included: BTreeSet<u64>,
}

/// A running request. Dropping it ends the request.
struct RunningSequence(Arc<Replica>, u64);

impl Drop for RunningSequence {
    fn drop(&mut self) {
        self.0.state.send_modify(|now| {
            if now.epoch == self.1 {
                now.running -= 1;
            }
        });
    }
}

impl Replica {
    pub(crate) async fn start(
        seed: u64,
        unanswered: Arc<UnansweredRequests>,
        tasks: &mut JoinSet<()>,
    ) -> Arc<Self> {
        let http = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let grpc = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let now = ReplicaState {
            fault: Fault::None,
            epoch: seed << 8,
            report: 1,
            router: 0,
            running: 0,
            included: BTreeSet::new(),
        };
        let replica = Arc::new(Self {
            http: http.local_addr().unwrap(),
            grpc: grpc.local_addr().unwrap(),
            state: watch::Sender::new(now),
            rng: Mutex::new(StdRng::seed_from_u64(seed)),
            answered: AtomicUsize::new(0),
            unanswered,
        });
        let router = axum::Router::new()
            .route("/v3/chat/completions", post(chat))
            .route("/v3/models", get(|| async { "{\"data\":[{\"id\":\"m\"}]}" }))
            .with_state(Arc::clone(&replica));
        tasks.spawn(async move { axum::serve(http, router).await.unwrap() });
        let service = ReplicaServer::new(Reports(Arc::clone(&replica)));
        tasks.spawn(async move {
            let server = tonic::transport::Server::builder().add_service(service);
            server.serve_with_incoming(TcpListenerStream::new(grpc)).await.unwrap();
        });
        replica
    }

    pub(crate) fn set(&self, fault: Fault) {
        self.state.send_modify(|now| {
            now.fault = fault;
            if fault == Fault::Replaced {
                now.epoch += 1;
                now.report = 1;
                now.running = 0;
                now.included.clear();
            }
        });
    }

    pub(crate) fn answered(&self) -> usize {
        self.answered.load(Ordering::Relaxed)
    }

    fn draw(&self, below: u32) -> u32 {
        self.rng.lock().unwrap().random_range(0..below)
    }

    /// Waits until the replica no longer has `fault`, or another process has replaced it.
    async fn while_it_is(&self, fault: Fault, epoch: u64) {
        let mut state = self.state.subscribe();
        let _ = state.wait_for(|now| now.fault != fault || now.epoch != epoch).await;
    }
}

async fn chat(Extract(replica): Extract<Arc<Replica>>, headers: HeaderMap, body: Bytes) -> Response {
    let dispatch = headers["x-ovfleet-dispatch"].to_str().unwrap();
    let (router, number) = dispatch.split_once('/').unwrap();
    let (router, number) = (u64::from_str_radix(router, 16).unwrap(), number.parse().unwrap());
    let epoch = replica.state.borrow().epoch;
    replica.state.send_modify(|now| {
        if now.router == router {
            assert!(now.included.insert(number), "request {number} arrived twice");
        }
        now.running += 1;
    });
    let running = RunningSequence(Arc::clone(&replica), epoch);
    let fault = replica.state.borrow().fault;
    match fault {
        Fault::Hang => replica.while_it_is(Fault::Hang, epoch).await,
        Fault::Slow => tokio::time::sleep(Duration::from_millis(40)).await,
        Fault::Drain => return (StatusCode::SERVICE_UNAVAILABLE, "{}").into_response(),
        Fault::Broken => return (StatusCode::INTERNAL_SERVER_ERROR, "{}").into_response(),
        _ => tokio::time::sleep(Duration::from_millis(1)).await,
    }
    replica.answered.fetch_add(1, Ordering::Relaxed);
    // The answer repeats the ID from the request, so that the client can check that the answer belongs to its request.
    let text = String::from_utf8(body.to_vec()).unwrap();
    let id = text.split("\"user\":\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    if !text.contains("\"stream\":true") {
        let usage = "\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":6}";
        return format!("{{\"id\":\"{id}\",{usage}}}").into_response();
    }
    let events = stream::unfold((0, running), move |(number, running)| {
        let id = id.clone();
        async move { next_event(number, running, &id).await }
    });
    ([("content-type", "text/event-stream")], Body::from_stream(events)).into_response()
}

type Event = Result<String, std::io::Error>;

async fn next_event(
    number: u32,
    running: RunningSequence,
    id: &str,
) -> Option<(Event, (u32, RunningSequence))> {
    if number > EVENTS {
        return None;
    }
    let RunningSequence(replica, epoch) = &running;
    let broken = || Err(std::io::Error::other("it is gone"));
    let (fault, present) = {
        let now = replica.state.borrow();
        (now.fault, now.epoch)
    };
    let can_break = || number > 0 || replica.unanswered.0.lock().unwrap().insert(id.to_owned());
    let event = match fault {
        _ if present != *epoch && can_break() => broken(),
        Fault::Reset if number > 0 && replica.draw(3) == 0 => broken(),
        Fault::Hang if number > 0 => {
            replica.while_it_is(Fault::Hang, *epoch).await;
            broken()
        }
        fault => {
            tokio::time::sleep(Duration::from_millis(if fault == Fault::Slow { 10 } else { 1 })).await;
            Ok(if number == EVENTS {
                "data: [DONE]\n\n".to_owned()
            } else {
                format!("data: {{\"id\":\"{id}\",\"number\":{number}}}\n\n")
            })
        }
    };
    let number = if event.is_ok() { number + 1 } else { EVENTS + 1 };
    Some((event, (number, running)))
}

/// The gRPC service of the replica.
struct Reports(Arc<Replica>);

type ReportStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl replica_server::Replica for Reports {
    type WatchLoadStream = ReportStream<Load>;
    type DrainStream = ReportStream<DrainProgress>;

    async fn watch_load(
        &self,
        request: Request<WatchLoadRequest>,
    ) -> Result<tonic::Response<Self::WatchLoadStream>, Status> {
        let router = request.into_inner().router;
        let replica = Arc::clone(&self.0);
        replica.state.send_modify(|now| now.router = router);
        let reports = stream::unfold(replica, move |replica| async move {
            loop {
                tokio::time::sleep(Duration::from_millis(20)).await;
                let mut load = None;
                replica.state.send_if_modified(|now| {
                    if !matches!(now.fault, Fault::Hang | Fault::Stale) {
                        now.report += 1;
                        load = Some(report(now, router));
                    }
                    false
                });
                if let Some(load) = load {
                    return Some((Ok(load), replica));
                }
            }
        });
        Ok(tonic::Response::new(reports.boxed()))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<tonic::Response<Self::DrainStream>, Status> {
        Err(Status::unimplemented("not here"))
    }
}

fn report(now: &ReplicaState, router: u64) -> Load {
    let state = if now.fault == Fault::Drain { State::Draining } else { State::Serving };
    let mut ranges: Vec<DispatchRange> = Vec::new();
    for &number in &now.included {
        match ranges.last_mut() {
            Some(last) if last.last + 1 == number => last.last = number,
            _ => ranges.push(DispatchRange { first: number, last: number }),
        }
    }
    let blocks_active = (now.running * 4).min(256);
    Load {
        epoch: now.epoch,
        report: now.report,
        state: state.into(),
        models: vec!["m".to_owned()],
        blocks_total: 256,
        blocks_active,
        blocks_free: 256 - blocks_active,
        block_tokens: 16,
        running: now.running,
        sequences_max: 32,
        requests_max: 64,
        prefill_tokens_per_second: 5000.0,
        decode_tokens_per_second: 1000.0,
        dispatches: Some(Dispatches { router, ranges }),
        ..Load::default()
    }
}

//! Tests replicas that leave while they still answer: they stop reporting, but their requests are not aborted.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use proto::v1alpha1::replica_server::{Replica as Service, ReplicaServer};
use proto::v1alpha1::{DrainProgress, DrainRequest, Load, State, WatchLoadRequest};
use tokio::sync::watch;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use crate::harness::*;

/// Sets the state that a replica reports. While the state is `None`, the replica sends no reports.
type StateSender = watch::Sender<Option<State>>;

/// The gRPC service of a replica that reports every 20 ms.
struct Reports {
    reported: watch::Receiver<Option<State>>,
    number: Arc<AtomicU64>,
}

#[tonic::async_trait]
impl Service for Reports {
    type WatchLoadStream = Pin<Box<dyn Stream<Item = Result<Load, Status>> + Send>>;
    type DrainStream = Pin<Box<dyn Stream<Item = Result<DrainProgress, Status>> + Send>>;

    async fn watch_load(
        &self,
        _: Request<WatchLoadRequest>,
    ) -> Result<Response<Self::WatchLoadStream>, Status> {
        let state = (self.reported.clone(), Arc::clone(&self.number));
        let reports = stream::unfold(state, |(mut reported, number)| async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let state = (*reported.wait_for(Option::is_some).await.ok()?)?;
            let report = number.fetch_add(1, Ordering::Relaxed);
            let load = Load {
                epoch: 1,
                report,
                state: state.into(),
                models: vec!["m".to_owned()],
                blocks_total: 256,
                blocks_free: 256,
                block_tokens: 16,
                sequences_max: 32,
                requests_max: 64,
                ..Load::default()
            };
            Some((Ok(load), (reported, number)))
        });
        Ok(Response::new(reports.boxed()))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<Self::DrainStream>, Status> {
        Err(Status::unimplemented("not here"))
    }
}

/// Serves load reports in a separate thread until the process exits. Returns the address, and the sender of the state
/// to report.
fn report() -> (SocketAddr, StateSender) {
    let (reported, receiver) = watch::channel(Some(State::Serving));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let incoming = TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
            let service = ReplicaServer::new(Reports { reported: receiver, number: Arc::new(1.into()) });
            let served =
                tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming);
            served.await.unwrap();
        });
    });
    (address, reported)
}

/// A replica that reports its load, and completes an answer only after the test has released it.
struct GatedReplica {
    upstream: Upstream,
    argument: String,
    reported: StateSender,
    go: Mutex<Option<Sender<Infallible>>>,
}

impl GatedReplica {
    fn start(name: &'static str) -> Self {
        let (go, gate): (Sender<Infallible>, Receiver<Infallible>) = channel();
        let gate = Mutex::new(gate);
        let upstream = Upstream::start("m", move |request, stream| {
            let is_stream = String::from_utf8_lossy(&request.body).contains("\"stream\":true");
            if is_stream {
                send(stream, STREAM);
                send(stream, &event("begun"));
            }
            // Wait until the test drops the other end of the channel.
            let _ = gate.lock().unwrap().recv();
            if is_stream {
                send(stream, &event(name)) && send(stream, END)
            } else {
                send(stream, &whole(name))
            }
        });
        let (grpc, reported) = report();
        let argument = format!("{}/{}", upstream.address, grpc.port());
        Self { upstream, argument, reported, go: Mutex::new(Some(go)) }
    }

    /// Releases the answer.
    fn release(&self) {
        self.go.lock().unwrap().take();
    }
}

/// The way in which a replica leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Departure {
    /// Discovery no longer lists the replica, so the router stops receiving its reports.
    Removed,
    /// The replica reports that it is draining, and then stops reporting.
    Draining,
}

/// Sends a request and waits until a replica has received it. Returns whether it was the first replica, and the thread
/// that receives the answer.
fn ask<'scope, 'env>(
    scope: &'scope std::thread::Scope<'scope, 'env>,
    router: &'env Router,
    replicas: [&GatedReplica; 2],
    is_stream: bool,
) -> (bool, std::thread::ScopedJoinHandle<'scope, Answer>) {
    let before = replicas.map(|replica| replica.upstream.seen().len());
    let answer = scope.spawn(move || router.post(CHAT, &chat("m", is_stream)));
    let is_first = await_condition("a replica to receive the request", || {
        let now = replicas.map(|replica| replica.upstream.seen().len());
        (now != before).then_some(now[0] > before[0])
    });
    (is_first, answer)
}

fn assert_leaving_replica_finishes_its_request(leaving_by: Departure, is_stream: bool) {
    let (leaving, frozen) = (GatedReplica::start("\"late\""), GatedReplica::start("\"never\""));
    let staying = Upstream::start("m", |_, stream| send(stream, &whole("\"stays\"")));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("router.yaml");
    let write = |replicas: &[&str]| {
        std::fs::write(&path, format!("replica: [{}]\npolicy: round-robin\n", replicas.join(", "))).unwrap();
    };
    write(&[&leaving.argument, &frozen.argument]);
    // All timeouts except the hang timeout are too long to end a request in this test.
    let times =
        ["--hang-timeout=300ms", "--idle-timeout=1h", "--answer-timeout=1h", "--first-token-timeout=1h"];
    let arguments: Vec<&str> = ["--config", path.to_str().unwrap()].into_iter().chain(times).collect();
    let router = Router::unready(&arguments);
    router.await_served(leaving.upstream.address);
    router.await_served(frozen.upstream.address);

    let (late, stuck, staying_argument) = std::thread::scope(|scope| {
        let replicas = [&leaving, &frozen];
        let (is_first, one) = ask(scope, &router, replicas, is_stream);
        let (is_other_first, other) = ask(scope, &router, replicas, is_stream);
        assert_ne!(is_first, is_other_first, "the replicas receive requests in turn");
        let (late, stuck) = if is_first { (one, other) } else { (other, one) };
        let staying_argument = staying.address.to_string();
        match leaving_by {
            Departure::Removed => {
                write(&[&frozen.argument, &staying_argument]);
                router.await_log("a replica was removed");
            }
            Departure::Draining => {
                write(&[&leaving.argument, &frozen.argument, &staying_argument]);
                leaving.reported.send(Some(State::Draining)).unwrap();
                await_condition("the router to know that the replica drains", || {
                    router.get("/debug/replicas").body.contains("\"draining\"").then_some(())
                });
                leaving.reported.send(None).unwrap();
            }
        }
        router.await_served(staying.address);
        // `frozen` stops reporting only now, so when the router considers it hung, the last report from `leaving` is
        // even older.
        frozen.reported.send(None).unwrap();
        let stuck = stuck.join().unwrap();
        leaving.release();
        (late.join().unwrap(), stuck, staying_argument)
    });
    if is_stream {
        assert!(stuck.body.contains("stopped answering"), "{stuck:?}");
    } else {
        assert_eq!(stuck.header("x-ovfleet-replica"), Some(staying_argument.as_str()), "{stuck:?}");
    }
    assert!(late.is_complete && late.body.contains("late"), "{leaving_by:?}: {late:?}");
    assert_eq!(leaving.upstream.seen().len(), 1);
    frozen.release();
}

#[test]
fn a_removed_replica_finishes_its_requests_without_reports() {
    for is_stream in [false, true] {
        assert_leaving_replica_finishes_its_request(Departure::Removed, is_stream);
    }
}

#[test]
fn a_draining_replica_finishes_its_requests_after_its_last_report() {
    for is_stream in [false, true] {
        assert_leaving_replica_finishes_its_request(Departure::Draining, is_stream);
    }
}

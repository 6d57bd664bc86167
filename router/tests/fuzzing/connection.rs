//! Sends arbitrary bytes on a client's connection. The router must answer or close the connection, free all resources
//! of the connection, and continue to serve other clients. `server/fuzz` runs `check` for hours, and `main.rs` for
//! seconds.

use std::cell::OnceCell;
use std::mem::ManuallyDrop;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::header;
use axum::response::IntoResponse as _;
use axum::routing::get;
use clap::Parser as _;
use router::discovery::DiscoveredReplica;
use router::{App, Args, ConnectionServer, load};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// The longest time to wait for any condition.
const LIMIT: Duration = Duration::from_secs(30);
/// Size of the buffer between client and router in each direction, in bytes.
const BUFFER_BYTES: usize = 64 * 1024;
/// Number of turns of the runtime without an answer after which the client closes its side.
const SILENCE: usize = 100;
const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// A valid request.
const SOUND: &str = "POST /v3/chat/completions HTTP/1.1\r\nhost: router\r\nconnection: close\r\ncontent-type: application/json\r\n\
    content-length: 13\r\n\r\n{\"model\":\"m\"}";

/// A router and a replica that run on this thread.
struct FuzzTarget {
    runtime: Runtime,
    app: App,
    server: Arc<ConnectionServer>,
    /// The tasks of the replica, and the tasks that discover it and receive its reports.
    _tasks: JoinSet<()>,
    /// The replica remains known until this sender is dropped.
    _found: watch::Sender<Vec<DiscoveredReplica>>,
}

thread_local! {
    /// The target is never dropped, because thread-local state of the router may be destroyed before it when the thread
    /// ends.
    static TARGET: OnceCell<ManuallyDrop<FuzzTarget>> = const { OnceCell::new() };
}

/// Runs one input. Panics if the router violates one of the guarantees above.
pub(crate) fn check(input: &[u8]) {
    TARGET.with(|target| target.get_or_init(|| ManuallyDrop::new(FuzzTarget::new())).check(input));
}

/// Answers requests as a replica does: with a stream if the body contains the word `stream`, and otherwise with a whole
/// answer.
async fn answer(body: Bytes) -> axum::response::Response {
    if body.windows(6).any(|part| part == b"stream") {
        let events = "data: {\"choices\":[]}\n\ndata: [DONE]\n\n";
        return ([(header::CONTENT_TYPE, "text/event-stream")], events).into_response();
    }
    ([(header::CONTENT_TYPE, "application/json")], "{}").into_response()
}

impl FuzzTarget {
    fn new() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("the runtime starts");
        let (app, server, tasks, found) = runtime.block_on(async {
            let args =
                Args::try_parse_from(["router", "--max-body-bytes=1KiB", "--max-buffered-body-bytes=1MiB"]);
            let app = App::new(args.expect("the options are valid"), None);
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
            let http = listener.local_addr().expect("the listener is bound");
            let models = r#"{"object":"list","data":[{"id":"m"}]}"#;
            let models = get(move || async move { ([(header::CONTENT_TYPE, "application/json")], models) });
            let replica = axum::Router::new().route("/v3/models", models).fallback(answer);
            let (found, replicas) = watch::channel(vec![DiscoveredReplica {
                http,
                grpc: None,
                name: "replica".to_owned(),
                pod: None,
            }]);
            let mut tasks = JoinSet::new();
            tasks.spawn(async move { axum::serve(listener, replica).await.expect("the replica is served") });
            tasks.spawn(load::run(Arc::clone(app.dispatcher()), replicas));
            let mut changes = app.dispatcher().replicas.changes();
            while !app.is_ready() {
                changes.changed().await.expect("the sender is in `app`");
            }
            let server = Arc::new(ConnectionServer::new(&app, CancellationToken::new()));
            (app, server, tasks, found)
        });
        Self { runtime, app, server, _tasks: tasks, _found: found }
    }

    fn check(&self, input: &[u8]) {
        let exchange = async {
            self.exchange(input, SILENCE).await;
            let answer = self.exchange(SOUND.as_bytes(), usize::MAX).await;
            assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));
        };
        let done = self.runtime.block_on(async { tokio::time::timeout(LIMIT, exchange).await });
        done.expect("the router answers or closes the connection");
    }

    /// Sends `input` over a new connection, and closes this side after `silence_max` turns of the runtime without data
    /// from the router. Returns the bytes that the router sent before it closed the connection.
    async fn exchange(&self, input: &[u8], silence_max: usize) -> Vec<u8> {
        let (client, connection) = tokio::io::duplex(BUFFER_BYTES);
        let mut served = JoinSet::new();
        served.spawn(Arc::clone(&self.server).serve(CLIENT, connection));
        let answer = talk(client, input, silence_max).await;
        served.join_next().await.expect("one connection is served").expect("the router does not panic");
        assert_sound(&answer, input);
        // The resources of an aborted request are freed only when its tasks notice the abort.
        let end = Instant::now() + LIMIT;
        while let Some(held) = self.held() {
            assert!(Instant::now() < end, "the connection is closed, and the router still holds {held}");
            tokio::task::yield_now().await;
        }
        answer
    }

    /// The resources that the router uses for requests, if there are any.
    fn held(&self) -> Option<String> {
        let replicas = self.app.dispatcher().replicas.all();
        let snapshots = replicas.iter().map(|replica| replica.ledger.snapshot(Instant::now(), LIMIT));
        let booked: u32 = snapshots.map(|snapshot| snapshot.booked.in_flight).sum();
        let dispatcher = self.app.dispatcher();
        let waiting = (dispatcher.queued(), dispatcher.requests_without_replica());
        let held = (self.app.requests_in_flight(), self.app.bodies().reserved(), waiting, booked);
        let (requests, bytes, waiters, booked) = held;
        let is_nothing = held == (0, 0, (0, 0), 0);
        (!is_nothing).then(|| {
            format!(
                "{requests} requests in flight, {bytes} bytes of bodies, {waiters:?} requests waiting (queued, without \
                 an available replica), {booked} requests booked"
            )
        })
    }
}

/// Sends `input`, reads until no data has arrived for `silence_max` turns of the runtime, closes this side, and reads
/// to the end.
async fn talk(mut client: DuplexStream, input: &[u8], silence_max: usize) -> Vec<u8> {
    // The buffer has room for the whole input. Writing fails if the router has already closed its side.
    let _ = client.write_all(input).await;
    let (mut answer, mut silence) = (Vec::new(), 0);
    while silence < silence_max {
        tokio::select! {
            biased;
            read = client.read_buf(&mut answer) => match read {
                Ok(0) | Err(_) => return answer,
                Ok(_) => silence = 0,
            },
            () = tokio::task::yield_now() => silence += 1,
        }
    }
    let _ = client.shutdown().await;
    let _ = client.read_to_end(&mut answer).await;
    answer
}

/// Checks that the answer begins like an HTTP/1 answer and is not a 5xx error of the router.
fn assert_sound(answer: &[u8], input: &[u8]) {
    // After this preface, the connection uses HTTP/2, whose framing this function does not check.
    if answer.is_empty() || input.starts_with(b"PRI * HTTP/2.0") {
        return;
    }
    let shown = || format!("{} to {}", String::from_utf8_lossy(answer), String::from_utf8_lossy(input));
    let rest = answer.strip_prefix(b"HTTP/1.").unwrap_or_else(|| panic!("{}", shown()));
    assert!(rest.len() > 5 && rest[1] == b' ', "{}", shown());
    assert!(matches!(rest[2], b'1'..=b'4'), "{}", shown());
}

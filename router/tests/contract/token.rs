//! Tests the replica token: the router sends it with every request and call to a replica, and clients cannot send one.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::pin::Pin;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use futures_util::{Stream, stream};
use http::HeaderMap;
use proto::replica_token::{HEADER, ReplicaTokens, SCHEME};
use proto::v1alpha1::replica_server::{Replica, ReplicaServer};
use proto::v1alpha1::{DrainProgress, DrainRequest, Load, State, WatchLoadRequest};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Response, Status};

use crate::harness::*;

const OLD: &str = "old-0123456789abcdef";
const NEW: &str = "new-0123456789abcdef";

/// Writes a file of tokens, and returns the flag for it.
fn token_file(text: &str) -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("token"), text).unwrap();
    let flag = format!("--replica-token-file={}", directory.path().join("token").display());
    (directory, flag)
}

/// A request as the replica received it.
#[derive(Clone)]
struct SeenRequest {
    /// The method and the path of the request.
    line: String,
    /// The token in the header.
    token: Option<String>,
}

/// A replica that, like the real server, serves the model `m` only to clients that send one of its tokens.
#[derive(Clone)]
struct GuardedReplica {
    address: SocketAddr,
    grpc: SocketAddr,
    tokens: Arc<Mutex<ReplicaTokens>>,
    seen: Arc<Mutex<Vec<SeenRequest>>>,
}

impl GuardedReplica {
    fn start(token: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let grpc = TcpListener::bind("127.0.0.1:0").unwrap();
        let replica = Self {
            address: listener.local_addr().unwrap(),
            grpc: grpc.local_addr().unwrap(),
            tokens: Arc::new(Mutex::new(ReplicaTokens::parse(token).unwrap())),
            seen: Arc::default(),
        };
        let (http, reports) = (replica.clone(), replica.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let replica = http.clone();
                std::thread::spawn(move || replica.serve(stream));
            }
        });
        std::thread::spawn(move || reports.report(grpc));
        replica
    }

    fn serve(&self, mut stream: TcpStream) {
        while let Some(request) = read_request(&mut stream) {
            let sent = request.header(HEADER);
            let line = request.head.lines().next().unwrap().trim_end_matches(" HTTP/1.1").to_owned();
            self.seen
                .lock()
                .unwrap()
                .push(SeenRequest { line: line.clone(), token: sent.map(str::to_owned) });
            let headers = sent.map(|sent| (HEADER.parse().unwrap(), sent.parse().unwrap()));
            let answer = if !self.accepts(&HeaderMap::from_iter(headers)) {
                with_status(&format!("401 Unauthorized\r\nwww-authenticate: {SCHEME}"), "{}")
            } else if line == "GET /v3/models" {
                whole(r#"{"object":"list","data":[{"id":"m"}]}"#)
            } else {
                whole("\"served\"")
            };
            if !send(&mut stream, &answer) {
                return;
            }
        }
    }

    fn accepts(&self, headers: &HeaderMap) -> bool {
        self.tokens.lock().unwrap().are_in(headers)
    }

    #[tokio::main(flavor = "current_thread")]
    async fn report(self, listener: TcpListener) {
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
        let service = ReplicaServer::new(self);
        tonic::transport::Server::builder().add_service(service).serve_with_incoming(listener).await.unwrap();
    }

    /// The argument that adds this replica to the router, with or without the port of its load reports.
    fn argument(&self, reports: bool) -> String {
        let grpc = if reports { format!("/{}", self.grpc.port()) } else { String::new() };
        format!("--replica={}{grpc}", self.address)
    }
}

type ReportStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Replica for GuardedReplica {
    type WatchLoadStream = ReportStream<Load>;
    type DrainStream = ReportStream<DrainProgress>;

    async fn watch_load(
        &self,
        request: tonic::Request<WatchLoadRequest>,
    ) -> Result<Response<Self::WatchLoadStream>, Status> {
        if !self.accepts(request.metadata().as_ref()) {
            return Err(Status::unauthenticated("no valid replica token"));
        }
        let reports = stream::unfold(1, |report| async move {
            if report > 1 {
                tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            }
            let load = Load {
                epoch: 1,
                report,
                state: State::Serving.into(),
                models: vec!["m".to_owned()],
                requests_max: 64,
                ..Load::default()
            };
            Some((Ok(load), report + 1))
        });
        Ok(Response::new(Box::pin(reports)))
    }

    async fn drain(&self, _: tonic::Request<DrainRequest>) -> Result<Response<Self::DrainStream>, Status> {
        Err(Status::unimplemented("not needed here"))
    }
}

#[test]
fn the_token_is_sent_with_every_request_and_replaces_that_of_a_client() {
    let replica = GuardedReplica::start(OLD);
    let (_directory, flag) = token_file(OLD);
    for reports in [false, true] {
        let router = Router::unready(&[&replica.argument(reports), &flag]);
        router.await_log("ready");
        router.await_served(replica.address);
        // The router requests the list of models whether or not the replica sends reports.
        await_condition("the list of models to be requested", || {
            replica.seen.lock().unwrap().iter().any(|request| request.line == "GET /v3/models").then_some(())
        });
        let response = format!("/v3/responses/resp_{:016x}{:032x}", 0, 1);
        let forged = format!("{HEADER}: a-clients-guess-0123\r\nconnection: {HEADER}\r\n");
        for (method, path, body) in [
            ("POST", CHAT, chat("m", false)),
            ("POST", "/v3/completions", r#"{"model":"m","prompt":"x"}"#.to_owned()),
            ("POST", "/v3/responses", r#"{"model":"m","input":"x"}"#.to_owned()),
            ("POST", "/v3/conversations", "{}".to_owned()),
            ("POST", "/tokenize", r#"{"model":"m","prompt":"x"}"#.to_owned()),
        ] {
            for headers in ["", &forged] {
                let answer = router.request(method, path, headers, &body);
                assert_eq!((answer.status, answer.body.as_str()), (200, "\"served\""), "{path} {headers}");
                assert_eq!(answer.header(HEADER), None);
            }
        }
        assert_eq!(router.get(&response).status, 404, "no replica stores it");
        assert!(!router.log().contains(OLD), "{}", router.log());
    }
    let seen = replica.seen.lock().unwrap();
    let sent: BTreeSet<Option<&str>> = seen.iter().map(|request| request.token.as_deref()).collect();
    assert_eq!(sent, BTreeSet::from([Some(OLD)]));
}

#[test]
fn a_router_without_a_token_removes_the_token_of_a_client() {
    let upstream = Upstream::start("m", |_, stream| send(stream, &whole("\"served\"")));
    let router = Router::start(&[&upstream], &[]);
    let forged = format!("{HEADER}: a-clients-guess-0123\r\n");
    assert_eq!(router.request("POST", CHAT, &forged, &chat("m", false)).status, 200);
    assert_eq!(upstream.seen()[0].header(HEADER), None);
}

#[test]
fn a_token_is_replaced_without_losing_a_request() {
    let replica = GuardedReplica::start(OLD);
    let (directory, flag) = token_file(OLD);
    let router = Router::unready(&[&replica.argument(true), &flag]);
    router.await_log("ready");
    let ask = || assert_eq!(router.post(CHAT, &chat("m", false)).status, 200);
    let write = |text: &str| std::fs::write(directory.path().join("token"), text).unwrap();
    let accept = |text: &str| *replica.tokens.lock().unwrap() = ReplicaTokens::parse(text).unwrap();
    let both = format!("{NEW}\n{OLD}\n");
    // The router and the replica can reload their files in any order.
    accept(&both);
    ask();
    write(&both);
    router.await_log("the replica tokens have changed");
    ask();
    accept(NEW);
    ask();
    write(NEW);
    await_condition("only the new token to be sent", || {
        ask();
        (replica.seen.lock().unwrap().last().unwrap().token.as_deref() == Some(NEW)).then_some(())
    });
    // A malformed file does not change the token.
    write("too short\n");
    router.await_log("the previous tokens remain in effect");
    ask();
}

#[test]
fn a_replica_that_rejects_the_router_is_skipped_and_its_401_is_not_forwarded() {
    let [accepts, rejects] = [GuardedReplica::start(OLD), GuardedReplica::start(OLD)];
    let (_directory, flag) = token_file(OLD);
    let replicas = [accepts.argument(true), rejects.argument(true)];
    let router = Router::unready(&[&replicas[0], &replicas[1], "--policy=round-robin", &flag]);
    router.await_log("ready");
    for replica in [&accepts, &rejects] {
        router.await_served(replica.address);
    }
    *rejects.tokens.lock().unwrap() = ReplicaTokens::parse(NEW).unwrap();
    for _ in 0..6 {
        assert_eq!(router.post(CHAT, &chat("m", false)).status, 200);
    }
    let rejected = |replica: &GuardedReplica| {
        let seen = replica.seen.lock().unwrap();
        seen.iter().filter(|request| request.line.starts_with("POST")).count()
    };
    assert!(rejected(&rejects) > 0);
    *accepts.tokens.lock().unwrap() = ReplicaTokens::parse(NEW).unwrap();
    let answer = router.post("/v3/responses", r#"{"model":"m","input":"x"}"#);
    assert_eq!((answer.status, answer.header("www-authenticate")), (502, None), "{answer:?}");
    assert!(answer.body.contains("unauthenticated"), "{answer:?}");
}

#[test]
fn a_401_about_the_clients_key_is_passed_on() {
    let upstream = Upstream::start("m", |_, stream| {
        send(stream, &with_status("401 Unauthorized\r\nwww-authenticate: Bearer", "\"your key\""))
    });
    let router = Router::start(&[&upstream], &[]);
    let answer = router.post(CHAT, &chat("m", false));
    assert_eq!((answer.status, answer.body.as_str()), (401, "\"your key\""));
}

#[test]
fn a_router_that_replicas_reject_serves_no_requests_and_logs_the_reason() {
    let replica = GuardedReplica::start(OLD);
    let (_directory, flag) = token_file(NEW);
    for (reports, reason) in
        [(true, "no valid replica token"), (false, "the router's replica token is missing or invalid")]
    {
        let router = Router::unready(&[&replica.argument(reports), &flag]);
        router.await_log(reason);
        assert_eq!(router.get("/v2/health/ready").status, 503);
    }
}

#[test]
fn a_router_does_not_start_with_a_file_that_has_no_token() {
    let (directory, empty) = token_file("\n");
    let missing = format!("--replica-token-file={}", directory.path().join("missing").display());
    for (flag, said) in [(&empty, "contains no token"), (&missing, "failed to read the replica token")] {
        let mut command = command(&["--replica=127.0.0.1:1", flag]);
        let output = command.stderr(Stdio::piped()).output().unwrap();
        let log = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && log.contains(said), "{log}");
    }
}

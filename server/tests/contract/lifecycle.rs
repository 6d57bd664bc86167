//! Requests that end early, what is told of the server meanwhile, and how it goes out of service.

use std::io::BufRead as _;
use std::process::{Child, Command, Stdio};

use futures_util::StreamExt as _;
use http_body_util::BodyExt as _;
use proto::v1alpha1::replica_client::ReplicaClient;
use proto::v1alpha1::replica_server::ReplicaServer;
use proto::v1alpha1::{DrainRequest, Load, State, WatchLoadRequest};
use serde_json::{Value, json};
use server::{Phase, ReplicaService, publish};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::{Server, Setup, greedy, whole};

const CHAT: &str = "/v1/chat/completions";

fn chat(more: &Value) -> Value {
    let mut request = greedy(&json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}));
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

/// The replica's service on a port of its own, for as long as the set lives.
async fn replica(server: &Server) -> (ReplicaClient<Channel>, JoinSet<()>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (reports, receiver) = watch::channel(Load::default());
    let service = ReplicaServer::new(ReplicaService::new(server.app.clone(), receiver));
    let mut tasks = JoinSet::new();
    tasks.spawn(publish(server.app.clone(), reports));
    tasks.spawn(async move {
        let server = tonic::transport::Server::builder().add_service(service);
        server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
    });
    (ReplicaClient::connect(format!("http://{address}")).await.unwrap(), tasks)
}

/// The value of a metric; 0 if it is not there yet.
async fn metric(server: &Server, name: &str) -> f64 {
    let scrape = server.get("/metrics").await;
    let line = scrape.text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.map_or(0.0, |value| value.parse().unwrap())
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_blocks() {
    let server = Server::new(&Setup::default());
    server.gate.allow(3);
    let response = server.open(CHAT, &chat(&json!({"stream": true, "n": 2, "max_tokens": 900}))).await;
    let mut body = response.into_body();
    body.frame().await.unwrap().unwrap();
    let busy = server.load(|load| load.load.blocks_active > 0).await;
    assert_eq!(busy.load.running, 2);
    assert_eq!(server.app.requests(), 1);

    drop(body);
    assert_eq!(server.app.requests(), 0);
    server.gate.open();
    let idle = server.load(|load| load.load.blocks_active == 0).await;
    assert_eq!((idle.load.running, idle.load.waiting), (0, 0));
    let generated = metric(&server, "ovfleet_server_generated_tokens_total").await;
    assert!(generated < 100.0, "nothing is computed for nobody: {generated}");
    let cancelled = r#"{endpoint="chat_completions",outcome="cancelled",status="2xx"}"#;
    assert_eq!(metric(&server, &format!("ovfleet_server_requests_total{cancelled}")).await, 1.0);
}

#[tokio::test]
async fn a_client_that_goes_away_before_the_answer_begins_frees_its_place() {
    let server = Server::new(&Setup::default());
    server.gate.allow(0);
    {
        let request = chat(&json!({}));
        let answer = server.post(CHAT, &request);
        tokio::pin!(answer);
        let submitted = async {
            while server.app.requests() == 0 || server.engine.handle().waiting() == 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            _ = &mut answer => panic!("the engine is held"),
            () = submitted => {}
        }
    }
    assert_eq!(server.app.requests(), 0);
    server.gate.open();
    server.post(CHAT, &chat(&json!({}))).await.ok();
    server.load(|load| load.load.blocks_active == 0 && load.load.running == 0).await;
}

#[tokio::test]
async fn metrics_count_what_was_done() {
    let server = Server::new(&Setup::default());
    let usage = server.post(CHAT, &chat(&json!({"n": 2}))).await.ok()["usage"].clone();
    server.post(CHAT, &chat(&json!({"temperature": 9}))).await;
    server.get("/nowhere").await;
    server.load(|load| load.load.running == 0).await;

    let count = |endpoint: &str, outcome: &str, status: &str| {
        format!(
            "ovfleet_server_requests_total{{endpoint=\"{endpoint}\",outcome=\"{outcome}\",status=\"{status}\"}}"
        )
    };
    let expected = [
        (count("chat_completions", "ok", "2xx"), 1.0),
        (count("chat_completions", "invalid", "4xx"), 1.0),
        (count("other", "unrouted", "4xx"), 1.0),
        ("ovfleet_server_prompt_tokens_total".to_owned(), usage["prompt_tokens"].as_f64().unwrap()),
        ("ovfleet_server_generated_tokens_total".to_owned(), 16.0),
        ("ovfleet_server_time_to_first_token_seconds_count".to_owned(), 1.0),
        ("ovfleet_server_inter_token_latency_seconds_count".to_owned(), 14.0),
        ("ovfleet_server_request_duration_seconds_count".to_owned(), 1.0),
        ("ovfleet_server_requests_in_work".to_owned(), 0.0),
        ("ovfleet_server_blocks_active".to_owned(), 0.0),
        ("ovfleet_server_blocks_total".to_owned(), 256.0),
        ("ovfleet_server_ready".to_owned(), 1.0),
    ];
    for (name, value) in expected {
        assert_eq!(metric(&server, &name).await, value, "{name}");
    }
    let scrape = server.get("/metrics").await;
    assert!(scrape.text.ends_with("# EOF\n"));
    assert!(scrape.headers["content-type"].to_str().unwrap().starts_with("application/openmetrics-text"));
}

#[tokio::test]
async fn load_reports_begin_at_once_and_their_numbers_rise() {
    let server = Server::new(&Setup::default());
    let (mut client, _tasks) = replica(&server).await;
    let mut reports = client.watch_load(WatchLoadRequest::default()).await.unwrap().into_inner();
    let mut first = reports.next().await.unwrap().unwrap();
    while first.blocks_total == 0 {
        // The engine's thread has only begun.
        first = reports.next().await.unwrap().unwrap();
    }
    assert_ne!(first.epoch, 0);
    assert!(first.report >= 1);
    assert_eq!(first.state(), State::Serving);
    assert_eq!(first.models, ["sim", "org/alias"]);
    assert_eq!((first.blocks_total, first.block_tokens), (256, 16));
    assert_eq!((first.sequences_max, first.requests_max), (8, 64));

    server.gate.allow(2);
    let open = server.open(CHAT, &chat(&json!({"stream": true}))).await;
    let mut last = first.clone();
    while last.running == 0 {
        let next = reports.next().await.unwrap().unwrap();
        assert_eq!(next.epoch, first.epoch);
        assert!(next.report > last.report, "{} after {}", next.report, last.report);
        last = next;
    }
    assert_eq!(last.blocks_active + last.blocks_evictable + last.blocks_free, last.blocks_total);
    assert!(last.blocks_active > 0);
    server.gate.open();
    whole(open).await.events();
    while last.running > 0 {
        last = reports.next().await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn draining_makes_unready_at_once_and_finishes_what_runs() {
    let server = Server::new(&Setup::default());
    let (mut client, _tasks) = replica(&server).await;
    assert_eq!(server.get("/v2/health/ready").await.status, 200);
    server.gate.allow(2);
    let open = server.open(CHAT, &chat(&json!({"stream": true}))).await;

    let mut progress = client.drain(DrainRequest {}).await.unwrap().into_inner();
    assert_eq!(progress.next().await.unwrap().unwrap().requests, 1);
    assert_eq!(server.app.lifecycle().phase(), Phase::Draining);
    assert_eq!(server.get("/v2/health/ready").await.status, 503);
    assert_eq!(server.get("/v2/health/live").await.status, 200);
    let mut reports = client.watch_load(WatchLoadRequest::default()).await.unwrap().into_inner();
    while reports.next().await.unwrap().unwrap().state() != State::Draining {}

    server.gate.open();
    let late = server.post(CHAT, &chat(&json!({}))).await;
    assert_eq!(late.status, 200, "what was on its way is answered: {}", late.text);
    let events = whole(open).await.events();
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    let left: Vec<u32> = progress.map(|progress| progress.unwrap().requests).collect().await;
    assert_eq!(left.last(), Some(&0), "the stream ends when nothing is left");
    assert_eq!(metric(&server, "ovfleet_server_ready").await, 0.0);

    server.app.lifecycle().advance(Phase::Stopping);
    let refused = server.post(CHAT, &chat(&json!({}))).await;
    assert_eq!((refused.status.as_u16(), &refused.json()["error"]["code"]), (503, &json!("stopping")));
    assert!(refused.headers.contains_key("retry-after"));
}

/// A server process, which ends with it.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn the_health_service_follows_the_replica() {
    let arguments = ["--backend", "sim", "--host", "127.0.0.1", "--port", "0", "--grpc-port", "0"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_server"));
    let mut process =
        Process(command.args(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    let mut lines = std::io::BufReader::new(process.0.stderr.take().unwrap()).lines();
    let address = lines.find_map(|line| Some(line.unwrap().split_once("gRPC on ")?.1.trim().to_owned()));
    let url = format!("http://{}", address.expect("the ports are told"));

    let channel = Channel::from_shared(url.clone()).unwrap().connect().await.unwrap();
    let mut client = HealthClient::new(channel);
    for service in ["", "ovfleet.v1alpha1.Replica"] {
        let request = HealthCheckRequest { service: service.to_owned() };
        let mut health = client.watch(request).await.unwrap().into_inner();
        while health.next().await.unwrap().unwrap().status() != ServingStatus::Serving {}
    }

    let mut replica = ReplicaClient::connect(url).await.unwrap();
    let request = HealthCheckRequest { service: String::new() };
    let mut health = client.watch(request).await.unwrap().into_inner();
    assert_eq!(health.next().await.unwrap().unwrap().status(), ServingStatus::Serving);
    let mut progress = replica.drain(DrainRequest {}).await.unwrap().into_inner();
    assert_eq!(progress.next().await.unwrap().unwrap().requests, 0);
    assert_eq!(health.next().await.unwrap().unwrap().status(), ServingStatus::NotServing);
}

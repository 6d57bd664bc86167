//! Tests load reports and draining over gRPC.

use std::time::Duration;

use http_body_util::BodyExt as _;
use proto::v1alpha1::replica_client::ReplicaClient;
use proto::v1alpha1::replica_server::ReplicaServer;
use proto::v1alpha1::{DrainRequest, Load, State, WatchLoadRequest};
use serde_json::json;
use server::{Model, NamedAdapter, ReplicaService, built_in_text, publish};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Channel, Server as Grpc};

use crate::harness::{GatedRunner, Server, Setup, chat};

const PATH: &str = "/v3/chat/completions";

/// Serves gRPC for `server` until the returned `JoinSet` is dropped.
async fn serve(server: &Server) -> (ReplicaClient<Channel>, JoinSet<()>) {
    let (sender, reports) = watch::channel(Load::default());
    let mut tasks = JoinSet::new();
    tasks.spawn(publish(server.app.clone(), sender));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let service = ReplicaServer::new(ReplicaService::new(server.app.clone(), reports));
    tasks.spawn(async move {
        Grpc::builder()
            .add_service(service)
            .serve_with_incoming(TcpListenerStream::new(listener))
            .await
            .unwrap();
    });
    (ReplicaClient::connect(address).await.unwrap(), tasks)
}

#[tokio::test]
async fn the_load_follows_a_request_and_reports_are_in_order() {
    let (runner, permits) = GatedRunner::new("x");
    let names = vec!["test-model".to_owned(), "group/test-model".to_owned()];
    let adapter = NamedAdapter { name: "sql".to_owned(), path: "sql".into() };
    let model = Model::new(names, built_in_text().unwrap(), "test").with_adapters(vec![adapter]);
    let server = Setup { model: Some(model), ..Setup::new(runner) }.start();
    let (mut client, _tasks) = serve(&server).await;
    let mut reports = client.watch_load(WatchLoadRequest::default()).await.unwrap().into_inner();
    let mut first = reports.message().await.unwrap().unwrap();
    while first.state() == State::Starting {
        first = reports.message().await.unwrap().unwrap();
    }
    assert_ne!(first.epoch, 0);
    assert_eq!(first.state(), State::Serving);
    assert_eq!(first.models, ["test-model", "group/test-model", "sql"]);
    assert_eq!((first.blocks_total, first.blocks_free, first.block_tokens), (64, 64, 16));
    assert_eq!((first.sequences_max, first.requests_max), (32, 64));

    permits.send(()).unwrap();
    let response = server.open(PATH, chat(json!({"stream": true, "max_tokens": 100}))).await;
    let mut last = first;
    let mut until = async |wanted: fn(&Load) -> bool| {
        loop {
            let load = reports.message().await.unwrap().unwrap();
            assert_eq!(load.epoch, last.epoch);
            assert!(load.report > last.report, "{load:?} after {last:?}");
            assert_eq!(load.blocks_active + load.blocks_evictable + load.blocks_free, load.blocks_total);
            last = load;
            if wanted(&last) {
                return last.clone();
            }
        }
    };
    let busy = until(|load| load.running == 1).await;
    assert!(busy.blocks_active > 0);
    drop(permits);
    drop(response.into_body().collect().await.unwrap());
    let idle = until(|load| load.running == 0 && load.blocks_active == 0).await;
    assert!(idle.blocks_evictable > 0, "the prefix remains cached");
    assert!(idle.decode_tokens_per_second >= 0.0);
}

#[tokio::test]
async fn two_routers_get_the_same_reports() {
    let server = Server::repeating("x");
    let (client, _tasks) = serve(&server).await;
    let mut loads = Vec::new();
    for mut client in [client.clone(), client] {
        let mut reports = client.watch_load(WatchLoadRequest::default()).await.unwrap().into_inner();
        loads.push(reports.message().await.unwrap().unwrap());
    }
    assert_eq!(loads[0].epoch, loads[1].epoch);
    if loads[0].report == loads[1].report {
        assert_eq!(loads[0], loads[1]);
    }
}

/// Returns a server whose engine has started, its reports after the first one, and the task that publishes them.
async fn published() -> (Server, watch::Receiver<Load>, JoinSet<()>) {
    let server = Server::repeating("x");
    server
        .engine
        .handle()
        .load()
        .wait_for(|load| load.state != server_engine::EngineState::Starting)
        .await
        .unwrap();
    let (sender, mut reports) = watch::channel(Load::default());
    let mut tasks = JoinSet::new();
    tasks.spawn(publish(server.app.clone(), sender));
    reports.changed().await.unwrap();
    (server, reports, tasks)
}

#[tokio::test(start_paused = true)]
async fn an_unchanged_load_is_reported_once_a_second() {
    let (_server, mut reports, _publishing) = published().await;
    let before = tokio::time::Instant::now();
    let first = reports.borrow_and_update().clone();
    reports.changed().await.unwrap();
    assert_eq!(before.elapsed(), Duration::from_secs(1));
    let second = reports.borrow_and_update().clone();
    assert_eq!(second, Load { report: first.report + 1, ..first });
}

#[tokio::test(start_paused = true)]
async fn changes_within_twenty_milliseconds_are_one_report() {
    let (server, mut reports, _publishing) = published().await;
    let before = tokio::time::Instant::now();
    server.app.lifecycle().advance(server::Phase::Draining);
    tokio::task::yield_now().await;
    server.app.lifecycle().advance(server::Phase::Stopped);
    reports.mark_unchanged();
    reports.changed().await.unwrap();
    assert_eq!(before.elapsed(), Duration::from_millis(20));
    assert_eq!(reports.borrow().state(), State::Stopped);
}

#[tokio::test]
async fn draining_reports_its_progress_until_no_request_is_left() {
    let (runner, permits) = GatedRunner::new("x");
    let server = Setup::new(runner).start();
    let (mut client, _tasks) = serve(&server).await;
    permits.send(()).unwrap();
    let response = server.open(PATH, chat(json!({"stream": true, "max_tokens": 100}))).await;
    let mut progress = client.drain(DrainRequest {}).await.unwrap().into_inner();
    assert_eq!(progress.message().await.unwrap().unwrap().requests, 1);
    assert_eq!(server.get("/v2/health/ready").await.status, 503);
    drop(permits);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert!(body.ends_with(b"data: [DONE]\n\n"), "the answer is complete");
    assert_eq!(progress.message().await.unwrap().unwrap().requests, 0);
    assert!(progress.message().await.unwrap().is_none());
}

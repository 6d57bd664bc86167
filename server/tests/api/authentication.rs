//! Tests the replica token: HTTP requests and gRPC calls without it are rejected.

use std::path::PathBuf;

use axum::body::Body;
use axum::http::Request;
use proto::replica_token::{HEADER, ReplicaTokenFile, SCHEME};
use proto::v1alpha1::replica_client::ReplicaClient;
use proto::v1alpha1::replica_server::ReplicaServer;
use proto::v1alpha1::{DrainRequest, Load, WatchLoadRequest};
use serde_json::json;
use server::{ReplicaService, RequireToken, authenticated, publish};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::Code;

use crate::harness::{Answer, Server, chat, completion};

const OLD: &str = "old-0123456789abcdef";
const NEW: &str = "new-0123456789abcdef";

/// Creates a token file in a temporary directory. Dropping the returned `TempDir` deletes both.
fn token_file(text: &str) -> (tempfile::TempDir, PathBuf, ReplicaTokenFile) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, text).unwrap();
    let file = ReplicaTokenFile::open(&path).unwrap();
    (directory, path, file)
}

fn guarded(file: &ReplicaTokenFile) -> Server {
    let mut server = Server::repeating("Hello");
    server.router = authenticated(server.router, file.clone(), server.app.clone());
    server
}

impl Server {
    async fn with_token(&self, method: &str, path: &str, body: String, tokens: &[&str]) -> Answer {
        let mut request =
            Request::builder().method(method).uri(path).header("content-type", "application/json");
        for token in tokens {
            request = request.header(HEADER, *token);
        }
        Answer::read(self.send(request.body(Body::from(body)).unwrap()).await).await
    }
}

#[tokio::test]
async fn only_requests_with_the_token_are_served() {
    let (_directory, _, file) = token_file(OLD);
    let server = guarded(&file);
    let calls = [
        ("POST", "/v3/chat/completions", chat(json!({}))),
        ("POST", "/v1/chat/completions", chat(json!({"stream": true}))),
        ("POST", "/v3/completions", completion(json!({}))),
        (
            "POST",
            "/v3/responses",
            json!({"model": "test-model", "input": "Hi", "max_output_tokens": 8}).to_string(),
        ),
        ("POST", "/v3/conversations", "{}".to_owned()),
        ("POST", "/tokenize", json!({"model": "test-model", "prompt": "Hi"}).to_string()),
        ("GET", "/v3/models", String::new()),
        ("GET", "/openapi.json", String::new()),
        ("GET", "/metrics", String::new()),
        ("GET", "/v2/health/ready", String::new()),
    ];
    for (method, path, body) in &calls {
        for wrong in [&[][..], &[NEW], &["old-0123456789abcde"], &[""]] {
            let answer = server.with_token(method, path, body.clone(), wrong).await;
            assert_eq!(answer.status, 401, "{path} {wrong:?}");
            assert_eq!(answer.headers["www-authenticate"], SCHEME);
            let error = &answer.json()["error"];
            assert_eq!(
                (&error["code"], &error["type"]),
                (&json!("invalid_replica_token"), &json!("authentication_error"))
            );
            assert!(!answer.body.contains(OLD));
        }
        let answer = server.with_token(method, path, body.clone(), &[OLD]).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    }
    let unknown = server.with_token("GET", "/v3/nothing", String::new(), &[]).await;
    assert_eq!(unknown.status, 401, "the answer does not reveal which paths exist");
    let metrics = server.with_token("GET", "/metrics", String::new(), &[OLD]).await.body;
    let counted = metrics.lines().find(|line| line.contains("outcome=\"unauthenticated\"")).unwrap();
    assert!(counted.contains("status=\"4xx\"") && counted.ends_with(" 41"), "{counted}");
}

#[tokio::test]
async fn the_tenant_header_is_trusted_only_with_the_token() {
    let (_directory, _, file) = token_file(OLD);
    let server = guarded(&file);
    let claim = |token: Option<&str>| {
        let mut request = Request::post("/v3/conversations")
            .header("content-type", "application/json")
            .header("x-ovfleet-tenant", "0000000000000000000000000000a11c");
        if let Some(token) = token {
            request = request.header(HEADER, token);
        }
        server.send(request.body(Body::from("{}")).unwrap())
    };
    assert_eq!(claim(None).await.status(), 401);
    assert_eq!(claim(Some(OLD)).await.status(), 200);
}

#[tokio::test]
async fn tokens_can_be_replaced_while_requests_are_served() {
    let (_directory, path, file) = token_file(OLD);
    let server = guarded(&file);
    let statuses = async || {
        let ask = async |token| server.with_token("GET", "/v3/models", String::new(), &[token]).await.status;
        [ask(OLD).await.as_u16(), ask(NEW).await.as_u16(), ask(&format!("{NEW},{OLD}")).await.as_u16()]
    };
    assert_eq!(statuses().await, [200, 401, 200]);
    std::fs::write(&path, format!("{NEW}\n{OLD}\n")).unwrap();
    file.reload().unwrap();
    assert_eq!(statuses().await, [200, 200, 200]);
    std::fs::write(&path, NEW).unwrap();
    file.reload().unwrap();
    assert_eq!(statuses().await, [401, 200, 200]);
    std::fs::remove_file(&path).unwrap();
    file.reload().unwrap_err();
    assert_eq!(statuses().await, [401, 200, 200], "the last tokens remain valid");
}

#[tokio::test]
async fn load_reports_and_draining_need_the_token_too() {
    let (_directory, _, file) = token_file(OLD);
    let server = guarded(&file);
    let (sender, reports) = watch::channel(Load::default());
    let mut tasks = JoinSet::new();
    tasks.spawn(publish(server.app.clone(), sender));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let service = ReplicaService::new(server.app.clone(), reports);
    let service = ReplicaServer::with_interceptor(service, RequireToken(Some(file.clone())));
    tasks.spawn(async move {
        let services = tonic::transport::Server::builder().add_service(service);
        services.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
    });
    let mut client = ReplicaClient::connect(address).await.unwrap();
    for wrong in [None, Some(NEW)] {
        let mut watch = tonic::Request::new(WatchLoadRequest::default());
        let mut drain = tonic::Request::new(DrainRequest {});
        if let Some(token) = wrong {
            watch.metadata_mut().insert(HEADER, token.parse().unwrap());
            drain.metadata_mut().insert(HEADER, token.parse().unwrap());
        }
        assert_eq!(client.watch_load(watch).await.unwrap_err().code(), Code::Unauthenticated);
        assert_eq!(client.drain(drain).await.unwrap_err().code(), Code::Unauthenticated);
    }
    assert!(server.app.is_ready(), "the server was not drained");
    let mut watch = tonic::Request::new(WatchLoadRequest::default());
    file.tokens().add_to(watch.metadata_mut().as_mut());
    let mut reports = client.watch_load(watch).await.unwrap().into_inner();
    assert!(reports.message().await.unwrap().unwrap().report > 0);
    let mut drain = tonic::Request::new(DrainRequest {});
    file.tokens().add_to(drain.metadata_mut().as_mut());
    client.drain(drain).await.unwrap();
    assert!(!server.app.is_ready());
}

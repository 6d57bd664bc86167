//! Tests sleep on request and after idle time, and the load reports about sleep.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use proto::v1alpha1::{Load, State};
use serde_json::json;
use server::{SleepApi, publish, router_with, sleep_when_idle};
use server_engine::{CacheLayout, Logits, ModelRunner, RunError, SleepLevel, TokenId};
use server_scheduler::Batch;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::harness::{Answer, GatedRunner, RepeatingRunner, Server, Setup, chat};

const PATH: &str = "/v3/chat/completions";

/// A runner that fails to wake a given number of times.
struct FailingWakeRunner {
    inner: RepeatingRunner,
    failures: Arc<AtomicU32>,
}

impl ModelRunner for FailingWakeRunner {
    fn layout(&self) -> CacheLayout {
        self.inner.layout()
    }

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        self.inner.run(batch)
    }

    fn wake(&mut self) -> Result<(), RunError> {
        let fails = |left: u32| left.checked_sub(1);
        match self.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fails) {
            Ok(_) => Err(RunError { message: "the file is gone".to_owned(), fatal: false }),
            Err(_) => Ok(()),
        }
    }
}

/// Starts a server that has the sleep endpoints and fails to wake `wake_failures` times.
fn server_with_sleep(wake_failures: u32) -> Server {
    let inner = RepeatingRunner::new("x".bytes().map(TokenId::from));
    let mut server =
        Setup::new(FailingWakeRunner { inner, failures: Arc::new(AtomicU32::new(wake_failures)) }).start();
    server.router = router_with(server.app.clone(), SleepApi::Enabled);
    server
}

async fn is_sleeping(server: &Server) -> serde_json::Value {
    server.get("/is_sleeping").await.json()
}

async fn metric(server: &Server, name: &str) -> f64 {
    let text = server.get("/metrics").await.body;
    let line = text.lines().find_map(|line| line.strip_prefix("ovfleet_server_")?.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).trim().parse().unwrap()
}

#[tokio::test]
async fn the_server_sleeps_and_wakes_on_request_and_remains_ready() {
    let server = server_with_sleep(0);
    server.post(PATH, chat(json!({}))).await;
    server.idle().await;
    for (query, level) in
        [("", SleepLevel::Cache), ("?level=1", SleepLevel::Cache), ("?level=2", SleepLevel::Model)]
    {
        assert_eq!(is_sleeping(&server).await, json!({"is_sleeping": false}));
        let answer = server.post(&format!("/sleep{query}"), Body::empty()).await;
        assert_eq!((answer.status, answer.body.as_str()), (StatusCode::OK, ""));
        assert_eq!(server.engine.handle().sleep_level(), Some(level));
        assert_eq!(is_sleeping(&server).await, json!({"is_sleeping": true}));
        assert_eq!(metric(&server, "sleeping").await, 1.0);
        assert_eq!(
            server.get("/v2/health/ready").await.status,
            StatusCode::OK,
            "a sleeping server remains ready"
        );
        assert_eq!(server.post("/wake_up", Body::empty()).await.status, StatusCode::OK);
    }
    assert_eq!(metric(&server, "sleeping").await, 0.0);
    assert_eq!(metric(&server, "wake_time_seconds_count").await, 3.0);
    for query in ["?level=3", "?level=0", "?level=deep", "?level="] {
        let answer = server.post(&format!("/sleep{query}"), Body::empty()).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.json()["error"]["param"]),
            (400, &json!("level")),
            "{query}"
        );
    }
    assert_eq!(server.get("/sleep").await.status, StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test]
async fn the_sleep_paths_do_not_exist_by_default() {
    let server = Server::repeating("x");
    for path in ["/sleep", "/sleep?level=1", "/wake_up"] {
        assert_eq!(server.post(path, Body::empty()).await.status, StatusCode::NOT_FOUND, "{path}");
    }
    assert_eq!(server.get("/is_sleeping").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_request_wakes_the_engine_and_reports_a_failure() {
    let server = server_with_sleep(2);
    server.post("/sleep?level=2", Body::empty()).await;
    let failed = server.post(PATH, chat(json!({}))).await;
    assert_eq!((failed.status.as_u16(), &failed.json()["error"]["code"]), (503, &json!("wake_failed")));
    assert!(failed.headers.contains_key("retry-after"), "another attempt may succeed");
    assert!(failed.body.contains("the file is gone"), "{}", failed.body);
    assert_eq!(server.post("/wake_up", Body::empty()).await.json()["error"]["code"], "wake_failed");
    assert_eq!(is_sleeping(&server).await, json!({"is_sleeping": true}));
    assert_eq!(server.post(PATH, chat(json!({}))).await.status, StatusCode::OK);
    assert_eq!(is_sleeping(&server).await, json!({"is_sleeping": false}));
    assert_eq!(metric(&server, "wake_time_seconds_count").await, 1.0);
}

#[tokio::test]
async fn a_busy_engine_does_not_sleep() {
    let (runner, permits) = GatedRunner::new("x");
    let mut server = Setup::new(runner).start();
    server.router = router_with(server.app.clone(), SleepApi::Enabled);
    permits.send(()).unwrap();
    let response = server.open(PATH, chat(json!({"stream": true, "max_tokens": 100}))).await;
    let mut pending_request = Box::pin(server.post("/sleep", Body::empty()));
    // The engine reads the command only after the step that waits for a permit.
    assert!(pending_request.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(permits);
    let answer = pending_request.await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["code"]),
        (409, &json!("requests_in_flight"))
    );
    assert!(Answer::read(response).await.body.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn an_idle_engine_sleeps_repeatedly_and_reports_it_to_routers() {
    let server = server_with_sleep(0);
    let engine = server.engine.handle();
    let (sender, mut reports) = watch::channel(Load::default());
    let mut tasks = JoinSet::new();
    tasks.spawn(publish(server.app.clone(), sender));
    tasks.spawn(sleep_when_idle(engine.clone(), Duration::from_millis(1), SleepLevel::Model));
    for _ in 0..3 {
        engine.load().wait_for(|load| load.sleep_level == Some(SleepLevel::Model)).await.unwrap();
        let report = reports.wait_for(|report| report.sleeping).await.unwrap().clone();
        assert_eq!((report.state(), report.blocks_free), (State::Serving, report.blocks_total));
        assert_eq!(server.post(PATH, chat(json!({}))).await.status, StatusCode::OK);
    }
    assert_eq!(metric(&server, "wake_time_seconds_count").await, 3.0);
}

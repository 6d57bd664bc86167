//! The API as clients see it: the router in this process, over the simulated engine with a token for each
//! byte. Nothing here knows how answers are made; what it may touch is what the crate exports.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod api;
mod errors;
mod lifecycle;

use std::sync::{Arc, Condvar, Mutex};

use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use axum::response::Response;
use http_body_util::BodyExt as _;
use serde_json::{Map, Value, json};
use server::{App, Limits, Metrics, Model, Serving, built_in_text, router};
use server_engine::sim::{SimConfig, SimCosts, SimRunner};
use server_engine::{CacheLayout, Clock, Engine, EngineConfig, EngineLoad, Logits, ModelRunner, RunError};
use server_scheduler::Batch;
use tower::ServiceExt as _;

/// The vocabulary of the built-in tokenizer: the bytes and three special tokens.
const VOCABULARY: u32 = 259;

/// What a server is to be like.
struct Setup {
    requests_max: usize,
    body_bytes_max: usize,
    sequences_max: u32,
    waiting_max: u32,
    tokens_max: u32,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            requests_max: 64,
            body_bytes_max: 1 << 20,
            sequences_max: 8,
            waiting_max: 64,
            tokens_max: 1024,
        }
    }
}

/// A server with its engine, and the gate that lets the engine's steps pass.
struct Server {
    app: App,
    gate: Arc<Gate>,
    engine: Engine,
}

impl Server {
    fn new(setup: &Setup) -> Self {
        let gate = Arc::new(Gate::default());
        let config = SimConfig {
            block_tokens: 16,
            blocks_total: 256,
            vocabulary: VOCABULARY,
            costs: SimCosts::default(),
            faults: Vec::new(),
        };
        let runner = Gated { sim: SimRunner::new(config, Clock::real()), gate: Arc::clone(&gate) };
        let config = EngineConfig {
            batch_tokens_max: 1024,
            chunk_tokens_max: 256,
            sequences_max: setup.sequences_max,
            waiting_max: setup.waiting_max,
            sequence_tokens_max: setup.tokens_max,
            prefix_caching: true,
            clock: Clock::real(),
        };
        let metrics = Metrics::new("sim", "sim");
        let engine = Engine::start(config, Box::new(runner), metrics.observer()).expect("the engine starts");
        let app = app(setup, metrics);
        let text = built_in_text().expect("there is a built-in tokenizer");
        app.serve(Serving {
            model: Model::new(vec!["sim".to_owned(), "org/alias".to_owned()], text, "sim"),
            engine: engine.handle(),
            sequences_max: setup.sequences_max,
            block_tokens: 16,
        });
        Self { app, gate, engine }
    }

    async fn get(&self, path: &str) -> Reply {
        send(&self.app, "GET", path, String::new()).await
    }

    async fn post(&self, path: &str, body: &Value) -> Reply {
        send(&self.app, "POST", path, body.to_string()).await
    }

    /// The answer as soon as its head is there.
    async fn open(&self, path: &str, body: &Value) -> Response {
        request(&self.app, "POST", path, body.to_string()).await
    }

    /// Waits until the engine's load is as wanted.
    async fn load(&self, wanted: impl FnMut(&EngineLoad) -> bool) -> EngineLoad {
        *self.engine.handle().load().wait_for(wanted).await.expect("the engine runs")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The engine is dropped after this, and waits for its step.
        self.gate.open();
    }
}

fn app(setup: &Setup, metrics: Metrics) -> App {
    let limits = Limits {
        body_bytes_max: setup.body_bytes_max,
        requests_max: setup.requests_max,
        connections_max: 64,
        read_timeout: std::time::Duration::from_secs(600),
    };
    App::new(limits, metrics)
}

async fn request(app: &App, method: &str, path: &str, body: String) -> Response {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("content-type", "application/json")
        .body(Body::from(body))
        .expect("a request");
    router(app.clone()).oneshot(request).await.expect("the router always answers")
}

async fn send(app: &App, method: &str, path: &str, body: String) -> Reply {
    whole(request(app, method, path, body).await).await
}

/// The rest of an answer.
async fn whole(response: Response) -> Reply {
    let (head, body) = response.into_parts();
    let body = body.collect().await.expect("the whole body arrives").to_bytes();
    let text = String::from_utf8(body.to_vec()).expect("answers are UTF-8");
    Reply { status: head.status, headers: head.headers, text }
}

/// An answer.
struct Reply {
    status: StatusCode,
    headers: HeaderMap,
    text: String,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The JSON of an answer that is no error.
    fn ok(&self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        self.json()
    }

    /// The events of a stream that ended well.
    fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        assert_eq!(self.headers["content-type"], "text/event-stream; charset=utf-8");
        let all = self.text.strip_suffix("data: [DONE]\n\n").expect("the stream ends with [DONE]");
        let events = all.split_terminator("\n\n");
        let events = events.map(|event| event.strip_prefix("data: ").expect("an event with data alone"));
        events.map(|event| serde_json::from_str(event).expect("an event is JSON")).collect()
    }
}

/// A request to the model for letters from a to z and nothing else, always the same.
fn greedy(more: &Value) -> Value {
    let bias: Map<String, Value> = (b'a'..=b'z').map(|letter| (letter.to_string(), json!(100))).collect();
    let mut request = json!({"model": "sim", "temperature": 0, "logit_bias": bias});
    let (all, more) = (request.as_object_mut().expect("an object"), more.as_object().expect("an object"));
    all.extend(more.clone());
    request
}

/// Lets through as many steps as it is told, then holds the engine.
#[derive(Debug)]
struct Gate {
    steps: Mutex<u64>,
    more: Condvar,
}

impl Default for Gate {
    fn default() -> Self {
        Self { steps: Mutex::new(u64::MAX), more: Condvar::new() }
    }
}

impl Gate {
    fn allow(&self, steps: u64) {
        *self.steps.lock().expect("nobody panics with the lock") = steps;
        self.more.notify_all();
    }

    fn open(&self) {
        self.allow(u64::MAX);
    }

    fn pass(&self) {
        let steps = self.steps.lock().expect("nobody panics with the lock");
        let mut steps =
            self.more.wait_while(steps, |steps| *steps == 0).expect("nobody panics with the lock");
        *steps -= 1;
    }
}

/// The simulated model behind a gate.
#[derive(Debug)]
struct Gated {
    sim: SimRunner,
    gate: Arc<Gate>,
}

impl ModelRunner for Gated {
    fn layout(&self) -> CacheLayout {
        self.sim.layout()
    }

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        self.gate.pass();
        self.sim.run(batch)
    }
}

//! A server that runs inside the test process: the axum router, the engine, and deterministic models.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use axum::{Router, response::Response};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use server::{
    App, HttpLimits, MediaPolicy, Metrics, Model, ServedModel, StoreConfig, built_in_model_with_images,
    built_in_text, built_in_text_with, router,
};
use server_engine::{
    CacheLayout, Clock, DraftRunner, EncoderConfig, Engine, EngineConfig, EngineOptions, Logits, ModelRunner,
    RunError, SchedulerConfig, TokenId,
    sim::{SimConfig, SimCosts, SimFault, SimRunner},
};
use server_scheduler::Batch;
use tower::ServiceExt as _;

/// The size of the built-in vocabulary: a token for each byte, and three special tokens.
pub(crate) const VOCABULARY: u32 = 259;
pub(crate) const IM_END: TokenId = 258;
const BLOCK_TOKENS: u32 = 16;
const BLOCKS: u32 = 64;

/// A server under test. Dropping it ends its engine.
pub(crate) struct Server {
    pub(crate) app: App,
    pub(crate) router: Router,
    pub(crate) engine: Engine,
}

/// The configuration of a server under test.
pub(crate) struct Setup {
    pub(crate) runner: Box<dyn ModelRunner>,
    pub(crate) draft: Option<Box<dyn ModelRunner>>,
    pub(crate) limits: HttpLimits,
    pub(crate) max_queue: u32,
    pub(crate) max_model_len: u32,
    /// The model, or `None` for the built-in one.
    pub(crate) model: Option<Model>,
    pub(crate) encoder: Option<EncoderConfig>,
    pub(crate) store: StoreConfig,
    pub(crate) media: MediaPolicy,
}

impl Setup {
    pub(crate) fn new(runner: impl ModelRunner + 'static) -> Self {
        Self {
            runner: Box::new(runner),
            draft: None,
            limits: HttpLimits {
                max_body_bytes: 64 * 1024,
                max_concurrent_requests: 64,
                max_connections: 64,
                read_timeout: Duration::from_secs(60),
                ..HttpLimits::default()
            },
            max_queue: 256,
            max_model_len: 512,
            model: None,
            encoder: None,
            store: StoreConfig::default(),
            media: MediaPolicy::default(),
        }
    }

    /// Uses a model with this chat template, and with these special tokens after the three built-in ones. In its *n*th
    /// turn, the model generates the *n*th of `answers`, or the last one if there are fewer.
    pub(crate) fn scripted(template: &str, special_tokens: &[&str], answers: &[&str]) -> Self {
        let text = built_in_text_with(template, special_tokens).unwrap();
        let config = SimConfig {
            block_tokens: BLOCK_TOKENS,
            blocks_total: 1024,
            vocabulary: text.vocabulary_size,
            costs: SimCosts::default(),
            faults: Vec::new(),
        };
        let answers: Vec<String> = answers.iter().map(|answer| (*answer).to_owned()).collect();
        let script = server::script(&answers, &text).unwrap();
        let runner = SimRunner::new(config, Clock::simulated()).with_script(script);
        let model = Model::new(names(), text, "test");
        Self { max_model_len: 8192, model: Some(model), ..Self::new(runner) }
    }

    /// Uses the built-in model that reads images.
    pub(crate) fn reading_images() -> Self {
        let (model, encoder) = built_in_model_with_images(names(), 1 << 20).unwrap();
        // The additional token marks images.
        let runner = simulated(VOCABULARY + 1, Vec::new());
        let max_model_len = BLOCKS * BLOCK_TOKENS;
        Self { max_model_len, model: Some(model), encoder: Some(encoder), ..Self::new(runner) }
    }

    /// Makes the runner wait for a permit before each step, until the sender of permits is dropped.
    pub(crate) fn gated(self) -> (Self, mpsc::Sender<()>) {
        let (runner, permits) = GatedRunner::of(self.runner);
        (Self { runner: Box::new(runner), ..self }, permits)
    }

    pub(crate) fn start(self) -> Server {
        let metrics = Metrics::new("test-model", "test");
        let config = EngineConfig {
            scheduler: SchedulerConfig {
                max_num_batched_tokens: 64,
                max_chunk_tokens: 64,
                max_itl: None,
                max_num_seqs: 32,
                max_queue: self.max_queue,
                max_model_len: self.max_model_len,
                prefix_caching: true,
                kv_eviction_tokens: None,
            },
            clock: Clock::simulated(),
        };
        let draft = self.draft.map(|runner| DraftRunner { runner, max_model_len: 400 });
        let extras = EngineOptions { draft, encoder: self.encoder, ..EngineOptions::default() };
        let engine = Engine::start_with_options(config, self.runner, extras, metrics.observer()).unwrap();
        let app = App::with_media(self.limits, metrics, &self.store, self.media).unwrap();
        let built_in = || Model::new(names(), built_in_text().unwrap(), "test");
        app.serve(ServedModel {
            model: self.model.unwrap_or_else(built_in),
            engine: engine.handle(),
            max_num_seqs: 32,
            block_tokens: BLOCK_TOKENS,
        });
        Server { router: router(app.clone()), app, engine }
    }
}

fn names() -> Vec<String> {
    vec!["test-model".to_owned(), "group/test-model".to_owned()]
}

impl Server {
    /// A server whose model repeats `text`: the position determines the next byte.
    pub(crate) fn repeating(text: &str) -> Self {
        Setup::new(RepeatingRunner::new(text.bytes().map(TokenId::from))).start()
    }

    pub(crate) async fn send(&self, request: Request<Body>) -> Response {
        self.router.clone().oneshot(request).await.unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        Answer::read(self.send(Request::get(path).body(Body::empty()).unwrap()).await).await
    }

    pub(crate) async fn post(&self, path: &str, body: impl Into<Body>) -> Answer {
        Answer::read(self.open(path, body).await).await
    }

    /// Like [`Self::post`], but does not read the body of the answer.
    pub(crate) async fn open(&self, path: &str, body: impl Into<Body>) -> Response {
        let request = Request::post(path).header("content-type", "application/json");
        self.send(request.body(body.into()).unwrap()).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answer {
        Answer::read(self.send(Request::delete(path).body(Body::empty()).unwrap()).await).await
    }

    /// Waits until no sequence is running or waiting, and checks that no block is in use.
    pub(crate) async fn idle(&self) {
        let mut load = self.engine.handle().load();
        let idle = load.wait_for(|load| (load.load.running, load.load.waiting) == (0, 0)).await.unwrap().load;
        assert_eq!(idle.blocks_active, 0);
    }

    /// Blocks this thread, which runs all tasks of a test, until the engine has received this number of prompts and has
    /// generated all of their tokens. No task can read tokens in the meantime.
    pub(crate) fn block_until_computed(&self, submissions: u64) {
        let load = self.engine.handle().load();
        let is_computed = || {
            let published = *load.borrow();
            let is_idle = (published.load.running, published.load.waiting) == (0, 0);
            is_idle && published.submissions >= submissions
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_computed() {
            assert!(Instant::now() < deadline, "the engine is still busy");
            std::thread::yield_now();
        }
    }
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) async fn read(response: Response) -> Self {
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let body = String::from_utf8(bytes.to_vec()).unwrap();
        Self { status: parts.status, headers: parts.headers, body }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// Returns the data of the events.
    pub(crate) fn events(&self) -> Vec<&str> {
        let events = self.body.strip_suffix("\n\n").unwrap().split("\n\n");
        events.map(|event| event.strip_prefix("data: ").unwrap()).collect()
    }

    /// Returns the answer without values that differ between runs.
    pub(crate) fn shown(&self) -> String {
        let mut shown = format!("{}\n", self.status.as_u16());
        if self.headers["content-type"].to_str().unwrap().starts_with("text/event-stream") {
            for event in self.events() {
                shown += &serde_json::from_str(event).map_or_else(|_| event.to_owned(), redacted);
                shown.push('\n');
            }
        } else {
            shown += &serde_json::to_string_pretty(&redact(self.json())).unwrap();
            shown.push('\n');
        }
        shown
    }

    /// Returns the text of the first choice of a chat answer, streamed or not.
    pub(crate) fn text(&self) -> String {
        if let Ok(whole) = serde_json::from_str::<Value>(&self.body) {
            return whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        }
        let events = self.events();
        let chunks = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
        chunks
            .filter_map(|chunk| Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned()))
            .collect()
    }
}

fn redact(mut answer: Value) -> Value {
    for (field, prefix) in [("id", "-"), ("system_fingerprint", "_")] {
        if let Some(Value::String(text)) = answer.get_mut(field)
            && let Some((kind, _)) = text.clone().split_once(prefix)
        {
            *text = format!("{kind}{prefix}…");
        }
    }
    if let Some(created) = answer.get_mut("created") {
        assert!(created.as_u64().unwrap() > 1_700_000_000, "{created}");
        *created = json!(0);
    }
    answer
}

fn redacted(answer: Value) -> String {
    redact(answer).to_string()
}

/// Returns a chat request with one message and these parameters. By default, sampling is greedy.
pub(crate) fn chat(parameters: Value) -> String {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let request = json!({"model": "test-model", "temperature": 0, "max_tokens": 8, "messages": messages});
    merged(request, parameters).to_string()
}

/// Returns a completion request with these parameters.
pub(crate) fn completion(parameters: Value) -> String {
    let request = json!({"model": "test-model", "temperature": 0, "max_tokens": 8, "prompt": "Hi"});
    merged(request, parameters).to_string()
}

/// Returns the members of both objects. Those of `parameters` take precedence.
pub(crate) fn merged(mut base: Value, parameters: Value) -> Value {
    let Value::Object(parameters) = parameters else { panic!("parameters must be an object") };
    base.as_object_mut().unwrap().extend(parameters);
    base
}

/// A runner that repeats the tokens of a script: the position determines the next token.
pub(crate) struct RepeatingRunner {
    script: Vec<TokenId>,
    logits: Vec<f32>,
}

impl RepeatingRunner {
    pub(crate) fn new(script: impl IntoIterator<Item = TokenId>) -> Self {
        Self { script: script.into_iter().collect(), logits: Vec::new() }
    }
}

impl ModelRunner for RepeatingRunner {
    fn layout(&self) -> CacheLayout {
        CacheLayout {
            block_tokens: BLOCK_TOKENS,
            blocks_total: BLOCKS,
            block_bytes: 1,
            vocabulary: VOCABULARY,
        }
    }

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        self.logits.clear();
        let rows = batch.sequences.iter().flat_map(|row| row.tokens.clone().map(move |place| (row, place)));
        let mut wanted = batch.logits_indices().peekable();
        for (row, place) in rows {
            if wanted.next_if_eq(&place).is_none() {
                continue;
            }
            let position = (row.computed_tokens + place - row.tokens.start + 1) as usize;
            let next = self.script[position % self.script.len()];
            self.logits.extend((0..VOCABULARY).map(|token| if token == next { 8.0 } else { 0.0 }));
        }
        Ok(Logits::new(&self.logits, VOCABULARY))
    }
}

/// A runner that waits for a permit before each step, until the sender of permits is dropped.
pub(crate) struct GatedRunner {
    runner: Box<dyn ModelRunner>,
    permits: mpsc::Receiver<()>,
}

impl GatedRunner {
    pub(crate) fn new(text: &str) -> (Self, mpsc::Sender<()>) {
        Self::of(Box::new(RepeatingRunner::new(text.bytes().map(TokenId::from))))
    }

    fn of(runner: Box<dyn ModelRunner>) -> (Self, mpsc::Sender<()>) {
        let (sender, permits) = mpsc::channel();
        (Self { runner, permits }, sender)
    }
}

impl ModelRunner for GatedRunner {
    fn layout(&self) -> CacheLayout {
        self.runner.layout()
    }

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        // Without a sender, no permits are needed.
        let _ = self.permits.recv();
        self.runner.run(batch)
    }
}

/// A runner of the engine's simulated model with these faults.
pub(crate) fn faulty(faults: Vec<SimFault>) -> SimRunner {
    simulated(VOCABULARY, faults)
}

fn simulated(vocabulary: u32, faults: Vec<SimFault>) -> SimRunner {
    let config = SimConfig {
        block_tokens: BLOCK_TOKENS,
        blocks_total: BLOCKS,
        vocabulary,
        costs: SimCosts::default(),
        faults,
    };
    SimRunner::new(config, Clock::simulated())
}

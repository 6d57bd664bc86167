//! The Prometheus metrics of the process. `docs/reference/metrics.md` lists them; a test compares the list with the
//! code.
//!
//! The engine's thread updates the counts of tokens and steps after each step, and the record of a request
//! ([`crate::request_record`]) counts the request. The gauges, and the counters of the image cache and of the blocks
//! stored on disk, are updated on each scrape.

mod exposition;
mod images;
mod spill;

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use process::metrics::{MetricsBuilder, RequestLabels};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use server_engine::{EngineHandle, EngineLoad, Observer, RequestImages, StepReport};

use images::ImageCacheMetrics;
use spill::SpillMetrics;

pub(crate) use exposition::Exposition;

/// All metrics of the process. Clones share the same metrics.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    adapter_requests: Family<AdapterLabels, Counter>,
    requests_in_flight: Gauge,
    time_to_first_token: Histogram,
    inter_token_latency: Histogram,
    request_duration: Histogram,
    queue_time: Histogram,
    step_time: Histogram,
    model_time: Histogram,
    draft_time: Histogram,
    structured_output_wait: Histogram,
    wake_time: Histogram,
    batch_tokens: Histogram,
    batch_sequences: Histogram,
    prompt_tokens: Counter,
    cached_prompt_tokens: Counter,
    generated_tokens: Counter,
    preemptions: Counter,
    sequence_suspensions: Counter,
    drafted_tokens: Counter,
    accepted_tokens: Counter,
    failed_step_requests: Counter,
    images: Counter,
    image_tokens: Counter,
    image_encoder_runs: Counter,
    encoded_images: Counter,
    image_encode_time: Histogram,
    unencoded_image_tokens: Gauge,
    encoded_image_tokens: Gauge,
    image_cache: ImageCacheMetrics,
    spill: SpillMetrics,
    sequences_running: Gauge,
    sequences_waiting: Gauge,
    blocks_active: Gauge,
    blocks_evictable: Gauge,
    blocks_total: Gauge,
    sleeping: Gauge,
    ready: Gauge,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AdapterLabels {
    adapter: String,
}

/// Returns a histogram with buckets from 0.1 ms to 13 s.
fn short() -> Histogram {
    Histogram::new(exponential_buckets(0.000_1, 2.0, 18))
}

/// Returns a histogram with buckets from 1 to 32768.
fn size() -> Histogram {
    Histogram::new(exponential_buckets(1.0, 2.0, 16))
}

/// The state of the process from which the gauges are computed.
pub(crate) struct ProcessState<'a> {
    pub(crate) is_ready: bool,
    /// Number of requests in flight.
    pub(crate) requests: usize,
    /// The engine, once the model is loaded.
    pub(crate) engine: Option<&'a EngineHandle>,
}

impl Metrics {
    /// Creates metrics that are all zero. `model` and `backend` become labels of the build info.
    pub fn new(model: &str, backend: &str) -> Self {
        let mut metrics = MetricsBuilder(Registry::with_prefix("ovfleet_server"));
        let info = [("version", env!("CARGO_PKG_VERSION")), ("model", model), ("backend", backend)];
        let info = info.map(|(name, value)| (name, value.to_owned())).to_vec();
        metrics.0.register("build", "Version, model and backend of the server", Info::new(info));
        let inner = Inner {
            requests: metrics.zero("requests", "Finished requests, by endpoint, outcome and status class"),
            adapter_requests: metrics
                .zero("adapter_requests", "Accepted requests that use an adapter, by adapter name"),
            prompt_tokens: metrics
                .zero("prompt_tokens", "Prompt tokens of started requests, including cached tokens"),
            cached_prompt_tokens: metrics
                .zero("cached_prompt_tokens", "Prompt tokens found in the prefix cache"),
            generated_tokens: metrics.zero("generated_tokens", "Generated tokens"),
            drafted_tokens: metrics
                .zero("drafted_tokens", "Draft tokens that were sent to the model for verification"),
            accepted_tokens: metrics.zero("accepted_tokens", "Draft tokens that the model accepted"),
            preemptions: metrics.zero(
                "preemptions",
                "Number of times that a sequence was preempted because the KV cache was full",
            ),
            sequence_suspensions: metrics.zero(
                "sequence_suspensions",
                "Number of times that a sequence skipped steps because the allowed tokens of its structured output \
                 were not computed in time",
            ),
            failed_step_requests: metrics.zero(
                "failed_step_requests",
                "Requests that failed because a model step, a run of the image encoder or a wake-up failed",
            ),
            images: metrics.zero("images", "Images in accepted requests"),
            image_tokens: metrics.zero("image_tokens", "Prompt tokens of the images in accepted requests"),
            image_encoder_runs: metrics.zero(
                "image_encoder_runs",
                "Runs of the image encoder, each of which encodes one or more images",
            ),
            encoded_images: metrics.zero("encoded_images", "Images that the encoder has encoded"),
            image_encode_time: metrics.request_seconds(
                "image_encode_time",
                "Time to encode an image; for images that are encoded together, the mean per image",
            ),
            unencoded_image_tokens: metrics.zero(
                "unencoded_image_tokens",
                "Tokens of images that are being encoded, and of unencoded images in waiting requests",
            ),
            encoded_image_tokens: metrics
                .zero("encoded_image_tokens", "Tokens of images whose encoder outputs are cached"),
            image_cache: ImageCacheMetrics::new(&mut metrics),
            time_to_first_token: metrics.request_seconds(
                "time_to_first_token",
                "Time from the arrival of a request to its first token",
            ),
            inter_token_latency: metrics.seconds(
                "inter_token_latency",
                "Time between two successive tokens of a choice",
                short(),
            ),
            request_duration: metrics.request_seconds(
                "request_duration",
                "Time from the arrival of a request to the end of its response",
            ),
            queue_time: metrics.request_seconds(
                "queue_time",
                "Time between the submission of a request to the engine and the start of the request's first step",
            ),
            step_time: metrics.seconds("step_time", "Duration of an engine step", short()),
            model_time: metrics.seconds(
                "model_time",
                "Time that an engine step spends running the model",
                short(),
            ),
            wake_time: metrics.request_seconds("wake_time", "Duration of a successful wake-up"),
            draft_time: metrics.seconds(
                "draft_time",
                "Time that the draft model takes in an engine step with draft tokens",
                short(),
            ),
            structured_output_wait: metrics.seconds(
                "structured_output_wait",
                "Time that an engine step with structured outputs waits for the sets of allowed tokens after the \
                 model has run",
                short(),
            ),
            batch_tokens: metrics.add("batch_tokens", "Tokens in an engine step", size()),
            batch_sequences: metrics.add("batch_sequences", "Sequences in an engine step", size()),
            requests_in_flight: metrics.zero("requests_in_flight", "Requests in flight"),
            sequences_running: metrics.zero("sequences_running", "Running sequences"),
            sequences_waiting: metrics.zero("sequences_waiting", "Waiting sequences"),
            blocks_active: metrics.zero(
                "blocks_active",
                "KV cache blocks that running sequences use or that are being restored from --kv-spill-dir",
            ),
            blocks_evictable: metrics
                .zero("blocks_evictable", "KV cache blocks that only the prefix cache uses"),
            blocks_total: metrics.zero("blocks_total", "Total number of KV cache blocks"),
            sleeping: metrics
                .zero("sleeping", "1 if the engine is sleeping; the next request wakes it"),
            ready: metrics.zero("ready", "1 if the server is ready to receive requests"),
            spill: SpillMetrics::new(&mut metrics),
            registry: metrics.0,
        };
        Self(Arc::new(inner))
    }

    /// Counts a finished or rejected request.
    pub(crate) fn count(&self, endpoint: &'static str, outcome: &'static str, status: StatusCode) {
        self.0.requests.get_or_create(&RequestLabels::new(endpoint, outcome, status.as_u16())).inc();
    }

    /// Counts an accepted request that uses an adapter.
    pub fn count_adapter(&self, adapter: &str) {
        let labels = AdapterLabels { adapter: adapter.to_owned() };
        self.0.adapter_requests.get_or_create(&labels).inc();
    }

    /// Counts the images of an accepted prompt, and their tokens.
    pub(crate) fn count_images(&self, images: &RequestImages) {
        let RequestImages { prompt, inputs, .. } = images;
        self.0.images.inc_by(inputs.len() as u64);
        self.0.image_tokens.inc_by(prompt.num_tokens());
    }

    /// Returns an observer that records the engine's step reports.
    pub fn observer(&self) -> Observer {
        let metrics = self.clone();
        Box::new(move |report| metrics.step(report))
    }

    fn step(&self, report: &StepReport) {
        let inner = &*self.0;
        if report.num_sequences > 0 {
            inner.step_time.observe(report.step_time.as_secs_f64());
            inner.model_time.observe(report.run_time.as_secs_f64());
            inner.batch_tokens.observe(f64::from(report.batch_tokens));
            inner.batch_sequences.observe(f64::from(report.num_sequences));
        }
        if !report.draft_time.is_zero() {
            inner.draft_time.observe(report.draft_time.as_secs_f64());
        }
        if report.guided_sequences > 0 {
            inner.structured_output_wait.observe(report.structured_output_wait.as_secs_f64());
        }
        if let Some(wake_time) = report.wake_time {
            inner.wake_time.observe(wake_time.as_secs_f64());
        }
        inner.prompt_tokens.inc_by(u64::from(report.prompt_tokens));
        inner.cached_prompt_tokens.inc_by(u64::from(report.cached_tokens));
        inner.generated_tokens.inc_by(u64::from(report.generated_tokens));
        inner.preemptions.inc_by(u64::from(report.preemptions));
        inner.sequence_suspensions.inc_by(u64::from(report.sequence_suspensions));
        inner.drafted_tokens.inc_by(u64::from(report.drafted_tokens));
        inner.accepted_tokens.inc_by(u64::from(report.accepted_tokens));
        inner.failed_step_requests.inc_by(u64::from(report.requests_failed));
        inner.image_encoder_runs.inc_by(u64::from(report.encoder_runs));
        inner.encoded_images.inc_by(u64::from(report.encoded_images));
        for _ in 0..report.encoded_images {
            inner
                .image_encode_time
                .observe(report.encode_time.as_secs_f64() / f64::from(report.encoded_images));
        }
        for time in &report.queue_times {
            inner.queue_time.observe(time.as_secs_f64());
        }
    }

    pub(crate) fn first_token(&self, after: Duration) {
        self.0.time_to_first_token.observe(after.as_secs_f64());
    }

    pub(crate) fn next_token(&self, after: Duration) {
        self.0.inter_token_latency.observe(after.as_secs_f64());
    }

    pub(crate) fn request_ended(&self, after: Duration) {
        self.0.request_duration.observe(after.as_secs_f64());
    }

    /// Returns all metrics as OpenMetrics text.
    pub(crate) fn encode(&self, state: &ProcessState<'_>) -> String {
        let ProcessState { is_ready, requests, engine } = *state;
        let inner = &*self.0;
        inner.ready.set(i64::from(is_ready));
        inner.requests_in_flight.set(i64::try_from(requests).unwrap_or(i64::MAX));
        if let Some(engine) = engine {
            let engine_load = *engine.load().borrow();
            let EngineLoad { load, sleep_level, .. } = engine_load;
            inner.sleeping.set(i64::from(sleep_level.is_some()));
            inner.sequences_running.set(i64::from(load.running));
            inner.sequences_waiting.set(i64::from(load.waiting));
            inner.blocks_active.set(i64::from(load.blocks_active));
            inner.blocks_evictable.set(i64::from(load.blocks_evictable));
            inner.blocks_total.set(i64::from(load.blocks_total));
            let tokens = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
            inner.unencoded_image_tokens.set(tokens(load.unencoded_image_tokens));
            inner.encoded_image_tokens.set(tokens(load.encoded_image_tokens));
            inner.image_cache.set(&engine_load);
            if let Some(spill) = engine.spill_stats() {
                inner.spill.set(spill);
            }
        }
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &inner.registry)
            .expect("invariant: writing to a string does not fail");
        text
    }
}

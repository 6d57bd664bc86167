//! The metrics for Prometheus. `docs/reference/metrics-router.md` lists all names, and a test checks the list.
//!
//! Counters and histograms are updated when the counted events occur. Gauges are set when the metrics are read.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use http::StatusCode;
use process::metrics::{RequestLabels, request_seconds};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use crate::endpoint::Endpoint;
use crate::health::{Health, HealthState};
use crate::policy::Terms;
use crate::replica::Replica;

/// The values of the gauges at the time when the metrics are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GaugeSources<'a> {
    pub(crate) is_ready: bool,
    pub(crate) requests_in_work: usize,
    pub(crate) requests_queued: usize,
    pub(crate) requests_without_replica: usize,
    pub(crate) replicas: &'a [Arc<Replica>],
    pub(crate) health: &'a Health,
    pub(crate) report_ttl: Duration,
}

/// All metrics of the process. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    retries: Family<ReasonLabels, Counter>,
    pick_latency: Histogram,
    terms: TermHistograms,
    report_age: Histogram,
    queue_wait: Histogram,
    first_byte: Histogram,
    duration: Histogram,
    prompt_tokens: Counter,
    cached_prompt_tokens: Counter,
    ejections: Counter,
    expired_dispatches: Counter,
    requests_in_work: Gauge,
    requests_queued: Gauge,
    requests_without_replica: Gauge,
    replicas: ReplicaGauges,
    ready: Gauge,
}

/// The terms of the scores of the picked replicas.
#[derive(Debug)]
struct TermHistograms {
    score: Histogram,
    queued_prefill: Histogram,
    prefill: Histogram,
    decode_interference: Histogram,
    sequence_wait: Histogram,
    block_wait: Histogram,
    cache_pressure: Histogram,
}

impl TermHistograms {
    fn new() -> Self {
        Self {
            score: request_seconds(),
            queued_prefill: request_seconds(),
            prefill: request_seconds(),
            decode_interference: request_seconds(),
            sequence_wait: request_seconds(),
            block_wait: request_seconds(),
            cache_pressure: request_seconds(),
        }
    }

    fn observe(&self, terms: &Terms) {
        self.score.observe(terms.score);
        self.queued_prefill.observe(terms.queued_prefill);
        self.prefill.observe(terms.prefill);
        self.decode_interference.observe(terms.decode_interference);
        self.sequence_wait.observe(terms.sequence_wait);
        self.block_wait.observe(terms.block_wait);
        self.cache_pressure.observe(terms.cache_pressure);
    }

    /// The name, the help and the histogram of each term.
    fn names(&self) -> [(&'static str, &'static str, &Histogram); 7] {
        [
            ("score", "Score of the picked replica: its estimated time to the first token", &self.score),
            (
                "queued_prefill",
                "Part of the score: time to compute the prompts that are ahead",
                &self.queued_prefill,
            ),
            ("prefill", "Part of the score: time to compute the prompt of the request", &self.prefill),
            (
                "decode_interference",
                "Part of the score: delay by sequences that decode in the same steps",
                &self.decode_interference,
            ),
            ("sequence_wait", "Part of the score: time until a sequence can start", &self.sequence_wait),
            ("block_wait", "Part of the score: time until enough blocks are free", &self.block_wait),
            (
                "cache_pressure",
                "Part of the score: penalty for a cache that is nearly full",
                &self.cache_pressure,
            ),
        ]
    }
}

/// The gauges of each replica.
#[derive(Debug, Default)]
struct ReplicaGauges {
    in_flight: Family<ReplicaLabels, Gauge>,
    unreported: Family<ReplicaLabels, Gauge>,
    running: Family<ReplicaLabels, Gauge>,
    waiting: Family<ReplicaLabels, Gauge>,
    blocks_active: Family<ReplicaLabels, Gauge>,
    blocks_evictable: Family<ReplicaLabels, Gauge>,
    blocks_free: Family<ReplicaLabels, Gauge>,
    asleep: Family<ReplicaLabels, Gauge>,
    report_age: Family<ReplicaLabels, Gauge<f64, AtomicU64>>,
    trusted: Family<ReplicaLabels, Gauge>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReplicaLabels {
    replica: String,
}

/// A histogram from 1 us to 32 ms.
fn short() -> Histogram {
    Histogram::new(exponential_buckets(0.000_001, 2.0, 16))
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Creates metrics that are all zero.
    #[must_use]
    pub fn new() -> Self {
        let mut inner = Inner {
            registry: Registry::default(),
            requests: Family::default(),
            retries: Family::default(),
            pick_latency: short(),
            terms: TermHistograms::new(),
            report_age: request_seconds(),
            queue_wait: request_seconds(),
            first_byte: request_seconds(),
            duration: request_seconds(),
            prompt_tokens: Counter::default(),
            cached_prompt_tokens: Counter::default(),
            ejections: Counter::default(),
            expired_dispatches: Counter::default(),
            requests_in_work: Gauge::default(),
            requests_queued: Gauge::default(),
            requests_without_replica: Gauge::default(),
            replicas: ReplicaGauges::default(),
            ready: Gauge::default(),
        };
        inner.registry = registry(&inner);
        // Create these series at 0: an alert uses their increase, and Prometheus sees no increase in a series that
        // begins at 1.
        for endpoint in Endpoint::ALL {
            let labels = RequestLabels::new(endpoint.name(), "broken", 200);
            drop(inner.requests.get_or_create(&labels));
        }
        Self(Arc::new(inner))
    }

    /// Counts a request that was answered or rejected.
    pub fn record_request(&self, endpoint: &'static str, outcome: &'static str, status: StatusCode) {
        self.0.requests.get_or_create(&RequestLabels::new(endpoint, outcome, status.as_u16())).inc();
    }

    /// Counts a retry by the reason for the failure.
    pub fn record_retry(&self, reason: &'static str) {
        self.0.retries.get_or_create(&ReasonLabels { reason }).inc();
    }

    pub(crate) fn record_pick(&self, latency: Duration, terms: &Terms, report_age: Option<Duration>) {
        let inner = &*self.0;
        inner.pick_latency.observe(latency.as_secs_f64());
        inner.terms.observe(terms);
        if let Some(age) = report_age {
            inner.report_age.observe(age.as_secs_f64());
        }
        inner.cached_prompt_tokens.inc_by(u64::from(terms.cached_tokens));
    }

    pub(crate) fn record_prompt(&self, tokens: u32) {
        self.0.prompt_tokens.inc_by(u64::from(tokens));
    }

    pub(crate) fn record_queue_wait(&self, time: Duration) {
        self.0.queue_wait.observe(time.as_secs_f64());
    }

    pub(crate) fn record_first_byte(&self, after: Duration) {
        self.0.first_byte.observe(after.as_secs_f64());
    }

    pub(crate) fn record_duration(&self, after: Duration) {
        self.0.duration.observe(after.as_secs_f64());
    }

    pub(crate) fn record_ejection(&self) {
        self.0.ejections.inc();
    }

    pub(crate) fn record_expired_dispatches(&self, dispatches: u32) {
        self.0.expired_dispatches.inc_by(u64::from(dispatches));
    }

    /// All metrics, as OpenMetrics text.
    pub(crate) fn scrape(&self, sources: &GaugeSources<'_>) -> String {
        let inner = &*self.0;
        let count = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        inner.ready.set(i64::from(sources.is_ready));
        inner.requests_in_work.set(count(sources.requests_in_work));
        inner.requests_queued.set(count(sources.requests_queued));
        inner.requests_without_replica.set(count(sources.requests_without_replica));
        inner.replicas.refresh(sources);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &inner.registry)
            .expect("invariant: writing to a string does not fail");
        text
    }
}

impl ReplicaGauges {
    /// The name, the help and the gauges of each figure.
    fn all(&self) -> [(&'static str, &'static str, &Family<ReplicaLabels, Gauge>); 9] {
        [
            (
                "replica_in_flight",
                "Requests that this router has sent to the replica and that have not ended",
                &self.in_flight,
            ),
            (
                "replica_unreported",
                "Requests in flight that the last load report does not include",
                &self.unreported,
            ),
            ("replica_running", "Running sequences, as reported", &self.running),
            ("replica_waiting", "Waiting sequences, as reported", &self.waiting),
            ("replica_blocks_active", "KV cache blocks in use by running sequences", &self.blocks_active),
            (
                "replica_blocks_evictable",
                "KV cache blocks of the prefix cache that no sequence uses",
                &self.blocks_evictable,
            ),
            ("replica_blocks_free", "KV cache blocks that are empty", &self.blocks_free),
            (
                "replica_asleep",
                "1 if the replica has released its memory and the next request wakes it, as reported",
                &self.asleep,
            ),
            ("replica_trusted", "1 if the replica may get requests, 0 while it is ejected", &self.trusted),
        ]
    }

    fn refresh(&self, sources: &GaugeSources<'_>) {
        for (_, _, family) in self.all() {
            family.clear();
        }
        self.report_age.clear();
        let now = Instant::now();
        for replica in sources.replicas {
            let labels = ReplicaLabels { replica: replica.discovered.name.clone() };
            let set = |family: &Family<ReplicaLabels, Gauge>, value: i64| {
                family.get_or_create(&labels).set(value);
            };
            let view = replica.ledger.view(now, sources.report_ttl);
            let state = sources.health.state(replica.identity, now);
            set(&self.in_flight, view.booked.in_flight.into());
            set(&self.unreported, view.booked.unreported.into());
            set(&self.trusted, i64::from(state != HealthState::Ejected));
            if let Some(reported) = view.reported {
                let empty = replica.status().load.blocks_free;
                set(&self.running, reported.running.into());
                set(&self.waiting, reported.waiting.into());
                set(&self.blocks_active, reported.blocks_active.into());
                set(&self.blocks_evictable, reported.blocks_evictable.into());
                set(&self.blocks_free, empty.into());
                set(&self.asleep, reported.is_asleep.into());
            }
            if let Some(age) = view.report_age {
                self.report_age.get_or_create(&labels).set(age.as_secs_f64());
            }
        }
    }
}

fn registry(inner: &Inner) -> Registry {
    let mut registry = Registry::with_prefix("ovfleet_router");
    let info = vec![("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())];
    registry.register("build", "The version of the router", Info::new(info));
    registry.register(
        "requests",
        "Finished requests, by endpoint, outcome and status class",
        inner.requests.clone(),
    );
    registry.register("retries", "Retried requests, by the reason of the failure", inner.retries.clone());
    let counters = [
        ("prompt_tokens", "Estimated prompt tokens of all requests", &inner.prompt_tokens),
        (
            "cached_prompt_tokens",
            "Prompt tokens that were expected in the prefix cache of the picked replica",
            &inner.cached_prompt_tokens,
        ),
        ("ejections", "Times that a replica was ejected because its requests failed", &inner.ejections),
        (
            "expired_dispatches",
            "Requests that were sent to a replica but appeared in none of its load reports",
            &inner.expired_dispatches,
        ),
    ];
    for (name, help, counter) in counters {
        registry.register(name, help, counter.clone());
    }
    for (name, help, histogram) in inner.terms.names() {
        registry.register_with_unit(format!("pick_{name}"), help, Unit::Seconds, histogram.clone());
    }
    let seconds = [
        (
            "pick_latency",
            "Time to pick and book a replica, including the collection of the candidates",
            &inner.pick_latency,
        ),
        ("report_age", "Age of the last load report of the picked replica", &inner.report_age),
        ("queue_wait", "Time that queued requests waited for a replica", &inner.queue_wait),
        (
            "time_to_first_byte",
            "Time from the arrival of a request to the first byte of its answer",
            &inner.first_byte,
        ),
        ("request_duration", "Time from the arrival of a request to the end of its answer", &inner.duration),
    ];
    for (name, help, histogram) in seconds {
        registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
    }
    let gauges = [
        ("requests_in_work", "Requests in progress", &inner.requests_in_work),
        ("requests_queued", "Requests that wait because all replicas are full", &inner.requests_queued),
        (
            "requests_without_replica",
            "Requests that wait because no replica is available",
            &inner.requests_without_replica,
        ),
        ("ready", "1 if the router accepts requests and a replica is available", &inner.ready),
    ];
    for (name, help, gauge) in gauges {
        registry.register(name, help, gauge.clone());
    }
    for (name, help, family) in inner.replicas.all() {
        registry.register(name, help, family.clone());
    }
    registry.register_with_unit(
        "replica_report_age",
        "Time since the last load report of the replica",
        Unit::Seconds,
        inner.replicas.report_age.clone(),
    );
    registry
}

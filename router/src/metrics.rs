//! The metrics for Prometheus. `docs/reference/metrics-router.md` lists all names, and a test checks the list.
//!
//! Counters and histograms are updated when the counted events occur. Gauges are set when the metrics are read.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use http::StatusCode;
use process::metrics::{MetricsBuilder, RequestLabels};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use crate::endpoint::Endpoint;
use crate::health::HealthState;
use crate::policy::Terms;
use crate::replica::Replica;

/// The state from which the gauges are set when the metrics are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GaugeSources<'a> {
    pub(crate) is_ready: bool,
    pub(crate) requests_in_flight: usize,
    pub(crate) requests_queued: usize,
    pub(crate) requests_without_replica: usize,
    pub(crate) replicas: &'a [Arc<Replica>],
    /// The health of each of `replicas`. It is a copy, because requests wait for the lock of the health, which must not
    /// be held while the text is written.
    pub(crate) health_states: &'a [HealthState],
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
    score: Histogram,
    terms: TermHistograms,
    pick_latency: Histogram,
    report_age: Histogram,
    queue_time: Histogram,
    first_byte: Histogram,
    duration: Histogram,
    prompt_tokens: Counter,
    cached_prompt_tokens: Counter,
    ejections: Counter,
    expired_dispatches: Counter,
    requests_in_flight: Gauge,
    requests_queued: Gauge,
    requests_without_replica: Gauge,
    replicas: ReplicaGauges,
    ready: Gauge,
}

/// The histograms of the parts of the scores of picked replicas.
#[derive(Debug)]
struct TermHistograms {
    queued_prefill: Histogram,
    prefill: Histogram,
    image_encoding: Histogram,
    decode_interference: Histogram,
    sequence_wait: Histogram,
    block_wait: Histogram,
    cache_pressure: Histogram,
}

impl TermHistograms {
    fn new(metrics: &mut MetricsBuilder) -> Self {
        Self {
            queued_prefill: metrics.request_seconds(
                "pick_queued_prefill",
                "Part of the score: time to compute the prompts ahead of the request",
            ),
            prefill: metrics.request_seconds(
                "pick_prefill",
                "Part of the score: time to compute the uncached part of the request's prompt",
            ),
            image_encoding: metrics.request_seconds(
                "pick_image_encoding",
                "Part of the score: time to encode the images of the request and of the requests ahead of it",
            ),
            decode_interference: metrics.request_seconds(
                "pick_decode_interference",
                "Part of the score: delay that decoding sequences cause while the request's prompt and the prompts \
                 ahead of it are computed",
            ),
            sequence_wait: metrics.request_seconds(
                "pick_sequence_wait",
                "Part of the score: time until the replica's limit on running sequences lets the request's sequences \
                 start",
            ),
            block_wait: metrics.request_seconds(
                "pick_block_wait",
                "Part of the score: time until enough KV cache blocks are free for the request",
            ),
            cache_pressure: metrics.request_seconds(
                "pick_cache_pressure",
                "Part of the score: penalty that grows as the KV cache fills",
            ),
        }
    }

    fn observe(&self, terms: &Terms) {
        self.queued_prefill.observe(terms.queued_prefill);
        self.prefill.observe(terms.prefill);
        self.image_encoding.observe(terms.image_encoding);
        self.decode_interference.observe(terms.decode_interference);
        self.sequence_wait.observe(terms.sequence_wait);
        self.block_wait.observe(terms.block_wait);
        self.cache_pressure.observe(terms.cache_pressure);
    }
}

/// The gauges of each replica.
#[derive(Debug)]
struct ReplicaGauges {
    in_flight: Family<ReplicaLabels, Gauge>,
    unreported: Family<ReplicaLabels, Gauge>,
    sequences_running: Family<ReplicaLabels, Gauge>,
    sequences_waiting: Family<ReplicaLabels, Gauge>,
    blocks_active: Family<ReplicaLabels, Gauge>,
    blocks_evictable: Family<ReplicaLabels, Gauge>,
    blocks_free: Family<ReplicaLabels, Gauge>,
    sleeping: Family<ReplicaLabels, Gauge>,
    report_age: Family<ReplicaLabels, Gauge<f64, AtomicU64>>,
    ejected: Family<ReplicaLabels, Gauge>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReplicaLabels {
    replica: String,
}

/// A histogram with buckets from 1 us to 33 ms.
fn short() -> Histogram {
    Histogram::new(exponential_buckets(0.000_001, 2.0, 16))
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = MetricsBuilder(Registry::with_prefix("ovfleet_router"));
        let info = vec![("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())];
        metrics.0.register("build", "The version of the router", Info::new(info));
        let inner = Inner {
            requests: metrics.zero("requests", "Finished requests, by endpoint, outcome and status class"),
            retries: metrics
                .zero("retries", "Retries, by the reason why the previous attempt failed"),
            prompt_tokens: metrics
                .zero("prompt_tokens", "Estimated prompt tokens of all requests for known models"),
            cached_prompt_tokens: metrics.zero(
                "cached_prompt_tokens",
                "Prompt tokens that the router expected to be in the prefix cache of the picked replica",
            ),
            ejections: metrics
                .zero("ejections", "Number of times that a replica was ejected because requests to it failed"),
            expired_dispatches: metrics.zero(
                "expired_dispatches",
                "Requests in flight that no load report of their replica included within 30 s of dispatch",
            ),
            score: metrics.request_seconds(
                "pick_score",
                "Score of the picked replica: its estimated time to the first token. Recorded only if the router uses \
                 the kv policy and at least one replica reports its load",
            ),
            terms: TermHistograms::new(&mut metrics),
            pick_latency: metrics.seconds(
                "pick_latency",
                "Time to pick a replica, including the time to collect the candidates",
                short(),
            ),
            report_age: metrics
                .request_seconds("report_age", "Age of the last load report of the picked replica"),
            queue_time: metrics
                .request_seconds("queue_time", "Time that queued requests waited for a replica"),
            first_byte: metrics.request_seconds(
                "time_to_first_byte",
                "Time from the arrival of a request to the first byte of its response",
            ),
            duration: metrics.request_seconds(
                "request_duration",
                "Time from the arrival of a request to the end of its response",
            ),
            requests_in_flight: metrics
                .zero("requests_in_flight", "Requests in flight, including those that wait for a replica"),
            requests_queued: metrics
                .zero("requests_queued", "Requests that are waiting because all replicas are full"),
            requests_without_replica: metrics.zero(
                "requests_without_replica",
                "Requests that are waiting for a replica to become available, or to report its models or the ID \
                 of its response store",
            ),
            ready: metrics.zero("ready", "1 if the router accepts requests and a replica is available"),
            replicas: ReplicaGauges::new(&mut metrics),
            registry: metrics.0,
        };
        // Create these series at 0: an alert uses their increase, and Prometheus sees no increase in a series that
        // begins at 1.
        for endpoint in Endpoint::ALL {
            let labels = RequestLabels::new(endpoint.name(), "broken", 200);
            drop(inner.requests.get_or_create(&labels));
        }
        Self(Arc::new(inner))
    }
}

impl Metrics {
    /// Counts a finished request.
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
        if terms.is_score_time {
            inner.score.observe(terms.score);
            inner.terms.observe(terms);
        }
        if let Some(age) = report_age {
            inner.report_age.observe(age.as_secs_f64());
        }
        inner.cached_prompt_tokens.inc_by(u64::from(terms.cached_tokens));
    }

    pub(crate) fn record_prompt(&self, tokens: u32) {
        self.0.prompt_tokens.inc_by(u64::from(tokens));
    }

    pub(crate) fn record_queue_time(&self, time: Duration) {
        self.0.queue_time.observe(time.as_secs_f64());
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
        inner.requests_in_flight.set(count(sources.requests_in_flight));
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
    fn new(metrics: &mut MetricsBuilder) -> Self {
        Self {
            in_flight: metrics
                .zero("replica_in_flight", "Requests in flight that this router has sent to the replica"),
            unreported: metrics.zero(
                "replica_unreported",
                "Requests in flight that were sent less than 30 s ago and that no load report includes yet",
            ),
            sequences_running: metrics
                .zero("replica_sequences_running", "Running sequences, as reported by the replica"),
            sequences_waiting: metrics
                .zero("replica_sequences_waiting", "Waiting sequences, as reported by the replica"),
            blocks_active: metrics.zero(
                "replica_blocks_active",
                "KV cache blocks that running sequences use or that are being restored from --kv-spill-dir",
            ),
            blocks_evictable: metrics
                .zero("replica_blocks_evictable", "KV cache blocks that only the prefix cache uses"),
            blocks_free: metrics.zero("replica_blocks_free", "KV cache blocks that are empty"),
            sleeping: metrics.zero(
                "replica_sleeping",
                "1 if the replica reports that it is asleep; the next request wakes it",
            ),
            ejected: metrics.zero(
                "replica_ejected",
                "1 from the ejection of the replica until its probes succeed or it restarts, otherwise 0",
            ),
            report_age: metrics.seconds(
                "replica_report_age",
                "Time since the last load report of the replica",
                Family::default(),
            ),
        }
    }

    fn refresh(&self, sources: &GaugeSources<'_>) {
        for family in [
            &self.in_flight,
            &self.unreported,
            &self.sequences_running,
            &self.sequences_waiting,
            &self.blocks_active,
            &self.blocks_evictable,
            &self.blocks_free,
            &self.sleeping,
            &self.ejected,
        ] {
            family.clear();
        }
        self.report_age.clear();
        let now = Instant::now();
        for (replica, &health_state) in sources.replicas.iter().zip(sources.health_states) {
            let labels = ReplicaLabels { replica: replica.discovered.name.clone() };
            let set = |family: &Family<ReplicaLabels, Gauge>, value: i64| {
                family.get_or_create(&labels).set(value);
            };
            let snapshot = replica.ledger.snapshot(now, sources.report_ttl);
            set(&self.in_flight, snapshot.booked.in_flight.into());
            set(&self.unreported, snapshot.booked.unreported.into());
            set(&self.ejected, i64::from(health_state != HealthState::Trusted));
            if let Some(reported) = snapshot.reported {
                let empty = replica.status().load.blocks_free;
                set(&self.sequences_running, reported.running.into());
                set(&self.sequences_waiting, reported.waiting.into());
                set(&self.blocks_active, reported.blocks_active.into());
                set(&self.blocks_evictable, reported.blocks_evictable.into());
                set(&self.blocks_free, empty.into());
                set(&self.sleeping, reported.is_sleeping.into());
            }
            if let Some(age) = snapshot.report_age {
                self.report_age.get_or_create(&labels).set(age.as_secs_f64());
            }
        }
    }
}

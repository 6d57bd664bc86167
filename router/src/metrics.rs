//! What Prometheus is told. `docs/reference/metrics-router.md` lists every name; a test compares.
//!
//! Decisions are counted as they are made; what is so at a moment is read when somebody asks.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use http::StatusCode;
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

/// The values that gauges have when the metrics are read.
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
    /// Of the chosen replica, by term: score, ahead, own, company, place, blocks, pressure.
    terms: [(Histogram, Term); 7],
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

/// What a histogram of terms is of.
type Term = fn(&Terms) -> f64;

/// What is so of each replica.
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

/// Which requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    endpoint: &'static str,
    /// `ok`, `cancelled`, `broken`, or the label of the error.
    outcome: &'static str,
    /// The class of the HTTP status: `2xx`, `4xx`, `5xx`.
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReplicaLabels {
    replica: String,
}

/// 1 ms to 4 minutes.
fn long() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 19))
}

/// 1 us to 32 ms.
fn short() -> Histogram {
    Histogram::new(exponential_buckets(0.000_001, 2.0, 16))
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Metrics at zero.
    #[must_use]
    pub fn new() -> Self {
        let mut inner = Inner {
            registry: Registry::default(),
            requests: Family::default(),
            retries: Family::default(),
            pick_latency: short(),
            terms: [
                (long(), |terms| terms.score),
                (long(), |terms| terms.ahead),
                (long(), |terms| terms.own),
                (long(), |terms| terms.company),
                (long(), |terms| terms.place),
                (long(), |terms| terms.blocks),
                (long(), |terms| terms.pressure),
            ],
            report_age: long(),
            queue_wait: long(),
            first_byte: long(),
            duration: long(),
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
        // An alert is about the increase of these, and Prometheus sees none when a series appears with its first count.
        for endpoint in Endpoint::ALL {
            let labels = RequestLabels { endpoint: endpoint.name(), outcome: "broken", status: "2xx" };
            drop(inner.requests.get_or_create(&labels));
        }
        Self(Arc::new(inner))
    }

    /// Counts an answered or refused request.
    pub fn record_request(&self, endpoint: &'static str, outcome: &'static str, status: StatusCode) {
        let status = match status.as_u16() {
            ..300 => "2xx",
            300..400 => "3xx",
            400..500 => "4xx",
            500.. => "5xx",
        };
        self.0.requests.get_or_create(&RequestLabels { endpoint, outcome, status }).inc();
    }

    /// Counts a request sent once more, by what had failed.
    pub fn record_retry(&self, reason: &'static str) {
        self.0.retries.get_or_create(&ReasonLabels { reason }).inc();
    }

    pub(crate) fn record_pick(&self, latency: Duration, terms: &Terms, report_age: Option<Duration>) {
        let inner = &*self.0;
        inner.pick_latency.observe(latency.as_secs_f64());
        for (histogram, value) in &inner.terms {
            histogram.observe(value(terms));
        }
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
    fn all(&self) -> [(&'static str, &'static str, &Family<ReplicaLabels, Gauge>); 9] {
        [
            ("replica_in_flight", "Requests that this router has under way at the replica", &self.in_flight),
            ("replica_unreported", "Those of them that its last report does not include", &self.unreported),
            ("replica_running", "Sequences that run, as reported", &self.running),
            ("replica_waiting", "Sequences that wait, as reported", &self.waiting),
            ("replica_blocks_active", "Blocks of the KV cache that sequences hold", &self.blocks_active),
            (
                "replica_blocks_evictable",
                "Blocks nobody holds, kept for their content",
                &self.blocks_evictable,
            ),
            ("replica_blocks_free", "Blocks that are empty", &self.blocks_free),
            ("replica_asleep", "1 if the next request has to wake it, as reported", &self.asleep),
            ("replica_trusted", "1 if it may be picked, 0 while it is ejected", &self.trusted),
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
    registry.register("build", "What is running", Info::new(info));
    registry.register(
        "requests",
        "Requests by endpoint, outcome and class of status",
        inner.requests.clone(),
    );
    registry.register("retries", "Requests sent once more, by what had failed", inner.retries.clone());
    let counters = [
        ("prompt_tokens", "Tokens of prompts, as estimated", &inner.prompt_tokens),
        (
            "cached_prompt_tokens",
            "Those expected in the cache of the replica picked",
            &inner.cached_prompt_tokens,
        ),
        ("ejections", "Times a replica was ejected because it failed", &inner.ejections),
        (
            "expired_dispatches",
            "Requests that no load report ever included: the drift of the ledger",
            &inner.expired_dispatches,
        ),
    ];
    for (name, help, counter) in counters {
        registry.register(name, help, counter.clone());
    }
    let term_names = ["score", "ahead", "own", "company", "place", "blocks", "pressure"];
    let term_helps = [
        "Estimated time to the first token at the replica picked, or what else was compared",
        "Of it, for the prompts that are ahead",
        "Of it, for the request's own prompt",
        "Of it, for the tokens of sequences that generate meanwhile",
        "Of it, until a sequence may begin",
        "Of it, until blocks are free",
        "Of it, the weight of a cache that fills up",
    ];
    for ((name, help), (histogram, _)) in term_names.into_iter().zip(term_helps).zip(&inner.terms) {
        registry.register_with_unit(format!("pick_{name}"), help, Unit::Seconds, histogram.clone());
    }
    let seconds = [
        (
            "pick_latency",
            "Of a pick, from the first look at the candidates to the booking",
            &inner.pick_latency,
        ),
        ("report_age", "Of the load report of the replica picked", &inner.report_age),
        ("queue_wait", "Of requests that waited for room", &inner.queue_wait),
        ("time_to_first_byte", "From a request's arrival to the first byte of its answer", &inner.first_byte),
        ("request_duration", "From a request's arrival to its answer's end", &inner.duration),
    ];
    for (name, help, histogram) in seconds {
        registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
    }
    let gauges = [
        ("requests_in_work", "Requests from arrival to their answer's end", &inner.requests_in_work),
        ("requests_queued", "Requests that wait for room", &inner.requests_queued),
        ("requests_without_replica", "Requests that wait for a replica", &inner.requests_without_replica),
        ("ready", "1 if requests should be sent here", &inner.ready),
    ];
    for (name, help, gauge) in gauges {
        registry.register(name, help, gauge.clone());
    }
    for (name, help, family) in inner.replicas.all() {
        registry.register(name, help, family.clone());
    }
    registry.register_with_unit(
        "replica_report_age",
        "Since its last load report",
        Unit::Seconds,
        inner.replicas.report_age.clone(),
    );
    registry
}

//! What the operator counts of itself, for Prometheus.

use std::sync::Arc;
use std::time::Duration;

use operator_api::{Phase, UpgradeState};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Call {
    verb: &'static str,
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InPhase {
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InState {
    state: &'static str,
}

/// The metrics. Clones are of the same.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    registry: Registry,
    reconciles: Family<Outcome, Counter>,
    duration: Histogram,
    calls: Family<Call, Counter>,
    events: Counter,
    deployments: Family<InPhase, Gauge>,
    releases: Family<InState, Gauge>,
    leader: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("ovfleet_operator");
        let reconciles = Family::default();
        let duration =
            Histogram::new([0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0]);
        let calls = Family::default();
        let events = Counter::default();
        let deployments = Family::default();
        let releases = Family::default();
        let leader = Gauge::default();
        registry.register("reconciles", "Resources looked at, by what came of it", reconciles.clone());
        registry.register_with_unit(
            "reconcile_duration",
            "Time for looking at a resource",
            Unit::Seconds,
            duration.clone(),
        );
        registry.register("api_calls", "Requests to the API server beside watches", Family::clone(&calls));
        registry.register("events", "Events published", events.clone());
        registry.register("deployments", "Resources, by phase", Family::clone(&deployments));
        registry.register(
            "releases",
            "Resources, by the state of their upgrade to the release of the operator",
            Family::clone(&releases),
        );
        registry.register("leader", "1 while this process is the one that acts", leader.clone());
        Self(Arc::new(Inner { registry, reconciles, duration, calls, events, deployments, releases, leader }))
    }
}

impl Metrics {
    /// A resource was looked at.
    pub fn reconciled(&self, outcome: &'static str, duration: Duration) {
        self.0.reconciles.get_or_create(&Outcome { outcome }).inc();
        self.0.duration.observe(duration.as_secs_f64());
    }

    /// A request to the API server.
    pub fn call(&self, verb: &'static str, kind: &'static str) {
        self.0.calls.get_or_create(&Call { verb, kind }).inc();
    }

    /// How many requests to the API server there were.
    #[must_use]
    pub fn calls(&self, verb: &'static str, kind: &'static str) -> u64 {
        self.0.calls.get_or_create(&Call { verb, kind }).get()
    }

    /// An event was published.
    pub fn event(&self) {
        self.0.events.inc();
    }

    /// How many resources are in which phase.
    pub fn phases(&self, count: impl Fn(Phase) -> usize) {
        for phase in Phase::ALL {
            let number = i64::try_from(count(phase)).unwrap_or(i64::MAX);
            self.0.deployments.get_or_create(&InPhase { phase: phase.name() }).set(number);
        }
    }

    /// How many resources are in which state of an upgrade.
    pub fn releases(&self, count: impl Fn(UpgradeState) -> usize) {
        for state in UpgradeState::ALL {
            let number = i64::try_from(count(state)).unwrap_or(i64::MAX);
            self.0.releases.get_or_create(&InState { state: state.name() }).set(number);
        }
    }

    /// Whether this process is the one that acts.
    pub fn leads(&self, leads: bool) {
        self.0.leader.set(i64::from(leads));
    }

    /// All of them, as Prometheus reads them.
    #[must_use]
    pub fn scrape(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.0.registry).expect("invariant: writing to a string does not fail");
        text
    }
}

//! The metrics of the operator, for Prometheus.

use std::sync::Arc;
use std::time::Duration;

use operator_api::{Phase, UpgradeState};
use process::metrics::MetricsBuilder;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    verb: &'static str,
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabels {
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

/// The metrics of the operator. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    registry: Registry,
    reconciles: Family<OutcomeLabels, Counter>,
    reconcile_duration: Histogram,
    api_calls: Family<CallLabels, Counter>,
    watch_failures: Family<KindLabels, Counter>,
    events: Counter,
    deployments: Family<PhaseLabels, Gauge>,
    releases: Family<StateLabels, Gauge>,
    leader: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = MetricsBuilder(Registry::with_prefix("ovfleet_operator"));
        let duration =
            Histogram::new([0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0]);
        Self(Arc::new(Inner {
            reconciles: metrics.zero("reconciles", "Number of reconciles, by outcome"),
            reconcile_duration: metrics.seconds("reconcile_duration", "Duration of a reconcile", duration),
            api_calls: metrics.zero(
                "api_calls",
                "Requests sent to the API server by reconciles, except for those that publish events, by verb and \
                 kind",
            ),
            watch_failures: metrics
                .zero("watch_failures", "Failed attempts to list or watch objects, by kind"),
            events: metrics.zero("events", "Published Kubernetes events"),
            deployments: metrics.zero("deployments", "Number of LLMDeployments, by phase"),
            releases: metrics.zero(
                "releases",
                "Number of LLMDeployments, by the state of their upgrade to the operator's release",
            ),
            leader: metrics.zero("leader", "1 while this process is the leader"),
            registry: metrics.0,
        }))
    }
}

impl Metrics {
    /// Records the outcome and the duration of a reconcile.
    pub fn record_reconcile(&self, outcome: &'static str, duration: Duration) {
        self.0.reconciles.get_or_create(&OutcomeLabels { outcome }).inc();
        self.0.reconcile_duration.observe(duration.as_secs_f64());
    }

    /// Records a request to the API server.
    pub fn record_api_call(&self, verb: &'static str, kind: &'static str) {
        self.0.api_calls.get_or_create(&CallLabels { verb, kind }).inc();
    }

    /// Returns the number of requests to the API server with this verb and kind.
    #[must_use]
    pub fn api_calls(&self, verb: &'static str, kind: &'static str) -> u64 {
        self.0.api_calls.get_or_create(&CallLabels { verb, kind }).get()
    }

    /// Records a failed attempt to list or watch the objects of a kind.
    pub fn record_watch_failure(&self, kind: &'static str) {
        self.0.watch_failures.get_or_create(&KindLabels { kind }).inc();
    }

    /// Records a published event.
    pub fn record_event(&self) {
        self.0.events.inc();
    }

    /// Sets the number of resources in each phase.
    pub fn set_deployments(&self, count: impl Fn(Phase) -> usize) {
        for phase in Phase::ALL {
            let number = i64::try_from(count(phase)).unwrap_or(i64::MAX);
            self.0.deployments.get_or_create(&PhaseLabels { phase: phase.name() }).set(number);
        }
    }

    /// Sets the number of resources in each state of an upgrade.
    pub fn set_releases(&self, count: impl Fn(UpgradeState) -> usize) {
        for state in UpgradeState::ALL {
            let number = i64::try_from(count(state)).unwrap_or(i64::MAX);
            self.0.releases.get_or_create(&StateLabels { state: state.name() }).set(number);
        }
    }

    /// Sets whether this process is the leader.
    pub fn set_leader(&self, is_leader: bool) {
        self.0.leader.set(i64::from(is_leader));
    }

    /// Returns all metrics in the text format of OpenMetrics.
    #[must_use]
    pub fn scrape(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.0.registry).expect("invariant: writing to a string does not fail");
        text
    }
}

//! Code that the metrics of all programs share, and the labels with which the server and the router count HTTP
//! requests.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry, Unit};

/// Creates metrics and registers each of them, in the order of the calls.
#[derive(Debug)]
pub struct MetricsBuilder(pub Registry);

impl MetricsBuilder {
    /// Creates and registers a metric that starts at zero, such as a counter, a gauge or a family of them.
    pub fn zero<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        self.add(name, help, M::default())
    }

    /// Registers a metric, and returns a clone that shares its value.
    pub fn add<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register(name, help, metric.clone());
        metric
    }

    /// Registers a metric in seconds, and returns a clone that shares its value.
    pub fn seconds<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register_with_unit(name, help, Unit::Seconds, metric.clone());
        metric
    }

    /// Creates and registers a histogram of durations in seconds, with buckets from 1 ms to 262 s.
    pub fn request_seconds(&mut self, name: &str, help: &str) -> Histogram {
        self.seconds(name, help, Histogram::new(exponential_buckets(0.001, 2.0, 19)))
    }
}

/// The labels of the counter of requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    endpoint: &'static str,
    outcome: &'static str,
    status: &'static str,
}

impl RequestLabels {
    /// Creates the labels of a request that was answered with `status`. `outcome` is `ok`, `cancelled`, `broken`, or
    /// the label of an error.
    #[must_use]
    pub fn new(endpoint: &'static str, outcome: &'static str, status: u16) -> Self {
        let status = match status {
            ..300 => "2xx",
            300..400 => "3xx",
            400..500 => "4xx",
            500.. => "5xx",
        };
        Self { endpoint, outcome, status }
    }
}

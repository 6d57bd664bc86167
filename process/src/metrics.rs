//! Metrics of HTTP requests, which the server and the router count in the same way.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

/// The labels of the counter of requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    endpoint: &'static str,
    outcome: &'static str,
    status: &'static str,
}

impl RequestLabels {
    /// Creates the labels of a request that was answered with `status`. `outcome` is `ok`, `cancelled`, `broken`, or the
    /// label of an error.
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

/// A histogram of seconds from 1 ms to 4 minutes.
#[must_use]
pub fn request_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 19))
}

//! The metrics of the cache for image encoder outputs.

use std::sync::atomic::Ordering;

use process::metrics::MetricsBuilder;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use server_engine::EngineLoad;

#[derive(Debug)]
pub(super) struct ImageCacheMetrics {
    bytes: Gauge,
    hits: Counter,
    misses: Counter,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LookupLabels {
    result: &'static str,
}

impl ImageCacheMetrics {
    pub(super) fn new(metrics: &mut MetricsBuilder) -> Self {
        let bytes =
            metrics.zero("image_cache_bytes", "Total size of the cached image encoder outputs in bytes");
        let lookups: Family<LookupLabels, Counter> = metrics.zero(
            "image_cache_lookups",
            "Lookups of images in the cache of encoder outputs, by result: hit (cached, or already requested from the \
             encoder) or miss",
        );
        let counter = |result| Counter::clone(&lookups.get_or_create(&LookupLabels { result }));
        Self { bytes, hits: counter("hit"), misses: counter("miss") }
    }

    /// Sets the metrics to the engine's counts.
    pub(super) fn set(&self, engine: &EngineLoad) {
        self.bytes.set(i64::try_from(engine.image_cache_bytes).unwrap_or(i64::MAX));
        self.hits.inner().store(engine.load.image_cache_hits_total, Ordering::Relaxed);
        self.misses.inner().store(engine.load.image_cache_misses_total, Ordering::Relaxed);
    }
}

//! The metrics of evicted blocks that are stored on disk.

use std::sync::atomic::Ordering;

use process::metrics::MetricsBuilder;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use server_engine::SpillStats;

#[derive(Debug)]
pub(super) struct SpillMetrics {
    written: Counter,
    restored: Counter,
    dropped: Counter,
    unreadable: Counter,
    blocks: Gauge,
    bytes: Gauge,
}

impl SpillMetrics {
    pub(super) fn new(metrics: &mut MetricsBuilder) -> Self {
        Self {
            written: metrics.zero("spill_written_blocks", "Evicted blocks written to --kv-spill-dir"),
            restored: metrics.zero("spill_read_blocks", "Blocks read back from --kv-spill-dir"),
            dropped: metrics.zero(
                "spill_dropped_blocks",
                "Evicted blocks that were not written to --kv-spill-dir, for example because the disk was \
                 full or slow",
            ),
            unreadable: metrics
                .zero("spill_unreadable_blocks", "Blocks in --kv-spill-dir that could not be read"),
            blocks: metrics.zero(
                "spill_blocks",
                "Blocks in --kv-spill-dir, including blocks that are waiting to be written",
            ),
            bytes: metrics.zero(
                "spill_bytes",
                "Total size in bytes of the blocks in --kv-spill-dir, including blocks that are waiting to be written",
            ),
        }
    }

    /// Sets the metrics to the engine's counts.
    pub(super) fn set(&self, spill: &SpillStats) {
        let counters = [
            (&self.written, spill.written()),
            (&self.restored, spill.restored()),
            (&self.dropped, spill.dropped()),
            (&self.unreadable, spill.unreadable()),
        ];
        for (counter, count) in counters {
            counter.inner().store(count, Ordering::Relaxed);
        }
        self.blocks.set(i64::try_from(spill.blocks()).unwrap_or(i64::MAX));
        self.bytes.set(i64::try_from(spill.bytes()).unwrap_or(i64::MAX));
    }
}

//! The metrics of evicted blocks that are stored on disk.

use std::sync::atomic::Ordering;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use server_engine::SpillStats;

#[derive(Debug, Default)]
pub(super) struct SpillMetrics {
    written: Counter,
    restored: Counter,
    dropped: Counter,
    unreadable: Counter,
    blocks: Gauge,
    bytes: Gauge,
}

impl SpillMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let counters = [
            ("spill_written_blocks", "Evicted blocks written to --kv-spill-dir", &self.written),
            ("spill_read_blocks", "Blocks read back from --kv-spill-dir", &self.restored),
            ("spill_dropped_blocks", "Evicted blocks that were not written", &self.dropped),
            ("spill_unreadable_blocks", "Blocks in --kv-spill-dir that could not be read", &self.unreadable),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        let gauges = [
            ("spill_blocks", "Blocks in --kv-spill-dir", &self.blocks),
            ("spill_bytes", "Size of the blocks in --kv-spill-dir in bytes", &self.bytes),
        ];
        for (name, help, gauge) in gauges {
            registry.register(name, help, gauge.clone());
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

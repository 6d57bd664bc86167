//! Statistics of evicted blocks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The statistics of evicted blocks. The counters are zero when the engine starts.
#[derive(Debug, Default)]
pub struct SpillStats {
    pub(super) is_open: AtomicBool,
    pub(super) queued: AtomicU64,
    pub(super) written: AtomicU64,
    pub(super) restored: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) unreadable: AtomicU64,
    pub(super) blocks: AtomicU64,
    pub(super) bytes: AtomicU64,
}

impl SpillStats {
    /// Whether the directory is open. No block is written before that.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// Number of blocks that wait to be written.
    pub fn queued(&self) -> u64 {
        self.queued.load(Ordering::Acquire)
    }

    /// Number of blocks that have been written.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Number of blocks that have been restored into the cache.
    pub fn restored(&self) -> u64 {
        self.restored.load(Ordering::Relaxed)
    }

    /// Number of evicted blocks that were not written, for example because the disk is too slow or full.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Number of stored blocks that could not be read.
    pub fn unreadable(&self) -> u64 {
        self.unreadable.load(Ordering::Relaxed)
    }

    /// Number of stored blocks, including blocks that wait to be written.
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Size in bytes of the stored blocks, including blocks that wait to be written.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

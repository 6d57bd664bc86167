//! What became of evicted blocks, for whoever looks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What became of evicted blocks so far. Counts rise from the start of the process.
#[derive(Debug, Default)]
pub struct SpillStats {
    pub(super) is_open: AtomicBool,
    pub(super) queued: AtomicU64,
    pub(super) written: AtomicU64,
    pub(super) read_back: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) unreadable: AtomicU64,
    pub(super) blocks: AtomicU64,
    pub(super) bytes: AtomicU64,
}

impl SpillStats {
    /// Whether it is known what is kept. Nothing is written before.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// Blocks on their way to the disk.
    pub fn queued(&self) -> u64 {
        self.queued.load(Ordering::Acquire)
    }

    /// Blocks written.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Blocks copied back into the cache.
    pub fn read_back(&self) -> u64 {
        self.read_back.load(Ordering::Relaxed)
    }

    /// Evicted blocks that were not written: the disk is too slow, or full.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Blocks that were kept and could not be read.
    pub fn unreadable(&self) -> u64 {
        self.unreadable.load(Ordering::Relaxed)
    }

    /// Blocks that are kept.
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Bytes of them.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

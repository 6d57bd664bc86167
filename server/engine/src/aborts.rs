//! The aborts that the stream of a request passes to the engine's thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Marks the sequences of a request that its client has aborted. The engine checks the marks before each step.
#[derive(Debug)]
pub(crate) struct Aborts {
    sequences: Box<[AtomicBool]>,
    /// Whether there are aborts that the engine has not received yet.
    has_new: AtomicBool,
}

impl Aborts {
    pub(crate) fn new(sequences: u32) -> Arc<Self> {
        let sequences = (0..sequences).map(|_| AtomicBool::new(false)).collect();
        Arc::new(Self { sequences, has_new: AtomicBool::new(false) })
    }

    pub(crate) fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    pub(crate) fn add(&self, index: usize) {
        self.sequences[index].store(true, Ordering::Relaxed);
        // Release: a thread that sees this flag also sees the store above.
        self.has_new.store(true, Ordering::Release);
    }

    /// Returns all aborted sequences if any of them was aborted since the last call.
    pub(crate) fn drain(&self) -> Option<impl Iterator<Item = u32>> {
        let has_new = self.has_new.load(Ordering::Relaxed) && self.has_new.swap(false, Ordering::Acquire);
        let aborted = || (0..).zip(&self.sequences).filter(|(_, aborted)| aborted.load(Ordering::Relaxed));
        has_new.then(|| aborted().map(|(index, _)| index))
    }
}

//! Caches compiled models (`model_cache/compiled.rs`) for the next start, and rewritten graphs (`model_cache/graph.rs`)
//! where compiled models cannot be cached.
//!
//! The cache only saves time: an error in the cache or its directory is logged, and never prevents the start.

use crate::background::BackgroundThread;
pub(crate) use compiled::{CacheableModel, CompiledCacheEntry};
pub(crate) use graph::{GraphCacheEntry, GraphOptions, VERSION};

mod compiled;
mod directory;
mod fingerprint;
mod graph;
mod probe;

/// An update of the cache after the start: the compiled model to write, if there is one.
#[derive(Default)]
pub(crate) struct CacheUpdate {
    pub(crate) compiled: Option<(CompiledCacheEntry, CacheableModel)>,
}

impl CacheUpdate {
    /// Writes the update in the background. A failure, such as a full disk, is logged, and the unfinished file is
    /// removed.
    pub(crate) fn write(self) -> Option<BackgroundThread> {
        let (entry, model) = self.compiled?;
        Some(BackgroundThread::start("model-cache", move || {
            entry.write(model);
            entry.directory().evict_old_files();
        }))
    }
}

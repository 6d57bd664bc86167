//! Rewritten graphs (`model_cache/graph.rs`) and compiled models (`model_cache/compiled.rs`), cached for the next start.
//!
//! The cache only saves time: an error in the cache or its directory is logged, and never prevents the start.

use std::sync::Arc;

use crate::background::BackgroundThread;
use crate::runtime::{Core, Model};
pub(crate) use compiled::{CacheableModel, CompiledCacheEntry};
pub(crate) use graph::{GraphCacheEntry, GraphOptions, VERSION};

mod compiled;
mod fingerprint;
mod folder;
mod graph;
mod probe;

/// The parts of a model that are written to the cache after the start.
#[derive(Default)]
pub(crate) struct CacheUpdate {
    pub(crate) graph: Option<(GraphCacheEntry, Model)>,
    pub(crate) compiled: Option<(CompiledCacheEntry, CacheableModel)>,
}

impl CacheUpdate {
    /// Writes the update in the background. A failure, such as a full disk, is logged and leaves no files behind.
    pub(crate) fn write(self, core: Arc<Core>) -> Option<BackgroundThread> {
        let Self { graph, compiled } = self;
        let folder = match (&graph, &compiled) {
            (Some((entry, _)), _) => Arc::clone(entry.folder()),
            (None, Some((entry, _))) => Arc::clone(entry.folder()),
            (None, None) => return None,
        };
        Some(BackgroundThread::start("model-cache", move || {
            if let Some((entry, mut model)) = graph {
                entry.write(&core, &mut model);
            }
            if let Some((entry, model)) = compiled {
                entry.write(model);
            }
            if let Err(error) = folder.evict() {
                let folder = folder.shown("");
                tracing::warn!(%error, folder = %folder.display(), "failed to remove old files of the model cache");
            }
        }))
    }
}

//! A runner that can release its cache or its model, and loads the same model again with a cache of the same size.

use std::time::Instant;

use server_engine::{CacheLayout, Logits, ModelRunner, RunError, SleepLevel, StepImages};
use server_scheduler::{Batch, BlockId};

use crate::config::Config;
use crate::load::{LoadReport, load};
use crate::runner::OpenVinoRunner;
use crate::{Error, memory};

/// A runner together with the configuration from which it was loaded.
pub struct SleepableRunner {
    /// `None` while the model is released.
    runner: Option<OpenVinoRunner>,
    config: Config,
    layout: CacheLayout,
    /// The digest of each adapter.
    adapter_digests: Vec<u64>,
}

impl SleepableRunner {
    /// Wraps the runner that [`load`](crate::load()) has created from `config`.
    pub fn new(runner: OpenVinoRunner, report: &LoadReport, mut config: Config) -> Self {
        let layout = report.layout;
        // The size of the cache must not depend on the memory that is available when the model is loaded again.
        config.kv_cache_bytes = Some(u64::from(layout.blocks_total) * layout.block_bytes);
        Self { runner: Some(runner), config, layout, adapter_digests: report.adapter_digests.clone() }
    }

    fn reload(&self) -> Result<OpenVinoRunner, Error> {
        let mut progress = |_| {};
        let (runner, report) = load(&self.config, &mut progress)?;
        if report.layout != self.layout || report.adapter_digests != self.adapter_digests {
            return Err(Error::Unsupported(
                "the files of the model or of its adapters have changed since the server started".to_owned(),
            ));
        }
        Ok(runner)
    }
}

impl ModelRunner for SleepableRunner {
    fn layout(&self) -> CacheLayout {
        self.layout
    }

    fn adapters(&self) -> u32 {
        self.adapter_digests.len() as u32
    }

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        self.runner.as_mut().expect("invariant: a sleeping runner runs no batch").run(batch)
    }

    fn run_with_images(&mut self, batch: &Batch, images: &StepImages) -> Result<Logits<'_>, RunError> {
        let runner = self.runner.as_mut().expect("invariant: a sleeping runner runs no batch");
        runner.run_with_images(batch, images)
    }

    fn block_scores(&self) -> &[f32] {
        self.runner.as_ref().map_or(&[], OpenVinoRunner::block_scores)
    }

    fn read_block(&self, block: BlockId, bytes: &mut [u8]) -> Result<(), RunError> {
        self.runner.as_ref().expect("invariant: a sleeping runner reads no block").read_block(block, bytes)
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), RunError> {
        self.runner.as_mut().expect("invariant: a sleeping runner writes no block").write_block(block, bytes)
    }

    fn sleep(&mut self, level: SleepLevel) {
        match level {
            SleepLevel::Model => self.runner = None,
            SleepLevel::Cache => {
                if let Some(Err(error)) = self.runner.as_mut().map(OpenVinoRunner::discard_cache) {
                    // The runner still works, but uses more memory.
                    tracing::warn!(error = error.chain(), "failed to release the memory of the KV cache");
                }
            }
        }
        memory::trim();
    }

    fn wake(&mut self) -> Result<(), RunError> {
        if self.runner.is_none() {
            let started = Instant::now();
            let runner = self.reload().map_err(|error| RunError { message: error.chain(), fatal: false })?;
            tracing::info!(ms = started.elapsed().as_millis() as u64, "reloaded the model");
            self.runner = Some(runner);
        }
        Ok(())
    }
}

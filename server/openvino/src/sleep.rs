//! A runner that gives back its cache, or all it has, and has it again later: the same model in the same form, with a
//! cache of the same size.

use std::time::Instant;

use server_engine::{CacheLayout, Logits, ModelRunner, RunError, SleepLevel};
use server_scheduler::{Batch, BlockId};

use crate::load::{Config, Loaded, Weights, load};
use crate::runner::OpenVinoRunner;
use crate::{Error, memory};

/// A runner, and how it was loaded.
pub struct Sleeper {
    /// `None` while the model is given back.
    runner: Option<OpenVinoRunner>,
    config: Config,
    layout: CacheLayout,
    /// A number for each adapter that changes with its content.
    adapters: Vec<u64>,
}

impl Sleeper {
    /// What [`load`](crate::load()) has made of `config`.
    pub fn new(runner: OpenVinoRunner, loaded: &Loaded, mut config: Config) -> Self {
        // What was chosen by the memory there was is not chosen anew: answers are to be the same.
        config.weights = loaded.form.map_or(config.weights, Weights::As);
        let layout = loaded.layout;
        config.cache_bytes = Some(u64::from(layout.blocks_total) * layout.block_bytes);
        Self { runner: Some(runner), config, layout, adapters: loaded.adapters.clone() }
    }

    fn reload(&self) -> Result<OpenVinoRunner, Error> {
        let mut progress = |_| {};
        let (runner, loaded) = load(&self.config, &mut progress)?;
        if loaded.layout != self.layout || loaded.adapters != self.adapters {
            return Err(Error::Unsupported("it is not the model any more that it was".to_owned()));
        }
        Ok(runner)
    }
}

impl ModelRunner for Sleeper {
    fn layout(&self) -> CacheLayout {
        self.layout
    }

    fn adapters(&self) -> u32 {
        self.adapters.len() as u32
    }

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        self.runner.as_mut().expect("invariant: nothing runs while it sleeps").run(batch)
    }

    fn block_scores(&self) -> &[f32] {
        self.runner.as_ref().map_or(&[], OpenVinoRunner::block_scores)
    }

    fn read_block(&self, block: BlockId, bytes: &mut [u8]) -> Result<(), RunError> {
        self.runner.as_ref().expect("invariant: no block is read while it sleeps").read_block(block, bytes)
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), RunError> {
        self.runner
            .as_mut()
            .expect("invariant: no block is written while it sleeps")
            .write_block(block, bytes)
    }

    fn sleep(&mut self, level: SleepLevel) {
        match level {
            SleepLevel::Model => self.runner = None,
            SleepLevel::Cache => {
                if let Some(Err(error)) = self.runner.as_mut().map(OpenVinoRunner::discard_cache) {
                    // Nothing is wrong but that it is still there.
                    tracing::warn!(error = error.chain(), "cannot give back the memory of the KV cache");
                }
            }
        }
        memory::trim();
    }

    fn wake(&mut self) -> Result<(), RunError> {
        if self.runner.is_none() {
            let began = Instant::now();
            let runner = self.reload().map_err(|error| RunError { message: error.chain(), fatal: false })?;
            tracing::info!(ms = began.elapsed().as_millis() as u64, "loaded the model again");
            self.runner = Some(runner);
        }
        Ok(())
    }
}

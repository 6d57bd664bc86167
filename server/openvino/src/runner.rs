//! The runner: it turns a batch into the inputs of the paged model, and the output of the model into logits.

use server_engine::{CacheLayout, Logits, ModelRunner, RunError, StepImages};
use server_scheduler::{Batch, BlockId};

use crate::Error;
use crate::background::BackgroundThread;
use crate::compiled_graph::CompiledGraph;
use crate::kv_cache::KvCache;
use crate::runtime::{NodeTime, Tensor};

mod input;
mod step_inputs;

use step_inputs::StepInputs;
pub(crate) use step_inputs::VisionParts;

/// A model that is compiled for a device, with its KV cache and the inputs of its steps.
pub struct OpenVinoRunner {
    // The fields are dropped in this order, so that no object outlives the object from which it was created.
    inputs: StepInputs,
    output: Option<Tensor>,
    kv_cache: KvCache,
    graph: CompiledGraph,
    _cache_writer: Option<BackgroundThread>,
    layout: CacheLayout,
    adapters: u32,
    /// The attention of the last batch's decodes to each of the batch's blocks.
    block_scores: Vec<f32>,
}

pub(crate) struct RunnerParts {
    pub(crate) graph: CompiledGraph,
    /// The thread that writes the model to the cache directory.
    pub(crate) cache_writer: Option<BackgroundThread>,
    pub(crate) kv_cache: KvCache,
    pub(crate) layout: CacheLayout,
    /// Number of adapters in the graph.
    pub(crate) adapters: u32,
    /// The largest number of KV heads of a layer.
    pub(crate) kv_heads: usize,
    /// The additional parts of a vision-language model.
    pub(crate) vision: Option<VisionParts>,
}

impl OpenVinoRunner {
    pub(crate) fn new(parts: RunnerParts) -> Result<Self, Error> {
        let RunnerParts { mut graph, cache_writer, kv_cache, layout, adapters, kv_heads, vision } = parts;
        let inputs = StepInputs::new(&graph.compiled.inputs()?, kv_heads, vision)?;
        inputs.bind(&mut graph.request)?;
        kv_cache.bind(&mut graph.request)?;
        Ok(Self {
            inputs,
            output: None,
            kv_cache,
            graph,
            _cache_writer: cache_writer,
            layout,
            adapters,
            block_scores: Vec::new(),
        })
    }

    /// Returns the memory of the KV cache to the system. The content of the cache is lost.
    ///
    /// # Errors
    /// The system rejects the call.
    pub(crate) fn discard_cache(&mut self) -> Result<(), Error> {
        self.kv_cache.discard()
    }

    /// Like [`ModelRunner::run`], but computes the logits of the tokens at the indices `logits_indices` of
    /// [`Batch::tokens`], to score a given text.
    ///
    /// # Errors
    /// The step failed.
    pub fn score(&mut self, batch: &Batch, logits_indices: &[u32]) -> Result<Logits<'_>, Error> {
        let indices = logits_indices.iter().map(|token| i64::from(*token));
        self.step(batch, &StepImages::default(), logits_indices.len(), indices)?;
        self.logits(logits_indices.len())
    }

    /// Returns the mean execution time of each node of the graph, for profiles. The list is empty unless the model was
    /// compiled with `PERF_COUNT`.
    ///
    /// # Errors
    /// The runtime does not report the times.
    pub fn node_times(&self) -> Result<Vec<NodeTime>, Error> {
        self.graph.request.node_times()
    }

    /// Runs a step that computes the logits of the `count` tokens at `logits_indices`.
    fn step(
        &mut self,
        batch: &Batch,
        images: &StepImages,
        count: usize,
        logits_indices: impl Iterator<Item = i64>,
    ) -> Result<(), Error> {
        // The output refers to memory of the request. Nothing may refer to this memory while the request runs.
        self.output = None;
        for copy in &batch.copies {
            self.kv_cache.copy(*copy)?;
        }
        self.inputs.fill(batch, images)?;
        // The model computes at least one row of logits. If no row is needed, request the row of the last token.
        match count {
            0 => self.inputs.request_logits(1, std::iter::once(batch.tokens.len() as i64 - 1))?,
            _ => self.inputs.request_logits(count, logits_indices)?,
        }
        self.graph.request.infer()?;
        self.output = Some(self.graph.request.output()?);
        self.inputs.sum_block_scores(&mut self.block_scores)
    }

    /// Returns the `rows` rows of logits of the last step.
    fn logits(&self, rows: usize) -> Result<Logits<'_>, Error> {
        let vocabulary = self.layout.vocabulary;
        if rows == 0 {
            return Ok(Logits::new(&[], vocabulary));
        }
        let output = self.output.as_ref().expect("invariant: a step leaves its output");
        let values = output.values::<f32>()?;
        if values.len() == rows * vocabulary as usize {
            return Ok(Logits::new(values, vocabulary));
        }
        let message = format!(
            "the model returned {} values instead of {rows} rows of {vocabulary} values",
            values.len()
        );
        Err(Error::runtime("read the logits", &message))
    }
}

impl ModelRunner for OpenVinoRunner {
    fn layout(&self) -> CacheLayout {
        self.layout
    }

    fn adapters(&self) -> u32 {
        self.adapters
    }

    fn read_block(&self, block: BlockId, bytes: &mut [u8]) -> Result<(), RunError> {
        self.kv_cache.read(block, bytes).map_err(|error| RunError { message: error.chain(), fatal: false })
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), RunError> {
        self.kv_cache.write(block, bytes).map_err(|error| RunError { message: error.chain(), fatal: false })
    }

    fn block_scores(&self) -> &[f32] {
        &self.block_scores
    }

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        self.run_with_images(batch, &StepImages::default())
    }

    fn run_with_images(&mut self, batch: &Batch, images: &StepImages) -> Result<Logits<'_>, RunError> {
        let failed = |error: Error| RunError { message: error.chain(), fatal: false };
        let rows = batch.logits_indices().count();
        self.step(batch, images, rows, batch.logits_indices().map(i64::from)).map_err(failed)?;
        self.logits(rows).map_err(failed)
    }
}

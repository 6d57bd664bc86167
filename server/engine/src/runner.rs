//! The interface to the hardware: a runner computes the logits of a batch.

use server_scheduler::{Batch, BlockId, CacheSize};

use crate::images::StepImages;
use crate::sleep::SleepLevel;

/// Number of LoRA adapters (`--lora`).
///
/// If exceeded: the server does not start.
pub const ADAPTERS_MAX: usize = 32;

/// Runs a model with a paged KV cache. The methods block. Once the engine has started, only its thread calls them.
pub trait ModelRunner: Send {
    /// Returns the layout of the allocated cache, and the width of the logits.
    fn layout(&self) -> CacheLayout;

    /// Returns the number of adapters. Sequences refer to them by numbers from 1.
    fn adapters(&self) -> u32 {
        0
    }

    /// Performs the block copies of `batch`, computes its tokens, and returns the logits of the tokens at
    /// [`Batch::logits_indices`], in the order of these indices.
    ///
    /// # Errors
    /// [`RunError`] if the step failed. In this case, the content of the blocks that the batch writes is undefined, and
    /// all other blocks are intact. The runner can run the next batch, unless the error is [fatal](RunError::fatal).
    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError>;

    /// Like [`Self::run`], for a batch whose sequences may have images.
    ///
    /// # Errors
    /// The same as for [`Self::run`]. The default implementation supports no images.
    fn run_with_images(&mut self, batch: &Batch, images: &StepImages) -> Result<Logits<'_>, RunError> {
        if images.is_empty() {
            return self.run(batch);
        }
        Err(RunError { message: "the model does not support images".to_owned(), fatal: false })
    }

    /// The attention that the last batch paid to each of its blocks, summed over all layers, in the order of
    /// [`Batch::blocks`]. Only the scores of sequences with one token in the batch are meaningful. Empty if the runner
    /// has no scores.
    fn block_scores(&self) -> &[f32] {
        &[]
    }

    /// Copies the content of a block into `_bytes`: [`CacheLayout::block_bytes`] bytes in the runner's own format.
    ///
    /// # Errors
    /// [`RunError`] if the block could not be copied. The default implementation always fails.
    fn read_block(&self, _block: BlockId, _bytes: &mut [u8]) -> Result<(), RunError> {
        Err(RunError { message: "the runner cannot read blocks".to_owned(), fatal: false })
    }

    /// Writes the content of a block, which [`Self::read_block`] copied from the same or another block.
    ///
    /// # Errors
    /// The same as for [`Self::read_block`]. After an error, the content of the block is undefined.
    fn write_block(&mut self, _block: BlockId, _bytes: &[u8]) -> Result<(), RunError> {
        Err(RunError { message: "the runner cannot write blocks".to_owned(), fatal: false })
    }

    /// Releases the memory that `level` specifies, or the rest of it if the runner is already asleep. The content of
    /// the cache is lost. The runner is not used until [`Self::wake`] has succeeded. The default implementation
    /// releases no memory.
    fn sleep(&mut self, _level: SleepLevel) {}

    /// Prepares the runner to run again, with the same layout and an empty cache.
    ///
    /// # Errors
    /// [`RunError`] if the runner could not be woken, for example because there is not enough memory or the model
    /// cannot be read. The runner remains asleep and can be woken later, unless the error is [fatal](RunError::fatal).
    fn wake(&mut self) -> Result<(), RunError> {
        Ok(())
    }
}

/// A model that proposes draft tokens for another model.
pub struct DraftRunner {
    /// The runner. Its cache must have at least as many blocks as the target model's cache, with the same number of
    /// tokens per block.
    pub runner: Box<dyn ModelRunner>,
    /// Maximum number of tokens of a text together with the drafts that the model proposes for it.
    pub max_model_len: u32,
}

/// The runners of an engine.
pub(crate) struct Runners {
    pub(crate) target: Box<dyn ModelRunner>,
    pub(crate) draft: Option<DraftRunner>,
}

/// The layout of a runner's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    /// Number of tokens in a block.
    pub block_tokens: u32,
    /// Number of blocks in the cache.
    pub blocks_total: u32,
    /// Bytes of one block, summed over all layers.
    pub block_bytes: u64,
    /// Number of tokens in the vocabulary, which is the width of a row of logits.
    pub vocabulary: u32,
}

impl CacheLayout {
    /// The size of the cache, for the scheduler.
    pub fn size(&self) -> CacheSize {
        CacheSize { block_tokens: self.block_tokens, blocks_total: self.blocks_total }
    }
}

/// The logits of a step, row-major `[rows, vocabulary]`.
#[derive(Clone, Copy, Debug)]
pub struct Logits<'a> {
    values: &'a [f32],
    vocabulary: usize,
}

impl<'a> Logits<'a> {
    /// Splits `values` into rows of `vocabulary` logits.
    ///
    /// # Panics
    /// Panics if `vocabulary` is zero, or if `values` does not consist of whole rows.
    pub fn new(values: &'a [f32], vocabulary: u32) -> Self {
        let vocabulary = vocabulary as usize;
        assert!(
            vocabulary > 0 && values.len().is_multiple_of(vocabulary),
            "invariant: logits are whole rows"
        );
        Self { values, vocabulary }
    }

    /// Removes the first `count` rows and returns them.
    ///
    /// # Panics
    /// Panics if there are fewer rows.
    pub(crate) fn split_off_first(&mut self, count: usize) -> Self {
        let (first, rest) = self.values.split_at(count * self.vocabulary);
        self.values = rest;
        Self { values: first, ..*self }
    }

    /// Checks the number of rows. A runner that returns a wrong number cannot be trusted with another step.
    pub(crate) fn check_rows(&self, expected: usize) -> Result<(), RunError> {
        let returned = self.rows().len();
        if returned == expected {
            return Ok(());
        }
        let message = format!("the model returned {returned} rows of logits instead of {expected}");
        Err(RunError { message, fatal: true })
    }

    /// Number of logits in all rows.
    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// The rows of logits, in the order of [`Batch::logits_indices`].
    pub fn rows(&self) -> std::slice::ChunksExact<'a, f32> {
        self.values.chunks_exact(self.vocabulary)
    }
}

/// The error of a runner or of an image encoder.
#[derive(Debug, thiserror::Error)]
#[error("failed to run the model: {message}")]
pub struct RunError {
    /// The message that describes the error.
    pub message: String,
    /// Whether the runner can no longer be used.
    pub fatal: bool,
}

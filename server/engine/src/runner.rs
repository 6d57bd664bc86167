//! The only seam to the hardware: a batch in, logits out.

use server_scheduler::{Batch, BlockId};

use crate::sleep::SleepLevel;

/// Number of LoRA adapters (`--lora`).
///
/// Beyond it: the server does not start.
pub const ADAPTERS_MAX: usize = 32;

/// Runs a model with a paged KV cache. It blocks: it is called from the engine's own thread only.
pub trait ModelRunner: Send {
    /// The cache the runner has allocated, and the width of its logits.
    fn layout(&self) -> CacheLayout;

    /// Adapters that it has: how many numbers above 0 a row may name.
    fn adapters(&self) -> u32 {
        0
    }

    /// Carries out the copies of `batch`, computes its rows, and returns the logits of the tokens of
    /// [`Batch::wanted`], in their order: the last token of every row that samples, and those of prompts that are
    /// scored.
    ///
    /// # Errors
    /// The step failed. The cache content of the blocks that its rows write is undefined, that of all other
    /// blocks is untouched, and the runner is ready for the next batch — or, if
    /// [`RunError::fatal`], it is of no further use.
    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError>;

    /// What weight the tokens of the rows of one token gave to each of the blocks of the last batch that was run, in the order of
    /// [`Batch::blocks`], all layers together; those of other rows mean nothing. Empty if the runner does not tell.
    fn block_weights(&self) -> &[f32] {
        &[]
    }

    /// Copies what a block holds, [`CacheLayout::block_bytes`] of it, in an order of the runner's own.
    ///
    /// # Errors
    /// This runner's blocks cannot be copied; so it is if a runner does not say otherwise.
    fn read_block(&self, _block: BlockId, _bytes: &mut [u8]) -> Result<(), RunError> {
        Err(RunError { message: "its blocks cannot be read".to_owned(), fatal: false })
    }

    /// Makes a block hold what was read of the same or another.
    ///
    /// # Errors
    /// As for [`Self::read_block`]. What the block holds is undefined then.
    fn write_block(&mut self, _block: BlockId, _bytes: &[u8]) -> Result<(), RunError> {
        Err(RunError { message: "its blocks cannot be written".to_owned(), fatal: false })
    }

    /// Gives back the memory that `level` names, and more than before if it sleeps already. What is in the cache is
    /// lost. Nothing is run until [`Self::wake`] has succeeded. A runner that keeps what it has says nothing here.
    fn sleep(&mut self, _level: SleepLevel) {}

    /// Makes it ready to run again, with the same layout and a cache without content.
    ///
    /// # Errors
    /// There is not enough memory, or the model cannot be read any more. It sleeps on and can be woken later — or, if
    /// [`RunError::fatal`], it is of no further use.
    fn wake(&mut self) -> Result<(), RunError> {
        Ok(())
    }
}

/// A model that guesses what another one will say.
pub struct DraftRunner {
    /// What runs it. Its cache has blocks of the same size as the other's, and at least as many.
    pub runner: Box<dyn ModelRunner>,
    /// The longest text it was made for. Nothing is guessed after longer ones.
    pub tokens_max: u32,
}

/// What an engine computes with.
pub(crate) struct Runners {
    pub(crate) target: Box<dyn ModelRunner>,
    pub(crate) draft: Option<DraftRunner>,
}

/// What a runner's cache looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    /// Tokens a block holds.
    pub block_tokens: u32,
    /// Blocks allocated.
    pub blocks_total: u32,
    /// Bytes of one block, all layers together.
    pub block_bytes: u64,
    /// Tokens in the vocabulary: the width of a logits row.
    pub vocabulary: u32,
}

/// Logits of a step, row-major `[rows, vocabulary]`.
#[derive(Clone, Copy, Debug)]
pub struct Logits<'a> {
    values: &'a [f32],
    vocabulary: usize,
}

impl<'a> Logits<'a> {
    /// Takes `values` as rows of `vocabulary` each.
    ///
    /// # Panics
    /// If `values` are not whole rows.
    pub fn new(values: &'a [f32], vocabulary: u32) -> Self {
        let vocabulary = vocabulary as usize;
        assert!(
            vocabulary > 0 && values.len().is_multiple_of(vocabulary),
            "invariant: logits are whole rows"
        );
        Self { values, vocabulary }
    }

    /// The rows, in order.
    pub fn rows(&self) -> std::slice::ChunksExact<'a, f32> {
        self.values.chunks_exact(self.vocabulary)
    }
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
#[error("failed to run the model: {message}")]
pub struct RunError {
    /// What the runtime said.
    pub message: String,
    /// Whether the runner is of no further use.
    pub fatal: bool,
}

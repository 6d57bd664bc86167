//! The work of one step.

use std::ops::Range;

use crate::block::{BlockId, TokenId};
use crate::request::SequenceId;

/// The work of one step. The vectors are flat, so that their memory can be reused in every step and they map directly
/// to the inputs of a model with paged attention.
///
/// # Guarantees
/// - The ranges of the sequences in `tokens`, `blocks` and `samples` follow each other in the order of `sequences`.
/// - `copies` must be performed, in order, before the tokens are computed.
/// - A batch without sequences has nothing to compute.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The sequences that take part in the step.
    pub sequences: Vec<ScheduledSequence>,
    /// The tokens to compute, sequence after sequence.
    pub tokens: Vec<TokenId>,
    /// The block tables, sequence after sequence. A table contains the blocks that hold the sequence's tokens up to the
    /// last one of this step, except for evicted blocks.
    pub blocks: Vec<BlockId>,
    /// The sequences that receive a sampled token: each scheduled sequence whose end the step reaches or, at the end of
    /// a prompt, all sequences that share the prompt.
    pub samples: Vec<SequenceId>,
    /// The blocks to copy before the step (copy on write).
    pub copies: Vec<BlockCopy>,
}

/// The consecutive tokens of one sequence that a step computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduledSequence {
    /// The sequence to which the tokens belong.
    pub id: SequenceId,
    /// The number of tokens that are already computed: the position of the first token of this step.
    pub computed_tokens: u32,
    /// The number of computed tokens that are no longer in the cache because their blocks were evicted.
    pub evicted_tokens: u32,
    /// The range of the tokens in [`Batch::tokens`].
    pub tokens: Range<u32>,
    /// The range of the block table in [`Batch::blocks`].
    pub blocks: Range<u32>,
    /// The range in [`Batch::samples`] of the sequences for which a token is sampled after the last token of this step.
    /// It is empty for a chunk that does not reach the end of the sequence, because no token is sampled after such a
    /// chunk.
    pub samples: Range<u32>,
    /// The range in [`Batch::tokens`] of the prompt tokens whose logits are needed for prompt log probabilities. The
    /// range never includes the last token of a prompt, whose logits are used for sampling.
    pub scored_tokens: Range<u32>,
    /// The number of draft tokens at the end of `tokens`. The scheduler sets them to 0, and the caller writes the
    /// drafts into [`Batch::tokens`] before it runs the batch. The logits of the drafts are needed as well.
    pub num_draft_tokens: u32,
    /// The index of the LoRA adapter with which the tokens are computed, or 0 for the base model.
    pub adapter: u32,
}

impl ScheduledSequence {
    /// The number of tokens of the sequence that are in the cache: the offset of the step's first token in the
    /// sequence's blocks.
    pub fn resident_tokens(&self) -> u32 {
        self.computed_tokens - self.evicted_tokens
    }

    /// The range in [`Batch::tokens`] of the tokens after which a token is sampled: the draft tokens and the token
    /// before them.
    pub fn sampled_tokens(&self) -> Range<u32> {
        let end = self.tokens.end;
        if self.samples.is_empty() { end..end } else { end - 1 - self.num_draft_tokens..end }
    }
}

/// A copy of the content of one block to another, in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block that is read.
    pub from: BlockId,
    /// The block that is overwritten.
    pub to: BlockId,
}

impl Batch {
    /// Removes all content without releasing the memory.
    pub fn clear(&mut self) {
        let Self { sequences, tokens, blocks, samples, copies } = self;
        sequences.clear();
        tokens.clear();
        blocks.clear();
        samples.clear();
        copies.clear();
    }

    /// The tokens of `sequence` that the step computes.
    pub fn tokens_of(&self, sequence: &ScheduledSequence) -> &[TokenId] {
        &self.tokens[sequence.tokens.start as usize..sequence.tokens.end as usize]
    }

    /// The block table of `sequence`.
    pub fn block_table_of(&self, sequence: &ScheduledSequence) -> &[BlockId] {
        &self.blocks[sequence.blocks.start as usize..sequence.blocks.end as usize]
    }

    /// The sequences that sample a token after the last token of `sequence`.
    pub fn samples_of(&self, sequence: &ScheduledSequence) -> &[SequenceId] {
        &self.samples[sequence.samples.start as usize..sequence.samples.end as usize]
    }

    /// The range of the draft tokens of `sequence` in [`Self::tokens`].
    pub fn drafts_of(&self, sequence: &ScheduledSequence) -> Range<usize> {
        (sequence.tokens.end - sequence.num_draft_tokens) as usize..sequence.tokens.end as usize
    }

    /// The ascending indices in [`Self::tokens`] of the tokens whose logits are needed. A runner returns one row of
    /// logits for each of them, in this order.
    pub fn logits_indices(&self) -> impl Iterator<Item = u32> {
        self.sequences
            .iter()
            .flat_map(|sequence| sequence.scored_tokens.clone().chain(sequence.sampled_tokens()))
    }

    /// The scheduled sequences for which tokens are sampled, in order.
    pub fn sampling_sequences(&self) -> impl Iterator<Item = &ScheduledSequence> {
        self.sequences.iter().filter(|sequence| !sequence.samples.is_empty())
    }

    /// Removes draft tokens from the end of each sequence until at most as many remain as `num_draft_tokens` returns
    /// for the sequence. The caller uses this method if it has fewer drafts than the scheduler allowed. Blocks that the
    /// step no longer writes are removed from the batch, but remain allocated to their sequences.
    ///
    /// # Panics
    /// Panics if `block_tokens` is zero.
    pub fn truncate_drafts(
        &mut self,
        block_tokens: u32,
        mut num_draft_tokens: impl FnMut(&ScheduledSequence) -> u32,
    ) {
        let (mut tokens, mut blocks) = (0, 0);
        for sequence in &mut self.sequences {
            let drafts = sequence.num_draft_tokens;
            let removed = if drafts > 0 { drafts - num_draft_tokens(sequence).min(drafts) } else { 0 };
            let start = sequence.tokens.start;
            let num_tokens = sequence.tokens.len() as u32 - removed;
            let num_blocks = (sequence.resident_tokens() + num_tokens).div_ceil(block_tokens);
            let num_blocks = num_blocks.min(sequence.blocks.len() as u32);
            self.tokens.copy_within(start as usize..(start + num_tokens) as usize, tokens as usize);
            let first = sequence.blocks.start as usize;
            self.blocks.copy_within(first..first + num_blocks as usize, blocks as usize);
            // Scored tokens are never drafts, so none of them is removed.
            let moved = |index: u32| index.saturating_sub(start) + tokens;
            sequence.scored_tokens = moved(sequence.scored_tokens.start)..moved(sequence.scored_tokens.end);
            sequence.tokens = tokens..tokens + num_tokens;
            sequence.blocks = blocks..blocks + num_blocks;
            sequence.num_draft_tokens -= removed;
            tokens += num_tokens;
            blocks += num_blocks;
        }
        self.tokens.truncate(tokens as usize);
        self.blocks.truncate(blocks as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_drafts_leave_the_batch_as_if_they_had_never_been_scheduled() {
        let sequence = |computed_tokens, tokens: Range<u32>, blocks, num_draft_tokens| ScheduledSequence {
            id: SequenceId::new(u64::from(computed_tokens), 0),
            computed_tokens,
            evicted_tokens: 0,
            scored_tokens: tokens.start..tokens.start,
            tokens,
            blocks,
            samples: 0..0,
            num_draft_tokens,
            adapter: 0,
        };
        let scored = ScheduledSequence { scored_tokens: 8..10, ..sequence(0, 7..11, 5..6, 0) };
        let mut batch = Batch {
            sequences: vec![sequence(7, 0..4, 0..3, 3), sequence(2, 4..7, 3..5, 2), scored],
            tokens: (0..11).collect(),
            blocks: (10..16).map(BlockId).collect(),
            ..Batch::default()
        };
        batch.truncate_drafts(4, |sequence| if sequence.computed_tokens == 7 { 0 } else { 9 });
        assert_eq!(batch.tokens, [0, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(batch.blocks.iter().map(|block| block.0).collect::<Vec<_>>(), [10, 11, 13, 14, 15]);
        let scored = ScheduledSequence { scored_tokens: 5..7, ..sequence(0, 4..8, 4..5, 0) };
        assert_eq!(batch.sequences, [sequence(7, 0..1, 0..2, 0), sequence(2, 1..4, 2..4, 2), scored]);
    }
}

//! What one step computes.

use std::ops::Range;

use crate::{BlockId, SequenceId, TokenId};

/// One step's work, flattened so that its vectors are reused from step to step and map one to one onto the
/// inputs of a paged model.
///
/// # Guarantees
/// - Rows are in the order of `tokens`, `blocks` and `samples`, and their ranges follow on each other.
/// - `copies` are to be carried out, in order, before the rows are computed.
/// - A batch without rows has nothing to compute.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The sequences that take part.
    pub rows: Vec<Row>,
    /// The tokens to compute, all rows after each other.
    pub tokens: Vec<TokenId>,
    /// The block tables of the rows, after each other: every block that holds tokens `0..past + tokens` of
    /// the row's sequence, but for those that it has left.
    pub blocks: Vec<BlockId>,
    /// The sequences that take a token from each row that samples: the row's own, or at the end of a prompt
    /// all the sequences that share it.
    pub samples: Vec<SequenceId>,
    /// Blocks to copy first (copy on write).
    pub copies: Vec<BlockCopy>,
}

/// A run of consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Whose tokens these are.
    pub sequence: SequenceId,
    /// Tokens of the sequence that were computed: the position of the row's first token.
    pub past: u32,
    /// Of these, tokens that are not in the cache any more, since their blocks were left.
    pub left: u32,
    /// Where the row's tokens are in [`Batch::tokens`].
    pub tokens: Range<u32>,
    /// Where the row's block table is in [`Batch::blocks`].
    pub blocks: Range<u32>,
    /// Where the sequences that sample from the row's last token are in [`Batch::samples`]; empty for a
    /// chunk that does not reach the end of its sequence, whose logits are not wanted.
    pub samples: Range<u32>,
    /// Where the row's tokens whose logits are wanted besides are in [`Batch::tokens`]: those of a prompt that is
    /// scored. The last token of a prompt is never among them, since it is sampled from.
    pub scored: Range<u32>,
    /// The last so many of the row's tokens are drafts: nobody has sampled them yet. The scheduler leaves them 0, and
    /// whoever runs the batch writes them into [`Batch::tokens`]. Their logits are wanted too.
    pub drafts: u32,
    /// The adapter that the tokens are computed with, as the request names it; 0 for none.
    pub adapter: u32,
}

impl Row {
    /// Tokens of the sequence that are in the cache: the place of the row's first token in its blocks.
    pub fn cached(&self) -> u32 {
        self.past - self.left
    }

    /// The tokens that something is sampled after: the last that is no draft, and the drafts.
    pub fn sampled(&self) -> Range<u32> {
        let end = self.tokens.end;
        if self.samples.is_empty() { end..end } else { end - 1 - self.drafts..end }
    }
}

/// Copies the whole of block `from` over block `to`, in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block that is read.
    pub from: BlockId,
    /// The block that is overwritten.
    pub to: BlockId,
}

impl Batch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        let Self { rows, tokens, blocks, samples, copies } = self;
        rows.clear();
        tokens.clear();
        blocks.clear();
        samples.clear();
        copies.clear();
    }

    /// The tokens that `row` computes.
    pub fn row_tokens(&self, row: &Row) -> &[TokenId] {
        &self.tokens[row.tokens.start as usize..row.tokens.end as usize]
    }

    /// The block table of `row`.
    pub fn row_blocks(&self, row: &Row) -> &[BlockId] {
        &self.blocks[row.blocks.start as usize..row.blocks.end as usize]
    }

    /// The sequences that sample from the last token of `row`.
    pub fn row_samples(&self, row: &Row) -> &[SequenceId] {
        &self.samples[row.samples.start as usize..row.samples.end as usize]
    }

    /// The tokens whose logits are wanted, by their places in [`Self::tokens`], in order: the rows of the logits
    /// that a runner returns.
    pub fn wanted(&self) -> impl Iterator<Item = u32> {
        self.rows.iter().flat_map(|row| row.scored.clone().chain(row.sampled()))
    }

    /// Where the drafts of `row` are in [`Self::tokens`].
    pub fn row_drafts(&self, row: &Row) -> Range<usize> {
        (row.tokens.end - row.drafts) as usize..row.tokens.end as usize
    }

    /// Takes drafts back, the last ones of their rows: of each row as many stay as `kept` says, or all if that is more.
    /// Whoever runs the batch may, where there are fewer guesses than there is room for. Blocks that are thus not written
    /// leave the batch and stay their sequence's.
    ///
    /// # Panics
    /// If blocks hold no tokens.
    pub fn drop_drafts(&mut self, block_tokens: u32, mut kept: impl FnMut(&Row) -> u32) {
        let (mut tokens, mut blocks) = (0, 0);
        for row in &mut self.rows {
            let dropped = if row.drafts > 0 { row.drafts - kept(row).min(row.drafts) } else { 0 };
            let from = row.tokens.start;
            let count = row.tokens.len() as u32 - dropped;
            let held = (row.cached() + count).div_ceil(block_tokens).min(row.blocks.len() as u32);
            self.tokens.copy_within(from as usize..(from + count) as usize, tokens as usize);
            let first = row.blocks.start as usize;
            self.blocks.copy_within(first..first + held as usize, blocks as usize);
            // Nothing that is scored is a draft.
            let moved = |place: u32| place.saturating_sub(from) + tokens;
            row.scored = moved(row.scored.start)..moved(row.scored.end);
            row.tokens = tokens..tokens + count;
            row.blocks = blocks..blocks + held;
            row.drafts -= dropped;
            tokens += count;
            blocks += held;
        }
        self.tokens.truncate(tokens as usize);
        self.blocks.truncate(blocks as usize);
    }

    /// The rows whose last token is sampled from, in order.
    pub fn sampling_rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| !row.samples.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_that_are_taken_back_leave_the_rest_as_it_would_be_without_them() {
        let row = |past, tokens: Range<u32>, blocks, drafts| Row {
            sequence: SequenceId(u64::from(past)),
            past,
            left: 0,
            scored: tokens.start..tokens.start,
            tokens,
            blocks,
            samples: 0..0,
            drafts,
            adapter: 0,
        };
        let scored = Row { scored: 8..10, ..row(0, 7..11, 5..6, 0) };
        let mut batch = Batch {
            rows: vec![row(7, 0..4, 0..3, 3), row(2, 4..7, 3..5, 2), scored],
            tokens: (0..11).collect(),
            blocks: (10..16).map(BlockId).collect(),
            ..Batch::default()
        };
        batch.drop_drafts(4, |row| if row.past == 7 { 0 } else { 9 });
        assert_eq!(batch.tokens, [0, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(batch.blocks.iter().map(|block| block.0).collect::<Vec<_>>(), [10, 11, 13, 14, 15]);
        let scored = Row { scored: 5..7, ..row(0, 4..8, 4..5, 0) };
        assert_eq!(batch.rows, [row(7, 0..1, 0..2, 0), row(2, 1..4, 2..4, 2), scored]);
    }
}

//! The text of a sequence as the draft model reads it, and what is in the blocks of that model's cache.
//!
//! Blocks are the target's: block i of either cache is for the same tokens. But the draft model computes only what it has a
//! use for, so what it has is told by what was written: each slot has a digest of the text up to its token. Nobody has to
//! tell it that a block was evicted, taken over, or given to somebody else.

use std::ops::Range;
use std::sync::Arc;

use server_scheduler::{BlockCopy, BlockId, TokenId};

use crate::sampler::mix;

/// Prompt and output of a sequence, and a digest of it up to each token. Clones share the prompt.
#[derive(Clone, Debug, Default)]
pub(super) struct Text {
    prompt: Arc<Part>,
    output: Part,
}

#[derive(Clone, Debug, Default)]
struct Part {
    tokens: Vec<TokenId>,
    digests: Vec<u64>,
    largest: TokenId,
}

impl Part {
    /// Adds a token after a text of this digest.
    fn push(&mut self, before: u64, token: TokenId) {
        self.tokens.push(token);
        self.digests.push(digest(before, token));
        self.largest = self.largest.max(token);
    }
}

/// The digest of no text, and of a slot in which nothing is known to be.
pub(super) const NOTHING: u64 = 0;

/// The digest of a text with one more token.
pub(super) fn digest(before: u64, token: TokenId) -> u64 {
    mix(before.rotate_left(17) ^ u64::from(token)).max(1)
}

impl Text {
    pub(super) fn new(prompt: &[TokenId]) -> Self {
        let mut part = Part::default();
        for &token in prompt {
            part.push(part.digests.last().copied().unwrap_or(NOTHING), token);
        }
        Self { prompt: Arc::new(part), output: Part::default() }
    }

    pub(super) fn push(&mut self, token: TokenId) {
        let last = self.output.digests.last().or(self.prompt.digests.last());
        self.output.push(last.copied().unwrap_or(NOTHING), token);
    }

    pub(super) fn len(&self) -> usize {
        self.prompt.tokens.len() + self.output.tokens.len()
    }

    /// Whether a model of so many tokens knows all of it.
    pub(super) fn is_known_to(&self, vocabulary: u32) -> bool {
        self.prompt.largest.max(self.output.largest) < vocabulary
    }

    pub(super) fn tokens(&self, range: Range<usize>) -> impl Iterator<Item = TokenId> {
        let [prompt, output] = self.split(range);
        self.prompt.tokens[prompt].iter().chain(&self.output.tokens[output]).copied()
    }

    /// Of the text up to each token.
    pub(super) fn digests(&self, range: Range<usize>) -> impl Iterator<Item = u64> {
        let [prompt, output] = self.split(range);
        self.prompt.digests[prompt].iter().chain(&self.output.digests[output]).copied()
    }

    /// What of a range is in the prompt, and what in the output.
    fn split(&self, Range { start, end }: Range<usize>) -> [Range<usize>; 2] {
        let length = self.prompt.tokens.len();
        let after = |place: usize| place.saturating_sub(length);
        [start.min(length)..end.min(length), after(start)..after(end)]
    }
}

/// What is in each slot of the draft model's cache: the digest of the text up to its token.
#[derive(Debug)]
pub(super) struct Written {
    slots: Vec<u64>,
    block_tokens: usize,
}

impl Written {
    pub(super) fn new(blocks_total: u32, block_tokens: u32) -> Self {
        let block_tokens = block_tokens as usize;
        Self { slots: vec![NOTHING; blocks_total as usize * block_tokens], block_tokens }
    }

    /// How many leading tokens of a text are there, in the blocks of its sequence; never the last, after which something
    /// is guessed.
    pub(super) fn known(&self, blocks: &[BlockId], text: &Text) -> usize {
        let count = text.len() - 1;
        let mut known = 0;
        for block in blocks {
            let slots = self.block(*block);
            let end = count.min(known + slots.len());
            // Writing a slot empties those after it, so that the last one vouches for all.
            if end - known == slots.len() && text.digests(end - 1..end).eq(slots.last().copied()) {
                known = end;
                continue;
            }
            known += slots
                .iter()
                .zip(text.digests(known..end))
                .take_while(|(slot, digest)| *slot == digest)
                .count();
            break;
        }
        known
    }

    /// Notes tokens that were computed, the first of them at position `from` of its sequence; with
    /// digests of nothing that what was there is not to be relied on.
    pub(super) fn write(&mut self, blocks: &[BlockId], from: usize, digests: impl Iterator<Item = u64>) {
        for (position, digest) in (from..).zip(digests) {
            let first = blocks[position / self.block_tokens].0 as usize * self.block_tokens;
            let slot = first + position % self.block_tokens;
            self.slots[slot] = digest;
            self.slots[slot + 1..first + self.block_tokens].fill(NOTHING);
        }
    }

    /// Notes that a block was copied.
    pub(super) fn copy(&mut self, copy: BlockCopy) {
        let [from, to] = [copy.from, copy.to].map(|block| block.0 as usize * self.block_tokens);
        self.slots.copy_within(from..from + self.block_tokens, to);
    }

    /// Notes that what is in a block is not to be relied on.
    pub(super) fn forget(&mut self, block: BlockId) {
        self.write(&[block], 0, std::iter::once(NOTHING));
    }

    /// Notes that nothing is to be relied on.
    pub(super) fn clear(&mut self) {
        self.slots.fill(NOTHING);
    }

    fn block(&self, block: BlockId) -> &[u64] {
        let first = block.0 as usize * self.block_tokens;
        &self.slots[first..first + self.block_tokens]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_told_by_what_was_written() {
        let mut written = Written::new(8, 4);
        let text = Text::new(&(0..10).collect::<Vec<_>>());
        let table = [3, 5, 1].map(BlockId);
        assert_eq!(written.known(&table, &text), 0);
        written.write(&table, 0, text.digests(0..7));
        assert_eq!(written.known(&table, &text), 7);
        written.write(&table, 7, text.digests(7..10));
        assert_eq!(written.known(&table, &text), 9, "the last is computed in any case");
        // Others share what is the same, in the same blocks.
        let other = Text::new(&[0, 1, 2, 3, 4, 7, 7]);
        assert_eq!(written.known(&[3, 5, 6].map(BlockId), &other), 5);
        assert_eq!(written.known(&[3, 2].map(BlockId), &other), 4);
        // One writes what it guesses: of the other as much is left as was before.
        written.write(&table, 5, other.digests(5..6));
        assert_eq!((written.known(&table, &text), written.known(&table, &other)), (5, 6));
        written.copy(BlockCopy { from: BlockId(5), to: BlockId(2) });
        assert_eq!(written.known(&[3, 2].map(BlockId), &other), 6);
        written.write(&[2].map(BlockId), 0, [9].into_iter());
        assert_eq!(written.known(&[3, 2].map(BlockId), &other), 4);
        written.forget(BlockId(5));
        assert_eq!(written.known(&table, &text), 4);
        written.clear();
        assert_eq!(written.known(&table, &text), 0);
    }
}

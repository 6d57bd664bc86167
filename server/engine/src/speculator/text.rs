//! The text of a sequence as the draft model reads it, and the content of that model's cache.
//!
//! The target model and the draft model use the same block tables, but the draft model computes only the tokens that it
//! needs. Its cache is described by digests: each slot has the digest of the text up to its token. The draft model
//! therefore does not have to be notified when a block is evicted, shared or reallocated.

use std::ops::Range;
use std::sync::Arc;

use server_scheduler::{BlockCopy, BlockId, TokenId};

use crate::hash::mix;

/// The prompt and the output of a sequence, with a digest of the text up to each token. Clones share the prompt.
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
    /// Appends a token. `before` is the digest of the text before it.
    fn push(&mut self, before: u64, token: TokenId) {
        self.tokens.push(token);
        self.digests.push(digest(before, token));
        self.largest = self.largest.max(token);
    }
}

/// The digest of an empty text, and of a slot with unknown content.
pub(super) const NO_DIGEST: u64 = 0;

/// The digest of a text that ends with `token`, given the digest of the text before it.
pub(super) fn digest(before: u64, token: TokenId) -> u64 {
    mix(before.rotate_left(17) ^ u64::from(token)).max(1)
}

impl Text {
    pub(super) fn new(prompt: &[TokenId]) -> Self {
        let mut part = Part::default();
        for &token in prompt {
            part.push(part.digests.last().copied().unwrap_or(NO_DIGEST), token);
        }
        Self { prompt: Arc::new(part), output: Part::default() }
    }

    pub(super) fn push(&mut self, token: TokenId) {
        let last = self.output.digests.last().or(self.prompt.digests.last());
        self.output.push(last.copied().unwrap_or(NO_DIGEST), token);
    }

    pub(super) fn len(&self) -> usize {
        self.prompt.tokens.len() + self.output.tokens.len()
    }

    /// Whether all tokens are in a vocabulary of this size.
    pub(super) fn is_in_vocabulary(&self, vocabulary: u32) -> bool {
        self.prompt.largest.max(self.output.largest) < vocabulary
    }

    pub(super) fn tokens(&self, range: Range<usize>) -> impl Iterator<Item = TokenId> {
        let [prompt, output] = self.split(range);
        self.prompt.tokens[prompt].iter().chain(&self.output.tokens[output]).copied()
    }

    /// The digests of the text up to each token.
    pub(super) fn digests(&self, range: Range<usize>) -> impl Iterator<Item = u64> {
        let [prompt, output] = self.split(range);
        self.prompt.digests[prompt].iter().chain(&self.output.digests[output]).copied()
    }

    /// Splits a range into the parts in the prompt and in the output.
    fn split(&self, Range { start, end }: Range<usize>) -> [Range<usize>; 2] {
        let length = self.prompt.tokens.len();
        let after = |position: usize| position.saturating_sub(length);
        [start.min(length)..end.min(length), after(start)..after(end)]
    }
}

/// The content of the draft model's cache: for each slot, the digest of the text up to its token.
#[derive(Debug)]
pub(super) struct CacheDigests {
    slots: Vec<u64>,
    block_tokens: usize,
}

impl CacheDigests {
    pub(super) fn new(blocks_total: u32, block_tokens: u32) -> Self {
        let block_tokens = block_tokens as usize;
        Self { slots: vec![NO_DIGEST; blocks_total as usize * block_tokens], block_tokens }
    }

    /// Number of leading tokens of a text that are in the blocks of its sequence. The last token is never counted,
    /// because it has to be computed to sample a draft after it.
    pub(super) fn cached_tokens(&self, blocks: &[BlockId], text: &Text) -> usize {
        let count = text.len() - 1;
        let mut cached = 0;
        for block in blocks {
            let slots = self.block(*block);
            let end = count.min(cached + slots.len());
            // Writing a slot invalidates those after it, so if the last slot is valid, the whole block is.
            if end - cached == slots.len() && text.digests(end - 1..end).eq(slots.last().copied()) {
                cached = end;
                continue;
            }
            cached += slots
                .iter()
                .zip(text.digests(cached..end))
                .take_while(|(slot, digest)| *slot == digest)
                .count();
            break;
        }
        cached
    }

    /// Records the digests of a sequence's computed tokens, starting at the position `start`; `NO_DIGEST` stands for
    /// unknown content.
    pub(super) fn write(&mut self, blocks: &[BlockId], start: usize, digests: impl Iterator<Item = u64>) {
        for (position, digest) in (start..).zip(digests) {
            let first = blocks[position / self.block_tokens].0 as usize * self.block_tokens;
            let slot = first + position % self.block_tokens;
            self.slots[slot] = digest;
            self.slots[slot + 1..first + self.block_tokens].fill(NO_DIGEST);
        }
    }

    /// Records that a block was copied.
    pub(super) fn copy(&mut self, copy: BlockCopy) {
        let [from, to] = [copy.from, copy.to].map(|block| block.0 as usize * self.block_tokens);
        self.slots.copy_within(from..from + self.block_tokens, to);
    }

    /// Records that the content of a block is unknown.
    pub(super) fn invalidate(&mut self, block: BlockId) {
        self.write(&[block], 0, std::iter::once(NO_DIGEST));
    }

    /// Records that all content is unknown.
    pub(super) fn clear(&mut self) {
        self.slots.fill(NO_DIGEST);
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
    fn cached_tokens_are_found_by_their_digests() {
        let mut cache = CacheDigests::new(8, 4);
        let text = Text::new(&(0..10).collect::<Vec<_>>());
        let table = [3, 5, 1].map(BlockId);
        assert_eq!(cache.cached_tokens(&table, &text), 0);
        cache.write(&table, 0, text.digests(0..7));
        assert_eq!(cache.cached_tokens(&table, &text), 7);
        cache.write(&table, 7, text.digests(7..10));
        assert_eq!(cache.cached_tokens(&table, &text), 9, "the last token never counts");
        // Another sequence shares the first block and a part of the second.
        let other = Text::new(&[0, 1, 2, 3, 4, 7, 7]);
        assert_eq!(cache.cached_tokens(&[3, 5, 6].map(BlockId), &other), 5);
        assert_eq!(cache.cached_tokens(&[3, 2].map(BlockId), &other), 4);
        // The sequence of `other` writes a draft into the second block, which invalidates the rest of this block for
        // `text`.
        cache.write(&table, 5, other.digests(5..6));
        assert_eq!((cache.cached_tokens(&table, &text), cache.cached_tokens(&table, &other)), (5, 6));
        cache.copy(BlockCopy { from: BlockId(5), to: BlockId(2) });
        assert_eq!(cache.cached_tokens(&[3, 2].map(BlockId), &other), 6);
        cache.write(&[2].map(BlockId), 0, [9].into_iter());
        assert_eq!(cache.cached_tokens(&[3, 2].map(BlockId), &other), 4);
        cache.invalidate(BlockId(5));
        assert_eq!(cache.cached_tokens(&table, &text), 4);
        cache.clear();
        assert_eq!(cache.cached_tokens(&table, &text), 0);
    }
}

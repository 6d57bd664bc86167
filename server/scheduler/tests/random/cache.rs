//! A KV cache that holds, in place of keys and values, what they would have been computed from: the hash of
//! the token and of everything before it.

use server_scheduler::{Batch, BlockId, Row, TokenId};

/// What a slot holds after a token was computed into it; `None` is garbage.
pub(crate) type Entry = Option<u64>;

pub(crate) struct Cache {
    block_tokens: usize,
    slots: Vec<Entry>,
}

/// The entries of a sequence's tokens, computed with an adapter.
fn history(adapter: u32, tokens: &[TokenId]) -> impl Iterator<Item = u64> {
    tokens.iter().scan(u64::from(adapter), |state, &token| {
        *state = (*state ^ (u64::from(token) + 1)).wrapping_mul(0x2545_f491_4f6c_dd1d).rotate_left(23);
        Some(*state)
    })
}

impl Cache {
    pub(crate) fn new(blocks: u32, block_tokens: u32) -> Self {
        Self { block_tokens: block_tokens as usize, slots: vec![None; (blocks * block_tokens) as usize] }
    }

    pub(crate) fn copy_blocks(&mut self, batch: &Batch) {
        for copy in &batch.copies {
            assert_ne!(copy.from, copy.to, "a copy has a source");
            let from = self.slot(copy.from, 0);
            let to = self.slot(copy.to, 0);
            self.slots.copy_within(from..from + self.block_tokens, to);
        }
    }

    /// Computes the tokens of `row`, the last of a sequence's first `tokens`.
    pub(crate) fn write(&mut self, batch: &Batch, row: &Row, tokens: &[TokenId]) {
        let end = row.past as usize + row.tokens.len();
        for (position, entry) in history(row.adapter, &tokens[..end]).enumerate().skip(row.past as usize) {
            let at = self.at(batch.row_blocks(row), position - row.left as usize);
            self.slots[at] = Some(entry);
        }
    }

    /// Asserts that `row` finds the whole history of its sequence, but for blocks of it that it has left: neither the first, nor
    /// those before the one that it writes.
    pub(crate) fn read(&self, batch: &Batch, row: &Row, tokens: &[TokenId]) {
        let end = row.past as usize + row.tokens.len();
        let history: Vec<Entry> = history(row.adapter, &tokens[..end]).map(Some).collect();
        let mut expected = history.chunks(self.block_tokens);
        let mut left = row.left as usize;
        for (index, &block) in batch.row_blocks(row).iter().enumerate() {
            let at = self.slot(block, 0);
            let is_found = |entries: &&[Entry]| self.slots[at..at + entries.len()] == **entries;
            let skipped =
                expected.by_ref().take_while(|entries| !is_found(entries)).count() * self.block_tokens;
            assert!(
                skipped <= left && (skipped == 0 || index > 0),
                "{:?} finds its block {index}",
                row.sequence
            );
            left -= skipped;
        }
        assert!(left == 0 && expected.next().is_none(), "{:?} finds all but what it left", row.sequence);
    }

    /// Loses everything.
    pub(crate) fn clear(&mut self) {
        self.slots.fill(None);
    }

    /// What a block holds.
    pub(crate) fn block(&self, block: BlockId) -> Vec<Entry> {
        let at = self.slot(block, 0);
        self.slots[at..at + self.block_tokens].to_vec()
    }

    /// Writes all that a block holds.
    pub(crate) fn set_block(&mut self, block: BlockId, entries: &[Entry]) {
        let at = self.slot(block, 0);
        self.slots[at..at + self.block_tokens].copy_from_slice(entries);
    }

    /// What a failed step leaves in the blocks of `row` that it was to write.
    pub(crate) fn spoil(&mut self, batch: &Batch, row: &Row) {
        for block in &batch.row_blocks(row)[row.cached() as usize / self.block_tokens..] {
            let at = self.slot(*block, 0);
            self.slots[at..at + self.block_tokens].fill(None);
        }
    }

    fn at(&self, table: &[BlockId], position: usize) -> usize {
        self.slot(table[position / self.block_tokens], position % self.block_tokens)
    }

    fn slot(&self, block: BlockId, offset: usize) -> usize {
        block.0 as usize * self.block_tokens + offset
    }
}

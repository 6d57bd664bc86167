//! A simulated KV cache: instead of keys and values, it stores a hash of each token and all tokens before it.

use server_scheduler::{Batch, BlockId, ScheduledSequence, TokenId};

/// The content of a slot; `None` if it is undefined.
pub(crate) type Entry = Option<u64>;

pub(crate) struct Cache {
    block_tokens: usize,
    slots: Vec<Entry>,
}

/// Returns the cache entries for the tokens of a sequence that uses this adapter.
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
            assert_ne!(copy.from, copy.to, "a block is not copied to itself");
            let from = self.slot(copy.from, 0);
            let to = self.slot(copy.to, 0);
            self.slots.copy_within(from..from + self.block_tokens, to);
        }
    }

    /// Writes the entries for the tokens that the step computes for a sequence.
    pub(crate) fn write(&mut self, batch: &Batch, sequence: &ScheduledSequence, tokens: &[TokenId]) {
        let end = sequence.computed_tokens as usize + sequence.tokens.len();
        for (position, entry) in
            history(sequence.adapter, &tokens[..end]).enumerate().skip(sequence.computed_tokens as usize)
        {
            let at = self.at(batch.block_table_of(sequence), position - sequence.evicted_tokens as usize);
            self.slots[at] = Some(entry);
        }
    }

    /// Asserts that a sequence reads its whole history, except for evicted blocks. The first block must not be evicted.
    pub(crate) fn read(&self, batch: &Batch, sequence: &ScheduledSequence, tokens: &[TokenId]) {
        let end = sequence.computed_tokens as usize + sequence.tokens.len();
        let history: Vec<Entry> = history(sequence.adapter, &tokens[..end]).map(Some).collect();
        let mut expected = history.chunks(self.block_tokens);
        let mut evicted = sequence.evicted_tokens as usize;
        for (index, &block) in batch.block_table_of(sequence).iter().enumerate() {
            let at = self.slot(block, 0);
            let is_cached = |entries: &&[Entry]| self.slots[at..at + entries.len()] == **entries;
            let skipped =
                expected.by_ref().take_while(|entries| !is_cached(entries)).count() * self.block_tokens;
            assert!(
                skipped <= evicted && (skipped == 0 || index > 0),
                "{:?} reads its block {index}",
                sequence.id
            );
            evicted -= skipped;
        }
        assert!(evicted == 0 && expected.next().is_none(), "{:?} reads all but evicted blocks", sequence.id);
    }

    /// Makes all content undefined.
    pub(crate) fn clear(&mut self) {
        self.slots.fill(None);
    }

    /// The content of a block.
    pub(crate) fn block(&self, block: BlockId) -> Vec<Entry> {
        let at = self.slot(block, 0);
        self.slots[at..at + self.block_tokens].to_vec()
    }

    /// Sets the content of a block.
    pub(crate) fn set_block(&mut self, block: BlockId, entries: &[Entry]) {
        let at = self.slot(block, 0);
        self.slots[at..at + self.block_tokens].copy_from_slice(entries);
    }

    /// Marks as undefined the blocks that a failed step was to write for a sequence.
    pub(crate) fn spoil(&mut self, batch: &Batch, sequence: &ScheduledSequence) {
        for block in
            &batch.block_table_of(sequence)[sequence.resident_tokens() as usize / self.block_tokens..]
        {
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

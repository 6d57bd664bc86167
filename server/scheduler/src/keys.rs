//! Keys: names of what blocks hold that are as good as the content, for whoever keeps evicted blocks elsewhere.
//!
//! A key is made of the key before it and of the block's tokens, the first of a sequence's of its salt and its adapter.
//! How is the caller's choice, which has to be beyond collisions: what is found by a key is not compared.

use crate::TokenId;
use crate::block::{BlockHash, BlockId};
use crate::block_pool::After;

/// Names the content of a block and of all before it beyond doubt: a cryptographic hash of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub [u8; 32]);

/// Makes the key of a block of the key before it and of its tokens.
pub type KeyOf = fn(BlockKey, &[TokenId]) -> BlockKey;

/// How keys are made.
#[derive(Clone, Debug)]
pub struct Keying {
    /// The keys of blocks.
    pub key_of: KeyOf,
    /// What names each adapter by its content, in the order of their numbers: the first is that of none.
    pub adapters: Vec<BlockKey>,
}

/// A block whose content was given up. It is still there, until something is written into the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// Where it is.
    pub block: BlockId,
    /// What it is.
    pub key: BlockKey,
}

/// The keys of the cached blocks, and what was evicted and not told yet.
#[derive(Debug)]
pub(crate) struct Keys {
    keying: Keying,
    /// Of each block; of no meaning for those that are not cached.
    of: Vec<BlockKey>,
    evicted: Vec<Evicted>,
}

impl Keys {
    pub(crate) fn new(keying: Keying, blocks_total: u32) -> Self {
        assert!(!keying.adapters.is_empty(), "there is a key for no adapter");
        Self { keying, of: vec![BlockKey([0; 32]); blocks_total as usize], evicted: Vec::new() }
    }

    /// What the first key of a sequence is made from, or any later one.
    pub(crate) fn before(&self, after: After) -> BlockKey {
        match after {
            After::Root(BlockHash(salt), adapter) => {
                // No block follows the key of an adapter, so this is not the key of one.
                let adapter = self.keying.adapters[adapter as usize];
                (self.keying.key_of)(adapter, &[salt as u32, (salt >> 32) as u32])
            }
            After::Block(before) => self.of[before.0 as usize],
        }
    }

    /// The key of the block with these tokens after the key `before`.
    pub(crate) fn next(&self, before: BlockKey, tokens: &[TokenId]) -> BlockKey {
        (self.keying.key_of)(before, tokens)
    }

    /// A block is cached from now on.
    pub(crate) fn cached(&mut self, block: BlockId, after: After, tokens: &[TokenId]) {
        self.of[block.0 as usize] = self.next(self.before(after), tokens);
    }

    /// A block is cached no longer.
    pub(crate) fn evicted(&mut self, block: BlockId) {
        self.evicted.push(Evicted { block, key: self.of[block.0 as usize] });
    }

    /// What was evicted since the last call.
    pub(crate) fn take_evicted(&mut self) -> Vec<Evicted> {
        std::mem::take(&mut self.evicted)
    }
}

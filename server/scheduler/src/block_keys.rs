//! Keys of blocks: names that identify the content of a block as reliably as the content itself, for storage of evicted
//! blocks outside the cache.
//!
//! The key of a block is derived from its parent key, its tokens and its images. The parent key is the key of the block
//! before it or, for the first block, a key derived from the request's prefix seed and adapter. The caller provides the
//! function that derives keys. This function must be collision-resistant, because content that is found by its key is
//! not compared.

use crate::block::{BlockHash, BlockId, BlockParent, TokenId};
use crate::images::with_block_words;

/// A cryptographic hash of the content of a block and of all blocks before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub [u8; 32]);

/// Derives the key of a block from its parent key and its tokens. If the block has images, the words that identify them
/// follow the tokens.
pub type BlockKeyFn = fn(BlockKey, &[TokenId]) -> BlockKey;

/// The scheme by which the keys of blocks are derived.
#[derive(Clone, Debug)]
pub struct BlockKeyScheme {
    /// The function that derives the key of a block.
    pub block_key: BlockKeyFn,
    /// The keys that identify the content of the adapters, indexed by adapter. The first key is that of the base model.
    pub adapters: Vec<BlockKey>,
}

/// A block that was evicted from the cache. Its content is intact until the block is overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvictedBlock {
    /// The block in the cache.
    pub block: BlockId,
    /// The key of its content.
    pub key: BlockKey,
}

/// The keys of the cached blocks, and the evictions that have not been reported yet.
#[derive(Clone, Debug)]
pub(crate) struct BlockKeys {
    scheme: BlockKeyScheme,
    /// The key of each block. The keys of blocks that are not cached are meaningless.
    keys: Vec<BlockKey>,
    evicted: Vec<EvictedBlock>,
}

impl BlockKeys {
    pub(crate) fn new(scheme: BlockKeyScheme, blocks_total: u32) -> Self {
        assert!(!scheme.adapters.is_empty(), "the key of the base model is missing");
        Self { scheme, keys: vec![BlockKey([0; 32]); blocks_total as usize], evicted: Vec::new() }
    }

    /// The parent key of a block that follows `parent`.
    pub(crate) fn parent_key(&self, parent: BlockParent) -> BlockKey {
        match parent {
            BlockParent::Start { prefix_seed: BlockHash(seed), adapter } => {
                // The key of an adapter is never the parent of a block's key, so the result differs from the key of any
                // block.
                let adapter = self.scheme.adapters[adapter as usize];
                (self.scheme.block_key)(adapter, &[seed as u32, (seed >> 32) as u32])
            }
            BlockParent::Block(block) => self.keys[block.0 as usize],
        }
    }

    /// The key of the block with these tokens and images and the parent key `parent`.
    pub(crate) fn block_key(&self, parent: BlockKey, tokens: &[TokenId], images: &[u32]) -> BlockKey {
        with_block_words(tokens, images, |words| (self.scheme.block_key)(parent, words))
    }

    pub(crate) fn record_cached(
        &mut self,
        block: BlockId,
        parent: BlockParent,
        tokens: &[TokenId],
        images: &[u32],
    ) {
        self.keys[block.0 as usize] = self.block_key(self.parent_key(parent), tokens, images);
    }

    /// Records that a block is no longer cached.
    pub(crate) fn record_evicted(&mut self, block: BlockId) {
        self.evicted.push(EvictedBlock { block, key: self.keys[block.0 as usize] });
    }

    /// Returns the evictions since the last call.
    pub(crate) fn drain_evicted(&mut self) -> Vec<EvictedBlock> {
        std::mem::take(&mut self.evicted)
    }
}

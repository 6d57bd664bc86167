//! The identity of a block: its index in the cache, and the hash of its content.
//!
//! The hash is a hint, never a proof: code that reuses a block found by its hash first compares the content.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The ID of a token in the model's vocabulary.
pub type TokenId = u32;

/// Identifies a block of the KV cache, which contains the keys and values of [`CacheSize::block_tokens`] consecutive
/// tokens of a sequence, in every layer.
///
/// [`CacheSize::block_tokens`]: crate::CacheSize::block_tokens
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// The hash of a full block's tokens and images, and of all content before the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

impl BlockHash {
    /// The prefix seed of requests without a cache salt.
    pub const NONE: Self = Self(0);
}

/// The predecessor of a block in its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockParent {
    /// The block is the first of its sequence. Blocks with different seeds or adapters have different content even if
    /// their tokens are equal.
    Start { prefix_seed: BlockHash, adapter: u32 },
    /// The block follows this cached block.
    Block(BlockId),
}

/// Returns the hash of the block that holds `tokens` and follows the block with the hash `parent`: xxh3-64 of the
/// tokens as little-endian 32-bit words, seeded with the parent's hash.
///
/// # Guarantees
/// The hash is the same in every process, on every machine and in every version, so that other programs can predict
/// the content of a cache.
pub fn block_hash(parent: BlockHash, tokens: &[TokenId]) -> BlockHash {
    const STACK_TOKENS: usize = 64;
    let mut stack = [0; 4 * STACK_TOKENS];
    let mut heap = Vec::new();
    let bytes = if tokens.len() <= STACK_TOKENS {
        &mut stack[..4 * tokens.len()]
    } else {
        heap.resize(4 * tokens.len(), 0);
        &mut heap[..]
    };
    for (word, token) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(tokens) {
        *word = token.to_le_bytes();
    }
    BlockHash(xxh3_64_with_seed(bytes, parent.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_chain_never_changes() {
        let first = block_hash(BlockHash::NONE, &[1, 2, 3, 4]);
        let second = block_hash(first, &[5, 6, 7, 8]);
        let long = block_hash(second, &(0..100).collect::<Vec<_>>());
        assert_eq!(
            [first, second, long].map(|hash| hash.0),
            [8052976908588476977, 16362517228796925090, 9392549330208614357]
        );
    }

    #[test]
    fn the_hash_depends_on_the_parent_and_on_every_token() {
        let hash = block_hash(BlockHash(7), &[1, 2]);
        assert_ne!(hash, block_hash(BlockHash(8), &[1, 2]));
        assert_ne!(hash, block_hash(BlockHash(7), &[1, 3]));
        assert_ne!(hash, block_hash(BlockHash(7), &[1]));
    }
}

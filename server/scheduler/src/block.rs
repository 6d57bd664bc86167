//! What names a block: its index in the cache, and the hash of the content it may hold.
//!
//! The hash is a hint, never a proof: whoever finds a block by it compares the content.

use std::hash::{BuildHasherDefault, Hasher};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::TokenId;

/// A block of the KV cache: the keys and values of [`SchedulerConfig::block_tokens`] consecutive tokens of a
/// sequence, in every layer.
///
/// [`SchedulerConfig::block_tokens`]: crate::SchedulerConfig::block_tokens
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// The hash of a full block's tokens and of all tokens before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

impl BlockHash {
    /// The parent of the first block of every sequence.
    pub const ROOT: Self = Self(0);
}

/// The hash of the block that holds `tokens` and follows the block hashed as `parent`: xxh3-64 of the tokens
/// as little-endian 32-bit words, seeded by the parent's hash.
///
/// # Guarantees
/// The same in every process, on every machine and in every version, so that others can predict what a
/// cache holds.
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

/// Hashes the one integer that identifies a thing. Unlike the standard hasher it draws no random seed; what
/// is hashed is either a hash already or a number the submitter counts up.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        // Fibonacci hashing, folded: the map looks at the highest and the lowest bits.
        let mixed = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

pub(crate) type IdMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<IdHasher>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_chain_never_changes() {
        let first = block_hash(BlockHash::ROOT, &[1, 2, 3, 4]);
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

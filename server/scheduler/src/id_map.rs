//! A hash map for integer keys, without a random seed.

use std::hash::{BuildHasherDefault, Hasher};

pub(crate) type IdMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<IdHasher>>;

/// Hashes the few integers of an identifier. Unlike the standard hasher, it uses no random seed: the keys are either
/// hashes themselves or consecutive numbers.
#[derive(Clone, Default)]
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

    fn write_u32(&mut self, id: u32) {
        self.write_u64(u64::from(id));
    }

    fn write_u64(&mut self, id: u64) {
        // This is Fibonacci hashing, with the product folded, because the map uses the highest and the lowest bits.
        let mixed = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

//! The index of the stored blocks, with their sizes, in LRU order. The module does no I/O.

use std::collections::{BTreeMap, HashMap};

use server_scheduler::BlockKey;

pub(super) struct StoredBlocks {
    bytes_max: u64,
    bytes: u64,
    /// Number of uses so far.
    uses: u64,
    /// The number of the last use, and the size in bytes, of each block.
    blocks: HashMap<BlockKey, (u64, u64)>,
    by_use: BTreeMap<u64, BlockKey>,
}

impl StoredBlocks {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, bytes: 0, uses: 0, blocks: HashMap::new(), by_use: BTreeMap::new() }
    }

    pub(super) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn contains(&self, key: BlockKey) -> bool {
        self.blocks.contains_key(&key)
    }

    /// Marks a block as just used. Returns false if the block is not stored.
    pub(super) fn touch(&mut self, key: BlockKey) -> bool {
        let Some((used, _)) = self.blocks.get_mut(&key) else { return false };
        self.by_use.remove(used);
        self.uses += 1;
        *used = self.uses;
        self.by_use.insert(self.uses, key);
        true
    }

    /// Adds a block, or marks it as used if it is already stored.
    pub(super) fn add(&mut self, key: BlockKey, bytes: u64) {
        if self.touch(key) {
            return;
        }
        self.uses += 1;
        self.bytes += bytes;
        self.blocks.insert(key, (self.uses, bytes));
        self.by_use.insert(self.uses, key);
    }

    pub(super) fn remove(&mut self, key: BlockKey) {
        if let Some((used, bytes)) = self.blocks.remove(&key) {
            self.by_use.remove(&used);
            self.bytes -= bytes;
        }
    }

    /// Removes and returns the least recently used block if the size limit is exceeded.
    pub(super) fn pop_excess(&mut self) -> Option<BlockKey> {
        if self.bytes <= self.bytes_max {
            return None;
        }
        let (_, &key) = self.by_use.first_key_value()?;
        self.remove(key);
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removes_the_least_recently_used_blocks_up_to_the_limit() {
        let key = |number| BlockKey([number; 32]);
        let mut stored = StoredBlocks::new(25);
        for number in 1..=3 {
            stored.add(key(number), 10);
        }
        assert!(stored.touch(key(1)) && !stored.touch(key(9)));
        assert_eq!((stored.pop_excess(), stored.pop_excess()), (Some(key(2)), None));
        assert_eq!((stored.len(), stored.bytes()), (2, 20));
        stored.add(key(1), 10);
        assert_eq!(stored.bytes(), 20, "the block is counted once");
        stored.remove(key(1));
        stored.remove(key(1));
        assert_eq!((stored.len(), stored.bytes()), (1, 10));
    }
}

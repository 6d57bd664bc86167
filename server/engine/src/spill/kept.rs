//! Which blocks are kept, how large they are, and which goes first: the one used longest ago. Pure.

use std::collections::{BTreeMap, HashMap};

use server_scheduler::BlockKey;

pub(super) struct Kept {
    bytes_max: u64,
    bytes: u64,
    /// Times they were used, counted up.
    uses: u64,
    blocks: HashMap<BlockKey, (u64, u64)>,
    by_use: BTreeMap<u64, BlockKey>,
}

impl Kept {
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

    pub(super) fn has(&self, key: BlockKey) -> bool {
        self.blocks.contains_key(&key)
    }

    /// It is used now. False if it is not kept.
    pub(super) fn touch(&mut self, key: BlockKey) -> bool {
        let Some((used, _)) = self.blocks.get_mut(&key) else { return false };
        self.by_use.remove(used);
        self.uses += 1;
        *used = self.uses;
        self.by_use.insert(self.uses, key);
        true
    }

    /// Keeps one more, unless it is kept.
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

    /// While there is too much: what goes first, which is not kept any more.
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
    fn what_was_used_longest_ago_goes_first_and_no_more_than_is_too_much() {
        let key = |number| BlockKey([number; 32]);
        let mut kept = Kept::new(25);
        for number in 1..=3 {
            kept.add(key(number), 10);
        }
        assert!(kept.touch(key(1)) && !kept.touch(key(9)));
        assert_eq!((kept.pop_excess(), kept.pop_excess()), (Some(key(2)), None));
        assert_eq!((kept.len(), kept.bytes()), (2, 20));
        kept.add(key(1), 10);
        assert_eq!(kept.bytes(), 20, "it is kept once");
        kept.remove(key(1));
        kept.remove(key(1));
        assert_eq!((kept.len(), kept.bytes()), (1, 10));
    }
}

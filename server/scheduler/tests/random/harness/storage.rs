//! The storage of evicted blocks, and the restores from it.

use std::collections::btree_map::Entry as MapEntry;
use std::collections::{BTreeMap, VecDeque};

use super::Harness;
use crate::cache::Entry;
use server_scheduler::{
    BlockHash, BlockKey, BlockKeyScheme, RestoreId, RestoreRequest, RestoreTarget, TokenId, block_hash,
};

#[derive(Default)]
pub(super) struct Storage {
    blocks: BTreeMap<BlockKey, Vec<Entry>>,
    requested: VecDeque<(RestoreId, BlockKey)>,
}

/// Returns a scheme of block keys that identifies adapters by their numbers.
pub(super) fn key_scheme(adapters: u8) -> BlockKeyScheme {
    BlockKeyScheme { block_key, adapters: (0..=adapters).map(|number| BlockKey([number; 32])).collect() }
}

/// Returns the key of a block, which consists of four different hashes of the previous key and the tokens.
fn block_key(previous: BlockKey, tokens: &[TokenId]) -> BlockKey {
    let mut key = [0; 32];
    for (index, word) in (0u64..).zip(key.as_chunks_mut::<8>().0) {
        let quarters = previous.0.as_chunks::<8>().0;
        let parent = quarters.iter().fold(index, |seed, quarter| {
            block_hash(BlockHash(seed ^ u64::from_le_bytes(*quarter)), &[index as u32]).0
        });
        *word = block_hash(BlockHash(parent), tokens).0.to_le_bytes();
    }
    BlockKey(key)
}

impl Storage {
    pub(super) fn insert(&mut self, key: BlockKey, entries: Vec<Entry>) {
        assert!(entries.iter().all(Option::is_some), "an evicted block was computed");
        match self.blocks.entry(key) {
            MapEntry::Vacant(entry) => {
                entry.insert(entries);
            }
            MapEntry::Occupied(entry) => assert_eq!(*entry.get(), entries, "a key identifies one content"),
        }
    }

    /// Removes the block that `random` selects, and returns its key.
    pub(super) fn remove(&mut self, random: u64) -> Option<BlockKey> {
        let at = random.checked_rem(self.blocks.len() as u64)?;
        let key = *self.blocks.keys().nth(at as usize)?;
        self.blocks.remove(&key);
        Some(key)
    }

    pub(super) fn read(&self, key: BlockKey) -> Option<Vec<Entry>> {
        self.blocks.get(&key).cloned()
    }

    pub(super) fn request(&mut self, requests: Vec<RestoreRequest>) {
        for RestoreRequest { id, keys } in requests {
            self.requested.extend(keys.into_iter().map(|key| (id, key)));
        }
    }

    /// Removes and returns the next block to restore.
    pub(super) fn next(&mut self) -> Option<(RestoreId, BlockKey)> {
        self.requested.pop_front()
    }
}

impl Harness {
    /// Stores most of the evicted blocks. Sometimes removes a random stored block, with or without notifying the
    /// scheduler.
    pub(super) fn store_evicted(&mut self) {
        for evicted in self.scheduler.drain_evicted() {
            if !self.random.once_in(6) {
                self.storage.insert(evicted.key, self.cache.block(evicted.block));
                self.scheduler.add_stored(evicted.key);
            }
        }
        if self.random.once_in(4)
            && let Some(removed) = self.storage.remove(self.random.next())
            && self.random.once_in(2)
        {
            self.scheduler.remove_stored(removed);
        }
    }

    /// Clears the cache at random if the scheduler is idle and evicted blocks are stored.
    pub(super) fn clear_cache(&mut self) {
        if self.spills && self.scheduler.is_idle() && self.random.once_in(2) {
            self.scheduler.clear_cache();
            self.store_evicted();
            self.cache.clear();
            self.totals.cleared += 1;
        }
    }

    /// Restores some blocks, and sometimes ends a restore early.
    pub(super) fn restore_blocks(&mut self) {
        for _ in 0..self.random.below(4) {
            let Some((id, key)) = self.storage.next() else { return };
            if self.scheduler.is_restore_active(id) && self.random.once_in(20) {
                self.totals.ended_restores += 1;
                self.scheduler.end_restore(id);
            }
            match self.storage.read(key) {
                None => {
                    self.totals.missing += u32::from(self.scheduler.is_restore_active(id));
                    self.scheduler.remove_stored(key);
                    self.scheduler.end_restore(id);
                }
                Some(entries) => match self.scheduler.begin_block_restore(id) {
                    RestoreTarget::Write(block) => {
                        self.store_evicted();
                        self.cache.set_block(block, &entries);
                        self.check();
                        self.scheduler.finish_block_restore(id);
                        self.totals.restored += 1;
                    }
                    RestoreTarget::AlreadyCached | RestoreTarget::Cancelled => {}
                },
            }
            self.check();
        }
    }
}

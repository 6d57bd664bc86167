//! Evicted blocks that are kept, and those of them that are to come back.

use std::collections::btree_map::Entry as MapEntry;
use std::collections::{BTreeMap, VecDeque};

use super::Harness;
use crate::cache::Entry;
use server_scheduler::{BlockHash, BlockKey, Keying, Place, ReadBack, ReadingId, TokenId, block_hash};

#[derive(Default)]
pub(super) struct Kept {
    blocks: BTreeMap<BlockKey, Vec<Entry>>,
    asked: VecDeque<(ReadingId, BlockKey)>,
}

/// How keys are made of blocks of sequences with these adapters, whose content is their number.
pub(super) fn keying(adapters: u8) -> Keying {
    Keying { key_of, adapters: (0..=adapters).map(|number| BlockKey([number; 32])).collect() }
}

/// Four hashes for one.
fn key_of(before: BlockKey, tokens: &[TokenId]) -> BlockKey {
    let mut key = [0; 32];
    for (index, word) in (0u64..).zip(key.as_chunks_mut::<8>().0) {
        let halves = before.0.as_chunks::<8>().0;
        let parent = halves.iter().fold(index, |seed, half| {
            block_hash(BlockHash(seed ^ u64::from_le_bytes(*half)), &[index as u32]).0
        });
        *word = block_hash(BlockHash(parent), tokens).0.to_le_bytes();
    }
    BlockKey(key)
}

impl Kept {
    pub(super) fn insert(&mut self, key: BlockKey, entries: Vec<Entry>) {
        assert!(entries.iter().all(Option::is_some), "what is evicted was computed");
        match self.blocks.entry(key) {
            MapEntry::Vacant(place) => {
                place.insert(entries);
            }
            MapEntry::Occupied(known) => assert_eq!(*known.get(), entries, "a key is of one content"),
        }
    }

    /// One of them is no more.
    pub(super) fn lose(&mut self, which: u64) -> Option<BlockKey> {
        let at = which.checked_rem(self.blocks.len() as u64)?;
        let key = *self.blocks.keys().nth(at as usize)?;
        self.blocks.remove(&key);
        Some(key)
    }

    pub(super) fn read(&self, key: BlockKey) -> Option<Vec<Entry>> {
        self.blocks.get(&key).cloned()
    }

    pub(super) fn ask(&mut self, reads: Vec<ReadBack>) {
        for ReadBack { id, keys } in reads {
            self.asked.extend(keys.into_iter().map(|key| (id, key)));
        }
    }

    /// The next one that comes.
    pub(super) fn next(&mut self) -> Option<(ReadingId, BlockKey)> {
        self.asked.pop_front()
    }
}

impl Harness {
    /// Copies what was evicted, most of it, and loses some of what there is.
    pub(super) fn keep(&mut self) {
        for evicted in self.scheduler.take_evicted() {
            if !self.random.once_in(6) {
                self.kept.insert(evicted.key, self.cache.block(evicted.block));
                self.scheduler.stored(evicted.key);
            }
        }
        if self.random.once_in(4)
            && let Some(lost) = self.kept.lose(self.random.next())
            && self.random.once_in(2)
        {
            self.scheduler.unstored(lost);
        }
    }

    /// Now and then, if nothing is in work and evicted blocks are kept, all that is cached goes.
    pub(super) fn sleep(&mut self) {
        if self.keeps && self.scheduler.is_idle() && self.random.once_in(2) {
            self.scheduler.forget_cached();
            self.keep();
            self.cache.clear();
            self.totals.slept += 1;
        }
    }

    /// Some blocks come, or one that does not.
    pub(super) fn read_back(&mut self) {
        for _ in 0..self.random.below(4) {
            let Some((id, key)) = self.kept.next() else { return };
            if self.scheduler.wants(id) && self.random.once_in(20) {
                self.totals.late += 1;
                self.scheduler.end_reading(id);
            }
            match self.kept.read(key) {
                None => {
                    self.totals.unreadable += u32::from(self.scheduler.wants(id));
                    self.scheduler.unstored(key);
                    self.scheduler.end_reading(id);
                }
                Some(entries) => match self.scheduler.place(id) {
                    Place::Write(block) => {
                        self.keep();
                        self.cache.set_block(block, &entries);
                        self.check();
                        self.scheduler.placed(id);
                        self.totals.read_back += 1;
                    }
                    Place::Present | Place::Unwanted => {}
                },
            }
            self.check();
        }
    }
}

//! The stored records in the order of their eviction, within the limits of the store. This module is pure: it reads
//! neither a clock nor a disk.
//!
//! A response is useless without the responses that it follows. Therefore only *leaves*, which are records that no
//! other record follows, can be evicted, least recently used first. When a record is removed, the last use of its
//! predecessor becomes the later of the last uses of both records. Apart from listing a chain, each operation takes
//! logarithmic time for each record that it changes or evicts, regardless of the length of the chain.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::id::{Id, Key};
use crate::tenant::Tenant;

/// Number of responses in a chain of `previous_response_id`.
///
/// If exceeded: 400, `invalid_value`.
pub(crate) const CHAIN_MAX: usize = 1024;
/// The content of a record in memory, as one chunk for each write.
pub(super) type Chunks = Arc<Vec<Arc<[u8]>>>;

/// The limits of the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) entries_max: usize,
    pub(super) bytes_max: u64,
}

/// The information that the index stores about a record.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) tenant: Tenant,
    /// The record that this one follows.
    pub(super) previous: Option<Key>,
    pub(super) bytes: u64,
    /// The content, unless the record is on disk.
    pub(super) data: Option<Chunks>,
}

/// The reason why the chain of a record cannot be listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChainError {
    /// The tenant has no record with this ID, for example because the record has been deleted.
    Lost(Id),
    /// The chain has more than [`CHAIN_MAX`] records.
    TooLong,
}

/// All records and the order of their eviction.
#[derive(Debug)]
pub(super) struct Index {
    bounds: Bounds,
    records: HashMap<Key, Record>,
    /// The records that no other record follows, by their last use.
    leaves: BTreeMap<u64, Key>,
    /// For each followed record, stored or not, the number of records that follow it.
    followers: HashMap<Key, usize>,
    /// Number of uses, which serves as the clock of this index.
    uses: u64,
    bytes: u64,
}

#[derive(Debug)]
struct Record {
    /// The number of the last use, which is unique among leaves.
    used: u64,
    entry: Entry,
}

impl Index {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            records: HashMap::new(),
            leaves: BTreeMap::new(),
            followers: HashMap::new(),
            uses: 0,
            bytes: 0,
        }
    }

    /// Returns the record of this tenant under `key`, which then counts as used.
    pub(super) fn get(&mut self, key: Key, tenant: Tenant) -> Option<&mut Entry> {
        self.find(key, tenant)?;
        self.touch(key);
        self.records.get_mut(&key).map(|record| &mut record.entry)
    }

    /// Returns the keys of this tenant's record with `key` and of all its predecessors, latest first. On success, the
    /// record counts as used.
    pub(super) fn chain(&mut self, key: Key, tenant: Tenant) -> Result<Vec<Key>, ChainError> {
        let (mut chain, mut next) = (Vec::new(), Some(key));
        while let Some(key) = next {
            if chain.len() == CHAIN_MAX {
                return Err(ChainError::TooLong);
            }
            next = self.find(key, tenant).ok_or(ChainError::Lost(key.id()))?.previous;
            chain.push(key);
        }
        self.touch(key);
        Ok(chain)
    }

    /// Stores a record, which replaces any record under `key`. Returns the keys of the evicted records, which can
    /// include `key`.
    pub(super) fn insert(&mut self, key: Key, entry: Entry) -> Vec<Key> {
        self.take(key);
        self.uses += 1;
        let used = self.uses;
        self.bytes += entry.bytes;
        if let Some(previous) = entry.previous {
            *self.followers.entry(previous).or_insert(0) += 1;
            if let Some(followed) = self.records.get(&previous) {
                self.leaves.remove(&followed.used);
            }
        }
        self.records.insert(key, Record { used, entry });
        if !self.followers.contains_key(&key) {
            self.leaves.insert(used, key);
        }
        self.evict()
    }

    /// Adds a chunk to a record, which then has `bytes` bytes; `data` is the chunk, unless it is on disk. Returns the
    /// keys of the evicted records, or `None` if the record does not exist, for example because it has been evicted.
    pub(super) fn append(&mut self, key: Key, bytes: u64, data: Option<Arc<[u8]>>) -> Option<Vec<Key>> {
        let Record { entry, .. } = self.records.get_mut(&key)?;
        self.bytes = self.bytes - entry.bytes + bytes;
        entry.bytes = bytes;
        if let (Some(chunks), Some(chunk)) = (&mut entry.data, data) {
            Arc::make_mut(chunks).push(chunk);
        }
        self.touch(key);
        Some(self.evict())
    }

    /// Removes the record of this tenant under `key`. Returns whether it existed.
    pub(super) fn remove(&mut self, key: Key, tenant: Tenant) -> bool {
        self.contains(key, tenant) && self.take(key)
    }

    /// Whether this tenant has a record under `key`.
    pub(super) fn contains(&self, key: Key, tenant: Tenant) -> bool {
        self.find(key, tenant).is_some()
    }

    fn find(&self, key: Key, tenant: Tenant) -> Option<&Entry> {
        let entry = &self.records.get(&key)?.entry;
        (entry.tenant == tenant && tenant != Tenant::NOBODY).then_some(entry)
    }

    fn evict(&mut self) -> Vec<Key> {
        let mut evicted = Vec::new();
        while self.records.len() > self.bounds.entries_max || self.bytes > self.bounds.bytes_max {
            // If files were tampered with, records may follow each other in a cycle, which has no leaf. In this case,
            // an arbitrary record is evicted.
            let oldest = self.leaves.first_key_value().map(|(_, key)| key);
            let Some(&oldest) = oldest.or_else(|| self.records.keys().next()) else { break };
            self.take(oldest);
            evicted.push(oldest);
        }
        evicted
    }

    fn take(&mut self, key: Key) -> bool {
        let Some(Record { used, entry }) = self.records.remove(&key) else { return false };
        self.bytes -= entry.bytes;
        if self.leaves.get(&used) == Some(&key) {
            self.leaves.remove(&used);
        }
        let Some(previous) = entry.previous else { return true };
        let Some(count) = self.followers.get_mut(&previous) else { return true };
        *count -= 1;
        let is_leaf = *count == 0;
        if is_leaf {
            self.followers.remove(&previous);
        }
        if let Some(followed) = self.records.get_mut(&previous) {
            // `used` remains unique among the leaves, because the record that had this value has just been removed.
            followed.used = followed.used.max(used);
            if is_leaf {
                self.leaves.insert(followed.used, previous);
            }
        }
        true
    }

    fn touch(&mut self, key: Key) {
        let Some(record) = self.records.get_mut(&key) else { return };
        self.uses += 1;
        let before = std::mem::replace(&mut record.used, self.uses);
        if self.leaves.get(&before) == Some(&key) {
            self.leaves.remove(&before);
            self.leaves.insert(self.uses, key);
        }
    }
}

#[cfg(test)]
mod tests;

//! Stores responses and conversations in memory, or in a directory that outlives the process, so that later requests
//! can refer to them. The number and the total size of the records are limited; beyond a limit, the least recently used
//! records that no other record follows are evicted. A record is visible to the tenant that created it and to no other.
//!
//! [`index`] and [`disk`] treat records as bytes. [`record`] defines their content. The ID of an object contains the ID
//! of its store ([`id`]).
//!
//! ```text
//! put, get, append, remove ─► Store ─┬─ Index: tenants, order, bounds (and the bytes, if in memory)
//!                                    └─ Directory: a file for each record
//! ```

mod disk;
mod error;
mod id;
mod index;
mod record;

use std::hash::{BuildHasher as _, RandomState};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use server_openai::responses::{Conversation, Item};
use tokio::sync::Semaphore;

use crate::blocking;
use crate::tenant::Tenant;
use disk::Directory;
pub(crate) use error::Error;
use error::{CONVERSATION_BYTES_MAX, CONVERSATION_ITEMS_MAX};
pub(crate) use id::{Id, ItemIds, Kind};
use index::{Bounds, Entry, Index};
pub(crate) use index::{CHAIN_MAX, ChainError};
pub(crate) use record::{ConversationRecord, NewItems, ResponseRecord, StoredItem, StoredRecord, check_ids};
use record::{ItemCounts, Lines};

/// Stored size of a response, or of the items that one request adds to a conversation; the limit is
/// `--max-stored-bytes` if that is less.
///
/// If exceeded: the response has `"store": false`, or fails if it is a background response or is added to a
/// conversation; other requests are rejected with 400, `invalid_value`.
const RECORD_BYTES_MAX: u64 = 32 << 20;
/// Number of threads that read or write stored objects at the same time.
///
/// If exceeded: further requests wait.
const WORKERS_MAX: usize = 8;
/// Number of locks that the conversations share. Only one of the conversations that share a lock is changed at a time.
const LOCKS: usize = 64;

/// The limits and the directory of the store. The fields have the names of the flags.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Number of stored responses and conversations; 0 disables the store.
    pub max_stored_responses: usize,
    /// Total size of the stored responses and conversations in bytes.
    pub max_stored_bytes: u64,
    /// The directory for the records, or `None` to store them in memory.
    pub response_store_dir: Option<PathBuf>,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self { max_stored_responses: 4096, max_stored_bytes: 256 << 20, response_store_dir: None }
    }
}

/// Stores responses and conversations. Clones share the same records.
///
/// The functions that access records may block for a long time, depending on the size of the records and on the disk:
/// see [`Store::run`].
#[derive(Clone, Debug)]
pub(crate) struct Store(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store_id: u64,
    /// A copy of the index's limits, for threads that serve connections. They must not wait for the index, which stays
    /// locked while files are renamed and removed.
    bounds: Bounds,
    /// The secret keys of the hashes from which IDs are generated, so that IDs cannot be guessed.
    random: [RandomState; 2],
    /// Number of IDs that have been generated.
    ids: AtomicU64,
    directory: Option<Directory>,
    index: Mutex<Index>,
    /// The locks of the conversations. A lock is held while one of its conversations is being changed.
    conversations: [Mutex<()>; LOCKS],
    workers: Arc<Semaphore>,
}

/// Whether a record must replace a stored record with the same ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Replacement {
    Optional,
    /// The record is a new version of a stored record. If the stored record has been removed in the meantime, the new
    /// version is not stored, because the removal would otherwise have no effect.
    Required,
}

impl Replacement {
    /// Whether the record can be stored. The index must remain locked until the record is stored.
    fn is_possible(self, index: &Index, key: id::Key, tenant: Tenant) -> bool {
        self == Self::Optional || index.contains(key, tenant)
    }
}

impl Store {
    /// Opens the store and, if a directory is configured, indexes the records in the directory.
    ///
    /// # Errors
    /// The directory cannot be used, or another server uses it.
    pub(crate) fn open(config: &StoreConfig) -> Result<Self, Error> {
        let random = [RandomState::new(), RandomState::new()];
        let bounds = Bounds { entries_max: config.max_stored_responses, bytes_max: config.max_stored_bytes };
        let mut index = Index::new(bounds);
        let mut store_id = random[0].hash_one("store id").max(1);
        let mut directory = None;
        if let Some(path) = &config.response_store_dir {
            let opened = Directory::open(path, store_id)?;
            store_id = opened.store_id;
            let mut evicted = Vec::new();
            for (key, entry) in opened.files {
                evicted.extend(index.insert(key, entry));
            }
            opened.directory.remove(&evicted);
            directory = Some(opened.directory);
        }
        Ok(Self(Arc::new(Inner {
            store_id,
            bounds,
            ids: AtomicU64::new(0),
            random,
            directory,
            index: Mutex::new(index),
            conversations: std::array::from_fn(|_| Mutex::default()),
            workers: Arc::new(Semaphore::new(WORKERS_MAX)),
        })))
    }

    /// Returns the ID of this store, which the IDs of all its objects contain. The ID is never 0.
    pub(crate) fn store_id(&self) -> u64 {
        self.0.store_id
    }

    /// Returns the store ID that is reported to routers, which is 0 if the store is disabled.
    pub(crate) fn id_if_enabled(&self) -> u64 {
        if self.is_enabled() { self.store_id() } else { 0 }
    }

    /// Whether the store can contain any records.
    pub(crate) fn is_enabled(&self) -> bool {
        self.0.bounds.entries_max > 0
    }

    /// Runs `work` on one of at most [`WORKERS_MAX`] threads that may block.
    ///
    /// # Cancel safety
    /// Work that has started is completed.
    pub(crate) async fn run<T: Send + 'static>(&self, work: impl FnOnce(&Self) -> T + Send + 'static) -> T {
        let worker = Arc::clone(&self.0.workers).acquire_owned().await;
        let worker = worker.expect("invariant: the semaphore is never closed");
        let store = self.clone();
        blocking::run(move || {
            let _worker = worker;
            work(&store)
        })
        .await
    }

    /// Returns a unique ID for a new object.
    pub(crate) fn new_id(&self, kind: Kind) -> Id {
        let number = self.0.ids.fetch_add(1, Ordering::Relaxed);
        let [first, second] = &self.0.random;
        let random = (u128::from(first.hash_one(number)) << 64) | u128::from(second.hash_one(number));
        Id::new(kind, self.0.store_id, random)
    }

    /// Returns the record with this ID if it belongs to this tenant. The record and those that it follows count as
    /// used.
    ///
    /// # Errors
    /// The record exists but cannot be read.
    pub(crate) fn get(&self, id: Id, tenant: Tenant) -> Result<Option<StoredRecord>, Error> {
        let entry = self.index().get(id.key(), tenant).cloned();
        entry.map_or(Ok(None), |entry| self.read(id, entry))
    }

    /// Returns the IDs of this response and of those that it follows, latest first.
    ///
    /// # Errors
    /// One of the responses does not exist, or the chain is too long.
    pub(crate) fn chain(&self, id: Id, tenant: Tenant) -> Result<Vec<Id>, ChainError> {
        let chain = self.index().chain(id.key(), tenant)?;
        Ok(chain.into_iter().map(id::Key::id).collect())
    }

    /// Stores a response, which replaces a stored response with the same ID.
    ///
    /// # Errors
    /// The response is too large, is nested too deeply, or cannot be written.
    pub(crate) fn put_response(&self, record: ResponseRecord, tenant: Tenant) -> Result<(), Error> {
        let Some(id) = Id::parse(&record.response.id) else { return Ok(()) };
        let previous = record.response.previous_response_id.as_deref().and_then(Id::parse).map(Id::key);
        let lines = Lines::of_response(record)?;
        let entry = Entry { tenant, previous, bytes: 0, data: None };
        self.put(id, lines, entry, Replacement::Optional)?;
        Ok(())
    }

    /// Stores a new conversation.
    ///
    /// # Errors
    /// The conversation is too large, is nested too deeply, or cannot be written.
    pub(crate) fn put_conversation(&self, record: &ConversationRecord, tenant: Tenant) -> Result<(), Error> {
        let Some(id) = Id::parse(&record.conversation.id) else { return Ok(()) };
        let lines = Lines::of_conversation(record)?;
        let entry = Entry { tenant, previous: None, bytes: 0, data: None };
        self.put(id, lines, entry, Replacement::Optional)?;
        Ok(())
    }

    /// Removes the record with this ID if it belongs to this tenant. Returns whether it existed.
    pub(crate) fn remove(&self, id: Id, tenant: Tenant) -> bool {
        let key = id.key();
        let mut index = self.index();
        let removed = index.remove(key, tenant);
        if let (true, Some(directory)) = (removed, &self.0.directory) {
            directory.remove(&[key]);
        }
        removed
    }

    /// Adds items to a conversation. `items` creates them, given the conversation. Returns the items, or `None` if this
    /// tenant has no such conversation.
    ///
    /// # Errors
    /// The conversation is full, would be too large, or cannot be read or written, the items are nested too deeply, or
    /// `items` fails.
    pub(crate) fn append<E: From<Error>>(
        &self,
        id: Id,
        tenant: Tenant,
        items: impl FnOnce(&StoredRecord) -> Result<NewItems, E>,
    ) -> Result<Option<Vec<Arc<Item>>>, E> {
        let _one = self.lock(id);
        let Some(stored) = self.get(id, tenant)? else { return Ok(None) };
        // Use the size of the record, not that of the file, which is larger if the last write to it was interrupted.
        let bytes = stored.bytes();
        check_room(stored.counts(), bytes)?;
        let NewItems { items, generated_ids } = items(&stored)?;
        // Drop the record first, because the index copies the list of chunks if it is shared.
        drop(stored);
        let lines = Lines::of_items(&items, generated_ids)?.into_bytes();
        let bytes_after = bytes + lines.len() as u64;
        self.check_size(lines.len() as u64, RECORD_BYTES_MAX)?;
        self.check_size(bytes_after, u64::MAX)?;
        let exists = match &self.0.directory {
            None => self.index().append(id.key(), bytes_after, Some(lines.into())).is_some(),
            Some(directory) => {
                let exists = directory.append(id.key(), bytes, &lines)?;
                let mut index = self.index();
                let evicted = if exists { index.append(id.key(), bytes_after, None) } else { None };
                directory.remove(evicted.as_deref().unwrap_or_default());
                evicted.is_some()
            }
        };
        Ok(exists.then_some(items))
    }

    /// Replaces the head of a conversation. Returns the new head, or `None` if this tenant has no such conversation.
    ///
    /// # Errors
    /// The conversation would be too large, or cannot be read or written, or `head` fails.
    pub(crate) fn set_head<E: From<Error>>(
        &self,
        id: Id,
        tenant: Tenant,
        head: impl FnOnce(&StoredRecord) -> Result<Conversation, E>,
    ) -> Result<Option<Conversation>, E> {
        self.rewrite(id, tenant, |stored| {
            let head = head(stored)?;
            Ok((Lines::with_head(stored, &head)?, head))
        })
    }

    /// Removes an item from a conversation. `item` returns the index of the item and a value. Returns this value, or
    /// `None` if this tenant has no such conversation.
    ///
    /// # Errors
    /// The conversation cannot be read or written, or `item` fails.
    pub(crate) fn remove_item<T, E: From<Error>>(
        &self,
        id: Id,
        tenant: Tenant,
        item: impl FnOnce(&StoredRecord) -> Result<(usize, T), E>,
    ) -> Result<Option<T>, E> {
        self.rewrite(id, tenant, |stored| {
            let (number, returned) = item(stored)?;
            Ok((Lines::without(stored, number), returned))
        })
    }

    fn rewrite<T, E: From<Error>>(
        &self,
        id: Id,
        tenant: Tenant,
        rewrite: impl FnOnce(&StoredRecord) -> Result<(Lines, T), E>,
    ) -> Result<Option<T>, E> {
        let _one = self.lock(id);
        let Some(stored) = self.get(id, tenant)? else { return Ok(None) };
        let (lines, returned) = rewrite(&stored)?;
        let entry = Entry { tenant, previous: None, bytes: 0, data: None };
        let exists = self.put(id, lines, entry, Replacement::Required)?;
        Ok(exists.then_some(returned))
    }

    /// Stores a record. This function sets the size and the content of `entry`. Returns whether the record was stored:
    /// a record that must replace a removed record is not stored.
    fn put(&self, id: Id, lines: Lines, entry: Entry, replacement: Replacement) -> Result<bool, Error> {
        let (key, lines) = (id.key(), lines.into_bytes());
        let bytes = lines.len() as u64;
        let limit = match replacement {
            Replacement::Optional => RECORD_BYTES_MAX,
            // Several requests may have added items, each within the limit, so the whole record may exceed it.
            Replacement::Required => u64::MAX,
        };
        self.check_size(bytes, limit)?;
        match &self.0.directory {
            None => {
                let data = Some(Arc::new(vec![lines.into()]));
                let mut index = self.index();
                if !replacement.is_possible(&index, key, entry.tenant) {
                    return Ok(false);
                }
                index.insert(key, Entry { bytes, data, ..entry });
            }
            Some(directory) => {
                let written = directory.write(entry.tenant, entry.previous, &lines)?;
                // Rename the file under the lock of the index, so that the index and the directory agree.
                let mut index = self.index();
                if !replacement.is_possible(&index, key, entry.tenant) {
                    return Ok(false);
                }
                written.place(key)?;
                let evicted = index.insert(key, Entry { bytes, ..entry });
                directory.remove(&evicted);
            }
        }
        Ok(true)
    }

    fn read(&self, id: Id, entry: Entry) -> Result<Option<StoredRecord>, Error> {
        match (entry.data, &self.0.directory) {
            (Some(chunks), _) => Ok(Some(StoredRecord::new(chunks))),
            // The record may have just been evicted. In this case, the file does not exist.
            (None, Some(directory)) => directory.read(id.key(), entry.bytes),
            (None, None) => Ok(None),
        }
    }

    fn check_size(&self, bytes: u64, limit: u64) -> Result<(), Error> {
        let bytes_max = self.0.bounds.bytes_max.min(limit);
        if bytes > bytes_max { Err(Error::TooLarge { bytes, bytes_max }) } else { Ok(()) }
    }

    fn lock(&self, id: Id) -> MutexGuard<'_, ()> {
        let number = self.0.random[0].hash_one(id.key()) as usize % LOCKS;
        self.0.conversations[number].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.0.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks that items can be added to a conversation of this size.
///
/// # Errors
/// The conversation is full ([`Error::Full`]).
pub(crate) fn check_room(counts: ItemCounts, bytes: u64) -> Result<(), Error> {
    let is_full = counts.items >= CONVERSATION_ITEMS_MAX || bytes >= CONVERSATION_BYTES_MAX;
    if is_full { Err(Error::Full { items: counts.items, bytes }) } else { Ok(()) }
}

#[cfg(test)]
mod fuzzing;
#[cfg(test)]
mod tests;

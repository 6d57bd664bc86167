//! Stored responses and conversations, so that later requests can refer to them: in memory, or in a directory that
//! outlives the process. The store is bounded in records and in bytes; beyond a bound the least recently used records
//! are evicted. A record is visible to the tenant that created it and to no other.
//!
//! [`index`] and [`disk`] know records as bytes; what those mean is in [`record`]. Names say by themselves which server
//! stores an object, see [`id`].
//!
//! ```text
//! put, get, append, remove ─► Store ─┬─ Index: tenants, order, bounds (and the bytes, if in memory)
//!                                    └─ Folder: a file for each record
//! ```

mod disk;
mod id;
mod index;
mod record;

use std::hash::{BuildHasher as _, RandomState};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use server_openai::responses::{Conversation, Item};
use tokio::sync::Semaphore;

use crate::tenant::Tenant;
use disk::Folder;
pub(crate) use id::{Id, ItemIds, Kind};
pub(crate) use index::ChainError;
use index::{Bounds, Entry, Index, Size};
use record::Lines;
pub(crate) use record::{ConversationRecord, NewItems, ResponseRecord, Stored, StoredItem, Tally};

/// Number of responses in a chain of `previous_response_id`.
///
/// Beyond it: 400, `invalid_value`.
pub(crate) const CHAIN_MAX: usize = 1024;
/// Number of items at which a conversation accepts no more.
///
/// Beyond it: 400, `array_above_max_length`.
pub(crate) const CONVERSATION_ITEMS_MAX: usize = 8192;
/// Stored size at which a conversation accepts no more items.
///
/// Beyond it: 400, `array_above_max_length`.
pub(crate) const CONVERSATION_BYTES_MAX: u64 = 16 << 20;
/// Stored size of a response, or of the items that one request adds to a conversation.
///
/// Beyond it: the response says `"store": false`; other requests get 400, `invalid_value`.
const RECORD_BYTES_MAX: u64 = 32 << 20;
/// Number of threads that read or write stored objects at the same time.
///
/// Beyond it: requests wait.
const WORKERS_MAX: usize = 8;
/// Locks that the conversations share: one of those with the same lock is changed at a time.
const LOCKS: usize = 64;

/// Nesting depth of the JSON of a stored object. No reader accepts deeper JSON.
///
/// Beyond it: the response says `"store": false`; other requests get 400, `invalid_value`.
const DEPTH_MAX: usize = 127;

/// How much is stored, and where.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Most responses and conversations together; 0 stores none.
    pub entries_max: usize,
    /// Most bytes of all of them.
    pub bytes_max: u64,
    /// Where, if they are to outlive the process.
    pub folder: Option<PathBuf>,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self { entries_max: 4096, bytes_max: 256 << 20, folder: None }
    }
}

/// Why something could not be stored or read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The record is larger than a record may be, or than the whole store.
    #[error("the record has {bytes} bytes; at most {bytes_max} can be stored")]
    TooLarge { bytes: u64, bytes_max: u64 },
    /// Nothing can be added to the conversation.
    #[error(
        "the conversation is full: it has {items} items and {bytes} bytes; the limits are {CONVERSATION_ITEMS_MAX} items \
         and {CONVERSATION_BYTES_MAX} bytes"
    )]
    Full { items: usize, bytes: u64 },
    /// It could not be read again.
    #[error("the JSON is nested more than {DEPTH_MAX} levels deep")]
    TooDeep,
    /// The disk failed.
    #[error("failed to access {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// Another server uses the directory.
    #[error("{} is used by another server", .0.display())]
    Taken(PathBuf),
}

impl Error {
    fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        |source| Self::Io { path, source }
    }
}

/// Stores responses and conversations. Clones share the same records.
///
/// Its functions may block for long, by the size of records and by the disk: see [`Store::run`].
#[derive(Clone, Debug)]
pub(crate) struct Store(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    keeper: u64,
    /// Two keys that nobody knows, so that names cannot be guessed.
    random: [RandomState; 2],
    names: AtomicU64,
    folder: Option<Folder>,
    index: Mutex<Index>,
    /// Each holds while a conversation is changed.
    conversations: [Mutex<()>; LOCKS],
    workers: Arc<Semaphore>,
}

impl Store {
    /// Opens the directory, if one is configured, with the records in it.
    ///
    /// # Errors
    /// It cannot be used, or another server uses it.
    pub(crate) fn open(config: &StoreConfig) -> Result<Self, Error> {
        let random = [RandomState::new(), RandomState::new()];
        let mut index = Index::new(Bounds { entries_max: config.entries_max, bytes_max: config.bytes_max });
        let mut keeper = random[0].hash_one("keeper").max(1);
        let mut folder = None;
        if let Some(path) = &config.folder {
            let opened = Folder::open(path, keeper)?;
            keeper = opened.keeper;
            let mut evicted = Vec::new();
            for (key, entry) in opened.files {
                evicted.extend(index.insert(key, entry));
            }
            opened.folder.remove(&evicted);
            folder = Some(opened.folder);
        }
        Ok(Self(Arc::new(Inner {
            keeper,
            names: AtomicU64::new(0),
            random,
            folder,
            index: Mutex::new(index),
            conversations: std::array::from_fn(|_| Mutex::default()),
            workers: Arc::new(Semaphore::new(WORKERS_MAX)),
        })))
    }

    /// The number that is in the names of everything that is stored here. Never 0.
    pub(crate) fn keeper(&self) -> u64 {
        self.0.keeper
    }

    /// Whether anything is stored at all.
    pub(crate) fn is_on(&self) -> bool {
        self.index().bounds().entries_max > 0
    }

    /// Runs `work` on a thread that may block, no more than [`WORKERS_MAX`] at once.
    ///
    /// # Cancel safety
    /// Work that has begun is completed.
    pub(crate) async fn run<T: Send + 'static>(&self, work: impl FnOnce(&Self) -> T + Send + 'static) -> T {
        let worker = Arc::clone(&self.0.workers).acquire_owned().await;
        let worker = worker.expect("invariant: the semaphore is never closed");
        let store = self.clone();
        let work = move || {
            let _worker = worker;
            work(&store)
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(done) => done,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The process is ending: nobody waits any longer.
                Err(_) => std::future::pending().await,
            },
        }
    }

    /// A name that nothing else has.
    pub(crate) fn name(&self, kind: Kind) -> Id {
        let number = self.0.names.fetch_add(1, Ordering::Relaxed);
        let [first, second] = &self.0.random;
        let random = (u128::from(first.hash_one(number)) << 64) | u128::from(second.hash_one(number));
        Id::new(kind, self.0.keeper, random)
    }

    /// The record of this name, if this tenant has it. It counts as used, and so do the records that it follows.
    ///
    /// # Errors
    /// It exists and cannot be read.
    pub(crate) fn get(&self, id: Id, tenant: Tenant) -> Result<Option<Stored>, Error> {
        let entry = self.index().get(id.key(), tenant).cloned();
        entry.map_or(Ok(None), |entry| self.read(id, entry))
    }

    /// The response of this name and those that it follows, latest first.
    ///
    /// # Errors
    /// One of them does not exist, or there are too many.
    pub(crate) fn chain(&self, id: Id, tenant: Tenant) -> Result<Vec<Id>, ChainError> {
        let chain = self.index().chain(id.key(), tenant)?;
        Ok(chain.into_iter().map(id::Key::id).collect())
    }

    /// Stores a response in place of the one of the same name.
    ///
    /// # Errors
    /// It is too large, or cannot be written.
    pub(crate) fn put_response(&self, record: ResponseRecord, tenant: Tenant) -> Result<(), Error> {
        let Some(id) = Id::parse(&record.response.id) else { return Ok(()) };
        let previous = record.response.previous_response_id.as_deref().and_then(Id::parse).map(Id::key);
        let lines = Lines::of_response(record)?;
        self.put(id, lines, Entry { tenant, previous, bytes: 0, data: None, tally: None })
    }

    /// Stores a new conversation.
    ///
    /// # Errors
    /// It is too large, or cannot be written.
    pub(crate) fn put_conversation(&self, record: &ConversationRecord, tenant: Tenant) -> Result<(), Error> {
        let Some(id) = Id::parse(&record.conversation.id) else { return Ok(()) };
        let lines = Lines::of_conversation(record)?;
        let tally = Some(Tally { items: record.items.len(), named: record.named });
        self.put(id, lines, Entry { tenant, previous: None, bytes: 0, data: None, tally })
    }

    /// Removes the record of this name, if this tenant has it. Returns whether it existed.
    pub(crate) fn remove(&self, id: Id, tenant: Tenant) -> bool {
        let key = id.key();
        let mut index = self.index();
        let removed = index.remove(key, tenant);
        if let (true, Some(folder)) = (removed, &self.0.folder) {
            folder.remove(&[key]);
        }
        removed
    }

    /// Adds items to a conversation; `items` makes them, given what the conversation holds. Returns them, or `None` if
    /// this tenant has no such conversation.
    ///
    /// # Errors
    /// The conversation is full or cannot be written, or `items` fails.
    pub(crate) fn append<E: From<Error>>(
        &self,
        id: Id,
        tenant: Tenant,
        items: impl FnOnce(Tally) -> Result<NewItems, E>,
    ) -> Result<Option<Vec<Arc<Item>>>, E> {
        let _one = self.lock(id);
        let Some(entry) = self.index().get(id.key(), tenant).cloned() else { return Ok(None) };
        let (bytes, tally) = match entry.tally {
            Some(tally) => (entry.bytes, tally),
            // The end of its file may not have been written to its end.
            None => match self.read(id, entry)? {
                Some(stored) => (stored.bytes(), stored.tally()),
                None => return Ok(None),
            },
        };
        check_room(tally, bytes)?;
        let NewItems { items, named } = items(tally)?;
        let lines = Lines::of_items(&items, named)?.into_bytes();
        let tally = Tally { items: tally.items + items.len(), named };
        let size = Size { bytes: bytes + lines.len() as u64, tally };
        self.check_size(lines.len() as u64, RECORD_BYTES_MAX)?;
        self.check_size(size.bytes, u64::MAX)?;
        let exists = match &self.0.folder {
            None => self.index().append(id.key(), size, Some(lines.into())).is_some(),
            Some(folder) => {
                let exists = folder.append(id.key(), bytes, &lines)?;
                let mut index = self.index();
                let evicted = if exists { index.append(id.key(), size, None) } else { None };
                folder.remove(evicted.as_deref().unwrap_or_default());
                evicted.is_some()
            }
        };
        Ok(exists.then_some(items))
    }

    /// Replaces a conversation's head. Returns whether this tenant has such a conversation.
    ///
    /// # Errors
    /// It cannot be read or written.
    pub(crate) fn set_head<E: From<Error>>(
        &self,
        id: Id,
        tenant: Tenant,
        head: impl FnOnce(&Stored) -> Result<Conversation, E>,
    ) -> Result<Option<Conversation>, E> {
        self.rewrite(id, tenant, |stored| {
            let head = head(stored)?;
            Ok((Lines::with_head(stored, &head)?, head))
        })
    }

    /// Removes an item of a conversation; `item` finds its number, and what to return.
    ///
    /// # Errors
    /// The conversation cannot be read or written, or `item` fails.
    pub(crate) fn remove_item<T, E: From<Error>>(
        &self,
        id: Id,
        tenant: Tenant,
        item: impl FnOnce(&Stored) -> Result<(usize, T), E>,
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
        rewrite: impl FnOnce(&Stored) -> Result<(Lines, T), E>,
    ) -> Result<Option<T>, E> {
        let _one = self.lock(id);
        let Some(stored) = self.get(id, tenant)? else { return Ok(None) };
        let (lines, returned) = rewrite(&stored)?;
        self.put(id, lines, Entry { tenant, previous: None, bytes: 0, data: None, tally: None })?;
        Ok(Some(returned))
    }

    /// Stores a record; `entry`: what the index is to know beside its size and content.
    fn put(&self, id: Id, lines: Lines, entry: Entry) -> Result<(), Error> {
        let (key, lines) = (id.key(), lines.into_bytes());
        let bytes = lines.len() as u64;
        self.check_size(bytes, RECORD_BYTES_MAX)?;
        match &self.0.folder {
            None => {
                let data = Some(Arc::new(vec![lines.into()]));
                self.index().insert(key, Entry { bytes, data, ..entry });
            }
            Some(folder) => {
                let written = folder.write(entry.tenant, entry.previous, &lines)?;
                // At once, so that the index and the directory agree.
                let mut index = self.index();
                written.place(key)?;
                let evicted = index.insert(key, Entry { bytes, ..entry });
                folder.remove(&evicted);
            }
        }
        Ok(())
    }

    fn read(&self, id: Id, entry: Entry) -> Result<Option<Stored>, Error> {
        match (entry.data, &self.0.folder) {
            (Some(chunks), _) => Ok(Some(Stored::new(chunks))),
            // It may have been evicted in this moment.
            (None, Some(folder)) => folder.read(id.key(), entry.bytes),
            (None, None) => Ok(None),
        }
    }

    fn check_size(&self, bytes: u64, limit: u64) -> Result<(), Error> {
        let bytes_max = self.index().bounds().bytes_max.min(limit);
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

/// Whether items can be added to a conversation of this size.
///
/// # Errors
/// [`Error::Full`]
pub(crate) fn check_room(tally: Tally, bytes: u64) -> Result<(), Error> {
    let is_full = tally.items >= CONVERSATION_ITEMS_MAX || bytes >= CONVERSATION_BYTES_MAX;
    if is_full { Err(Error::Full { items: tally.items, bytes }) } else { Ok(()) }
}

#[cfg(test)]
mod fuzzing;
#[cfg(test)]
mod tests;

//! What is kept of responses and conversations, so that later requests can refer to it: in memory, or in a
//! directory that outlives the process. It is bounded in number and in bytes, and over a bound what was used least
//! recently goes.
//!
//! What is kept is bytes to [`index`] and [`disk`]; what they mean is in [`record`]. Names say by themselves which
//! server keeps a thing, see [`id`].
//!
//! ```text
//! put, get, remove ─► Store ─┬─ Index: order, bounds (and the bytes, if in memory)
//!                            └─ Folder: a file for each, written whole or not at all
//! ```

mod disk;
mod id;
mod index;
mod record;

use std::hash::{BuildHasher as _, RandomState};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use disk::Folder;
pub(crate) use id::{Id, ItemIds, Kind};
use index::{Bounds, Index};
pub(crate) use record::{ConversationRecord, Record, ResponseRecord};

/// Most responses that one may follow, one after the other.
pub(crate) const CHAIN_MAX: usize = 1024;

/// Deepest nesting of what is kept: no reader goes deeper. A request that is nested as deep as it may is a little deeper
/// within its record.
const DEPTH_MAX: usize = 127;

/// How much is kept, and where.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Most responses and conversations together; 0 keeps none.
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

/// Why something could not be kept, or not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// It is larger than all that may be kept.
    #[error("it has {bytes} bytes, and {bytes_max} may be kept in all")]
    TooLarge { bytes: u64, bytes_max: u64 },
    /// It could not be read again.
    #[error("it is nested deeper than {DEPTH_MAX}")]
    TooDeep,
    /// The disk does not do it.
    #[error("failed to access {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// What is in the file is not what was written.
    #[error("failed to understand what is kept as {name}")]
    Damaged {
        name: String,
        #[source]
        source: serde_json::Error,
    },
    /// Another server has the directory.
    #[error("{} is used by another server", .0.display())]
    Taken(PathBuf),
}

impl Error {
    fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        |source| Self::Io { path, source }
    }
}

/// Keeps responses and conversations. Clones are of the same.
///
/// Its functions wait for the disk if there is a directory: see [`Store::with`].
#[derive(Clone, Debug)]
pub(crate) struct Store(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    keeper: u64,
    /// From two keys that nobody knows, so that names cannot be guessed.
    random: [RandomState; 2],
    names: AtomicU64,
    folder: Option<Folder>,
    index: Mutex<Index>,
    /// One at a time changes a conversation.
    conversations: Mutex<()>,
}

impl Store {
    /// Opens the directory, if there is one, with what is in it.
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
            let mut dropped = Vec::new();
            for file in opened.files {
                dropped.extend(index.insert(file.key, (file.bytes, None), file.previous));
            }
            opened.folder.remove(&dropped);
            folder = Some(opened.folder);
        }
        Ok(Self(Arc::new(Inner {
            keeper,
            names: AtomicU64::new(0),
            random,
            folder,
            index: Mutex::new(index),
            conversations: Mutex::default(),
        })))
    }

    /// The number that is in the names of all that is kept here. Never 0.
    pub(crate) fn keeper(&self) -> u64 {
        self.0.keeper
    }

    /// Whether anything is kept at all.
    pub(crate) fn is_on(&self) -> bool {
        self.index().bounds().entries_max > 0
    }

    /// Does `work` where it may wait for the disk.
    ///
    /// # Cancel safety
    /// Work that has begun is done.
    pub(crate) async fn with<T: Send + 'static>(&self, work: impl FnOnce(&Self) -> T + Send + 'static) -> T {
        if self.0.folder.is_none() {
            return work(self);
        }
        let store = self.clone();
        match tokio::task::spawn_blocking(move || work(&store)).await {
            Ok(done) => done,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The process is ending: nobody waits for it any more.
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

    /// What is kept under this name. It counts as used, and so does what it follows.
    ///
    /// # Errors
    /// It is there and cannot be read.
    pub(crate) fn get<R: Record>(&self, id: Id) -> Result<Option<R>, Error> {
        let key = id.key();
        if key.kind() != R::KIND {
            return Ok(None);
        }
        let Some(data) = self.index().get(key) else { return Ok(None) };
        let bytes = match (data, &self.0.folder) {
            (Some(bytes), _) => bytes,
            (None, Some(folder)) => match folder.read(key)? {
                Some(bytes) => bytes,
                // It went in this moment.
                None => return Ok(None),
            },
            (None, None) => return Ok(None),
        };
        let damaged = |source| Error::Damaged { name: key.to_string(), source };
        serde_json::from_slice(&bytes).map(Some).map_err(damaged)
    }

    /// Keeps this under its name, in place of what was kept under it.
    ///
    /// # Errors
    /// It is too large, or cannot be written.
    pub(crate) fn put<R: Record>(&self, record: &R) -> Result<(), Error> {
        let Some(key) = Id::parse(record.name()).map(Id::key) else { return Ok(()) };
        let previous = record.previous().and_then(Id::parse).map(Id::key);
        let bytes = serde_json::to_vec(record).expect("invariant: a record is JSON");
        let size = bytes.len() as u64;
        let bytes_max = self.index().bounds().bytes_max;
        if size > bytes_max {
            return Err(Error::TooLarge { bytes: size, bytes_max });
        }
        if depth(&bytes) > DEPTH_MAX {
            return Err(Error::TooDeep);
        }
        let dropped = match &self.0.folder {
            None => self.index().insert(key, (size, Some(bytes.into())), previous),
            Some(folder) => {
                let written = folder.write(previous, &bytes)?;
                // As one: what the index has is on the disk.
                let mut index = self.index();
                written.place(key)?;
                let dropped = index.insert(key, (size, None), previous);
                folder.remove(&dropped);
                Vec::new()
            }
        };
        drop(dropped);
        Ok(())
    }

    /// Forgets what is kept under this name. Returns whether there was anything.
    pub(crate) fn remove(&self, id: Id) -> bool {
        let key = id.key();
        let mut index = self.index();
        let removed = index.remove(key);
        if let (true, Some(folder)) = (removed, &self.0.folder) {
            folder.remove(&[key]);
        }
        removed
    }

    /// Reads a conversation, changes it and keeps it, as one. `None` if there is no such.
    ///
    /// # Errors
    /// It cannot be read or written.
    pub(crate) fn change<T>(
        &self,
        id: Id,
        change: impl FnOnce(&mut ConversationRecord) -> T,
    ) -> Result<Option<T>, Error> {
        let _one = self.0.conversations.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut record) = self.get::<ConversationRecord>(id)? else { return Ok(None) };
        let changed = change(&mut record);
        self.put(&record)?;
        Ok(Some(changed))
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.0.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How deep this JSON is nested.
fn depth(json: &[u8]) -> usize {
    let (mut depth, mut deepest, mut in_string, mut is_escaped) = (0_usize, 0, false, false);
    for byte in json {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests;

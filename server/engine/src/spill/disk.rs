//! The files of stored blocks, and the two threads that write and read them.
//!
//! Each block is a file named after its key, in a directory named after the identity of the model. The file is written
//! under another name and then renamed, so that it is complete or does not exist. Its header contains the key and a
//! checksum, so that damage is detected.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use server_scheduler::{BlockKey, RestoreId};
use xxhash_rust::xxh3::Xxh3Default;

use super::config::SpillConfig;
use crate::runner::CacheLayout;
use crate::waker::Waker;

/// The size of the header: a magic number, the key, and the checksum of the key and the content.
pub(super) const HEADER_BYTES: u64 = 8 + 32 + 8;
/// The magic number, which changes with the format of files and keys.
const MAGIC: [u8; 8] = *b"OVFLKV02";
/// The prefix of the names of directories, each of which contains the blocks of one model and configuration.
const DIRECTORY: &str = "ovfleet-kv-";
/// The name of the lock file.
const LOCK: &str = "ovfleet-kv.lock";
/// The suffix of complete files.
const SUFFIX: &str = ".kv";
/// The suffix of incomplete files.
const UNFINISHED: &str = ".part";
/// The interval between attempts to lock the directory.
const LOCK_INTERVAL: Duration = Duration::from_secs(1);
/// Number of bytes that are read at a time to hash the files of the model.
const CHUNK_BYTES: usize = 1 << 20;

/// A request to the writer, which removes the blocks in `remove` before it writes `block`.
pub(super) struct WriteRequest {
    pub(super) remove: Vec<BlockKey>,
    pub(super) block: Option<WriteBlock>,
}

pub(super) struct WriteBlock {
    pub(super) key: BlockKey,
    pub(super) content: Vec<u8>,
}

/// A result of the writer.
pub(super) enum WriteResult {
    /// The directory is open. The list contains the keys and file sizes of the blocks that were already stored, least
    /// recently written first.
    Opened(Vec<(BlockKey, u64)>),
    Written(BlockKey),
    Failed(BlockKey),
}

/// A request to the reader: the blocks of a restore, in order.
pub(super) struct ReadRequest {
    pub(super) restore: RestoreId,
    pub(super) keys: Vec<BlockKey>,
    /// Whether the blocks are still needed. The value is false once the restore has ended.
    pub(super) is_needed: Arc<AtomicBool>,
}

/// The next block of a restore.
pub(super) struct ReadBlock {
    pub(super) restore: RestoreId,
    pub(super) key: BlockKey,
    /// `None` if the block could not be read. In this case, the reader skips the rest of the restore.
    pub(super) content: Option<Vec<u8>>,
}

/// Sends the results of a thread to the engine's thread.
pub(super) struct ResultSender<T> {
    pub(super) results: SyncSender<T>,
    pub(super) waker: Waker,
}

impl<T> ResultSender<T> {
    /// Sends a result. Returns false if the engine has ended.
    fn send(&self, result: T) -> bool {
        let is_sent = self.results.send(result).is_ok();
        self.waker.wake();
        is_sent
    }
}

/// Opens the directory, and writes and removes blocks.
pub(super) struct Writer {
    config: SpillConfig,
    layout: CacheLayout,
    /// The directory of the block files, once it is known.
    directory: Arc<OnceLock<PathBuf>>,
    results: ResultSender<WriteResult>,
    /// Whether the last write failed, so that repeated failures are logged once.
    has_failed: bool,
}

/// Reads blocks.
pub(super) struct Reader {
    block_bytes: usize,
    directory: Arc<OnceLock<PathBuf>>,
    blocks: ResultSender<ReadBlock>,
    /// Whether the last read failed, so that repeated failures are logged once.
    has_failed: bool,
}

pub(super) fn workers(
    config: &SpillConfig,
    layout: CacheLayout,
    results: ResultSender<WriteResult>,
    blocks: ResultSender<ReadBlock>,
) -> (Writer, Reader) {
    let directory = Arc::new(OnceLock::new());
    let block_bytes = layout.block_bytes as usize;
    let reader = Reader { block_bytes, directory: Arc::clone(&directory), blocks, has_failed: false };
    (Writer { config: config.clone(), layout, directory, results, has_failed: false }, reader)
}

impl Writer {
    /// Processes requests until the engine ends and the queue is empty.
    pub(super) fn run(mut self, writes: &Receiver<WriteRequest>) {
        let path = self.config.directory.clone();
        let opened = self.lock(writes).and_then(|lock| match lock {
            Some(lock) => self.open().map(|files| Some((lock, files))),
            None => Ok(None),
        });
        // The directory remains locked while this file is open.
        let _lock = match opened {
            Ok(None) => return,
            Ok(Some((lock, files))) => {
                tracing::info!(blocks = files.len(), directory = %path.display(), "opened the directory for evicted blocks");
                self.results.send(WriteResult::Opened(files));
                lock
            }
            Err(error) => {
                tracing::warn!(%error, directory = %path.display(), "failed to open the directory for evicted blocks, continuing without it");
                return;
            }
        };
        while let Ok(write) = writes.recv() {
            self.process(write);
        }
    }

    /// Locks the directory, and waits while another server uses it. `None` if the engine ends before the directory is
    /// locked.
    fn lock(&self, writes: &Receiver<WriteRequest>) -> io::Result<Option<File>> {
        fs::create_dir_all(&self.config.directory)?;
        let path = self.config.directory.join(LOCK);
        let lock = File::options().read(true).append(true).create(true).open(path)?;
        let mut is_logged = false;
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(Some(lock)),
                Err(TryLockError::Error(error)) => return Err(error),
                Err(TryLockError::WouldBlock) => {}
            }
            if !std::mem::replace(&mut is_logged, true) {
                let directory = self.config.directory.display();
                tracing::warn!(%directory, "another server uses the directory for evicted blocks; waiting for that server to exit");
            }
            match writes.recv_timeout(LOCK_INTERVAL) {
                // The engine sends nothing before the directory is open.
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
            }
        }
    }

    /// Creates the directory for the blocks of this model if it does not exist, and lists the stored blocks, oldest
    /// first. Removes the blocks of other models, incomplete files, and the oldest blocks beyond the size limit.
    fn open(&self) -> io::Result<Vec<(BlockKey, u64)>> {
        let name = format!("{DIRECTORY}{:032x}", self.identity()?);
        for entry in fs::read_dir(&self.config.directory)? {
            let entry = entry?;
            let is_other =
                entry.file_name().to_str().is_some_and(|other| is_directory(other) && other != name);
            if is_other && let Err(error) = fs::remove_dir_all(entry.path()) {
                tracing::warn!(
                    %error, directory = %entry.path().display(),
                    "failed to remove the blocks of another model or configuration"
                );
            }
        }
        let directory = self.config.directory.join(name);
        // Only the owner may read the files, because prompts could be reconstructed from them.
        DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        let mut files = Vec::new();
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_str().unwrap_or_default();
            let Some(key) = name.strip_suffix(SUFFIX).and_then(parse) else {
                if name.ends_with(UNFINISHED) {
                    fs::remove_file(entry.path())?;
                }
                continue;
            };
            let metadata = entry.metadata()?;
            if metadata.len() == HEADER_BYTES + self.layout.block_bytes {
                let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                files.push((modified, key, metadata.len()));
            } else {
                fs::remove_file(entry.path())?;
            }
        }
        files.sort_unstable_by_key(|&(modified, key, _)| (modified, key));
        let mut excess: u64 = files.iter().map(|&(_, _, bytes)| bytes).sum();
        excess = excess.saturating_sub(self.config.bytes_max);
        let mut stored = Vec::with_capacity(files.len());
        for (_, key, bytes) in files {
            if excess == 0 {
                stored.push((key, bytes));
            } else {
                fs::remove_file(file(&directory, key))?;
                excess = excess.saturating_sub(bytes);
            }
        }
        self.directory.get_or_init(|| directory);
        Ok(stored)
    }

    /// A hash of the inputs, other than tokens and adapters, on which the content of a block depends.
    fn identity(&self) -> io::Result<u128> {
        let mut hash = Xxh3Default::new();
        hash.update(&MAGIC);
        let CacheLayout { block_tokens, block_bytes, vocabulary, .. } = self.layout;
        let layout =
            format!("{block_tokens} {block_bytes} {vocabulary} {}", self.config.identity.description);
        hash.update(layout.as_bytes());
        let mut chunk = vec![0; CHUNK_BYTES];
        for path in &self.config.identity.files {
            let mut file = File::open(path)?;
            hash.update(&file.metadata()?.len().to_le_bytes());
            loop {
                match file.read(&mut chunk)? {
                    0 => break,
                    count => hash.update(&chunk[..count]),
                }
            }
        }
        Ok(hash.digest128())
    }

    fn process(&mut self, WriteRequest { remove, block }: WriteRequest) {
        let directory =
            self.directory.get().expect("invariant: the directory is open before the first request");
        for key in remove {
            // A file that could not be removed is listed again at the next start.
            let _ = fs::remove_file(file(directory, key));
        }
        let Some(WriteBlock { key, content }) = block else { return };
        let written = write(directory, key, &content);
        if std::mem::replace(&mut self.has_failed, written.is_err()) != written.is_err() {
            match &written {
                Ok(()) => tracing::info!("evicted blocks can be written again"),
                Err(error) => {
                    tracing::warn!(%error, directory = %directory.display(), "failed to write an evicted block")
                }
            }
        }
        self.results.send(if written.is_ok() { WriteResult::Written(key) } else { WriteResult::Failed(key) });
    }
}

impl Reader {
    /// Processes requests until the engine ends.
    pub(super) fn run(mut self, reads: &Receiver<ReadRequest>) {
        while let Ok(ReadRequest { restore, keys, is_needed }) = reads.recv() {
            for key in keys {
                if !is_needed.load(Ordering::Acquire) {
                    break;
                }
                let content = self.read(key);
                let has_failed = content.is_none();
                if !self.blocks.send(ReadBlock { restore, key, content }) {
                    return;
                }
                if has_failed {
                    break;
                }
            }
        }
    }

    /// Reads the content of a block. `None` if the block cannot be read or is damaged.
    fn read(&mut self, key: BlockKey) -> Option<Vec<u8>> {
        let path = file(self.directory.get()?, key);
        let block = self.try_read(&path, key);
        if let Err(error) = &block
            && !self.has_failed
        {
            tracing::warn!(%error, file = %path.display(), "failed to read an evicted block, computing it instead");
        }
        self.has_failed = block.is_err();
        block.ok()
    }

    fn try_read(&self, path: &Path, key: BlockKey) -> io::Result<Vec<u8>> {
        let invalid_data = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let mut file = File::open(path)?;
        let mut header = [0; HEADER_BYTES as usize];
        file.read_exact(&mut header)?;
        if header[..8] != MAGIC || header[8..40] != key.0 {
            return Err(invalid_data("the header does not match the format or the file name"));
        }
        let mut block = vec![0; self.block_bytes];
        file.read_exact(&mut block)?;
        if checksum(key, &block) != header[40..] {
            return Err(invalid_data("the checksum does not match the content"));
        }
        Ok(block)
    }
}

/// The checksum of a block. It includes the key, so that the content of another block is detected.
fn checksum(key: BlockKey, block: &[u8]) -> [u8; 8] {
    let mut hash = Xxh3Default::new();
    hash.update(&key.0);
    hash.update(block);
    hash.digest().to_le_bytes()
}

fn write(directory: &Path, key: BlockKey, block: &[u8]) -> io::Result<()> {
    let path = file(directory, key);
    let part = path.with_extension(&UNFINISHED[1..]);
    let written = File::create(&part).and_then(|mut file| {
        file.write_all(&MAGIC)?;
        file.write_all(&key.0)?;
        file.write_all(&checksum(key, block))?;
        file.write_all(block)
    });
    let written = written.and_then(|()| fs::rename(&part, &path));
    if written.is_err() {
        // If this fails, the incomplete file is removed at the next start.
        let _ = fs::remove_file(&part);
    }
    written
}

fn file(directory: &Path, key: BlockKey) -> PathBuf {
    let mut name: String = key.0.iter().map(|byte| format!("{byte:02x}")).collect();
    name.push_str(SUFFIX);
    directory.join(name)
}

/// Parses a key from a file name without its suffix.
fn parse(name: &str) -> Option<BlockKey> {
    if name.len() != 64 || !name.is_ascii() {
        return None;
    }
    let mut key = [0; 32];
    for (at, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&name[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(BlockKey(key))
}

fn is_directory(name: &str) -> bool {
    name.strip_prefix(DIRECTORY)
        .is_some_and(|hash| hash.len() == 32 && u128::from_str_radix(hash, 16).is_ok())
}

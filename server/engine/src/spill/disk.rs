//! The files, and the two threads that write and read them.
//!
//! A block is a file, named by its key, in a directory that is named by what its bytes depend on. It is written
//! elsewhere and renamed, so it is there whole or not at all, and its first bytes tell what it is and what its content
//! adds up to, so whatever becomes of it is noticed.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use server_scheduler::BlockKey;
use xxhash_rust::xxh3::Xxh3Default;

use super::{Block, Read, SpillConfig, Teller, Write, Written};
use crate::runner::CacheLayout;

/// What a file begins with: what it is, its key, and the checksum of its key and of what follows.
pub(super) const HEADER_BYTES: u64 = 8 + 32 + 8;
/// Changes with the form of files and of keys.
const MAGIC: [u8; 8] = *b"OVFLKV02";
/// How the directories begin that hold the blocks of one model.
const FOLDER: &str = "ovfleet-kv-";
/// The file that is locked.
const LOCK: &str = "ovfleet-kv.lock";
/// How files end that are whole,
const SUFFIX: &str = ".kv";
/// and how those that are not.
const UNFINISHED: &str = ".part";
/// How often another server is looked for that may have ended.
const LOCK_PAUSE: Duration = Duration::from_secs(1);
/// Bytes that are read at once of files that go into the name of the directory.
const CHUNK_BYTES: usize = 1 << 20;

/// Writes, removes, and at first looks around.
pub(super) struct Writer {
    config: SpillConfig,
    layout: CacheLayout,
    /// Where the files are, once that is known.
    folder: Arc<OnceLock<PathBuf>>,
    teller: Teller<Written>,
    /// Whether the last write failed, which was told then.
    fails: bool,
}

/// Reads.
pub(super) struct Reader {
    block_bytes: usize,
    folder: Arc<OnceLock<PathBuf>>,
    teller: Teller<Block>,
    /// Whether the last block could not be read, which was told then.
    fails: bool,
}

pub(super) fn workers(
    config: &SpillConfig,
    layout: CacheLayout,
    (write, read): (Teller<Written>, Teller<Block>),
) -> (Writer, Reader) {
    let folder = Arc::new(OnceLock::new());
    let block_bytes = layout.block_bytes as usize;
    let reader = Reader { block_bytes, folder: Arc::clone(&folder), teller: read, fails: false };
    (Writer { config: config.clone(), layout, folder, teller: write, fails: false }, reader)
}

impl Writer {
    /// Works until the engine ends, and on what is queued then.
    pub(super) fn run(mut self, writes: &Receiver<Write>) {
        let path = self.config.folder.clone();
        let opened = self.lock(writes).and_then(|lock| match lock {
            Some(lock) => self.open().map(|files| Some((lock, files))),
            None => Ok(None),
        });
        // As long as it is open, it is locked.
        let _lock = match opened {
            Ok(None) => return,
            Ok(Some((lock, files))) => {
                tracing::info!(blocks = files.len(), folder = %path.display(), "evicted blocks are kept");
                self.teller.tell(Written::Found(files));
                lock
            }
            Err(error) => {
                tracing::warn!(%error, folder = %path.display(), "evicted blocks are not kept: failed to open the directory");
                return;
            }
        };
        while let Ok(write) = writes.recv() {
            self.carry_out(write);
        }
    }

    /// Waits until the directory is this server's. `None` if the engine ends before.
    fn lock(&self, writes: &Receiver<Write>) -> io::Result<Option<File>> {
        fs::create_dir_all(&self.config.folder)?;
        let path = self.config.folder.join(LOCK);
        let lock = File::options().read(true).append(true).create(true).open(path)?;
        let mut is_told = false;
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(Some(lock)),
                Err(TryLockError::Error(error)) => return Err(error),
                Err(TryLockError::WouldBlock) => {}
            }
            if !std::mem::replace(&mut is_told, true) {
                let folder = self.config.folder.display();
                tracing::warn!(%folder, "another server keeps its evicted blocks there: waiting for it to end");
            }
            match writes.recv_timeout(LOCK_PAUSE) {
                // Nothing is sent before the directory is open.
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
            }
        }
    }

    /// Finds what is kept of this model, oldest first, and removes what is of others and what is too much.
    fn open(&self) -> io::Result<Vec<(BlockKey, u64)>> {
        let name = format!("{FOLDER}{:032x}", self.identity()?);
        for entry in fs::read_dir(&self.config.folder)? {
            let entry = entry?;
            let is_other = entry.file_name().to_str().is_some_and(|other| is_folder(other) && other != name);
            if is_other && let Err(error) = fs::remove_dir_all(entry.path()) {
                tracing::warn!(%error, folder = %entry.path().display(), "failed to remove blocks of another model");
            }
        }
        let folder = self.config.folder.join(name);
        // Prompts can be made out of what is there.
        DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let mut files = Vec::new();
        for entry in fs::read_dir(&folder)? {
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
                let when = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                files.push((when, key, metadata.len()));
            } else {
                fs::remove_file(entry.path())?;
            }
        }
        files.sort_unstable_by_key(|&(when, key, _)| (when, key));
        let mut excess: u64 = files.iter().map(|&(_, _, bytes)| bytes).sum();
        excess = excess.saturating_sub(self.config.bytes_max);
        let mut kept = Vec::with_capacity(files.len());
        for (_, key, bytes) in files {
            if excess == 0 {
                kept.push((key, bytes));
            } else {
                fs::remove_file(file(&folder, key))?;
                excess = excess.saturating_sub(bytes);
            }
        }
        self.folder.get_or_init(|| folder);
        Ok(kept)
    }

    /// What the bytes of a block depend on.
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

    fn carry_out(&mut self, Write { remove, keep }: Write) {
        let folder = self.folder.get().expect("invariant: set before anything is written");
        for key in remove {
            // What could not be removed is found at the next start, and too much then.
            let _ = fs::remove_file(file(folder, key));
        }
        let Some((key, block)) = keep else { return };
        let written = write(folder, key, &block);
        if std::mem::replace(&mut self.fails, written.is_err()) != written.is_err() {
            match &written {
                Ok(()) => tracing::info!("evicted blocks can be written again"),
                Err(error) => {
                    tracing::warn!(%error, folder = %folder.display(), "failed to write an evicted block")
                }
            }
        }
        self.teller.tell(if written.is_ok() { Written::Kept(key) } else { Written::Lost(key) });
    }
}

impl Reader {
    /// Works until the engine ends.
    pub(super) fn run(mut self, reads: &Receiver<Read>) {
        while let Ok(Read { reading, keys, wanted }) = reads.recv() {
            for key in keys {
                if !wanted.load(Ordering::Acquire) {
                    break;
                }
                let bytes = self.read(key);
                let is_last = bytes.is_none();
                if !self.teller.tell(Block { reading, key, bytes }) {
                    return;
                }
                if is_last {
                    break;
                }
            }
        }
    }

    /// The content of a block's file.
    fn read(&mut self, key: BlockKey) -> Option<Vec<u8>> {
        let path = file(self.folder.get()?, key);
        let block = self.try_read(&path, key);
        if let Err(error) = &block
            && !self.fails
        {
            tracing::warn!(%error, file = %path.display(), "failed to read a block back: it is computed");
        }
        self.fails = block.is_err();
        block.ok()
    }

    fn try_read(&self, path: &Path, key: BlockKey) -> io::Result<Vec<u8>> {
        let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let mut file = File::open(path)?;
        let mut header = [0; HEADER_BYTES as usize];
        file.read_exact(&mut header)?;
        if header[..8] != MAGIC || header[8..40] != key.0 {
            return Err(wrong("it is not what its name says"));
        }
        let mut block = vec![0; self.block_bytes];
        file.read_exact(&mut block)?;
        if checksum(key, &block) != header[40..] {
            return Err(wrong("it is damaged"));
        }
        Ok(block)
    }
}

/// The checksum of a block. The key is in it, so that a content that came into the file of another block is noticed.
fn checksum(key: BlockKey, block: &[u8]) -> [u8; 8] {
    let mut hash = Xxh3Default::new();
    hash.update(&key.0);
    hash.update(block);
    hash.digest().to_le_bytes()
}

fn write(folder: &Path, key: BlockKey, block: &[u8]) -> io::Result<()> {
    let path = file(folder, key);
    let part = path.with_extension(&UNFINISHED[1..]);
    let written = File::create(&part).and_then(|mut file| {
        file.write_all(&MAGIC)?;
        file.write_all(&key.0)?;
        file.write_all(&checksum(key, block))?;
        file.write_all(block)
    });
    let written = written.and_then(|()| fs::rename(&part, &path));
    if written.is_err() {
        // Nothing to be done if even this fails.
        let _ = fs::remove_file(&part);
    }
    written
}

fn file(folder: &Path, key: BlockKey) -> PathBuf {
    let mut name: String = key.0.iter().map(|byte| format!("{byte:02x}")).collect();
    name.push_str(SUFFIX);
    folder.join(name)
}

/// The key of a file's name without its end.
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

fn is_folder(name: &str) -> bool {
    name.strip_prefix(FOLDER).is_some_and(|hash| hash.len() == 32 && u128::from_str_radix(hash, 16).is_ok())
}

//! What is kept in a directory: a file for each, that is written elsewhere and then renamed, so that it is there
//! whole or not at all. A file's first line has its number, by which they are in order (clocks are too coarse for
//! that, and go back), and names what it follows: so neither needs all to be read.
//!
//! The directory belongs to one server at a time, which holds a lock on it. Its number is in the directory as well:
//! the names that it has given are its own after a restart too.

use std::fs::{File, TryLockError};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tempfile::NamedTempFile;

use super::Error;
use super::id::Key;

/// The file that is locked, and has the number.
const KEEPER: &str = "keeper";
/// How files end that are whole.
const SUFFIX: &str = ".json";
/// How those begin that are not: what a server leaves that dies while it writes.
const UNFINISHED: &str = "unfinished-";
/// Longest first line.
const LINE_BYTES_MAX: u64 = 128;

/// The directory.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// Of the next file.
    number: AtomicU64,
    /// As long as it is open, it is locked.
    _lock: File,
}

/// The directory as it was found.
pub(super) struct Opened {
    pub(super) folder: Folder,
    pub(super) keeper: u64,
    /// Those that are whole, oldest first.
    pub(super) files: Vec<Found>,
}

/// A file that was found.
pub(super) struct Found {
    pub(super) key: Key,
    pub(super) bytes: u64,
    pub(super) previous: Option<Key>,
}

/// A file that is not in its place yet. Dropped before, it is no more.
pub(super) struct Written<'a> {
    folder: &'a Folder,
    file: NamedTempFile,
}

impl Folder {
    /// Opens the directory, and makes it if need be. `keeper`: the number, if it has none yet.
    pub(super) fn open(path: &Path, keeper: u64) -> Result<Opened, Error> {
        std::fs::create_dir_all(path).map_err(Error::io(path))?;
        let lock_path = path.join(KEEPER);
        let lock = File::options().read(true).append(true).create(true).open(&lock_path);
        let mut lock = lock.map_err(Error::io(&lock_path))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => Error::Taken(path.to_owned()),
            TryLockError::Error(source) => Error::Io { path: lock_path.clone(), source },
        })?;
        let known = std::fs::read_to_string(&lock_path).map_err(Error::io(&lock_path))?;
        let known = known.lines().rev().find_map(|line| u64::from_str_radix(line, 16).ok());
        let keeper = match known.filter(|&known| known != 0) {
            Some(known) => known,
            None => {
                let line = format!("\n{keeper:016x}\n");
                lock.write_all(line.as_bytes())
                    .and_then(|()| lock.sync_all())
                    .map_err(Error::io(&lock_path))?;
                keeper
            }
        };
        let folder = Self { path: path.to_owned(), number: AtomicU64::new(0), _lock: lock };
        let files = folder.files()?;
        Ok(Opened { folder, keeper, files })
    }

    /// All files that are whole, oldest first; what was never finished is removed.
    fn files(&self) -> Result<Vec<Found>, Error> {
        let mut files: Vec<(u64, Found)> = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(Error::io(&self.path))? {
            let entry = entry.map_err(Error::io(&self.path))?;
            let (name, path) = (entry.file_name(), entry.path());
            let Some(name) = name.to_str() else { continue };
            if name.starts_with(UNFINISHED) {
                std::fs::remove_file(&path).map_err(Error::io(&path))?;
                continue;
            }
            let Some(key) = name.strip_suffix(SUFFIX).and_then(Key::parse) else { continue };
            let (number, bytes, previous) = look(&path).map_err(Error::io(&path))?;
            files.push((number, Found { key, bytes, previous }));
        }
        files.sort_by_key(|(number, found)| (*number, found.key));
        let next = files.last().map_or(0, |(number, _)| number.saturating_add(1));
        self.number.store(next, Ordering::Relaxed);
        Ok(files.into_iter().map(|(_, found)| found).collect())
    }

    /// What is kept under `key`; `None` if there is nothing.
    pub(super) fn read(&self, key: Key) -> Result<Option<Arc<[u8]>>, Error> {
        let path = self.file(key);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(Error::Io { path, source }),
        };
        let line = bytes.iter().position(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        Ok(Some(bytes[line..].into()))
    }

    /// Writes what is to be kept, to be put into its place.
    pub(super) fn write(&self, previous: Option<Key>, bytes: &[u8]) -> Result<Written<'_>, Error> {
        let file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(&self.path);
        let mut file = file.map_err(Error::io(&self.path))?;
        let previous = previous.map(|previous| previous.to_string()).unwrap_or_default();
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let written = file.write_all(format!("{number} {previous}\n").as_bytes());
        let written = written.and_then(|()| file.write_all(bytes));
        // Else the name might be on the disk before what it names.
        written.and_then(|()| file.as_file().sync_data()).map_err(Error::io(&self.path))?;
        Ok(Written { folder: self, file })
    }

    /// Removes these. A file that stays although it should go is found again at the next start.
    pub(super) fn remove(&self, keys: &[Key]) {
        for &key in keys {
            let path = self.file(key);
            if let Err(error) = std::fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), %error, "failed to remove a stored response");
            }
        }
    }

    fn file(&self, key: Key) -> PathBuf {
        self.path.join(format!("{key}{SUFFIX}"))
    }
}

impl Written<'_> {
    /// Puts it into its place.
    pub(super) fn place(self, key: Key) -> Result<(), Error> {
        let path = self.folder.file(key);
        self.file.persist(&path).map_err(|error| Error::Io { path, source: error.error })?;
        Ok(())
    }
}

/// A file's number, its bytes without the first line, and what that names.
fn look(path: &Path) -> std::io::Result<(u64, u64, Option<Key>)> {
    use std::io::Read as _;
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let mut line = String::new();
    BufReader::new(file.take(LINE_BYTES_MAX)).read_line(&mut line)?;
    // A line that is damaged makes an old file of it, which goes soon.
    let (number, previous) = line.trim_end_matches('\n').split_once(' ').unwrap_or_default();
    Ok((number.parse().unwrap_or(0), bytes.saturating_sub(line.len() as u64), Key::parse(previous)))
}

//! Stores records in a directory, one file per record. A new file is written under a temporary name and then renamed,
//! so that it is either complete or absent. The content of a file shows which appends are complete ([`super::record`]).
//! The first line of a file contains the number of the file, the tenant of the record, and the record that this one
//! follows, so that opening the directory does not require reading whole files. The numbers define the order of the
//! files, because clocks are too coarse and may go back.
//!
//! Only one server can use the directory at a time: it locks a file in the directory. This file also contains the ID of
//! the store, so that the IDs of the store's objects remain valid after a restart.

use std::fmt;
use std::fs::{File, TryLockError};
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use tempfile::NamedTempFile;

use super::error::Error;
use super::id::Key;
use super::index::Entry;
use super::record::StoredRecord;
use crate::tenant::Tenant;

/// The file that is locked and contains the ID of the store. Earlier versions used the same name.
const STORE_ID_FILE: &str = "keeper";
/// Number of hexadecimal digits of a store ID.
const STORE_ID_DIGITS: usize = 16;
/// The suffix of complete files.
const SUFFIX: &str = ".record";
/// The prefix of incomplete files, which a server leaves behind if it dies while writing.
const UNFINISHED: &str = "unfinished-";
/// Maximum length of a first line in bytes.
const LINE_BYTES_MAX: u64 = 128;
/// The largest number of a file. No server writes that many files, so a larger number means that the file is damaged.
/// Accepting it could make later numbers overflow.
const NUMBER_MAX: u64 = (1 << 63) - 1;
/// The name of the default tenant in a first line.
const NO_TENANT: &str = "-";

/// The directory of the records.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    /// The number of the next file.
    number: AtomicU64,
    /// The locked file, which must remain open, because the lock ends when it is closed.
    _lock: File,
}

/// An opened directory and the records in it.
pub(super) struct OpenedDirectory {
    pub(super) directory: Directory,
    pub(super) store_id: u64,
    /// The complete files, oldest first.
    pub(super) files: Vec<(Key, Entry)>,
}

/// A new file with a temporary name. Dropping this value deletes the file.
pub(super) struct UnplacedFile<'a> {
    directory: &'a Directory,
    file: NamedTempFile,
}

impl Directory {
    /// Opens the directory, or creates it. `store_id` is used if the directory has no store ID yet.
    pub(super) fn open(path: &Path, store_id: u64) -> Result<OpenedDirectory, Error> {
        std::fs::create_dir_all(path).map_err(Error::io(path))?;
        let lock_path = path.join(STORE_ID_FILE);
        let lock = File::options().read(true).append(true).create(true).open(&lock_path);
        let mut lock = lock.map_err(Error::io(&lock_path))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => Error::InUse(path.to_owned()),
            TryLockError::Error(source) => Error::Io { path: lock_path.clone(), source },
        })?;
        let known = read_store_id(&lock).map_err(Error::io(&lock_path))?;
        let store_id = match known {
            Some(known) => known,
            None => {
                let line = format!("\n{store_id:016x}\n");
                lock.write_all(line.as_bytes())
                    .and_then(|()| lock.sync_all())
                    .map_err(Error::io(&lock_path))?;
                store_id
            }
        };
        let directory = Self { path: path.to_owned(), number: AtomicU64::new(0), _lock: lock };
        let files = directory.files()?;
        Ok(OpenedDirectory { directory, store_id, files })
    }

    /// Lists the complete files, oldest first, and removes incomplete files.
    fn files(&self) -> Result<Vec<(Key, Entry)>, Error> {
        let mut files: Vec<(u64, Key, Entry)> = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(Error::io(&self.path))? {
            let entry = entry.map_err(Error::io(&self.path))?;
            let (name, path) = (entry.file_name(), entry.path());
            let Some(name) = name.to_str() else { continue };
            // The server writes only regular files, so anything else is not a record.
            if !entry.file_type().map_err(Error::io(&path))?.is_file() {
                continue;
            }
            if name.starts_with(UNFINISHED) {
                std::fs::remove_file(&path).map_err(Error::io(&path))?;
                continue;
            }
            let Some(key) = name.strip_suffix(SUFFIX).and_then(Key::parse) else { continue };
            let (number, entry) = read_head(&path).map_err(Error::io(&path))?;
            files.push((number, key, entry));
        }
        files.sort_by_key(|(number, key, _)| (*number, *key));
        let next = files.last().map_or(0, |(number, ..)| number + 1);
        self.number.store(next, Ordering::Relaxed);
        Ok(files.into_iter().map(|(_, key, entry)| (key, entry)).collect())
    }

    /// Reads the first `bytes` bytes of the record under `key`; returns `None` if the record has been removed.
    pub(super) fn read(&self, key: Key, bytes: u64) -> Result<Option<StoredRecord>, Error> {
        let path = self.file(key);
        let Some(mut file) = existing(File::open(&path)).map_err(Error::io(&path))? else { return Ok(None) };
        let mut content = Vec::new();
        let read = skip_first_line(&mut file).and_then(|_| file.take(bytes).read_to_end(&mut content));
        read.map_err(Error::io(&path))?;
        Ok(Some(StoredRecord::of_file(content)))
    }

    /// Writes a record to a new file.
    pub(super) fn write(
        &self,
        tenant: Tenant,
        previous: Option<Key>,
        bytes: &[u8],
    ) -> Result<UnplacedFile<'_>, Error> {
        let file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(&self.path);
        let mut file = file.map_err(Error::io(&self.path))?;
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let written = file.write_all(FirstLine { number, tenant, previous }.to_string().as_bytes());
        let written = written.and_then(|()| file.write_all(bytes));
        // Without syncing, the final name could reach the disk before the content.
        written.and_then(|()| file.as_file().sync_data()).map_err(Error::io(&self.path))?;
        Ok(UnplacedFile { directory: self, file })
    }

    /// Appends bytes to a record of `before` bytes, and overwrites the remains of a failed append. Returns
    /// whether the record still exists.
    pub(super) fn append(&self, key: Key, before: u64, bytes: &[u8]) -> Result<bool, Error> {
        let path = self.file(key);
        let opened = existing(File::options().read(true).write(true).open(&path));
        let Some(mut file) = opened.map_err(Error::io(&path))? else { return Ok(false) };
        let appended = skip_first_line(&mut file).and_then(|line| {
            let end = line + before;
            file.set_len(end)?;
            file.seek(SeekFrom::Start(end))?;
            file.write_all(bytes)?;
            file.sync_data()
        });
        appended.map_err(Error::io(&path))?;
        Ok(true)
    }

    /// Removes these records. A file that cannot be removed is loaded again at the next start.
    pub(super) fn remove(&self, keys: &[Key]) {
        for &key in keys {
            let path = self.file(key);
            if let Err(error) = std::fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), %error, "failed to remove a stored object");
            }
        }
    }

    fn file(&self, key: Key) -> PathBuf {
        self.path.join(format!("{key}{SUFFIX}"))
    }
}

impl UnplacedFile<'_> {
    /// Gives the file its final name.
    pub(super) fn place(self, key: Key) -> Result<(), Error> {
        let path = self.directory.file(key);
        self.file.persist(&path).map_err(|error| Error::Io { path, source: error.error })?;
        Ok(())
    }
}

fn existing(opened: std::io::Result<File>) -> std::io::Result<Option<File>> {
    match opened {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Seeks to the end of the first line. Returns the length of the line in bytes.
fn skip_first_line(file: &mut File) -> std::io::Result<u64> {
    let mut line = Vec::new();
    BufReader::new(std::io::Read::by_ref(file).take(LINE_BYTES_MAX)).read_until(b'\n', &mut line)?;
    let bytes = line.len() as u64;
    file.seek(SeekFrom::Start(bytes))?;
    Ok(bytes)
}

/// Reads the store ID, which is on the last complete line with an ID. Interrupted writes and damage can leave other
/// lines in the file.
fn read_store_id(file: &File) -> std::io::Result<Option<u64>> {
    let mut known = None;
    let mut lines = BufReader::new(file);
    loop {
        let mut line = Vec::new();
        if std::io::Read::by_ref(&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)? == 0 {
            return Ok(known);
        }
        known = parse_store_id(&line).or(known);
    }
}

fn parse_store_id(line: &[u8]) -> Option<u64> {
    let digits = std::str::from_utf8(line.strip_suffix(b"\n")?).ok()?;
    let is_number = digits.len() == STORE_ID_DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let store_id = is_number.then(|| u64::from_str_radix(digits, 16).ok())??;
    (store_id != 0).then_some(store_id)
}

/// The first line of a file: its number, the tenant of its record, and the record that this one follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FirstLine {
    number: u64,
    tenant: Tenant,
    previous: Option<Key>,
}

impl FirstLine {
    /// Represents a damaged first line: the file belongs to no tenant and is evicted first.
    const DAMAGED: Self = Self { number: 0, tenant: Tenant::NOBODY, previous: None };

    /// Parses the format of [`fmt::Display`]; returns `None` for anything else. A line that is incomplete or not
    /// exactly in this format must not make the record accessible to any tenant.
    fn parse(line: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(line).ok()?;
        let mut words = text.strip_suffix('\n')?.splitn(3, ' ');
        let number = words.next()?.parse().ok().filter(|number| *number <= NUMBER_MAX)?;
        let tenant = match words.next()? {
            NO_TENANT => Tenant::default(),
            tenant => Tenant::parse(tenant)?,
        };
        let previous = Key::parse(words.next()?);
        let read = Self { number, tenant, previous };
        (read.to_string() == text).then_some(read)
    }
}

impl fmt::Display for FirstLine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, tenant, previous } = self;
        write!(formatter, "{number} ")?;
        match *tenant == Tenant::default() {
            true => formatter.write_str(NO_TENANT)?,
            false => write!(formatter, "{tenant}")?,
        }
        formatter.write_str(" ")?;
        if let Some(previous) = previous {
            write!(formatter, "{previous}")?;
        }
        formatter.write_str("\n")
    }
}

/// Reads the first line of a file. Returns the number of the file and the entry of its record.
fn read_head(path: &Path) -> std::io::Result<(u64, Entry)> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut line = Vec::new();
    BufReader::new(file.take(LINE_BYTES_MAX)).read_until(b'\n', &mut line)?;
    let bytes = size.saturating_sub(line.len() as u64);
    let FirstLine { number, tenant, previous } = FirstLine::parse(&line).unwrap_or(FirstLine::DAMAGED);
    Ok((number, Entry { tenant, previous, bytes, data: None }))
}

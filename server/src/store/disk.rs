//! Records in a directory: a file for each. A new file is written elsewhere and then renamed, so that it exists whole or
//! not at all; a file that is appended to says by itself what was written to its end, see [`super::record`]. A file's
//! first line has its number, which gives the order of files (clocks are too coarse, and may go back), its tenant, and
//! the record that it follows, so that opening the directory does not read all of it.
//!
//! The directory belongs to one server at a time, which holds a lock on it. The server's number is in the directory as
//! well: the names that it has generated stay its own after a restart.

use std::fmt;
use std::fs::{File, TryLockError};
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use tempfile::NamedTempFile;

use super::Error;
use super::id::Key;
use super::index::Entry;
use super::record::Stored;
use crate::tenant::Tenant;

/// The file that is locked and has the number.
const KEEPER: &str = "keeper";
/// Hexadecimal digits of the server's number.
const KEEPER_DIGITS: usize = 16;
/// How the names of whole files end.
const SUFFIX: &str = ".record";
/// How the names of others begin: what a server leaves that dies while it writes.
const UNFINISHED: &str = "unfinished-";
/// Longest first line.
const LINE_BYTES_MAX: u64 = 128;
/// Largest number that a file may have. No server writes that many files, so a larger number is damage; the numbers after it
/// would soon begin at 0 again.
const NUMBER_MAX: u64 = (1 << 63) - 1;
/// How the default tenant is written.
const NO_TENANT: &str = "-";

/// The directory.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// The number of the next file.
    number: AtomicU64,
    /// As long as it is open, it is locked.
    _lock: File,
}

/// The directory as it was found.
pub(super) struct Opened {
    pub(super) folder: Folder,
    pub(super) keeper: u64,
    /// The whole files, oldest first.
    pub(super) files: Vec<(Key, Entry)>,
}

/// A file that is not in its place yet. Dropped before, it is deleted.
pub(super) struct Written<'a> {
    folder: &'a Folder,
    file: NamedTempFile,
}

impl Folder {
    /// Opens the directory, and creates it if need be. `keeper`: the server's number, if the directory has none yet.
    pub(super) fn open(path: &Path, keeper: u64) -> Result<Opened, Error> {
        std::fs::create_dir_all(path).map_err(Error::io(path))?;
        let lock_path = path.join(KEEPER);
        let lock = File::options().read(true).append(true).create(true).open(&lock_path);
        let mut lock = lock.map_err(Error::io(&lock_path))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => Error::Taken(path.to_owned()),
            TryLockError::Error(source) => Error::Io { path: lock_path.clone(), source },
        })?;
        let known = read_keeper(&lock).map_err(Error::io(&lock_path))?;
        let keeper = match known {
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

    /// All whole files, oldest first; others that a server left are removed.
    fn files(&self) -> Result<Vec<(Key, Entry)>, Error> {
        let mut files: Vec<(u64, Key, Entry)> = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(Error::io(&self.path))? {
            let entry = entry.map_err(Error::io(&self.path))?;
            let (name, path) = (entry.file_name(), entry.path());
            let Some(name) = name.to_str() else { continue };
            // A server writes nothing but files.
            if !entry.file_type().map_err(Error::io(&path))?.is_file() {
                continue;
            }
            if name.starts_with(UNFINISHED) {
                std::fs::remove_file(&path).map_err(Error::io(&path))?;
                continue;
            }
            let Some(key) = name.strip_suffix(SUFFIX).and_then(Key::parse) else { continue };
            let (number, found) = read_head(&path).map_err(Error::io(&path))?;
            files.push((number, key, found));
        }
        files.sort_by_key(|(number, key, _)| (*number, *key));
        let next = files.last().map_or(0, |(number, ..)| number + 1);
        self.number.store(next, Ordering::Relaxed);
        Ok(files.into_iter().map(|(_, key, found)| (key, found)).collect())
    }

    /// The record under `key`, of which the index knows so many `bytes`; `None` if it has been removed.
    pub(super) fn read(&self, key: Key, bytes: u64) -> Result<Option<Stored>, Error> {
        let path = self.file(key);
        let Some(mut file) = existing(File::open(&path)).map_err(Error::io(&path))? else { return Ok(None) };
        let mut content = Vec::new();
        let read = skip_first_line(&mut file).and_then(|_| file.take(bytes).read_to_end(&mut content));
        read.map_err(Error::io(&path))?;
        Ok(Some(Stored::of_file(content)))
    }

    /// Writes a record, to be put into its place.
    pub(super) fn write(
        &self,
        tenant: Tenant,
        previous: Option<Key>,
        bytes: &[u8],
    ) -> Result<Written<'_>, Error> {
        let file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(&self.path);
        let mut file = file.map_err(Error::io(&self.path))?;
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let written = file.write_all(FirstLine { number, tenant, previous }.to_string().as_bytes());
        let written = written.and_then(|()| file.write_all(bytes));
        // Else the name might be on the disk before what it names.
        written.and_then(|()| file.as_file().sync_data()).map_err(Error::io(&self.path))?;
        Ok(Written { folder: self, file })
    }

    /// Adds bytes to a record, which has so many `before`; whatever a failed append has left behind those is
    /// overwritten. Returns whether the record still exists.
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

    /// Removes these. A file that cannot be removed is found again at the next start.
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

fn existing(opened: std::io::Result<File>) -> std::io::Result<Option<File>> {
    match opened {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Goes to the end of the first line. Returns its length.
fn skip_first_line(file: &mut File) -> std::io::Result<u64> {
    let mut line = Vec::new();
    BufReader::new(std::io::Read::by_ref(file).take(LINE_BYTES_MAX)).read_until(b'\n', &mut line)?;
    let bytes = line.len() as u64;
    file.seek(SeekFrom::Start(bytes))?;
    Ok(bytes)
}

/// The server's number, which is on the last complete line that holds one. A write that was interrupted, or damage to the
/// file, leaves other lines.
fn read_keeper(file: &File) -> std::io::Result<Option<u64>> {
    let mut known = None;
    let mut lines = BufReader::new(file);
    loop {
        let mut line = Vec::new();
        if std::io::Read::by_ref(&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)? == 0 {
            return Ok(known);
        }
        known = keeper_of(&line).or(known);
    }
}

/// Reads a line with the server's number.
fn keeper_of(line: &[u8]) -> Option<u64> {
    let digits = std::str::from_utf8(line.strip_suffix(b"\n")?).ok()?;
    let is_number = digits.len() == KEEPER_DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let keeper = is_number.then(|| u64::from_str_radix(digits, 16).ok())??;
    (keeper != 0).then_some(keeper)
}

/// A file's first line: its number, the tenant of its record, and the record that this one follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FirstLine {
    number: u64,
    tenant: Tenant,
    previous: Option<Key>,
}

impl FirstLine {
    /// Of a file whose first line is damaged: an old file of nobody, which is evicted soon.
    const DAMAGED: Self = Self { number: 0, tenant: Tenant::NOBODY, previous: None };

    /// Reads what [`fmt::Display`] writes; `None` for anything else. A line that lacks its end, or differs in a single byte,
    /// must not give a record to anybody.
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

/// A file's number and what its first line says about its record.
fn read_head(path: &Path) -> std::io::Result<(u64, Entry)> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut line = Vec::new();
    BufReader::new(file.take(LINE_BYTES_MAX)).read_until(b'\n', &mut line)?;
    let bytes = size.saturating_sub(line.len() as u64);
    let FirstLine { number, tenant, previous } = FirstLine::parse(&line).unwrap_or(FirstLine::DAMAGED);
    Ok((number, Entry { tenant, previous, bytes, data: None, tally: None }))
}

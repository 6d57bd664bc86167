//! The private directory in which rewritten graphs, compiled models and fingerprints are cached.
//!
//! A cache directory is often on a volume that other pods can write to. However, a compiled model is trusted input: it
//! names native operations and the memory that they read. This crate therefore stores its files in a subdirectory that
//! it creates with mode 0700, and uses an existing one only if the current user (or root) owns it and no other user can
//! write to it. The directory is opened once, and every later path leads through its file descriptor, so a user who can
//! rename the directory cannot replace it.

use std::fs::{self, DirBuilder, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Number of rewritten graphs in `--cache-dir`.
///
/// If exceeded: the least recently used one is deleted.
const GRAPHS_MAX: usize = 8;

/// Number of compiled models in `--cache-dir`.
///
/// If exceeded: the least recently used one is deleted.
const COMPILED_MAX: usize = 8;

/// Number of fingerprints of model files in `--cache-dir`. A split GGUF model has one for each part.
///
/// If exceeded: the least recently used one is deleted.
const FINGERPRINTS_MAX: usize = 512;

/// Number of unfinished graphs, compiled models and fingerprints in `--cache-dir`.
///
/// If exceeded: the least recently written one is deleted.
const UNFINISHED_MAX: usize = 8;

/// The age at which an unfinished file is removed, because the process that was writing it must have ended.
const UNFINISHED_AGE: Duration = Duration::from_hours(24);

/// The prefix of the names of unfinished files.
const UNFINISHED: &str = "part-";

/// The prefixes of file names, and the maximum number of entries with each prefix.
const KINDS: [(&str, usize); 4] = [
    ("graph-", GRAPHS_MAX),
    ("compiled-", COMPILED_MAX),
    ("fingerprint-", FINGERPRINTS_MAX),
    (UNFINISHED, UNFINISHED_MAX),
];

/// A directory that only the current user and root can write to.
#[derive(Debug)]
pub(crate) struct PrivateDirectory {
    descriptor: File,
    /// The path for messages. File accesses use the descriptor.
    shown: PathBuf,
}

impl PrivateDirectory {
    /// Opens the directory of the current user in `cache_dir`, creates it if it does not exist, and removes old files,
    /// because a process that is killed while it writes leaves an unfinished file.
    ///
    /// # Errors
    /// The directory cannot be created or opened, its owner is neither the current user nor root, or other users can
    /// write to it.
    pub(crate) fn open(cache_dir: &Path) -> io::Result<Self> {
        let user = rustix::process::geteuid().as_raw();
        // Each user of a shared volume has a separate directory.
        let shown = cache_dir.join(format!("models-{user}"));
        fs::create_dir_all(cache_dir)?;
        match DirBuilder::new().mode(0o700).create(&shown) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let descriptor =
            File::options().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(&shown)?;
        let metadata = descriptor.metadata()?;
        if metadata.uid() != user && metadata.uid() != 0 {
            return Err(io::Error::other(format!(
                "{} belongs to user {} instead of user {user} or root",
                shown.display(),
                metadata.uid()
            )));
        }
        if metadata.mode() & 0o022 != 0 {
            return Err(io::Error::other(format!(
                "the mode of {} is {:03o}: users other than the owner can write to the directory",
                shown.display(),
                metadata.mode() & 0o777
            )));
        }
        let directory = Self { descriptor, shown };
        directory.evict_old_files();
        Ok(directory)
    }

    /// The path of a file, which no other user can redirect while this directory is open.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    /// The path of a file, for messages.
    pub(super) fn shown(&self, name: &str) -> PathBuf {
        self.shown.join(name)
    }

    fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.descriptor.as_raw_fd()))
    }

    /// A random name for an unfinished file. The process ID would not be unique, because a process on another machine
    /// may have the same ID.
    pub(super) fn unfinished(&self, name: &str) -> String {
        format!("{UNFINISHED}{:016x}-{name}", RandomState::new().build_hasher().finish())
    }

    /// Restricts a finished file to its owner, and renames it to its final name.
    pub(super) fn finish(&self, unfinished: &str, name: &str) -> io::Result<()> {
        let from = self.file(unfinished);
        fs::set_permissions(&from, fs::Permissions::from_mode(0o600))?;
        fs::rename(from, self.file(name))
    }

    /// Marks a file as just used. If that fails, the only effect is that the file seems to have been used less
    /// recently.
    pub(super) fn touch(&self, name: &str) {
        let file = File::options().append(true).open(self.file(name));
        let _ = file.and_then(|file| file.set_modified(SystemTime::now()));
    }

    /// Removes the least recently used files beyond the limits above, and abandoned unfinished files. A failure is
    /// logged.
    pub(super) fn evict_old_files(&self) {
        if let Err(error) = evict(&self.root(), SystemTime::now()) {
            let directory = self.shown("");
            tracing::warn!(%error, directory = %directory.display(), "failed to remove old files of the model cache");
        }
    }
}

/// The files of one entry. A graph has two files, whose names differ in the extension.
struct Entry {
    stem: String,
    used: SystemTime,
    files: Vec<PathBuf>,
}

fn evict(directory: &Path, now: SystemTime) -> io::Result<()> {
    let mut entries: Vec<Entry> = Vec::new();
    for file in fs::read_dir(directory)? {
        let file = file?;
        let name = file.file_name().to_string_lossy().into_owned();
        let modified = match file.metadata().and_then(|metadata| metadata.modified()) {
            Ok(modified) => modified,
            // Another process has removed the file.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let stem = name.split('.').next().unwrap_or_default().to_owned();
        match entries.iter_mut().find(|entry| entry.stem == stem) {
            Some(entry) => {
                entry.used = entry.used.max(modified);
                entry.files.push(file.path());
            }
            None => entries.push(Entry { stem, used: modified, files: vec![file.path()] }),
        }
    }
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.used));
    for (prefix, most) in KINDS {
        entries.iter().filter(|entry| entry.stem.starts_with(prefix)).skip(most).try_for_each(remove)?;
    }
    let is_stale = |entry: &&Entry| {
        entry.stem.starts_with(UNFINISHED)
            && now.duration_since(entry.used).is_ok_and(|age| age > UNFINISHED_AGE)
    };
    entries.iter().filter(is_stale).try_for_each(remove)
}

/// Removes an entry. The `.xml` file of a graph is removed before its `.bin` file, because readers look for the `.xml`
/// file.
fn remove(entry: &Entry) -> io::Result<()> {
    let mut files = entry.files.clone();
    files.sort_by(|a, b| b.extension().cmp(&a.extension()));
    for file in files {
        match fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_others_can_write_to_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let directory = PrivateDirectory::open(parent.path()).unwrap();
        let mode = fs::metadata(&directory.shown).unwrap().mode() & 0o777;
        assert_eq!(mode, 0o700);
        for (mode, accepted) in [(0o777, false), (0o770, false), (0o702, false), (0o755, true), (0o700, true)]
        {
            fs::set_permissions(&directory.shown, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(PrivateDirectory::open(parent.path()).is_ok(), accepted, "{mode:o}");
        }
    }

    #[test]
    fn a_link_in_place_of_the_directory_is_refused() {
        let (parent, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let shown = PrivateDirectory::open(parent.path()).unwrap().shown;
        fs::remove_dir(&shown).unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), &shown).unwrap();
        assert!(PrivateDirectory::open(parent.path()).is_err());
    }

    #[test]
    fn a_directory_that_is_replaced_while_it_is_open_is_not_followed() {
        let parent = tempfile::tempdir().unwrap();
        let directory = PrivateDirectory::open(parent.path()).unwrap();
        fs::write(directory.file("graph-1.xml"), "ours").unwrap();
        fs::rename(&directory.shown, parent.path().join("moved")).unwrap();
        fs::create_dir(&directory.shown).unwrap();
        fs::write(directory.shown.join("graph-1.xml"), "another's").unwrap();
        assert_eq!(fs::read_to_string(directory.file("graph-1.xml")).unwrap(), "ours");
    }

    #[test]
    fn the_least_recently_used_entries_are_evicted_with_all_their_files() {
        let directory = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        let put = |name: String, age: u64| {
            let file = File::create(directory.path().join(name)).unwrap();
            file.set_modified(now - Duration::from_secs(age)).unwrap();
        };
        for age in 0..12 {
            put(format!("graph-{age:02}.xml"), age);
            // The `.bin` file is not touched when a graph is used.
            put(format!("graph-{age:02}.bin"), 1000);
            put(format!("compiled-{age:02}"), age);
        }
        put("graph-99.bin".to_owned(), 2000);
        put("part-1-graph-1.bin".to_owned(), 2 * 24 * 3600);
        for age in 0..12 {
            put(format!("part-2{age:02}-compiled-1"), age);
        }
        put("notes".to_owned(), 1_000_000);
        evict(directory.path(), now).unwrap();
        let mut left: Vec<String> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let mut expected: Vec<String> = (0..COMPILED_MAX).map(|age| format!("compiled-{age:02}")).collect();
        for age in 0..GRAPHS_MAX {
            expected.extend(["bin", "xml"].map(|ending| format!("graph-{age:02}.{ending}")));
        }
        expected.push("notes".to_owned());
        expected.extend((0..UNFINISHED_MAX).map(|age| format!("part-2{age:02}-compiled-1")));
        assert_eq!(left, expected);
    }
}

//! Fingerprints of model files, which depend on the whole content of the files.
//!
//! A model of several gigabytes takes seconds to hash, so the result is stored in the cache directory under a hash of
//! the attributes that identify this version of the file: its path, inode, size, modification time and change time.
//! User space can set the modification time (`cp --preserve`, `rsync --times`), but not the change time, which every
//! write, rename or change of metadata advances. Only changes within the clock's granularity could remain undetected,
//! so a file that changed recently is hashed each time.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use xxhash_rust::xxh3::{Xxh3Default, xxh3_128};

use super::directory::PrivateDirectory;

/// Seconds since a file's last change after which its fingerprint is stored. This time is longer than the clock
/// granularity of any file system, and than the usual difference between the clocks of machines that share a volume.
const SETTLED_SECONDS: i64 = 30;

/// Returns the hash of a file's content, which is computed or read from the directory.
///
/// # Errors
/// The file cannot be read, or changes while it is being read.
pub(super) fn of_file(directory: &PrivateDirectory, path: &Path) -> io::Result<u128> {
    of_file_at(directory, path, seconds_now())
}

fn of_file_at(directory: &PrivateDirectory, path: &Path, now: i64) -> io::Result<u128> {
    let mut file = File::open(path)?;
    let version = version(path, &file)?;
    let name = format!("fingerprint-{:032x}", xxh3_128(version.as_bytes()));
    if let Some(stored) = stored(directory, &name) {
        directory.touch(&name);
        return Ok(stored);
    }
    let size = file.metadata()?.len();
    let hash = hash(&mut file, size)?;
    if self::version(path, &file)? != version {
        return Err(io::Error::other("the file changed while it was read"));
    }
    if now - file.metadata()?.ctime() > SETTLED_SECONDS {
        let unfinished = directory.unfinished(&name);
        let stored = fs::write(directory.file(&unfinished), format!("{hash:032x}"))
            .and_then(|()| directory.finish(&unfinished, &name));
        if let Err(error) = stored {
            tracing::warn!(%error, file = %directory.shown(&name).display(), "failed to store the fingerprint of a model file");
        }
    }
    Ok(hash)
}

fn stored(directory: &PrivateDirectory, name: &str) -> Option<u128> {
    let text = fs::read_to_string(directory.file(name)).ok()?;
    if text.len() == 32 { u128::from_str_radix(&text, 16).ok() } else { None }
}

/// A description that differs between two versions of a file. The device number is omitted, because it can change with
/// every mount of a volume.
fn version(path: &Path, file: &File) -> io::Result<String> {
    let metadata = file.metadata()?;
    Ok(format!(
        "{:?} {} {} {}.{:09} {}.{:09}",
        fs::canonicalize(path)?,
        metadata.ino(),
        metadata.len(),
        metadata.mtime(),
        metadata.mtime_nsec(),
        metadata.ctime(),
        metadata.ctime_nsec()
    ))
}

fn seconds_now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or(i64::MAX)
}

/// The hash of the first `bytes` bytes of a file.
pub(super) fn hash(file: &mut File, bytes: u64) -> io::Result<u128> {
    let mut hash = Xxh3Default::new();
    let mut buffer = vec![0; 1 << 20];
    file.seek(SeekFrom::Start(0))?;
    let mut rest = file.take(bytes);
    loop {
        match rest.read(&mut buffer)? {
            0 => return Ok(hash.digest128()),
            count => hash.update(&buffer[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The weights are replaced with others of the same size, and their modification time is restored, as
    /// `rsync --times --inplace` does.
    #[test]
    fn replaced_content_has_another_fingerprint_even_with_the_same_size_and_time() {
        let parent = tempfile::tempdir().unwrap();
        let directory = PrivateDirectory::open(parent.path()).unwrap();
        let path = parent.path().join("model.gguf");
        // The old and the new content differ only in one byte, after the first 5 MiB.
        let mut content = vec![7; 6 << 20];
        fs::write(&path, &content).unwrap();
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        let before = of_file(&directory, &path).unwrap();
        content[5 << 20] = 8;
        fs::write(&path, &content).unwrap();
        File::options().append(true).open(&path).unwrap().set_modified(modified).unwrap();
        assert_ne!(of_file(&directory, &path).unwrap(), before);
    }

    #[test]
    fn the_fingerprint_of_a_settled_file_is_stored_and_used_again() {
        let parent = tempfile::tempdir().unwrap();
        let directory = PrivateDirectory::open(parent.path()).unwrap();
        let path = parent.path().join("model.gguf");
        fs::write(&path, b"weights").unwrap();
        let records = || fs::read_dir(directory.file("")).unwrap().count();
        let fresh = of_file(&directory, &path).unwrap();
        assert_eq!(
            records(),
            0,
            "a file that changed recently may change again within the clock's granularity"
        );
        let later = seconds_now() + 2 * SETTLED_SECONDS;
        assert_eq!(of_file_at(&directory, &path, later).unwrap(), fresh);
        assert_eq!(records(), 1);
        // From then on, the record is read instead of the file.
        let record = fs::read_dir(directory.file("")).unwrap().next().unwrap().unwrap().path();
        fs::write(&record, format!("{:032x}", 5)).unwrap();
        assert_eq!(of_file_at(&directory, &path, later).unwrap(), 5);
        fs::write(&record, "half").unwrap();
        assert_eq!(of_file_at(&directory, &path, later).unwrap(), fresh);
    }
}

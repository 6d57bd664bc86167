//! Locks the directory of a fetch, because two fetches that write into the same `.part` file would interleave their
//! data.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;

use super::error::Error;

/// The name of the lock file. The file remains after the fetch: if it were removed, a process that waits for the lock
/// would lock the deleted file, while later processes lock a new one.
const LOCK: &str = "lock";
/// The interval between two attempts to lock the file.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The number of attempts to lock the file between two warnings about the wait.
const ATTEMPTS_PER_WARNING: u64 = 60;

/// A lock on the directory of a fetch. The operating system releases it when the file is closed, even if the process is
/// killed. On NFSv3, the lock of a failed node is not released.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    _file: File,
}

impl DirectoryLock {
    /// Creates the directory `into` if it does not exist, and locks it. If another fetch has locked it, this function
    /// waits. If the file system does not support locks, a warning is logged and the directory is not locked.
    ///
    /// # Errors
    /// The directory or the lock file cannot be created, or locking fails for another reason.
    pub(crate) async fn acquire(into: &Path) -> Result<Self, Error> {
        std::fs::create_dir_all(into).map_err(|source| Error::disk("create", into, source))?;
        let path = into.join(LOCK);
        // NFS requires write access for an exclusive lock.
        let file = File::options().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(|source| Error::disk("open", &path, source))?;
        for attempt in 0_u64.. {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => {
                    if attempt == 0 {
                        tracing::info!(
                            directory = %into.display(),
                            "waiting for another fetch into this directory to finish"
                        );
                    } else if attempt % ATTEMPTS_PER_WARNING == 0 {
                        tracing::warn!(
                            lock = %path.display(),
                            "still waiting for another fetch into this directory to finish; if no other fetch is running, delete the lock and restart this fetch"
                        );
                    }
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
                Err(TryLockError::Error(error)) if is_unsupported(&error) => {
                    tracing::warn!(
                        directory = %into.display(), %error,
                        "failed to lock the directory; do not start another fetch into it until this fetch has ended"
                    );
                    break;
                }
                Err(TryLockError::Error(source)) => return Err(Error::disk("lock", &path, source)),
            }
        }
        Ok(Self { _file: file })
    }
}

/// Whether the error means that the file system does not support locks.
fn is_unsupported(error: &io::Error) -> bool {
    // NFS returns ENOLCK if the server has no lock service.
    let unsupported = [Errno::NOLCK, Errno::NOSYS, Errno::OPNOTSUPP];
    error.kind() == io::ErrorKind::Unsupported
        || Errno::from_io_error(error).is_some_and(|errno| unsupported.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_second_fetch_waits_until_the_first_has_released_the_lock() {
        use futures_util::FutureExt as _;
        let directory = tempfile::tempdir().unwrap();
        let into = directory.path().join("new/directory");
        let first = DirectoryLock::acquire(&into).await.unwrap();
        let mut second = Box::pin(DirectoryLock::acquire(&into));
        assert!(second.as_mut().now_or_never().is_none());
        let other_directory = DirectoryLock::acquire(directory.path()).now_or_never();
        assert!(other_directory.is_some_and(|lock| lock.is_ok()));
        drop(first);
        second.await.unwrap();
    }

    #[test]
    fn a_file_system_without_locks_is_not_an_error() {
        for (errno, expected) in
            [(Errno::NOLCK, true), (Errno::NOSYS, true), (Errno::OPNOTSUPP, true), (Errno::IO, false)]
        {
            let error = io::Error::from_raw_os_error(errno.raw_os_error());
            assert_eq!(is_unsupported(&error), expected, "{error}");
        }
    }
}

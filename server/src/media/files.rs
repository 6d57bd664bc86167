//! Reads images from files below one directory.
//!
//! A path is resolved first, so that links within the directory work. The resolved path must be below the directory. It
//! is opened component by component, starting at the open directory and without following links. Opening therefore
//! fails if a link replaces a component after the check.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use axum::body::Bytes;
use rustix::fs::{Mode, OFlags, open, openat};

use super::error::MediaError;

/// The directory given by `--allowed-local-media-path`.
#[derive(Debug)]
pub(super) struct MediaDirectory {
    /// The absolute path as configured, which may contain links.
    given: PathBuf,
    canonical: PathBuf,
    directory: OwnedFd,
}

impl MediaDirectory {
    /// Opens the directory.
    ///
    /// # Errors
    /// The directory does not exist or cannot be read.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let given = std::path::absolute(path)?;
        let canonical = path.canonicalize()?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = open(&canonical, flags, Mode::empty())?;
        Ok(Self { given, canonical, directory })
    }

    /// Returns the part of a path below the directory. This function does not access the disk, so its result does not
    /// depend on the files outside of the directory.
    ///
    /// # Errors
    /// The path is not below the directory, or it contains `..`.
    pub(super) fn relative<'path>(&self, path: &'path Path) -> Result<&'path Path, MediaError> {
        let below = path.strip_prefix(&self.given).or_else(|_| path.strip_prefix(&self.canonical)).ok();
        let has_parent = path.components().any(|component| component == Component::ParentDir);
        let refused = || MediaError::PathNotAllowed { path: path.to_owned() };
        below.filter(|_| !has_parent).ok_or_else(refused)
    }

    /// Reads a file of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// The path is not below the directory, it does not lead to a readable, regular file, or the file is larger than
    /// `bytes_max`.
    pub(super) fn read(&self, path: &Path, bytes_max: usize) -> Result<Bytes, MediaError> {
        let relative = self.relative(path)?;
        let unreadable = |source| MediaError::Unreadable { path: path.to_owned(), source };
        let resolved = self.canonical.join(relative).canonicalize().map_err(unreadable)?;
        let below = resolved
            .strip_prefix(&self.canonical)
            .map_err(|_| unreadable(io::Error::other("a link leads out of the directory")))?;
        let file = open_below(self.directory.as_fd(), below).map_err(unreadable)?;
        let metadata = file.metadata().map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(MediaError::NotAFile { path: path.to_owned() });
        }
        // The size in the metadata is not used, because the file may grow while it is read.
        let mut bytes = Vec::new();
        file.take(bytes_max as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        if bytes.len() > bytes_max { Err(MediaError::TooLarge { bytes_max }) } else { Ok(bytes.into()) }
    }
}

/// Opens a path below a directory without following links.
fn open_below(directory: BorrowedFd<'_>, path: &Path) -> io::Result<File> {
    // Without `NONBLOCK`, opening a named pipe would block until another process opens it for writing.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut current = directory.try_clone_to_owned()?;
    let mut components = path.components().peekable();
    while let Some(component) = components.next() {
        let is_directory = components.peek().is_some();
        let flags = if is_directory { flags | OFlags::DIRECTORY } else { flags };
        current = openat(&current, component.as_os_str(), flags, Mode::empty())?;
    }
    Ok(current.into())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, mkfifoat};

    use super::*;

    /// A directory `media` with files, next to files that must not be read.
    struct Fixture {
        root: tempfile::TempDir,
        directory: MediaDirectory,
    }

    impl Fixture {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir_all(root.path().join("media/inner")).unwrap();
            fs::create_dir(root.path().join("media-other")).unwrap();
            for name in ["media/a.png", "media/inner/b c%20.png", "media-other/x.png", "secret.png"] {
                fs::write(root.path().join(name), name).unwrap();
            }
            let directory = MediaDirectory::open(&root.path().join("media")).unwrap();
            Self { root, directory }
        }

        fn read(&self, path: &str) -> Result<Bytes, MediaError> {
            self.directory.read(&self.root.path().join(path), 100)
        }

        fn link(&self, target: &str, path: &str) {
            symlink(target, self.root.path().join(path)).unwrap();
        }
    }

    #[test]
    fn files_below_the_directory_are_read() {
        let fixture = Fixture::new();
        fixture.link("inner/b c%20.png", "media/relative");
        fixture.link(fixture.root.path().join("media/inner").to_str().unwrap(), "media/absolute");
        let inner = "media/inner/b c%20.png";
        for (path, content) in [
            ("media/a.png", "media/a.png"),
            ("media/./a.png", "media/a.png"),
            ("media//a.png", "media/a.png"),
            (inner, inner),
            ("media/relative", inner),
            ("media/absolute/b c%20.png", inner),
        ] {
            assert_eq!(fixture.read(path).unwrap(), content, "{path}");
        }
    }

    #[test]
    fn the_directory_may_be_given_through_a_link() {
        let fixture = Fixture::new();
        fixture.link("media", "link");
        let link = fixture.root.path().join("link");
        let directory = MediaDirectory::open(&link).unwrap();
        let canonical = fixture.root.path().canonicalize().unwrap().join("media/a.png");
        for path in [link.join("a.png"), canonical] {
            assert_eq!(directory.read(&path, 100).unwrap(), "media/a.png");
        }
    }

    #[test]
    fn paths_outside_of_the_directory_are_refused_without_access_to_the_disk() {
        let fixture = Fixture::new();
        for path in [
            "secret.png",
            "missing.png",
            "media-other/x.png",
            "media/../secret.png",
            "media/../media/a.png",
            "media/inner/../a.png",
            "media/missing/../a.png",
            "/etc/passwd",
            "/",
        ] {
            let error = fixture.read(path).unwrap_err();
            assert!(matches!(error, MediaError::PathNotAllowed { .. }), "{path}: {error:?}");
        }
    }

    #[test]
    fn links_out_of_the_directory_are_refused() {
        let fixture = Fixture::new();
        fixture.link("../secret.png", "media/file");
        fixture.link("..", "media/parent");
        fixture.link("/etc/passwd", "media/absolute");
        fixture.link("../missing", "media/dangling");
        fixture.link("file", "media/chain");
        fixture.link("loop", "media/loop");
        for path in [
            "media/file",
            "media/parent/secret.png",
            "media/absolute",
            "media/dangling",
            "media/chain",
            "media/loop",
            "media/missing",
            "media/a.png/b",
        ] {
            let error = fixture.read(path).unwrap_err();
            assert!(matches!(error, MediaError::Unreadable { .. }), "{path}: {error:?}");
            // The error does not reveal whether the target exists.
            let named = fixture.root.path().join(path);
            let message = format!(
                "the file {named:?} cannot be read, or a link in its path leads out of --allowed-local-media-path"
            );
            assert_eq!(error.to_string(), message);
        }
        // A path that leaves the directory through a link and returns to it is allowed.
        assert_eq!(fixture.read("media/parent/media/a.png").unwrap(), "media/a.png");
    }

    #[test]
    fn a_component_that_becomes_a_link_after_its_check_is_refused() {
        let fixture = Fixture::new();
        let directory = fixture.directory.directory.as_fd();
        assert!(open_below(directory, Path::new("inner/b c%20.png")).is_ok());
        fixture.link("inner", "media/directory");
        fixture.link("a.png", "media/file");
        fixture.link("..", "media/parent");
        for path in ["directory/b c%20.png", "file", "parent/secret.png"] {
            assert!(open_below(directory, Path::new(path)).is_err(), "{path}");
        }
    }

    #[test]
    fn a_directory_that_is_replaced_does_not_change_what_can_be_read() {
        let fixture = Fixture::new();
        fs::rename(fixture.root.path().join("media"), fixture.root.path().join("former")).unwrap();
        fixture.link("media-other", "media");
        assert!(matches!(fixture.read("media/x.png"), Err(MediaError::Unreadable { .. })));
    }

    #[test]
    fn only_regular_files_are_read() {
        let fixture = Fixture::new();
        mkfifoat(CWD, fixture.root.path().join("media/pipe"), Mode::RWXU).unwrap();
        for path in ["media", "media/inner", "media/pipe"] {
            let error = fixture.read(path).unwrap_err();
            assert!(matches!(error, MediaError::NotAFile { .. }), "{path}: {error:?}");
        }
        let devices = MediaDirectory::open(Path::new("/dev")).unwrap();
        assert!(matches!(devices.read(Path::new("/dev/zero"), 100), Err(MediaError::NotAFile { .. })));
    }

    #[test]
    fn a_file_has_at_most_the_maximum_size() {
        let fixture = Fixture::new();
        let large = fixture.root.path().join("media/large");
        fs::write(&large, [7; 100]).unwrap();
        assert_eq!(fixture.read("media/large").unwrap(), vec![7; 100]);
        fs::write(&large, [7; 101]).unwrap();
        assert!(matches!(fixture.read("media/large"), Err(MediaError::TooLarge { bytes_max: 100 })));
        // This file has content although its metadata reports a size of 0 bytes, like a file that grows after its size
        // was read.
        let process = MediaDirectory::open(Path::new("/proc/self")).unwrap();
        let status = Path::new("/proc/self/status");
        assert_eq!(fs::metadata(status).unwrap().len(), 0);
        assert!(process.read(status, 1 << 20).unwrap().starts_with(b"Name:"));
        assert!(matches!(process.read(status, 10), Err(MediaError::TooLarge { bytes_max: 10 })));
    }
}

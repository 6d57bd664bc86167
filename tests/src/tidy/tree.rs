//! The files of the repository, which the rules read, and the findings that they return.

use std::path::Path;

use anyhow::Context as _;

/// Names that are skipped at any depth: directories with fetched or built files, and `.git`, which is a file in a
/// worktree.
const SKIPPED: [&str; 6] = [".git", ".deps", ".venv", "target", "node_modules", "__pycache__"];

/// A violation of a rule in one file.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    /// The path of the file, relative to the root of the repository.
    pub path: String,
    /// The problem and, unless it is obvious, the fix.
    pub message: String,
}

impl Finding {
    pub(super) fn new(path: &str, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), message: message.into() }
    }
}

/// A file of the repository.
#[derive(Debug)]
pub struct File {
    /// The path relative to the root of the repository, with slashes.
    pub path: String,
    /// The content; bytes that are not valid UTF-8 are replaced.
    pub text: String,
    /// The size of the file in bytes.
    pub bytes: usize,
}

impl File {
    /// Creates a file with the content `text`.
    #[must_use]
    pub fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned(), bytes: text.len() }
    }
}

/// The files of the repository, without fetched and built files.
#[derive(Debug, Default)]
pub struct Tree {
    /// The files, sorted by path.
    pub files: Vec<File>,
}

impl Tree {
    /// Reads the files below `root`, except for symbolic links and for fetched and built files.
    ///
    /// # Errors
    /// A directory or a file cannot be read.
    pub fn read(root: &Path) -> anyhow::Result<Self> {
        let mut tree = Self::default();
        let mut directories = vec![root.to_owned()];
        while let Some(directory) = directories.pop() {
            for entry in
                directory.read_dir().with_context(|| format!("failed to list {}", directory.display()))?
            {
                let entry = entry?;
                let path = entry.path();
                // Symbolic links are skipped, because their targets are read at their own paths.
                if entry.file_type()?.is_symlink() || SKIPPED.iter().any(|name| entry.file_name() == *name) {
                    continue;
                }
                if entry.file_type()?.is_dir() {
                    directories.push(path);
                    continue;
                }
                let bytes =
                    std::fs::read(&path).with_context(|| format!("failed to read {}", path.display()))?;
                let relative = path.strip_prefix(root)?.to_string_lossy().replace('\\', "/");
                let text = String::from_utf8_lossy(&bytes).into_owned();
                tree.files.push(File { path: relative, text, bytes: bytes.len() });
            }
        }
        tree.files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(tree)
    }

    /// Returns the file at `path`.
    #[must_use]
    pub fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }
}

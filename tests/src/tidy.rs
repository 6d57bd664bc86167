//! The rules of the tree that a machine can check. Each rule takes text and gives findings, so that each is
//! shown to find something; only [`Tree::read`] touches the disk.

use std::path::Path;

use anyhow::Context as _;

mod comments;
mod cycles;
mod documents;
mod manifests;
mod names;
mod parameters;
mod sources;
mod syntax;

pub use comments::doc_comments;
pub use cycles::module_cycles;
pub use documents::{decisions, links, mentioned_flags, pages};
pub use manifests::manifests;
pub use names::type_names;
pub use parameters::packed_parameters;
pub use sources::{long_files, sources};
pub use syntax::{CRATES_IN_STYLE, RustFile, rust_files};

/// Folders that hold what was fetched or built, wherever they are.
const SKIPPED_FOLDERS: [&str; 6] = [".git", ".deps", ".venv", "target", "node_modules", "__pycache__"];

/// Largest file of the tree, in bytes.
const FILE_BYTES_MAX: usize = 2 << 20;

/// What a rule has to say about a file.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    /// The file, relative to the root.
    pub path: String,
    /// What is wrong and, where it is not obvious, what to do.
    pub message: String,
}

impl Finding {
    fn new(path: &str, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), message: message.into() }
    }
}

/// A file of the tree.
#[derive(Debug)]
pub struct File {
    /// Relative to the root, with slashes.
    pub path: String,
    /// What it holds; bytes that are not UTF-8 are replaced.
    pub text: String,
    /// Its size.
    pub bytes: usize,
}

impl File {
    /// A file that holds `text`.
    #[must_use]
    pub fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned(), bytes: text.len() }
    }
}

/// The files of the repository, without what was fetched or built.
#[derive(Debug, Default)]
pub struct Tree {
    /// In the order of their paths.
    pub files: Vec<File>,
}

impl Tree {
    /// Reads the tree below `root`.
    ///
    /// # Errors
    /// A folder or a file cannot be read.
    pub fn read(root: &Path) -> anyhow::Result<Self> {
        let mut tree = Self::default();
        let mut folders = vec![root.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in folder.read_dir().with_context(|| format!("failed to list {}", folder.display()))? {
                let entry = entry?;
                let path = entry.path();
                // What a link leads to is read where it is.
                if entry.file_type()?.is_symlink() {
                    continue;
                }
                if entry.file_type()?.is_dir() {
                    if !SKIPPED_FOLDERS.iter().any(|skipped| entry.file_name() == *skipped) {
                        folders.push(path);
                    }
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

    /// The file at `path`, if there is one.
    #[must_use]
    pub fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }
}

/// Files that are too large, and text that ties the tree to a machine or to a registry.
#[must_use]
pub fn contents(tree: &Tree) -> Vec<Finding> {
    // Put together here, so that this file does not hold what it forbids.
    let forbidden = [
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
        concat!("/ho", "me/"),
        concat!("/t", "mp/"),
        concat!("py", "pi.org"),
        concat!("python", "hosted.org"),
        concat!("npm", "js.org"),
        concat!("npm", "js.com"),
        concat!("arti", "factory"),
    ];
    let mut findings = Vec::new();
    for file in &tree.files {
        if file.bytes > FILE_BYTES_MAX {
            findings
                .push(Finding::new(&file.path, format!("{} bytes, {FILE_BYTES_MAX} at most", file.bytes)));
        }
        for text in forbidden {
            if file.text.contains(text) {
                findings.push(Finding::new(&file.path, format!("mentions {text}: a machine or a registry")));
            }
        }
        if file.path.ends_with("package-lock.json") && file.text.contains("\"resolved\"") {
            findings
                .push(Finding::new(&file.path, "names a registry: npm's omit-lockfile-registry-resolved"));
        }
    }
    findings
}

/// Checks that base images are pinned by digest: a tag is another image tomorrow.
#[must_use]
pub fn base_images(tree: &Tree) -> Vec<Finding> {
    let dockerfiles = tree.files.iter().filter(|file| file.path.ends_with("Dockerfile"));
    let is_base = |line: &&str| {
        let is_literal = line.starts_with("FROM ") && !line.contains('$');
        is_literal || (line.starts_with("ARG ") && line.contains("_IMAGE="))
    };
    let of_file = |file: &File| -> Vec<Finding> {
        let lines = file.text.lines().filter(is_base).filter(|line| !line.contains("@sha256:"));
        lines.map(|line| Finding::new(&file.path, format!("{line}: add @sha256:DIGEST"))).collect()
    };
    dockerfiles.flat_map(of_file).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: Vec<File>) -> Tree {
        Tree { files }
    }

    #[test]
    fn finds_base_images_without_a_digest() {
        let text = "ARG BASE_IMAGE=debian:12\nARG PLATFORM=linux/amd64\nFROM ${BASE_IMAGE} AS build\nFROM scratch:1\n";
        assert_eq!(base_images(&tree(vec![File::new("a.Dockerfile", text)])).len(), 2);
        assert_eq!(
            base_images(&tree(vec![File::new("Dockerfile", "ARG BASE_IMAGE=debian:12@sha256:1")])),
            []
        );
    }

    #[test]
    fn finds_machine_paths_and_registries() {
        let text = format!("cd {}tree && fetch https://{}", concat!("/wo", "rk/"), concat!("py", "pi.org"));
        assert_eq!(contents(&tree(vec![File::new("x.sh", &text)])).len(), 2);
        assert_eq!(contents(&tree(vec![File::new("x.sh", "cd \"$(mktemp -d)\"")])), []);
    }

    #[test]
    fn finds_a_registry_in_a_lock_file() {
        let lock = File::new("a/package-lock.json", "{\"resolved\": \"https://host/openai.tgz\"}");
        assert_eq!(contents(&tree(vec![lock])).len(), 1);
    }

    #[test]
    fn finds_large_files() {
        let mut file = File::new("model.bin", "");
        file.bytes = FILE_BYTES_MAX + 1;
        assert_eq!(contents(&tree(vec![file])).len(), 1);
    }
}

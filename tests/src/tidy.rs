//! The rules for the repository that a program can check. A rule is a pure function from text to findings, so its tests
//! can show that it finds violations; only [`Tree::read`] accesses the disk.

mod aliases;
mod blocks;
mod comments;
mod cycles;
mod documents;
mod manifests;
mod names;
mod parameters;
mod sources;
mod syntax;
mod tree;

pub use aliases::colliding_aliases;
pub use blocks::{CodeBlock, Mark, Scene, code_blocks, has_tested_blocks, marked_blocks};
pub use comments::doc_comments;
pub use cycles::module_cycles;
pub use documents::{decisions, linked_functions, links, mentioned_flags, pages, supersessions};
pub use manifests::{manifests, members};
pub use names::type_names;
pub use parameters::packed_parameters;
pub use sources::{long_files, sources};
pub use syntax::{RustFile, rust_files};
pub use tree::{File, Finding, Tree};

/// The maximum size of a file in bytes.
const FILE_BYTES_MAX: usize = 2 << 20;

/// Finds files that are too large, and text that ties the repository to a machine or to a package registry.
#[must_use]
pub fn contents(tree: &Tree) -> Vec<Finding> {
    // Each text is concatenated from two parts, so that this file does not contain it.
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
                .push(Finding::new(&file.path, format!("{} bytes (limit: {FILE_BYTES_MAX})", file.bytes)));
        }
        for text in forbidden {
            if file.text.contains(text) {
                findings.push(Finding::new(
                    &file.path,
                    format!("contains {text}, which ties the file to a machine or to a package registry"),
                ));
            }
        }
        if file.path.ends_with("package-lock.json") && file.text.contains("\"resolved\"") {
            findings.push(Finding::new(
                &file.path,
                "names a registry; set npm's omit-lockfile-registry-resolved",
            ));
        }
    }
    findings
}

/// Checks that base images are pinned by digest, because a tag can point to another image later.
#[must_use]
pub fn base_images(tree: &Tree) -> Vec<Finding> {
    let dockerfiles = tree.files.iter().filter(|file| file.path.ends_with("Dockerfile"));
    let is_base = |line: &&str| {
        let is_literal = line.starts_with("FROM ") && !line.contains('$');
        is_literal || (line.starts_with("ARG ") && line.contains("_IMAGE="))
    };
    let of_file = |file: &File| -> Vec<Finding> {
        let lines = file.text.lines().filter(is_base).filter(|line| !line.contains("@sha256:"));
        lines
            .map(|line| Finding::new(&file.path, format!("{line}: the digest is missing (@sha256:DIGEST)")))
            .collect()
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

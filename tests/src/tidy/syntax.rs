//! Parses the Rust files of a crate for the style rules.

use anyhow::Context as _;

use super::{File, Tree};

/// The directories of a crate that contain Rust code.
const CODE_DIRECTORIES: [&str; 4] = ["src", "tests", "benches", "examples"];

/// A parsed Rust file.
pub struct RustFile {
    /// The path of the file, relative to the root of the repository.
    pub path: String,
    /// The path of the module in this file, relative to the root of its crate. It is empty for `lib.rs` and `main.rs`,
    /// and `None` for files outside `src`.
    pub module: Option<Vec<String>>,
    /// The syntax tree of the file.
    pub syntax: syn::File,
}

impl std::fmt::Debug for RustFile {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("RustFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl RustFile {
    /// Parses a file of the crate in the directory `crate_path`.
    ///
    /// # Errors
    /// The file is not valid Rust.
    pub fn parse(crate_path: &str, file: &File) -> anyhow::Result<Self> {
        let syntax = syn::parse_file(&file.text).with_context(|| format!("failed to parse {}", file.path))?;
        let source = file.path.strip_prefix(crate_path).and_then(|rest| rest.strip_prefix("/src/"));
        let module = source.and_then(|source| source.strip_suffix(".rs")).map(|source| match source {
            "lib" | "main" => Vec::new(),
            source => source.split('/').map(str::to_owned).collect(),
        });
        Ok(Self { path: file.path.clone(), module, syntax })
    }
}

/// Parses the Rust files of the crate in the directory `crate_path`.
///
/// # Errors
/// The crate has no Rust file, or one of them is not valid Rust.
pub fn rust_files(tree: &Tree, crate_path: &str) -> anyhow::Result<Vec<RustFile>> {
    let is_code = |file: &&File| {
        let rest = file.path.strip_prefix(crate_path).and_then(|rest| rest.strip_prefix('/'));
        let directory = rest.and_then(|rest| rest.split('/').next());
        file.path.ends_with(".rs") && directory.is_some_and(|directory| CODE_DIRECTORIES.contains(&directory))
    };
    let files = tree.files.iter().filter(is_code).map(|file| RustFile::parse(crate_path, file));
    let files = files.collect::<anyhow::Result<Vec<_>>>()?;
    anyhow::ensure!(!files.is_empty(), "{crate_path} has no Rust files");
    Ok(files)
}

/// Returns the name of the type or trait that an item defines.
pub(super) fn type_name(item: &syn::Item) -> Option<&syn::Ident> {
    match item {
        syn::Item::Enum(item) => Some(&item.ident),
        syn::Item::Struct(item) => Some(&item.ident),
        syn::Item::Trait(item) => Some(&item.ident),
        syn::Item::Type(item) => Some(&item.ident),
        syn::Item::Union(item) => Some(&item.ident),
        _ => None,
    }
}

/// Whether an item is compiled for tests only.
pub(super) fn is_test_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|condition| condition.is_ident("test"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_consists_of_its_own_files_and_not_of_nested_crates() {
        let paths = ["a/src/lib.rs", "a/src/b/c.rs", "a/tests/d.rs", "a/nested/src/lib.rs", "a/build.rs"];
        let tree = Tree { files: paths.map(|path| File::new(path, "//! A file.\n")).into() };
        let files = rust_files(&tree, "a").unwrap();
        let modules: Vec<_> = files.iter().map(|file| (file.path.as_str(), file.module.clone())).collect();
        let nested = vec!["b".to_owned(), "c".to_owned()];
        assert_eq!(modules, [(paths[0], Some(vec![])), (paths[1], Some(nested)), (paths[2], None)]);
        assert!(rust_files(&tree, "b").is_err());
    }

    #[test]
    fn a_file_that_is_not_rust_is_an_error() {
        let tree = Tree { files: vec![File::new("a/src/lib.rs", "struct {")] };
        assert_eq!(rust_files(&tree, "a").unwrap_err().to_string(), "failed to parse a/src/lib.rs");
    }
}

//! What the tests of the whole repository share: the rules of the tree, and a harness around the real
//! server process. It decides nothing about the products and no product depends on it.

pub mod tidy;

use std::path::{Path, PathBuf};

/// The root of the repository.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(PathBuf::new, Path::to_owned)
}

//! What the tests of the whole repository share: the rules of the tree, harnesses around the real
//! server process and a real Kubernetes control plane. It decides nothing about the products and no product depends on it: it sees what a user
//! sees.

pub mod browser;
pub mod clients;
pub mod cluster;
pub mod external_metrics;
pub mod http;
pub mod hub;
pub mod limits;
pub mod memory;
pub mod node;
pub mod process;
pub mod registry;
pub mod router;
pub mod s3;
pub mod scene;
pub mod server;
pub mod tidy;
pub mod traffic;

use std::path::{Path, PathBuf};

/// The root of the repository.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(PathBuf::new, Path::to_owned)
}

/// The sample model that `make fetch` puts into the tree.
#[must_use]
pub fn sample_model() -> PathBuf {
    root().join(".deps/models/SmolLM2-135M-Instruct.Q4_1.gguf")
}

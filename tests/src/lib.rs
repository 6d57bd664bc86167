//! The test harness of the repository: the rules for its files, the real server and router as child processes, a real
//! Kubernetes control plane, and mocks of the services from which models are fetched. It uses the products only through
//! their public interfaces, and the products depend on it only in their tests.

pub mod browser;
pub mod clients;
pub mod cluster;
pub mod external_metrics;
pub mod http;
pub mod hub;
pub mod limits;
pub mod memory;
mod mock;
pub mod node;
pub mod pages;
pub mod picture;
pub mod process;
pub mod registry;
pub mod router;
pub mod s3;
pub mod scene;
pub mod server;
pub mod tidy;
pub mod traffic;
pub mod vision_model;

use std::path::{Path, PathBuf};

/// The root of the repository.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(PathBuf::new, Path::to_owned)
}

/// The path of the sample model, which `make fetch` downloads.
#[must_use]
pub fn sample_model() -> PathBuf {
    root().join(".deps/models/SmolLM2-135M-Instruct.Q4_1.gguf")
}

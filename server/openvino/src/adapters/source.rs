//! The files of an adapter.

use std::path::PathBuf;

/// Rank of a LoRA adapter.
///
/// If exceeded: the server does not start.
pub const ADAPTER_RANK_MAX: usize = 256;

/// A LoRA adapter to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterSource {
    /// The name of the adapter, which is unique.
    pub name: String,
    /// A directory in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.
    pub path: PathBuf,
}

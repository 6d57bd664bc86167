//! The flags for spilling evicted blocks of the KV cache to disk.

use std::path::PathBuf;

use clap::Args;

use process::units::ByteSize;

/// The flags for spilling evicted blocks of the KV cache to disk.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct SpillArgs {
    /// Directory to which the server writes the blocks that it evicts from the KV cache. If a later prompt begins with
    /// the tokens of these blocks, the blocks are read back instead of being recomputed, even after a restart with the
    /// same version, model and configuration. Only one server can use the directory at a time.
    ///
    /// The directory is useful if reading a block is faster than computing it, which is usually the case with a local
    /// disk. Errors when accessing the directory are logged and do not affect requests. Default: evicted blocks are
    /// discarded.
    #[arg(long, value_name = "PATH", conflicts_with = "no_prefix_caching")]
    pub kv_spill_dir: Option<PathBuf>,

    /// Maximum total size of the blocks in --kv-spill-dir. Accepts a unit suffix, as in 20GiB.
    ///
    /// If exceeded: the least recently used blocks are deleted.
    #[arg(long, value_name = "SIZE", default_value = "8GiB")]
    pub kv_spill_bytes: ByteSize,
}

//! The flags for evicted blocks of the KV cache.

use std::path::PathBuf;

use clap::Args;

use process::units::ByteSize;

/// The flags for evicted blocks of the KV cache.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct SpillArgs {
    /// Directory for blocks that are evicted from the KV cache. A prompt that begins with them reads them back instead of
    /// computing them again, also after a restart with the same model. One server can use it at a time.
    ///
    /// It is useful if reading is faster than computing, as from any local disk. Errors of the directory are logged and do
    /// not affect requests. Default: evicted blocks are discarded.
    #[arg(long, value_name = "PATH", conflicts_with = "no_prefix_caching")]
    pub kv_spill_dir: Option<PathBuf>,

    /// Total size of the blocks in --kv-spill-dir. Accepts a unit, such as 20GiB.
    ///
    /// Beyond it: the least recently used blocks are deleted.
    #[arg(long, value_name = "SIZE", default_value = "8GiB")]
    pub kv_spill_bytes: ByteSize,
}

//! Where blocks go that the KV cache gives up.

use std::path::PathBuf;

use clap::Args;

use super::ByteSize;

/// Where blocks go that the KV cache gives up.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct SpillArgs {
    /// A directory for what the KV cache gives up, so that prompts that begin with it need not compute it again: read
    /// back when one comes, after a restart with the same model too. It is one server's at a time.
    ///
    /// Worth it where reading is faster than computing, as it is from any local disk. Whatever is wrong with the
    /// directory is logged and costs only that. Default: nothing is kept.
    #[arg(long, env = "OVFLEET_KV_SPILL_DIR", value_name = "PATH", conflicts_with = "no_prefix_caching")]
    pub kv_spill_dir: Option<PathBuf>,

    /// Total size of the blocks in --kv-spill-dir. Accepts a unit, such as 20GiB.
    ///
    /// Beyond it: the least recently used blocks are deleted.
    #[arg(long, env = "OVFLEET_KV_SPILL_BYTES", value_name = "SIZE", default_value = "8GiB")]
    pub kv_spill_bytes: ByteSize,
}

impl SpillArgs {
    /// The directory and the bytes, if anything is to be kept.
    pub(crate) fn folder(self) -> Option<(PathBuf, u64)> {
        self.kv_spill_dir.map(|folder| (folder, self.kv_spill_bytes.0))
    }
}

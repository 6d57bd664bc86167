//! What is kept of responses.

use std::path::PathBuf;

use clap::Args;

use super::ByteSize;
use crate::store::StoreConfig;

/// What is kept of responses.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Responses")]
pub struct StoreArgs {
    /// Most responses and conversations that are kept for later requests to refer to; of more, what was used least
    /// recently goes. 0 keeps none.
    #[arg(
        long,
        env = "OVFLEET_MAX_STORED_RESPONSES",
        value_name = "COUNT",
        default_value_t = 4096,
        value_parser = clap::value_parser!(u32).range(0..=1_048_576)
    )]
    pub max_stored_responses: u32,

    /// Most bytes of all of them, e.g. 1GiB.
    #[arg(long, env = "OVFLEET_MAX_STORED_BYTES", value_name = "SIZE", default_value = "256MiB")]
    pub max_stored_bytes: ByteSize,

    /// A directory to keep them in, so that they outlive the process. It belongs to one server at a time. Default:
    /// memory.
    #[arg(long, env = "OVFLEET_RESPONSE_STORE_DIR", value_name = "PATH")]
    pub response_store_dir: Option<PathBuf>,
}

impl StoreArgs {
    pub(crate) fn config(self) -> StoreConfig {
        let Self { max_stored_responses, max_stored_bytes, response_store_dir } = self;
        StoreConfig {
            entries_max: max_stored_responses as usize,
            bytes_max: max_stored_bytes.0,
            folder: response_store_dir,
        }
    }
}

//! The flags for stored responses and conversations.

use std::path::PathBuf;

use clap::{Args, value_parser};

use crate::store::StoreConfig;
use process::units::ByteSize;

/// The flags for stored responses and conversations.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Responses")]
pub struct StoreArgs {
    /// Maximum number of stored responses and conversations, to which later requests can refer. 0 stores none.
    ///
    /// If exceeded: the least recently used objects are evicted.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 4096,
        value_parser = value_parser!(u32).range(0..=1_048_576)
    )]
    pub max_stored_responses: u32,

    /// Maximum total size of the stored responses and conversations. Accepts a unit suffix, as in 1GiB.
    ///
    /// If exceeded: the least recently used objects are evicted.
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub max_stored_bytes: ByteSize,

    /// Directory in which responses and conversations are stored, so that they survive a restart. Only one server can
    /// use the directory at a time. Default: they are stored in memory.
    #[arg(long, value_name = "PATH")]
    pub response_store_dir: Option<PathBuf>,
}

impl StoreArgs {
    pub(crate) fn config(self) -> StoreConfig {
        let Self { max_stored_responses, max_stored_bytes, response_store_dir } = self;
        StoreConfig {
            max_stored_responses: max_stored_responses as usize,
            max_stored_bytes: max_stored_bytes.0,
            response_store_dir,
        }
    }
}

//! Logs: how they are written.

use std::io::IsTerminal as _;

use anyhow::Context as _;
use tracing_subscriber::EnvFilter;

use crate::args::LogFormat;

/// Begins to write logs to standard error.
///
/// # Errors
/// `filter` is none.
pub(crate) fn start(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter).with_context(|| format!("{filter:?} is no log filter"))?;
    let colours = std::io::stderr().is_terminal();
    let logs =
        tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Text => logs.with_target(false).try_init(),
        LogFormat::Json => logs.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("failed to start logging: {error}"))
}

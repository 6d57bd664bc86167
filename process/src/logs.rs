//! Sets up the logs of a process. They contain names, counts and times, and never prompts, answers or keys.

use std::io::IsTerminal as _;

use anyhow::Context as _;
use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// The format of the logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Human-readable text for terminals.
    Text,
    /// One JSON object per line, for log collectors.
    Json,
}

/// Starts writing logs to standard error.
///
/// # Errors
/// `filter` is invalid, or logging was started before.
pub fn start(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter).with_context(|| format!("invalid log filter {filter:?}"))?;
    let is_terminal = std::io::stderr().is_terminal();
    let logs =
        tracing_subscriber::fmt().with_env_filter(filter).with_ansi(is_terminal).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Text => logs.with_target(false).try_init(),
        LogFormat::Json => logs.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("failed to start logging: {error}"))
}

//! The errors that occur while a model is loaded or run.

use std::iter::successors;
use std::path::PathBuf;

/// An error that occurs while a model is loaded or run. [`Error::chain`] formats it with its causes, for the caller
/// that reports it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation of the OpenVINO runtime or of this crate failed.
    #[error("failed to {what}: {message}")]
    Runtime {
        /// The operation that failed, as a verb with its object.
        what: &'static str,
        /// The reason for the failure, such as the error message of the runtime.
        message: String,
    },
    /// This crate does not support the model, or not with this configuration. The message states the reason.
    #[error("cannot serve this model: {0}")]
    Unsupported(String),
    /// The GGUF file is invalid or cannot be read.
    #[error("failed to read the model file")]
    Gguf(#[from] server_gguf::Error),
    /// There is no model at the given path.
    #[error("there is no model at {}: {fault}", path.display())]
    Missing {
        /// The path from the configuration.
        path: PathBuf,
        /// The reason why the content of the path is not a model.
        fault: &'static str,
    },
    /// An adapter is invalid or does not fit the model.
    #[error("cannot use the adapter {name:?}: {why}")]
    Adapter {
        /// The name of the adapter.
        name: String,
        /// The reason why the adapter cannot be used.
        why: String,
    },
    /// The size of the KV cache is too small or too large.
    #[error("a KV cache of {bytes} bytes {why}")]
    CacheSize {
        /// The configured or derived size in bytes.
        bytes: u64,
        /// The reason why the size is rejected.
        why: String,
    },
}

impl Error {
    pub(crate) fn runtime(what: &'static str, message: &str) -> Self {
        Self::Runtime { what, message: without_locations(message) }
    }

    /// The message of this error followed by the messages of its causes.
    pub fn chain(&self) -> String {
        chain(self)
    }
}

/// The message of an error followed by the messages of its causes.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// The lines of a message of the runtime that describe the error, without those that name a location in the runtime's
/// source code.
fn without_locations(message: &str) -> String {
    let lines: Vec<&str> =
        message.lines().map(str::trim).filter(|line| !line.is_empty() && !is_location(line)).collect();
    if lines.is_empty() { message.trim().to_owned() } else { lines.join("; ") }
}

fn is_location(line: &str) -> bool {
    (line.starts_with("Exception from ") || line.starts_with("Check '")) && line.ends_with(':')
}

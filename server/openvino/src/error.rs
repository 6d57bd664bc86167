//! Why a model cannot be loaded or run.

use std::error::Error as _;
use std::path::PathBuf;

/// Why a model cannot be loaded or run. [`Error::chain`] prints it with its causes, once, at the edge.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The runtime failed.
    #[error("failed to {what}: {message}")]
    Runtime {
        /// What was being done.
        what: &'static str,
        /// What the runtime said.
        message: String,
    },
    /// The model is sound but not one this crate can serve.
    #[error("cannot serve this model: {0}")]
    Unsupported(String),
    /// The GGUF file is not sound.
    #[error("failed to read the model file")]
    Gguf(#[from] server_gguf::Error),
    /// There is no model at the path.
    #[error("there is no model at {}: {expected}", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
        /// What was looked for.
        expected: &'static str,
    },
    /// An adapter cannot be served with this model.
    #[error("cannot use the adapter {name:?}: {why}")]
    Adapter {
        /// Its name.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// The KV cache cannot be as small or as large as asked.
    #[error("a KV cache of {bytes} bytes {why}")]
    CacheSize {
        /// The size asked for or derived.
        bytes: u64,
        /// What is wrong with it.
        why: String,
    },
}

impl Error {
    pub(crate) fn runtime(what: &'static str, message: &str) -> Self {
        Self::Runtime { what, message: first_lines(message) }
    }

    /// The message with those of its causes.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut source = self.source();
        while let Some(cause) = source {
            text.push_str(": ");
            text.push_str(&cause.to_string());
            source = cause.source();
        }
        text
    }
}

/// Lines of a runtime's message that are kept: the last ones say what is wrong, the ones before where in the
/// runtime's own sources.
fn first_lines(message: &str) -> String {
    let said: Vec<&str> =
        message.lines().map(str::trim).filter(|line| !line.is_empty() && !is_location(line)).collect();
    if said.is_empty() { message.trim().to_owned() } else { said.join("; ") }
}

fn is_location(line: &str) -> bool {
    (line.starts_with("Exception from ") || line.starts_with("Check '")) && line.ends_with(':')
}

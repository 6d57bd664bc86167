//! What can be wrong with a model's text files.

use std::{io, path::PathBuf};

/// A model's tokenizer, template or configuration could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The operating system failed us.
    #[error("failed to read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The file is not JSON.
    #[error("{path} is not valid JSON")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where it is not.
        #[source]
        source: serde_json::Error,
    },
    /// The GGUF file is unsound.
    #[error(transparent)]
    Gguf(#[from] server_gguf::Error),
    /// Something is wrong with a field.
    #[error("{path}: {field} {problem}")]
    Field {
        /// The file.
        path: PathBuf,
        /// The field or metadata key.
        field: String,
        /// What is wrong with it, to be read after its name.
        problem: String,
    },
    /// A folder lacks a file without which there is no model.
    #[error("{folder} has no {file}")]
    NoFile {
        /// The folder.
        folder: PathBuf,
        /// The file's name.
        file: &'static str,
    },
}

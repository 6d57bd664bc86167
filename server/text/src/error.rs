//! The errors that occur when a model's text files are loaded or when text is tokenized.

use std::{io, path::PathBuf};

/// The reason why a model's tokenizer, template or configuration cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file could not be read.
    #[error("failed to read {path}")]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The file is not valid JSON.
    #[error("{path} is not valid JSON")]
    Json {
        /// The path of the file.
        path: PathBuf,
        /// The error of the JSON parser.
        #[source]
        source: serde_json::Error,
    },
    /// The GGUF file cannot be read or is invalid.
    #[error(transparent)]
    Gguf(#[from] server_gguf::Error),
    /// A field has an invalid value.
    #[error("{path}: {field} {problem}")]
    Field {
        /// The path of the file.
        path: PathBuf,
        /// The name of the field or metadata key.
        field: String,
        /// The problem, as a phrase that follows the name of the field.
        problem: String,
    },
    /// The directory lacks a required file.
    #[error("{directory} has no {file}")]
    NoFile {
        /// The path of the directory.
        directory: PathBuf,
        /// The name of the missing file.
        file: &'static str,
    },
}

/// The reason why text cannot be tokenized.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("failed to tokenize the text: {0}")]
pub struct EncodeError(pub(crate) String);

//! Everything that can be wrong with a GGUF file, one message each.

use std::{io, path::PathBuf};

use crate::TensorType;

/// A GGUF file could not be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system failed us.
    #[error("failed to read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The file is not what it should be.
    #[error("{path} is not a usable GGUF file")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: FormatError,
    },
    /// There is no tensor of that name.
    #[error("{path} has no tensor {name:?}")]
    NoTensor {
        /// The file.
        path: PathBuf,
        /// The name asked for.
        name: String,
    },
    /// There are fewer rows than were asked for.
    #[error("tensor {name:?} has {rows} rows, rows {start}..{end} were asked for")]
    NoRows {
        /// The tensor.
        name: String,
        /// Rows it has.
        rows: u64,
        /// First row asked for.
        start: u64,
        /// First row no longer asked for.
        end: u64,
    },
    /// The type's values cannot be computed here.
    #[error("tensor type {0} cannot be decoded")]
    Undecodable(TensorType),
    /// Bytes and values do not fit each other.
    #[error("{bytes} bytes of {kind} are not {values} values")]
    Lengths {
        /// The type.
        kind: TensorType,
        /// Bytes given.
        bytes: usize,
        /// Values asked for.
        values: usize,
    },
}

/// What is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The first four bytes are not `GGUF`.
    #[error("it does not begin with the letters GGUF")]
    Magic,
    /// Written by a big-endian machine.
    #[error("it is big-endian; only little-endian files are supported")]
    BigEndian,
    /// Neither version 2 nor 3.
    #[error("it has GGUF version {0}; only 2 and 3 are supported")]
    Version(u32),
    /// It ends too early.
    #[error("it is truncated: {what} needs {needed} bytes at offset {offset}, the file has {size}")]
    Truncated {
        /// What was being read.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Where, in bytes from the start.
        offset: u64,
        /// Size of the file, bytes.
        size: u64,
    },
    /// A count or length is above its limit.
    #[error("{what} is {value}, above the limit of {limit}")]
    Limit {
        /// What is too large.
        what: String,
        /// How large the file says it is.
        value: u64,
        /// The limit.
        limit: u64,
    },
    /// A string is not UTF-8.
    #[error("{0} is not valid UTF-8")]
    Utf8(String),
    /// An unknown metadata value type.
    #[error("metadata {key:?} has unknown value type {kind}")]
    ValueType {
        /// The key.
        key: String,
        /// The type's number.
        kind: u32,
    },
    /// An array of arrays.
    #[error("metadata {0:?} is an array of arrays, which is not supported")]
    NestedArray(String),
    /// A boolean that is neither 0 nor 1.
    #[error("metadata {key:?} has a boolean of value {value}")]
    Bool {
        /// The key.
        key: String,
        /// The byte.
        value: u8,
    },
    /// A key appears twice.
    #[error("metadata {0:?} appears twice")]
    DuplicateKey(String),
    /// A key that the format itself needs has the wrong type or value.
    #[error("metadata {key:?} is {value}, which is not valid")]
    BadValue {
        /// The key.
        key: String,
        /// What it is.
        value: String,
    },
    /// The file is one part of several.
    #[error("it is one of {0} parts of a split model; merge them first (llama-gguf-split --merge)")]
    Split(u64),
    /// A tensor name appears twice.
    #[error("tensor {0:?} appears twice")]
    DuplicateTensor(String),
    /// An unknown tensor type.
    #[error("tensor {name:?} has unknown type {kind}")]
    TensorType {
        /// The tensor.
        name: String,
        /// The type's number.
        kind: u32,
    },
    /// A shape that cannot be.
    #[error("tensor {name:?} of type {kind} has impossible shape {shape:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its type.
        kind: TensorType,
        /// Its shape, fastest dimension first.
        shape: Vec<u64>,
    },
    /// An offset that is not a multiple of the alignment.
    #[error("tensor {name:?} is at offset {offset}, not a multiple of the alignment {alignment}")]
    Unaligned {
        /// The tensor.
        name: String,
        /// Its offset in the tensor data, bytes.
        offset: u64,
        /// The alignment, bytes.
        alignment: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors {0:?} and {1:?} overlap")]
    Overlap(String, String),
}

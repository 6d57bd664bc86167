//! The errors that reading or decoding a GGUF file can return.

use std::{io, path::PathBuf};

use crate::TensorType;

/// The reason why a GGUF file, or a part of one, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read, or is not a regular file.
    #[error("failed to read {path}")]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The content of the file is invalid, is not supported, or exceeds a limit.
    #[error("{path} is not a valid GGUF file")]
    Format {
        /// The path of the file.
        path: PathBuf,
        /// The first problem in the file.
        #[source]
        source: FormatError,
    },
    /// The file has no tensor with the requested name.
    #[error("{path} has no tensor {name:?}")]
    NoTensor {
        /// The path of the file.
        path: PathBuf,
        /// The name of the requested tensor.
        name: String,
    },
    /// Some of the requested rows do not exist in the tensor.
    #[error("rows {start}..{end} are out of range: tensor {name:?} has {rows} rows")]
    NoRows {
        /// The name of the tensor.
        name: String,
        /// The number of rows of the tensor.
        rows: u64,
        /// The first requested row.
        start: u64,
        /// The row after the last requested one.
        end: u64,
    },
    /// This crate does not support decoding the type.
    #[error("decoding tensor type {0} is not supported")]
    Undecodable(TensorType),
    /// The number of bytes does not match the number of values.
    #[error("{bytes} bytes of type {kind} do not contain exactly {values} values")]
    Lengths {
        /// The type of the values.
        kind: TensorType,
        /// The number of bytes passed.
        bytes: usize,
        /// The number of requested values or, if the caller requested no number, of the values in whole blocks.
        values: usize,
    },
}

/// The reason why the content of a file is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The first four bytes are not `GGUF`.
    #[error("the first four bytes are not \"GGUF\"")]
    Magic,
    /// The file was written for big-endian machines.
    #[error("the file is big-endian; only little-endian files are supported")]
    BigEndian,
    /// The version of the format is neither 2 nor 3.
    #[error("GGUF version {0} is not supported; supported versions: 2 and 3")]
    Version(u32),
    /// The file is shorter than its content requires.
    #[error(
        "the file is truncated: {what} needs {needed} bytes at offset {offset}, but the file has {size} bytes"
    )]
    Truncated {
        /// The part of the file that was being read.
        what: String,
        /// The number of bytes that this part needs.
        needed: u64,
        /// The offset of this part in the file, in bytes.
        offset: u64,
        /// The size of the file, in bytes.
        size: u64,
    },
    /// A count or length is above its limit.
    #[error("{what} is {value}, which exceeds the limit of {limit}")]
    Limit {
        /// The count or length that is too large.
        what: String,
        /// The value in the file.
        value: u64,
        /// The largest allowed value.
        limit: u64,
    },
    /// A string is not UTF-8.
    #[error("{0} is not valid UTF-8")]
    Utf8(String),
    /// A metadata value has an unknown type.
    #[error("metadata {key:?} has the unknown value type {kind}")]
    ValueType {
        /// The key of the metadata value.
        key: String,
        /// The number of the unknown type.
        kind: u32,
    },
    /// A metadata value is an array of arrays.
    #[error("metadata {0:?} is an array of arrays, which is not supported")]
    NestedArray(String),
    /// A boolean is stored as a byte that is neither 0 nor 1.
    #[error("metadata {key:?} has a boolean stored as {value}, which is neither 0 nor 1")]
    Bool {
        /// The key of the metadata value.
        key: String,
        /// The byte that is stored.
        value: u8,
    },
    /// A metadata key appears twice.
    #[error("metadata key {0:?} appears twice")]
    DuplicateKey(String),
    /// A metadata value that the format itself defines has the wrong type or value.
    #[error("metadata {key:?} has an invalid value: {value} (expected: {expected})")]
    BadValue {
        /// The key of the metadata value.
        key: String,
        /// A description of the invalid value.
        value: String,
        /// A description of the valid values.
        expected: String,
    },
    /// The file is a part of a split model, but not its first part, from which the model is loaded.
    #[error(
        "the file is part {part} of {parts} of a split model; load the first part, whose name ends with \
         -00001-of-{parts:05}.gguf"
    )]
    LaterPart {
        /// The number of the part; the first is 1.
        part: u64,
        /// The number of parts of the model.
        parts: u64,
    },
    /// The names of the other parts cannot be derived from the name of the first part.
    #[error("the name of the first part of a split model with {0} parts must end with -00001-of-{0:05}.gguf")]
    PartName(u64),
    /// A file with the name of a part has the metadata of another part or of another model.
    #[error(
        "the file must be part {part} of {parts} of the split model, but its metadata says part {found_part} of \
         {found_parts}"
    )]
    OtherPart {
        /// The number of the part according to the name; the first is 1.
        part: u64,
        /// The number of parts of the model.
        parts: u64,
        /// The number of the part according to the metadata.
        found_part: u64,
        /// The number of parts according to the metadata.
        found_parts: u64,
    },
    /// A part has a tensor that an earlier part also has.
    #[error("tensor {0:?} is also in an earlier part of the split model")]
    TensorInEarlierPart(String),
    /// The parts have more or fewer tensors than the metadata of the first part says.
    #[error(
        "the split model has {expected} tensors according to its first part, but this and the earlier parts have {found}"
    )]
    TensorCount {
        /// The number of tensors according to the first part.
        expected: u64,
        /// The number of tensors of the parts up to this one.
        found: u64,
    },
    /// A tensor name appears twice in a file.
    #[error("tensor {0:?} appears twice")]
    DuplicateTensor(String),
    /// A tensor has an unknown type.
    #[error("tensor {name:?} has the unknown type {kind}")]
    TensorType {
        /// The name of the tensor.
        name: String,
        /// The number of the unknown type.
        kind: u32,
    },
    /// A tensor has a shape that is invalid for its type.
    #[error("tensor {name:?} of type {kind} has the invalid shape {shape:?}")]
    Shape {
        /// The name of the tensor.
        name: String,
        /// The type of the tensor.
        kind: TensorType,
        /// The shape of the tensor, fastest dimension first.
        shape: Vec<u64>,
    },
    /// The offset of a tensor is not a multiple of the alignment.
    #[error(
        "the offset of tensor {name:?} in the tensor data is {offset}, which is not a multiple of the alignment \
         ({alignment} bytes)"
    )]
    Unaligned {
        /// The name of the tensor.
        name: String,
        /// The offset of the tensor in the tensor data, in bytes.
        offset: u64,
        /// The alignment of tensor data, in bytes.
        alignment: u64,
    },
    /// Two tensors overlap in the file.
    #[error("tensors {0:?} and {1:?} overlap")]
    Overlap(String, String),
}

//! Reads and writes GGUF files: metadata, the tensor directory and tensor data, including quantized data.
//!
//! This crate decides whether a file is a valid GGUF file and computes its weights exactly. It does not know model
//! architectures, tokenizers or runtimes. Files are not trusted: every count and length is checked against the size of
//! the file or the [`limits`] before memory is allocated. Files are read without `unsafe` code and without memory
//! mapping.
//!
//! ```text
//! path ─► GgufFile::open ─► metadata (Value)          tensors (TensorEntry)
//!                                                      │ read_tensor / read_tensor_rows
//!                                                      ▼
//!                                              bytes ─► blocks::decode (affine groups)
//!                                                    └► dequantize      (f32)
//! ```

pub mod blocks;
mod error;
mod file;
mod float;
pub mod limits;
mod parse;
mod split;
mod tensor;
mod value;
pub mod write;

pub use blocks::dequantize;
pub use error::{Error, FormatError};
pub use file::GgufFile;
pub use float::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
pub use split::PartName;
pub use tensor::{QuantLayout, TensorEntry, TensorType};
pub use value::{Array, Value};

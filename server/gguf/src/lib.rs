//! Reads GGUF files: metadata, the tensor directory, tensor bytes, and what quantised bytes mean.
//!
//! It decides whether a file is a sound GGUF file and what its weights are, exactly. It knows no model
//! architecture, no tokenizer and no runtime. Files are not trusted: every count and length is checked
//! against the file's size and the [`limits`] before anything is allocated. No `unsafe`, no memory mapping.
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
mod tensor;
mod value;
pub mod write;

pub use blocks::dequantize;
pub use error::{Error, FormatError};
pub use file::GgufFile;
pub use float::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
pub use tensor::{TensorEntry, TensorType};
pub use value::{Array, Value};

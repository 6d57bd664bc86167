//! Vision-language models that optimum-intel has exported: their files, the embeddings of tokens, and the image
//! encoder.
//!
//! The language model is loaded like any other IR (`load.rs`), but reads embeddings instead of token IDs.

mod embeddings;
mod encoder;
mod files;
mod image_tiles;
mod models;
mod qwen;

pub(crate) use embeddings::TextEmbeddings;
pub use encoder::{EncoderImage, EncoderReport, OpenVinoImageEncoder, load_image_encoder};
pub(crate) use files::VisionFiles;

//! Converts text to tokens with one of two encoders. One is the pipeline that a `tokenizer.json` describes, or one
//! rebuilt for the byte-level BPE of a GGUF file. The other is the score-based merging of SentencePiece, which such a
//! pipeline cannot reproduce exactly.

mod bound;
mod encoder;
mod gguf;
mod huggingface;
mod pipeline;
mod pre;
mod spm;

pub use encoder::{ENCODE_MEMORY_PER_BYTE, TEXT_BYTES_MAX, Tokenizer};
pub(crate) use gguf::from_gguf;
pub(crate) use huggingface::from_directory;

//! Converts text to tokens with one of two encoders. The first is a `tokenizers` pipeline that is either loaded from a
//! `tokenizer.json` or rebuilt from the BPE merges in a GGUF file. The second is the score-based merging of
//! SentencePiece, which such a pipeline cannot reproduce exactly.

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

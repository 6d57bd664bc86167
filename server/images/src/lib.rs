//! Turns the bytes of an image into the inputs of a model's vision encoder, and into the text and the positions that the
//! image has in the prompt.
//!
//! This crate decides which images are valid, how the processor of each model family resizes, tiles and normalizes
//! them, and how many tokens they take. It depends on neither OpenVINO nor HTTP: it does not access the network, starts
//! no thread and reads no clock. Only [`ImageProcessor::load`] reads files. Images are not trusted: their sizes are
//! checked before memory is allocated for their pixels.
//!
//! ```text
//! bytes ─► ImageHeader::read ─► Size ─► ImageProcessor::layout ─► ImageLayout ─► expand_prompt ─► text
//!   └────► decode ─► RgbImage ─► ImageProcessor::preprocess ─► EncoderInputs     (then tokens)
//!                                                            tokens ─► image_spans ─► mrope_positions, token_types
//! ```
//!
//! For a given model and level of detail, an [`ImageLayout`] depends only on the size of the image, so the number of
//! tokens, the text of the prompt and the memory of the inputs are known before the image is decoded. Where OpenVINO
//! GenAI and transformers differ, this crate follows transformers 4.57 with Pillow.

mod config;
mod decode;
mod error;
mod family;
mod header;
mod inputs;
mod layout;
pub mod limits;
mod normalize;
mod patch_positions;
mod positions;
mod preprocess;
mod processor;
mod prompt;
mod raster;
mod resample;

pub use decode::{DecodeLimits, decode};
pub use error::{ImageError, LoadError};
pub use family::{Detail, ModelFamily};
pub use header::{ImageFormat, ImageHeader, Orientation};
pub use inputs::{
    EncoderInputs, MaskedTiles, PositionInterpolation, QwenPatches, ResamplerSlice, Tensor, WindowLayout,
};
pub use layout::{FeatureRow, ImageLayout, ImageMarker, ImageSpan, TokenGrid};
pub use positions::{MropePositions, mrope_positions, token_types};
pub use processor::{ImageDigest, ImageProcessor, LearnedRows};
pub use prompt::{PromptError, expand_prompt, image_spans};
pub use raster::{RgbImage, Size};
pub use resample::{Filter, resize};

//! The runners of a loaded model.

use server_engine::{ImageEncoder, ModelRunner, SpillIdentity};
use server_images::ImageProcessor;

use crate::image_reader::EncoderContent;

/// The runners of a model and of its draft model.
pub(super) struct Runners {
    pub(super) model: Box<dyn ModelRunner>,
    pub(super) draft: Option<Box<dyn ModelRunner>>,
    /// The backend and the precisions, for the fingerprint of the model.
    pub(super) description: String,
    /// The identity of the blocks in the KV cache.
    pub(super) identity: SpillIdentity,
    /// `None` if the model reads no images.
    pub(super) images: Option<ImageBackend>,
}

/// The image encoder of a model.
pub(super) struct ImageBackend {
    pub(super) processor: ImageProcessor,
    pub(super) encoder: Box<dyn ImageEncoder>,
    pub(super) content: EncoderContent,
}

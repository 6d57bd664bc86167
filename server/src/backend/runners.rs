//! The runners of a loaded model.

use server_engine::{ImageEncoder, ModelRunner, SpillIdentity};
use server_images::ImageProcessor;

use crate::image_reader::EncoderContent;

/// The runners of a model and of its draft model.
pub(super) struct Runners {
    pub(super) model: Box<dyn ModelRunner>,
    pub(super) draft: Option<Box<dyn ModelRunner>>,
    /// The backend, the precisions and the adapters, for the fingerprint of the model.
    pub(super) description: String,
    /// The inputs on which the content of the blocks in the KV cache depends, besides the tokens.
    pub(super) identity: SpillIdentity,
    /// The image processor and the image encoder; `None` if the model does not accept images.
    pub(super) images: Option<ImageBackend>,
}

/// The image processor and the image encoder of a model.
pub(super) struct ImageBackend {
    pub(super) processor: ImageProcessor,
    pub(super) encoder: Box<dyn ImageEncoder>,
    pub(super) content: EncoderContent,
}

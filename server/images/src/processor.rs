//! The image processor of a model: it loads the configuration and delegates to the processor of the family.

use std::{fmt, path::Path};

use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::{
    config::ModelConfig,
    error::{ImageError, LoadError},
    family::{Detail, ModelFamily},
    inputs::EncoderInputs,
    layout::{ImageLayout, ImageMarker},
    preprocess::Preprocess,
    raster::{RgbImage, Size},
};

mod clip;
mod gemma3;
mod idefics3;
mod internvl;
mod llava;
mod llava_next;
mod minicpm;
mod phi4;
mod qwen;
mod tile_grid;

/// The image processor of a model. It reproduces the model's processor in transformers.
#[derive(Debug)]
pub struct ImageProcessor {
    family: ModelFamily,
    preprocess: Box<dyn Preprocess>,
    learned_rows: LearnedRows,
    config_digest: [u8; 32],
}

/// The learned vectors, from `config.json`, that are embeddings of image tokens in addition to the rows of the
/// encoder's output.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LearnedRows {
    /// The vector of [`FeatureRow::RowEnd`](crate::FeatureRow::RowEnd).
    pub row_end: Option<Vec<f32>>,
    /// The vector of [`FeatureRow::GlobalSeparator`](crate::FeatureRow::GlobalSeparator).
    pub global_separator: Option<Vec<f32>>,
}

/// Identifies the encoder's output for an image: a SHA-256 digest of the size and the pixels of the image, the level of
/// detail, and the configurations of the model and of its processor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImageDigest(pub [u8; 32]);

impl fmt::Debug for ImageDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl ImageProcessor {
    /// Loads the processor of the model in a directory, from `config.json` and `preprocessor_config.json` (or
    /// `processor_config.json`, which replaces the latter since transformers 5).
    ///
    /// # Errors
    ///
    /// [`LoadError`] if images are not supported for the model type, or a file is missing or invalid.
    pub fn load(directory: &Path) -> Result<Self, LoadError> {
        Self::new(&ModelConfig::read(directory)?)
    }

    /// Creates a processor from the contents of `config.json` and `preprocessor_config.json`.
    ///
    /// # Errors
    ///
    /// [`LoadError`] if images are not supported for the model type, or a field is missing or invalid.
    pub fn from_values(config: Value, preprocessor_config: Value) -> Result<Self, LoadError> {
        Self::new(&ModelConfig::new(config, preprocessor_config))
    }

    fn new(config: &ModelConfig) -> Result<Self, LoadError> {
        let model_type = config.model.optional_str("model_type")?.unwrap_or_default();
        let family = ModelFamily::from_model_type(model_type)
            .ok_or_else(|| LoadError::Family { model_type: model_type.to_owned() })?;
        let preprocess: Box<dyn Preprocess> = match family {
            ModelFamily::Qwen2Vl | ModelFamily::Qwen2_5Vl | ModelFamily::Qwen3Vl => {
                Box::new(qwen::Qwen::read(family, config)?)
            }
            ModelFamily::Gemma3 => Box::new(gemma3::Gemma3::read(config)?),
            ModelFamily::Llava => Box::new(llava::Llava::read(config)?),
            ModelFamily::LlavaNext => Box::new(llava_next::LlavaNext::read(config)?),
            ModelFamily::InternVl => Box::new(internvl::InternVl::read(config)?),
            ModelFamily::Idefics3 | ModelFamily::SmolVlm => {
                Box::new(idefics3::Idefics3::read(family, config)?)
            }
            ModelFamily::MiniCpmV => Box::new(minicpm::MiniCpm::read(config)?),
            ModelFamily::Phi4Multimodal => Box::new(phi4::Phi4::read(config)?),
        };
        let learned_rows = match family {
            ModelFamily::LlavaNext => LearnedRows {
                row_end: config.model.optional_numbers("image_newline")?,
                global_separator: None,
            },
            ModelFamily::Phi4Multimodal => LearnedRows {
                row_end: config.model.optional_numbers("sub_GN")?,
                global_separator: config.model.optional_numbers("glb_GN")?,
            },
            _ => LearnedRows::default(),
        };
        let mut hasher = Sha256::new();
        for value in [&config.model.value, &config.preprocessor.value] {
            let text = value.to_string();
            hasher.update((text.len() as u64).to_le_bytes());
            hasher.update(text);
        }
        Ok(Self { family, preprocess, learned_rows, config_digest: hasher.finalize().into() })
    }

    /// The family of the model.
    #[must_use]
    pub fn family(&self) -> ModelFamily {
        self.family
    }

    /// The texts that stand for an image in a rendered prompt, for [`expand_prompt`](crate::expand_prompt). Chat
    /// templates write them for image parts. See [`reserved_text`](Self::reserved_text).
    #[must_use]
    pub fn markers(&self) -> &'static [ImageMarker] {
        self.preprocess.markers()
    }

    /// The text that replaces an image in the input of a chat template without support for image parts. It contains one
    /// marker. `number` counts the images of the request from 0.
    #[must_use]
    pub fn tag(&self, number: usize) -> String {
        let [before, behind] = self.preprocess.tag_frame();
        format!("{before}{}{behind}", self.markers()[0].text(number))
    }

    /// Finds a marker or the image token in a client's text, where it would be confused with an image of the request.
    #[must_use]
    pub fn reserved_text<'a>(&self, text: &'a str) -> Option<&'a str> {
        let token = text.find(self.image_token()).map(|start| start..start + self.image_token().len());
        let marker = self.markers().iter().find_map(|marker| marker.find(text));
        token.or(marker).map(|range| &text[range])
    }

    /// The text of the special token that stands at the positions of image tokens, for
    /// [`image_spans`](crate::image_spans).
    #[must_use]
    pub fn image_token(&self) -> &'static str {
        self.preprocess.image_token()
    }

    /// The learned vectors that are embeddings of image tokens in addition to the rows of the encoder's output.
    #[must_use]
    pub fn learned_rows(&self) -> &LearnedRows {
        &self.learned_rows
    }

    /// Returns the tokens and the text of an image of this size in the prompt, and the memory of its inputs.
    ///
    /// # Errors
    ///
    /// [`ImageError`] if the model cannot process an image with these proportions.
    pub fn layout(&self, size: Size, detail: Detail) -> Result<ImageLayout, ImageError> {
        self.preprocess.layout(size, detail)
    }

    /// Computes the inputs of the encoder. This takes a few milliseconds per million pixels, so call this method on a
    /// thread that may block.
    ///
    /// # Errors
    ///
    /// [`ImageError`] if the model cannot process an image with these proportions.
    pub fn preprocess(&self, image: &RgbImage, detail: Detail) -> Result<EncoderInputs, ImageError> {
        self.preprocess.inputs(image, detail)
    }

    /// Identifies the encoder's output for an image.
    #[must_use]
    pub fn digest(&self, image: &RgbImage, detail: Detail) -> ImageDigest {
        let mut hasher = Sha256::new();
        hasher.update(self.config_digest);
        hasher.update([u8::from(detail == Detail::Low)]);
        hasher.update(image.size().width.to_le_bytes());
        hasher.update(image.size().height.to_le_bytes());
        hasher.update(image.pixels());
        ImageDigest(hasher.finalize().into())
    }
}

//! The processor of LLaVA. The encoder processes one picture of a fixed size, to which [`Clip`] resizes and crops the
//! image.

use super::clip::Clip;
use crate::{
    config::ModelConfig,
    error::{ImageError, LoadError},
    family::Detail,
    inputs::{EncoderInputs, pixel_bytes},
    layout::{ImageLayout, ImageMarker, PromptText},
    preprocess::Preprocess,
    raster::{RgbImage, Size},
};

const IMAGE_TOKEN: &str = "<image>";

#[derive(Debug)]
pub(super) struct Llava(Clip);

impl Llava {
    pub(super) fn read(config: &ModelConfig) -> Result<Self, LoadError> {
        Ok(Self(Clip::read(config)?))
    }
}

impl Preprocess for Llava {
    fn markers(&self) -> &'static [ImageMarker] {
        &[ImageMarker::Text(IMAGE_TOKEN)]
    }

    fn image_token(&self) -> &'static str {
        IMAGE_TOKEN
    }

    fn layout(&self, _size: Size, _detail: Detail) -> Result<ImageLayout, ImageError> {
        let num_tokens = self.0.num_tokens as usize;
        let text = PromptText::plain(IMAGE_TOKEN.repeat(num_tokens));
        let input_bytes = pixel_bytes(1, self.0.crop);
        Ok(ImageLayout { num_tokens, feature_rows: None, grid: None, input_bytes, text })
    }

    fn inputs(&self, image: &RgbImage, _detail: Detail) -> Result<EncoderInputs, ImageError> {
        let tile = self.0.tile(image);
        Ok(EncoderInputs::Tiles(self.0.normalization.pixel_values(&[tile], self.0.crop)))
    }
}

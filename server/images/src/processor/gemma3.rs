//! The processor of Gemma 3, which resizes the image to a fixed size without regard to its proportions. Pan-and-scan,
//! which is off by default, is not supported.

use crate::{
    config::ModelConfig,
    error::{ImageError, LoadError},
    family::Detail,
    inputs::{EncoderInputs, pixel_bytes},
    layout::{ImageLayout, ImageMarker, PromptText},
    normalize::{ColorStatistics, Normalization},
    preprocess::{Preprocess, TILE_EDGE_MAX, read_filter},
    raster::{RgbImage, Size},
    resample::{Filter, resize},
};

const MARKER: &str = "<start_of_image>";
const IMAGE_TOKEN: &str = "<image_soft_token>";

#[derive(Debug)]
pub(super) struct Gemma3 {
    size: Size,
    num_tokens: usize,
    filter: Filter,
    normalization: Normalization,
}

impl Gemma3 {
    pub(super) fn read(config: &ModelConfig) -> Result<Self, LoadError> {
        let ModelConfig { model, preprocessor } = config;
        preprocessor.expect_bool("do_resize", true)?;
        preprocessor.expect_bool("do_pan_and_scan", false)?;
        let edge = |field| preprocessor.count_up_to(field, TILE_EDGE_MAX);
        let num_tokens = model.optional_count("mm_tokens_per_image")?.unwrap_or(256);
        Ok(Self {
            size: Size::new(edge("size.width")?, edge("size.height")?),
            num_tokens: model.at_most("mm_tokens_per_image", num_tokens, 1 << 16)? as usize,
            filter: read_filter(preprocessor, Filter::Bilinear)?,
            normalization: Normalization::read(preprocessor, ColorStatistics::HALF)?,
        })
    }
}

impl Preprocess for Gemma3 {
    fn markers(&self) -> &'static [ImageMarker] {
        &[ImageMarker::Text(MARKER)]
    }

    fn image_token(&self) -> &'static str {
        IMAGE_TOKEN
    }

    fn layout(&self, _size: Size, _detail: Detail) -> Result<ImageLayout, ImageError> {
        let tokens = IMAGE_TOKEN.repeat(self.num_tokens);
        let text = PromptText::plain(format!("\n\n{MARKER}{tokens}<end_of_image>\n\n"));
        let (num_tokens, input_bytes) = (self.num_tokens, pixel_bytes(1, self.size));
        Ok(ImageLayout { num_tokens, feature_rows: None, grid: None, input_bytes, text })
    }

    fn inputs(&self, image: &RgbImage, _detail: Detail) -> Result<EncoderInputs, ImageError> {
        let tile = resize(image, self.size, self.filter);
        Ok(EncoderInputs::Tiles(self.normalization.pixel_values(&[tile], self.size)))
    }
}

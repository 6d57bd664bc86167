//! The processor of LLaVA-NeXT, which encodes a global view of the image, followed by tiles of the image in the best of
//! several resolutions.

use super::clip::Clip;
use crate::{
    config::ModelConfig,
    error::{ImageError, LoadError},
    family::Detail,
    inputs::{EncoderInputs, pixel_bytes},
    layout::{FeatureRow, ImageLayout, ImageMarker, PromptText},
    preprocess::{Preprocess, TILES_MAX, split_into_tiles},
    raster::{RgbImage, Size},
    resample::resize,
};

const IMAGE_TOKEN: &str = "<image>";

#[derive(Debug)]
pub(super) struct LlavaNext {
    clip: Clip,
    /// The resolutions to choose from; multiples of the edge of a tile.
    resolutions: Vec<Size>,
}

impl LlavaNext {
    pub(super) fn read(config: &ModelConfig) -> Result<Self, LoadError> {
        let clip = Clip::read(config)?;
        let file = if config.model.get("image_grid_pinpoints").is_some() {
            &config.model
        } else {
            &config.preprocessor
        };
        let tile = clip.crop;
        let patches = (tile.width / clip.patch) * (tile.height / clip.patch);
        if tile.width != tile.height {
            let problem = format!("is {tile}; a square is expected");
            return Err(config.preprocessor.fault(clip.crop_field, problem));
        }
        if clip.num_tokens != patches {
            let problem = format!(
                "gives {} tokens for the {patches} patches of a tile; one token for each patch is expected",
                clip.num_tokens
            );
            return Err(config.model.fault("vision_feature_select_strategy", problem));
        }
        let pinpoints = file.get("image_grid_pinpoints").and_then(|value| value.as_array());
        let resolution = |value: &serde_json::Value| {
            let side = |side: &serde_json::Value| u32::try_from(side.as_u64()?).ok();
            let [height, width] = value.as_array()?.as_slice() else { return None };
            let (height, width) = (side(height)?, side(width)?);
            let tiles = u64::from(height / tile.height) * u64::from(width / tile.width);
            let is_valid = height % tile.height == 0
                && width % tile.width == 0
                && (1..=u64::from(TILES_MAX)).contains(&tiles);
            is_valid.then(|| Size::new(width, height))
        };
        let resolutions: Option<Vec<Size>> =
            pinpoints.and_then(|values| values.iter().map(resolution).collect());
        let resolutions = resolutions.filter(|resolutions| !resolutions.is_empty()).ok_or_else(|| {
            let problem = format!(
                "must be a non-empty list of [height, width] pairs; both sides must be multiples of {}, and each pair \
                 must cover 1 to {TILES_MAX} tiles",
                tile.height
            );
            file.fault("image_grid_pinpoints", problem)
        })?;
        Ok(Self { clip, resolutions })
    }

    /// The resolution that preserves the most pixels of the image. Among resolutions that preserve equally many pixels,
    /// the one with the fewest unused pixels is chosen.
    fn resolution(&self, size: Size) -> Size {
        let (width, height) = (f64::from(size.width), f64::from(size.height));
        let rank = |resolution: &Size| {
            let scale = (f64::from(resolution.width) / width).min(f64::from(resolution.height) / height);
            let fitted = ((width * scale) as u64) * ((height * scale) as u64);
            let effective = fitted.min(size.pixels());
            (effective, std::cmp::Reverse(resolution.pixels() - effective))
        };
        // If several resolutions are equally good, the first one is chosen.
        let mut best = self.resolutions[0];
        for resolution in &self.resolutions[1..] {
            if rank(resolution) > rank(&best) {
                best = *resolution;
            }
        }
        best
    }

    /// Fits an image into a resolution and centers it on a black canvas.
    fn centered(&self, image: &RgbImage, resolution: Size) -> RgbImage {
        let Size { width, height } = image.size();
        let (width, height) = (f64::from(width), f64::from(height));
        let (scale_x, scale_y) = (f64::from(resolution.width) / width, f64::from(resolution.height) / height);
        let fitted = if scale_x < scale_y {
            Size::new(resolution.width, ((height * scale_x).ceil() as u32).min(resolution.height))
        } else {
            Size::new(((width * scale_y).ceil() as u32).min(resolution.width), resolution.height)
        };
        let mut canvas = RgbImage::filled(resolution, [0; 3]);
        let fitted = resize(image, fitted, self.clip.filter);
        let (left, top) =
            ((resolution.width - fitted.size().width) / 2, (resolution.height - fitted.size().height) / 2);
        canvas.paste(&fitted, left, top);
        canvas
    }

    /// The ranges of rows and columns of patches over all tiles, without the rows or columns that contain only padding.
    fn unpadded(&self, size: Size, resolution: Size) -> PatchRanges {
        let patches = self.clip.crop.width / self.clip.patch;
        let columns = resolution.width / self.clip.crop.width * patches;
        let rows = resolution.height / self.clip.crop.height * patches;
        let (width, height) = (f64::from(size.width), f64::from(size.height));
        // Like Python's round(value, 7), correct products that differ from an integer only in their last bits.
        let rounded = |value: f64| ((value * 1e7).round_ties_even() / 1e7) as u32;
        if width / height > f64::from(columns) / f64::from(rows) {
            let kept = rounded(height * (f64::from(columns) / width));
            let padding = (rows - kept) / 2;
            PatchRanges { rows: padding..rows - padding, columns: 0..columns, stride: columns }
        } else {
            let kept = rounded(width * (f64::from(rows) / height));
            let padding = (columns - kept) / 2;
            PatchRanges { rows: 0..rows, columns: padding..columns - padding, stride: columns }
        }
    }

    fn feature_rows(&self, size: Size, resolution: Size) -> Vec<FeatureRow> {
        let patches = self.clip.crop.width / self.clip.patch;
        let base = patches * patches;
        let mut features: Vec<FeatureRow> = (0..base).map(FeatureRow::Encoder).collect();
        let ranges = self.unpadded(size, resolution);
        let tile_columns = ranges.stride / patches;
        for row in ranges.rows {
            for column in ranges.columns.clone() {
                let tile = 1 + (row / patches) * tile_columns + column / patches;
                let patch = (row % patches) * patches + column % patches;
                features.push(FeatureRow::Encoder(tile * base + patch));
            }
            features.push(FeatureRow::RowEnd);
        }
        features
    }
}

/// The rows and the columns of patches that show the image.
struct PatchRanges {
    rows: std::ops::Range<u32>,
    columns: std::ops::Range<u32>,
    /// The number of columns, including padding.
    stride: u32,
}

impl Preprocess for LlavaNext {
    fn markers(&self) -> &'static [ImageMarker] {
        &[ImageMarker::Text(IMAGE_TOKEN)]
    }

    fn image_token(&self) -> &'static str {
        IMAGE_TOKEN
    }

    fn layout(&self, size: Size, detail: Detail) -> Result<ImageLayout, ImageError> {
        let tile = self.clip.crop;
        let (num_tiles, feature_rows) = match detail {
            Detail::Low => (1, None),
            Detail::High | Detail::Auto => {
                let resolution = self.resolution(size);
                let grid_tiles = (resolution.width / tile.width) * (resolution.height / tile.height);
                (1 + grid_tiles, Some(self.feature_rows(size, resolution)))
            }
        };
        let num_tokens = feature_rows.as_ref().map_or(self.clip.num_tokens as usize, Vec::len);
        let text = PromptText::plain(IMAGE_TOKEN.repeat(num_tokens));
        let input_bytes = pixel_bytes(num_tiles, tile);
        Ok(ImageLayout { num_tokens, feature_rows, grid: None, input_bytes, text })
    }

    fn inputs(&self, image: &RgbImage, detail: Detail) -> Result<EncoderInputs, ImageError> {
        let mut tiles = vec![self.clip.tile(&resize(image, self.clip.global_size(), self.clip.filter))];
        if detail != Detail::Low {
            let canvas = self.centered(image, self.resolution(image.size()));
            tiles.extend(split_into_tiles(&canvas, self.clip.crop).iter().map(|tile| self.clip.tile(tile)));
        }
        Ok(EncoderInputs::Tiles(self.clip.normalization.pixel_values(&tiles, self.clip.crop)))
    }
}

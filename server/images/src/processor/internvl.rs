//! The processor of InternVL, which splits the image into tiles, using the grid whose proportions are closest to those
//! of the image. If the configuration sets `use_thumbnail`, a thumbnail follows two or more tiles.

use super::tile_grid::TileGrid;
use crate::{
    config::ModelConfig,
    error::{ImageError, LoadError},
    family::Detail,
    inputs::{EncoderInputs, pixel_bytes},
    layout::{ImageLayout, ImageMarker, PromptText},
    normalize::{ColorStatistics, Normalization},
    preprocess::{Preprocess, TILE_EDGE_MAX, TILES_MAX, split_into_tiles},
    raster::{RgbImage, Size},
    resample::{Filter, resize},
};

const IMAGE_TOKEN: &str = "<IMG_CONTEXT>";

#[derive(Debug)]
pub(super) struct InternVl {
    edge: u32,
    tiles: std::ops::RangeInclusive<u32>,
    thumbnail: Thumbnail,
    tile_tokens: u32,
    normalization: Normalization,
}

/// Whether a view of the whole image follows the tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thumbnail {
    /// A thumbnail follows the tiles if there are two or more.
    BehindTiles,
    /// The image has no thumbnail.
    Omitted,
}

impl InternVl {
    pub(super) fn read(config: &ModelConfig) -> Result<Self, LoadError> {
        let ModelConfig { model, preprocessor } = config;
        let edge = match model.optional_count("force_image_size")? {
            Some(edge) => model.at_most("force_image_size", edge, TILE_EDGE_MAX)?,
            None => model.count_up_to("vision_config.image_size", TILE_EDGE_MAX)?,
        };
        let patch = model.count_up_to("vision_config.patch_size", edge)?;
        let ratio = model.optional_number("downsample_ratio")?.unwrap_or(0.5);
        let patches = f64::from((edge / patch) * (edge / patch));
        let tile_tokens = (patches * ratio * ratio) as u32;
        if tile_tokens == 0 || f64::from(tile_tokens) > patches {
            return Err(model.fault(
                "downsample_ratio",
                format!(
                    "is {ratio}, which gives {tile_tokens} tokens for the {patches} patches of a tile (allowed: 1 to \
                     {patches} tokens)"
                ),
            ));
        }
        let is_dynamic = model.optional_bool("dynamic_image_size")? != Some(false);
        let count = |field: &str, default: u32| -> Result<u32, LoadError> {
            model.at_most(field, model.optional_count(field)?.unwrap_or(default), TILES_MAX)
        };
        let (min, max) = (count("min_dynamic_patch", 1)?, count("max_dynamic_patch", 12)?);
        if min > max {
            return Err(model.fault(
                "min_dynamic_patch",
                format!("is {min}, which is more than max_dynamic_patch ({max})"),
            ));
        }
        let has_thumbnail = model.optional_bool("use_thumbnail")? == Some(true);
        Ok(Self {
            edge,
            tiles: if is_dynamic { min..=max } else { 1..=1 },
            thumbnail: if has_thumbnail { Thumbnail::BehindTiles } else { Thumbnail::Omitted },
            tile_tokens,
            normalization: Normalization::read(preprocessor, ColorStatistics::IMAGENET)?,
        })
    }

    fn grid(&self, size: Size, detail: Detail) -> TileGrid {
        match detail {
            Detail::Low => TileGrid { columns: 1, rows: 1 },
            Detail::High | Detail::Auto => TileGrid::closest(size, self.edge, self.tiles.clone()),
        }
    }

    fn has_thumbnail(&self, grid: TileGrid) -> bool {
        self.thumbnail == Thumbnail::BehindTiles && grid.tiles() > 1
    }
}

impl Preprocess for InternVl {
    fn markers(&self) -> &'static [ImageMarker] {
        &[ImageMarker::Text("<image>"), ImageMarker::Text(IMAGE_TOKEN)]
    }

    fn image_token(&self) -> &'static str {
        IMAGE_TOKEN
    }

    fn layout(&self, size: Size, detail: Detail) -> Result<ImageLayout, ImageError> {
        let grid = self.grid(size, detail);
        let num_tiles = grid.tiles() + u32::from(self.has_thumbnail(grid));
        let num_tokens = (num_tiles * self.tile_tokens) as usize;
        let text = PromptText::plain(format!("<img>{}</img>", IMAGE_TOKEN.repeat(num_tokens)));
        let input_bytes = pixel_bytes(num_tiles, Size::square(self.edge));
        Ok(ImageLayout { num_tokens, feature_rows: None, grid: None, input_bytes, text })
    }

    fn inputs(&self, image: &RgbImage, detail: Detail) -> Result<EncoderInputs, ImageError> {
        let grid = self.grid(image.size(), detail);
        let tile = Size::square(self.edge);
        let mut tiles = split_into_tiles(&resize(image, grid.size(self.edge), Filter::Bicubic), tile);
        if self.has_thumbnail(grid) {
            tiles.push(resize(image, tile, Filter::Bicubic));
        }
        Ok(EncoderInputs::Tiles(self.normalization.pixel_values(&tiles, tile)))
    }
}

//! The processor of Idefics3 and SmolVLM, which splits the image into a grid of tiles and adds a global view. The
//! prompt states the row and the column of each tile.

use crate::{
    config::ModelConfig,
    error::{ImageError, LoadError},
    family::{Detail, ModelFamily},
    inputs::{EncoderInputs, MaskedTiles, Tensor},
    layout::{ImageLayout, ImageMarker, PromptText},
    normalize::{ColorStatistics, Normalization},
    patch_positions::{PatchArea, PatchFractions, patch_positions},
    preprocess::{Preprocess, TILE_EDGE_MAX, TILES_MAX, divide, read_filter, split_into_tiles},
    raster::{RgbImage, Size},
    resample::{Filter, resize},
};

const IMAGE_TOKEN: &str = "<image>";
const BORDER: &str = "<fake_token_around_image>";
/// The longest edge to which transformers resizes an image, in pixels.
const LONGEST_EDGE_MAX: u32 = 4096;

#[derive(Debug)]
pub(super) struct Idefics3 {
    longest_edge: u32,
    tile: u32,
    tile_mode: TileMode,
    /// The number of patches along an edge of a tile.
    patches: u32,
    /// The number of position embeddings along an edge of their grid.
    position_grid: u32,
    tile_tokens: u32,
    filter: Filter,
    normalization: Normalization,
}

/// Whether images are split into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TileMode {
    Tiles,
    GlobalViewOnly,
}

impl Idefics3 {
    pub(super) fn read(family: ModelFamily, config: &ModelConfig) -> Result<Self, LoadError> {
        let ModelConfig { model, preprocessor } = config;
        preprocessor.expect_bool("do_resize", true)?;
        let default = if family == ModelFamily::SmolVlm { 512 } else { 364 };
        let edge = |field: &str, default: u32| -> Result<u32, LoadError> {
            preprocessor.at_most(
                field,
                preprocessor.optional_count(field)?.unwrap_or(default),
                LONGEST_EDGE_MAX,
            )
        };
        let longest_edge = edge("size.longest_edge", 4 * default)?;
        let tile = edge("max_image_size.longest_edge", default)?;
        let tiles = longest_edge.div_ceil(tile);
        if tiles * tiles > TILES_MAX {
            let problem =
                format!("is {longest_edge}, which allows {} tiles (limit: {TILES_MAX})", tiles * tiles);
            return Err(preprocessor.fault("size.longest_edge", problem));
        }
        let patch = model.count_up_to("vision_config.patch_size", tile)?;
        let scale = model.optional_count("scale_factor")?.unwrap_or(2);
        let image_size = model.count_up_to("vision_config.image_size", TILE_EDGE_MAX)?;
        let tokens = f64::from((image_size / patch).pow(2)) / f64::from(scale).powi(2);
        if tokens < 1.0 {
            let patches = (image_size / patch).pow(2);
            let problem = format!("is {scale}, which yields no tokens for the {patches} patches of a tile");
            return Err(model.fault("scale_factor", problem));
        }
        let is_split = preprocessor.optional_bool("do_image_splitting")? != Some(false);
        Ok(Self {
            longest_edge,
            tile,
            tile_mode: if is_split { TileMode::Tiles } else { TileMode::GlobalViewOnly },
            patches: tile / patch,
            position_grid: image_size / patch,
            tile_tokens: tokens as u32,
            filter: read_filter(preprocessor, Filter::Lanczos)?,
            normalization: Normalization::read(preprocessor, ColorStatistics::HALF)?,
        })
    }

    /// The size of the image scaled to the configured longest edge. The other edge is even, or 1 pixel long if the
    /// image is very elongated.
    fn first_size(&self, size: Size) -> Size {
        let ratio = divide(size.width.into(), size.height.into());
        let even = |edge: f64| {
            let edge = edge as u32;
            (edge + edge % 2).max(1)
        };
        let longest = f64::from(self.longest_edge);
        if size.width >= size.height {
            Size::new(self.longest_edge, even(longest / ratio))
        } else {
            Size::new(even(longest * ratio), self.longest_edge)
        }
    }

    /// The size of the image with both edges rounded up to multiples of a tile's edge.
    fn tiled_size(&self, size: Size) -> Size {
        let ratio = divide(size.width.into(), size.height.into());
        let multiple = |edge: u32| edge.div_ceil(self.tile) * self.tile;
        if size.width >= size.height {
            let width = multiple(size.width);
            Size::new(width, multiple((f64::from(width) / ratio) as u32))
        } else {
            let height = multiple(size.height);
            Size::new(multiple((f64::from(height) * ratio) as u32), height)
        }
    }

    /// The size of all tiles together, if the image has more than one tile.
    fn grid_size(&self, size: Size, detail: Detail) -> Option<Size> {
        let is_split = self.tile_mode == TileMode::Tiles && detail != Detail::Low;
        let size = self.tiled_size(self.first_size(size));
        (is_split && size != Size::square(self.tile)).then_some(size)
    }
}

impl Preprocess for Idefics3 {
    fn markers(&self) -> &'static [ImageMarker] {
        &[ImageMarker::Text(IMAGE_TOKEN)]
    }

    fn image_token(&self) -> &'static str {
        IMAGE_TOKEN
    }

    fn layout(&self, size: Size, detail: Detail) -> Result<ImageLayout, ImageError> {
        let tokens = IMAGE_TOKEN.repeat(self.tile_tokens as usize);
        let mut text = String::new();
        let mut num_tiles = 1;
        if let Some(size) = self.grid_size(size, detail) {
            let (rows, columns) = (size.height / self.tile, size.width / self.tile);
            for row in 1..=rows {
                for column in 1..=columns {
                    text += &format!("{BORDER}<row_{row}_col_{column}>{tokens}");
                }
                text += "\n";
            }
            text += "\n";
            num_tiles += rows * columns;
        }
        text += &format!("{BORDER}<global-img>{tokens}{BORDER}");
        let num_tokens = (num_tiles * self.tile_tokens) as usize;
        let input_bytes = MaskedTiles::bytes(num_tiles, Size::square(self.tile), self.patches);
        let text = PromptText::plain(text);
        Ok(ImageLayout { num_tokens, feature_rows: None, grid: None, input_bytes, text })
    }

    fn inputs(&self, image: &RgbImage, detail: Detail) -> Result<EncoderInputs, ImageError> {
        let resized = resize(image, self.first_size(image.size()), self.filter);
        let tile = Size::square(self.tile);
        let tiles = match self.grid_size(image.size(), detail) {
            Some(size) => {
                let canvas = resize(&resized, size, self.filter);
                let global = resize(&canvas, tile, self.filter);
                let mut tiles = split_into_tiles(&canvas, tile);
                tiles.push(global);
                tiles
            }
            None => vec![resize(&resized, tile, self.filter)],
        };
        let area = PatchArea::full(self.patches);
        let positions = patch_positions(area, self.position_grid, PatchFractions::Shrunk).repeat(tiles.len());
        let cells = (self.patches * self.patches) as usize;
        let edge = self.patches as usize;
        Ok(EncoderInputs::MaskedTiles(MaskedTiles {
            patch_attention_mask: Tensor::new(vec![tiles.len(), edge, edge], vec![true; tiles.len() * cells]),
            patch_position_ids: Tensor::new(vec![tiles.len(), cells], positions),
            pixel_values: self.normalization.pixel_values(&tiles, tile),
        }))
    }
}

//! The processor of Phi-4-multimodal, which pads the image with white, splits it into tiles, masks the patches that
//! contain only padding, and adds a global view.

use super::tile_grid::TileGrid;
use crate::{
    config::ModelConfig,
    error::{ImageError, LoadError},
    family::Detail,
    inputs::{EncoderInputs, MaskedTiles, Tensor},
    layout::{FeatureRow, ImageLayout, ImageMarker, PromptText},
    normalize::{ColorStatistics, Normalization},
    patch_positions::{PatchArea, PatchFractions, patch_positions},
    preprocess::{Preprocess, TILE_EDGE_MAX, TILES_MAX, split_into_tiles},
    raster::{RgbImage, Size},
    resample::{Filter, resize_torch},
};

const IMAGE_TOKEN: &str = "<|endoftext10|>";
/// The minimum width and height of an image after resizing, in pixels.
const SIDE_MIN: u32 = 10;

#[derive(Debug)]
pub(super) struct Phi4 {
    edge: u32,
    patch: u32,
    tiles_max: u32,
    normalization: Normalization,
}

/// The grid of tiles for an image, and the part of the grid that shows the image.
#[derive(Clone, Copy, Debug)]
struct TilePlan {
    grid: TileGrid,
    /// The size of the resized image, which is at the top left of the tiles.
    fitted: Size,
    /// The number of rows of patches that show the image.
    valid_rows: u32,
    /// The number of columns of patches that show the image.
    valid_columns: u32,
}

impl Phi4 {
    pub(super) fn read(config: &ModelConfig) -> Result<Self, LoadError> {
        let ModelConfig { model, preprocessor } = config;
        let count = |field: &str, default: u32, limit: u32| -> Result<u32, LoadError> {
            preprocessor.at_most(field, preprocessor.optional_count(field)?.unwrap_or(default), limit)
        };
        let default = model.optional_count("vision_config.image_size")?.unwrap_or(448);
        let edge = count("size.height", default, TILE_EDGE_MAX)?;
        let patch = count("patch_size", 14, edge)?;
        if edge % (2 * patch) != 0 {
            let problem = format!(
                "is {edge}, which is not a multiple of {} (twice the patch size of {patch})",
                2 * patch
            );
            return Err(preprocessor.fault("size.height", problem));
        }
        Ok(Self {
            edge,
            patch,
            tiles_max: count("dynamic_hd", 36, TILES_MAX)?,
            normalization: Normalization::read(preprocessor, ColorStatistics::HALF)?,
        })
    }

    fn plan(&self, size: Size, detail: Detail) -> Result<TilePlan, ImageError> {
        let tiles_max = if detail == Detail::Low { 1 } else { self.tiles_max };
        let needed =
            TileGrid { columns: size.width.div_ceil(self.edge), rows: size.height.div_ceil(self.edge) };
        let grid = if u64::from(needed.columns) * u64::from(needed.rows) > u64::from(tiles_max) {
            TileGrid::closest(size, self.edge, 1..=tiles_max)
        } else {
            needed
        };
        let canvas = grid.size(self.edge);
        let (width, height) = (f64::from(size.width), f64::from(size.height));
        let (scale_x, scale_y) = (f64::from(canvas.width) / width, f64::from(canvas.height) / height);
        let fitted = if scale_x < scale_y {
            Size::new(canvas.width, (height * scale_x) as u32)
        } else {
            Size::new((width * scale_y) as u32, canvas.height)
        };
        if fitted.width < SIDE_MIN || fitted.height < SIDE_MIN {
            return Err(ImageError::Narrow { size, resized: fitted, limit: SIDE_MIN });
        }
        // A row or column of patches is valid if it shows at least one pixel of the image.
        let valid = |canvas: u32, fitted: u32| canvas / self.patch - (canvas - fitted) / self.patch;
        Ok(TilePlan {
            grid,
            fitted,
            valid_rows: valid(canvas.height, fitted.height),
            valid_columns: valid(canvas.width, fitted.width),
        })
    }

    fn feature_rows(&self, plan: TilePlan) -> Vec<FeatureRow> {
        // The encoder averages each 2x2 group of patches.
        let edge = self.edge / self.patch / 2;
        let (rows, columns) = (plan.valid_rows.div_ceil(2), plan.valid_columns.div_ceil(2));
        let mut features = Vec::new();
        for row in 0..rows {
            for column in 0..columns {
                let tile = 1 + (row / edge) * plan.grid.columns + column / edge;
                features.push(FeatureRow::Encoder((tile * edge + row % edge) * edge + column % edge));
            }
            features.push(FeatureRow::RowEnd);
        }
        features.push(FeatureRow::GlobalSeparator);
        for row in 0..edge {
            features.extend((0..edge).map(|column| FeatureRow::Encoder(row * edge + column)));
            features.push(FeatureRow::RowEnd);
        }
        features
    }

    /// The patches that the mask includes: all patches of the global view, and those of each tile that show the image.
    fn areas(&self, plan: TilePlan) -> Vec<PatchArea> {
        let edge = self.edge / self.patch;
        let mut areas = vec![PatchArea::full(edge)];
        for row in 0..plan.grid.rows {
            for column in 0..plan.grid.columns {
                let valid = |valid: u32, tile: u32| valid.saturating_sub(tile * edge).min(edge);
                areas.push(PatchArea {
                    rows: edge,
                    columns: edge,
                    valid_rows: valid(plan.valid_rows, row),
                    valid_columns: valid(plan.valid_columns, column),
                });
            }
        }
        areas
    }
}

impl Preprocess for Phi4 {
    fn markers(&self) -> &'static [ImageMarker] {
        &[ImageMarker::Numbered { start: "<|image_", end: "|>" }, ImageMarker::Text(IMAGE_TOKEN)]
    }

    fn image_token(&self) -> &'static str {
        IMAGE_TOKEN
    }

    fn layout(&self, size: Size, detail: Detail) -> Result<ImageLayout, ImageError> {
        let plan = self.plan(size, detail)?;
        let features = self.feature_rows(plan);
        let num_tokens = features.len();
        let text = PromptText::plain(IMAGE_TOKEN.repeat(num_tokens));
        let (num_tiles, tile) = (1 + plan.grid.tiles(), Size::square(self.edge));
        let input_bytes = MaskedTiles::bytes(num_tiles, tile, self.edge / self.patch);
        Ok(ImageLayout { num_tokens, feature_rows: Some(features), grid: None, input_bytes, text })
    }

    fn inputs(&self, image: &RgbImage, detail: Detail) -> Result<EncoderInputs, ImageError> {
        let plan = self.plan(image.size(), detail)?;
        let mut canvas = RgbImage::filled(plan.grid.size(self.edge), [255; 3]);
        canvas.paste(&resize_torch(image, plan.fitted, Filter::Bilinear), 0, 0);
        let tile = Size::square(self.edge);
        let tiles = split_into_tiles(&canvas, tile);
        let mut numbers = Vec::with_capacity((1 + tiles.len()) * 3 * tile.pixels() as usize);
        push_global_view(&canvas, self.edge, &self.normalization, &mut numbers);
        tiles.iter().for_each(|tile| self.normalization.push_planes(tile, &mut numbers));
        let areas = self.areas(plan);
        let mask = areas.iter().flat_map(|area| area.mask()).collect();
        let edge = self.edge / self.patch;
        let positions =
            areas.iter().flat_map(|area| patch_positions(*area, edge, PatchFractions::Steps)).collect();
        let (count, pixels, patches) = (areas.len(), self.edge as usize, edge as usize);
        Ok(EncoderInputs::MaskedTiles(MaskedTiles {
            pixel_values: Tensor::new(vec![count, 3, pixels, pixels], numbers),
            patch_attention_mask: Tensor::new(vec![count, patches, patches], mask),
            patch_position_ids: Tensor::new(vec![count, patches * patches], positions),
        }))
    }
}

/// The four input pixels of one output pixel of cubic interpolation, and their weights.
struct CubicWindow {
    inputs: [u32; 4],
    weights: [f32; 4],
}

/// Returns the windows with which PyTorch's cubic interpolation without antialiasing (a = -0.75) resamples `from`
/// values to `to` values.
fn cubic_windows(from: u32, to: u32) -> Vec<CubicWindow> {
    const A: f32 = -0.75;
    let inner = |x: f32| ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0;
    let outer = |x: f32| ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A;
    let scale = from as f32 / to as f32;
    let window = |index: u32| {
        let center = scale * (index as f32 + 0.5) - 0.5;
        let floor = center.floor();
        let t = center - floor;
        let input = |offset: i64| (floor as i64 + offset).clamp(0, i64::from(from) - 1) as u32;
        CubicWindow {
            inputs: [input(-1), input(0), input(1), input(2)],
            weights: [outer(t + 1.0), inner(t), inner(1.0 - t), outer(2.0 - t)],
        }
    };
    (0..to).map(window).collect()
}

/// Appends the normalized pixel values of the global view. They are interpolated from the normalized values of the
/// whole canvas, without rounding to 8 bits.
fn push_global_view(canvas: &RgbImage, edge: u32, normalization: &Normalization, numbers: &mut Vec<f32>) {
    let rows = cubic_windows(canvas.size().height, edge);
    let columns = cubic_windows(canvas.size().width, edge);
    for color in 0..3 {
        for row in &rows {
            for column in &columns {
                let mut sum = 0.0;
                for (y, row_weight) in row.inputs.iter().zip(row.weights) {
                    let pixels = canvas.row(*y);
                    let terms = column.inputs.iter().zip(column.weights).map(|(x, weight)| {
                        weight * normalization.number(color, pixels[*x as usize * 3 + color])
                    });
                    sum += row_weight * terms.sum::<f32>();
                }
                numbers.push(sum);
            }
        }
    }
}

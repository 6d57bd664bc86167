//! The processor of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, which splits the image into patches. The image is resized only
//! as far as the edge of a merged token and the limits for the number of pixels require. The encoder merges each block
//! of patches into one token.

use crate::{
    config::ModelConfig,
    error::{ImageError, LoadError},
    family::{Detail, ModelFamily},
    inputs::{EncoderInputs, PositionInterpolation, QwenPatches, Tensor, WindowLayout, bytes_of},
    layout::{ImageLayout, ImageMarker, PromptText, TokenGrid},
    limits::LOW_DETAIL_PIXELS_MAX,
    normalize::{ColorStatistics, Normalization},
    preprocess::{Preprocess, TILE_EDGE_MAX, read_filter},
    raster::{RgbImage, Size},
    resample::{Filter, resize},
};

/// The largest allowed ratio of the longer to the shorter side of an image.
const ASPECT_RATIO_MAX: u32 = 200;
/// The base of the frequencies of the rotary embedding.
const ROTARY_BASE: f32 = 10_000.0;
/// The number of learned position embeddings from which that of a patch is interpolated.
const CORNERS: usize = 4;

const IMAGE_TOKEN: &str = "<|image_pad|>";

#[derive(Debug)]
pub(super) struct Qwen {
    patch: u32,
    merge: u32,
    frames: u32,
    pixels_min: u64,
    pixels_max: u64,
    filter: Filter,
    normalization: Normalization,
    /// The number of frequencies of the rotary embedding: a quarter of the size of a head.
    frequencies: u32,
    /// The edge of an attention window in merged tokens, for Qwen2.5-VL.
    window: Option<u32>,
    /// The edge of the grid of learned position embeddings, for Qwen3-VL.
    position_grid: Option<u32>,
}

impl Qwen {
    pub(super) fn read(family: ModelFamily, config: &ModelConfig) -> Result<Self, LoadError> {
        let ModelConfig { model, preprocessor } = config;
        preprocessor.expect_bool("do_resize", true)?;
        let is_qwen3 = family == ModelFamily::Qwen3Vl;
        let patch = preprocessor.optional_count("patch_size")?.unwrap_or(if is_qwen3 { 16 } else { 14 });
        let patch = preprocessor.at_most("patch_size", patch, TILE_EDGE_MAX)?;
        let merge = preprocessor.optional_count("merge_size")?.unwrap_or(2);
        let merge = preprocessor.at_most("merge_size", merge, 16)?;
        let frames = preprocessor.optional_count("temporal_patch_size")?.unwrap_or(2);
        let frames = preprocessor.at_most("temporal_patch_size", frames, 16)?;
        // `size.shortest_edge` and `size.longest_edge` contain areas in pixels, despite their names.
        let pixels = |names: [&str; 3], default: u64| -> Result<u64, LoadError> {
            Ok(preprocessor.first_count(&names)?.map_or(default, u64::from))
        };
        let pixels_min = pixels(["min_pixels", "size.shortest_edge", "size.min_pixels"], 56 * 56)?;
        let pixels_max = pixels(["max_pixels", "size.longest_edge", "size.max_pixels"], 28 * 28 * 1280)?;
        let statistics = if is_qwen3 { ColorStatistics::HALF } else { ColorStatistics::CLIP };
        let width_field = if family == ModelFamily::Qwen2Vl { "embed_dim" } else { "hidden_size" };
        let width_field = format!("vision_config.{width_field}");
        let (width, heads) =
            (model.count(&width_field)?, model.count_up_to("vision_config.num_heads", 1 << 16)?);
        if width % (heads * 4) != 0 {
            let problem = format!("is {width}; a multiple of {} (4 * num_heads) is expected", 4 * heads);
            return Err(model.fault(&width_field, problem));
        }
        let window = if family == ModelFamily::Qwen2_5Vl {
            let pixels = model.optional_count("vision_config.window_size")?.unwrap_or(112);
            let tokens = pixels / merge / patch;
            if tokens == 0 {
                let problem = format!("is {pixels}; at least {} is expected", merge * patch);
                return Err(model.fault("vision_config.window_size", problem));
            }
            Some(tokens)
        } else {
            None
        };
        let position_grid =
            if is_qwen3 { Some(model.count("vision_config.num_position_embeddings")?.isqrt()) } else { None };
        Ok(Self {
            patch,
            merge,
            frames,
            pixels_min,
            pixels_max,
            filter: read_filter(preprocessor, Filter::Bicubic)?,
            normalization: Normalization::read(preprocessor, statistics)?,
            frequencies: width / heads / 4,
            window,
            position_grid,
        })
    }

    /// The size to which an image is resized. Both sides are multiples of the edge of a merged token, and the number of
    /// pixels is between the limits where possible.
    fn resized(&self, size: Size, detail: Detail) -> Result<Size, ImageError> {
        let longer = size.width.max(size.height);
        let shorter = size.width.min(size.height);
        if f64::from(longer) / f64::from(shorter) > f64::from(ASPECT_RATIO_MAX) {
            return Err(ImageError::AspectRatio { size, limit: ASPECT_RATIO_MAX });
        }
        let pixels_max = match detail {
            Detail::Low => self.pixels_max.min(LOW_DETAIL_PIXELS_MAX).max(self.pixels_min),
            Detail::High | Detail::Auto => self.pixels_max,
        };
        let factor = f64::from(self.patch * self.merge);
        let (width, height) = (f64::from(size.width), f64::from(size.height));
        let rounded = |length: f64| (length / factor).round_ties_even() * factor;
        let pixels = rounded(width) * rounded(height);
        let edges = if pixels > pixels_max as f64 {
            let beta = (height * width / pixels_max as f64).sqrt();
            [width, height].map(|length| ((length / beta / factor).floor() * factor).max(factor))
        } else if pixels < self.pixels_min as f64 {
            let beta = (self.pixels_min as f64 / (height * width)).sqrt();
            [width, height].map(|length| (length * beta / factor).ceil() * factor)
        } else {
            [width, height].map(rounded)
        };
        Ok(Size::new(edges[0] as u32, edges[1] as u32))
    }

    /// The number of values of a patch, whose shape is [colors, frames, rows, columns].
    fn patch_values(&self) -> usize {
        3 * self.frames as usize * (self.patch as usize).pow(2)
    }

    /// The number of angles of a patch: those of its row and those of its column.
    fn patch_angles(&self) -> usize {
        2 * self.frequencies as usize
    }

    /// The memory of the inputs for this grid, in bytes.
    fn input_bytes(&self, grid: PatchGrid) -> usize {
        let (patches, tokens) = (grid.cells(), grid.tokens());
        let window_bytes = self.window.map_or(0, |edge| {
            let num_windows = tokens.rows.div_ceil(edge) * tokens.columns.div_ceil(edge);
            bytes_of::<i64>((tokens.rows * tokens.columns) as usize) + bytes_of::<usize>(num_windows as usize)
        });
        let corners = if self.position_grid.is_some() { CORNERS * patches } else { 0 };
        bytes_of::<f32>(patches * (self.patch_values() + self.patch_angles()))
            + window_bytes
            + bytes_of::<i64>(corners)
            + bytes_of::<f32>(corners)
    }

    /// The patches of a resized image, in block order.
    fn patches(&self, image: &RgbImage, grid: PatchGrid) -> Tensor<f32> {
        let (patch, values) = (self.patch as usize, self.patch_values());
        let mut numbers = Vec::with_capacity(grid.cells() * values);
        for cell in grid.block_order() {
            for color in 0..3 {
                let start = numbers.len();
                for y in 0..self.patch {
                    let row = image.row(cell.row * self.patch + y);
                    let bytes = &row[(cell.column * self.patch) as usize * 3..][..patch * 3];
                    let values = bytes[color..].iter().step_by(3);
                    numbers.extend(values.map(|value| self.normalization.number(color, *value)));
                }
                // An image is processed as a video whose frames are identical.
                let frame = start..numbers.len();
                for _ in 1..self.frames {
                    numbers.extend_from_within(frame.clone());
                }
            }
        }
        Tensor::new(vec![grid.cells(), values], numbers)
    }

    fn rotary_pos_emb(&self, grid: PatchGrid) -> Tensor<f32> {
        let count = self.frequencies;
        let frequency = |j: u32| 1.0 / ROTARY_BASE.powf((2 * j) as f32 / (2 * count) as f32);
        let frequencies: Vec<f32> = (0..count).map(frequency).collect();
        let angles = grid.block_order().flat_map(|cell| {
            let angles = |position: u32| frequencies.iter().map(move |frequency| position as f32 * frequency);
            angles(cell.row).chain(angles(cell.column))
        });
        let angles = angles.collect();
        Tensor::new(vec![grid.cells(), self.patch_angles()], angles)
    }

    fn windows(&self, edge: u32, grid: PatchGrid) -> WindowLayout {
        let tokens = grid.tokens();
        let mut windows = WindowLayout {
            window_index: Vec::with_capacity((tokens.rows * tokens.columns) as usize),
            window_patches: Vec::new(),
        };
        for top in (0..tokens.rows).step_by(edge as usize) {
            for left in (0..tokens.columns).step_by(edge as usize) {
                let (bottom, right) = ((top + edge).min(tokens.rows), (left + edge).min(tokens.columns));
                for row in top..bottom {
                    windows
                        .window_index
                        .extend((left..right).map(|column| i64::from(row * tokens.columns + column)));
                }
                let patches = (bottom - top) * (right - left) * self.merge * self.merge;
                windows.window_patches.push(patches as usize);
            }
        }
        windows
    }
}

impl Preprocess for Qwen {
    fn markers(&self) -> &'static [ImageMarker] {
        &[ImageMarker::Text(IMAGE_TOKEN)]
    }

    fn tag_frame(&self) -> [&'static str; 2] {
        ["<|vision_start|>", "<|vision_end|>"]
    }

    fn image_token(&self) -> &'static str {
        IMAGE_TOKEN
    }

    fn layout(&self, size: Size, detail: Detail) -> Result<ImageLayout, ImageError> {
        let patches = PatchGrid::new(self.resized(size, detail)?, self.patch, self.merge);
        let grid = patches.tokens();
        let num_tokens = (grid.rows * grid.columns) as usize;
        let text = PromptText::plain(IMAGE_TOKEN.repeat(num_tokens));
        let input_bytes = self.input_bytes(patches);
        Ok(ImageLayout { num_tokens, feature_rows: None, grid: Some(grid), input_bytes, text })
    }

    fn inputs(&self, image: &RgbImage, detail: Detail) -> Result<EncoderInputs, ImageError> {
        let size = self.resized(image.size(), detail)?;
        let image = resize(image, size, self.filter);
        let grid = PatchGrid::new(size, self.patch, self.merge);
        Ok(EncoderInputs::Qwen(QwenPatches {
            hidden_states: self.patches(&image, grid),
            rotary_pos_emb: self.rotary_pos_emb(grid),
            windows: self.window.map(|edge| self.windows(edge, grid)),
            position_embeddings: self.position_grid.map(|edge| interpolate_positions(edge, grid)),
        }))
    }
}

/// The grid of patches of an image.
#[derive(Clone, Copy, Debug)]
struct PatchGrid {
    rows: u32,
    columns: u32,
    /// The edge, in patches, of a block that is merged into one token.
    merge: u32,
}

/// The row and the column of a patch.
#[derive(Clone, Copy, Debug)]
struct GridCell {
    row: u32,
    column: u32,
}

impl PatchGrid {
    fn new(size: Size, patch: u32, merge: u32) -> Self {
        Self { rows: size.height / patch, columns: size.width / patch, merge }
    }

    fn cells(self) -> usize {
        (self.rows * self.columns) as usize
    }

    fn tokens(self) -> TokenGrid {
        TokenGrid { rows: self.rows / self.merge, columns: self.columns / self.merge }
    }

    /// All patches: block by block, and within a block row by row.
    fn block_order(self) -> impl Iterator<Item = GridCell> {
        let merge = self.merge;
        let tops = (0..self.rows).step_by(merge as usize);
        tops.flat_map(move |top| {
            let lefts = (0..self.columns).step_by(merge as usize);
            lefts.flat_map(move |left| {
                (top..top + merge)
                    .flat_map(move |row| (left..left + merge).map(move |column| GridCell { row, column }))
            })
        })
    }
}

/// The interpolation along one axis: the indices of the position embeddings before and after a patch, and the weight of
/// the latter.
#[derive(Clone, Copy, Debug)]
struct AxisWeight {
    floor: i64,
    ceiling: i64,
    fraction: f32,
}

/// Distributes `count` patches over `edge` position embeddings, with the first and the last patch at the ends.
fn axis_weights(edge: u32, count: u32) -> Vec<AxisWeight> {
    let last = (edge - 1) as f32;
    let step = if count > 1 { last / (count - 1) as f32 } else { 0.0 };
    let coordinate = |index: u32| {
        // PyTorch's linspace counts from the closer end.
        if index < count / 2 || count == 1 {
            step * index as f32
        } else {
            last - step * (count - index - 1) as f32
        }
    };
    let weight = |index| {
        let coordinate = coordinate(index);
        let floor = coordinate as i64;
        let ceiling = (floor + 1).min(i64::from(edge) - 1);
        AxisWeight { floor, ceiling, fraction: coordinate - floor as f32 }
    };
    (0..count).map(weight).collect()
}

fn interpolate_positions(edge: u32, grid: PatchGrid) -> PositionInterpolation {
    let (rows, columns) = (axis_weights(edge, grid.rows), axis_weights(edge, grid.columns));
    let edge = i64::from(edge);
    let cells = grid.cells();
    let (mut indices, mut weights) =
        (Vec::with_capacity(CORNERS * cells), Vec::with_capacity(CORNERS * cells));
    for corner in 0..CORNERS {
        for cell in grid.block_order() {
            let (row, column) = (rows[cell.row as usize], columns[cell.column as usize]);
            let (y, dy) =
                if corner < 2 { (row.floor, 1.0 - row.fraction) } else { (row.ceiling, row.fraction) };
            let (x, dx) = if corner % 2 == 0 {
                (column.floor, 1.0 - column.fraction)
            } else {
                (column.ceiling, column.fraction)
            };
            indices.push(y * edge + x);
            weights.push(dy * dx);
        }
    }
    let shape = vec![CORNERS, cells];
    PositionInterpolation {
        indices: Tensor::new(shape.clone(), indices),
        weights: Tensor::new(shape, weights),
    }
}

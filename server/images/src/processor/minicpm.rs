//! The processor of MiniCPM-V. The encoder reads an overview of the image and, if the image is large, slices of it, all
//! of the same size. The resampler converts the features of the overview and of each slice to a fixed number of tokens.

use crate::{
    config::ModelConfig,
    error::{ImageError, LoadError},
    family::Detail,
    inputs::{EncoderInputs, ResamplerSlice, Tensor, bytes_of, pixel_bytes},
    layout::{ImageLayout, ImageMarker, PromptText},
    normalize::{ColorStatistics, Normalization},
    patch_positions::{PatchArea, PatchFractions, patch_positions},
    preprocess::{Preprocess, TILE_EDGE_MAX, TILES_MAX, divide, split_into_tiles},
    raster::{RgbImage, Size},
    resample::{Filter, resize},
};

const IMAGE_TOKEN: &str = "<unk>";

#[derive(Debug)]
pub(super) struct MiniCpm {
    slices_max: u32,
    /// The square root of the approximate number of pixels of a slice.
    scale: u32,
    patch: u32,
    slice_tokens: u32,
    /// The number of rows, and of columns, in the encoder's grid of position embeddings.
    position_grid: u32,
    /// The hidden size of the resampler.
    hidden: u32,
    image_number: ImageNumber,
    normalization: Normalization,
}

/// Whether the number of the image is in the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ImageNumber {
    Shown,
    Hidden,
}

/// A grid of slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SliceGrid {
    columns: u32,
    rows: u32,
}

/// The pictures that the encoder reads for an image.
#[derive(Clone, Copy, Debug)]
struct PicturePlan {
    /// The size of the overview.
    overview: Size,
    /// The slices; `None` if the overview suffices.
    slices: Option<SlicePlan>,
}

/// The slices of an image.
#[derive(Clone, Copy, Debug)]
struct SlicePlan {
    grid: SliceGrid,
    /// The size of each slice.
    size: Size,
}

/// Whether a picture with fewer pixels than a slice is enlarged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UpscaleRule {
    ToScale,
    Never,
}

impl MiniCpm {
    pub(super) fn read(config: &ModelConfig) -> Result<Self, LoadError> {
        let ModelConfig { model, preprocessor } = config;
        let count = |field: &str, default: u32, limit: u32| -> Result<u32, LoadError> {
            preprocessor.at_most(field, preprocessor.optional_count(field)?.unwrap_or(default), limit)
        };
        let slices_max = if preprocessor.optional_bool("slice_mode")? == Some(false) {
            1
        } else {
            count("max_slice_nums", 9, TILES_MAX)?
        };
        let patch = count("patch_size", 14, TILE_EDGE_MAX)?;
        let position_grid = model.count_up_to("vision_config.image_size", TILE_EDGE_MAX)? / patch;
        let hidden = model.count("hidden_size")?;
        if !hidden.is_multiple_of(4) {
            return Err(model.fault("hidden_size", format!("is {hidden}; a multiple of 4 is expected")));
        }
        let slice_tokens = match model.optional_count("query_num")? {
            Some(count) => count,
            None => count("image_feature_size", 64, 1 << 16)?,
        };
        let is_numbered = preprocessor.optional_bool("use_image_id")? == Some(true);
        Ok(Self {
            slices_max,
            scale: count("scale_resolution", 448, TILE_EDGE_MAX)?,
            patch,
            slice_tokens: model.at_most("query_num", slice_tokens, 1 << 16)?,
            position_grid,
            hidden,
            image_number: if is_numbered { ImageNumber::Shown } else { ImageNumber::Hidden },
            normalization: Normalization::read(preprocessor, ColorStatistics::HALF)?,
        })
    }

    /// Returns the grid of slices whose proportions are closest to those of the image, or `None` if the image is not
    /// larger than a slice, `slices_max` is 1, or the client requests low detail. The number of slices is at most
    /// `slices_max`; otherwise, it is about the number of pixels of the image divided by that of a slice.
    fn grid(&self, size: Size, detail: Detail) -> Option<SliceGrid> {
        let slice = u64::from(self.scale) * u64::from(self.scale);
        let multiple = divide(size.pixels(), slice).ceil().min(f64::from(self.slices_max)) as u32;
        if multiple <= 1 || detail == Detail::Low {
            return None;
        }
        let ratio = divide(size.width.into(), size.height.into()).ln();
        let counts = (multiple - 1..=multiple + 1).filter(|count| *count != 1 && *count <= self.slices_max);
        let grids = counts.flat_map(|count| {
            let divisors = (1..=count).filter(move |columns| count.is_multiple_of(*columns));
            divisors.map(move |columns| SliceGrid { columns, rows: count / columns })
        });
        let mut best = SliceGrid { columns: 1, rows: 1 };
        let mut best_error = f64::INFINITY;
        for grid in grids {
            let error = (ratio - divide(grid.columns.into(), grid.rows.into()).ln()).abs();
            if error < best_error {
                (best, best_error) = (grid, error);
            }
        }
        Some(best)
    }

    /// The multiple of `step` that is closest to `length`, but at least `step`.
    fn multiple(length: f64, step: u32) -> u32 {
        (((length / f64::from(step)).round_ties_even()) as u32 * step).max(step)
    }

    /// Returns the size to which a picture is resized. Its sides are multiples of the edge of a patch.
    fn best_size(&self, width: f64, height: f64, upscaling: UpscaleRule) -> Size {
        let scale = f64::from(self.scale);
        let (mut width, mut height) = (width, height);
        if width * height > scale * scale || upscaling == UpscaleRule::ToScale {
            let ratio = width / height;
            height = (scale / ratio.sqrt()).trunc();
            width = (height * ratio).trunc();
        }
        Size::new(Self::multiple(width, self.patch), Self::multiple(height, self.patch))
    }

    fn plan(&self, size: Size, detail: Detail) -> PicturePlan {
        let (width, height) = (f64::from(size.width), f64::from(size.height));
        let Some(grid) = self.grid(size, detail) else {
            return PicturePlan {
                overview: self.best_size(width, height, UpscaleRule::ToScale),
                slices: None,
            };
        };
        let columns = f64::from(Self::multiple(width, grid.columns)) / f64::from(grid.columns);
        let rows = f64::from(Self::multiple(height, grid.rows)) / f64::from(grid.rows);
        let slices = SlicePlan { grid, size: self.best_size(columns, rows, UpscaleRule::ToScale) };
        PicturePlan { overview: self.best_size(width, height, UpscaleRule::Never), slices: Some(slices) }
    }

    /// Returns the pictures that are encoded: the overview, and the slices row by row.
    fn pictures(image: &RgbImage, plan: PicturePlan) -> Vec<RgbImage> {
        let mut pictures = vec![resize(image, plan.overview, Filter::Bicubic)];
        if let Some(SlicePlan { grid, size }) = plan.slices {
            let whole = Size::new(size.width * grid.columns, size.height * grid.rows);
            pictures.extend(split_into_tiles(&resize(image, whole, Filter::Bicubic), size));
        }
        pictures
    }

    /// The memory of the inputs for a picture of this size, in bytes.
    fn slice_bytes(&self, size: Size) -> usize {
        let patches = (size.height / self.patch) as usize * (size.width / self.patch) as usize;
        let (mask, position_ids) = (bytes_of::<bool>(patches), bytes_of::<i64>(patches));
        let pos_embed = bytes_of::<f32>(patches * self.hidden as usize);
        let key_padding_mask = bytes_of::<f32>(patches);
        pixel_bytes(1, size) + mask + position_ids + pos_embed + key_padding_mask
    }

    fn slice(&self, picture: &RgbImage) -> ResamplerSlice {
        let size = picture.size();
        let (rows, columns) = (size.height / self.patch, size.width / self.patch);
        let patches = (rows * columns) as usize;
        let mut numbers = Vec::with_capacity(3 * size.pixels() as usize);
        for color in 0..3 {
            for y in 0..self.patch {
                // The patches are side by side, so row `y` of the tensor contains row `y` of each patch.
                for row in 0..rows {
                    let values = picture.row(row * self.patch + y)[color..].iter().step_by(3);
                    numbers.extend(values.map(|value| self.normalization.number(color, *value)));
                }
            }
        }
        let edge = self.patch as usize;
        let positions =
            patch_positions(PatchArea::unpadded(rows, columns), self.position_grid, PatchFractions::Steps);
        ResamplerSlice {
            pixel_values: Tensor::new(vec![1, 3, edge, edge * patches], numbers),
            patch_attention_mask: Tensor::new(vec![1, 1, patches], vec![true; patches]),
            position_ids: Tensor::new(vec![1, patches], positions),
            pos_embed: self.pos_embed(rows, columns),
            key_padding_mask: Tensor::new(vec![1, patches], vec![0.0; patches]),
        }
    }

    /// The position embeddings of the resampler: for each patch, sines and cosines of its column, then those of its
    /// row.
    fn pos_embed(&self, rows: u32, columns: u32) -> Tensor<f32> {
        let count = self.hidden / 4;
        let frequency = |j: u32| 1.0 / 10_000f32.powf(j as f32 / count as f32);
        let frequencies: Vec<f32> = (0..count).map(frequency).collect();
        let waves = |position: u32| {
            let angles = frequencies.iter().map(move |frequency| position as f32 * frequency);
            angles.clone().map(f32::sin).chain(angles.map(f32::cos))
        };
        let cells = (0..rows).flat_map(|row| (0..columns).map(move |column| [column, row]));
        let numbers = cells.flat_map(|cell| waves(cell[0]).chain(waves(cell[1]))).collect();
        Tensor::new(vec![(rows * columns) as usize, 1, self.hidden as usize], numbers)
    }
}

impl Preprocess for MiniCpm {
    fn markers(&self) -> &'static [ImageMarker] {
        &[ImageMarker::Text("(<image>./</image>)"), ImageMarker::Text("<image>./</image>")]
    }

    fn image_token(&self) -> &'static str {
        IMAGE_TOKEN
    }

    fn layout(&self, size: Size, detail: Detail) -> Result<ImageLayout, ImageError> {
        let tokens = IMAGE_TOKEN.repeat(self.slice_tokens as usize);
        let mut text = format!("<image>{tokens}</image>");
        let plan = self.plan(size, detail);
        let (mut num_pictures, mut input_bytes) = (1, self.slice_bytes(plan.overview));
        if let Some(SlicePlan { grid, size }) = plan.slices {
            let row = format!("<slice>{tokens}</slice>").repeat(grid.columns as usize);
            text += &vec![row; grid.rows as usize].join("\n");
            let num_slices = grid.rows * grid.columns;
            num_pictures += num_slices;
            input_bytes += num_slices as usize * self.slice_bytes(size);
        }
        let text = match self.image_number {
            ImageNumber::Shown => PromptText {
                before_number: Some("<image_id>".to_owned()),
                rest: format!("</image_id>{text}"),
            },
            ImageNumber::Hidden => PromptText::plain(text),
        };
        let num_tokens = (num_pictures * self.slice_tokens) as usize;
        Ok(ImageLayout { num_tokens, feature_rows: None, grid: None, input_bytes, text })
    }

    fn inputs(&self, image: &RgbImage, detail: Detail) -> Result<EncoderInputs, ImageError> {
        let pictures = Self::pictures(image, self.plan(image.size(), detail));
        Ok(EncoderInputs::Slices(pictures.iter().map(|picture| self.slice(picture)).collect()))
    }
}

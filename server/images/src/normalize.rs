//! Converts 8-bit pixels to the normalized numbers that an encoder expects.

use crate::{
    config::JsonFile,
    error::LoadError,
    inputs::Tensor,
    raster::{RgbImage, Size},
};

/// The normalized number for each value of each color: (value · scale - mean) / standard deviation. The result of each
/// step is rounded to a 32-bit float, as in the processors of transformers that use NumPy.
#[derive(Clone)]
pub(crate) struct Normalization {
    table: Box<[[f32; 256]; 3]>,
}

/// The mean and the standard deviation of each color.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ColorStatistics {
    pub(crate) mean: [f64; 3],
    pub(crate) std: [f64; 3],
}

impl ColorStatistics {
    /// The statistics of CLIP.
    pub(crate) const CLIP: Self =
        Self { mean: [0.48145466, 0.4578275, 0.40821073], std: [0.26862954, 0.26130258, 0.27577711] };
    /// The statistics of ImageNet.
    pub(crate) const IMAGENET: Self = Self { mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225] };
    /// Maps 0..=255 to -1..=1.
    pub(crate) const HALF: Self = Self { mean: [0.5; 3], std: [0.5; 3] };
}

impl std::fmt::Debug for Normalization {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ends = self.table.each_ref().map(|table| [table[0], table[255]]);
        f.debug_struct("Normalization").field("black_and_white", &ends).finish()
    }
}

impl Normalization {
    pub(crate) fn new(scale: f64, statistics: ColorStatistics) -> Self {
        let mut table = Box::new([[0.0; 256]; 3]);
        for (color, table) in table.iter_mut().enumerate() {
            let (mean, std) = (statistics.mean[color] as f32, statistics.std[color] as f32);
            for (value, number) in table.iter_mut().enumerate() {
                *number = ((value as f64 * scale) as f32 - mean) / std;
            }
        }
        Self { table }
    }

    /// Reads the normalization of a processor; `default` replaces missing statistics.
    pub(crate) fn read(file: &JsonFile, default: ColorStatistics) -> Result<Self, LoadError> {
        file.expect_bool("do_rescale", true)?;
        let scale = file.optional_number("rescale_factor")?.unwrap_or(1.0 / 255.0);
        let statistics = if file.optional_bool("do_normalize")? == Some(false) {
            ColorStatistics { mean: [0.0; 3], std: [1.0; 3] }
        } else {
            let first = |names: [&'static str; 2]| names.into_iter().find(|name| file.get(name).is_some());
            let colors = |name: Option<&str>, default| match name {
                Some(name) => Ok(file.optional_colors(name)?.unwrap_or(default)),
                None => Ok(default),
            };
            let std_name = first(["image_std", "norm_std"]);
            let std = colors(std_name, default.std)?;
            if std.iter().any(|std| *std as f32 == 0.0) {
                return Err(file.fault(std_name.unwrap_or("image_std"), "contains 0"));
            }
            ColorStatistics { mean: colors(first(["image_mean", "norm_mean"]), default.mean)?, std }
        };
        Ok(Self::new(scale, statistics))
    }

    /// The normalized number for `value` of the color `color` (0: red, 1: green, 2: blue).
    pub(crate) fn number(&self, color: usize, value: u8) -> f32 {
        self.table[color][usize::from(value)]
    }

    /// Appends the normalized numbers of an image: first those for red, then those for green, then those for blue.
    pub(crate) fn push_planes(&self, image: &RgbImage, numbers: &mut Vec<f32>) {
        for color in 0..3 {
            let values = image.pixels()[color..].iter().step_by(3);
            numbers.extend(values.map(|value| self.number(color, *value)));
        }
    }

    /// The tensor `pixel_values` [tiles, 3, height, width] of tiles of one size.
    pub(crate) fn pixel_values(&self, tiles: &[RgbImage], size: Size) -> Tensor<f32> {
        let mut numbers = Vec::with_capacity(tiles.len() * 3 * size.pixels() as usize);
        for tile in tiles {
            assert_eq!(tile.size(), size, "all tiles have one size");
            self.push_planes(tile, &mut numbers);
        }
        Tensor::new(vec![tiles.len(), 3, size.height as usize, size.width as usize], numbers)
    }
}

//! Separable resampling of 8-bit images, bit-exact with Pillow or, in `resize_torch`, with PyTorch.
//!
//! Each output pixel is a weighted sum of input pixels. The support of a filter grows with the scale when an image
//! shrinks (antialiasing). The weights are integers, and each of the two passes rounds to 8 bits.

use std::ops::Range;

use crate::raster::{RgbImage, Size};

/// A resampling filter of Pillow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Filter {
    /// Linear interpolation; Pillow's number is 2.
    Bilinear,
    /// Cubic interpolation with a = -0.5; Pillow's number is 3.
    Bicubic,
    /// A sinc windowed by a sinc, with three lobes; Pillow's number is 1.
    Lanczos,
}

impl Filter {
    /// The filter with this number in Pillow's enumeration `Resampling`, which the configurations of processors use.
    #[must_use]
    pub fn from_pillow(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Lanczos),
            2 => Some(Self::Bilinear),
            3 => Some(Self::Bicubic),
            _ => None,
        }
    }

    /// The distance in input pixels beyond which the filter is 0, at scale 1.
    fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    fn value(self, x: f64) -> f64 {
        match self {
            Self::Bilinear => (1.0 - x.abs()).max(0.0),
            Self::Bicubic => {
                const A: f64 = -0.5;
                let x = x.abs();
                if x < 1.0 {
                    ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
                } else if x < 2.0 {
                    (((x - 5.0) * x + 8.0) * x - 4.0) * A
                } else {
                    0.0
                }
            }
            Self::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
            Self::Lanczos => 0.0,
        }
    }
}

fn sinc(x: f64) -> f64 {
    if x == 0.0 {
        return 1.0;
    }
    let x = x * std::f64::consts::PI;
    x.sin() / x
}

/// The number of fractional bits of the weights, which are fixed-point numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightPrecision {
    /// The weights have 22 fractional bits, as in Pillow.
    Pillow,
    /// The weights have the largest number of fractional bits, at most 22, for which the largest weight fits into a
    /// signed 16-bit integer, as in PyTorch's resize of 8-bit tensors on CPUs.
    Torch,
}

/// A part of an image, in pixels of that image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ImageRegion {
    pub(crate) left: u32,
    pub(crate) top: u32,
    pub(crate) size: Size,
}

/// Resizes an image as Pillow's `Image.resize` does.
///
/// # Panics
///
/// Panics if a side of the new size is 0.
#[must_use]
pub fn resize(image: &RgbImage, size: Size, filter: Filter) -> RgbImage {
    resize_region(image, size, filter, ImageRegion { left: 0, top: 0, size })
}

/// Resizes an image and returns a part of the result; the rest is not computed.
pub(crate) fn resize_region(image: &RgbImage, size: Size, filter: Filter, region: ImageRegion) -> RgbImage {
    resize_with(image, size, filter, region, WeightPrecision::Pillow)
}

/// Resizes an image as PyTorch does with antialiasing: with Pillow's filters, but 16-bit weights.
pub(crate) fn resize_torch(image: &RgbImage, size: Size, filter: Filter) -> RgbImage {
    resize_with(image, size, filter, ImageRegion { left: 0, top: 0, size }, WeightPrecision::Torch)
}

/// The axis that is resampled first. The result of the first pass is rounded to 8 bits, so the order matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FirstPass {
    Horizontal,
    Vertical,
}

impl FirstPass {
    /// Returns the order that Pillow uses since version 13: the vertical pass comes first if the height shrinks by more
    /// than twice as many pixels as the width.
    fn of_pillow(from: Size, to: Size) -> Self {
        let shrinkage = |from: u32, to: u32| i64::from(from) - i64::from(to);
        let height = shrinkage(from.height, to.height);
        if height > 0 && height > 2 * shrinkage(from.width, to.width) {
            Self::Vertical
        } else {
            Self::Horizontal
        }
    }
}

fn resize_with(
    image: &RgbImage,
    size: Size,
    filter: Filter,
    region: ImageRegion,
    precision: WeightPrecision,
) -> RgbImage {
    assert!(size.pixels() > 0 && region.size.pixels() > 0, "an image has at least one pixel");
    let from = image.size();
    let order = match precision {
        WeightPrecision::Pillow => FirstPass::of_pillow(from, size),
        WeightPrecision::Torch => FirstPass::Horizontal,
    };
    let axis =
        |from, to, start, length| Axis::new(filter, precision, Scale { from, to }, start..start + length);
    let columns = axis(from.width, size.width, region.left, region.size.width);
    let rows = axis(from.height, size.height, region.top, region.size.height);
    // Only these input pixels affect the region.
    let (needed_rows, needed_columns) = (rows.inputs(), columns.inputs());
    let bytes = needed_columns.start * 3..needed_columns.end * 3;
    let needed = needed_rows.clone().map(|y| &image.row(y as u32)[bytes.clone()]);
    let pixels = match order {
        FirstPass::Horizontal => {
            let narrow: Vec<u8> = needed.flat_map(|row| columns.resample_row(row)).collect();
            rows.resample_rows(&narrow, region.size.width as usize * 3)
        }
        FirstPass::Vertical => {
            let flat = rows.resample_rows(&needed.collect::<Vec<_>>().concat(), bytes.len());
            flat.chunks_exact(bytes.len()).flat_map(|row| columns.resample_row(row)).collect()
        }
    };
    RgbImage::new(region.size, pixels).expect("invariant: each pixel of the region was computed")
}

/// The number of pixels of an axis before and after resampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Scale {
    from: u32,
    to: u32,
}

/// The weights of the inputs of one output pixel.
struct Window {
    /// The index of the first input pixel.
    start: usize,
    weights: Vec<i32>,
}

/// A range of output pixels along one axis.
enum Axis {
    /// The scale is 1, so these input pixels are copied.
    Copy(Range<usize>),
    /// Each output pixel has its own window.
    Windows(Taps),
}

impl Axis {
    fn new(filter: Filter, precision: WeightPrecision, scale: Scale, outputs: Range<u32>) -> Self {
        if scale.from == scale.to {
            Self::Copy(outputs.start as usize..outputs.end as usize)
        } else {
            Self::Windows(Taps::new(filter, precision, scale, outputs))
        }
    }

    /// The input pixels that have an effect on the outputs.
    fn inputs(&self) -> Range<usize> {
        match self {
            Self::Copy(pixels) => pixels.clone(),
            Self::Windows(taps) => taps.inputs.clone(),
        }
    }

    /// Resamples a row that consists of the pixels in `inputs`.
    fn resample_row(&self, row: &[u8]) -> Vec<u8> {
        match self {
            Self::Copy(_) => row.to_vec(),
            Self::Windows(taps) => taps.resample_row(row),
        }
    }

    /// Resamples the columns of `rows`, which are the rows in `inputs`. Each row has `stride` bytes.
    fn resample_rows(&self, rows: &[u8], stride: usize) -> Vec<u8> {
        match self {
            Self::Copy(_) => rows.to_vec(),
            Self::Windows(taps) => taps.resample_rows(rows, stride),
        }
    }
}

/// The windows of a range of output pixels, whose starts are relative to the first pixel in `inputs`.
struct Taps {
    inputs: Range<usize>,
    windows: Vec<Window>,
    bits: u32,
}

impl Taps {
    fn new(filter: Filter, precision: WeightPrecision, scale: Scale, outputs: Range<u32>) -> Self {
        let Scale { from, to } = scale;
        let ratio = f64::from(from) / f64::from(to);
        let filter_scale = ratio.max(1.0);
        let support = filter.support() * filter_scale;
        let inverse = 1.0 / filter_scale;
        let windows: Vec<(usize, Vec<f64>)> = match precision {
            WeightPrecision::Pillow => outputs,
            // The largest weight of the whole axis determines the precision.
            WeightPrecision::Torch => 0..to,
        }
        .map(|x| {
            let center = (f64::from(x) + 0.5) * ratio;
            let start = ((center - support + 0.5) as i64).max(0);
            let end = ((center + support + 0.5) as i64).min(i64::from(from));
            let weight = |x: i64| filter.value((x as f64 - center + 0.5) * inverse);
            let mut weights: Vec<f64> = (start..end).map(weight).collect();
            let sum: f64 = weights.iter().sum();
            if sum != 0.0 {
                weights.iter_mut().for_each(|weight| *weight /= sum);
            }
            (start as usize, weights)
        })
        .collect();
        let bits = match precision {
            WeightPrecision::Pillow => 22,
            WeightPrecision::Torch => torch_bits(windows.iter().flat_map(|window| &window.1)),
        };
        let unit = f64::from(1 << bits);
        let integer = |weight: &f64| (weight * unit + if *weight < 0.0 { -0.5 } else { 0.5 }) as i32;
        let first = windows.iter().map(|window| window.0).min().unwrap_or(0);
        let end = windows.iter().map(|window| window.0 + window.1.len()).max().unwrap_or(0);
        let windows = windows.into_iter().map(|window| Window {
            start: window.0 - first,
            weights: window.1.iter().map(integer).collect(),
        });
        Self { inputs: first..end, windows: windows.collect(), bits }
    }

    fn rounded(&self, sum: i32) -> u8 {
        (sum >> self.bits).clamp(0, 255) as u8
    }

    fn resample_row(&self, row: &[u8]) -> Vec<u8> {
        let half = 1 << (self.bits - 1);
        let mut out = Vec::with_capacity(self.windows.len() * 3);
        for window in &self.windows {
            let mut sums = [half; 3];
            let pixels = row[window.start * 3..].chunks_exact(3);
            for (pixel, weight) in pixels.zip(&window.weights) {
                for channel in 0..3 {
                    sums[channel] += i32::from(pixel[channel]) * weight;
                }
            }
            out.extend(sums.map(|sum| self.rounded(sum)));
        }
        out
    }

    fn resample_rows(&self, rows: &[u8], stride: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.windows.len() * stride);
        let mut sums = vec![0; stride];
        for window in &self.windows {
            sums.fill(1 << (self.bits - 1));
            let rows = rows[window.start * stride..].chunks_exact(stride);
            for (row, weight) in rows.zip(&window.weights) {
                for (sum, value) in sums.iter_mut().zip(row) {
                    *sum += i32::from(*value) * weight;
                }
            }
            out.extend(sums.iter().map(|sum| self.rounded(*sum)));
        }
        out
    }
}

/// The largest number of fractional bits, at most 22, for which the largest weight fits into a signed 16-bit integer.
fn torch_bits<'a>(weights: impl Iterator<Item = &'a f64>) -> u32 {
    let largest = weights.copied().fold(0.0, f64::max);
    let fits = |bits: &u32| ((0.5 + largest * f64::from(1 << (bits + 1))) as i32) < 1 << 15;
    (0..22).take_while(fits).count() as u32
}

#[cfg(test)]
mod tests;

//! The code that the image processors of several families share.

use std::fmt::Debug;

use crate::{
    config::JsonFile,
    error::{ImageError, LoadError},
    family::Detail,
    inputs::EncoderInputs,
    layout::{ImageLayout, ImageMarker},
    raster::{RgbImage, Size},
    resample::Filter,
};

/// The largest supported edge of an encoder's tiles, in pixels.
pub(crate) const TILE_EDGE_MAX: u32 = 4096;
/// The largest number of tiles of an image, without the global view.
pub(crate) const TILES_MAX: u32 = 256;

/// The image processor of a family.
pub(crate) trait Preprocess: Debug + Send + Sync {
    /// The texts that stand for an image in a rendered prompt.
    fn markers(&self) -> &'static [ImageMarker];

    /// The texts before and after the marker in the input of a chat template that does not support image parts.
    fn tag_frame(&self) -> [&'static str; 2] {
        ["", ""]
    }

    /// The text of the special token that stands at the positions of image tokens.
    fn image_token(&self) -> &'static str;

    fn layout(&self, size: Size, detail: Detail) -> Result<ImageLayout, ImageError>;

    fn inputs(&self, image: &RgbImage, detail: Detail) -> Result<EncoderInputs, ImageError>;
}

/// Reads the resampling filter of a processor.
pub(crate) fn read_filter(file: &JsonFile, default: Filter) -> Result<Filter, LoadError> {
    let Some(value) = file.get("resample") else { return Ok(default) };
    let filter = value.as_u64().and_then(Filter::from_pillow);
    let problem = || format!("is {value}; supported: 1 (Lanczos), 2 (bilinear) and 3 (bicubic)");
    filter.ok_or_else(|| file.fault("resample", problem()))
}

/// Splits an image into tiles, row by row. The sides of the image must be multiples of the sides of a tile.
pub(crate) fn split_into_tiles(image: &RgbImage, tile: Size) -> Vec<RgbImage> {
    let corners = |length: u32, step: u32| (0..length / step).map(move |index| index * step);
    let size = image.size();
    corners(size.height, tile.height)
        .flat_map(|top| corners(size.width, tile.width).map(move |left| image.crop(left, top, tile)))
        .collect()
}

/// Divides integers as Python does: the result is the closest `f64`.
pub(crate) fn divide(a: u64, b: u64) -> f64 {
    a as f64 / b as f64
}

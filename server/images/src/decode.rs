//! Decodes the bytes of an image to upright 8-bit RGB.

use std::io::Cursor;

use image::{DynamicImage, ImageDecoder as _, ImageReader, Limits};

use crate::{
    error::ImageError,
    header::{ImageFormat, ImageHeader},
    limits::{FILE_BYTES_MAX, IMAGE_PIXELS_MAX, IMAGE_SIDE_MAX},
    raster::{RgbImage, Size},
};

/// The limits on an image, which are checked before memory is allocated for its pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeLimits {
    /// The largest size of the file in bytes.
    pub file_bytes_max: usize,
    /// The largest number of pixels.
    pub pixels_max: u64,
    /// The largest number of pixels of a row or column.
    pub side_max: u32,
}

impl Default for DecodeLimits {
    fn default() -> Self {
        Self { file_bytes_max: FILE_BYTES_MAX, pixels_max: IMAGE_PIXELS_MAX, side_max: IMAGE_SIDE_MAX }
    }
}

impl DecodeLimits {
    /// Reads the header of a whole file, and checks that the image is within the limits.
    ///
    /// # Errors
    ///
    /// [`ImageError`] if the image exceeds a limit, its format is not supported, or its header is invalid.
    pub fn check(&self, bytes: &[u8]) -> Result<ImageHeader, ImageError> {
        if bytes.len() > self.file_bytes_max {
            return Err(ImageError::Bytes { bytes: bytes.len(), limit: self.file_bytes_max });
        }
        let header = ImageHeader::read(bytes)?;
        let size = header.stored_size;
        if size.pixels() > self.pixels_max {
            return Err(ImageError::Pixels { size, limit: self.pixels_max });
        }
        if size.width.max(size.height) > self.side_max {
            return Err(ImageError::Side { size, limit: self.side_max });
        }
        Ok(header)
    }
}

/// Decodes an image: applies the orientation of its EXIF metadata, and flattens transparent pixels onto a white
/// background. 16-bit colors are truncated to their upper 8 bits, as in Pillow.
///
/// Decoding takes a few milliseconds per million pixels and up to 11 bytes of memory per pixel, so call this function
/// on a thread that may block, and limit the number of concurrent calls.
///
/// # Errors
///
/// [`ImageError`] if the image exceeds a limit, its format is not supported, or it is invalid or truncated.
pub fn decode(bytes: &[u8], limits: &DecodeLimits) -> Result<RgbImage, ImageError> {
    let header = limits.check(bytes)?;
    let format = match header.format {
        ImageFormat::Png => image::ImageFormat::Png,
        ImageFormat::Jpeg => image::ImageFormat::Jpeg,
        ImageFormat::WebP => image::ImageFormat::WebP,
        ImageFormat::Gif => image::ImageFormat::Gif,
        ImageFormat::Bmp => image::ImageFormat::Bmp,
    };
    let invalid = |problem: String| ImageError::Content { format: header.format.name(), problem };
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    reader.limits(decoder_limits(header.stored_size));
    let decoder = reader.into_decoder().map_err(|error| invalid(error.to_string()))?;
    let decoded = Size::new(decoder.dimensions().0, decoder.dimensions().1);
    if decoded != header.stored_size {
        return Err(invalid(format!(
            "the decoder reports a size of {decoded} pixels, but the header says {}",
            header.stored_size
        )));
    }
    let image = DynamicImage::from_decoder(decoder).map_err(|error| invalid(error.to_string()))?;
    let pixels = flatten(image).map_err(invalid)?;
    let image = RgbImage::new(decoded, pixels).ok_or_else(|| invalid("pixels are missing".to_owned()))?;
    Ok(header.orientation.apply(image))
}

/// The limits of the decoder. The memory suffices for two copies of the pixels with four 16-bit channels, and for
/// tables and metadata.
fn decoder_limits(size: Size) -> Limits {
    let mut limits = Limits::default();
    limits.max_image_width = Some(size.width);
    limits.max_image_height = Some(size.height);
    limits.max_alloc = Some(size.pixels().saturating_mul(16).saturating_add(16 << 20));
    limits
}

/// Converts an image to 8-bit RGB.
fn flatten(image: DynamicImage) -> Result<Vec<u8>, String> {
    let upper = |value: u16| (value >> 8) as u8;
    Ok(match image {
        DynamicImage::ImageRgb8(image) => image.into_raw(),
        DynamicImage::ImageLuma8(image) => image.as_raw().iter().flat_map(|gray| [*gray; 3]).collect(),
        DynamicImage::ImageLumaA8(image) => {
            image.pixels().flat_map(|pixel| on_white([pixel.0[0]; 3], pixel.0[1])).collect()
        }
        DynamicImage::ImageRgba8(image) => image
            .pixels()
            .flat_map(|pixel| on_white([pixel.0[0], pixel.0[1], pixel.0[2]], pixel.0[3]))
            .collect(),
        DynamicImage::ImageLuma16(image) => {
            image.as_raw().iter().flat_map(|gray| [upper(*gray); 3]).collect()
        }
        DynamicImage::ImageLumaA16(image) => {
            image.pixels().flat_map(|pixel| on_white([upper(pixel.0[0]); 3], upper(pixel.0[1]))).collect()
        }
        DynamicImage::ImageRgb16(image) => image.as_raw().iter().map(|color| upper(*color)).collect(),
        DynamicImage::ImageRgba16(image) => image
            .pixels()
            .flat_map(|pixel| {
                let [red, green, blue, alpha] = pixel.0.map(upper);
                on_white([red, green, blue], alpha)
            })
            .collect(),
        other => return Err(format!("the color type {:?} is not supported", other.color())),
    })
}

/// Mixes a color with white, with the rounding of Pillow's `alpha_composite`.
fn on_white(color: [u8; 3], alpha: u8) -> [u8; 3] {
    let alpha = u32::from(alpha);
    color.map(|color| {
        let mixed = (u32::from(color) * alpha + 255 * (255 - alpha)) * 128 + (0x80 << 7);
        ((((mixed >> 8) + mixed) >> 8) >> 7) as u8
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transparent_pixels_are_white_and_opaque_ones_keep_their_color() {
        assert_eq!(on_white([10, 20, 30], 0), [255; 3]);
        assert_eq!(on_white([10, 20, 30], 255), [10, 20, 30]);
        assert_eq!(on_white([0, 255, 100], 128), [127, 255, 177]);
    }

    #[test]
    fn the_file_size_is_limited() {
        let limits = DecodeLimits { file_bytes_max: 10, ..DecodeLimits::default() };
        assert_eq!(limits.check(&[0; 11]), Err(ImageError::Bytes { bytes: 11, limit: 10 }));
        assert_eq!(limits.check(&[0; 10]), Err(ImageError::Format));
    }
}

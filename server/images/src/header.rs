//! Reads the format, the size and the orientation of an image from its first bytes, without decoding pixels.
//!
//! The header suffices to check the limits and to compute the number of tokens, so a caller can reject an image before
//! memory is allocated for it, and a router can estimate tokens from a prefix of the file.

use crate::{
    error::ImageError,
    raster::{RgbImage, Size},
};

/// The file format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ImageFormat {
    /// PNG; only the default image of animated files is used.
    Png,
    /// JPEG, baseline or progressive, in gray, color or CMYK.
    Jpeg,
    /// WebP, lossy or lossless; only the first frame of animated files is used.
    WebP,
    /// GIF; only the first frame of animated files is used.
    Gif,
    /// The bitmap format of Windows.
    Bmp,
}

impl ImageFormat {
    /// The name of the format in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
            Self::Bmp => "BMP",
        }
    }

    fn of(bytes: &[u8]) -> Option<Self> {
        if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
            Some(Self::Png)
        } else if bytes.starts_with(b"\xff\xd8\xff") {
            Some(Self::Jpeg)
        } else if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") {
            Some(Self::WebP)
        } else if bytes.starts_with(b"GIF87a") || bytes.starts_with(b"GIF89a") {
            Some(Self::Gif)
        } else if bytes.starts_with(b"BM") {
            Some(Self::Bmp)
        } else {
            None
        }
    }
}

/// The properties of an image that its header contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHeader {
    /// The format of the file.
    pub format: ImageFormat,
    /// The size as stored in the file.
    pub stored_size: Size,
    /// The transformation that makes the stored pixels upright.
    pub orientation: Orientation,
}

impl ImageHeader {
    /// Reads the header. The bytes may be only the beginning of a file: the size is in the first kilobytes, unless
    /// large metadata precedes it, and an orientation after the end of the bytes is ignored.
    ///
    /// # Errors
    ///
    /// [`ImageError`] if the format is not supported or the bytes do not contain a valid size.
    pub fn read(bytes: &[u8]) -> Result<Self, ImageError> {
        let format = ImageFormat::of(bytes).ok_or(ImageError::Format)?;
        let (size, exif) = match format {
            ImageFormat::Png => (png_size(bytes), png_exif(bytes)),
            ImageFormat::Jpeg => (jpeg_size(bytes), jpeg_exif(bytes)),
            ImageFormat::WebP => (webp_size(bytes), webp_exif(bytes)),
            ImageFormat::Gif => (size_of_u16(bytes, 6), None),
            ImageFormat::Bmp => (bmp_size(bytes), None),
        };
        let stored_size = size.filter(|size| size.pixels() > 0).ok_or_else(|| ImageError::Content {
            format: format.name(),
            problem: "the header contains no valid size".to_owned(),
        })?;
        let orientation = exif.and_then(exif_orientation).unwrap_or(Orientation::Upright);
        Ok(Self { format, stored_size, orientation })
    }

    /// The size of the image as it is displayed.
    #[must_use]
    pub fn size(&self) -> Size {
        if self.orientation.swaps_sides() { self.stored_size.transposed() } else { self.stored_size }
    }
}

/// The transformation that makes stored pixels upright. Each variant is named after its transformation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Orientation {
    /// The EXIF value is 1: the pixels are upright.
    Upright,
    /// The EXIF value is 2: left and right are swapped.
    FlipHorizontal,
    /// The EXIF value is 3: the image is rotated by 180 degrees.
    Rotate180,
    /// The EXIF value is 4: top and bottom are swapped.
    FlipVertical,
    /// The EXIF value is 5: rows become columns.
    Transpose,
    /// The EXIF value is 6: the image is rotated clockwise by 90 degrees.
    Rotate90,
    /// The EXIF value is 7: rows become columns, and the image is rotated by 180 degrees.
    Transverse,
    /// The EXIF value is 8: the image is rotated clockwise by 270 degrees.
    Rotate270,
}

impl Orientation {
    /// The orientation with this value in EXIF metadata.
    #[must_use]
    pub fn from_exif(value: u16) -> Option<Self> {
        Some(match value {
            1 => Self::Upright,
            2 => Self::FlipHorizontal,
            3 => Self::Rotate180,
            4 => Self::FlipVertical,
            5 => Self::Transpose,
            6 => Self::Rotate90,
            7 => Self::Transverse,
            8 => Self::Rotate270,
            _ => return None,
        })
    }

    fn swaps_sides(self) -> bool {
        matches!(self, Self::Transpose | Self::Rotate90 | Self::Transverse | Self::Rotate270)
    }

    /// Applies the transformation to an image.
    pub(crate) fn apply(self, image: RgbImage) -> RgbImage {
        if self == Self::Upright {
            return image;
        }
        let Size { width, height } = image.size();
        let size = if self.swaps_sides() { image.size().transposed() } else { image.size() };
        let (right, bottom) = (width - 1, height - 1);
        let mut pixels = Vec::with_capacity(image.pixels().len());
        for y in 0..size.height {
            for x in 0..size.width {
                let [column, row] = match self {
                    Self::Upright => [x, y],
                    Self::FlipHorizontal => [right - x, y],
                    Self::Rotate180 => [right - x, bottom - y],
                    Self::FlipVertical => [x, bottom - y],
                    Self::Transpose => [y, x],
                    Self::Rotate90 => [y, bottom - x],
                    Self::Transverse => [right - y, bottom - x],
                    Self::Rotate270 => [right - y, x],
                };
                pixels.extend_from_slice(&image.row(row)[column as usize * 3..][..3]);
            }
        }
        RgbImage::new(size, pixels).expect("invariant: turning an image moves every pixel")
    }
}

fn u16_le(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u16_be(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_le(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_be(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Reads a size from two little-endian 16-bit numbers.
fn size_of_u16(bytes: &[u8], at: usize) -> Option<Size> {
    Some(Size::new(u16_le(bytes, at)?.into(), u16_le(bytes, at + 2)?.into()))
}

fn png_size(bytes: &[u8]) -> Option<Size> {
    (bytes.get(12..16)? == b"IHDR").then_some(())?;
    Some(Size::new(u32_be(bytes, 16)?, u32_be(bytes, 20)?))
}

fn png_exif(bytes: &[u8]) -> Option<&[u8]> {
    let mut at = 8;
    loop {
        let length = u32_be(bytes, at)? as usize;
        let kind = bytes.get(at + 4..at + 8)?;
        let content = bytes.get(at + 8..)?;
        match kind {
            b"eXIf" => return content.get(..length),
            b"IEND" => return None,
            _ => at = at.checked_add(12)?.checked_add(length)?,
        }
    }
}

/// The segments of a JPEG file up to the first scan: the marker and the content of each.
fn jpeg_segments(bytes: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let mut rest = bytes.get(2..).unwrap_or_default();
    std::iter::from_fn(move || {
        // One or more 0xFF bytes precede a marker.
        let start = rest.iter().position(|byte| *byte != 0xff)?;
        let marker = (start > 0).then(|| rest[start])?;
        rest = &rest[start + 1..];
        if marker == 0x01 || (0xd0..=0xd8).contains(&marker) {
            return Some((marker, &[][..]));
        }
        let length = usize::from(u16_be(rest, 0)?);
        // A prefix of a file can end within a segment.
        let content = rest.get(2..length.min(rest.len()))?;
        rest = rest.get(length..).unwrap_or_default();
        (marker != 0xda && marker != 0xd9).then_some((marker, content))
    })
}

fn jpeg_size(bytes: &[u8]) -> Option<Size> {
    let is_frame = |marker: u8| (0xc0..=0xcf).contains(&marker) && ![0xc4, 0xc8, 0xcc].contains(&marker);
    let (_, frame) = jpeg_segments(bytes).find(|(marker, _)| is_frame(*marker))?;
    Some(Size::new(u16_be(frame, 3)?.into(), u16_be(frame, 1)?.into()))
}

fn jpeg_exif(bytes: &[u8]) -> Option<&[u8]> {
    jpeg_segments(bytes)
        .find_map(|(marker, content)| (marker == 0xe1).then(|| content.strip_prefix(b"Exif\0\0")).flatten())
}

fn webp_size(bytes: &[u8]) -> Option<Size> {
    let content = bytes.get(20..)?;
    let u24 = |at: usize| Some(u32_le(content, at)? & 0xff_ffff);
    match bytes.get(12..16)? {
        b"VP8X" => Some(Size::new(u24(4)? + 1, u32_le(content, 6)?.wrapping_shr(8) + 1)),
        b"VP8L" => {
            let bits = (*content.first()? == 0x2f).then(|| u32_le(content, 1)).flatten()?;
            Some(Size::new((bits & 0x3fff) + 1, ((bits >> 14) & 0x3fff) + 1))
        }
        b"VP8 " => {
            (content.get(3..6)? == b"\x9d\x01\x2a").then_some(())?;
            let size = size_of_u16(content, 6)?;
            Some(Size::new(size.width & 0x3fff, size.height & 0x3fff))
        }
        _ => None,
    }
}

fn webp_exif(bytes: &[u8]) -> Option<&[u8]> {
    let mut at = 12_usize;
    loop {
        let kind = bytes.get(at..at.checked_add(4)?)?;
        let length = u32_le(bytes, at + 4)? as usize;
        if kind == b"EXIF" {
            let content = bytes.get(at + 8..)?.get(..length)?;
            return Some(content.strip_prefix(b"Exif\0\0").unwrap_or(content));
        }
        at = at.checked_add(8)?.checked_add(length)?.checked_add(length % 2)?;
    }
}

fn bmp_size(bytes: &[u8]) -> Option<Size> {
    if u32_le(bytes, 14)? == 12 {
        return size_of_u16(bytes, 18);
    }
    // A negative height means that the first row is the top row.
    let side = |at: usize| Some((u32_le(bytes, at)? as i32).unsigned_abs());
    let width = u32_le(bytes, 18).filter(|width| *width <= i32::MAX as u32)?;
    Some(Size::new(width, side(22)?))
}

/// The orientation in EXIF metadata, which has the format of a TIFF file.
fn exif_orientation(exif: &[u8]) -> Option<Orientation> {
    const ORIENTATION: u16 = 0x0112;
    const SHORT: u16 = 3;
    let is_little = match exif.get(..4)? {
        b"II*\0" => true,
        b"MM\0*" => false,
        _ => return None,
    };
    let number16 = |at: usize| if is_little { u16_le(exif, at) } else { u16_be(exif, at) };
    let number32 = |at: usize| if is_little { u32_le(exif, at) } else { u32_be(exif, at) };
    let directory = number32(4)? as usize;
    let entries = usize::from(number16(directory)?);
    (0..entries)
        .filter_map(|entry| directory.checked_add(2 + entry * 12))
        .find(|at| number16(*at) == Some(ORIENTATION) && number16(at + 2) == Some(SHORT))
        .and_then(|at| Orientation::from_exif(number16(at + 8)?))
}

#[cfg(test)]
mod tests;

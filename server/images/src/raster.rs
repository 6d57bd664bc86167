//! Pictures in memory: 8-bit RGB, row by row.

use std::fmt;

/// The size of an image or tile in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Size {
    /// The number of pixels of a row.
    pub width: u32,
    /// The number of rows of pixels.
    pub height: u32,
}

impl Size {
    /// Creates a size; note that the width comes first.
    #[must_use]
    pub const fn new(width: u32, height: u32) -> Self {
        Self { width, height }
    }

    /// Creates the size of a square with this edge.
    #[must_use]
    pub const fn square(edge: u32) -> Self {
        Self::new(edge, edge)
    }

    /// The number of pixels.
    #[must_use]
    pub const fn pixels(self) -> u64 {
        self.width as u64 * self.height as u64
    }

    /// Returns the size with width and height swapped.
    #[must_use]
    pub const fn transposed(self) -> Self {
        Self::new(self.height, self.width)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}

/// A decoded image: three bytes (red, green, blue) for each pixel, row by row from the top.
#[derive(Clone, PartialEq, Eq)]
pub struct RgbImage {
    size: Size,
    pixels: Vec<u8>,
}

impl RgbImage {
    /// Creates an image from its pixels; `None` if there are not exactly three bytes for each pixel, or if a side is 0.
    #[must_use]
    pub fn new(size: Size, pixels: Vec<u8>) -> Option<Self> {
        let is_valid = size.pixels() > 0 && size.pixels().checked_mul(3) == u64::try_from(pixels.len()).ok();
        is_valid.then_some(Self { size, pixels })
    }

    /// Creates an image of a single color.
    ///
    /// # Panics
    ///
    /// Panics if a side is 0.
    #[must_use]
    pub fn filled(size: Size, color: [u8; 3]) -> Self {
        assert!(size.pixels() > 0, "an image has at least one pixel");
        Self { size, pixels: color.repeat((size.width as usize) * (size.height as usize)) }
    }

    /// The size of the image.
    #[must_use]
    pub fn size(&self) -> Size {
        self.size
    }

    /// The bytes of all pixels.
    #[must_use]
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// The bytes of a row of pixels.
    ///
    /// # Panics
    ///
    /// Panics if the image has no such row.
    #[must_use]
    pub fn row(&self, y: u32) -> &[u8] {
        let bytes = self.size.width as usize * 3;
        &self.pixels[y as usize * bytes..][..bytes]
    }

    /// Copies a part of the image.
    ///
    /// # Panics
    ///
    /// Panics if the part is empty or not entirely inside the image.
    #[must_use]
    pub fn crop(&self, left: u32, top: u32, size: Size) -> Self {
        let start = left as usize * 3;
        let bytes = size.width as usize * 3;
        let mut pixels = Vec::with_capacity(bytes * size.height as usize);
        for y in top..top + size.height {
            pixels.extend_from_slice(&self.row(y)[start..start + bytes]);
        }
        Self::new(size, pixels).expect("the part is not empty")
    }

    /// Copies another image into this one.
    ///
    /// # Panics
    ///
    /// Panics if the other image does not fit at this position.
    pub fn paste(&mut self, other: &Self, left: u32, top: u32) {
        let stride = self.size.width as usize * 3;
        for y in 0..other.size.height {
            let start = (top + y) as usize * stride + left as usize * 3;
            let row = other.row(y);
            assert!(left + other.size.width <= self.size.width, "the other image fits");
            self.pixels[start..start + row.len()].copy_from_slice(row);
        }
    }
}

impl fmt::Debug for RgbImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RgbImage({})", self.size)
    }
}

//! Limits on images.

/// Size of the file of an image.
///
/// If exceeded: 400, `invalid_value`.
pub const FILE_BYTES_MAX: usize = 20 << 20;
/// Number of pixels of an image. It is checked before any pixel is decoded.
///
/// If exceeded: 400, `invalid_value`.
pub const IMAGE_PIXELS_MAX: u64 = 50_000_000;
/// Width or height of an image in pixels. The weights of resampling need memory for each row and column.
///
/// If exceeded: 400, `invalid_value`.
pub const IMAGE_SIDE_MAX: u32 = 1 << 15;
/// Number of pixels of an image with `detail: low`, for model families with a pixel budget.
///
/// If exceeded: the image is scaled down to about this number of pixels.
pub const LOW_DETAIL_PIXELS_MAX: u64 = 512 * 512;
/// Size of a JSON file that configures an image processor.
///
/// If exceeded: the server does not start.
pub const CONFIG_BYTES_MAX: u64 = 64 << 20;

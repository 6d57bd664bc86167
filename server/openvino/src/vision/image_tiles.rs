//! The tiles of several images, which an encoder computes in one or more runs.

use server_images::{EncoderInputs, Tensor};

/// A tile of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TileIndex {
    /// The index of the image.
    pub(super) image: usize,
    /// The index of the tile in its image.
    tile: usize,
}

/// The tiles of several images, in order.
#[derive(Debug, PartialEq)]
pub(super) struct ImageTiles {
    pub(super) tiles: Vec<TileIndex>,
    /// Largest number of tiles in a run, at least one.
    pub(super) tiles_per_run: usize,
}

/// Returns the tiles of images. The pixels of each image must have the shape [tiles, channels, height, width]. Returns
/// `None` if there are no images, if the pixels have another shape, or if the tiles have no pixels or different sizes.
pub(super) fn tiles_of(pixels: &[&Tensor<f32>], run_pixels: usize) -> Option<ImageTiles> {
    let size = tile_size(pixels.first()?)?;
    if pixels.iter().any(|image| tile_size(image) != Some(size)) {
        return None;
    }
    let tile_pixels = size.height.checked_mul(size.width)?;
    let tiles_of_image = |(image, pixels): (usize, &&Tensor<f32>)| {
        (0..pixels.shape()[0]).map(move |tile| TileIndex { image, tile })
    };
    let tiles = pixels.iter().enumerate().flat_map(tiles_of_image).collect();
    Some(ImageTiles { tiles, tiles_per_run: run_pixels.checked_div(tile_pixels)?.max(1) })
}

/// Whether the tiles of all images, of which `image` is the last, can be computed in one run.
pub(super) fn fit_in_one_run(batch: &[&EncoderInputs], image: &EncoderInputs, run_pixels: usize) -> bool {
    let pixels = batch.iter().copied().chain([image]).map(|inputs| match inputs {
        EncoderInputs::Tiles(pixels) => Some(pixels),
        EncoderInputs::MaskedTiles(tiles) => Some(&tiles.pixel_values),
        // In the full-attention layers of Qwen's encoders, each patch attends to all patches of a run, so a run
        // contains only one image. The slices of MiniCPM-V have different sizes, so a run contains only one slice.
        EncoderInputs::Qwen(_) | EncoderInputs::Slices(_) => None,
    });
    let pixels: Option<Vec<_>> = pixels.collect();
    let tiles = pixels.and_then(|pixels| tiles_of(&pixels, run_pixels));
    tiles.is_some_and(|tiles| tiles.tiles.len() <= tiles.tiles_per_run)
}

/// The values of these tiles. The first dimension of each tensor is the number of tiles of the image, and the other
/// dimensions are the same for all images.
pub(super) fn gather<T: Copy>(images: &[&Tensor<T>], tiles: &[TileIndex]) -> Tensor<T> {
    let mut shape = images.first().map(|image| image.shape().to_vec()).unwrap_or_default();
    if let Some(first) = shape.first_mut() {
        *first = tiles.len();
    }
    let size: usize = shape.iter().skip(1).product();
    let mut values = Vec::with_capacity(size * tiles.len());
    for TileIndex { image, tile } in tiles {
        values.extend_from_slice(&images[*image].values()[tile * size..][..size]);
    }
    Tensor::new(shape, values)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TileSize {
    channels: usize,
    height: usize,
    width: usize,
}

fn tile_size(pixels: &Tensor<f32>) -> Option<TileSize> {
    match *pixels.shape() {
        [_, channels, height, width] => Some(TileSize { channels, height, width }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image whose tiles have one channel and 2 x 2 pixels, with values that count up from `first`.
    fn image(tiles: usize, first: u8) -> Tensor<f32> {
        let values = (0..tiles * 4).map(|index| f32::from(first) + index as f32);
        Tensor::new(vec![tiles, 1, 2, 2], values.collect())
    }

    #[test]
    fn runs_have_tiles_of_several_images() {
        let images = [image(1, 0), image(2, 10)];
        let images: Vec<_> = images.iter().collect();
        let ImageTiles { tiles, tiles_per_run } = tiles_of(&images, 11).unwrap();
        assert_eq!(tiles_per_run, 2);
        let runs: Vec<_> = tiles.chunks(tiles_per_run).map(|run| gather(&images, run)).collect();
        let first = [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0];
        assert_eq!(runs[0], Tensor::new(vec![2, 1, 2, 2], first.into()));
        assert_eq!(runs[1], Tensor::new(vec![1, 1, 2, 2], vec![14.0, 15.0, 16.0, 17.0]));
        assert_eq!(tiles.iter().map(|tile| tile.image).collect::<Vec<_>>(), [0, 1, 1]);
        assert_eq!(tiles_of(&images, 3).unwrap().tiles_per_run, 1, "a tile may have more pixels than a run");
    }

    #[test]
    fn tiles_of_different_sizes_have_no_run() {
        let other = Tensor::new(vec![1, 1, 1, 2], vec![0.0; 2]);
        let empty = Tensor::new(vec![1, 1, 0, 2], vec![]);
        let flat = Tensor::new(vec![1, 4], vec![0.0; 4]);
        for images in [&[&image(1, 0), &other][..], &[&empty], &[&flat], &[]] {
            assert_eq!(tiles_of(images, 100), None);
        }
    }

    #[test]
    fn images_join_a_run_up_to_its_pixels() {
        let tiles = |tiles| EncoderInputs::Tiles(image(tiles, 0));
        let fit = |batch: &[&EncoderInputs], image| fit_in_one_run(batch, &image, 12);
        assert!(fit(&[&tiles(1)], tiles(2)) && fit(&[&tiles(1), &tiles(1)], tiles(1)));
        assert!(!fit(&[&tiles(2)], tiles(2)) && !fit(&[&tiles(4)], tiles(1)));
        assert!(!fit(&[&tiles(1)], EncoderInputs::Slices(Vec::new())));
    }
}

//! Chooses a grid of tiles according to the proportions of the image, for InternVL and Phi-4-multimodal.

use crate::{preprocess::divide, raster::Size};

/// The number of tiles in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TileGrid {
    pub(super) columns: u32,
    pub(super) rows: u32,
}

impl TileGrid {
    pub(super) fn tiles(self) -> u32 {
        self.columns * self.rows
    }

    /// The size of all tiles together.
    pub(super) fn size(self, edge: u32) -> Size {
        Size::new(self.columns * edge, self.rows * edge)
    }

    /// The grid whose number of tiles is in `tiles` and whose proportions are closest to those of the image. Among
    /// equally close grids, one with more tiles is chosen if the image has more than half as many pixels as that grid.
    pub(super) fn closest(size: Size, edge: u32, tiles: std::ops::RangeInclusive<u32>) -> Self {
        let grids = |columns: u32| (1..=*tiles.end() / columns).map(move |rows| Self { columns, rows });
        let mut grids: Vec<Self> = (1..=*tiles.end()).flat_map(grids).collect();
        grids.retain(|grid| tiles.contains(&grid.tiles()));
        grids.sort_by_key(|grid| grid.tiles());
        let ratio = divide(size.width.into(), size.height.into());
        let mut best = Self { columns: 1, rows: 1 };
        let mut best_difference = f64::INFINITY;
        for grid in grids {
            let difference = (ratio - divide(grid.columns.into(), grid.rows.into())).abs();
            let has_pixels = size.pixels() as f64 > 0.5 * grid.size(edge).pixels() as f64;
            if difference < best_difference {
                (best, best_difference) = (grid, difference);
            } else if difference == best_difference && has_pixels {
                best = grid;
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closest(width: u32, height: u32) -> TileGrid {
        TileGrid::closest(Size::new(width, height), 448, 1..=12)
    }

    #[test]
    fn small_images_have_the_smallest_grid_of_their_proportions() {
        assert_eq!(closest(300, 300), TileGrid { columns: 1, rows: 1 });
        assert_eq!(closest(400, 200), TileGrid { columns: 2, rows: 1 });
    }

    #[test]
    fn large_images_have_the_largest_grid_of_their_proportions() {
        assert_eq!(closest(4000, 4000), TileGrid { columns: 3, rows: 3 });
        assert_eq!(closest(4000, 2000), TileGrid { columns: 4, rows: 2 });
    }

    #[test]
    fn extreme_proportions_use_one_row_of_all_tiles() {
        assert_eq!(closest(4000, 28), TileGrid { columns: 12, rows: 1 });
        assert_eq!(closest(1, 4000), TileGrid { columns: 1, rows: 12 });
    }
}

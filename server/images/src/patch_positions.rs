//! Assigns position embeddings to patches, for encoders that spread a fixed grid of embeddings over pictures of any
//! size (Idefics3, SmolVLM, MiniCPM-V, Phi-4-multimodal).

/// A grid of patches whose top-left part shows the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PatchArea {
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    pub(crate) valid_rows: u32,
    pub(crate) valid_columns: u32,
}

impl PatchArea {
    /// Creates a square grid without padding.
    pub(crate) fn full(edge: u32) -> Self {
        Self::unpadded(edge, edge)
    }

    /// Creates a grid without padding.
    pub(crate) fn unpadded(rows: u32, columns: u32) -> Self {
        Self { rows, columns, valid_rows: rows, valid_columns: columns }
    }

    /// Whether each patch shows the image, row by row.
    pub(crate) fn mask(self) -> impl Iterator<Item = bool> {
        (0..self.rows).flat_map(move |row| {
            (0..self.columns).map(move |column| row < self.valid_rows && column < self.valid_columns)
        })
    }
}

/// The rule that maps the index of a patch in its row or column to a number from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PatchFractions {
    /// Patch i of n is at i · (1 / n).
    Steps,
    /// Patch i of n is at (i / n) · 0.999999, as in Idefics3 and SmolVLM in transformers 4.57. If a row or column has
    /// as many patches as embeddings, patch i has embedding i - 1 instead of i, except for patch 0.
    Shrunk,
}

impl PatchFractions {
    fn of(self, count: u32) -> Vec<f32> {
        match self {
            Self::Steps => arange(0.0, f64::from(1.0 / count as f32), count),
            Self::Shrunk => (0..count).map(|index| index as f32 / count as f32 * 0.999_999).collect(),
        }
    }
}

/// Returns the same numbers as PyTorch's `arange` of 32-bit floats on CPUs with AVX2. There, PyTorch computes pairs of
/// vectors of eight numbers, and rounds the first number of a vector before it adds the steps to it. It computes the
/// numbers after the last pair one by one.
fn arange(start: f64, step: f64, count: u32) -> Vec<f32> {
    let number = |index: u32| (start + step * f64::from(index)) as f32;
    let in_vectors = count / 16 * 16;
    let vector = |index: u32| (f64::from(number(index / 8 * 8)) + step * f64::from(index % 8)) as f32;
    (0..count).map(|index| if index < in_vectors { vector(index) } else { number(index) }).collect()
}

/// Returns the indices of the position embeddings of all patches, row by row, with 0 for padding. `edge` is the number
/// of embeddings along an edge of their square grid.
pub(crate) fn patch_positions(area: PatchArea, edge: u32, fractions: PatchFractions) -> Vec<i64> {
    let rows = buckets(area.valid_rows, edge, fractions);
    let columns = buckets(area.valid_columns, edge, fractions);
    let position = |row: u32, column: u32| {
        let row = rows.get(row as usize).copied();
        let column = columns.get(column as usize).copied();
        row.zip(column).map_or(0, |(row, column)| row * i64::from(edge) + column)
    };
    (0..area.rows)
        .flat_map(|row| (0..area.columns).map(move |column| (row, column)))
        .map(|cell| position(cell.0, cell.1))
        .collect()
}

/// Distributes `count` patches over `edge` buckets. Many patches are exactly on the boundary between two buckets, so
/// PyTorch's rounding determines their buckets.
fn buckets(count: u32, edge: u32, fractions: PatchFractions) -> Vec<i64> {
    let step = 1.0 / f64::from(edge);
    let boundaries = arange(step, step, ((1.0 - step) / step).ceil() as u32);
    let bucket = |fraction: f32| boundaries.partition_point(|boundary| *boundary <= fraction) as i64;
    fractions.of(count).into_iter().map(bucket).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_of_the_size_of_the_embeddings_uses_each_once() {
        for edge in [1, 2, 16, 32] {
            let expected: Vec<i64> = (0..i64::from(edge * edge)).collect();
            assert_eq!(
                patch_positions(PatchArea::full(edge), edge, PatchFractions::Steps),
                expected,
                "edge {edge}"
            );
        }
    }

    #[test]
    fn shrunk_fractions_move_patches_to_their_predecessors() {
        let area = PatchArea { rows: 1, columns: 4, valid_rows: 1, valid_columns: 4 };
        assert_eq!(patch_positions(area, 4, PatchFractions::Shrunk), [0, 0, 1, 2]);
    }

    #[test]
    fn a_smaller_grid_is_spread_over_the_embeddings() {
        let area = PatchArea { rows: 2, columns: 3, valid_rows: 2, valid_columns: 2 };
        assert_eq!(patch_positions(area, 8, PatchFractions::Steps), [0, 4, 0, 32, 36, 0]);
        assert_eq!(area.mask().collect::<Vec<_>>(), [true, true, false, true, true, false]);
    }

    #[test]
    fn buckets_are_those_of_pytorch() {
        // Each grid edge is followed by a digest of the buckets for 1 to 1500 patches. The digests were computed with
        // PyTorch 2.11 on a CPU with AVX2.
        let expected = [
            (16, 858_272_764_230_525_294),
            (27, 5_232_416_310_524_135_673),
            (32, 6_702_784_762_372_708_287),
            (70, 4_020_820_291_817_957_549),
        ];
        for (edge, digest) in expected {
            let mut sum = 0_u64;
            for count in 1..=1500 {
                for bucket in buckets(count, edge, PatchFractions::Steps) {
                    sum = sum.wrapping_mul(31).wrapping_add(bucket as u64);
                }
            }
            assert_eq!(sum, digest, "edge {edge}");
        }
    }
}

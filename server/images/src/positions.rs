//! The position IDs and token types of a prompt with images. These are pure functions of the length of the prompt and
//! the spans of its image tokens.

use crate::layout::ImageSpan;

/// The position IDs of a prompt for a model with M-RoPE (Qwen2-VL, Qwen2.5-VL, Qwen3-VL).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MropePositions {
    /// The temporal position of each token.
    pub temporal: Vec<i64>,
    /// The vertical position of each token.
    pub height: Vec<i64>,
    /// The horizontal position of each token.
    pub width: Vec<i64>,
    /// The difference between position and index after the prompt: a generated token at index i of the sequence has
    /// position i + delta in all three streams. The difference is never positive.
    pub delta: i64,
}

/// Computes the position IDs of a prompt of `length` tokens. In text, the position increases by 1 for each token, in
/// all three streams. If the first token of an image has position p, the token in a row and column of the merged grid
/// has the temporal position p, the vertical position p + row and the horizontal position p + column. The text after
/// the image continues at p + max(rows, columns).
///
/// # Panics
///
/// Panics if the spans are not in order and within the prompt, or if a span is not one range with one token for each
/// cell of its grid. [`image_spans`](crate::image_spans) returns only valid spans for the families that have a grid.
#[must_use]
pub fn mrope_positions(length: usize, spans: &[ImageSpan]) -> MropePositions {
    let mut positions = MropePositions {
        temporal: Vec::with_capacity(length),
        height: Vec::with_capacity(length),
        width: Vec::with_capacity(length),
        delta: 0,
    };
    let mut next = 0;
    for span in spans {
        let ([range], Some(grid)) = (span.ranges.as_slice(), span.grid) else {
            panic!("an image of a model with M-RoPE is one range of tokens and has a grid");
        };
        let (rows, columns) = (i64::from(grid.rows), i64::from(grid.columns));
        assert_eq!(range.len() as i64, rows * columns, "each cell of the grid has a token");
        next = positions.push_text(range.start, next);
        for row in 0..rows {
            for column in 0..columns {
                positions.temporal.push(next);
                positions.height.push(next + row);
                positions.width.push(next + column);
            }
        }
        next += rows.max(columns);
    }
    next = positions.push_text(length, next);
    positions.delta = next - length as i64;
    positions
}

impl MropePositions {
    /// Appends the positions of text up to the index `end`. The first token of the text has position `next`. Returns
    /// the position after the text.
    fn push_text(&mut self, end: usize, next: i64) -> i64 {
        let count = end.checked_sub(self.temporal.len()).expect("spans are in order and within the prompt");
        let text = next..next + count as i64;
        for stream in [&mut self.temporal, &mut self.height, &mut self.width] {
            stream.extend(text.clone());
        }
        text.end
    }
}

/// Computes the `token_type_ids` of Gemma 3 for a prompt of `length` tokens: 1 for image tokens and 0 for text. Tokens of
/// one image attend to each other in both directions. Generated tokens have type 0.
///
/// # Panics
///
/// Panics if a span is not within the prompt.
#[must_use]
pub fn token_types(length: usize, spans: &[ImageSpan]) -> Vec<i64> {
    let mut types = vec![0; length];
    for range in spans.iter().flat_map(|span| &span.ranges) {
        types[range.clone()].fill(1);
    }
    types
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::TokenGrid;

    fn ranges(range: std::ops::Range<usize>) -> Vec<std::ops::Range<usize>> {
        std::iter::once(range).collect()
    }

    fn span(start: usize, rows: u32, columns: u32) -> ImageSpan {
        let end = start + (rows * columns) as usize;
        ImageSpan { ranges: ranges(start..end), grid: Some(TokenGrid { rows, columns }) }
    }

    #[test]
    fn text_has_equal_streams_and_no_delta() {
        let positions = mrope_positions(3, &[]);
        assert_eq!(positions.temporal, [0, 1, 2]);
        assert_eq!(positions.height, [0, 1, 2]);
        assert_eq!(positions.width, [0, 1, 2]);
        assert_eq!(positions.delta, 0);
    }

    #[test]
    fn an_image_advances_by_its_longer_side() {
        let positions = mrope_positions(10, &[span(2, 2, 3)]);
        assert_eq!(positions.temporal, [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]);
        assert_eq!(positions.height, [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]);
        assert_eq!(positions.width, [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]);
        assert_eq!(positions.delta, -3);
    }

    #[test]
    fn adjacent_images_and_an_image_at_the_end_are_valid() {
        let positions = mrope_positions(5, &[span(0, 2, 1), span(2, 1, 3)]);
        assert_eq!(positions.temporal, [0, 0, 2, 2, 2]);
        assert_eq!(positions.height, [0, 1, 2, 2, 2]);
        assert_eq!(positions.width, [0, 0, 2, 3, 4]);
        assert_eq!(positions.delta, 0);
    }

    #[test]
    #[should_panic(expected = "each cell of the grid has a token")]
    fn a_span_that_does_not_match_its_grid_panics() {
        let grid = Some(TokenGrid { rows: 2, columns: 2 });
        let _ = mrope_positions(5, &[ImageSpan { ranges: ranges(0..3), grid }]);
    }

    #[test]
    fn token_types_mark_all_ranges() {
        let spans = [ImageSpan { ranges: vec![1..2, 3..5], grid: None }];
        assert_eq!(token_types(6, &spans), [0, 1, 0, 1, 1, 0]);
    }
}

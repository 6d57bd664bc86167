//! Locates the images in the text and in the tokens of a prompt.

use crate::layout::{ImageLayout, ImageMarker, ImageSpan};

/// The reason why the images of a request do not match its prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PromptError {
    /// The rendered prompt has more or fewer markers than the request has images.
    #[error(
        "the prompt has {markers} image markers for {images} images: the text of the request contains an image marker, or the \
         chat template omits or repeats images"
    )]
    Markers {
        /// The number of markers in the prompt.
        markers: usize,
        /// The number of images of the request.
        images: usize,
    },
    /// The tokenized prompt has more or fewer image tokens than the images need.
    #[error("the prompt has {tokens} image tokens, but its images need {needed}")]
    Tokens {
        /// The number of image tokens in the prompt.
        tokens: usize,
        /// The number of tokens that the images need.
        needed: usize,
    },
}

/// Replaces the markers of the images in a rendered prompt with the text that stands for the images, in order. A marker
/// is any of `markers`; if several begin at the same place, the longest is used.
///
/// # Errors
///
/// [`PromptError::Markers`] if the number of markers differs from the number of images.
pub fn expand_prompt(
    prompt: &str,
    markers: &[ImageMarker],
    images: &[ImageLayout],
) -> Result<String, PromptError> {
    let mut text = String::with_capacity(prompt.len());
    let mut rest = prompt;
    let mut count = 0;
    while let Some(marker) = next_marker(rest, markers) {
        if let Some(image) = images.get(count) {
            text.push_str(&rest[..marker.start]);
            text.push_str(&image.prompt_text(count));
        }
        rest = &rest[marker.end..];
        count += 1;
    }
    if count != images.len() {
        return Err(PromptError::Markers { markers: count, images: images.len() });
    }
    text.push_str(rest);
    Ok(text)
}

fn next_marker(text: &str, markers: &[ImageMarker]) -> Option<std::ops::Range<usize>> {
    let found = markers.iter().filter_map(|marker| marker.find(text));
    found.min_by_key(|range| (range.start, std::cmp::Reverse(range.end)))
}

/// Assigns the image tokens of a tokenized prompt to the images, in order.
///
/// # Errors
///
/// [`PromptError::Tokens`] if the number of tokens with the ID `image_token` differs from the number that the images
/// need.
pub fn image_spans(
    tokens: &[u32],
    image_token: u32,
    images: &[ImageLayout],
) -> Result<Vec<ImageSpan>, PromptError> {
    let mut spans = Vec::with_capacity(images.len());
    let mut index = 0;
    let mismatch = || PromptError::Tokens {
        tokens: tokens.iter().filter(|token| **token == image_token).count(),
        needed: images.iter().map(|image| image.num_tokens).sum(),
    };
    for image in images {
        let mut span = ImageSpan { ranges: Vec::new(), grid: image.grid };
        let mut missing = image.num_tokens;
        while missing > 0 {
            let start = tokens[index..].iter().position(|token| *token == image_token);
            let start = index + start.ok_or_else(mismatch)?;
            let run = tokens[start..].iter().take(missing).take_while(|token| **token == image_token).count();
            index = start + run;
            missing -= run;
            span.ranges.push(start..index);
        }
        spans.push(span);
    }
    if tokens[index..].contains(&image_token) { Err(mismatch()) } else { Ok(spans) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::PromptText;

    const MARKER: ImageMarker = ImageMarker::Text("<image>");

    fn image(num_tokens: usize, before_number: Option<&str>, rest: &str) -> ImageLayout {
        let text = PromptText { before_number: before_number.map(str::to_owned), rest: rest.to_owned() };
        ImageLayout { num_tokens, feature_rows: None, grid: None, input_bytes: 0, text }
    }

    #[test]
    fn markers_are_replaced_in_order_and_once() {
        let images = [image(2, None, "<x><image><image>"), image(1, Some("<id>"), "</id><image>")];
        let text = expand_prompt("a<image>b<image>c", &[MARKER], &images).unwrap();
        assert_eq!(text, "a<x><image><image>b<id>1</id><image>c");
    }

    #[test]
    fn the_longest_marker_is_used() {
        let images = [image(1, None, "I")];
        assert_eq!(
            expand_prompt("(<image>)", &[MARKER, ImageMarker::Text("(<image>)")], &images).unwrap(),
            "I"
        );
    }

    #[test]
    fn numbered_markers_are_recognized() {
        let images = [image(1, None, "I"), image(1, None, "J")];
        let marker = ImageMarker::Numbered { start: "<|image_", end: "|>" };
        let text = expand_prompt("<|image_|><|image_1|>a<|image_12|>", &[marker], &images).unwrap();
        assert_eq!(text, "<|image_|>IaJ");
        assert_eq!(marker.text(1), "<|image_2|>");
    }

    #[test]
    fn a_different_number_of_markers_is_an_error() {
        let images = [image(1, None, "I")];
        for (prompt, markers) in [("none", 0), ("<image> and <image>", 2)] {
            let error = PromptError::Markers { markers, images: 1 };
            assert_eq!(expand_prompt(prompt, &[MARKER], &images), Err(error));
        }
    }

    #[test]
    fn tokens_are_assigned_in_order() {
        let images = [image(2, None, ""), image(1, None, ""), image(3, None, "")];
        let spans = image_spans(&[1, 9, 9, 9, 2, 9, 3, 9, 9], 9, &images).unwrap();
        let positions: Vec<Vec<usize>> =
            spans.iter().map(|span| span.ranges.iter().cloned().flatten().collect()).collect();
        assert_eq!(positions, [vec![1, 2], vec![3], vec![5, 7, 8]]);
        assert_eq!(spans[2].ranges.len(), 2);
    }

    #[test]
    fn a_different_number_of_image_tokens_is_an_error() {
        let images = [image(2, None, "")];
        for (tokens, found) in [(vec![9, 1], 1), (vec![9, 9, 1, 9], 3), (vec![], 0)] {
            let error = PromptError::Tokens { tokens: found, needed: 2 };
            assert_eq!(image_spans(&tokens, 9, &images), Err(error));
        }
    }
}

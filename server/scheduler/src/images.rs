//! The images of prompts: which positions of a prompt read the output of the image encoder, and how images are part of
//! the identity of blocks.
//!
//! Image positions have the token of the model's placeholder, so their tokens do not identify the image. The digest of
//! the image does: it is part of the hash, of the key and of the content of each block that has image positions.

use std::collections::BTreeMap;

use crate::block::TokenId;

/// Identifies the encoder output of an image: equal digests stand for equal outputs. The server computes the digest as
/// a cryptographic hash of the decoded pixels, the level of detail, the configuration of the image processor and, if
/// the prompt has one, the cache salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImageDigest(pub [u8; 32]);

/// Consecutive positions of a prompt that read consecutive rows of an image's encoder output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSpan {
    /// Identifies the image whose rows are read.
    pub digest: ImageDigest,
    /// The position of the first token.
    pub start: u32,
    /// Number of tokens, at least one.
    pub num_tokens: u32,
    /// The row of the encoder output that the first token reads.
    pub first_row: u32,
}

impl ImageSpan {
    /// The position after the last token.
    pub fn end(&self) -> u32 {
        self.start + self.num_tokens
    }
}

/// Defines which tokens of a span the tokens of the same span attend to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpanAttention {
    /// Tokens attend to the tokens before them, as in text.
    #[default]
    Causal,
    /// Tokens attend to all tokens of the span. A step therefore computes all tokens of a span or none, even if they
    /// exceed the token budget of the step.
    Bidirectional,
}

/// The images of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptImages {
    /// The positions of the images, in ascending order and without overlaps. An image may have several spans.
    pub spans: Vec<ImageSpan>,
    /// The attention within a span.
    pub attention: SpanAttention,
}

impl PromptImages {
    /// Number of tokens that the images occupy.
    pub fn num_tokens(&self) -> u64 {
        self.spans.iter().map(|span| u64::from(span.num_tokens)).sum()
    }

    /// Whether the spans are ascending, not empty, without overlaps and within a prompt of `prompt_tokens` tokens. The
    /// last token of the prompt must not be in a bidirectional span, because it may be computed alone.
    pub fn is_valid(&self, prompt_tokens: u32) -> bool {
        let end_max = match self.attention {
            SpanAttention::Causal => prompt_tokens,
            SpanAttention::Bidirectional => prompt_tokens.saturating_sub(1),
        };
        let mut end = 0;
        self.spans.iter().all(|span| {
            let follows = span.start >= end && span.num_tokens > 0;
            let span_end = span.start.checked_add(span.num_tokens).filter(|&span_end| span_end <= end_max);
            end = span_end.unwrap_or(u32::MAX);
            follows && span_end.is_some() && span.first_row.checked_add(span.num_tokens).is_some()
        })
    }

    /// The distinct images whose encoder output is read by tokens at or after the position `computed_tokens`, each with
    /// the number of its rows up to the last one that the prompt reads.
    pub(crate) fn needed_after(&self, computed_tokens: u32) -> Vec<NeededImage> {
        let mut needed: Vec<NeededImage> = Vec::new();
        for span in self.spans.iter().filter(|span| span.end() > computed_tokens) {
            if !needed.iter().any(|image| image.digest == span.digest) {
                let of_image = self.spans.iter().filter(|other| other.digest == span.digest);
                let rows = of_image.map(|span| span.first_row + span.num_tokens).max().unwrap_or(0);
                needed.push(NeededImage { digest: span.digest, rows });
            }
        }
        needed
    }

    /// The position after the last image.
    pub(crate) fn end(&self) -> u32 {
        self.spans.last().map_or(0, ImageSpan::end)
    }

    /// The bidirectional span that begins before the position `end` and ends after it.
    pub(crate) fn indivisible_at(&self, end: u32) -> Option<&ImageSpan> {
        if self.attention == SpanAttention::Causal {
            return None;
        }
        let first = self.spans.partition_point(|span| span.end() <= end);
        self.spans.get(first).filter(|span| span.start < end)
    }

    /// The words that identify the images of each block that has image positions: for each part of a span, its offset
    /// and length in the block, its first row, and the digest.
    pub(crate) fn block_words(&self, block_tokens: u32) -> BTreeMap<u32, Box<[u32]>> {
        let mut words: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for span in &self.spans {
            for block in span.start / block_tokens..span.end().div_ceil(block_tokens) {
                let start = span.start.max(block * block_tokens);
                let end = span.end().min((block + 1) * block_tokens);
                let words = words.entry(block).or_default();
                words.extend([start % block_tokens, end - start, span.first_row + start - span.start]);
                words.extend(span.digest.0.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)));
            }
        }
        words.into_iter().map(|(block, words)| (block, words.into_boxed_slice())).collect()
    }
}

/// An image that a sequence reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NeededImage {
    pub(crate) digest: ImageDigest,
    /// Number of rows of the encoder output.
    pub(crate) rows: u32,
}

/// Calls `hash` with the words that identify a block: its tokens, followed by the words of its images.
pub(crate) fn with_block_words<R>(tokens: &[TokenId], images: &[u32], hash: impl FnOnce(&[u32]) -> R) -> R {
    if images.is_empty() { hash(tokens) } else { hash(&[tokens, images].concat()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(image: u8, start: u32, num_tokens: u32, first_row: u32) -> ImageSpan {
        ImageSpan { digest: ImageDigest([image; 32]), start, num_tokens, first_row }
    }

    fn images(spans: &[ImageSpan], attention: SpanAttention) -> PromptImages {
        PromptImages { spans: spans.to_vec(), attention }
    }

    #[test]
    fn spans_must_be_ascending_and_within_the_prompt() {
        let causal = |spans: &[ImageSpan]| images(spans, SpanAttention::Causal).is_valid(10);
        assert!(causal(&[]) && causal(&[span(1, 0, 4, 0), span(2, 4, 6, 0)]));
        assert!(!causal(&[span(1, 0, 0, 0)]), "an empty span");
        assert!(!causal(&[span(1, 3, 4, 0), span(2, 6, 1, 0)]), "overlapping spans");
        assert!(!causal(&[span(1, 5, 2, 0), span(1, 2, 2, 0)]), "descending spans");
        assert!(!causal(&[span(1, 9, 2, 0)]), "a span beyond the prompt");
        assert!(!causal(&[span(1, u32::MAX, 2, 0)]) && !causal(&[span(1, 0, 2, u32::MAX)]), "an overflow");
        let bidirectional = |end: u32| images(&[span(1, 2, end - 2, 0)], SpanAttention::Bidirectional);
        assert!(bidirectional(9).is_valid(10) && !bidirectional(10).is_valid(10));
    }

    #[test]
    fn an_image_is_needed_until_its_last_span_is_computed() {
        let images = images(&[span(1, 2, 4, 0), span(2, 7, 2, 0), span(1, 10, 3, 4)], SpanAttention::Causal);
        let needed = |computed| -> Vec<_> {
            images.needed_after(computed).iter().map(|image| (image.digest.0[0], image.rows)).collect()
        };
        assert_eq!(needed(0), [(1, 7), (2, 2)]);
        assert_eq!(needed(6), [(2, 2), (1, 7)]);
        assert_eq!(needed(9), [(1, 7)]);
        assert_eq!(needed(13), []);
        assert_eq!(images.end(), 13);
    }

    #[test]
    fn only_bidirectional_spans_are_indivisible() {
        let spans = [span(1, 2, 4, 0), span(2, 6, 2, 0)];
        let causal = images(&spans, SpanAttention::Causal);
        let bidirectional = images(&spans, SpanAttention::Bidirectional);
        for end in 0..10 {
            assert_eq!(causal.indivisible_at(end), None);
            let expected = match end {
                3..=5 => Some(&spans[0]),
                7 => Some(&spans[1]),
                _ => None,
            };
            assert_eq!(bidirectional.indivisible_at(end), expected, "at {end}");
        }
    }

    #[test]
    fn the_words_of_a_block_have_the_place_the_row_and_the_digest_of_each_image() {
        let words = images(&[span(1, 3, 6, 10), span(2, 10, 1, 0)], SpanAttention::Causal).block_words(4);
        let digest = |image: u8| [u32::from_le_bytes([image; 4]); 8];
        let part = |place: [u32; 3], image| [&place[..], &digest(image)].concat();
        let expected = [
            (0, part([3, 1, 10], 1)),
            (1, part([0, 4, 11], 1)),
            (2, [part([0, 1, 15], 1), part([2, 1, 0], 2)].concat()),
        ];
        let words: Vec<_> = words.into_iter().map(|(block, words)| (block, words.into_vec())).collect();
        assert_eq!(words, expected);
    }
}

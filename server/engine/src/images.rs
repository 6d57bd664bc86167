//! Images in requests: the inputs and the outputs of the encoder, and the rows that the runner reads in a step.
//!
//! The engine identifies images by their digests. Only the encoder reads the content of images, and only the runner
//! reads the output of the encoder.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use server_scheduler::{ImageDigest, ImageSpan, PromptImages, ScheduledSequence};

/// A preprocessed image: an input of the encoder.
#[derive(Clone, Debug)]
pub struct ImageInput {
    /// The digest of the content, which identifies the output of the encoder.
    pub digest: ImageDigest,
    /// Number of rows of the output, at least one.
    pub rows: u32,
    /// The preprocessed pixels, in the type that the model's encoder expects.
    pub content: Arc<dyn Any + Send + Sync>,
}

/// The output of the encoder for an image: rows that the model reads instead of the embeddings of image tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageFeatures {
    values: Box<[f32]>,
    width: usize,
}

impl ImageFeatures {
    /// Splits `values` into rows of `width` values.
    ///
    /// # Panics
    /// Panics if `width` is zero, or if `values` does not consist of whole rows.
    pub fn new(values: Vec<f32>, width: usize) -> Self {
        assert!(width > 0 && values.len().is_multiple_of(width), "invariant: features are whole rows");
        Self { values: values.into_boxed_slice(), width }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> u32 {
        (self.values.len() / self.width) as u32
    }

    /// The values of consecutive rows.
    ///
    /// # Panics
    /// Panics if `rows` is not a range of existing rows.
    pub fn values(&self, rows: Range<u32>) -> &[f32] {
        &self.values[rows.start as usize * self.width..rows.end as usize * self.width]
    }
}

/// The images of a request.
#[derive(Clone, Debug)]
pub struct RequestImages {
    /// The distinct images of the request.
    pub inputs: Vec<Arc<ImageInput>>,
    /// The spans of the prompt that the images occupy, and the attention within these spans.
    pub prompt: PromptImages,
    /// The positions of the tokens, if they differ from the indices of the tokens.
    pub positions: Option<Arc<PromptPositions>>,
}

/// The M-RoPE positions of the tokens of a sequence. Each token has a temporal, a vertical and a horizontal position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptPositions {
    /// The positions of each token of the prompt.
    pub prompt: Box<[[i32; 3]]>,
    /// The difference between the position and the index of a generated token.
    pub delta: i32,
}

impl PromptPositions {
    /// The positions of the token with this index in its sequence.
    pub fn at(&self, index: u32) -> [i32; 3] {
        let generated = || [index.cast_signed() + self.delta; 3];
        self.prompt.get(index as usize).copied().unwrap_or_else(generated)
    }
}

impl RequestImages {
    /// Whether the images are valid for a prompt of `prompt_tokens` tokens: the images are distinct and have at least
    /// one row each, the spans are valid and refer only to existing rows, and `positions`, if set, covers the whole
    /// prompt.
    pub(crate) fn are_valid(&self, prompt_tokens: usize) -> bool {
        let Self { inputs, prompt, positions } = self;
        let has_rows = |image: &Arc<ImageInput>| image.rows > 0;
        let is_unique = |(index, image): (usize, &Arc<ImageInput>)| {
            inputs[..index].iter().all(|other| other.digest != image.digest)
        };
        let reads_rows = |span: &ImageSpan| {
            let image = inputs.iter().find(|image| image.digest == span.digest);
            image.is_some_and(|image| span.first_row + span.num_tokens <= image.rows)
        };
        u32::try_from(prompt_tokens).is_ok_and(|prompt_tokens| prompt.is_valid(prompt_tokens))
            && prompt.spans.iter().all(reads_rows)
            && inputs.iter().all(has_rows)
            && inputs.iter().enumerate().all(is_unique)
            && positions.as_ref().is_none_or(|positions| positions.prompt.len() == prompt_tokens)
    }

    /// The image with this digest.
    pub(crate) fn input(&self, digest: ImageDigest) -> Option<&Arc<ImageInput>> {
        self.inputs.iter().find(|image| image.digest == digest)
    }
}

/// The inputs of a step that depend on images. For a token that is not in `rows`, the runner reads the token's
/// embedding. In a sequence that is not in `positions`, the position of a token is its index in the sequence.
#[derive(Clone, Debug, Default)]
pub struct StepImages {
    /// The tokens for which the runner reads rows of encoder outputs, in ascending order.
    pub rows: Vec<ImageRows>,
    /// The sequences whose token positions differ from the token indices, in ascending order.
    pub positions: Vec<SequencePositions>,
}

/// Consecutive tokens of a step for which the runner reads consecutive rows of an image.
#[derive(Clone, Debug)]
pub struct ImageRows {
    /// The range of the tokens in [`Batch::tokens`](server_scheduler::Batch::tokens).
    pub tokens: Range<u32>,
    /// The output of the encoder.
    pub features: Arc<ImageFeatures>,
    /// The index of the first token's row in `features`.
    pub first_row: u32,
}

/// The positions of the tokens of a sequence in a step.
#[derive(Clone, Debug)]
pub struct SequencePositions {
    /// The index of the sequence in [`Batch::sequences`](server_scheduler::Batch::sequences).
    pub sequence: usize,
    /// The positions of the sequence's tokens.
    pub positions: Arc<PromptPositions>,
}

impl StepImages {
    /// Whether no input of the step depends on images.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.positions.is_empty()
    }

    /// Removes all content without releasing the memory.
    pub(crate) fn clear(&mut self) {
        self.rows.clear();
        self.positions.clear();
    }

    /// Adds the images of the sequence with this index in the step. `features` returns the output of the encoder for an
    /// image.
    pub(crate) fn add(
        &mut self,
        index: usize,
        sequence: &ScheduledSequence,
        images: &RequestImages,
        features: impl Fn(ImageDigest) -> Arc<ImageFeatures>,
    ) {
        let begin = sequence.computed_tokens;
        let end = begin + sequence.tokens.len() as u32;
        let spans = &images.prompt.spans;
        let first = spans.partition_point(|span| span.end() <= begin);
        for span in spans[first..].iter().take_while(|span| span.start < end) {
            let (from, to) = (span.start.max(begin), span.end().min(end));
            let offset = sequence.tokens.start;
            self.rows.push(ImageRows {
                tokens: offset + from - begin..offset + to - begin,
                features: features(span.digest),
                first_row: span.first_row + from - span.start,
            });
        }
        if let Some(positions) = &images.positions {
            self.positions.push(SequencePositions { sequence: index, positions: Arc::clone(positions) });
        }
    }
}

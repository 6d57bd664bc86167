//! Simulated images: the features depend only on the digest of the image and the index of the row. The model reads a
//! hash of a row, or of a token and its positions, like a token of a much larger vocabulary.

use std::sync::{Arc, Mutex, PoisonError};

use server_scheduler::{ImageDigest, TokenId};

use crate::encoder::ImageEncoder;
use crate::hash::mix;
use crate::images::{ImageFeatures, ImageInput, PromptPositions, RequestImages, StepImages};
use crate::runner::RunError;

/// Number of values in a row of features.
const WIDTH: usize = 2;

/// An [`ImageEncoder`] that computes features without a model.
#[derive(Clone, Debug)]
pub struct SimEncoder {
    runs: Arc<Mutex<Vec<Vec<ImageDigest>>>>,
    /// The images that cannot be encoded.
    faults: Vec<ImageDigest>,
    /// The images that can be encoded alone, but make a run of several images fail.
    batch_faults: Vec<ImageDigest>,
    /// Maximum number of images in a run.
    batch_max: usize,
}

impl Default for SimEncoder {
    fn default() -> Self {
        Self { runs: Arc::default(), faults: Vec::new(), batch_faults: Vec::new(), batch_max: 1 }
    }
}

impl SimEncoder {
    /// Sets the images that cannot be encoded.
    #[must_use]
    pub fn with_faults(self, faults: Vec<ImageDigest>) -> Self {
        Self { faults, ..self }
    }

    /// Sets the images that make a run of several images fail.
    #[must_use]
    pub fn with_batch_faults(self, batch_faults: Vec<ImageDigest>) -> Self {
        Self { batch_faults, ..self }
    }

    /// Sets the maximum number of images in a run. Only images with equal numbers of rows share a run.
    #[must_use]
    pub fn with_batches(self, batch_max: usize) -> Self {
        Self { batch_max, ..self }
    }

    /// The images that this encoder and its clones have encoded or tried to encode, in order.
    pub fn encoded(&self) -> Vec<ImageDigest> {
        self.runs().concat()
    }

    /// The images of each run of this encoder and its clones, in order.
    pub fn runs(&self) -> Vec<Vec<ImageDigest>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Encodes these images in one run.
    fn run(&self, images: &[&ImageInput]) -> Result<Vec<ImageFeatures>, RunError> {
        let digests: Vec<_> = images.iter().map(|image| image.digest).collect();
        let is_batch = images.len() > 1;
        let fails = |digest| self.faults.contains(digest) || is_batch && self.batch_faults.contains(digest);
        let has_failed = digests.iter().any(fails);
        self.runs.lock().unwrap_or_else(PoisonError::into_inner).push(digests);
        if has_failed {
            return Err(RunError { message: "a simulated fault".to_owned(), fatal: false });
        }
        let output = |image: &&ImageInput| {
            let values = (0..image.rows).flat_map(|row| features(image.digest, row));
            ImageFeatures::new(values.collect(), WIDTH)
        };
        Ok(images.iter().map(output).collect())
    }
}

impl ImageEncoder for SimEncoder {
    fn width(&self) -> usize {
        WIDTH
    }

    fn encode(&mut self, image: &ImageInput) -> Result<ImageFeatures, RunError> {
        let mut outputs = self.run(&[image])?;
        Ok(outputs.remove(0))
    }

    fn can_join(&self, batch: &[Arc<ImageInput>], image: &ImageInput) -> bool {
        batch.len() < self.batch_max && batch.iter().all(|other| other.rows == image.rows)
    }

    fn encode_batch(&mut self, images: &[Arc<ImageInput>]) -> Result<Vec<ImageFeatures>, RunError> {
        self.run(&images.iter().map(|image| &**image).collect::<Vec<_>>())
    }
}

/// A row of the features of an image. The values are integers below 2^24, which `f32` represents exactly.
fn features(digest: ImageDigest, row: u32) -> [f32; WIDTH] {
    let words = digest.0.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
    let hash = words.fold(u64::from(row), |hash, word| mix(hash ^ word));
    [(hash >> 40) as f32, (hash & 0xff_ffff) as f32]
}

/// The input that the model reads for a row of features.
fn input_of_features(features: &[f32]) -> TokenId {
    features.iter().fold(0, |hash, value| mix(hash ^ u64::from(value.to_bits()))) as TokenId
}

/// The input that the model reads for a token: `input`, combined with the positions of the token if `positions` is set.
fn input_at(positions: Option<&PromptPositions>, index: u32, input: TokenId) -> TokenId {
    let Some(positions) = positions else { return input };
    let hash = positions
        .at(index)
        .iter()
        .fold(u64::from(input), |hash, position| mix(hash ^ u64::from(position.cast_unsigned())));
    hash as TokenId
}

/// Reads the inputs of one sequence in a step.
pub(super) struct StepReader<'a> {
    images: &'a StepImages,
    positions: Option<&'a PromptPositions>,
}

impl<'a> StepReader<'a> {
    pub(super) fn new(images: &'a StepImages, sequence: usize) -> Self {
        let positions = images.positions.iter().find(|positions| positions.sequence == sequence);
        Self { images, positions: positions.map(|positions| &*positions.positions) }
    }

    /// The input that the model reads for a token, given its index in the batch and its index in the sequence.
    pub(super) fn read(&self, offset: u32, index: u32, token: TokenId) -> TokenId {
        let rows = self.images.rows.iter().find(|rows| rows.tokens.contains(&offset));
        let input = rows.map_or(token, |rows| {
            let row = rows.first_row + offset - rows.tokens.start;
            input_of_features(rows.features.values(row..row + 1))
        });
        input_at(self.positions, index, input)
    }
}

/// The input that the model reads for the token with this index in a prompt with images.
pub(super) fn prompt_input(images: &RequestImages, index: u32, token: TokenId) -> TokenId {
    let span = images.prompt.spans.iter().find(|span| (span.start..span.end()).contains(&index));
    let input = span
        .map_or(token, |span| input_of_features(&features(span.digest, span.first_row + index - span.start)));
    input_at(images.positions.as_deref(), index, input)
}

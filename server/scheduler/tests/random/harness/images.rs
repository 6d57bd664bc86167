//! Prompts with images, and an encoder that encodes them in random order and sometimes fails.

use std::collections::BTreeSet;

use super::{Harness, SequenceRecord};
use crate::random::Random;
use server_scheduler::{
    Batch, ImageDigest, ImageLimits, ImageSpan, Load, PromptImages, ScheduledSequence, SpanAttention, TokenId,
};

/// The number of different images.
const IMAGES: u32 = 6;

/// The number of rows of an image.
const ROWS: u32 = 12;

/// The limits of the tests, with which few outputs are stored and the encoder receives few images at a time.
pub(super) const LIMITS: ImageLimits = ImageLimits { rows_max: ROWS + 4, max_num_encoder_input_tokens: 5 };

/// The images that the encoder has yet to encode, and its outputs.
#[derive(Default)]
pub(super) struct Encoder {
    requested: Vec<ImageDigest>,
    outputs: BTreeSet<ImageDigest>,
}

impl Encoder {
    /// Whether some requested images are not encoded yet.
    pub(super) fn is_busy(&self) -> bool {
        !self.requested.is_empty()
    }
}

/// Draws the images of a prompt.
pub(super) fn draw(random: &mut Random, prompt_tokens: u32) -> PromptImages {
    let attention = if random.once_in(3) { SpanAttention::Bidirectional } else { SpanAttention::Causal };
    let mut images = PromptImages { spans: Vec::new(), attention };
    let mut start = 0;
    while prompt_tokens > start + 2 && random.below(3) > 0 {
        start += random.below(prompt_tokens - start - 1);
        let num_tokens = 1 + random.below((prompt_tokens - start - 1).min(ROWS));
        let first_row = random.below(ROWS - num_tokens + 1);
        let digest = ImageDigest([random.below(IMAGES) as u8; 32]);
        images.spans.push(ImageSpan { digest, start, num_tokens, first_row });
        start += num_tokens;
    }
    images
}

/// The tokens of a sequence, in which a unique number replaces the placeholder at each image position.
pub(super) fn identities(record: &SequenceRecord, tokens: &[TokenId]) -> Vec<TokenId> {
    let mut identities = tokens.to_vec();
    for span in &record.images.spans {
        for offset in 0..span.num_tokens {
            let image = u32::from(span.digest.0[0]) + 1;
            identities[(span.start + offset) as usize] = image * 1000 + span.first_row + offset;
        }
    }
    identities
}

impl Harness {
    /// Encodes some of the requested images. If an image cannot be encoded, aborts the requests that need it.
    pub(super) fn encode_images(&mut self) {
        for digest in std::mem::take(&mut self.encoder.requested) {
            match self.random.below(20) {
                0 => {
                    for id in self.scheduler.sequences_with_image(digest) {
                        let request = self.sequences[&id].request;
                        let of_request = self
                            .sequences
                            .iter()
                            .filter(|(_, record)| record.request == request && record.alive);
                        for id in of_request.map(|(id, _)| *id).collect::<Vec<_>>() {
                            self.scheduler.abort(id);
                            self.totals.aborted += 1;
                            self.end(id);
                        }
                    }
                    self.scheduler.cancel_image(digest);
                    self.totals.failed_images += 1;
                }
                1..8 => self.encoder.requested.push(digest),
                _ => {
                    self.encoder.outputs.insert(digest);
                    self.scheduler.provide_image(digest);
                    self.totals.encoded_images += 1;
                }
            }
            self.check();
        }
    }

    /// Accepts the image requests of the scheduler, and removes the outputs that the scheduler has evicted.
    pub(super) fn request_images(&mut self) {
        for evicted in self.scheduler.drain_evicted_images() {
            assert!(self.encoder.outputs.remove(&evicted), "only an existing output is evicted");
        }
        for request in self.scheduler.drain_image_requests() {
            let is_new = !self.encoder.requested.contains(&request.digest);
            assert!(is_new && !self.encoder.outputs.contains(&request.digest), "an output is requested once");
            assert!(
                self.sequences[&request.sequence].alive,
                "an image is requested for a sequence that has not ended"
            );
            self.encoder.requested.push(request.digest);
        }
    }

    /// Checks that the load includes the requested images, and each image at most once.
    pub(super) fn check_image_load(&self, load: &Load) {
        let unencoded = load.unencoded_image_tokens;
        assert!(unencoded >= self.encoder.requested.len() as u64, "the load includes requested images");
        assert!(unencoded + load.encoded_image_tokens <= u64::from(IMAGES * ROWS), "an image counts once");
    }

    /// Checks that the outputs that a scheduled sequence reads exist, and that no bidirectional span is divided.
    pub(super) fn check_images(&self, record: &SequenceRecord, sequence: &ScheduledSequence) {
        let (begin, end) =
            (sequence.computed_tokens, sequence.computed_tokens + sequence.tokens.len() as u32);
        for span in &record.images.spans {
            if span.start < end && begin < span.end() {
                assert!(self.encoder.outputs.contains(&span.digest), "an image is encoded before it is read");
                let is_whole = begin <= span.start && span.end() <= end;
                assert!(
                    is_whole || record.images.attention == SpanAttention::Causal,
                    "a bidirectional span is computed as a whole"
                );
            }
        }
    }

    /// The largest number of tokens by which a bidirectional span may exceed the budget of a step.
    pub(super) fn excess_max(&self, batch: &Batch) -> usize {
        let records = batch.sequences.iter().map(|sequence| &self.sequences[&sequence.id]);
        let is_indivisible =
            |record: &&SequenceRecord| record.images.attention == SpanAttention::Bidirectional;
        let spans = records.filter(is_indivisible).flat_map(|record| &record.images.spans);
        spans.map(|span| span.num_tokens as usize).max().unwrap_or(0)
    }
}

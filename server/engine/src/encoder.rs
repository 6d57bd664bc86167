//! Encodes images on a thread of its own, beside the steps of the model.
//!
//! The scheduler decides which images are encoded, in which order, and which outputs are evicted. This module stores
//! the outputs and passes the images to the thread.
//!
//! ```text
//! Scheduler ─ ImageRequest ─► queue ─► encoder thread ─► results ─► outputs ─► StepImages
//! ```

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use server_scheduler::{
    Batch, ImageDigest, ImageLimits, MAX_NUM_ENCODER_INPUT_TOKENS, Scheduler, SequenceId,
};

use crate::clock::Clock;
use crate::images::{ImageFeatures, ImageInput, StepImages};
use crate::requests::Requests;
use crate::runner::RunError;
use crate::sleep::SleepLevel;
use crate::waker::Waker;

/// Encodes images for a vision-language model. Only the engine's encoder thread calls the methods, which block.
pub trait ImageEncoder: Send {
    /// Number of values in a row of the output.
    fn width(&self) -> usize;

    /// Encodes an image. An encoder that is asleep wakes first.
    ///
    /// # Errors
    /// [`RunError`] if the image could not be encoded. The encoder can encode other images.
    fn encode(&mut self, image: &ImageInput) -> Result<ImageFeatures, RunError>;

    /// Releases the memory that `level` names, until the next image is encoded. The default implementation releases no
    /// memory.
    fn sleep(&mut self, _level: SleepLevel) {}
}

/// The image encoder of an engine.
pub struct EncoderConfig {
    /// Encodes the images, on a thread of its own.
    pub encoder: Box<dyn ImageEncoder>,
    /// Bytes of encoder outputs that are stored, those of images that are being encoded included.
    ///
    /// Beyond it: outputs that no request needs are evicted, and further images wait to be encoded. The images of a
    /// single request may have more bytes; then no other images are stored.
    pub cache_bytes: u64,
}

/// The encoder as seen from the engine's thread.
pub(crate) struct Encoder {
    /// `None` while `self` is being dropped.
    jobs: Option<mpsc::Sender<Job>>,
    results: mpsc::Receiver<EncodeResult>,
    outputs: BTreeMap<ImageDigest, Arc<ImageFeatures>>,
    thread: Option<JoinHandle<()>>,
    rows_max: u32,
}

enum Job {
    /// If the reference is no longer valid, the request has ended and the image is not encoded.
    Encode {
        digest: ImageDigest,
        image: Weak<ImageInput>,
    },
    Sleep(SleepLevel),
}

struct EncodeResult {
    digest: ImageDigest,
    outcome: EncodeOutcome,
    time: Duration,
}

enum EncodeOutcome {
    Encoded(ImageFeatures),
    /// The request that brought the image has ended.
    NotNeeded,
    Failed(String),
}

/// The results that a call of [`Encoder::collect`] has applied.
#[derive(Default)]
pub(crate) struct CollectedImages {
    /// Number of images that were encoded.
    pub(crate) encoded: u32,
    /// Number of tokens of these images.
    pub(crate) tokens: u32,
    /// The time that the encoder took for them.
    pub(crate) time: Duration,
    /// Whether there was any result.
    pub(crate) is_any: bool,
    /// The sequences whose images could not be encoded, with the reason.
    pub(crate) failed: Vec<FailedImage>,
}

/// A sequence whose image could not be encoded.
pub(crate) struct FailedImage {
    pub(crate) sequence: SequenceId,
    pub(crate) message: String,
}

impl Encoder {
    /// Starts the thread, which wakes the engine with `waker`.
    ///
    /// # Errors
    /// The error of the operating system if the thread could not be started.
    pub(crate) fn start(config: EncoderConfig, clock: Clock, waker: Waker) -> std::io::Result<Self> {
        let EncoderConfig { mut encoder, cache_bytes } = config;
        let row_bytes = (encoder.width() * size_of::<f32>()).max(1) as u64;
        // The scheduler limits the number of jobs by the tokens of their images.
        let (jobs, receiver) = mpsc::channel();
        let (sender, results) = mpsc::channel();
        let run = move || {
            for job in receiver {
                match job {
                    Job::Sleep(level) => encoder.sleep(level),
                    Job::Encode { digest, image } => {
                        let began = clock.now();
                        let outcome = match image.upgrade() {
                            Some(image) => encode(&mut *encoder, &image),
                            None => EncodeOutcome::NotNeeded,
                        };
                        let time = clock.now() - began;
                        if sender.send(EncodeResult { digest, outcome, time }).is_err() {
                            return;
                        }
                        waker.wake();
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("encoder".to_owned()).spawn(run)?;
        Ok(Self {
            jobs: Some(jobs),
            results,
            outputs: BTreeMap::new(),
            thread: Some(thread),
            rows_max: u32::try_from(cache_bytes / row_bytes).unwrap_or(u32::MAX),
        })
    }

    /// The limits of the outputs that are stored and of the images that the thread has.
    pub(crate) fn limits(&self) -> ImageLimits {
        ImageLimits { rows_max: self.rows_max, max_num_encoder_input_tokens: MAX_NUM_ENCODER_INPUT_TOKENS }
    }

    /// Passes the images that the scheduler has requested to the thread, and drops evicted outputs.
    pub(crate) fn start_requested(&mut self, scheduler: &mut Scheduler, requests: &Requests) {
        for evicted in scheduler.drain_evicted_images() {
            self.outputs.remove(&evicted);
        }
        for request in scheduler.drain_image_requests() {
            let active = requests.active.get(&request.sequence.request);
            let images = active.and_then(|active| active.images.as_deref());
            let image = images.and_then(|images| images.input(request.digest));
            let image = image.expect("invariant: a waiting sequence belongs to a request with its images");
            let job = Job::Encode { digest: request.digest, image: Arc::downgrade(image) };
            self.send(job);
        }
    }

    /// Applies the results of the thread.
    pub(crate) fn collect(&mut self, scheduler: &mut Scheduler) -> CollectedImages {
        let mut collected = CollectedImages::default();
        while let Ok(EncodeResult { digest, outcome, time }) = self.results.try_recv() {
            collected.is_any = true;
            match outcome {
                EncodeOutcome::Encoded(features) => {
                    collected.encoded += 1;
                    collected.tokens += features.rows();
                    collected.time += time;
                    self.outputs.insert(digest, Arc::new(features));
                    scheduler.provide_image(digest);
                }
                // Another request with the same image requests it again.
                EncodeOutcome::NotNeeded => scheduler.cancel_image(digest),
                EncodeOutcome::Failed(message) => {
                    let sequences = scheduler.sequences_with_image(digest);
                    let failed = |sequence| FailedImage { sequence, message: message.clone() };
                    collected.failed.extend(sequences.into_iter().map(failed));
                    scheduler.cancel_image(digest);
                }
            }
        }
        collected
    }

    /// The output of an image that a scheduled sequence holds.
    pub(crate) fn output(&self, digest: ImageDigest) -> Arc<ImageFeatures> {
        let output = self.outputs.get(&digest);
        Arc::clone(output.expect("invariant: the images of scheduled tokens are encoded"))
    }

    pub(crate) fn sleep(&mut self, level: SleepLevel) {
        self.send(Job::Sleep(level));
    }

    fn send(&self, job: Job) {
        // The thread ends only when the sender is dropped, because it catches panics.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        // The thread ends after its current image, because it can no longer send results.
        drop(self.jobs.take());
        drop(std::mem::replace(&mut self.results, mpsc::channel().1));
        if let Some(thread) = self.thread.take() {
            // A panic can only come from dropping the encoder.
            let _ = thread.join();
        }
    }
}

/// Encodes an image, and checks the number of rows.
fn encode(encoder: &mut dyn ImageEncoder, image: &ImageInput) -> EncodeOutcome {
    // Unwind safety: an encoder that panics is used for other images, as after an error.
    let result = catch_unwind(AssertUnwindSafe(|| encoder.encode(image)));
    match result {
        Ok(Ok(features)) if features.rows() == image.rows => EncodeOutcome::Encoded(features),
        Ok(Ok(features)) => EncodeOutcome::Failed(format!(
            "the encoder returned {} rows instead of {}",
            features.rows(),
            image.rows
        )),
        Ok(Err(RunError { message, .. })) => EncodeOutcome::Failed(message),
        Err(_) => EncodeOutcome::Failed("the encoder panicked".to_owned()),
    }
}

/// Adds the images of the sequences of a batch to `step`.
pub(crate) fn fill_step(
    step: &mut StepImages,
    batch: &Batch,
    requests: &Requests,
    encoder: Option<&Encoder>,
) {
    step.clear();
    let Some(encoder) = encoder else { return };
    for (index, sequence) in batch.sequences.iter().enumerate() {
        let active = requests.active.get(&sequence.id.request);
        if let Some(images) = active.and_then(|active| active.images.as_deref()) {
            step.add(index, sequence, images, |digest| encoder.output(digest));
        }
    }
}

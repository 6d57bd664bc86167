//! Encodes images on a separate thread, concurrently with the steps of the model.
//!
//! The scheduler decides which images are encoded, in which order, and which outputs are evicted. This module stores
//! the outputs and passes the images to the thread. The thread encodes consecutive images in one run if the encoder
//! allows it.
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
use crate::command::SleepReply;
use crate::images::{ImageFeatures, ImageInput, StepImages};
use crate::requests::Requests;
use crate::runner::RunError;
use crate::sleep::SleepLevel;
use crate::waker::Waker;

/// Encodes images for a vision-language model. The methods may block. Only the engine's encoder thread calls them,
/// except for [`ImageEncoder::width`], which is called before the thread starts.
pub trait ImageEncoder: Send {
    /// Number of values in a row of the output.
    fn width(&self) -> usize;

    /// Encodes an image. An encoder that is asleep wakes first.
    ///
    /// # Errors
    /// [`RunError`] if the image could not be encoded. The encoder must still be able to encode other images.
    fn encode(&mut self, image: &ImageInput) -> Result<ImageFeatures, RunError>;

    /// Whether `image` can be encoded in one run with the images of `batch`, which is not empty. Each output must equal
    /// the output of the same image in a run of its own, except for rounding errors, and the run must remain short. By
    /// default, each image is encoded alone.
    fn can_join(&self, _batch: &[Arc<ImageInput>], _image: &ImageInput) -> bool {
        false
    }

    /// Encodes images in one run. [`Self::can_join`] has accepted each of them except the first. Returns one output per
    /// image, in the same order. The default implementation encodes one image after another.
    ///
    /// # Errors
    /// [`RunError`] if an image could not be encoded. The engine then encodes each image alone.
    fn encode_batch(&mut self, images: &[Arc<ImageInput>]) -> Result<Vec<ImageFeatures>, RunError> {
        images.iter().map(|image| self.encode(image)).collect()
    }

    /// Releases the memory that `level` specifies, until the next image is encoded. The default implementation releases
    /// no memory.
    fn sleep(&mut self, _level: SleepLevel) {}
}

/// The image encoder of an engine.
pub struct EncoderConfig {
    /// Encodes the images, on a separate thread.
    pub encoder: Box<dyn ImageEncoder>,
    /// Maximum size of the stored encoder outputs in bytes, including the outputs of images that are being encoded.
    ///
    /// At this size, outputs that no request needs are evicted, and further images wait to be encoded. The images of a
    /// single request may exceed the size; in that case, no other images are stored.
    pub cache_bytes: u64,
}

/// The encoder as seen from the engine's thread.
pub(crate) struct Encoder {
    /// `None` while `self` is being dropped.
    commands: Option<mpsc::Sender<EncoderCommand>>,
    results: mpsc::Receiver<EncoderRun>,
    outputs: BTreeMap<ImageDigest, Arc<ImageFeatures>>,
    thread: Option<JoinHandle<()>>,
    /// Number of images that were sent to the thread and whose results have not been collected yet.
    num_images: usize,
    /// Bytes of a row of an output.
    row_bytes: u64,
    rows_max: u32,
}

enum EncoderCommand {
    /// If the reference is no longer valid, the request has ended and the image is not encoded.
    Encode { digest: ImageDigest, image: Weak<ImageInput> },
    /// The thread replies when it has released the memory.
    Sleep { level: SleepLevel, reply: SleepReply },
}

/// The outcomes of the images in a run of the encoder, or of an image that was not encoded because its request has
/// ended.
struct EncoderRun {
    outcomes: Vec<(ImageDigest, EncodeOutcome)>,
    time: Duration,
}

enum EncodeOutcome {
    Encoded(ImageFeatures),
    /// The request to which the image belongs has ended.
    NotNeeded,
    Failed(String),
}

/// The results that a call to [`Encoder::collect`] has applied.
#[derive(Default)]
pub(crate) struct CollectedImages {
    /// Number of runs of the encoder that encoded images.
    pub(crate) runs: u32,
    /// Number of images that were encoded.
    pub(crate) encoded: u32,
    /// Number of tokens of these images.
    pub(crate) tokens: u32,
    /// The total time of the runs that encoded images.
    pub(crate) time: Duration,
    /// Whether the thread has returned any results, including those of images that were not encoded.
    pub(crate) has_results: bool,
    /// The sequences whose images could not be encoded, with the reason.
    pub(crate) failed: Vec<FailedImage>,
}

/// A sequence whose image could not be encoded.
pub(crate) struct FailedImage {
    pub(crate) sequence: SequenceId,
    pub(crate) message: String,
}

impl Encoder {
    /// Starts the thread, which wakes the engine with `waker` whenever it has results.
    ///
    /// # Errors
    /// The error of the operating system if the thread could not be started.
    pub(crate) fn start(config: EncoderConfig, clock: Clock, waker: Waker) -> std::io::Result<Self> {
        let EncoderConfig { encoder, cache_bytes } = config;
        let row_bytes = (encoder.width() * size_of::<f32>()).max(1) as u64;
        // The channel can be unbounded, because the scheduler limits the number of image tokens that wait to be
        // encoded.
        let (commands, receiver) = mpsc::channel();
        let (sender, results) = mpsc::channel();
        let thread = EncoderThread { encoder, clock, waker, commands: receiver, results: sender };
        let thread = std::thread::Builder::new().name("encoder".to_owned()).spawn(move || thread.run())?;
        Ok(Self {
            commands: Some(commands),
            results,
            outputs: BTreeMap::new(),
            thread: Some(thread),
            num_images: 0,
            row_bytes,
            rows_max: u32::try_from(cache_bytes / row_bytes).unwrap_or(u32::MAX),
        })
    }

    /// The limits for the outputs that are stored and for the images that are sent to the thread.
    pub(crate) fn limits(&self) -> ImageLimits {
        ImageLimits { rows_max: self.rows_max, max_num_encoder_input_tokens: MAX_NUM_ENCODER_INPUT_TOKENS }
    }

    /// Bytes of outputs with this number of rows.
    pub(crate) fn output_bytes(&self, rows: u64) -> u64 {
        rows.saturating_mul(self.row_bytes)
    }

    /// Sends the thread the images that the scheduler has requested, and drops evicted outputs.
    pub(crate) fn start_requested(&mut self, scheduler: &mut Scheduler, requests: &Requests) {
        for evicted in scheduler.drain_evicted_images() {
            self.outputs.remove(&evicted);
        }
        for request in scheduler.drain_image_requests() {
            let active = requests.active.get(&request.sequence.request);
            let images = active.and_then(|active| active.images.as_deref());
            let image = images.and_then(|images| images.input(request.digest));
            let image = image.expect("invariant: a waiting sequence belongs to a request with its images");
            let command = EncoderCommand::Encode { digest: request.digest, image: Arc::downgrade(image) };
            self.num_images += 1;
            self.send(command);
        }
    }

    /// Applies the results of the thread.
    pub(crate) fn collect(&mut self, scheduler: &mut Scheduler) -> CollectedImages {
        let mut collected = CollectedImages::default();
        while let Ok(EncoderRun { outcomes, time }) = self.results.try_recv() {
            collected.has_results = true;
            if outcomes.iter().any(|(_, outcome)| matches!(outcome, EncodeOutcome::Encoded(_))) {
                collected.runs += 1;
                collected.time += time;
            }
            self.num_images -= outcomes.len();
            for (digest, outcome) in outcomes {
                self.apply(digest, outcome, scheduler, &mut collected);
            }
        }
        collected
    }

    fn apply(
        &mut self,
        digest: ImageDigest,
        outcome: EncodeOutcome,
        scheduler: &mut Scheduler,
        collected: &mut CollectedImages,
    ) {
        match outcome {
            EncodeOutcome::Encoded(features) => {
                collected.encoded += 1;
                collected.tokens += features.rows();
                self.outputs.insert(digest, Arc::new(features));
                scheduler.provide_image(digest);
            }
            // If another request has the same image, its sequences request the encoder output again.
            EncodeOutcome::NotNeeded => scheduler.cancel_image(digest),
            EncodeOutcome::Failed(message) => {
                let sequences = scheduler.sequences_with_image(digest);
                let failed = |sequence| FailedImage { sequence, message: message.clone() };
                collected.failed.extend(sequences.into_iter().map(failed));
                scheduler.cancel_image(digest);
            }
        }
    }

    /// Whether the thread is running and the results of some images have not been collected yet.
    pub(crate) fn is_busy(&self) -> bool {
        let has_ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        self.num_images > 0 && !has_ended
    }

    /// The output of an image that a scheduled sequence holds.
    pub(crate) fn output(&self, digest: ImageDigest) -> Arc<ImageFeatures> {
        let output = self.outputs.get(&digest);
        Arc::clone(output.expect("invariant: the images of scheduled tokens are encoded"))
    }

    /// Lets the thread release memory and then reply that the engine is asleep.
    pub(crate) fn sleep(&self, level: SleepLevel, reply: SleepReply) {
        self.send(EncoderCommand::Sleep { level, reply });
    }

    fn send(&self, command: EncoderCommand) {
        // The thread ends only when `self` is dropped, because it catches the panics of the encoder.
        let _ = self.commands.as_ref().map(|commands| commands.send(command));
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        // Without a receiver for its results, the thread ends after its current run and ignores the queued images.
        drop(self.commands.take());
        drop(std::mem::replace(&mut self.results, mpsc::channel().1));
        if let Some(thread) = self.thread.take() {
            // The thread catches the panics of the encoder. Any other panic is ignored.
            let _ = thread.join();
        }
    }
}

/// The encoder as seen from its thread.
struct EncoderThread {
    encoder: Box<dyn ImageEncoder>,
    clock: Clock,
    waker: Waker,
    commands: mpsc::Receiver<EncoderCommand>,
    results: mpsc::Sender<EncoderRun>,
}

/// The engine no longer reads the results.
struct EngineEnded;

impl EncoderThread {
    fn run(mut self) {
        // The first command that could not join the latest run.
        let mut next = None;
        while let Some(command) = next.take().or_else(|| self.commands.recv().ok()) {
            let result = match command {
                EncoderCommand::Sleep { level, reply } => {
                    self.sleep(level);
                    // The caller may have stopped waiting for the reply.
                    let _ = reply.send(Ok(()));
                    Ok(())
                }
                EncoderCommand::Encode { digest, image } => match image.upgrade() {
                    Some(image) => self.run_batch(image, &mut next),
                    None => self.send_not_needed(digest),
                },
            };
            if result.is_err() {
                return;
            }
        }
    }

    /// Encodes an image together with the images that follow it in the queue, up to the first one that cannot join the
    /// run. Stores the command that ended the batch, if there is one, in `next`.
    fn run_batch(
        &mut self,
        image: Arc<ImageInput>,
        next: &mut Option<EncoderCommand>,
    ) -> Result<(), EngineEnded> {
        let mut batch = vec![image];
        while let Ok(command) = self.commands.try_recv() {
            match command {
                EncoderCommand::Encode { digest, image } => match image.upgrade() {
                    None => self.send_not_needed(digest)?,
                    Some(image) if self.can_join(&batch, &image) => batch.push(image),
                    Some(image) => {
                        *next = Some(EncoderCommand::Encode { digest, image: Arc::downgrade(&image) });
                        break;
                    }
                },
                EncoderCommand::Sleep { .. } => {
                    *next = Some(command);
                    break;
                }
            }
        }
        let began = self.clock.now();
        if batch.len() > 1
            && let Some(outputs) = self.encode_batch(&batch)
        {
            let digests = batch.iter().map(|image| image.digest);
            let outcomes = digests.zip(outputs.into_iter().map(EncodeOutcome::Encoded)).collect();
            return self.send(EncoderRun { outcomes, time: self.clock.now() - began });
        }
        for image in batch {
            let began = self.clock.now();
            let outcomes = vec![(image.digest, self.encode(&image))];
            self.send(EncoderRun { outcomes, time: self.clock.now() - began })?;
        }
        Ok(())
    }

    /// Whether `image` can join `batch`. If the encoder panics, the image starts the next run.
    fn can_join(&self, batch: &[Arc<ImageInput>], image: &ImageInput) -> bool {
        // Unwind safety: after a panic, the encoder is used for other images, as it is after an error.
        let result = catch_unwind(AssertUnwindSafe(|| self.encoder.can_join(batch, image)));
        if result.is_err() {
            tracing::warn!(
                "the image encoder panicked while checking whether an image can join a batch; the image starts the \
                 next batch"
            );
        }
        result.unwrap_or(false)
    }

    /// Releases memory. An encoder that panics may retain its memory.
    fn sleep(&mut self, level: SleepLevel) {
        // Unwind safety: after a panic, the encoder is used for the next image, as it is after an error.
        let result = catch_unwind(AssertUnwindSafe(|| self.encoder.sleep(level)));
        if result.is_err() {
            tracing::warn!(
                ?level,
                "the image encoder panicked while going to sleep; it may not have released its memory"
            );
        }
    }

    /// Encodes an image, and checks the number of rows.
    fn encode(&mut self, image: &ImageInput) -> EncodeOutcome {
        // Unwind safety: after a panic, the encoder is used for other images, as it is after an error.
        let result = catch_unwind(AssertUnwindSafe(|| self.encoder.encode(image)));
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

    /// Encodes images in one run. Returns `None` if the run fails or an output has the wrong number of rows.
    fn encode_batch(&mut self, batch: &[Arc<ImageInput>]) -> Option<Vec<ImageFeatures>> {
        let result = catch_unwind(AssertUnwindSafe(|| self.encoder.encode_batch(batch)));
        let error = match result {
            Ok(Ok(outputs)) => {
                if outputs.iter().map(ImageFeatures::rows).eq(batch.iter().map(|image| image.rows)) {
                    return Some(outputs);
                }
                "the encoder returned a wrong number of rows".to_owned()
            }
            Ok(Err(RunError { message, .. })) => message,
            Err(_) => "the encoder panicked".to_owned(),
        };
        tracing::warn!(
            error,
            images = batch.len(),
            "failed to encode images as a batch; encoding each image separately"
        );
        None
    }

    fn send_not_needed(&self, digest: ImageDigest) -> Result<(), EngineEnded> {
        let outcomes = vec![(digest, EncodeOutcome::NotNeeded)];
        self.send(EncoderRun { outcomes, time: Duration::ZERO })
    }

    fn send(&self, run: EncoderRun) -> Result<(), EngineEnded> {
        self.results.send(run).map_err(|_| EngineEnded)?;
        self.waker.wake();
        Ok(())
    }
}

/// Fills `step` with the images of the sequences in a batch.
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

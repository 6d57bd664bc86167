//! Tests requests with images: the answer is that of a model without a cache, images are encoded only if their tokens
//! must be computed, and the engine serves other requests while the encoder is busy.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use server_engine::sim::{SimEncoder, expected_tokens, expected_tokens_with_images};
use server_engine::{
    EncoderConfig, Engine, EngineHandle, EngineOptions, Event, Failure, ImageDigest, ImageEncoder,
    ImageFeatures, ImageInput, ImageSpan, PromptImages, PromptPositions, Request, RequestImages, RunError,
    SleepLevel, SpanAttention, SubmitError, TokenId, TokenStream,
};

use crate::sleep::poll_once;
use crate::support::{Outcome, Setup, VOCABULARY, outcome, prompt, request, settled, tokens};

/// The placeholder token at the positions of images.
const PLACEHOLDER: TokenId = 7;

/// Number of rows of each image.
const ROWS: u32 = 20;

/// Size of the simulated output of an image, in bytes.
const IMAGE_BYTES: u64 = 8 * ROWS as u64;

fn start(setup: Setup, encoder: impl ImageEncoder + 'static, images: u64) -> Engine {
    let config = EncoderConfig { encoder: Box::new(encoder), cache_bytes: images * IMAGE_BYTES };
    let options = EngineOptions { encoder: Some(config), ..EngineOptions::default() };
    setup.start_with(options).unwrap()
}

fn digest(image: u8) -> ImageDigest {
    ImageDigest([image; 32])
}

/// Returns a request whose prompt consists of this text and of these images, each followed by more text.
fn with_images(text: u32, images: &[u8], tokens_max: u32) -> Request {
    let mut tokens = prompt(text, 5);
    let mut spans = Vec::new();
    for &image in images {
        let start = tokens.len() as u32;
        spans.push(ImageSpan { digest: digest(image), start, num_tokens: ROWS, first_row: 0 });
        tokens.extend([PLACEHOLDER; ROWS as usize]);
        tokens.extend(prompt(u32::from(image), 9));
    }
    let mut unique = images.to_vec();
    unique.sort_unstable();
    unique.dedup();
    let input = |image| Arc::new(ImageInput { digest: digest(image), rows: ROWS, content: Arc::new(()) });
    let images = RequestImages {
        inputs: unique.into_iter().map(input).collect(),
        prompt: PromptImages { spans, attention: SpanAttention::Causal },
        positions: None,
    };
    Request { images: Some(Arc::new(images)), ..request(&tokens, tokens_max) }
}

fn expected(request: &Request) -> Vec<TokenId> {
    let images = request.images.as_deref().unwrap();
    expected_tokens_with_images(&request.prompt, images, request.stop.max_tokens, VOCABULARY)
}

/// Sends a request, and compares the answer with that of a model without a cache.
async fn ask(handle: &EngineHandle, request: Request) -> Outcome {
    let expected = expected(&request);
    let outcome = outcome(handle.submit(request).unwrap()).await;
    assert_eq!(outcome.failure, None);
    assert_eq!(outcome.tokens, [expected]);
    outcome
}

#[tokio::test]
async fn an_answer_depends_on_the_images_and_their_order() {
    let encoder = SimEncoder::default();
    let engine = start(Setup::new(100), encoder.clone(), 10);
    let handle = engine.handle();
    let mut answers = Vec::new();
    for images in [&[1][..], &[2], &[1, 2], &[2, 1], &[1, 1]] {
        answers.push(ask(&handle, with_images(0, images, 9)).await.tokens);
    }
    answers.push(vec![tokens(handle.submit(request(&with_images(0, &[1], 9).prompt, 9)).unwrap()).await]);
    for (index, answer) in answers.iter().enumerate() {
        assert!(!answers[..index].contains(answer), "answer {index} is that of other images");
    }
    assert_eq!(encoder.encoded(), [digest(1), digest(2)], "outputs are cached");
    settled(&handle).await;
    assert_eq!(handle.load().borrow().image_cache_bytes, 2 * IMAGE_BYTES);
}

#[tokio::test]
async fn a_cached_prefix_with_an_image_needs_no_encoder() {
    let encoder = SimEncoder::default();
    // The outputs of the encoder are evicted as soon as they have been read.
    let engine = start(Setup::new(100), encoder.clone(), 0);
    let handle = engine.handle();
    assert_eq!(ask(&handle, with_images(0, &[1], 9)).await.cached_tokens, Some(0));
    let mut turn = with_images(0, &[1], 9);
    turn.prompt.extend(prompt(3, 11));
    // Both prompts begin with the same 34 tokens. Only whole blocks of 8 tokens are cached.
    assert_eq!(ask(&handle, turn.clone()).await.cached_tokens, Some(32));
    assert_eq!(encoder.encoded(), [digest(1)]);
    // A prompt with another image can share only whole blocks before the image, and this prompt has none.
    let mut other = with_images(0, &[2], 9);
    other.prompt.truncate(5 + ROWS as usize);
    other.prompt.extend(turn.prompt[5 + ROWS as usize..].iter().copied());
    assert_eq!(ask(&handle, other).await.cached_tokens, Some(0));
    assert_eq!(encoder.encoded(), [digest(1), digest(2)]);
    settled(&handle).await;
}

#[tokio::test]
async fn many_requests_with_few_blocks_and_outputs_have_the_right_answers() {
    let encoder = SimEncoder::default();
    // The cache has room for about four requests, so sequences are preempted.
    let engine = start(Setup::new(40), encoder.clone(), 2);
    let handle = engine.handle();
    let mut tasks = tokio::task::JoinSet::new();
    for index in 0..60u32 {
        let handle = handle.clone();
        let images: Vec<u8> = (0..index % 4).map(|image| (index * 5 + image * 3) as u8 % 6).collect();
        tasks.spawn(async move {
            let request = with_images(index % 3, &images, 30 + index % 17);
            ask(&handle, request).await;
        });
    }
    tasks.join_all().await;
    settled(&handle).await;
}

#[tokio::test]
async fn positions_are_those_of_the_request() {
    let engine = start(Setup::new(100), SimEncoder::default(), 10);
    let handle = engine.handle();
    let mut requests = Vec::new();
    for delta in [-3, -4] {
        let mut request = with_images(0, &[1], 12);
        let length = request.prompt.len() as i32;
        let images = request.images.as_deref().unwrap();
        let positions =
            PromptPositions { prompt: (0..length).map(|index| [index, index / 2, 3]).collect(), delta };
        request.images =
            Some(Arc::new(RequestImages { positions: Some(Arc::new(positions)), ..images.clone() }));
        requests.push(request);
    }
    let [first, second] = &requests[..] else { panic!("two requests") };
    assert_ne!(expected(first), expected(second));
    let [first, second] = [first, second].map(|request| handle.submit(request.clone()).unwrap());
    assert_eq!(tokens(first).await, expected(&requests[0]));
    assert_eq!(tokens(second).await, expected(&requests[1]));
}

/// An encoder that computes each run only when the test allows it.
struct GatedEncoder {
    inner: SimEncoder,
    shown: Sender<Vec<ImageDigest>>,
    go: Receiver<()>,
    defect: EncoderDefect,
}

/// A defect of an encoder. Most defects affect only runs of several images.
#[derive(Clone, Copy, PartialEq)]
enum EncoderDefect {
    None,
    BatchPanic,
    MissingOutput,
    MissingRow,
    CanJoinPanic,
    SleepPanic,
}

/// The test's side of a [`GatedEncoder`].
struct Gate {
    runs: Receiver<Vec<ImageDigest>>,
    go: Sender<()>,
}

impl Gate {
    /// Starts an engine whose encoder waits at the gate before each run of `inner`.
    fn start(inner: &SimEncoder) -> (Engine, Self) {
        Self::start_with_defect(inner, EncoderDefect::None)
    }

    fn start_with_defect(inner: &SimEncoder, defect: EncoderDefect) -> (Engine, Self) {
        Self::start_with(Setup::new(200), inner, defect)
    }

    fn start_with(setup: Setup, inner: &SimEncoder, defect: EncoderDefect) -> (Engine, Self) {
        let (shown, runs) = channel();
        let (go, permits) = channel();
        let gated = GatedEncoder { inner: inner.clone(), shown, go: permits, defect };
        (start(setup, gated, 20), Self { runs, go })
    }

    /// Waits for the next run, which must have these images, and lets the encoder compute it.
    fn pass(&self, images: &[u8]) {
        self.expect(images);
        self.go.send(()).unwrap();
    }

    /// Waits for the next run, which must have these images.
    fn expect(&self, images: &[u8]) {
        let digests: Vec<_> = images.iter().map(|image| digest(*image)).collect();
        assert_eq!(self.runs.recv(), Ok(digests));
    }
}

impl ImageEncoder for GatedEncoder {
    fn width(&self) -> usize {
        self.inner.width()
    }

    fn encode(&mut self, image: &ImageInput) -> Result<ImageFeatures, RunError> {
        let _ = self.shown.send(vec![image.digest]);
        let _ = self.go.recv();
        self.inner.encode(image)
    }

    fn can_join(&self, batch: &[Arc<ImageInput>], image: &ImageInput) -> bool {
        assert!(self.defect != EncoderDefect::CanJoinPanic, "a simulated panic");
        self.inner.can_join(batch, image)
    }

    fn sleep(&mut self, level: SleepLevel) {
        assert!(self.defect != EncoderDefect::SleepPanic, "a simulated panic");
        self.inner.sleep(level);
    }

    fn encode_batch(&mut self, images: &[Arc<ImageInput>]) -> Result<Vec<ImageFeatures>, RunError> {
        let _ = self.shown.send(images.iter().map(|image| image.digest).collect());
        let _ = self.go.recv();
        let mut outputs = self.inner.encode_batch(images)?;
        match self.defect {
            EncoderDefect::None | EncoderDefect::CanJoinPanic | EncoderDefect::SleepPanic => {}
            EncoderDefect::BatchPanic => panic!("a simulated panic"),
            EncoderDefect::MissingOutput => drop(outputs.pop()),
            EncoderDefect::MissingRow => {
                let rows = outputs[0].values(1..ROWS).to_vec();
                outputs[0] = ImageFeatures::new(rows, self.inner.width());
            }
        }
        Ok(outputs)
    }
}

#[tokio::test]
async fn other_requests_do_not_wait_for_the_encoder() {
    let encoder = SimEncoder::default();
    let (engine, gate) = Gate::start(&encoder);
    let handle = engine.handle();
    let first = with_images(0, &[1], 9);
    let waiting = handle.submit(first.clone()).unwrap();
    gate.expect(&[1]);
    // While the encoder is busy, requests without images start and finish.
    let text = prompt(5, 40);
    let answer = tokens(handle.submit(request(&text, 20)).unwrap()).await;
    assert_eq!(answer, expected_tokens(&text, 20, VOCABULARY));
    // This request ends before its image is encoded.
    let dropped = handle.submit(with_images(1, &[2], 9)).unwrap();
    let second = handle.submit(with_images(2, &[3], 9)).unwrap();
    tokens(handle.submit(request(&text, 20)).unwrap()).await;
    drop(dropped);
    tokens(handle.submit(request(&text, 20)).unwrap()).await;
    gate.go.send(()).unwrap();
    assert_eq!(tokens(waiting).await, expected(&first));
    // The second image is not encoded, because no request needs it anymore.
    gate.pass(&[3]);
    assert_eq!(tokens(second).await, expected(&with_images(2, &[3], 9)));
    assert_eq!(encoder.encoded(), [digest(1), digest(3)]);
    settled(&handle).await;
}

/// Returns a configuration whose steps each take a day of simulated time. The engine waits for pauses in real time, so
/// a test hangs if nothing ends a pause.
fn with_long_steps() -> Setup {
    let mut setup = Setup::new(200);
    setup.sim.costs.step = Duration::from_hours(24);
    setup
}

/// Decodes a sequence while the encoder is busy with image 1, until the engine pauses after a step. Returns the streams
/// of the request with the image and of the decoded sequence, which has 20 tokens. Two of these tokens have been
/// received.
async fn pause(handle: &EngineHandle, gate: &Gate) -> (TokenStream, TokenStream) {
    let waiting = handle.submit(with_image(1)).unwrap();
    gate.expect(&[1]);
    let mut paused = handle.submit(request(&prompt(5, 40), 20)).unwrap();
    for _ in 0..2 {
        next_token(&mut paused).await;
    }
    (waiting, paused)
}

/// Waits for the next token of a stream.
async fn next_token(stream: &mut TokenStream) {
    while !matches!(stream.next().await.unwrap(), Event::Token { .. }) {}
}

#[tokio::test]
async fn an_encoded_image_ends_the_pause_of_generation() {
    let (engine, gate) = Gate::start_with(with_long_steps(), &SimEncoder::default(), EncoderDefect::None);
    let (waiting, mut paused) = pause(&engine.handle(), &gate).await;
    gate.go.send(()).unwrap();
    assert_eq!(tokens(waiting).await, expected(&with_image(1)));
    for _ in 2..20 {
        next_token(&mut paused).await;
    }
}

#[tokio::test]
async fn a_request_ends_the_pause_of_generation() {
    let (engine, gate) = Gate::start_with(with_long_steps(), &SimEncoder::default(), EncoderDefect::None);
    let handle = engine.handle();
    let (_waiting, mut paused) = pause(&handle, &gate).await;
    // The step that generates the only token of this request also generates a token of the paused sequence.
    let text = prompt(6, 40);
    let answer = tokens(handle.submit(request(&text, 1)).unwrap()).await;
    assert_eq!(answer, expected_tokens(&text, 1, VOCABULARY));
    next_token(&mut paused).await;
    gate.go.send(()).unwrap();
}

#[tokio::test]
async fn a_pause_of_generation_ends_when_all_clients_disconnect() {
    let (engine, gate) = Gate::start_with(with_long_steps(), &SimEncoder::default(), EncoderDefect::None);
    let handle = engine.handle();
    let (waiting, paused) = pause(&handle, &gate).await;
    drop((waiting, paused));
    settled(&handle).await;
    // The pause must not continue when the next request arrives.
    let text = prompt(6, 40);
    let answer = tokens(handle.submit(request(&text, 1)).unwrap()).await;
    assert_eq!(answer, expected_tokens(&text, 1, VOCABULARY));
    gate.go.send(()).unwrap();
}

#[tokio::test]
async fn generation_does_not_pause_with_a_target_for_the_time_between_tokens_or_with_several_tenants() {
    let mut with_target = with_long_steps();
    with_target.engine.scheduler.max_itl = Some(Duration::from_hours(24));
    for (setup, tenant) in [(with_target, 0), (with_long_steps(), 1)] {
        let (engine, gate) = Gate::start_with(setup, &SimEncoder::default(), EncoderDefect::None);
        let handle = engine.handle();
        let _waiting = handle.submit(with_image(1)).unwrap();
        gate.expect(&[1]);
        let text = prompt(5, 40);
        let answer = tokens(handle.submit(Request { tenant, ..request(&text, 20) }).unwrap()).await;
        assert_eq!(answer, expected_tokens(&text, 20, VOCABULARY));
        gate.go.send(()).unwrap();
    }
}

/// Starts an idle engine whose encoder waits at the gate with an image that no request needs anymore.
async fn start_with_unneeded_image() -> (Engine, Gate) {
    let (engine, gate) = Gate::start(&SimEncoder::default());
    let handle = engine.handle();
    let dropped = handle.submit(with_image(1)).unwrap();
    gate.expect(&[1]);
    drop(dropped);
    tokens(handle.submit(request(&prompt(5, 40), 20)).unwrap()).await;
    settled(&handle).await;
    (engine, gate)
}

#[tokio::test]
async fn an_idle_engine_reports_when_an_image_that_no_request_needs_is_encoded() {
    let (engine, gate) = start_with_unneeded_image().await;
    let handle = engine.handle();
    let mut load = handle.load();
    assert_eq!(load.borrow().load.unencoded_image_tokens, u64::from(ROWS));
    gate.go.send(()).unwrap();
    load.wait_for(|now| now.load.unencoded_image_tokens == 0).await.unwrap();
}

#[tokio::test]
async fn clients_that_disconnect_while_the_engine_waits_for_images_are_noticed() {
    let encoder = SimEncoder::default();
    let (engine, gate) = Gate::start(&encoder);
    let handle = engine.handle();
    let mut load = handle.load();
    let first = handle.submit(with_image(1)).unwrap();
    gate.expect(&[1]);
    let dropped = handle.submit(with_image(2)).unwrap();
    load.wait_for(|now| now.load.waiting == 2).await.unwrap();
    drop(dropped);
    load.wait_for(|now| now.load.waiting == 1).await.unwrap();
    assert_eq!(handle.waiting_sequences(), 1);
    gate.go.send(()).unwrap();
    assert_eq!(tokens(first).await, expected(&with_image(1)));
    settled(&handle).await;
    assert_eq!(encoder.encoded(), [digest(1)], "no request needs the second image");
}

/// Returns a request with one image.
fn with_image(image: u8) -> Request {
    with_images(u32::from(image), &[image], 9)
}

/// Submits requests with one image each while the encoder is busy with image 1, and waits until the encoder has
/// received their images. Returns the streams of the request with image 1 and of the other requests.
async fn submit_while_busy(
    handle: &EngineHandle,
    gate: &Gate,
    requests: impl IntoIterator<Item = Request>,
) -> Vec<TokenStream> {
    let mut streams = vec![handle.submit(with_image(1)).unwrap()];
    gate.expect(&[1]);
    streams.extend(requests.into_iter().map(|request| handle.submit(request).unwrap()));
    // The engine passes the images to the encoder before it computes this later request, so wait for its answer.
    tokens(handle.submit(request(&prompt(9, 3), 2)).unwrap()).await;
    streams
}

#[tokio::test]
async fn waiting_images_of_several_requests_are_encoded_together_in_order() {
    let encoder = SimEncoder::default().with_batches(3);
    let (engine, gate) = Gate::start(&encoder);
    let requests = [2, 3, 4, 5].map(with_image);
    let streams = submit_while_busy(&engine.handle(), &gate, requests).await;
    gate.go.send(()).unwrap();
    gate.pass(&[2, 3, 4]);
    gate.pass(&[5]);
    for (stream, image) in streams.into_iter().zip(1..) {
        assert_eq!(tokens(stream).await, expected(&with_image(image)));
    }
    settled(&engine.handle()).await;
}

#[tokio::test]
async fn images_that_cannot_join_a_run_keep_their_place() {
    let encoder = SimEncoder::default().with_batches(9);
    let (engine, gate) = Gate::start(&encoder);
    let mut requests = [2, 3, 4, 5].map(with_image);
    let larger = ImageInput { digest: digest(4), rows: ROWS + 1, content: Arc::new(()) };
    let images = requests[2].images.as_deref().unwrap();
    requests[2].images = Some(Arc::new(RequestImages { inputs: vec![Arc::new(larger)], ..images.clone() }));
    let streams = submit_while_busy(&engine.handle(), &gate, requests).await;
    gate.go.send(()).unwrap();
    gate.pass(&[2, 3]);
    gate.pass(&[4]);
    gate.pass(&[5]);
    for (stream, image) in streams.into_iter().zip(1..) {
        assert_eq!(tokens(stream).await, expected(&with_image(image)));
    }
}

#[tokio::test]
async fn a_run_that_fails_fails_only_the_images_that_cannot_be_encoded_alone() {
    let encoder =
        SimEncoder::default().with_batches(9).with_faults(vec![digest(3)]).with_batch_faults(vec![digest(5)]);
    let (engine, gate) = Gate::start(&encoder);
    let requests = [2, 3, 4, 5].map(with_image);
    let streams = submit_while_busy(&engine.handle(), &gate, requests).await;
    gate.go.send(()).unwrap();
    for run in [&[2, 3, 4, 5][..], &[2], &[3], &[4], &[5]] {
        gate.pass(run);
    }
    for (stream, image) in streams.into_iter().zip(1..) {
        let outcome = outcome(stream).await;
        if image == 3 {
            assert_eq!(outcome.failure, Some(Failure::Image("a simulated fault".to_owned())));
        } else {
            assert_eq!((outcome.failure, outcome.tokens), (None, vec![expected(&with_image(image))]));
        }
    }
    settled(&engine.handle()).await;
}

#[tokio::test]
async fn requests_that_end_leave_the_other_images_of_a_run() {
    let encoder = SimEncoder::default().with_batches(9);
    let (engine, gate) = Gate::start(&encoder);
    let handle = engine.handle();
    let requests = [2, 3, 4, 5].map(with_image);
    let mut streams = submit_while_busy(&handle, &gate, requests).await;
    // The request with image 3 ends before its image is part of a run.
    drop(streams.remove(2));
    tokens(handle.submit(request(&prompt(9, 3), 2)).unwrap()).await;
    gate.go.send(()).unwrap();
    gate.expect(&[2, 4, 5]);
    // The request with image 4 ends during the run.
    drop(streams.remove(2));
    tokens(handle.submit(request(&prompt(9, 3), 2)).unwrap()).await;
    gate.go.send(()).unwrap();
    for (stream, image) in streams.into_iter().zip([1, 2, 5]) {
        assert_eq!(tokens(stream).await, expected(&with_image(image)));
    }
    // The output of image 4 is cached, and that of image 3 is not.
    ask(&handle, with_image(4)).await;
    let last = handle.submit(with_image(3)).unwrap();
    gate.pass(&[3]);
    assert_eq!(tokens(last).await, expected(&with_image(3)));
    settled(&handle).await;
}

#[tokio::test]
async fn runs_without_the_output_of_each_image_are_not_used() {
    for defect in [EncoderDefect::BatchPanic, EncoderDefect::MissingOutput, EncoderDefect::MissingRow] {
        let encoder = SimEncoder::default().with_batches(9);
        let (engine, gate) = Gate::start_with_defect(&encoder, defect);
        let streams = submit_while_busy(&engine.handle(), &gate, [2, 3].map(with_image)).await;
        gate.go.send(()).unwrap();
        for run in [&[2, 3][..], &[2], &[3]] {
            gate.pass(run);
        }
        for (stream, image) in streams.into_iter().zip(1..) {
            assert_eq!(tokens(stream).await, expected(&with_image(image)));
        }
        settled(&engine.handle()).await;
    }
}

#[tokio::test]
async fn images_are_encoded_alone_if_the_encoder_panics_in_can_join() {
    let encoder = SimEncoder::default().with_batches(9);
    let (engine, gate) = Gate::start_with_defect(&encoder, EncoderDefect::CanJoinPanic);
    let streams = submit_while_busy(&engine.handle(), &gate, [2, 3].map(with_image)).await;
    gate.go.send(()).unwrap();
    gate.pass(&[2]);
    gate.pass(&[3]);
    for (stream, image) in streams.into_iter().zip(1..) {
        assert_eq!(tokens(stream).await, expected(&with_image(image)));
    }
    settled(&engine.handle()).await;
}

#[tokio::test]
async fn an_encoder_that_panics_in_sleep_encodes_the_next_image() {
    let (engine, gate) = Gate::start_with_defect(&SimEncoder::default(), EncoderDefect::SleepPanic);
    let handle = engine.handle();
    handle.sleep(SleepLevel::Model).await.unwrap();
    let stream = handle.submit(with_image(1)).unwrap();
    gate.pass(&[1]);
    assert_eq!(tokens(stream).await, expected(&with_image(1)));
    settled(&handle).await;
}

#[tokio::test]
async fn sleep_waits_until_the_encoder_has_released_its_memory() {
    let (engine, gate) = start_with_unneeded_image().await;
    let handle = engine.handle();
    let mut pending_sleep = Box::pin(handle.sleep(SleepLevel::Model));
    assert!(poll_once(&mut pending_sleep).is_pending());
    // The engine processes this command after the other one.
    handle.wake().await.unwrap();
    assert!(poll_once(&mut pending_sleep).is_pending(), "the encoder has not finished the image yet");
    gate.go.send(()).unwrap();
    pending_sleep.await.unwrap();
}

#[tokio::test]
async fn an_image_that_cannot_be_encoded_fails_only_its_requests() {
    let encoder = SimEncoder::default().with_faults(vec![digest(2)]);
    let engine = start(Setup::new(100), encoder, 10);
    let handle = engine.handle();
    let submit = |images: &[u8]| handle.submit(with_images(0, images, 9)).unwrap();
    let streams = [submit(&[1]), submit(&[1, 2]), submit(&[2]), submit(&[3])];
    let mut failures = Vec::new();
    for stream in streams {
        failures.push(outcome(stream).await.failure);
    }
    let failure = Some(Failure::Image("a simulated fault".to_owned()));
    assert_eq!(failures, [None, failure.clone(), failure, None]);
    ask(&handle, with_images(0, &[1], 9)).await;
    settled(&handle).await;
}

/// An encoder that panics for image 1, and returns too few rows for other images.
struct BrokenEncoder;

impl ImageEncoder for BrokenEncoder {
    fn width(&self) -> usize {
        1
    }

    fn encode(&mut self, image: &ImageInput) -> Result<ImageFeatures, RunError> {
        assert_ne!(image.digest, digest(1), "a simulated panic");
        Ok(ImageFeatures::new(vec![0.0; ROWS as usize - 1], 1))
    }
}

#[tokio::test]
async fn a_defect_of_the_encoder_fails_the_request() {
    let engine = start(Setup::new(100), BrokenEncoder, 10);
    let handle = engine.handle();
    for (image, message) in [(1, "the encoder panicked"), (2, "the encoder returned 19 rows instead of 20")] {
        let outcome = outcome(handle.submit(with_images(0, &[image], 9)).unwrap()).await;
        assert_eq!(outcome.failure, Some(Failure::Image(message.to_owned())));
    }
    settled(&handle).await;
}

#[tokio::test]
async fn invalid_images_are_rejected() {
    let text_only = Setup::new(100).start();
    let engine = start(Setup::new(100), SimEncoder::default(), 10);
    let valid = with_images(0, &[1], 9);
    let invalid = Some(SubmitError::Invalid { parameter: "images" });
    assert_eq!(text_only.handle().submit(valid.clone()).err(), invalid);
    let check = |change: &dyn Fn(&mut Request, &mut RequestImages)| {
        let mut request = valid.clone();
        let mut images = request.images.as_deref().unwrap().clone();
        change(&mut request, &mut images);
        request.images = Some(Arc::new(images));
        engine.handle().submit(request).err()
    };
    assert_eq!(check(&|_, _| {}), None);
    assert_eq!(check(&|_, images| images.prompt.spans[0].start = 20), invalid, "beyond the prompt");
    assert_eq!(check(&|_, images| images.prompt.spans[0].first_row = 1), invalid, "beyond the rows");
    assert_eq!(check(&|_, images| images.inputs.clear()), invalid, "an unknown image");
    assert_eq!(check(&|_, images| images.inputs.push(Arc::clone(&images.inputs[0]))), invalid, "a duplicate");
    assert_eq!(check(&|request, _| request.sampling.prompt_logprobs = Some(1)), invalid, "a scored prompt");
    let positions = PromptPositions { prompt: Box::new([[0; 3]]), delta: 0 };
    let positions = Some(Arc::new(positions));
    assert_eq!(check(&|_, images| images.positions.clone_from(&positions)), invalid, "too few positions");
}

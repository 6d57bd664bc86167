//! Requests with images: the answer is that of a model without a cache, images are encoded only if their tokens must be
//! computed, and nothing else waits for the encoder.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use server_engine::sim::{SimEncoder, expected_tokens, expected_tokens_with_images};
use server_engine::{
    EncoderConfig, Engine, EngineHandle, EngineOptions, Failure, ImageDigest, ImageEncoder, ImageFeatures,
    ImageInput, ImageSpan, PromptImages, PromptPositions, Request, RequestImages, RunError, SpanAttention,
    SubmitError, TokenId,
};

use crate::support::{Outcome, Setup, VOCABULARY, outcome, prompt, request, settled, tokens};

/// The token of the positions of images.
const PLACEHOLDER: TokenId = 7;

/// Number of rows of each image.
const ROWS: u32 = 20;

/// Bytes of the simulated output of an image.
const IMAGE_BYTES: u64 = 8 * ROWS as u64;

fn start(setup: Setup, encoder: impl ImageEncoder + 'static, images: u64) -> Engine {
    let config = EncoderConfig { encoder: Box::new(encoder), cache_bytes: images * IMAGE_BYTES };
    let options = EngineOptions { encoder: Some(config), ..EngineOptions::default() };
    let runner = Box::new(setup.runner());
    Engine::start_with_options(setup.engine, runner, options, Box::new(|_| {})).unwrap()
}

fn digest(image: u8) -> ImageDigest {
    ImageDigest([image; 32])
}

/// A request whose prompt begins with this text, followed by these images with text between them.
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
}

#[tokio::test]
async fn a_cached_prefix_with_an_image_needs_no_encoder() {
    let encoder = SimEncoder::default();
    // The outputs are evicted as soon as they have been read.
    let engine = start(Setup::new(100), encoder.clone(), 0);
    let handle = engine.handle();
    assert_eq!(ask(&handle, with_images(0, &[1], 9)).await.cached_tokens, Some(0));
    let mut turn = with_images(0, &[1], 9);
    turn.prompt.extend(prompt(3, 11));
    // Of the 34 tokens of the first turn and its output, whole blocks of 8 are cached.
    assert_eq!(ask(&handle, turn.clone()).await.cached_tokens, Some(32));
    assert_eq!(encoder.encoded(), [digest(1)]);
    // Another image with the same placeholders shares only the block before it.
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
    // The cache has room for about four requests, and sequences are preempted.
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
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
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

/// An encoder that encodes each image only when it is told to.
struct GatedEncoder {
    inner: SimEncoder,
    shown: Sender<ImageDigest>,
    go: Receiver<()>,
}

impl ImageEncoder for GatedEncoder {
    fn width(&self) -> usize {
        self.inner.width()
    }

    fn encode(&mut self, image: &ImageInput) -> Result<ImageFeatures, RunError> {
        let _ = self.shown.send(image.digest);
        let _ = self.go.recv();
        self.inner.encode(image)
    }
}

#[tokio::test]
async fn other_requests_do_not_wait_for_the_encoder() {
    let (shown, images) = channel();
    let (go, permits) = channel();
    let encoder = SimEncoder::default();
    let gated = GatedEncoder { inner: encoder.clone(), shown, go: permits };
    let engine = start(Setup::new(200), gated, 10);
    let handle = engine.handle();
    let first = with_images(0, &[1], 9);
    let waiting = handle.submit(first.clone()).unwrap();
    assert_eq!(images.recv(), Ok(digest(1)));
    // The encoder is busy, and requests without images start and finish.
    let text = prompt(5, 40);
    let answer = tokens(handle.submit(request(&text, 20)).unwrap()).await;
    assert_eq!(answer, expected_tokens(&text, 20, VOCABULARY));
    // This request has ended before its image is encoded.
    let dropped = handle.submit(with_images(1, &[2], 9)).unwrap();
    let second = handle.submit(with_images(2, &[3], 9)).unwrap();
    tokens(handle.submit(request(&text, 20)).unwrap()).await;
    drop(dropped);
    tokens(handle.submit(request(&text, 20)).unwrap()).await;
    go.send(()).unwrap();
    assert_eq!(tokens(waiting).await, expected(&first));
    assert_eq!(images.recv(), Ok(digest(3)), "nobody needs the second image");
    go.send(()).unwrap();
    assert_eq!(tokens(second).await, expected(&with_images(2, &[3], 9)));
    assert_eq!(encoder.encoded(), [digest(1), digest(3)]);
    settled(&handle).await;
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

/// An encoder that panics, or returns too few rows.
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

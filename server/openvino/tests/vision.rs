//! Compares the answers of tiny vision-language models with those of transformers:
//! `tests/conformance/images/make_models.py` creates the models and records the answers. `OVFLEET_VISION_MODELS` is the
//! path of their directory. The images pass through the image processor of this server.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use serde_json::Value;
use server_engine::{
    Clock, EncoderConfig, Engine, EngineConfig, EngineHandle, EngineOptions, Event, ImageDigest,
    ImageEncoder as _, ImageInput, ImageSpan, PromptImages, PromptPositions, Request, RequestImages,
    Sampling, SchedulerConfig, SpanAttention, StepReport, StopCriteria, TokenId, TokenStream,
};
use server_images::{
    DecodeLimits, Detail, ImageLayout, ImageProcessor, ModelFamily, MropePositions, RgbImage, Size, decode,
    image_spans, mrope_positions,
};
use server_openvino::{Config, EncoderImage, OpenVinoImageEncoder, load, load_image_encoder};

/// The largest allowed difference between a feature of an image that is encoded in a run with other tiles and the same
/// feature if each tile is encoded alone, relative to the largest feature.
const BATCH_TOLERANCE: f32 = 1e-5;

/// The largest allowed difference between a feature of an image and that of transformers, relative to the largest
/// feature.
const FEATURE_TOLERANCE: f32 = 3e-5;

/// The largest allowed difference between a log probability of the first token and that of transformers.
const TOLERANCE: f32 = 2e-4;

/// The largest allowed noise of the features of an encoder with 8-bit weights: the root mean square of the difference
/// from the features that the plugin computes in f32 from the same weights, relative to the root mean square of those
/// features.
const NOISE_MAX: f64 = 5e-4;

/// The largest allowed noise if the native attention multiplies in bf16. If everything is computed in bf16, these
/// models have a noise of up to 9e-3.
const BF16_ATTENTION_NOISE_MAX: f64 = 2e-3;

/// The maximum length of a sequence in tokens. It does not exceed the original context length of any of the models.
const MODEL_LEN_MAX: u32 = 2048;

/// Number of tokens in a block of the KV cache.
const BLOCK_TOKENS: u32 = 32;

fn config(model: PathBuf) -> Config {
    let plugin_config = [("INFERENCE_PRECISION_HINT", "f32"), ("KV_CACHE_PRECISION", "f32")];
    let plugin_config = plugin_config.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    Config {
        plugin_config,
        kv_cache_bytes: Some(16 << 20),
        max_model_len: Some(MODEL_LEN_MAX),
        ..Config::new(model)
    }
}

/// A prompt, usually with images, and the answer of transformers.
struct Case {
    name: String,
    prompt: Vec<TokenId>,
    images: Option<Arc<RequestImages>>,
    /// The features that transformers inserts into the prompt in place of the image tokens, with one row for each of
    /// these tokens.
    features: Vec<f32>,
    answer: Vec<TokenId>,
    smallest_gap: f64,
    first_logits: Vec<f32>,
}

fn cases(directory: &Path) -> Vec<Case> {
    let reference = directory.join("reference");
    let cases: Value = serde_json::from_slice(&std::fs::read(reference.join("cases.json")).unwrap()).unwrap();
    let processor = ImageProcessor::load(directory).unwrap();
    let (refused, answered): (Vec<_>, Vec<_>) =
        cases.as_array().unwrap().iter().partition(|case| case.get("refused").is_some());
    for case in refused {
        let [file] = case["images"].as_array().unwrap().as_slice() else {
            panic!("{case} does not have exactly one image")
        };
        let image =
            decode(&std::fs::read(reference.join(file.as_str().unwrap())).unwrap(), &DecodeLimits::default());
        processor.layout(image.unwrap().size(), Detail::Auto).unwrap_err();
    }
    answered.into_iter().map(|case| read_case(case, &reference, &processor)).collect()
}

fn read_case(case: &Value, reference: &Path, processor: &ImageProcessor) -> Case {
    let prompt = tokens(&case["prompt"]);
    let files = case["images"].as_array().unwrap().iter().map(|file| reference.join(file.as_str().unwrap()));
    let images: Vec<Image> = files.map(|file| Image::read(&file, processor)).collect();
    let layouts: Vec<ImageLayout> = images.iter().map(|image| image.layout.clone()).collect();
    let image_token = case["image_token"].as_u64().unwrap() as TokenId;
    let prompt_spans = image_spans(&prompt, image_token, &layouts).unwrap();
    let mut spans = Vec::new();
    let mut inputs: Vec<Arc<ImageInput>> = Vec::new();
    for (image, span) in images.iter().zip(&prompt_spans) {
        let mut first_row = 0;
        for range in &span.ranges {
            let (start, num_tokens) = (range.start as u32, range.len() as u32);
            spans.push(ImageSpan { digest: image.input.digest, start, num_tokens, first_row });
            first_row += num_tokens;
        }
        if inputs.iter().all(|other| other.digest != image.input.digest) {
            inputs.push(Arc::clone(&image.input));
        }
    }
    let is_gemma = processor.family() == ModelFamily::Gemma3;
    let attention = if is_gemma { SpanAttention::Bidirectional } else { SpanAttention::Causal };
    let positions = positions(case, prompt.len(), &prompt_spans).map(Arc::new);
    let images = RequestImages { inputs, prompt: PromptImages { spans, attention }, positions };
    let features = std::fs::read(reference.join(case["features"].as_str().unwrap())).unwrap();
    let (features, []) = features.as_chunks::<4>() else { panic!("a feature has 4 bytes") };
    Case {
        name: case["name"].as_str().unwrap().to_owned(),
        images: (!prompt_spans.is_empty()).then(|| Arc::new(images)),
        prompt,
        features: features.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        answer: tokens(&case["answer"]),
        smallest_gap: case["smallest_gap"].as_f64().unwrap(),
        first_logits: numbers(&case["first_logits"]).map(|logit| logit as f32).collect(),
    }
}

/// An image of a prompt.
struct Image {
    layout: ImageLayout,
    input: Arc<ImageInput>,
}

impl Image {
    fn read(file: &Path, processor: &ImageProcessor) -> Self {
        let image = decode(&std::fs::read(file).unwrap(), &DecodeLimits::default()).unwrap();
        let layout = processor.layout(image.size(), Detail::Auto).unwrap();
        let content = EncoderImage {
            inputs: processor.preprocess(&image, Detail::Auto).unwrap(),
            feature_rows: layout.feature_rows.clone(),
        };
        let input = ImageInput {
            digest: ImageDigest(processor.digest(&image, Detail::Auto).0),
            rows: layout.num_tokens as u32,
            content: Arc::new(content),
        };
        Self { layout, input: Arc::new(input) }
    }
}

/// The positions of a prompt for models with M-RoPE. Asserts that they equal those of transformers.
fn positions(case: &Value, length: usize, spans: &[server_images::ImageSpan]) -> Option<PromptPositions> {
    let recorded = case.get("positions")?;
    let MropePositions { temporal, height, width, delta } = mrope_positions(length, spans);
    assert_eq!(serde_json::json!([temporal, height, width]), *recorded);
    assert_eq!(delta, case["delta"].as_i64().unwrap());
    let prompt = (0..length).map(|index| [&temporal, &height, &width].map(|stream| stream[index] as i32));
    Some(PromptPositions { prompt: prompt.collect(), delta: delta as i32 })
}

fn numbers(values: &Value) -> impl Iterator<Item = f64> {
    values.as_array().unwrap().iter().map(|number| number.as_f64().unwrap())
}

fn tokens(values: &Value) -> Vec<TokenId> {
    values.as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as TokenId).collect()
}

fn request(case: &Case) -> Request {
    // Request the log probabilities of all tokens, so that they can be compared with the expected logits.
    let sampling = Sampling { logprobs: Some(case.first_logits.len() as u32), ..Sampling::greedy() };
    let stop =
        StopCriteria { stop_token_ids: Vec::new(), max_tokens: case.answer.len() as u32, min_tokens: 0 };
    Request { images: case.images.clone(), ..Request::new(case.prompt.clone(), sampling, stop) }
}

/// The answer to a request.
struct Answer {
    tokens: Vec<TokenId>,
    /// The log probability of each token of the vocabulary as the first token of the answer.
    first_logprobs: Vec<f32>,
    cached_tokens: u32,
}

async fn ask(handle: &EngineHandle, case: &Case) -> Answer {
    answer(handle.submit(request(case)).unwrap(), case).await
}

async fn answer(mut stream: TokenStream, case: &Case) -> Answer {
    let vocabulary = case.first_logits.len();
    let mut answer =
        Answer { tokens: Vec::new(), first_logprobs: vec![f32::NAN; vocabulary], cached_tokens: 0 };
    while let Some(event) = stream.next().await {
        match event {
            Event::Started { cached_tokens } => answer.cached_tokens = cached_tokens,
            Event::Token { token, logprobs, .. } => {
                if answer.tokens.is_empty() {
                    for top in &logprobs.unwrap().top {
                        answer.first_logprobs[top.token as usize] = top.logprob;
                    }
                }
                answer.tokens.push(token);
            }
            Event::Failed(failure) => panic!("{}: {failure}", case.name),
            Event::Scored { .. } | Event::Finished { .. } => {}
        }
    }
    answer
}

/// Compares an answer with that of transformers.
fn check(answer: &Answer, case: &Case) {
    let sum: f64 = case.first_logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    let expected = case.first_logits.iter().map(|logit| (f64::from(*logit) - sum.ln()) as f32);
    let difference =
        answer.first_logprobs.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(difference < TOLERANCE, "{}: the first logits differ by {difference}", case.name);
    assert_eq!(answer.tokens, case.answer, "{}: the smallest gap is {}", case.name, case.smallest_gap);
    eprintln!(
        "{}: logits differ by at most {difference:e}, smallest gap {:.3}",
        case.name, case.smallest_gap
    );
}

/// Starts an engine with the model of a family and steps of at most `step_tokens` tokens. Also returns a counter of
/// encoded images.
fn start(directory: &Path, step_tokens: u32) -> (Engine, Arc<AtomicU32>) {
    let config = config(directory.to_owned());
    let (runner, report) = load(&config, &mut |_| {}).unwrap();
    let encoder = load_image_encoder(&config).unwrap().unwrap();
    eprintln!("{}; {}", report.kernels, encoder.report());
    let scheduler = SchedulerConfig {
        max_num_batched_tokens: step_tokens,
        max_chunk_tokens: step_tokens,
        max_itl: None,
        max_num_seqs: 8,
        max_queue: 64,
        max_model_len: MODEL_LEN_MAX,
        prefix_caching: true,
        kv_eviction_tokens: None,
    };
    let encoder = EncoderConfig { encoder: Box::new(encoder), cache_bytes: 4 << 20 };
    let options = EngineOptions { encoder: Some(encoder), ..EngineOptions::default() };
    let encoded = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&encoded);
    let observer = Box::new(move |report: &StepReport| {
        counter.fetch_add(report.encoded_images, Ordering::Relaxed);
    });
    let config = EngineConfig { scheduler, clock: Clock::real() };
    (Engine::start_with_options(config, Box::new(runner), options, observer).unwrap(), encoded)
}

/// Compares the features that are inserted into each prompt with those of transformers.
fn check_features(directory: &Path, cases: &[Case]) {
    let mut encoder = load_image_encoder(&config(directory.to_owned())).unwrap().unwrap();
    let mut largest_difference = 0.0_f32;
    for case in cases {
        let Some(images) = &case.images else { continue };
        let encoded: BTreeMap<_, _> =
            images.inputs.iter().map(|image| (image.digest, encoder.encode(image).unwrap())).collect();
        let num_tokens: u32 = images.prompt.spans.iter().map(|span| span.num_tokens).sum();
        let mut expected = case.features.chunks_exact(case.features.len() / num_tokens as usize);
        let largest = case.features.iter().map(|value| value.abs()).fold(0.0, f32::max);
        for span in &images.prompt.spans {
            for row in span.first_row..span.first_row + span.num_tokens {
                // Compare only the values of the feature. They are followed by values that layers of the language model
                // add to their hidden states (DeepStack).
                let features = encoded[&span.digest].values(row..row + 1).iter();
                for (value, expected) in features.zip(expected.next().unwrap()) {
                    let difference = (value - expected).abs() / largest;
                    assert!(
                        difference < FEATURE_TOLERANCE,
                        "{}: {value} instead of {expected} (largest: {largest})",
                        case.name
                    );
                    largest_difference = largest_difference.max(difference);
                }
            }
        }
    }
    eprintln!("features differ from those of transformers by at most {largest_difference:e}");
}

/// Compares the features of images that are encoded in one batch with those of images whose tiles are encoded one at a
/// time.
fn check_batch(directory: &Path, cases: &[Case]) {
    let images = cases.iter().filter_map(|case| case.images.as_ref()).flat_map(|images| &images.inputs);
    let images: BTreeMap<_, _> = images.map(|image| (image.digest, Arc::clone(image))).collect();
    let images: Vec<_> = images.into_values().collect();
    let encoder = load_image_encoder(&config(directory.to_owned())).unwrap().unwrap();
    let mut alone = encoder.with_run_pixels(1);
    let expected: Vec<_> = images.iter().map(|image| alone.encode(image).unwrap()).collect();
    assert!(!alone.can_join(&images[..1], &images[1]), "a run has one tile");
    let mut together = alone.with_run_pixels(usize::MAX);
    let family = ImageProcessor::load(directory).unwrap().family();
    let has_equal_tiles = !matches!(
        family,
        ModelFamily::Qwen2Vl | ModelFamily::Qwen2_5Vl | ModelFamily::Qwen3Vl | ModelFamily::MiniCpmV
    );
    assert_eq!(together.can_join(&images[1..], &images[0]), has_equal_tiles);
    let features = together.encode_batch(&images).unwrap();
    assert_eq!(features.len(), expected.len());
    let mut largest_difference = 0.0_f32;
    for ((features, expected), image) in features.iter().zip(&expected).zip(&images) {
        assert_eq!(features.rows(), image.rows);
        let (features, expected) = (features.values(0..image.rows), expected.values(0..image.rows));
        let largest = expected.iter().map(|value| value.abs()).fold(0.0, f32::max);
        for (value, expected) in features.iter().zip(expected) {
            let difference = (value - expected).abs() / largest;
            assert!(difference < BATCH_TOLERANCE, "{value} instead of {expected} (largest: {largest})");
            largest_difference = largest_difference.max(difference);
        }
    }
    eprintln!("{} images together: features differ by at most {largest_difference:e}", images.len());
}

/// The noise of the features of an encoder: the root mean square of the difference from those of `reference`, relative
/// to the root mean square of the features of `reference`.
fn noise_of(encoder: &mut OpenVinoImageEncoder, reference: &mut OpenVinoImageEncoder, cases: &[Case]) -> f64 {
    let (mut noise, mut squares) = (0.0, 0.0);
    for image in cases.iter().filter_map(|case| case.images.as_ref()).flat_map(|images| &images.inputs) {
        let features = encoder.encode(image).unwrap();
        let expected = reference.encode(image).unwrap();
        for (value, expected) in features.values(0..image.rows).iter().zip(expected.values(0..image.rows)) {
            noise += f64::from(value - expected).powi(2);
            squares += f64::from(*expected).powi(2);
        }
    }
    (noise / squares).sqrt()
}

/// Compares the features that an encoder with 8-bit weights and default settings computes to those that the plugin
/// computes in f32. If the native projections multiply in bf16, the noise must be below that of the plugin in bf16.
fn check_integer_weights(directory: &Path, cases: &[Case]) {
    let config = Config::new(directory.to_owned());
    let load = |config: &Config| load_image_encoder(config).unwrap().unwrap();
    let plugin = |precision: &str| {
        let properties = [("INFERENCE_PRECISION_HINT", precision), ("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0")];
        let plugin_config = properties.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        load(&Config { plugin_config, ..config.clone() })
    };
    let (mut native, mut reference) = (load(&config), plugin("f32"));
    eprintln!("{}", native.report());
    assert!(native.report().projections.contains("native"), "the projections are not native");
    let is_bf16 = |kernels: &str| ["bf16", "amx"].iter().any(|precision| kernels.contains(precision));
    let noise_max = match native.report() {
        report if is_bf16(&report.projections) => noise_of(&mut plugin("bf16"), &mut reference, cases),
        report if is_bf16(&report.attention) => BF16_ATTENTION_NOISE_MAX,
        _ => NOISE_MAX,
    };
    let noise = noise_of(&mut native, &mut reference, cases);
    assert!(noise < noise_max, "the noise is {noise:e}, not below {noise_max:e}");
    eprintln!("noise with 8-bit weights: {noise:e}, below {noise_max:e}");
}

async fn check_family(family: &str) {
    let models = std::env::var_os("OVFLEET_VISION_MODELS")
        .expect("OVFLEET_VISION_MODELS must be set to the directory of the models");
    let models = Path::new(&models);
    let directory = models.join(family);
    let cases = cases(&directory);
    check_integer_weights(&models.join(format!("{family}-int8")), &cases);
    let images = |case: &Case| case.images.as_ref().map_or(0, |images| images.inputs.len() as u32);
    let total: u32 = cases.iter().map(images).sum();
    check_features(&directory, &cases);
    check_batch(&directory, &cases);
    // Submit each prompt alone, twice. The second time, the encoder does not run. Unless the attention within images is
    // bidirectional, all blocks except the last one come from the prefix cache.
    let (engine, encoded) = start(&directory, 512);
    for case in &cases {
        check(&ask(&engine.handle(), case).await, case);
    }
    assert_eq!(encoded.load(Ordering::Relaxed), total);
    for case in &cases {
        let answer = ask(&engine.handle(), case).await;
        check(&answer, case);
        let images = case.images.as_ref();
        if images.is_none_or(|images| images.prompt.attention == SpanAttention::Causal) {
            let uncached = case.prompt.len() as u32 - answer.cached_tokens;
            assert!(uncached <= BLOCK_TOKENS, "{}: {uncached} tokens are not cached", case.name);
        }
    }
    assert_eq!(encoded.load(Ordering::Relaxed), total);
    drop(engine);
    // Submit all prompts together, with steps of 24 tokens, so that longer prompts are divided into chunks.
    let (engine, _) = start(&directory, 24);
    let handle = engine.handle();
    let streams: Vec<_> = cases.iter().map(|case| handle.submit(request(case)).unwrap()).collect();
    for (case, stream) in cases.iter().zip(streams) {
        check(&answer(stream, case).await, case);
    }
}

/// Peak memory of this process in bytes.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
#[ignore = "needs the models of tests/conformance/images/make_models.py"]
fn the_memory_for_a_large_image_does_not_grow_with_pairs_of_patches() {
    let models = std::env::var_os("OVFLEET_VISION_MODELS")
        .expect("OVFLEET_VISION_MODELS must be set to the directory of the models");
    let directory = Path::new(&models).join("qwen2_5_vl");
    let read = |file: &str| -> Value {
        serde_json::from_slice(&std::fs::read(directory.join(file)).unwrap()).unwrap()
    };
    let mut preprocessor = read("preprocessor_config.json");
    preprocessor["max_pixels"] = (1540 * 1540).into();
    let processor = ImageProcessor::from_values(read("config.json"), preprocessor).unwrap();
    let image = RgbImage::filled(Size::square(1540), [200, 100, 50]);
    let content =
        EncoderImage { inputs: processor.preprocess(&image, Detail::Auto).unwrap(), feature_rows: None };
    let rows = processor.layout(image.size(), Detail::Auto).unwrap().num_tokens as u32;
    let input = ImageInput { digest: ImageDigest([0; 32]), rows, content: Arc::new(content) };
    let mut encoder = load_image_encoder(&config(directory.clone())).unwrap().unwrap();
    let (before, started) = (peak_memory(), Instant::now());
    let features = encoder.encode(&input).unwrap();
    let bytes = peak_memory() - before;
    eprintln!("{rows} tokens: {:?}, {} MB", started.elapsed(), bytes >> 20);
    assert_eq!(features.rows(), rows);
    // A mask with an f32 number for each pair of patches would need twice this limit.
    let patches = u64::from(rows) * 4;
    assert!(bytes < patches * patches * 4 / 2, "the encoder needed {bytes} bytes");
}

/// Declares a test for each family. The directory of a family's model has the name of the family.
macro_rules! families {
    ($($test:ident: $family:literal,)*) => {$(
        #[tokio::test]
        #[ignore = "needs the models of tests/conformance/images/make_models.py"]
        async fn $test() {
            check_family($family).await;
        }
    )*};
}

families! {
    llava_answers_like_transformers: "llava",
    gemma3_answers_like_transformers: "gemma3",
    qwen2_vl_answers_like_transformers: "qwen2_vl",
    qwen2_5_vl_answers_like_transformers: "qwen2_5_vl",
    qwen3_vl_answers_like_transformers: "qwen3_vl",
    internvl_chat_answers_like_the_published_model: "internvl_chat",
    idefics3_answers_like_transformers: "idefics3",
    smolvlm_answers_like_transformers: "smolvlm",
    llava_next_answers_like_transformers: "llava_next",
    minicpmv_answers_like_the_published_model: "minicpmv",
    phi4_multimodal_answers_like_transformers: "phi4_multimodal",
}

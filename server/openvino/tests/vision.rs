//! Compares tiny vision-language models with what transformers answered: `tests/conformance/images/make_models.py` makes
//! the models and records the answers. `OVFLEET_VISION_MODELS` is their folder.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;
use server_engine::{
    Clock, EncoderConfig, Engine, EngineConfig, EngineHandle, EngineOptions, Event, ImageDigest, ImageInput,
    ImageSpan, PromptImages, PromptPositions, Request, RequestImages, Sampling, SchedulerConfig,
    SpanAttention, StepReport, StopCriteria, TokenId, TokenStream,
};
use server_images::{EncoderInputs, QwenPatches, Tensor, WindowLayout};
use server_openvino::{ActivationPrecision, Config, EncoderImage, load, load_image_encoder};

/// The largest difference between a logit and that of transformers.
const TOLERANCE: f32 = 2e-4;

/// Number of tokens in a block of the KV cache.
const BLOCK_TOKENS: u32 = 32;

fn config(model: PathBuf) -> Config {
    let plugin_config = [("INFERENCE_PRECISION_HINT", "f32"), ("KV_CACHE_PRECISION", "f32")];
    Config {
        model,
        device: "CPU".to_owned(),
        plugin_config: plugin_config.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        kv_cache_bytes: Some(16 << 20),
        kv_cache_tokens_max: 0,
        adapters: Vec::new(),
        sparse_attention: None,
        block_scores: false,
        activation_precision: ActivationPrecision::Auto,
        cache_dir: None,
        max_model_len: None,
    }
}

/// A prompt with images, and the answer of transformers.
struct Case {
    name: String,
    prompt: Vec<TokenId>,
    images: Option<Arc<RequestImages>>,
    answer: Vec<TokenId>,
    smallest_gap: f64,
    first_logits: Vec<f32>,
}

fn cases(folder: &Path) -> Vec<Case> {
    let reference = folder.join("reference");
    let cases: Value = serde_json::from_slice(&std::fs::read(reference.join("cases.json")).unwrap()).unwrap();
    cases.as_array().unwrap().iter().map(|case| read_case(case, &reference, folder)).collect()
}

fn read_case(case: &Value, reference: &Path, folder: &Path) -> Case {
    let prompt = tokens(&case["prompt"]);
    let inputs: Vec<Arc<ImageInput>> = case["images"]
        .as_array()
        .unwrap()
        .iter()
        .map(|image| Arc::new(image_input(image, reference)))
        .collect();
    let image_token = case["image_token"].as_u64().unwrap() as TokenId;
    let spans = spans(&prompt, image_token, &inputs);
    let is_gemma = folder.file_name().unwrap() == "gemma3";
    let attention = if is_gemma { SpanAttention::Bidirectional } else { SpanAttention::Causal };
    let mut unique: Vec<Arc<ImageInput>> = Vec::new();
    for input in &inputs {
        if unique.iter().all(|other| other.digest != input.digest) {
            unique.push(Arc::clone(input));
        }
    }
    let images = RequestImages {
        inputs: unique,
        prompt: PromptImages { spans, attention },
        positions: positions(case).map(Arc::new),
    };
    Case {
        name: case["name"].as_str().unwrap().to_owned(),
        images: (!inputs.is_empty()).then(|| Arc::new(images)),
        prompt,
        answer: tokens(&case["answer"]),
        smallest_gap: case["smallest_gap"].as_f64().unwrap(),
        first_logits: tensor(&case["first_logits"], reference).into_values(),
    }
}

fn positions(case: &Value) -> Option<PromptPositions> {
    let streams = case["positions"].as_array()?;
    let stream =
        |index: usize| streams[index].as_array().unwrap().iter().map(|value| value.as_i64().unwrap() as i32);
    let prompt = stream(0).zip(stream(1)).zip(stream(2)).map(|((t, h), w)| [t, h, w]).collect();
    Some(PromptPositions { prompt, delta: case["delta"].as_i64().unwrap() as i32 })
}

fn image_input(image: &Value, reference: &Path) -> ImageInput {
    let rows;
    let inputs = if image["tiles"].is_object() {
        // Both families with tiles have 16 tokens for each image.
        rows = 16;
        EncoderInputs::Tiles(tensor(&image["tiles"], reference))
    } else {
        let hidden_states = tensor(&image["patches"], reference);
        rows = hidden_states.shape()[0] as u32 / 4;
        let numbers = |value: &Value| -> Option<Vec<i64>> {
            Some(value.as_array()?.iter().map(|number| number.as_i64().unwrap()).collect())
        };
        let windows = numbers(&image["window_index"]).map(|window_index| WindowLayout {
            window_index,
            window_patches: numbers(&image["window_patches"])
                .unwrap()
                .iter()
                .map(|count| *count as usize)
                .collect(),
        });
        let rotary_pos_emb = tensor(&image["rotary"], reference);
        EncoderInputs::Qwen(QwenPatches { hidden_states, rotary_pos_emb, windows, position_embeddings: None })
    };
    let content = EncoderImage { inputs, feature_rows: None };
    ImageInput { digest: digest(&content.inputs), rows, content: Arc::new(content) }
}

/// A digest for tests, which need no protection from collisions.
fn digest(inputs: &EncoderInputs) -> ImageDigest {
    let (EncoderInputs::Tiles(values) | EncoderInputs::Qwen(QwenPatches { hidden_states: values, .. })) =
        inputs
    else {
        panic!("other inputs are not tested")
    };
    let hash = |hash: u64, value: &f32| server_engine::mix(hash ^ u64::from(value.to_bits()));
    let hash = values.values().iter().fold(values.shape()[0] as u64, hash);
    let mut digest = [0; 32];
    digest[..8].copy_from_slice(&hash.to_le_bytes());
    ImageDigest(digest)
}

fn spans(prompt: &[TokenId], image_token: TokenId, inputs: &[Arc<ImageInput>]) -> Vec<ImageSpan> {
    let mut from = 0;
    let span = |input: &Arc<ImageInput>| {
        let start = from + prompt[from..].iter().position(|token| *token == image_token).unwrap();
        from = start + input.rows as usize;
        assert!(prompt[start..from].iter().all(|token| *token == image_token), "an image has all its tokens");
        ImageSpan { digest: input.digest, start: start as u32, num_tokens: input.rows, first_row: 0 }
    };
    let spans = inputs.iter().map(span).collect();
    assert!(!prompt[from..].contains(&image_token), "all image tokens belong to images");
    spans
}

fn tokens(values: &Value) -> Vec<TokenId> {
    values.as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as TokenId).collect()
}

fn tensor(description: &Value, reference: &Path) -> Tensor<f32> {
    let bytes = std::fs::read(reference.join(description["file"].as_str().unwrap())).unwrap();
    let values = bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
    let shape = description["shape"].as_array().unwrap().iter();
    Tensor::new(shape.map(|size| size.as_u64().unwrap() as usize).collect(), values)
}

fn request(case: &Case) -> Request {
    // All logits are reported, so that they can be compared.
    let sampling = Sampling { logprobs: Some(case.first_logits.len() as u32), ..Sampling::greedy() };
    let stop =
        StopCriteria { stop_token_ids: Vec::new(), max_tokens: case.answer.len() as u32, min_tokens: 0 };
    Request {
        prompt: case.prompt.clone(),
        images: case.images.clone(),
        num_sequences: 1,
        beam_search: None,
        lookup: None,
        draft: None,
        sampling,
        stop,
        guide: None,
        cache_salt: 0,
        adapter: 0,
        tenant: 0,
    }
}

/// The answer to a request.
struct Answer {
    tokens: Vec<TokenId>,
    /// The log probabilities of the first token of the answer.
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

/// Starts an engine with the model of a family, steps of this many tokens, and a counter of encoded images.
fn start(folder: &Path, step_tokens: u32) -> (Engine, Arc<AtomicU32>) {
    let config = config(folder.to_owned());
    let (runner, report) = load(&config, &mut |_| {}).unwrap();
    let encoder = load_image_encoder(&config).unwrap().unwrap();
    eprintln!("{}; {}", report.kernels, encoder.report());
    let scheduler = SchedulerConfig {
        max_num_batched_tokens: step_tokens,
        max_chunk_tokens: step_tokens,
        max_itl: None,
        max_num_seqs: 8,
        max_queue: 64,
        max_model_len: 512,
        prefix_caching: true,
        kv_eviction_tokens: None,
    };
    let encoder = EncoderConfig { encoder: Box::new(encoder), cache_bytes: 1 << 20 };
    let options = EngineOptions { encoder: Some(encoder), ..EngineOptions::default() };
    let encoded = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&encoded);
    let observer = Box::new(move |report: &StepReport| {
        counter.fetch_add(report.encoded_images, Ordering::Relaxed);
    });
    let config = EngineConfig { scheduler, clock: Clock::real() };
    (Engine::start_with_options(config, Box::new(runner), options, observer).unwrap(), encoded)
}

async fn check_family(family: &str) {
    let models =
        std::env::var_os("OVFLEET_VISION_MODELS").expect("OVFLEET_VISION_MODELS is the folder of the models");
    let folder = Path::new(&models).join(family);
    let cases = cases(&folder);
    let images = |case: &Case| case.images.as_ref().map_or(0, |images| images.inputs.len() as u32);
    let total: u32 = cases.iter().map(images).sum();
    // Each prompt alone: first computed, then taken from the prefix cache without the encoder.
    let (engine, encoded) = start(&folder, 512);
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
    // All prompts together, in steps that divide prompts.
    let (engine, _) = start(&folder, 24);
    let handle = engine.handle();
    let streams: Vec<_> = cases.iter().map(|case| handle.submit(request(case)).unwrap()).collect();
    for (case, stream) in cases.iter().zip(streams) {
        check(&answer(stream, case).await, case);
    }
}

#[tokio::test]
#[ignore = "needs the models of tests/conformance/images/make_models.py"]
async fn llava_answers_like_transformers() {
    check_family("llava").await;
}

#[tokio::test]
#[ignore = "needs the models of tests/conformance/images/make_models.py"]
async fn gemma3_answers_like_transformers() {
    check_family("gemma3").await;
}

#[tokio::test]
#[ignore = "needs the models of tests/conformance/images/make_models.py"]
async fn qwen2_vl_answers_like_transformers() {
    check_family("qwen2_vl").await;
}

#[tokio::test]
#[ignore = "needs the models of tests/conformance/images/make_models.py"]
async fn qwen2_5_vl_answers_like_transformers() {
    check_family("qwen2_5_vl").await;
}

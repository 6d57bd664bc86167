//! Runs the sample model on the real runtime, with token IDs instead of text.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;
use std::path::{Path, PathBuf};

use server_engine::{
    Clock, Engine, EngineConfig, EngineOptions, Event, ModelRunner, Request, Sampling, SchedulerConfig,
    SpillConfig, SpillIdentity, StopCriteria,
};
use server_gguf::GgufFile;
use server_gguf::write::write_parts;
use server_openvino::{CacheIdentity, Config, OpenVinoRunner, load};
use server_scheduler::{Batch, BlockCopy, BlockId, ScheduledSequence, SequenceId, TokenId};

/// "What is the capital of France?" in the model's chat template.
const QUESTION: [TokenId; 37] = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182,
    2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
];
/// "The capital of France is Paris."
const ANSWER: [TokenId; 7] = [504, 3575, 282, 4649, 314, 7042, 30];

/// Properties that set the precisions of inference and of the KV cache to f32.
const EXACT: [(&str, &str); 2] = [("INFERENCE_PRECISION_HINT", "f32"), ("KV_CACHE_PRECISION", "f32")];

fn sample() -> OpenVinoRunner {
    load(&config(), &mut |_| {}).unwrap().0
}

fn config() -> Config {
    let model =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.deps/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let plugin_config = EXACT.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    Config { plugin_config, kv_cache_bytes: Some(64 << 20), ..Config::new(model) }
}

/// A sequence with its own block table.
struct Stepper {
    id: u64,
    tokens: Vec<TokenId>,
    past: usize,
    blocks: Range<u32>,
}

impl Stepper {
    fn new(id: u64, prompt: &[TokenId]) -> Self {
        // Each sequence has eight blocks.
        Self { id, tokens: prompt.to_vec(), past: 0, blocks: id as u32 * 8..id as u32 * 8 + 8 }
    }

    fn schedule(&mut self, batch: &mut Batch, count: usize) {
        let tokens = batch.tokens.len() as u32;
        batch.tokens.extend(&self.tokens[self.past..self.past + count]);
        let blocks = batch.blocks.len() as u32;
        let used = (self.past + count).div_ceil(32) as u32;
        batch.blocks.extend(self.blocks.clone().take(used as usize).map(BlockId));
        let samples = batch.samples.len() as u32;
        if self.past + count == self.tokens.len() {
            batch.samples.push(SequenceId::new(self.id, 0));
        }
        batch.sequences.push(ScheduledSequence {
            id: SequenceId::new(self.id, 0),
            computed_tokens: self.past as u32,
            tokens: tokens..batch.tokens.len() as u32,
            blocks: blocks..batch.blocks.len() as u32,
            samples: samples..batch.samples.len() as u32,
            scored_tokens: 0..0,
            num_draft_tokens: 0,
            evicted_tokens: 0,
            adapter: 0,
        });
        self.past += count;
    }
}

fn argmax(logits: &[f32]) -> TokenId {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
    best.0 as TokenId
}

/// Runs a step with at most `chunk` tokens of each sequence, and appends the most probable token to each sequence whose
/// tokens are all computed.
fn step(runner: &mut OpenVinoRunner, sequences: &mut [Stepper], chunk: usize) {
    let mut batch = Batch::default();
    for sequence in sequences.iter_mut() {
        let count = (sequence.tokens.len() - sequence.past).min(chunk);
        sequence.schedule(&mut batch, count);
    }
    let chosen: Vec<TokenId> = runner.run(&batch).unwrap().rows().map(argmax).collect();
    for (scheduled, token) in batch.sampling_sequences().zip(chosen) {
        let sequence = sequences.iter_mut().find(|one| one.id == scheduled.id.request).unwrap();
        sequence.tokens.push(token);
    }
}

#[test]
fn the_model_answers() {
    let mut runner = sample();
    assert_eq!(runner.layout().vocabulary, 49152);
    let mut sequences = [Stepper::new(0, &QUESTION)];
    for _ in 0..ANSWER.len() {
        step(&mut runner, &mut sequences, 512);
    }
    assert_eq!(sequences[0].tokens[QUESTION.len()..], ANSWER);
}

#[test]
fn the_model_in_three_parts_computes_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let whole = GgufFile::open(config().model).unwrap();
    let first = write_parts(&whole, directory.path(), "sample", 3).unwrap();
    assert!(GgufFile::open(&first).unwrap().tensors().iter().any(|tensor| tensor.part == 2));
    // Test the device's default precision and f32.
    for properties in [&EXACT[1..], &EXACT[..]] {
        let plugin_config =
            properties.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let config = Config { plugin_config, ..config() };
        let mut logits = [&config.model, &first].map(|model| {
            let mut runner = load(&Config { model: model.clone(), ..config.clone() }, &mut |_| {}).unwrap().0;
            let mut batch = Batch::default();
            Stepper::new(0, &QUESTION).schedule(&mut batch, QUESTION.len());
            let logits = runner.run(&batch).unwrap();
            logits.rows().flatten().copied().collect::<Vec<f32>>()
        });
        let [whole, parts] = &mut logits;
        assert_eq!(argmax(whole), ANSWER[0]);
        assert!(whole.iter().zip(&*parts).all(|(a, b)| a.to_bits() == b.to_bits()), "{properties:?}");
    }
}

#[test]
fn block_scores_sum_up_to_the_number_of_heads_of_all_layers() {
    const HEADS: f32 = 30.0 * 9.0;
    let mut config = config();
    for precision in ["f32", "u8", "u4"] {
        config.block_scores = true;
        config.plugin_config.push(("KV_CACHE_PRECISION".to_owned(), precision.to_owned()));
        let mut runner = load(&config, &mut |_| {}).unwrap().0;
        let long = QUESTION.repeat(5);
        let mut sequences = [Stepper::new(0, &long), Stepper::new(1, &QUESTION)];
        step(&mut runner, &mut sequences, 512);
        for _ in 0..3 {
            step(&mut runner, &mut sequences, 512);
            let (first, second) = runner.block_scores().split_at(sequences[0].past.div_ceil(32));
            assert_eq!(second.len(), sequences[1].past.div_ceil(32));
            for weights in [first, second] {
                assert!((weights.iter().sum::<f32>() - HEADS).abs() < 0.1, "{precision}: {weights:?}");
                assert!(weights.iter().all(|weight| *weight > 0.0), "{precision}: {weights:?}");
            }
        }
    }
    // This property selects the plugin's attention, which has no block scores.
    config.plugin_config.push(("KEY_CACHE_PRECISION".to_owned(), "u4".to_owned()));
    let refused = load(&config, &mut |_| {}).err().unwrap().chain();
    assert!(refused.contains("need the native attention"), "{refused}");
}

#[test]
fn chunks_mixed_batches_and_copied_blocks_do_not_change_the_answer() {
    let mut runner = sample();
    // The prompts of two sequences are computed in chunks of 10 tokens. The second prompt is shorter, so its sequence
    // begins to decode after two steps. A third sequence joins after four steps.
    let mut sequences = vec![Stepper::new(0, &QUESTION), Stepper::new(1, &QUESTION[..20])];
    for _ in 0..4 {
        step(&mut runner, &mut sequences, 10);
    }
    sequences.push(Stepper::new(2, &QUESTION));
    for _ in 0..ANSWER.len() {
        step(&mut runner, &mut sequences, 512);
    }
    assert_eq!(sequences[0].tokens[QUESTION.len()..][..7], ANSWER);
    assert_eq!(sequences[2].tokens[QUESTION.len()..], ANSWER);

    // Sequence 3 has the same prompt, and uses copies of the blocks of sequence 0.
    let mut copied = Stepper::new(3, &QUESTION);
    copied.blocks = 24..26;
    let mut batch = Batch::default();
    copied.past = QUESTION.len() - 1;
    batch.copies = vec![
        BlockCopy { from: BlockId(0), to: BlockId(24) },
        BlockCopy { from: BlockId(1), to: BlockId(25) },
    ];
    copied.schedule(&mut batch, 1);
    let logits = runner.run(&batch).unwrap();
    assert_eq!(argmax(logits.rows().next().unwrap()), ANSWER[0]);
}

#[test]
fn with_native_kernels_a_sequence_does_not_depend_on_the_others() {
    for precision in ["u8", "u4"] {
        expect_same_logits_beside_others(&native(precision));
    }
}

fn expect_same_logits_beside_others(config: &Config) {
    let (mut runner, loaded) = load(config, &mut |_| {}).unwrap();
    if !loaded.native_kernels {
        // This processor has no native projections.
        return;
    }
    // Returns the logits of the last token of a prompt. The prompt's last two tokens are computed in two steps,
    // together with other sequences, which compute their prompts in the first of these steps and decode in the second.
    let mut logits = |others: u64| {
        let prompt = |id: u64| &QUESTION[..QUESTION.len() - 3 * id as usize];
        let mut sequences: Vec<Stepper> = (0..=others).map(|id| Stepper::new(id, prompt(id))).collect();
        let mut batch = Batch::default();
        sequences[0].schedule(&mut batch, QUESTION.len() - 2);
        runner.run(&batch).unwrap();
        let mut last = Vec::new();
        for _ in 0..2 {
            let mut batch = Batch::default();
            for sequence in &mut sequences {
                let begins = sequence.id > 0 && sequence.past == 0;
                sequence.schedule(&mut batch, if begins { sequence.tokens.len() } else { 1 });
                sequence.tokens.extend((sequence.id > 0).then_some(7));
            }
            last = runner.run(&batch).unwrap().rows().next().map_or_else(Vec::new, <[f32]>::to_vec);
        }
        last
    };
    let alone = logits(0);
    let mut best: Vec<usize> = (0..alone.len()).collect();
    best.sort_by(|a, b| alone[*b].total_cmp(&alone[*a]));
    assert!(
        best[..3].contains(&(ANSWER[0] as usize)),
        "the expected token is not among the three most probable ones"
    );
    for others in [1, 4] {
        assert!(
            logits(others).iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits()),
            "logits differ next to {others} other sequences"
        );
    }
}

#[test]
fn a_batch_without_sampling_sequences_has_no_logits() {
    let mut runner = sample();
    let mut sequence = Stepper::new(0, &QUESTION);
    let mut batch = Batch::default();
    sequence.schedule(&mut batch, 5);
    assert_eq!(runner.run(&batch).unwrap().rows().count(), 0);
}

#[test]
fn compiled_models_are_cached_and_damaged_ones_are_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let answer = |compiles: bool| {
        let cache_dir = Some(directory.path().to_owned());
        let config = Config { cache_dir, ..config() };
        let mut stages = Vec::new();
        let mut runner = load(&config, &mut |stage| stages.push(stage.name)).unwrap().0;
        assert_eq!(stages.contains(&"compile"), compiles, "{stages:?}");
        let mut batch = Batch::default();
        Stepper::new(0, &QUESTION).schedule(&mut batch, QUESTION.len());
        runner.run(&batch).unwrap().rows().flatten().copied().collect::<Vec<f32>>()
    };
    let cold = answer(true);
    assert_eq!(answer(false), cold);
    let is_compiled = |path: &PathBuf| path.to_str().unwrap().contains("compiled-");
    // The cache directory contains only the private directory.
    let private = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
    let mut files = std::fs::read_dir(private).unwrap().map(|entry| entry.unwrap().path());
    let file = files.find(is_compiled).unwrap();
    let length = file.metadata().unwrap().len();
    std::fs::File::options().write(true).open(&file).unwrap().set_len(length / 2).unwrap();
    assert_eq!(answer(true), cold);
    assert_eq!(answer(false), cold, "the model is cached again");
}

#[test]
fn a_block_that_is_read_and_written_elsewhere_is_identical() {
    let [exact, quantized] = [config(), native("u4")].map(|config| load(&config, &mut |_| {}).unwrap().0);
    // The size of a u4 block is less than a fifth of that of an f32 block.
    assert!(quantized.layout().block_bytes * 5 < exact.layout().block_bytes, "{:?}", quantized.layout());
    // Check the answer only in f32, because the logits of the two most likely tokens are so close that rounding to u4
    // may change their order.
    assert_eq!(argmax(&expect_identical_copies(exact)), ANSWER[0]);
    expect_identical_copies(quantized);
}

/// Asserts that a step computes identical logits from copied blocks. Returns the logits after the question.
fn expect_identical_copies(mut runner: OpenVinoRunner) -> Vec<f32> {
    let mut sequences = [Stepper::new(0, &QUESTION)];
    step(&mut runner, &mut sequences, 512);
    let last = |runner: &mut OpenVinoRunner, blocks: Range<u32>| {
        let mut sequence = Stepper::new(0, &QUESTION);
        (sequence.past, sequence.blocks) = (QUESTION.len() - 1, blocks);
        let mut batch = Batch::default();
        sequence.schedule(&mut batch, 1);
        runner.run(&batch).unwrap().rows().next().unwrap().to_vec()
    };
    let mut bytes = vec![0; 2 * runner.layout().block_bytes as usize];
    let (first, second) = bytes.split_at_mut(runner.layout().block_bytes as usize);
    runner.read_block(BlockId(0), first).unwrap();
    runner.read_block(BlockId(1), second).unwrap();
    let expected = last(&mut runner, 0..2);
    runner.write_block(BlockId(25), second).unwrap();
    runner.write_block(BlockId(24), first).unwrap();
    assert_eq!(last(&mut runner, 24..26), expected);
    // Different blocks produce a different result.
    assert_ne!(last(&mut runner, 30..32), expected);
    expected
}

/// Starts an engine with a small cache. If `directory` is set, the engine spills evicted blocks to it.
async fn start(directory: Option<&Path>, properties: &[(&str, &str)]) -> Engine {
    let plugin_config: Vec<_> =
        properties.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let is_u4 = properties.contains(&("KV_CACHE_PRECISION", "u4"));
    let kv_cache_bytes = Some(if is_u4 { 4 << 20 } else { 8 << 20 });
    let (runner, loaded) = load(&Config { plugin_config, kv_cache_bytes, ..config() }, &mut |_| {}).unwrap();
    assert!(runner.layout().blocks_total < 24, "{:?}", runner.layout());
    let spill = directory.map(|directory| {
        let CacheIdentity { description, files } = loaded.cache_identity;
        let identity = SpillIdentity { description, files, adapters: Vec::new() };
        SpillConfig { directory: directory.to_owned(), bytes_max: 1 << 30, identity }
    });
    let extras = EngineOptions { spill, ..EngineOptions::default() };
    let engine =
        Engine::start_with_options(engine_config(), Box::new(runner), extras, Box::new(|_| {})).unwrap();
    while engine.handle().spill_stats().is_some_and(|spill| !spill.is_open()) {
        std::thread::yield_now();
    }
    engine
}

fn engine_config() -> EngineConfig {
    EngineConfig {
        scheduler: SchedulerConfig {
            max_num_batched_tokens: 512,
            max_chunk_tokens: 128,
            max_itl: None,
            max_num_seqs: 4,
            max_queue: 16,
            max_model_len: 256,
            prefix_caching: true,
            kv_eviction_tokens: None,
        },
        clock: Clock::real(),
    }
}

fn request(prompt: &[TokenId]) -> Request {
    let stop = StopCriteria { stop_token_ids: Vec::new(), max_tokens: 12, min_tokens: 0 };
    Request::new(prompt.to_vec(), Sampling::greedy(), stop)
}

/// Returns the generated tokens, and the number of cached tokens of the prompt.
async fn ask(engine: &Engine, prompt: &[TokenId]) -> (Vec<TokenId>, u32) {
    let mut stream = engine.handle().submit(request(prompt)).unwrap();
    let (mut tokens, mut cached) = (Vec::new(), 0);
    while let Some(event) = stream.next().await {
        match event {
            Event::Started { cached_tokens } => cached = cached_tokens,
            Event::Token { token, .. } => tokens.push(token),
            Event::Failed(failure) => panic!("{failure:?}"),
            _ => {}
        }
    }
    (tokens, cached)
}

/// Sends enough other requests to evict the blocks of earlier ones.
async fn evict(engine: &Engine) {
    for first in 1000..1004 {
        let mut prompt = long();
        prompt[0] = first;
        ask(engine, &prompt).await;
    }
}

fn long() -> Vec<TokenId> {
    (0..5).flat_map(|_| QUESTION).chain([504]).collect()
}

#[tokio::test]
async fn a_restored_prefix_gives_the_same_answer_as_a_cached_one_even_after_a_restart() {
    for precision in ["u8", "u4"] {
        expect_restored_prefix([("KV_CACHE_PRECISION", precision)]).await;
    }
}

async fn expect_restored_prefix(properties: [(&str, &str); 1]) {
    let engine = start(None, &properties).await;
    assert_eq!(ask(&engine, &long()).await.1, 0);
    let stayed = ask(&engine, &long()).await;
    evict(&engine).await;
    assert_eq!(ask(&engine, &long()).await.1, 0, "evicted blocks are lost without a directory");
    engine.shutdown().unwrap();
    assert_eq!(stayed.1, 160);

    let directory = tempfile::tempdir().unwrap();
    let engine = start(Some(directory.path()), &properties).await;
    assert_eq!(ask(&engine, &long()).await.1, 0);
    evict(&engine).await;
    assert_eq!(ask(&engine, &long()).await, stayed);
    let handle = engine.handle();
    let read_back = handle.spill_stats().unwrap().restored();
    assert_eq!(read_back, 5);
    engine.shutdown().unwrap();

    let engine = start(Some(directory.path()), &properties).await;
    assert_eq!(ask(&engine, &long()).await, stayed);
    engine.shutdown().unwrap();

    let engine = start(Some(directory.path()), &[properties[0], ("INFERENCE_NUM_THREADS", "1")]).await;
    assert_eq!(ask(&engine, &long()).await.1, 0, "the blocks were computed with another configuration");
    engine.shutdown().unwrap();
}

/// The native operations read f32 and bf16. If f16 is configured, a model whose kernels are all native is compiled in
/// f32.
#[test]
fn a_native_model_with_f16_configured_computes_nearly_the_logits_of_f32() {
    let logits = |properties: &[(&str, &str)]| {
        let plugin_config =
            properties.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let config = Config { plugin_config, ..config() };
        let mut runner = load(&config, &mut |_| {}).unwrap().0;
        let mut batch = Batch::default();
        Stepper::new(0, &QUESTION).schedule(&mut batch, QUESTION.len());
        runner.run(&batch).unwrap().rows().flatten().copied().collect::<Vec<f32>>()
    };
    let exact = logits(&EXACT);
    let found = logits(&[("INFERENCE_PRECISION_HINT", "f16")]);
    let off: f32 = found.iter().zip(&exact).map(|(found, exact)| (found - exact).abs()).sum();
    let mean = off / exact.len() as f32;
    assert!(mean < 0.6, "the mean difference is {mean}");
}

/// The configuration of a model whose kernels are all native if the processor has native projections: the defaults,
/// with a quantized cache.
fn native(kv_cache_precision: &str) -> Config {
    let plugin_config = vec![("KV_CACHE_PRECISION".to_owned(), kv_cache_precision.to_owned())];
    Config { plugin_config, ..config() }
}

#[test]
fn with_native_kernels_logits_do_not_depend_on_the_chunks_of_a_prompt() {
    for precision in ["u8", "u4"] {
        expect_same_logits_in_chunks(&native(precision));
    }
}

fn expect_same_logits_in_chunks(config: &Config) {
    let (mut runner, loaded) = load(config, &mut |_| {}).unwrap();
    if !loaded.native_kernels {
        // This processor has no native projections.
        return;
    }
    // Returns the logits of the last token of a prompt, and those of the token that follows the prompt.
    let mut logits = |chunks: &mut dyn FnMut(usize) -> usize, others: u64| {
        let mut first = Stepper::new(0, &long());
        let mut others: Vec<Stepper> =
            (1..=others).map(|id| Stepper::new(id, &long()[id as usize..])).collect();
        let mut rows = Vec::new();
        first.tokens.push(7);
        while first.past < first.tokens.len() {
            let prompt = first.tokens.len() - 1;
            let count = if first.past == prompt { 1 } else { chunks(first.past).min(prompt - first.past) };
            let mut batch = Batch::default();
            first.schedule(&mut batch, count);
            // Compare the logits of the last token of the prompt as well.
            if first.past == prompt {
                batch.samples.push(SequenceId::new(0, 0));
                batch.sequences[0].samples.end = 1;
            }
            let is_sampled = first.past >= prompt;
            for other in &mut others {
                let count = (other.tokens.len() - other.past).min(1 + other.past % 30);
                if count > 0 {
                    other.schedule(&mut batch, count);
                }
            }
            let logits = runner.run(&batch).unwrap();
            if is_sampled {
                rows.extend(logits.rows().next().unwrap().iter().map(|it| it.to_bits()));
            }
        }
        rows
    };
    let whole = logits(&mut |_| usize::MAX, 0);
    let vocabulary = whole.len() / 2;
    for (chunk, others) in [(64, 0), (33, 3), (7, 0), (1, 2)] {
        let found = logits(&mut |_| chunk, others);
        let same = found.iter().zip(&whole).filter(|(found, expected)| found == expected).count();
        assert_eq!(
            (same, found.len()),
            (2 * vocabulary, 2 * vocabulary),
            "chunks of {chunk} tokens, {others} other sequences"
        );
    }
    // Compute a long chunk of the prompt, and then single tokens, as in a decode.
    assert!(logits(&mut |past| if past == 0 { 130 } else { 1 }, 1) == whole, "single tokens after a chunk");
}

/// Submits requests together, and returns their generated tokens and the total number of cached tokens of their
/// prompts.
async fn ask_together(engine: &Engine, requests: &[Request]) -> (Vec<Vec<TokenId>>, u32) {
    let mut streams: Vec<_> =
        requests.iter().map(|request| engine.handle().submit(request.clone()).unwrap()).collect();
    let (mut answers, mut cached) = (Vec::new(), 0);
    for stream in &mut streams {
        let mut tokens = Vec::new();
        while let Some(event) = stream.next().await {
            match event {
                Event::Started { cached_tokens } => cached += cached_tokens,
                Event::Token { token, .. } => tokens.push(token),
                Event::Failed(failure) => panic!("{failure:?}"),
                _ => {}
            }
        }
        answers.push(tokens);
    }
    (answers, cached)
}

#[tokio::test]
async fn with_native_kernels_answers_do_not_depend_on_batch_chunks_or_prefix_cache() {
    for precision in ["u8", "u4"] {
        expect_same_answers(&native(precision)).await;
    }
}

async fn expect_same_answers(native: &Config) {
    // Prompts of different lengths. Some of them begin with the same blocks.
    let prompt = |index: usize| -> Vec<TokenId> {
        let shift = index % 4;
        let length = 40 + index * 4;
        long().into_iter().cycle().skip(shift).take(length).chain([504 + index as TokenId % 3]).collect()
    };
    let requests: Vec<Request> = (0..16)
        .map(|index| Request {
            sampling: match index % 2 {
                0 => Sampling::greedy(),
                _ => Sampling { temperature: 0.9, seed: index as u64, ..Sampling::greedy() },
            },
            ..request(&prompt(index))
        })
        .collect();
    let engine = async |max_chunk_tokens, max_num_seqs, prefix_caching| {
        let (runner, loaded) = load(native, &mut |_| {}).unwrap();
        let EngineConfig { scheduler, clock } = engine_config();
        let scheduler = SchedulerConfig {
            max_num_batched_tokens: 256,
            max_chunk_tokens,
            max_num_seqs,
            max_queue: 64,
            prefix_caching,
            ..scheduler
        };
        let config = EngineConfig { scheduler, clock };
        let engine =
            Engine::start_with_options(config, Box::new(runner), EngineOptions::default(), Box::new(|_| {}));
        loaded.native_kernels.then_some(engine.unwrap())
    };
    let Some(alone) = engine(256, 1, false).await else {
        // This processor has no native projections.
        return;
    };
    let mut expected = Vec::new();
    for request in &requests {
        let (mut answers, cached) = ask_together(&alone, std::slice::from_ref(request)).await;
        assert_eq!(cached, 0);
        expected.append(&mut answers);
    }
    alone.shutdown().unwrap();
    let in_batch = engine(19, 16, false).await.unwrap();
    assert_eq!(
        ask_together(&in_batch, &requests).await,
        (expected.clone(), 0),
        "a batch of 16, in chunks of 19"
    );
    in_batch.shutdown().unwrap();
    let cached = engine(256, 16, true).await.unwrap();
    assert_eq!(ask_together(&cached, &requests).await.0, expected, "a batch that fills the prefix cache");
    let (answers, cached_tokens) = ask_together(&cached, &requests).await;
    assert_eq!(answers, expected, "a batch from the prefix cache");
    assert!(cached_tokens > 16 * 32, "{cached_tokens}");
    cached.shutdown().unwrap();
}

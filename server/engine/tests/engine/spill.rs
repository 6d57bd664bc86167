//! Tests evicted blocks on disk: they are restored, even after a restart, and never with wrong content.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use server_engine::sim::{SimCosts, expected_tokens};
use server_engine::{
    DraftModelParams, DraftRunner, Engine, EngineHandle, EngineOptions, Request, SleepLevel, SpillConfig,
    SpillIdentity, SpillStats, StartError, TokenId,
};
use tokio::task::JoinSet;

use crate::damaged_spill::until;
use crate::support::{Outcome, Setup, VOCABULARY, outcome, prompt, request, settled};

/// Number of tokens in each prompt; a block has 8.
const PROMPT_TOKENS: u32 = 100;

/// The size of the file of a block, in bytes.
const BLOCK_BYTES: u64 = 48 + 8 * 12;

fn config(directory: &Path, model: &str) -> SpillConfig {
    let identity = SpillIdentity { description: model.to_owned(), files: Vec::new(), adapters: Vec::new() };
    SpillConfig { directory: directory.to_owned(), bytes_max: 1 << 20, identity }
}

fn start(config: &SpillConfig) -> Engine {
    let extras = EngineOptions { spill: Some(config.clone()), ..EngineOptions::default() };
    Setup::new(32).start_with(extras).unwrap()
}

/// Sends a request, and compares the answer with that of a model without a cache.
async fn ask(handle: &EngineHandle, which: u32) -> Outcome {
    let prompt = prompt(which, PROMPT_TOKENS);
    let outcome = outcome(handle.submit(request(&prompt, 9)).unwrap()).await;
    assert_eq!(outcome.failure, None);
    assert_eq!(outcome.tokens, [expected_tokens(&prompt, 9, VOCABULARY)], "prompt {which}");
    outcome
}

/// Sends eight prompts. Afterwards, the cache contains about two of them, and the disk contains the others.
async fn fill(handle: &EngineHandle) {
    until(handle, SpillStats::is_open).await;
    for which in 0..8 {
        ask(handle, which).await;
        settled(handle).await;
        until(handle, |spill| spill.queued() == 0).await;
    }
    // A prompt and its answer together occupy 13 blocks, and the cache has room for two prompts with their answers.
    let spill = handle.spill_stats().unwrap();
    assert!(spill.written() >= 5 * 13 && spill.dropped() == 0, "{spill:?}");
}

/// Starts an engine, and fills its cache and the directory.
async fn filled(directory: &Path) -> (Engine, EngineHandle) {
    let engine = start(&config(directory, "a"));
    let handle = engine.handle();
    fill(&handle).await;
    (engine, handle)
}

/// Returns the complete files of the stored blocks.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries =
        |path: &Path| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let directories = entries(directory).into_iter().filter(|path| path.is_dir());
    directories
        .flat_map(|directory| entries(&directory))
        .filter(|path| path.extension().unwrap() == "kv")
        .collect()
}

#[tokio::test]
async fn an_evicted_prefix_is_restored_instead_of_computed() {
    let directory = tempfile::tempdir().unwrap();
    let (engine, handle) = filled(directory.path()).await;
    let outcome = ask(&handle, 0).await;
    assert_eq!(outcome.cached_tokens, Some(96));
    let spill = handle.spill_stats().unwrap();
    assert_eq!((spill.restored(), spill.unreadable()), (12, 0));
    settled(&handle).await;
    engine.shutdown().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_restores_return_the_right_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let (engine, handle) = filled(directory.path()).await;
    let mut rng = StdRng::seed_from_u64(5);
    for round in 0..10 {
        let mut tasks = JoinSet::new();
        for _ in 0..40 {
            let handle = handle.clone();
            let prompt = prompt(rng.random_range(0..9), rng.random_range(20..150));
            let request = Request { cache_salt: rng.random_range(0..2), ..request(&prompt, 9) };
            let is_dropped = rng.random_range(0..5) == 0;
            tasks.spawn(async move {
                let stream = handle.submit(request).unwrap();
                if is_dropped {
                    return;
                }
                let outcome = outcome(stream).await;
                assert_eq!(outcome.failure, None);
                assert_eq!(outcome.tokens, [expected_tokens(&prompt, 9, VOCABULARY)]);
            });
        }
        tasks.join_all().await;
        settled(&handle).await;
        if round % 3 == 2 {
            handle.sleep(SleepLevel::Cache).await.unwrap();
        }
    }
    let spill = handle.spill_stats().unwrap();
    assert!(spill.restored() > 100, "{spill:?}");
    engine.shutdown().unwrap();
}

#[tokio::test]
async fn stored_blocks_outlive_the_engine_but_not_the_model() {
    let directory = tempfile::tempdir().unwrap();
    let (engine, _) = filled(directory.path()).await;
    engine.shutdown().unwrap();
    let num_files = files(directory.path()).len();
    assert!(num_files >= 5 * 13, "{num_files}");

    let engine = start(&config(directory.path(), "a"));
    let handle = engine.handle();
    until(&handle, SpillStats::is_open).await;
    assert_eq!(handle.spill_stats().unwrap().blocks() as usize, num_files);
    assert_eq!(ask(&handle, 0).await.cached_tokens, Some(96));
    engine.shutdown().unwrap();

    let engine = start(&config(directory.path(), "another"));
    let handle = engine.handle();
    until(&handle, SpillStats::is_open).await;
    assert_eq!(files(directory.path()).len(), 0, "blocks of another model are removed");
    assert_eq!(ask(&handle, 0).await.cached_tokens, Some(0));
    settled(&handle).await;
    assert_eq!(handle.spill_stats().unwrap().restored(), 0);
    engine.shutdown().unwrap();
}

/// Stores blocks, damages them, sends the first prompt again, and checks that its answer is correct.
async fn with_spoilt(spoil: impl Fn(&Path)) {
    let directory = tempfile::tempdir().unwrap();
    let (engine, handle) = filled(directory.path()).await;
    files(directory.path()).iter().for_each(|file| spoil(file));
    let outcome = ask(&handle, 0).await;
    assert_eq!(outcome.cached_tokens, Some(0));
    let spill = handle.spill_stats().unwrap();
    assert_eq!((spill.restored(), spill.unreadable()), (0, 1));
    settled(&handle).await;
    engine.shutdown().unwrap();
}

#[tokio::test]
async fn a_damaged_block_is_computed() {
    with_spoilt(|file| {
        let mut bytes = fs::read(file).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(file, bytes).unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_block_under_the_name_of_another_is_computed() {
    with_spoilt(|file| {
        let mut bytes = fs::read(file).unwrap();
        bytes[8] ^= 1;
        fs::write(file, bytes).unwrap();
    })
    .await;
}

/// The file of a block contains the valid content of another block.
#[tokio::test]
async fn a_block_whose_file_has_the_content_of_another_is_computed() {
    let directory = tempfile::tempdir().unwrap();
    let (engine, handle) = filled(directory.path()).await;
    // Each file retains the key that matches its name, but has the checksum and the content of another block.
    const KEY_END: usize = 40;
    let files = files(directory.path());
    let contents: Vec<_> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    for (number, file) in files.iter().enumerate() {
        let other = &contents[(number + 1) % contents.len()];
        fs::write(file, [&contents[number][..KEY_END], &other[KEY_END..]].concat()).unwrap();
    }
    assert_eq!(ask(&handle, 0).await.cached_tokens, Some(0));
    let spill = handle.spill_stats().unwrap();
    assert_eq!((spill.restored(), spill.unreadable()), (0, 1));
    settled(&handle).await;
    engine.shutdown().unwrap();
}

#[tokio::test]
async fn a_truncated_block_is_computed() {
    with_spoilt(|file| fs::File::options().write(true).open(file).unwrap().set_len(60).unwrap()).await;
}

#[tokio::test]
async fn a_missing_block_is_computed() {
    with_spoilt(|file| fs::remove_file(file).unwrap()).await;
}

/// Replaces a file with a pipe. Opening the pipe for reading does not return until another thread opens it for writing.
fn replace_with_pipe(file: &Path) {
    fs::remove_file(file).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(file).status().unwrap().success());
}

#[tokio::test]
async fn an_overdue_block_is_computed() {
    let directory = tempfile::tempdir().unwrap();
    let (engine, handle) = filled(directory.path()).await;
    let pipes = files(directory.path());
    for file in &pipes {
        replace_with_pipe(file);
    }
    assert_eq!(ask(&handle, 0).await.cached_tokens, Some(0));
    settled(&handle).await;
    assert_eq!(handle.spill_stats().unwrap().restored(), 0);
    // Neither the second request nor the shutdown waits for the reader.
    assert_eq!(ask(&handle, 1).await.cached_tokens, Some(0));
    engine.shutdown().unwrap();
    for file in pipes {
        drop(fs::File::options().read(true).write(true).open(file));
    }
}

/// A step takes longer than the restores of two prompts may take. In the meantime, the reader waits for the engine.
#[tokio::test]
async fn a_step_that_is_longer_than_a_restore_does_not_pause_restores() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(directory.path(), "a");
    let engine = start(&config);
    fill(&engine.handle()).await;
    engine.shutdown().unwrap();

    let mut setup = Setup::new(32);
    // Computing the 96 restored tokens of a prompt would take 1.92 s.
    let [prefill_token, decode_token] = [20, 3000].map(Duration::from_millis);
    setup.sim.costs = SimCosts { prefill_token, decode_token, ..SimCosts::default() };
    let options = EngineOptions { spill: Some(config), ..EngineOptions::default() };
    let (engine, gate) = setup.start_gated_with(options);
    let handle = engine.handle();
    until(&handle, SpillStats::is_open).await;
    let pipes = files(directory.path());
    let (opened, reads) = mpsc::channel();
    let disk: Vec<_> = pipes
        .iter()
        .map(|file| {
            let (content, file, opened) = (fs::read(file).unwrap(), file.clone(), opened.clone());
            replace_with_pipe(&file);
            thread::spawn(move || {
                let mut pipe = fs::File::options().write(true).open(file).unwrap();
                // These calls fail if the test has ended or the reader has closed the file.
                let _ = opened.send(());
                let _ = pipe.write_all(&content);
            })
        })
        .collect();

    let decoding = handle.submit(request(&prompt(99, 8), 20)).unwrap();
    gate.arrive();
    gate.pass();
    gate.arrive();
    let streams = [0, 1].map(|which| handle.submit(request(&prompt(which, PROMPT_TOKENS), 1)).unwrap());
    gate.pass();
    gate.arrive();
    // The reader has opened 17 files, so it has delivered 16 blocks: the twelve of the first prompt and four of the
    // second.
    (0..17).for_each(|_| reads.recv().unwrap());
    drop(decoding);
    gate.pass();
    drop(gate.release());
    for (stream, cached_tokens) in streams.into_iter().zip([96, 32]) {
        assert_eq!(outcome(stream).await.cached_tokens, Some(cached_tokens));
    }
    assert_eq!(ask(&handle, 2).await.cached_tokens, Some(96), "restores are not paused");
    settled(&handle).await;
    engine.shutdown().unwrap();
    for (file, thread) in pipes.iter().zip(disk) {
        let _pipe = fs::File::options().read(true).write(true).open(file).unwrap();
        thread.join().unwrap();
    }
}

#[tokio::test]
async fn a_directory_that_cannot_be_created_costs_only_the_stored_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "in the way").unwrap();
    let engine = start(&config(&file, "a"));
    let handle = engine.handle();
    for which in (0..8).chain(0..8) {
        ask(&handle, which).await;
    }
    let spill = handle.spill_stats().unwrap();
    assert_eq!((spill.is_open(), spill.written(), spill.blocks()), (false, 0, 0));
    assert!(spill.dropped() > 5 * 13, "{spill:?}");
    settled(&handle).await;
    engine.shutdown().unwrap();
}

#[tokio::test]
async fn a_directory_that_cannot_be_written_costs_only_the_stored_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let engine = start(&config(directory.path(), "a"));
    let handle = engine.handle();
    until(&handle, SpillStats::is_open).await;
    for entry in fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            fs::remove_dir_all(&entry).unwrap();
            fs::write(&entry, "in the way").unwrap();
        }
    }
    for which in 0..8 {
        ask(&handle, which).await;
    }
    until(&handle, |spill| spill.dropped() >= 5 * 13).await;
    assert_eq!((ask(&handle, 0).await.cached_tokens, handle.spill_stats().unwrap().written()), (Some(0), 0));
    settled(&handle).await;
    engine.shutdown().unwrap();
}

/// Returns the total size of all block files in bytes, including incomplete ones.
fn bytes(directory: &Path) -> u64 {
    let sizes = |path: PathBuf| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().metadata());
    let directories =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    // Files may be removed in the meantime.
    directories.flat_map(sizes).filter_map(Result::ok).map(|metadata| metadata.len()).sum()
}

#[tokio::test]
async fn the_size_limit_is_not_exceeded() {
    let directory = tempfile::tempdir().unwrap();
    let few = 20 * BLOCK_BYTES + 5;
    for bytes_max in [few, 60 * BLOCK_BYTES, few] {
        // The last run starts with more bytes on disk than the limit allows.
        let engine = start(&SpillConfig { bytes_max, ..config(directory.path(), "a") });
        let handle = engine.handle();
        fill(&handle).await;
        for which in 0..8 {
            ask(&handle, which).await;
            assert!(handle.spill_stats().unwrap().bytes() <= bytes_max);
            assert!(bytes(directory.path()) <= bytes_max);
        }
        settled(&handle).await;
        until(&handle, |spill| spill.queued() == 0).await;
        // The last removal may not have been completed yet.
        until(&handle, |spill| bytes(directory.path()) == spill.bytes()).await;
        engine.shutdown().unwrap();
        assert_eq!(
            bytes(directory.path()),
            bytes_max / BLOCK_BYTES * BLOCK_BYTES,
            "the directory is filled up to the limit"
        );
    }
}

#[tokio::test]
async fn a_limit_below_one_block_stores_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let engine = start(&SpillConfig { bytes_max: BLOCK_BYTES - 1, ..config(directory.path(), "a") });
    let handle = engine.handle();
    for which in 0..8 {
        ask(&handle, which).await;
    }
    engine.shutdown().unwrap();
    assert_eq!(bytes(directory.path()), 0);
}

#[tokio::test]
async fn two_engines_do_not_share_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(directory.path(), "a");
    let first = start(&config);
    fill(&first.handle()).await;
    let second = start(&config);
    assert_eq!(ask(&second.handle(), 0).await.cached_tokens, Some(0));
    first.shutdown().unwrap();
    let handle = second.handle();
    until(&handle, |spill| spill.blocks() >= 5 * 13).await;
    assert_eq!(ask(&handle, 1).await.cached_tokens, Some(96));
    second.shutdown().unwrap();
}

#[tokio::test]
async fn blocks_with_different_salts_are_separate_on_disk() {
    let directory = tempfile::tempdir().unwrap();
    let (engine, handle) = filled(directory.path()).await;
    let prompt: Vec<TokenId> = prompt(0, PROMPT_TOKENS);
    let mut salted = request(&prompt, 9);
    salted.cache_salt = 7;
    assert_eq!(outcome(handle.submit(salted).unwrap()).await.cached_tokens, Some(0));
    engine.shutdown().unwrap();
}

#[tokio::test]
async fn cached_blocks_are_stored_when_the_engine_ends() {
    let directory = tempfile::tempdir().unwrap();
    for cached in [0, 96] {
        let engine = start(&config(directory.path(), "a"));
        let handle = engine.handle();
        until(&handle, SpillStats::is_open).await;
        assert_eq!(ask(&handle, 0).await.cached_tokens, Some(cached));
        engine.shutdown().unwrap();
    }
}

#[tokio::test]
async fn cached_blocks_are_stored_when_the_engine_sleeps() {
    let directory = tempfile::tempdir().unwrap();
    let (engine, handle) = filled(directory.path()).await;
    for level in [SleepLevel::Cache, SleepLevel::Model] {
        settled(&handle).await;
        handle.sleep(level).await.unwrap();
        until(&handle, |spill| spill.queued() == 0).await;
        for which in [7, 0, 7, 3] {
            assert_eq!(ask(&handle, which).await.cached_tokens, Some(96), "prompt {which} after {level:?}");
        }
    }
    settled(&handle).await;
    engine.shutdown().unwrap();
}

#[tokio::test]
async fn blocks_are_not_used_if_the_model_changes_during_sleep() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    fs::write(&model, "one").unwrap();
    let spill = directory.path().join("spill");
    let mut config = config(&spill, "a");
    config.identity.files = vec![model.clone()];
    let engine = start(&config);
    let handle = engine.handle();
    fill(&handle).await;
    handle.sleep(SleepLevel::Cache).await.unwrap();
    fs::write(&model, "another").unwrap();
    assert_eq!(ask(&handle, 0).await.cached_tokens, Some(96), "the model is not loaded again");
    settled(&handle).await;
    handle.sleep(SleepLevel::Model).await.unwrap();
    for which in (0..8).chain(0..8) {
        assert_eq!(ask(&handle, which).await.cached_tokens, Some(0));
    }
    settled(&handle).await;
    engine.shutdown().unwrap();

    let engine = start(&config);
    let handle = engine.handle();
    until(&handle, SpillStats::is_open).await;
    assert_eq!(handle.spill_stats().unwrap().blocks(), 0);
    engine.shutdown().unwrap();
}

fn start_adapted(directory: &Path, adapters: &[u64]) -> Result<Engine, StartError> {
    let mut spill = config(directory, "a");
    spill.identity.adapters = adapters.to_vec();
    let extras = EngineOptions { spill: Some(spill), ..EngineOptions::default() };
    Setup { adapters: 2, ..Setup::new(32) }.start_with(extras)
}

#[tokio::test]
async fn stored_blocks_identify_adapters_by_content_and_not_by_number() {
    let directory = tempfile::tempdir().unwrap();
    // Each entry lists the adapters at a start, and the numbers of cached tokens of three requests: without an adapter,
    // with the first adapter, and with the second one.
    let starts: [(&[u64], [u32; 3]); 4] = [
        (&[11, 22], [0, 0, 0]),
        (&[33, 44], [96, 0, 0]),
        (&[22, 11], [96, 96, 96]),
        (&[44, 55], [96, 96, 0]),
    ];
    for (adapters, cached) in starts {
        let engine = start_adapted(directory.path(), adapters).unwrap();
        let handle = engine.handle();
        until(&handle, SpillStats::is_open).await;
        for (adapter, cached) in (0..).zip(cached) {
            let request = Request { adapter, ..request(&prompt(0, PROMPT_TOKENS), 1) };
            let found = outcome(handle.submit(request).unwrap()).await.cached_tokens;
            assert_eq!(found, Some(cached), "adapter {adapter} of {adapters:?}");
        }
        settled(&handle).await;
        engine.shutdown().unwrap();
    }
    assert!(matches!(
        start_adapted(directory.path(), &[11]),
        Err(StartError::UnknownAdapters { known: 1, adapters: 2 })
    ));
}

#[tokio::test]
async fn a_draft_model_proposes_after_restored_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let setup = Setup::new(32);
    let draft = DraftRunner { runner: Box::new(setup.runner()), max_model_len: u32::MAX };
    let extras = EngineOptions {
        draft: Some(draft),
        spill: Some(config(directory.path(), "a")),
        ..EngineOptions::default()
    };
    let engine = setup.start_with(extras).unwrap();
    let handle = engine.handle();
    fill(&handle).await;
    for which in [0, 1, 0, 5] {
        let prompt = prompt(which, PROMPT_TOKENS);
        let rule = Some(DraftModelParams { num_draft_tokens: 4, confidence_threshold: 0.0 });
        let drafted = Request { draft: rule, ..request(&prompt, 30) };
        let outcome = outcome(handle.submit(drafted).unwrap()).await;
        assert_eq!(outcome.tokens, [expected_tokens(&prompt, 30, VOCABULARY)]);
        assert_eq!(outcome.cached_tokens, Some(96));
        settled(&handle).await;
        until(&handle, |spill| spill.queued() == 0).await;
    }
    assert!(handle.spill_stats().unwrap().restored() >= 12);
    engine.shutdown().unwrap();
}

#[tokio::test]
async fn spilling_requires_prefix_caching() {
    let directory = tempfile::tempdir().unwrap();
    let mut setup = Setup::new(32);
    setup.engine.scheduler.prefix_caching = false;
    let extras = EngineOptions { spill: Some(config(directory.path(), "a")), ..EngineOptions::default() };
    assert!(matches!(setup.start_with(extras), Err(StartError::NothingToSpill)));
}

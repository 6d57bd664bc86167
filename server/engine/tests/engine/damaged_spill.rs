//! Tests an engine with arbitrary bytes in the files of evicted blocks: it restores only files that are unchanged, and
//! its output equals that of a model without a cache. `make fuzz` runs `check` for a configurable time, and
//! `mutated_spill.rs` runs it for a few seconds.

use std::cell::OnceCell;
use std::fs;
use std::path::{Path, PathBuf};

use server_engine::sim::expected_tokens;
use server_engine::{
    Engine, EngineHandle, EngineOptions, SleepLevel, SpillConfig, SpillIdentity, SpillStats, TokenId,
};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

use crate::support::{Setup, VOCABULARY, outcome, prompt, request, settled};

/// Number of tokens in a block.
const BLOCK_TOKENS: usize = 8;
/// Number of blocks of the prompt that can be restored. One more token is always computed.
const BLOCKS: usize = 4;
/// Size of the header of a file, in bytes.
const HEADER_BYTES: usize = 48;
/// Offset of the tokens in the content of a block, in bytes.
const SLOT_BYTES: usize = 8 * BLOCK_TOKENS;
/// Number of generated tokens.
const ANSWER_TOKENS: u32 = 3;

/// A directory for evicted blocks, and the paths and the original content of the files that contain the blocks of one
/// prompt, in order.
struct SpilledBlocks {
    runtime: Runtime,
    directory: TempDir,
    files: Vec<(PathBuf, Vec<u8>)>,
}

thread_local! {
    static SPILLED: OnceCell<SpilledBlocks> = const { OnceCell::new() };
}

/// Writes the files in `input`, lets an engine restore blocks from them, and panics if a guarantee is violated.
pub(crate) fn check(input: &[u8]) {
    SPILLED.with(|spilled| spilled.get_or_init(SpilledBlocks::new).check(input));
}

/// Returns an input that leaves the files unchanged.
pub(crate) fn intact() -> Vec<u8> {
    SPILLED.with(|spilled| {
        let mut input = Vec::new();
        for (_, content) in &spilled.get_or_init(SpilledBlocks::new).files {
            input.extend_from_slice(&(content.len() as u16).to_le_bytes());
            input.extend_from_slice(content);
        }
        input
    })
}

/// Splits an input into the contents of the files, each preceded by its length in two bytes. The last content may be
/// shorter than its length says.
fn parts(mut input: &[u8]) -> Vec<&[u8]> {
    let mut parts = Vec::new();
    while let (Some((length, rest)), true) = (input.split_first_chunk(), parts.len() < BLOCKS) {
        let (part, rest) = rest.split_at(usize::from(u16::from_le_bytes(*length)).min(rest.len()));
        parts.push(part);
        input = rest;
    }
    parts
}

impl SpilledBlocks {
    fn new() -> Self {
        let runtime = Builder::new_current_thread().build().expect("a runtime");
        let directory = TempDir::new().expect("a temporary directory");
        let engine = start(directory.path());
        let handle = engine.handle();
        runtime.block_on(async {
            answer(&handle).await;
            settled(&handle).await;
            handle.sleep(SleepLevel::Cache).await.expect("the engine sleeps");
            until(&handle, |spill| spill.queued() == 0).await;
        });
        engine.shutdown().expect("the engine has no fault");
        let paths = files(directory.path());
        let mut files = Vec::new();
        for tokens in tokens().chunks_exact(BLOCK_TOKENS) {
            let tokens: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            let read =
                paths.iter().map(|path| (path.clone(), fs::read(path).expect("the file was just written")));
            let is_of = |(_, content): &(PathBuf, Vec<u8>)| content[HEADER_BYTES + SLOT_BYTES..] == tokens;
            files.push(read.into_iter().find(is_of).expect("all blocks of the prompt were evicted"));
        }
        assert_eq!(files.len(), BLOCKS);
        Self { runtime, directory, files }
    }

    fn check(&self, input: &[u8]) {
        for path in files(self.directory.path()) {
            fs::remove_file(path).expect("the directory contains only files");
        }
        let parts = parts(input);
        for ((path, _), part) in self.files.iter().zip(&parts) {
            fs::write(path, part).expect("the disk has room for a small file");
        }
        let is_intact = |((_, written), part): &(&(PathBuf, Vec<u8>), &&[u8])| written == *part;
        let intact = self.files.iter().zip(&parts).take_while(is_intact).count();
        let engine = start(self.directory.path());
        let handle = engine.handle();
        let cached_tokens = self.runtime.block_on(answer(&handle));
        assert!(
            cached_tokens as usize <= intact * BLOCK_TOKENS,
            "{cached_tokens} tokens are taken from the cache, but only {intact} blocks are intact"
        );
        engine.shutdown().expect("the engine has no fault");
    }
}

fn start(directory: &Path) -> Engine {
    let identity = SpillIdentity { description: "a".to_owned(), files: Vec::new(), adapters: Vec::new() };
    let spill = SpillConfig { directory: directory.to_owned(), bytes_max: 1 << 20, identity };
    let extras = EngineOptions { spill: Some(spill), ..EngineOptions::default() };
    Setup::new(16).start_with(extras).expect("the engine has no fault")
}

fn tokens() -> Vec<TokenId> {
    prompt(0, (BLOCKS * BLOCK_TOKENS + 1) as u32)
}

/// Sends the prompt once the engine has listed the files, and checks the answer. Returns how many tokens came from the
/// cache.
async fn answer(handle: &EngineHandle) -> u32 {
    until(handle, SpillStats::is_open).await;
    let prompt = tokens();
    let stream = handle.submit(request(&prompt, ANSWER_TOKENS)).expect("the engine has room");
    let outcome = outcome(stream).await;
    assert_eq!(outcome.failure, None);
    assert_eq!(outcome.tokens, [expected_tokens(&prompt, ANSWER_TOKENS, VOCABULARY)]);
    outcome.cached_tokens.expect("the request has started")
}

/// Waits until the statistics satisfy `done`.
pub(crate) async fn until(handle: &EngineHandle, done: impl Fn(&SpillStats) -> bool) {
    while !done(handle.spill_stats().expect("spilling is configured")) {
        std::thread::yield_now();
        tokio::task::yield_now().await;
    }
}

/// Returns the files of the stored blocks.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = |path: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(path).expect("the directory can be listed");
        entries.map(|entry| entry.expect("the directory can be listed").path()).collect()
    };
    let directories = entries(directory).into_iter().filter(|path| path.is_dir());
    directories.flat_map(|directory| entries(&directory)).collect()
}

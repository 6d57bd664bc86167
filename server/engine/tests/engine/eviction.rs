//! Tests sequences whose blocks are evicted while they generate tokens.

use server_engine::Engine;
use server_engine::sim::expected_tokens;

use crate::support::{Setup, VOCABULARY, prompt, request, settled, tokens};

const BLOCK_TOKENS: u32 = 8;
const KEPT: u32 = 64;

fn setup() -> Setup {
    let mut setup = Setup::new(100);
    setup.engine.scheduler.kv_eviction_tokens = Some(KEPT);
    setup
}

#[tokio::test]
async fn a_long_sequence_evicts_blocks_and_a_short_one_does_not() {
    let (engine, gate) = setup().start_gated();
    let handle = engine.handle();
    let long = handle.submit(request(&prompt(1, 200), 60)).unwrap();
    let short = handle.submit(request(&prompt(2, 10), 30)).unwrap();
    let (mut all, mut fewest) = (0, u32::MAX);
    for _ in 0..40 {
        let batch = gate.arrive();
        for row in batch.sequences.iter().filter(|row| row.computed_tokens >= 200) {
            assert_eq!(row.evicted_tokens % BLOCK_TOKENS, 0, "whole blocks are evicted");
            assert_eq!(
                row.blocks.len() as u32,
                (row.computed_tokens + 1 - row.evicted_tokens).div_ceil(BLOCK_TOKENS)
            );
            all = all.max(row.blocks.len() as u32);
            fewest = fewest.min(row.blocks.len() as u32);
        }
        gate.pass();
    }
    assert_eq!(all, 26, "at first, all blocks are in the cache");
    assert_eq!(
        fewest,
        KEPT / BLOCK_TOKENS + 1,
        "then only as many as the limit allows, and the block that is being filled"
    );
    assert!(handle.load().borrow().load.blocks_active < 20, "other requests have room");
    drop(gate.release());
    assert_eq!(tokens(long).await.len(), 60);
    assert_eq!(tokens(short).await, expected_tokens(&prompt(2, 10), 30, VOCABULARY));
    settled(&handle).await;
    assert_eq!(handle.load().borrow().load.blocks_active, 0);
    engine.shutdown().unwrap();
}

#[tokio::test]
async fn blocks_after_evicted_ones_are_not_shared() {
    let engine = setup().start();
    let handle = engine.handle();
    let first = tokens(handle.submit(request(&prompt(1, 200), 60)).unwrap()).await;
    // The conversation continues. Only blocks that were computed with their complete prefix are reused.
    let next = [prompt(1, 200), first].concat();
    let answer = tokens(handle.submit(request(&next, 5)).unwrap()).await;
    assert_eq!(answer, expected_tokens(&next, 5, VOCABULARY));
    engine.shutdown().unwrap();
}

#[test]
fn a_limit_below_four_blocks_is_rejected() {
    let mut setup = setup();
    setup.engine.scheduler.kv_eviction_tokens = Some(4 * BLOCK_TOKENS - 1);
    let started = Engine::start(setup.engine.clone(), Box::new(setup.runner()), Box::new(|_| {}));
    let error = started.err().unwrap().to_string();
    assert_eq!(error, "kv_eviction_tokens must be at least 32, but it is 31");
}

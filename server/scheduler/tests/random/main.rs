//! Tests random operations on a scheduler, with a simulated cache that records the history of each slot.
//!
//! After each operation, the scheduler checks its own invariants. For each batch, the harness checks that every
//! sequence reads exactly its own history, except for evicted blocks, through its block table, that the limits hold,
//! and that no request starves. A failure prints the seed and the number of the operation.

mod cache;
mod harness;
mod random;

use std::time::Duration;

use harness::{Harness, Setup, Totals};
use server_scheduler::{BlockHash, CacheSize, SchedulerConfig, TokenId, block_hash};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_batched_tokens: 24,
        max_chunk_tokens: 24,
        max_itl: None,
        max_num_seqs: 6,
        max_queue: 12,
        max_model_len: 48,
        prefix_caching: true,
        kv_eviction_tokens: None,
    }
}

/// The size of the cache that goes with [`config`].
fn cache() -> CacheSize {
    CacheSize { block_tokens: 4, blocks_total: 20 }
}

/// The setup of a scheduler that often runs out of blocks.
fn setup() -> Setup {
    Setup { config: config(), cache: cache(), hash: block_hash, vocabulary: 2, spills: false, images: false }
}

fn check(seed: u64, operations: u32, setup: Setup) -> Totals {
    let mut harness = Harness::new(seed, setup);
    for _ in 0..operations {
        harness.operate();
    }
    harness.drain();
    let totals = harness.totals();
    // A run must include the rare events.
    assert!(totals.finished > operations / 100, "{totals:?}");
    assert!(totals.aborted > operations / 100, "{totals:?}");
    assert!(totals.aborted_in_flight > 0 && totals.failed > 0 && totals.copies > 0, "{totals:?}");
    assert!(totals.forked > 0 && totals.scored > operations / 100, "{totals:?}");
    assert!(totals.accepted > operations / 100 && totals.drafted > totals.accepted, "{totals:?}");
    assert!(totals.reassigned > operations / 400, "{totals:?}");
    assert!(totals.suspended > operations / 100, "{totals:?}");
    totals
}

#[test]
fn holds_when_blocks_are_scarce() {
    for seed in 1..=4 {
        let totals = check(seed, 15_000, setup());
        assert!(totals.preempted > 50 && totals.cached_tokens > totals.computed_tokens / 20, "{totals:?}");
    }
}

#[test]
fn holds_when_a_sequence_can_fill_the_cache() {
    let config = SchedulerConfig { max_num_seqs: 4, ..config() };
    let cache = CacheSize { blocks_total: 12, ..cache() };
    let totals = check(6, 15_000, Setup { config, cache, ..setup() });
    assert!(totals.preempted > 50, "{totals:?}");
}

#[test]
fn holds_when_there_is_room_and_little_budget() {
    let config =
        SchedulerConfig { max_num_batched_tokens: 7, max_chunk_tokens: 3, max_num_seqs: 9, ..config() };
    let cache = CacheSize { blocks_total: 400, ..cache() };
    let totals = check(6, 15_000, Setup { config, cache, vocabulary: 3, ..setup() });
    assert_eq!(totals.preempted, 0, "there is room");
}

#[test]
fn holds_when_steps_are_limited_by_random_times() {
    let config =
        SchedulerConfig { max_num_batched_tokens: 64, max_itl: Some(Duration::from_millis(3)), ..config() };
    let cache = CacheSize { blocks_total: 60, ..cache() };
    check(12, 15_000, Setup { config, cache, ..setup() });
}

#[test]
fn holds_when_sequences_evict_blocks() {
    let few = |parent: BlockHash, tokens: &[TokenId]| BlockHash(block_hash(parent, tokens).0 % 16);
    let evicting = SchedulerConfig { kv_eviction_tokens: Some(5 * 4), max_model_len: 64, ..config() };
    let uncached = SchedulerConfig { prefix_caching: false, ..evicting.clone() };
    let roomy = CacheSize { blocks_total: 200, ..cache() };
    for (seed, config, cache, hash, spills) in [
        (16, evicting.clone(), cache(), block_hash as fn(_, &[_]) -> _, false),
        (17, evicting.clone(), roomy, block_hash, true),
        (18, uncached, cache(), block_hash, false),
        (19, evicting, cache(), few, true),
    ] {
        let totals = check(seed, 15_000, Setup { config, cache, hash, spills, ..setup() });
        assert!(totals.evicted_tokens > 4_000, "{totals:?}");
    }
}

#[test]
fn holds_when_a_block_is_a_token() {
    let cache = CacheSize { block_tokens: 1, blocks_total: 80 };
    check(7, 15_000, Setup { cache, ..setup() });
}

#[test]
fn holds_without_a_prefix_cache() {
    let config = SchedulerConfig { prefix_caching: false, ..config() };
    let totals = check(8, 15_000, Setup { config, ..setup() });
    assert_eq!(totals.cached_tokens, 0, "nothing is cached");
}

#[test]
fn holds_when_hashes_collide() {
    // The first hash function has four different values, the second only one.
    let few = |parent: BlockHash, tokens: &[TokenId]| BlockHash(block_hash(parent, tokens).0 % 4);
    let one = |_: BlockHash, _: &[TokenId]| BlockHash(1);
    let few = check(9, 15_000, Setup { hash: few, ..setup() });
    let one = check(10, 15_000, Setup { hash: one, ..setup() });
    assert!(few.cached_tokens > 0 && one.cached_tokens > 0, "{few:?} {one:?}");
}

#[test]
fn holds_when_prompts_have_images() {
    let few = |parent: BlockHash, tokens: &[TokenId]| BlockHash(block_hash(parent, tokens).0 % 16);
    let roomy = CacheSize { blocks_total: 100, ..cache() };
    for (seed, cache, hash, spills) in [
        (20, cache(), block_hash as fn(_, &[_]) -> _, false),
        (21, roomy, block_hash, false),
        (22, cache(), block_hash, true),
        (23, cache(), few, true),
        (24, CacheSize { block_tokens: 1, blocks_total: 80 }, block_hash, false),
    ] {
        let totals =
            check(seed, 15_000, Setup { cache, hash, vocabulary: 1, spills, images: true, ..setup() });
        assert!(totals.encoded_images > 400 && totals.failed_images > 20, "{totals:?}");
        assert!(totals.cached_tokens > totals.computed_tokens / 20, "{totals:?}");
    }
}

#[test]
fn holds_when_evicted_blocks_are_stored_and_restored() {
    let few = |parent: BlockHash, tokens: &[TokenId]| BlockHash(block_hash(parent, tokens).0 % 16);
    for (seed, blocks_total, max_num_seqs, hash) in [
        (12, cache().blocks_total, config().max_num_seqs, block_hash as fn(_, &[_]) -> _),
        (18, 12, 4, block_hash),
        (14, 100, 9, block_hash),
        (15, cache().blocks_total, config().max_num_seqs, few),
    ] {
        let config = SchedulerConfig { max_num_seqs, ..config() };
        let cache = CacheSize { blocks_total, ..cache() };
        let totals = check(seed, 15_000, Setup { config, cache, hash, spills: true, ..setup() });
        assert!(totals.restored > 300 && totals.ended_restores > 20 && totals.missing > 20, "{totals:?}");
        assert!(totals.cleared > 20, "{totals:?}");
    }
}

#[test]
fn the_same_calls_give_the_same_batches() {
    let run = || check(19, 2_000, setup());
    assert_eq!(run(), run());
}

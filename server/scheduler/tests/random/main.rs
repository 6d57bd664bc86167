//! Random operations against a scheduler, with a cache that remembers what was written where.
//!
//! After each operation the scheduler's own invariants are checked; with each batch the harness checks that
//! every row finds exactly its own sequence's history through its block table, that limits are kept, and
//! that nobody waits for ever. A failure prints the seed and the number of the operation.

mod cache;
mod harness;
mod random;

use std::time::Duration;

use harness::{Harness, Setup, Totals};
use server_scheduler::{BlockHash, SchedulerConfig, TokenId, block_hash};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        block_tokens: 4,
        blocks_total: 20,
        batch_tokens_max: 24,
        chunk_tokens_max: 24,
        step_time_max: None,
        sequences_max: 6,
        waiting_max: 12,
        sequence_tokens_max: 48,
        prefix_caching: true,
        sequence_blocks_max: None,
    }
}

fn check(seed: u64, operations: u32, setup: Setup) -> Totals {
    let mut harness = Harness::new(seed, setup);
    for _ in 0..operations {
        harness.operate();
    }
    harness.drain();
    let totals = harness.totals();
    // A run in which nothing rare happened has tested nothing.
    assert!(totals.finished > operations / 100, "{totals:?}");
    assert!(totals.aborted > operations / 100, "{totals:?}");
    assert!(totals.aborted_in_flight > 0 && totals.failed > 0 && totals.copies > 0, "{totals:?}");
    assert!(totals.forked > 0 && totals.scored > operations / 100, "{totals:?}");
    assert!(totals.accepted > operations / 100 && totals.drafted > totals.accepted, "{totals:?}");
    assert!(totals.taken_over > operations / 400, "{totals:?}");
    assert!(totals.suspended > operations / 100, "{totals:?}");
    totals
}

#[test]
fn holds_when_blocks_are_scarce() {
    for seed in 1..=4 {
        let setup = Setup { config: config(), hash: block_hash, vocabulary: 2, keeps: false };
        let totals = check(seed, 15_000, setup);
        assert!(totals.preempted > 50 && totals.cached_tokens > totals.computed_tokens / 20, "{totals:?}");
    }
}

#[test]
fn holds_when_a_sequence_can_fill_the_cache() {
    let config = SchedulerConfig { blocks_total: 12, sequences_max: 4, ..config() };
    let totals = check(5, 15_000, Setup { config, hash: block_hash, vocabulary: 2, keeps: false });
    assert!(totals.preempted > 50, "{totals:?}");
}

#[test]
fn holds_when_there_is_room_and_little_budget() {
    let config = SchedulerConfig {
        blocks_total: 400,
        batch_tokens_max: 7,
        chunk_tokens_max: 3,
        sequences_max: 9,
        ..config()
    };
    let totals = check(6, 15_000, Setup { config, hash: block_hash, vocabulary: 3, keeps: false });
    assert_eq!(totals.preempted, 0, "there is room");
}

#[test]
fn holds_when_steps_are_limited_by_times_that_mean_nothing() {
    let config = SchedulerConfig {
        blocks_total: 60,
        batch_tokens_max: 64,
        step_time_max: Some(Duration::from_millis(3)),
        ..config()
    };
    check(12, 15_000, Setup { config, hash: block_hash, vocabulary: 2, keeps: false });
}

#[test]
fn holds_when_sequences_leave_blocks() {
    let few = |parent: BlockHash, tokens: &[TokenId]| BlockHash(block_hash(parent, tokens).0 % 16);
    let left = SchedulerConfig { sequence_blocks_max: Some(5), sequence_tokens_max: 64, ..config() };
    let roomy = SchedulerConfig { blocks_total: 200, ..left.clone() };
    let uncached = SchedulerConfig { prefix_caching: false, ..left.clone() };
    for (seed, config, hash, keeps) in [
        (16, left.clone(), block_hash as fn(_, &[_]) -> _, false),
        (17, roomy, block_hash, true),
        (18, uncached, block_hash, false),
        (19, left, few, true),
    ] {
        let totals = check(seed, 15_000, Setup { config, hash, vocabulary: 2, keeps });
        assert!(totals.left > 4_000, "{totals:?}");
    }
}

#[test]
fn holds_when_a_block_is_a_token() {
    let config = SchedulerConfig { block_tokens: 1, blocks_total: 80, ..config() };
    check(7, 15_000, Setup { config, hash: block_hash, vocabulary: 2, keeps: false });
}

#[test]
fn holds_without_a_prefix_cache() {
    let config = SchedulerConfig { prefix_caching: false, ..config() };
    let totals = check(8, 15_000, Setup { config, hash: block_hash, vocabulary: 2, keeps: false });
    assert_eq!(totals.cached_tokens, 0, "nothing is cached");
}

#[test]
fn holds_when_hashes_collide() {
    // Few values are left of the hash, then one.
    let few = |parent: BlockHash, tokens: &[TokenId]| BlockHash(block_hash(parent, tokens).0 % 4);
    let one = |_: BlockHash, _: &[TokenId]| BlockHash(1);
    let few = check(9, 15_000, Setup { config: config(), hash: few, vocabulary: 2, keeps: false });
    let one = check(10, 15_000, Setup { config: config(), hash: one, vocabulary: 2, keeps: false });
    assert!(few.cached_tokens > 0 && one.cached_tokens > 0, "{few:?} {one:?}");
}

#[test]
fn holds_when_evicted_blocks_are_kept_elsewhere_and_come_back() {
    let few = |parent: BlockHash, tokens: &[TokenId]| BlockHash(block_hash(parent, tokens).0 % 16);
    let large = SchedulerConfig { blocks_total: 100, sequences_max: 9, ..config() };
    let whole = SchedulerConfig { blocks_total: 12, sequences_max: 4, ..config() };
    for (seed, config, hash) in [
        (12, config(), block_hash as fn(_, &[_]) -> _),
        (13, whole, block_hash),
        (14, large, block_hash),
        (15, config(), few),
    ] {
        let totals = check(seed, 15_000, Setup { config, hash, vocabulary: 2, keeps: true });
        assert!(totals.read_back > 300 && totals.late > 20 && totals.unreadable > 20, "{totals:?}");
        assert!(totals.slept > 20, "{totals:?}");
    }
}

#[test]
fn the_same_calls_give_the_same_batches() {
    let run = || check(11, 2_000, Setup { config: config(), hash: block_hash, vocabulary: 2, keeps: false });
    assert_eq!(run(), run());
}

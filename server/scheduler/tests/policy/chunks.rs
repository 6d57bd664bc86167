//! Tests the number of prompt tokens that a step computes in addition to decodes.

use std::time::Duration;

use expect_test::expect;
use server_scheduler::{CacheSize, SchedulerConfig};

use crate::script::{cache, check, check_in_cache, config};

#[test]
fn the_step_is_larger_if_more_prompts_wait_than_sequences_decode() {
    check(
        SchedulerConfig { max_chunk_tokens: 5, max_num_batched_tokens: 20, ..config() },
        expect![[r#"
            > submit 1 abc max=9
            > step
            1: 0+3 [0] -> 1
            1 started, 0 cached
            > submit 2 b*40 max=1
            > submit 3 c*40 max=1
            > step
            1: 3+1 [0] -> 1
            2: 0+9 [1 2 3]
            2 started, 0 cached
            > step
            1: 4+1 [0 11] -> 1
            2: 9+9 [1 2 3 4 5]
        "#]],
    );
}

#[test]
fn the_step_is_larger_if_many_prompts_wait_however_many_sequences_decode() {
    // Sixteen prompts are fewer than twice the twelve decodes, but a step may have one chunk for every eight prompts.
    let config = SchedulerConfig {
        max_chunk_tokens: 20,
        max_num_batched_tokens: 60,
        max_num_seqs: 16,
        max_queue: 16,
        ..config()
    };
    check_in_cache(
        CacheSize { blocks_total: 64, ..cache() },
        config,
        expect![[r#"
        > submit 1 a max=9
        > submit 2 a max=9
        > submit 3 a max=9
        > submit 4 a max=9
        > submit 5 a max=9
        > submit 6 a max=9
        > submit 7 a max=9
        > submit 8 a max=9
        > submit 9 a max=9
        > submit 10 a max=9
        > submit 11 a max=9
        > submit 12 a max=9
        > steps 1
        1 started, 0 cached
        2 started, 0 cached
        3 started, 0 cached
        4 started, 0 cached
        5 started, 0 cached
        6 started, 0 cached
        7 started, 0 cached
        8 started, 0 cached
        9 started, 0 cached
        10 started, 0 cached
        11 started, 0 cached
        12 started, 0 cached
        > submit 13 b*30 max=9
        > submit 14 b*30 max=9
        > submit 15 b*30 max=9
        > submit 16 b*30 max=9
        > submit 17 b*30 max=9
        > submit 18 b*30 max=9
        > submit 19 b*30 max=9
        > submit 20 b*30 max=9
        > submit 21 b*30 max=9
        > submit 22 b*30 max=9
        > submit 23 b*30 max=9
        > submit 24 b*30 max=9
        > submit 25 b*30 max=9
        > submit 26 b*30 max=9
        > submit 27 b*30 max=9
        > submit 28 b*30 max=9
        > step
        1: 1+1 [0] -> 1
        2: 1+1 [1] -> 2
        3: 1+1 [2] -> 3
        4: 1+1 [3] -> 4
        5: 1+1 [4] -> 5
        6: 1+1 [5] -> 6
        7: 1+1 [6] -> 7
        8: 1+1 [7] -> 8
        9: 1+1 [8] -> 9
        10: 1+1 [9] -> 10
        11: 1+1 [10] -> 11
        12: 1+1 [11] -> 12
        13: 0+28 [12 13 14 15 16 17 18]
        13 started, 0 cached
    "#]],
    );
}

#[test]
fn prompts_get_the_whole_budget_until_a_sequence_decodes() {
    check(
        SchedulerConfig { max_chunk_tokens: 5, max_num_batched_tokens: 20, ..config() },
        expect![[r#"
            > submit 1 a*16 max=9
            > submit 2 b*30 max=1
            > step
            1: 0+16 [0 1 2 3] -> 1
            2: 0+4 [4]
            1 started, 0 cached
            2 started, 0 cached
            > step
            1: 16+1 [0 1 2 3 12] -> 1
            2: 4+4 [4 5]
            > step
            1: 17+1 [0 1 2 3 12] -> 1
            2: 8+4 [4 5 6]
        "#]],
    );
}

/// The configuration with `max_itl`, a target for the time of a step. The tests record no steps, so the scheduler
/// cannot predict the time.
fn with_max_itl(max_chunk_tokens: u32) -> SchedulerConfig {
    SchedulerConfig { max_chunk_tokens, max_itl: Some(Duration::from_secs(1)), ..config() }
}

#[test]
fn a_step_of_unknown_time_has_a_quarter_of_a_chunk_while_several_tenants_are_present() {
    check(
        with_max_itl(16),
        expect![[r#"
            > submit 1 abc max=9
            > step
            1: 0+3 [0] -> 1
            1 started, 0 cached
            > submit 2 b*30 max=1 tenant=2
            > step
            1: 3+1 [0] -> 1
            2: 0+3 [1]
            2 started, 0 cached
            > step
            1: 4+1 [0 9] -> 1
            2: 3+3 [1 2]
        "#]],
    );
}

#[test]
fn prompts_progress_in_steps_of_unknown_time_with_the_smallest_chunks() {
    check(
        with_max_itl(1),
        expect![[r#"
            > submit 1 abc max=9
            > step
            1: 0+3 [0] -> 1
            1 started, 0 cached
            > submit 2 b*9 max=1
            > step
            1: 3+1 [0] -> 1
            2: 0+1 [1]
            2 started, 0 cached
            > submit 3 c*9 max=1 tenant=2
            > step
            1: 4+1 [0 4] -> 1
            2: 1+1 [1]
        "#]],
    );
}

//! Tests the prefix cache: hits, eviction, and requests that wait for blocks that another request computes.

use expect_test::expect;
use server_scheduler::{CacheSize, SchedulerConfig};

use crate::script::{cache, check, check_in_cache, config};

#[test]
fn a_prefix_of_full_blocks_is_computed_once() {
    check(
        config(),
        expect![[r#"
        > submit 1 abcdefghij max=1
        > step
        1: 0+10 [0 1 2] -> 1
        1 started, 0 cached
        1 finished, Length
        > load
        blocks 0 active 2 evictable 14 free, sequences 0 running 0 waiting, 0 tokens, 0 preemptions
        > submit 2 abcdefghxy max=1
        > step
        2: 8+2 [0 1 2] -> 2
        2 started, 8 cached
        2 finished, Length
        > submit 3 abcdxfghij max=1
        > step
        3: 4+6 [0 2 3] -> 3
        3 started, 4 cached
        3 finished, Length
    "#]],
    );
}

#[test]
fn nothing_is_cached_without_prefix_caching() {
    check(
        SchedulerConfig { prefix_caching: false, ..config() },
        expect![[r#"
            > submit 1 abcdefghij max=1
            > step
            1: 0+10 [0 1 2] -> 1
            1 started, 0 cached
            1 finished, Length
            > load
            blocks 0 active 0 evictable 16 free, sequences 0 running 0 waiting, 0 tokens, 0 preemptions
            > submit 2 abcdefghij max=1
            > submit 3 abcdefghij max=1
            > step
            2: 0+10 [0 1 2] -> 2
            3: 0+6 [3 4]
            2 started, 0 cached
            3 started, 0 cached
            2 finished, Length
        "#]],
    );
}

#[test]
fn generated_blocks_are_cached_too() {
    check(
        config(),
        expect![[r#"
        > submit 1 abc max=6
        > step 1=d
        1: 0+3 [0] -> 1
        1 started, 0 cached
        > step 1=e
        1: 3+1 [0] -> 1
        > step 1=f
        1: 4+1 [0 1] -> 1
        > step 1=g
        1: 5+1 [0 1] -> 1
        > step 1=h
        1: 6+1 [0 1] -> 1
        > step 1=i
        1: 7+1 [0 1] -> 1
        1 finished, Length
        > submit 2 abcdefghij max=1
        > step
        2: 8+2 [0 1 2] -> 2
        2 started, 8 cached
        2 finished, Length
    "#]],
    );
}

#[test]
fn the_last_token_of_a_fully_cached_prompt_is_computed_in_a_copy() {
    check(
        config(),
        expect![[r#"
            > submit 1 abcdefgh max=2
            > step
            1: 0+8 [0 1] -> 1
            1 started, 0 cached
            > submit 2 abcdefgh max=3
            > step
            copy 1 to 3
            1: 8+1 [0 1 2] -> 1
            2: 7+1 [0 3] -> 2
            2 started, 7 cached
            1 finished, Length
            > step
            2: 8+1 [0 1 2] -> 2
            > load
            blocks 3 active 0 evictable 13 free, sequences 1 running 0 waiting, 1 tokens, 0 preemptions
        "#]],
    );
}

#[test]
fn a_cached_block_that_is_evicted_for_its_own_copy_is_overwritten_in_place() {
    let config = SchedulerConfig { max_model_len: 8, ..config() };
    check_in_cache(
        CacheSize { blocks_total: 2, ..cache() },
        config,
        expect![[r#"
        > submit 1 abcd max=1
        > step
        1: 0+4 [0] -> 1
        1 started, 0 cached
        1 finished, Length
        > submit 2 efgh max=1
        > step
        2: 0+4 [1] -> 2
        2 started, 0 cached
        2 finished, Length
        > submit 3 abcd max=1
        > step
        3: 3+1 [0] -> 3
        3 started, 3 cached
        3 finished, Length
        > load
        blocks 0 active 2 evictable 0 free, sequences 0 running 0 waiting, 0 tokens, 0 preemptions
    "#]],
    );
}

#[test]
fn a_request_waits_for_a_block_that_another_computes_and_others_overtake_it() {
    check(
        config(),
        expect![[r#"
            > submit 1 a*24+b max=2
            > submit 2 a*24+c max=2
            > submit 3 d max=1
            > step
            1: 0+16 [0 1 2 3]
            1 started, 0 cached
            > submit 4 a*24+e max=1
            > submit 5 f max=1
            > step
            1: 16+9 [0 1 2 3 4 5 6] -> 1
            3: 0+1 [7] -> 3
            5: 0+1 [8] -> 5
            3 started, 0 cached
            5 started, 0 cached
            3 finished, Length
            5 finished, Length
            > step
            1: 25+1 [0 1 2 3 4 5 6] -> 1
            2: 24+1 [0 1 2 3 4 5 8] -> 2
            4: 24+1 [0 1 2 3 4 5 7] -> 4
            2 started, 24 cached
            4 started, 24 cached
            1 finished, Length
            4 finished, Length
        "#]],
    );
}

#[test]
fn a_waiting_request_computes_the_block_when_the_other_is_aborted() {
    check(
        config(),
        expect![[r#"
        > submit 1 a*24+b max=2
        > submit 2 a*24+c max=2
        > step
        1: 0+16 [0 1 2 3]
        1 started, 0 cached
        > abort 1
        > step
        2: 16+9 [0 1 2 3 4 5 6] -> 2
        2 started, 16 cached
        > submit 3 a*24+d max=2
        > fail
        2: 25+1 [0 1 2 3 4 5 6] -> 2
        3: 24+1 [0 1 2 3 4 5 7] -> 3
        dropped 2,3
        > step
        nothing
    "#]],
    );
}

#[test]
fn evicts_the_least_recently_used_prefix_first_and_its_end_before_its_start() {
    let config = SchedulerConfig { max_model_len: 20, ..config() };
    check_in_cache(
        CacheSize { blocks_total: 5, ..cache() },
        config,
        expect![[r#"
        > submit 1 a*8 max=1
        > step
        1: 0+8 [0 1] -> 1
        1 started, 0 cached
        1 finished, Length
        > submit 2 b*8 max=1
        > step
        2: 0+8 [2 3] -> 2
        2 started, 0 cached
        2 finished, Length
        > submit 3 c*5 max=1
        > step
        3: 0+5 [4 1] -> 3
        3 started, 0 cached
        3 finished, Length
        > submit 4 a*9 max=1
        > step
        4: 4+5 [0 1 3] -> 4
        4 started, 4 cached
        4 finished, Length
        > submit 5 b*9 max=1
        > step
        5: 4+5 [2 3 4] -> 5
        5 started, 4 cached
        5 finished, Length
    "#]],
    );
}

#[test]
fn a_scored_prompt_is_computed_completely_and_cached() {
    check(
        config(),
        expect![[r#"
        > submit 1 abcdefghij max=1
        > step
        1: 0+10 [0 1 2] -> 1
        1 started, 0 cached
        1 finished, Length
        > submit 2 abcdefghij max=1 scores=prompt
        > step
        2: 0+10 [2 3 4] scores 0+9 -> 2
        2 started, 0 cached
        2 finished, Length
        > submit 3 abcdefghxy max=1
        > step
        3: 8+2 [0 1 4] -> 3
        3 started, 8 cached
        3 finished, Length
    "#]],
    );
}

#[test]
fn a_step_has_a_limited_number_of_scored_tokens_and_other_requests_overtake() {
    let config = SchedulerConfig {
        max_num_batched_tokens: 512,
        max_chunk_tokens: 512,
        max_model_len: 512,
        ..config()
    };
    check_in_cache(
        CacheSize { block_tokens: 64, ..cache() },
        config,
        expect![[r#"
            > submit 1 a*300 max=1 scores=prompt
            > submit 2 b*20 max=1 scores=prompt
            > submit 3 c*200 max=1
            > step
            1: 0+128 [0 1] scores 0+128
            3: 0+200 [5 6 7 8] -> 3
            1 started, 0 cached
            3 started, 0 cached
            3 finished, Length
            > step
            1: 128+128 [0 1 2 3] scores 128+128
            > step
            1: 256+44 [0 1 2 3 4] scores 256+43 -> 1
            2: 0+20 [8] scores 0+19 -> 2
            2 started, 0 cached
            1 finished, Length
            2 finished, Length
        "#]],
    );
}

#[test]
fn requests_with_different_prefix_seeds_share_no_blocks() {
    check(
        config(),
        expect![[r#"
        > submit 1 abcdefghij max=1
        > step
        1: 0+10 [0 1 2] -> 1
        1 started, 0 cached
        1 finished, Length
        > submit 2 abcdefghij max=1 seed=7
        > step
        2: 0+10 [2 3 4] -> 2
        2 started, 0 cached
        2 finished, Length
        > submit 3 abcdefghij max=1 seed=7
        > step
        3: 8+2 [2 3 4] -> 3
        3 started, 8 cached
        3 finished, Length
    "#]],
    );
}

#[test]
fn a_shared_prefix_outlasts_blocks_used_more_recently() {
    let config = SchedulerConfig { max_model_len: 20, ..config() };
    check_in_cache(
        CacheSize { blocks_total: 5, ..cache() },
        config,
        expect![[r#"
        > submit 1 aaaab max=1
        > step
        1: 0+5 [0 1] -> 1
        1 started, 0 cached
        1 finished, Length
        > submit 2 c*16 max=1
        > step
        2: 0+16 [1 2 3 4] -> 2
        2 started, 0 cached
        2 finished, Length
        > submit 3 aaaad max=1
        > step
        3: 4+1 [0 4] -> 3
        3 started, 4 cached
        3 finished, Length
        > submit 4 e*16 max=1
        > step
        4: 0+16 [4 3 2 1] -> 4
        4 started, 0 cached
        4 finished, Length
        > submit 5 aaaaf max=1
        > step
        5: 4+1 [0 1] -> 5
        5 started, 4 cached
        5 finished, Length
        > submit 6 g*16 max=1
        > step
        6: 0+16 [1 2 3 4] -> 6
        6 started, 0 cached
        6 finished, Length
        > submit 7 h*16 max=1
        > step
        7: 0+16 [4 3 2 1] -> 7
        7 started, 0 cached
        7 finished, Length
        > submit 8 aaaai max=1
        > step
        8: 4+1 [0 1] -> 8
        8 started, 4 cached
        8 finished, Length
    "#]],
    );
}

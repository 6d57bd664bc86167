//! Tests admission, waiting and preemption.

use expect_test::expect;
use server_scheduler::{CacheSize, SchedulerConfig};

use crate::script::{cache, check, check_in_cache, config};

#[test]
fn a_long_prompt_is_computed_in_chunks_beside_the_decodes() {
    check(
        config(),
        expect![[r#"
        > submit 1 abc max=9
        > submit 2 bcd max=9
        > step
        1: 0+3 [0] -> 1
        2: 0+3 [1] -> 2
        1 started, 0 cached
        2 started, 0 cached
        > submit 3 a*40 max=1
        > step
        1: 3+1 [0] -> 1
        2: 3+1 [1] -> 2
        3: 0+14 [2 3 4 5]
        3 started, 0 cached
        > step
        1: 4+1 [0 12] -> 1
        2: 4+1 [1 13] -> 2
        3: 14+14 [2 3 4 5 6 7 8]
        > step
        1: 5+1 [0 12] -> 1
        2: 5+1 [1 13] -> 2
        3: 28+12 [2 3 4 5 6 7 8 9 10 11] -> 3
        3 finished, Length
        > load
        blocks 4 active 10 evictable 2 free, sequences 2 running 0 waiting, 2 tokens, 0 preemptions
    "#]],
    );
}

#[test]
fn a_prompt_does_not_delay_the_decodes_of_younger_requests() {
    // Request 2 waits for the prefix that request 1 computes. Request 3 overtakes request 2, and already decodes when
    // request 2 starts.
    check(
        config(),
        expect![[r#"
            > submit 1 a*24+b max=2
            > submit 2 a*24+c*32 max=2
            > submit 3 d max=9
            > step
            1: 0+16 [0 1 2 3]
            1 started, 0 cached
            > step
            1: 16+9 [0 1 2 3 4 5 6] -> 1
            3: 0+1 [7] -> 3
            3 started, 0 cached
            > step
            1: 25+1 [0 1 2 3 4 5 6] -> 1
            3: 1+1 [7] -> 3
            1 finished, Length
            > step
            3: 2+1 [7] -> 3
            2: 24+15 [0 1 2 3 4 5 6 8 9 10]
            2 started, 24 cached
            > step
            3: 3+1 [7] -> 3
            2: 39+15 [0 1 2 3 4 5 6 8 9 10 11 12 13 14]
        "#]],
    );
}

#[test]
fn the_oldest_prompt_is_computed_first() {
    check(
        config(),
        expect![[r#"
            > submit 1 a*20 max=2
            > submit 2 b*20 max=2
            > submit 3 c*3 max=2
            > step
            1: 0+16 [0 1 2 3]
            1 started, 0 cached
            > step
            1: 16+4 [0 1 2 3 4] -> 1
            2: 0+12 [5 6 7]
            2 started, 0 cached
            > step
            1: 20+1 [0 1 2 3 4 10] -> 1
            2: 12+8 [5 6 7 8 9] -> 2
            3: 0+3 [11] -> 3
            3 started, 0 cached
            1 finished, Length
        "#]],
    );
}

#[test]
fn a_request_waits_until_its_whole_prompt_has_room() {
    check_in_cache(
        CacheSize { blocks_total: 13, ..cache() },
        SchedulerConfig { max_model_len: 52, ..config() },
        expect![[r#"
        > submit 1 a*20 max=9
        > submit 2 b*32 max=9
        > submit 3 c max=1
        > step
        1: 0+16 [0 1 2 3]
        1 started, 0 cached
        > step
        1: 16+4 [0 1 2 3 4] -> 1
        > load
        blocks 5 active 0 evictable 8 free, sequences 1 running 2 waiting, 34 tokens, 0 preemptions
        > abort 1
        > step
        2: 0+16 [5 6 7 8]
        2 started, 0 cached
    "#]],
    );
}

#[test]
fn a_request_that_fills_the_cache_runs_when_nothing_else_does() {
    let config = SchedulerConfig { max_model_len: 16, ..config() };
    check_in_cache(
        CacheSize { blocks_total: 4, ..cache() },
        config,
        expect![[r#"
        > submit 1 abc max=2
        > submit 2 a*15 max=1
        > step
        1: 0+3 [0] -> 1
        1 started, 0 cached
        > step
        1: 3+1 [0] -> 1
        1 finished, Length
        > step
        2: 0+15 [1 2 3 0] -> 2
        2 started, 0 cached
        2 finished, Length
        > load
        blocks 0 active 3 evictable 1 free, sequences 0 running 0 waiting, 0 tokens, 0 preemptions
    "#]],
    );
}

#[test]
fn the_youngest_is_preempted_and_reuses_its_cached_blocks() {
    let config = SchedulerConfig { max_model_len: 32, max_num_batched_tokens: 32, ..config() };
    check_in_cache(
        CacheSize { blocks_total: 8, ..cache() },
        config,
        expect![[r#"
        > submit 1 a*7 max=9
        > submit 2 b*7 max=9
        > submit 3 c*7 max=9
        > step
        1: 0+7 [0 1] -> 1
        2: 0+7 [2 3] -> 2
        3: 0+7 [4 5] -> 3
        1 started, 0 cached
        2 started, 0 cached
        3 started, 0 cached
        > step
        1: 7+1 [0 1] -> 1
        2: 7+1 [2 3] -> 2
        3: 7+1 [4 5] -> 3
        > step
        1: 8+1 [0 1 6] -> 1
        2: 8+1 [2 3 7] -> 2
        > load
        blocks 6 active 2 evictable 0 free, sequences 2 running 1 waiting, 11 tokens, 1 preemptions
        > abort 1
        > step
        2: 9+1 [2 3 7] -> 2
        3: 8+1 [4 5 6] -> 3
        > step
        2: 10+1 [2 3 7] -> 2
        3: 9+1 [4 5 6] -> 3
    "#]],
    );
}

#[test]
fn the_oldest_decode_gets_the_last_block_and_the_others_resume_in_order() {
    let config = SchedulerConfig { max_model_len: 16, prefix_caching: false, ..config() };
    check_in_cache(
        CacheSize { blocks_total: 4, ..cache() },
        config,
        expect![[r#"
        > submit 1 a*4 max=12
        > submit 2 b*4 max=12
        > step
        1: 0+4 [0] -> 1
        2: 0+4 [1] -> 2
        1 started, 0 cached
        2 started, 0 cached
        > steps 4
        > load
        blocks 4 active 0 evictable 0 free, sequences 2 running 0 waiting, 2 tokens, 0 preemptions
        > steps 9
        1 finished, Length
        > load
        blocks 3 active 0 evictable 1 free, sequences 1 running 0 waiting, 1 tokens, 1 preemptions
        > steps 9
        2 finished, Length
        > load
        blocks 0 active 0 evictable 4 free, sequences 0 running 0 waiting, 0 tokens, 1 preemptions
    "#]],
    );
}

#[test]
fn an_abort_releases_blocks_at_once_and_tokens_sampled_in_flight_are_ignored() {
    check(
        config(),
        expect![[r#"
        > submit 1 abcde max=9
        > submit 2 bcdef max=9
        > submit 3 cdefg max=9
        > schedule
        1: 0+5 [0 1] -> 1
        2: 0+5 [2 3] -> 2
        3: 0+5 [4 5] -> 3
        > abort 2
        > abort 77
        > load
        blocks 4 active 0 evictable 12 free, sequences 2 running 0 waiting, 10 tokens, 0 preemptions
        > commit
        1 started, 0 cached
        3 started, 0 cached
        > abort 2
        > step
        1: 5+1 [0 1] -> 1
        3: 5+1 [4 5] -> 3
    "#]],
    );
}

#[test]
fn a_failed_step_removes_its_sequences_and_caches_none_of_their_blocks() {
    check(
        config(),
        expect![[r#"
            > submit 1 a*8 max=9
            > step
            1: 0+8 [0 1] -> 1
            1 started, 0 cached
            > submit 2,3 b*16 max=9
            > submit 4 c max=1
            > fail
            1: 8+1 [0 1 2] -> 1
            2: 0+15 [3 4 5 6]
            dropped 1,2,3
            > load
            blocks 0 active 2 evictable 14 free, sequences 0 running 1 waiting, 1 tokens, 0 preemptions
            > submit 5 a*8 max=1
            > submit 6 b*9 max=1
            > step
            copy 1 to 4
            4: 0+1 [3] -> 4
            5: 7+1 [0 4] -> 5
            6: 0+9 [5 6 2] -> 6
            4 started, 0 cached
            5 started, 7 cached
            6 started, 0 cached
            4 finished, Length
            5 finished, Length
            6 finished, Length
            > step
            nothing
        "#]],
    );
}

#[test]
fn tenants_take_turns_by_the_tokens_they_use() {
    // The requests of the second tenant are served before the backlog of the first tenant until the second tenant has
    // used as many tokens as the first one.
    let config = SchedulerConfig { max_num_seqs: 1, prefix_caching: false, ..config() };
    check(
        config,
        expect![[r#"
        > submit 1 a*16 max=1 tenant=1
        > submit 2 b*16 max=1 tenant=1
        > submit 6 c*16 max=1 tenant=1
        > step
        1: 0+16 [0 1 2 3] -> 1
        1 started, 0 cached
        1 finished, Length
        > submit 3 d*8 max=1 tenant=2
        > submit 4 e*8 max=1 tenant=2
        > submit 5 f*8 max=1 tenant=2
        > steps 5
        3 started, 0 cached
        3 finished, Length
        4 started, 0 cached
        4 finished, Length
        2 started, 0 cached
        2 finished, Length
        5 started, 0 cached
        5 finished, Length
        6 started, 0 cached
        6 finished, Length
    "#]],
    );
}

#[test]
fn a_tenant_leaves_an_eighth_of_the_cache_and_its_requests_do_not_overtake_each_other() {
    // Request 2 would leave too few blocks for other tenants. Request 3 is small, but belongs to the same tenant.
    let config = SchedulerConfig { prefix_caching: false, ..config() };
    check(
        config,
        expect![[r#"
        > submit 1 a*32 max=4 tenant=1
        > steps 3
        1 started, 0 cached
        > submit 2 b*24 max=1 tenant=1
        > submit 3 c*4 max=1 tenant=1
        > submit 4 d*4 max=1 tenant=2
        > step
        1: 33+1 [0 1 2 3 4 5 6 7 8] -> 1
        4: 0+4 [9] -> 4
        4 started, 0 cached
        4 finished, Length
        > steps 4
        1 finished, Length
        2 started, 0 cached
        3 started, 0 cached
        2 finished, Length
        3 finished, Length
    "#]],
    );
}

#[test]
fn requests_keep_their_order_if_an_earlier_one_is_aborted() {
    check(
        SchedulerConfig { max_num_seqs: 1, ..config() },
        expect![[r#"
        > submit 1 ab max=2
        > step
        1: 0+2 [0] -> 1
        1 started, 0 cached
        > submit 2 c*30
        > submit 3 de
        > abort 2
        > submit 4 fg
        > step
        1: 2+1 [0] -> 1
        1 finished, Length
        > step
        3: 0+2 [0] -> 3
        3 started, 0 cached
        3 finished, Length
        > step
        4: 0+2 [0] -> 4
        4 started, 0 cached
        4 finished, Length
    "#]],
    );
}

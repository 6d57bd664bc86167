//! Tests several sequences that continue one prompt.

use expect_test::expect;
use server_scheduler::{CacheSize, SchedulerConfig};

use crate::script::{cache, check, check_in_cache, config};

#[test]
fn siblings_share_the_prompt_and_all_but_one_copy_its_last_block() {
    check(
        config(),
        expect![[r#"
        > submit 1,2,3 abcdef max=4
        > step 1=x 2=y 3=z
        1: 0+6 [0 1] -> 1,2,3
        1 started, 0 cached
        > load
        blocks 2 active 0 evictable 14 free, sequences 3 running 0 waiting, 3 tokens, 0 preemptions
        > step
        copy 1 to 2
        copy 1 to 3
        1: 6+1 [0 2] -> 1
        2: 6+1 [0 3] -> 2
        3: 6+1 [0 1] -> 3
        > step
        1: 7+1 [0 2] -> 1
        2: 7+1 [0 3] -> 2
        3: 7+1 [0 1] -> 3
        > load
        blocks 4 active 0 evictable 12 free, sequences 3 running 0 waiting, 3 tokens, 0 preemptions
        > step
        1: 8+1 [0 2 4] -> 1
        2: 8+1 [0 3 5] -> 2
        3: 8+1 [0 1 6] -> 3
        1 finished, Length
        2 finished, Length
        3 finished, Length
    "#]],
    );
}

#[test]
fn siblings_that_generate_the_same_tokens_share_their_blocks() {
    check(
        config(),
        expect![[r#"
        > submit 1,2 abcdef max=9
        > step
        1: 0+6 [0 1] -> 1,2
        1 started, 0 cached
        > step
        copy 1 to 2
        1: 6+1 [0 2] -> 1
        2: 6+1 [0 1] -> 2
        > load
        blocks 3 active 0 evictable 13 free, sequences 2 running 0 waiting, 2 tokens, 0 preemptions
        > step
        1: 7+1 [0 2] -> 1
        2: 7+1 [0 1] -> 2
        > load
        blocks 2 active 0 evictable 14 free, sequences 2 running 0 waiting, 2 tokens, 0 preemptions
        > step
        1: 8+1 [0 2 1] -> 1
        2: 8+1 [0 2 3] -> 2
    "#]],
    );
}

#[test]
fn siblings_are_admitted_together() {
    check(
        SchedulerConfig { max_num_seqs: 3, ..config() },
        expect![[r#"
            > submit 1,2 a max=2
            > submit 3,4 b max=2
            > submit 5 c max=2
            > step
            1: 0+1 [0] -> 1,2
            1 started, 0 cached
            > abort 2
            > step
            1: 1+1 [0] -> 1
            3: 0+1 [1] -> 3,4
            3 started, 0 cached
            1 finished, Length
            > step
            copy 1 to 0
            3: 1+1 [0] -> 3
            4: 1+1 [1] -> 4
            5: 0+1 [2] -> 5
            5 started, 0 cached
            3 finished, Length
            4 finished, Length
        "#]],
    );
}

#[test]
fn a_sibling_replaces_the_sequence_that_computes_the_prompt_when_it_is_aborted() {
    check(
        config(),
        expect![[r#"
        > submit 1,2,3 a*20 max=2
        > step
        1: 0+16 [0 1 2 3]
        1 started, 0 cached
        > abort 1
        > load
        blocks 5 active 0 evictable 11 free, sequences 2 running 0 waiting, 4 tokens, 0 preemptions
        > schedule
        2: 16+4 [0 1 2 3 4] -> 2,3
        > abort 2
        > commit
        > step
        3: 20+1 [0 1 2 3 4 5] -> 3
        3 finished, Length
    "#]],
    );
}

#[test]
fn a_preempted_sibling_is_recomputed_alone() {
    check_in_cache(
        CacheSize { blocks_total: 4, ..cache() },
        SchedulerConfig { max_model_len: 16, ..config() },
        expect![[r#"
        > submit 1,2 a*10 max=6
        > step
        1: 0+10 [0 1 2] -> 1,2
        1 started, 0 cached
        > step 1=b 2=c
        copy 2 to 3
        1: 10+1 [0 1 3] -> 1
        2: 10+1 [0 1 2] -> 2
        > step 1=b 2=c
        1: 11+1 [0 1 3] -> 1
        2: 11+1 [0 1 2] -> 2
        > step 1=b 2=c
        1: 12+1 [0 1 3 2] -> 1
        > load
        blocks 4 active 0 evictable 0 free, sequences 1 running 1 waiting, 14 tokens, 1 preemptions
        > steps 3
        1 finished, Length
        > load
        blocks 4 active 0 evictable 0 free, sequences 1 running 0 waiting, 1 tokens, 1 preemptions
        > step
        2: 13+1 [0 1 2 3] -> 2
    "#]],
    );
}

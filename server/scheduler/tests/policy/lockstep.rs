//! Tests sequences in lockstep, such as those of a beam search.

use expect_test::expect;
use server_scheduler::{CacheSize, SchedulerConfig};

use crate::script::{cache, check, check_in_cache, config};

#[test]
fn a_sequence_continues_from_another_and_copies_the_block_it_writes() {
    check(
        config(),
        expect![[r#"
        > submit 1,2 abcdef max=9 lockstep=yes
        > step 1=x 2=y
        1: 0+6 [0 1] -> 1,2
        1 started, 0 cached
        > step 1=p 2<1=q
        copy 1 to 2
        1: 6+1 [0 2] -> 1
        2: 6+1 [0 1] -> 2
        > load
        blocks 2 active 0 evictable 14 free, sequences 2 running 0 waiting, 2 tokens, 0 preemptions
        > step 1<2=r 2=s
        copy 2 to 1
        1: 7+1 [0 1] -> 1
        2: 7+1 [0 2] -> 2
        > step
        1: 8+1 [0 2 3] -> 1
        2: 8+1 [0 2 4] -> 2
    "#]],
    );
}

#[test]
fn a_group_is_preempted_together_and_resumes_together() {
    // An older sequence needs most of the 8 blocks eventually.
    let config = SchedulerConfig {
        max_num_batched_tokens: 8,
        max_chunk_tokens: 8,
        max_model_len: 32,
        prefix_caching: false,
        ..config()
    };
    check_in_cache(
        CacheSize { blocks_total: 8, ..cache() },
        config,
        expect![[r#"
        > submit 9 a*14 max=8
        > submit 1,2 bcd max=9 lockstep=yes
        > steps 2
        9 started, 0 cached
        1 started, 0 cached
        > step 1=x 2=y
        9: 14+1 [0 1 2 3] -> 9
        1: 2+1 [4] -> 1,2
        > step 1=x 2=y
        copy 4 to 5
        9: 15+1 [0 1 2 3] -> 9
        1: 3+1 [5] -> 1
        2: 3+1 [4] -> 2
        > step 1=x 2=y
        9: 16+1 [0 1 2 3 6] -> 9
        > load
        blocks 5 active 0 evictable 3 free, sequences 1 running 2 waiting, 11 tokens, 2 preemptions
        > steps 3
        > load
        blocks 5 active 0 evictable 3 free, sequences 1 running 2 waiting, 11 tokens, 2 preemptions
        > step
        9: 20+1 [0 1 2 3 6 5] -> 9
        9 finished, Length
        > step
        1: 0+4 [0]
        2: 0+4 [2]
        > step
        1: 4+1 [0 1] -> 1
        2: 4+1 [2 3] -> 2
        > step 1=u 2<1=v
        1: 5+1 [0 1] -> 1
        2: 5+1 [2 3] -> 2
        > step
        copy 1 to 2
        1: 6+1 [0 2] -> 1
        2: 6+1 [0 1] -> 2
    "#]],
    );
}

#[test]
fn a_preempted_group_resumes_although_its_image_exceeds_the_cache() {
    // The image has 13 rows, and the cache of the encoder's outputs has room for 12.
    let config = SchedulerConfig {
        max_num_batched_tokens: 64,
        max_chunk_tokens: 64,
        prefix_caching: false,
        ..config()
    };
    check(
        config,
        expect![[r#"
        > submit 9 a*36 max=5
        > submit 1,2 b+.*13+c max=9 lockstep=yes image=A@1+13
        > step
        image A is needed by 1
        9: 0+36 [0 1 2 3 4 5 6 7 8] -> 9
        9 started, 0 cached
        > provide A
        > step 1=x 2=y
        9: 36+1 [0 1 2 3 4 5 6 7 8 9] -> 9
        1: 0+15 [10 11 12 13] -> 1,2
        1 started, 0 cached
        > step
        image A is evicted
        copy 13 to 14
        9: 37+1 [0 1 2 3 4 5 6 7 8 9] -> 9
        1: 15+1 [10 11 12 14] -> 1
        2: 15+1 [10 11 12 13] -> 2
        > step
        9: 38+1 [0 1 2 3 4 5 6 7 8 9] -> 9
        > load
        blocks 10 active 0 evictable 6 free, sequences 1 running 2 waiting, 35 tokens, 2 preemptions
        > step
        9: 39+1 [0 1 2 3 4 5 6 7 8 9] -> 9
        9 finished, Length
        > step
        image A is needed by 1
        nothing
        > provide A
        > step
        1: 0+16 [0 1 2 3]
        2: 0+16 [5 6 7 8]
        > step
        image A is evicted
        1: 16+1 [0 1 2 3 4] -> 1
        2: 16+1 [5 6 7 8 9] -> 2
    "#]],
    );
}

#[test]
fn all_sequences_of_a_group_must_fit_into_the_cache_at_once() {
    check(
        config(),
        expect![[r#"
        > submit 1,2,3,4 abc max=14 lockstep=yes
        TooLong { prompt_tokens: 3, max_model_len: 16 }
        > submit 5,6,7,8 abc max=13 lockstep=yes
        > submit 9,10 abc max=14 lockstep=yes
    "#]],
    );
}

#[test]
fn the_others_continue_when_one_is_aborted() {
    check(
        config(),
        expect![[r#"
        > submit 1,2,3 abcdef max=9 lockstep=yes
        > step
        1: 0+6 [0 1] -> 1,2,3
        1 started, 0 cached
        > schedule
        copy 1 to 2
        copy 1 to 3
        1: 6+1 [0 2] -> 1
        2: 6+1 [0 3] -> 2
        3: 6+1 [0 1] -> 3
        > abort 1
        > commit 2=x 3<2=y
        > step
        copy 3 to 1
        2: 7+1 [0 1] -> 2
        3: 7+1 [0 3] -> 3
        > abort 2
        > step
        3: 8+1 [0 3 2] -> 3
        > abort 3
        > load
        blocks 0 active 3 evictable 13 free, sequences 0 running 0 waiting, 0 tokens, 0 preemptions
    "#]],
    );
}

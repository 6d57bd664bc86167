//! Tests sequences whose next token is not known when their step ends.

use expect_test::expect;
use server_scheduler::{CacheSize, SchedulerConfig};

use crate::script::{cache, check, check_in_cache, config};

#[test]
fn a_suspended_sequence_skips_steps_and_is_not_recomputed() {
    check(
        config(),
        expect![[r#"
        > submit 1 abcdef max=3
        > submit 2 gh max=9
        > step 1=? 2=i
        1: 0+6 [0 1] -> 1
        2: 0+2 [2] -> 2
        1 started, 0 cached
        2 started, 0 cached
        > step 2=j
        2: 2+1 [2] -> 2
        > load
        blocks 3 active 0 evictable 13 free, sequences 2 running 0 waiting, 1 tokens, 0 preemptions
        > resume 1=x
        > step 1=? 2=k
        1: 6+1 [0 1] -> 1
        2: 3+1 [2] -> 2
        > resume 1=y
        > step 1=z
        1: 7+1 [0 1] -> 1
        2: 4+1 [2 3] -> 2
        1 finished, Length
    "#]],
    );
}

#[test]
fn siblings_are_suspended_individually_and_lockstep_groups_resume_together() {
    check(
        config(),
        expect![[r#"
        > submit 1,2 abcd max=3
        > step 1=? 2=x
        1: 0+4 [0] -> 1,2
        1 started, 0 cached
        > step 2=y
        2: 4+1 [0 1] -> 2
        > resume 1=x
        > step
        1: 4+1 [0 2] -> 1
        2: 5+1 [0 1] -> 2
        2 finished, Length
        > submit 3,4 efgh max=9 lockstep=yes
        > step 3=? 4=?
        1: 5+1 [0 2] -> 1
        3: 0+4 [1] -> 3,4
        3 started, 0 cached
        1 finished, Length
        > step
        nothing
        > resume 3=x 4<3=y
        > step
        3: 4+1 [1 2] -> 3
        4: 4+1 [1 3] -> 4
    "#]],
    );
}

#[test]
fn a_suspended_sequence_may_be_preempted_and_others_overtake_it() {
    // The first sequence needs all six blocks eventually.
    let config = SchedulerConfig { max_model_len: 24, ..config() };
    check_in_cache(
        CacheSize { blocks_total: 6, ..cache() },
        config,
        expect![[r#"
            > submit 1 abcdefghijklmn max=9
            > submit 2 opq max=9
            > step
            1: 0+14 [0 1 2 3] -> 1
            2: 0+2 [4]
            1 started, 0 cached
            2 started, 0 cached
            > step 2=?
            1: 14+1 [0 1 2 3] -> 1
            2: 2+1 [4] -> 2
            > steps 6
            > load
            blocks 6 active 0 evictable 0 free, sequences 1 running 1 waiting, 4 tokens, 1 preemptions
            > submit 3 r max=1
            > abort 1
            > step
            3: 0+1 [4] -> 3
            3 started, 0 cached
            3 finished, Length
            > load
            blocks 0 active 5 evictable 1 free, sequences 0 running 1 waiting, 3 tokens, 1 preemptions
            > resume 2=x
            > step
            2: 0+4 [4] -> 2
            > abort 2
            > load
            blocks 0 active 6 evictable 0 free, sequences 0 running 0 waiting, 0 tokens, 1 preemptions
        "#]],
    );
}

#[test]
fn a_suspended_sequence_may_be_aborted() {
    check(
        config(),
        expect![[r#"
        > submit 1 abc max=9
        > step 1=?
        1: 0+3 [0] -> 1
        1 started, 0 cached
        > step
        nothing
        > abort 1
        > load
        blocks 0 active 0 evictable 16 free, sequences 0 running 0 waiting, 0 tokens, 0 preemptions
    "#]],
    );
}

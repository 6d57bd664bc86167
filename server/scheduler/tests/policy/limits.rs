//! What is refused, and what ends a sequence.

use expect_test::expect;
use server_scheduler::{Scheduler, SchedulerConfig};

use crate::script::{check, config};

#[test]
fn what_can_never_run_is_refused() {
    let script = "
        submit 1
        submit 2 a*12 max=5
        submit 3 a*16 max=0
        submit 4,5,6,7 a max=1
        submit 8 a*12 max=4
        submit 9,10,11 a max=1
        submit 12 a max=1
        load
    ";
    let limits = SchedulerConfig { sequences_max: 3, waiting_max: 4, sequence_tokens_max: 16, ..config() };
    check(
        limits,
        script,
        expect![[r#"
        > submit 1
        EmptyPrompt
        > submit 2 a*12 max=5
        TooLong { prompt_tokens: 12, sequence_tokens_max: 16 }
        > submit 3 a*16 max=0
        TooLong { prompt_tokens: 16, sequence_tokens_max: 16 }
        > submit 4,5,6,7 a max=1
        TooManySequences { sequences: 4, sequences_max: 3 }
        > submit 8 a*12 max=4
        > submit 9,10,11 a max=1
        > submit 12 a max=1
        QueueFull
        > load
        blocks 0 active 0 evictable 16 free, sequences 0 running 4 waiting, 13 tokens, 0 preemptions
    "#]],
    );
}

#[test]
fn no_more_run_than_can_have_a_token_each() {
    let script = "
        submit 1,2,3 a max=1
        submit 1 a max=3
        submit 2 b max=3
        submit 3 c max=3
        step
        step
    ";
    check(
        SchedulerConfig { batch_tokens_max: 2, ..config() },
        script,
        expect![[r#"
        > submit 1,2,3 a max=1
        TooManySequences { sequences: 3, sequences_max: 2 }
        > submit 1 a max=3
        > submit 2 b max=3
        > submit 3 c max=3
        > step
        1: 0+1 [0] -> 1
        2: 0+1 [1] -> 2
        1 started, 0 cached
        2 started, 0 cached
        > step
        1: 1+1 [0] -> 1
        2: 1+1 [1] -> 2
    "#]],
    );
}

#[test]
fn a_sequence_ends_by_its_stop_rule() {
    let script = "
        submit 1 a max=3 stop=xy
        submit 2 b max=3 stop=xy min=2
        submit 3 c max=3 min=3
        submit 4 d max=0
        submit 5 e max=1 stop=x
        step 1=x 2=x 3=x 4=x 5=x
        step 2=y 3=x
        step 2=y 3=x
    ";
    check(
        config(),
        script,
        expect![[r#"
            > submit 1 a max=3 stop=xy
            > submit 2 b max=3 stop=xy min=2
            > submit 3 c max=3 min=3
            > submit 4 d max=0
            > submit 5 e max=1 stop=x
            > step 1=x 2=x 3=x 4=x 5=x
            1: 0+1 [0] -> 1
            2: 0+1 [1] -> 2
            3: 0+1 [2] -> 3
            4: 0+1 [3] -> 4
            5: 0+1 [4] -> 5
            1 started, 0 cached
            2 started, 0 cached
            3 started, 0 cached
            4 started, 0 cached
            5 started, 0 cached
            1 finished, Stop
            4 finished, Length
            5 finished, Stop
            > step 2=y 3=x
            2: 1+1 [1] -> 2
            3: 1+1 [2] -> 3
            > step 2=y 3=x
            2: 2+1 [1] -> 2
            3: 2+1 [2] -> 3
            2 finished, Stop
            3 finished, Length
        "#]],
    );
}

#[test]
#[should_panic(expected = "the longest sequence (65 tokens) fits the cache (16 blocks of 4 tokens)")]
fn a_cache_that_is_smaller_than_a_sequence_is_refused() {
    Scheduler::new(SchedulerConfig { sequence_tokens_max: 65, ..config() });
}

#[test]
#[should_panic(expected = "a sequence id is used once")]
fn an_id_in_use_is_refused() {
    check(config(), "submit 1 a\nsubmit 2,1 b", expect![[""]]);
}

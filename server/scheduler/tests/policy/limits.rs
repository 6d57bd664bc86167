//! Tests rejections, and the stop criteria of sequences.

use expect_test::expect;
use server_scheduler::{Batch, NewRequest, SampledToken, Scheduler, SchedulerConfig, StopCriteria};

use crate::script::{cache, check, config};

#[test]
fn a_request_that_can_never_run_is_rejected() {
    let limits = SchedulerConfig { max_num_seqs: 3, max_queue: 4, max_model_len: 16, ..config() };
    check(
        limits,
        expect![[r#"
        > submit 1
        EmptyPrompt
        > submit 2 a*12 max=5
        TooLong { prompt_tokens: 12, max_model_len: 16 }
        > submit 3 a*16 max=0
        TooLong { prompt_tokens: 16, max_model_len: 16 }
        > submit 4,5,6,7 a max=1
        TooManySequences { num_sequences: 4, max_num_seqs: 3 }
        > submit 8 a*12 max=4
        > submit 9,10,11 a max=1
        > submit 12 a max=1
        QueueFull { max_queue: 4 }
        > load
        blocks 0 active 0 evictable 16 free, sequences 0 running 4 waiting, 13 tokens, 0 preemptions
    "#]],
    );
}

#[test]
fn every_running_sequence_gets_a_token() {
    check(
        SchedulerConfig { max_num_batched_tokens: 2, ..config() },
        expect![[r#"
        > submit 1,2,3 a max=1
        TooManySequences { num_sequences: 3, max_num_seqs: 2 }
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
fn a_sequence_ends_by_its_stop_criteria() {
    check(
        config(),
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
#[should_panic(expected = "a sequence of max_model_len (65) tokens must fit")]
fn a_cache_smaller_than_a_sequence_panics() {
    Scheduler::new(SchedulerConfig { max_model_len: 65, ..config() }, cache());
}

#[test]
#[should_panic(expected = "must not be used twice")]
fn an_id_in_use_panics() {
    check(config(), expect!["> submit 1 a\n> submit 1,2 b"]);
}

#[test]
fn a_clone_continues_from_the_same_state() {
    let mut scheduler = Scheduler::new(config(), cache());
    for id in 0..3 {
        let stop = StopCriteria { max_tokens: 5, ..StopCriteria::default() };
        scheduler.submit(NewRequest::new(id, 1, vec![1; 10], stop)).expect("there is room");
    }
    let step = |scheduler: &mut Scheduler| {
        let (mut batch, mut events) = (Batch::default(), Vec::new());
        scheduler.schedule(&mut batch);
        let sampled: Vec<_> = batch.samples.iter().map(|&id| SampledToken::new(id, 2)).collect();
        scheduler.commit(&batch, &sampled, &mut events);
        (batch, events)
    };
    step(&mut scheduler);
    let mut clone = scheduler.clone();
    while !scheduler.is_idle() {
        assert_eq!(step(&mut scheduler), step(&mut clone));
        clone.check_invariants();
    }
    assert!(clone.is_idle());
}

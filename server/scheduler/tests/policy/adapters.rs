//! Tests that sequences with different adapters share no cached blocks.

use expect_test::expect;
use server_scheduler::{Batch, BlockHash, NewRequest, SampledToken, Scheduler, SequenceId, StopCriteria};

use crate::script::{cache, check, config};

#[test]
fn adapters_share_no_cached_blocks() {
    check(
        config(),
        expect![[r#"
        > submit 1 abcdefghij max=1
        > submit 2 abcdefghij max=1 adapter=1
        > step
        1: 0+10 [0 1 2] -> 1
        2: 0+6 [3 4] adapter 1
        1 started, 0 cached
        2 started, 0 cached
        1 finished, Length
        > submit 3 abcdefghij max=1 adapter=2
        > step
        2: 6+4 [3 4 5] adapter 1 -> 2
        3: 0+10 [2 6 7] adapter 2 -> 3
        3 started, 0 cached
        2 finished, Length
        3 finished, Length
        > submit 4 abcdefghij max=1 adapter=1
        > submit 5 abcdefghij max=1 adapter=1 seed=7
        > step
        4: 8+2 [3 4 7] adapter 1 -> 4
        5: 0+10 [5 8 9] adapter 1 -> 5
        4 started, 8 cached
        5 started, 0 cached
        4 finished, Length
        5 finished, Length
    "#]],
    );
}

#[test]
fn adapters_share_no_cached_blocks_even_if_their_hashes_collide() {
    let mut scheduler = Scheduler::with_block_hash(config(), cache(), |_, _| BlockHash(1));
    for (number, adapter) in (0..).zip([0, 1, 2, 1]) {
        let stop = StopCriteria { max_tokens: 1, ..StopCriteria::default() };
        let mut request = NewRequest::new(number, 1, vec![3; 6], stop);
        request.adapter = adapter;
        scheduler.submit(request).expect("room");
        let mut batch = Batch::default();
        scheduler.schedule(&mut batch);
        let [sequence] = &batch.sequences[..] else { panic!("one sequence") };
        assert_eq!((sequence.computed_tokens, sequence.adapter), (0, adapter));
        let mut events = Vec::new();
        scheduler.commit(&batch, &[SampledToken::new(SequenceId::new(number, 0), 9)], &mut events);
        scheduler.check_invariants();
    }
}

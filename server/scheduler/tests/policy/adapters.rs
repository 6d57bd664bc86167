//! Adapters: rows name theirs, and what one has computed is nothing to another.

use expect_test::expect;
use server_scheduler::{Batch, BlockHash, NewRequest, Sampled, Scheduler, SequenceId, StopRule};

use crate::script::{check, config};

#[test]
fn nothing_is_shared_between_adapters() {
    let script = "
        submit 1 abcdefghij max=1
        submit 2 abcdefghij max=1 adapter=1
        step
        submit 3 abcdefghij max=1 adapter=2
        step
        submit 4 abcdefghij max=1 adapter=1
        submit 5 abcdefghij max=1 adapter=1 root=7
        step
    ";
    check(
        config(),
        script,
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
        > submit 5 abcdefghij max=1 adapter=1 root=7
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
fn nothing_is_shared_between_adapters_whose_hashes_are_the_same() {
    let mut scheduler = Scheduler::with_block_hash(config(), |_, _| BlockHash(1));
    for (number, adapter) in (0..).zip([0, 1, 2, 1]) {
        let stop = StopRule { tokens_max: 1, ..StopRule::default() };
        let mut request = NewRequest::new(vec![SequenceId(number)], vec![3; 6], stop);
        request.adapter = adapter;
        scheduler.submit(request).expect("room");
        let mut batch = Batch::default();
        scheduler.schedule(&mut batch);
        let [row] = &batch.rows[..] else { panic!("one row") };
        assert_eq!((row.past, row.adapter), (0, adapter));
        let mut events = Vec::new();
        scheduler.commit(&batch, &[Sampled::new(SequenceId(number), 9)], &mut events);
        scheduler.check_invariants();
    }
}

//! Tests draft tokens, which the model computes before it is known whether they will be accepted.

use expect_test::expect;
use server_scheduler::{
    Batch, CacheSize, DRAFT_TOKENS_MAX, NewRequest, SampledToken, Scheduler, SchedulerConfig, SequenceId,
    StopCriteria,
};

use crate::script::{cache, check, check_in_cache, config};

#[test]
fn accepted_drafts_are_computed_and_rejected_ones_are_overwritten() {
    check(
        config(),
        expect![[r#"
        > submit 1 abcdef max=20
        > step 1=g
        1: 0+6 [0 1] -> 1
        1 started, 0 cached
        > draft 1 hix
        > step 1=2j
        1: 6+4 [0 1 2] drafts 3 -> 1
        > load
        blocks 3 active 0 evictable 13 free, sequences 1 running 0 waiting, 1 tokens, 0 preemptions
        > draft 1 z
        > step 1=k
        1: 9+2 [0 1 2] drafts 1 -> 1
        > draft 1 lmno
        > step 1=4p
        1: 10+5 [0 1 2 3] drafts 4 -> 1
        > step
        1: 15+1 [0 1 2 3] -> 1
    "#]],
    );
}

#[test]
fn drafts_are_limited_by_max_tokens_and_by_what_other_sequences_need() {
    // The limits are eight tokens per step and six blocks.
    let config = SchedulerConfig { max_num_batched_tokens: 8, max_model_len: 24, ..config() };
    check_in_cache(
        CacheSize { blocks_total: 6, ..cache() },
        config,
        expect![[r#"
        > submit 1 abc max=4
        > step
        1: 0+3 [0] -> 1
        1 started, 0 cached
        > draft 1 zzzz
        > step 1=1z
        1: 3+3 [0 1] drafts 2 -> 1
        > step
        1: 5+1 [0 1] -> 1
        1 finished, Length
        > submit 2 abcdef max=16
        > submit 3 g max=9
        > step
        2: 0+6 [1 2] -> 2
        3: 0+1 [3] -> 3
        2 started, 0 cached
        3 started, 0 cached
        > draft 2 zzzzzzzzz
        > draft 3 zzz
        > step
        2: 6+7 [1 2 4 5] drafts 6 -> 2
        3: 1+1 [3] -> 3
        > load
        blocks 5 active 1 evictable 0 free, sequences 2 running 0 waiting, 2 tokens, 0 preemptions
        > draft 2 zzzz
        > draft 3 zzz
        > step
        2: 7+5 [1 2 4] drafts 4 -> 2
        3: 2+3 [3 0] drafts 2 -> 3
    "#]],
    );
}

#[test]
fn prompts_and_siblings_get_no_drafts() {
    check(
        config(),
        expect![[r#"
        > submit 1,2 abcd max=9
        > draft 1 xyz
        > step
        1: 0+4 [0] -> 1,2
        1 started, 0 cached
        > submit 3,4 efgh max=9 lockstep=yes
        > step
        1: 4+1 [0 1] -> 1
        2: 4+1 [0 2] -> 2
        3: 0+4 [3] -> 3,4
        3 started, 0 cached
        > draft 3 xyz
        > step
        1: 5+1 [0 1] -> 1
        2: 5+1 [0 2] -> 2
        3: 4+1 [3 4] -> 3
        4: 4+1 [3 5] -> 4
    "#]],
    );
}

#[test]
fn a_step_has_a_limited_number_of_drafts_over_all_sequences() {
    let config = SchedulerConfig {
        max_num_batched_tokens: 8192,
        max_chunk_tokens: 8192,
        max_model_len: 4096,
        ..config()
    };
    let mut scheduler = Scheduler::new(config, CacheSize { block_tokens: 16, blocks_total: 4096 });
    let ids = (0..8).map(|request| SequenceId::new(request, 0));
    for id in ids.clone() {
        let stop = StopCriteria { max_tokens: 4000, ..StopCriteria::default() };
        let prompt = vec![id.request as u32; 5];
        scheduler.submit(NewRequest::new(id.request, 1, prompt, stop)).expect("there is room");
    }
    let mut batch = Batch::default();
    for _ in 0..2 {
        scheduler.schedule(&mut batch);
        let drafts: u32 = batch.sequences.iter().map(|sequence| sequence.num_draft_tokens).sum();
        let logits = batch.logits_indices().count() as u32;
        assert_eq!((batch.sequences.len(), logits), (8, 8 + drafts));
        assert!(drafts <= DRAFT_TOKENS_MAX, "{drafts} drafts");
        let sampled: Vec<_> = batch.samples.iter().map(|&id| SampledToken::new(id, 1)).collect();
        scheduler.commit(&batch, &sampled, &mut Vec::new());
        ids.clone().for_each(|id| scheduler.set_num_draft_tokens(id, 1000));
    }
    scheduler.schedule(&mut batch);
    let drafts: u32 = batch.sequences.iter().map(|sequence| sequence.num_draft_tokens).sum();
    assert_eq!(drafts, DRAFT_TOKENS_MAX);
}

#[test]
fn drafts_leave_a_block_for_each_later_sequence() {
    let config = SchedulerConfig { max_num_batched_tokens: 32, max_model_len: 24, ..config() };
    check_in_cache(
        CacheSize { blocks_total: 6, ..cache() },
        config,
        expect![[r#"
        > submit 2 abcdef max=16
        > submit 3 ghi max=9
        > step
        2: 0+6 [0 1] -> 2
        3: 0+3 [2] -> 3
        2 started, 0 cached
        3 started, 0 cached
        > draft 2 zzzzzzzzz
        > step
        2: 6+10 [0 1 3 4] drafts 9 -> 2
        3: 3+1 [2] -> 3
        > draft 2 zzzzzzzzz
        > step
        2: 7+9 [0 1 3 4] drafts 8 -> 2
        3: 4+1 [2 5] -> 3
        > load
        blocks 6 active 0 evictable 0 free, sequences 2 running 0 waiting, 2 tokens, 0 preemptions
    "#]],
    );
}

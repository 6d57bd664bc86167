//! Tests that prompts wait for the encoder outputs of their images, and that blocks with different images are not
//! shared.

use expect_test::expect;
use server_scheduler::{
    Batch, CacheSize, ImageDigest, ImageLimits, ImageSpan, NewRequest, Scheduler, SchedulerConfig,
    StopCriteria,
};

use crate::script::{check, config};

#[test]
fn a_prompt_waits_for_its_images_and_others_overtake_it() {
    check(
        config(),
        expect![[r#"
        > submit 1 ab....cd max=2 image=A@2+4
        > submit 2 xyz max=2
        > schedule
        image A is needed by 1
        2: 0+3 [0] -> 2
        > commit
        2 started, 0 cached
        > step
        2: 3+1 [0] -> 2
        2 finished, Length
        > provide A
        > step
        1: 0+8 [1 2] -> 1
        1 started, 0 cached
        > step
        1: 8+1 [1 2 3] -> 1
        1 finished, Length
    "#]],
    );
}

#[test]
fn equal_placeholders_of_different_images_are_not_shared() {
    check(
        config(),
        expect![[r#"
        > submit 1 ab......cdefgh image=A@2+6
        > step
        image A is needed by 1
        nothing
        > provide A
        > step
        1: 0+14 [0 1 2 3] -> 1
        1 started, 0 cached
        1 finished, Length
        > submit 2 ab......cdefgh image=B@2+6
        > step
        image B is needed by 2
        nothing
        > provide B
        > step
        2: 0+14 [3 4 5 6] -> 2
        2 started, 0 cached
        2 finished, Length
        > submit 3 ab......cdefgh image=A@2+6
        > step
        3: 12+2 [0 1 2 6] -> 3
        3 started, 12 cached
        3 finished, Length
    "#]],
    );
}

#[test]
fn a_cached_prefix_needs_no_encoder_output() {
    check(
        config(),
        expect![[r#"
        > submit 1 ab......cdefgh image=A@2+6
        > step
        image A is needed by 1
        nothing
        > provide A
        > step
        1: 0+14 [0 1 2 3] -> 1
        1 started, 0 cached
        1 finished, Length
        > submit 2 b...........cd image=B@1+11
        > step
        image B is needed by 2
        image A is evicted
        nothing
        > provide B
        > step
        2: 0+14 [3 4 5 6] -> 2
        2 started, 0 cached
        2 finished, Length
        > submit 3 ab......cdefghij image=A@2+6
        > step
        3: 12+4 [0 1 2 6] -> 3
        3 started, 12 cached
        3 finished, Length
    "#]],
    );
}

#[test]
fn concurrent_prompts_with_the_same_image_need_it_once() {
    check(
        config(),
        expect![[r#"
        > submit 1 a......bcd image=A@1+6
        > submit 2 x......yzx image=A@1+6
        > step
        image A is needed by 1
        nothing
        > provide A
        > step
        1: 0+10 [0 1 2] -> 1
        2: 0+6 [3 4]
        1 started, 0 cached
        2 started, 0 cached
        1 finished, Length
    "#]],
    );
}

#[test]
fn prompts_wait_for_room_for_their_images_in_order() {
    check(
        config(),
        expect![[r#"
        > submit 1 a........b image=A@1+8
        > submit 2 c........d image=B@1+8
        > submit 3 e..f image=C@1+2
        > submit 4 gh
        > step
        image A is needed by 1
        4: 0+2 [0] -> 4
        4 started, 0 cached
        4 finished, Length
        > provide A
        > step
        1: 0+10 [0 1 2] -> 1
        1 started, 0 cached
        1 finished, Length
        > step
        image B is needed by 2
        image C is needed by 3
        image A is evicted
        nothing
        > provide B
        > provide C
        > step
        2: 0+10 [2 3 4] -> 2
        3: 0+4 [5] -> 3
        2 started, 0 cached
        3 started, 0 cached
        2 finished, Length
        3 finished, Length
    "#]],
    );
}

#[test]
fn a_step_computes_bidirectional_spans_as_a_whole() {
    check(
        config(),
        expect![[r#"
        > submit 1 abcdefghijkl......mnopqrstuv......wx max=2 image=A@12+6 image=B@28+6 spans=whole
        > step
        image A is needed by 1
        image B is needed by 1
        nothing
        > provide A
        > provide B
        > step
        1: 0+12 [0 1 2]
        1 started, 0 cached
        > step
        1: 12+16 [0 1 2 3 4 5 6]
        > step
        1: 28+8 [0 1 2 3 4 5 6 7 8] -> 1
        > step
        1: 36+1 [0 1 2 3 4 5 6 7 8 9] -> 1
        1 finished, Length
    "#]],
    );
}

#[test]
fn a_bidirectional_span_that_exceeds_the_step_is_computed_alone() {
    check(
        config(),
        expect![[r#"
        > submit 1 x max=9
        > step
        1: 0+1 [0] -> 1
        1 started, 0 cached
        > submit 2 a....................b max=2 image=A@1+20 spans=whole
        > submit 3 yz
        > step
        image A is needed by 2
        1: 1+1 [0] -> 1
        3: 0+2 [1] -> 3
        3 started, 0 cached
        3 finished, Length
        > provide A
        > step
        1: 2+1 [0] -> 1
        2: 0+1 [1]
        2 started, 0 cached
        > step
        1: 3+1 [0] -> 1
        2: 1+20 [1 2 3 4 5 6]
        > step
        image A is evicted
        1: 4+1 [0 7] -> 1
        2: 21+1 [1 2 3 4 5 6] -> 2
    "#]],
    );
}

#[test]
fn a_cached_prefix_does_not_end_within_a_bidirectional_span() {
    check(
        config(),
        expect![[r#"
        > submit 1 abc......defgh image=A@3+6 spans=whole
        > step
        image A is needed by 1
        nothing
        > provide A
        > step
        1: 0+14 [0 1 2 3] -> 1
        1 started, 0 cached
        1 finished, Length
        > submit 2 abc......xyz image=A@3+6 spans=whole
        > step
        2: 0+12 [3 4 5] -> 2
        2 started, 0 cached
        2 finished, Length
    "#]],
    );
}

#[test]
fn an_image_that_cannot_be_encoded_is_needed_by_all_prompts_that_wait_for_it() {
    check(
        config(),
        expect![[r#"
        > submit 1 a......bcd image=A@1+6
        > submit 2 x......yzx image=A@1+6
        > submit 3 e....f image=B@1+4
        > step
        image A is needed by 1
        image B is needed by 3
        nothing
        > cancel A
        needed by 1,2
        > abort 1
        > abort 2
        > provide B
        > step
        3: 0+6 [0 1] -> 3
        3 started, 0 cached
        3 finished, Length
    "#]],
    );
}

#[test]
fn an_aborted_prompt_releases_its_images() {
    check(
        config(),
        expect![[r#"
        > submit 1 a......bcd image=A@1+6
        > step
        image A is needed by 1
        nothing
        > abort 1
        > submit 2 a.......cd image=B@1+7
        > step
        image B is needed by 2
        nothing
        > provide A
        > provide B
        > step
        image A is evicted
        2: 0+10 [0 1 2] -> 2
        2 started, 0 cached
        2 finished, Length
    "#]],
    );
}

#[test]
fn the_encoder_gets_images_up_to_its_budget() {
    check(
        config(),
        expect![[r#"
        > encoder 5
        > submit 1 a...b...c image=A@1+3 image=B@5+3
        > submit 2 d..e image=C@1+2
        > submit 3 f..g image=D@1+2
        > step
        image A is needed by 1
        image B is needed by 1
        nothing
        > provide A
        > step
        image C is needed by 2
        nothing
        > abort 3
        > provide B
        > step
        1: 0+9 [0 1 2] -> 1
        1 started, 0 cached
        1 finished, Length
        > submit 4 h..i image=E@1+2
        > provide C
        > step
        image E is needed by 4
        2: 0+4 [2] -> 2
        2 started, 0 cached
        2 finished, Length
    "#]],
    );
}

#[test]
fn an_image_of_a_request_that_goes_first_is_encoded_next() {
    check(
        config(),
        expect![[r#"
        > encoder 2
        > submit 1 a..b tenant=1 image=A@1+2
        > submit 2 c..d tenant=1 image=B@1+2
        > submit 3 e..f tenant=1 image=C@1+2
        > step
        image A is needed by 1
        nothing
        > submit 4 g..h tenant=2 image=D@1+2
        > step
        nothing
        > provide A
        > step
        image D is needed by 4
        1: 0+4 [0] -> 1
        1 started, 0 cached
        1 finished, Length
        > provide D
        > step
        image B is needed by 2
        4: 0+4 [1] -> 4
        4 started, 0 cached
        4 finished, Length
    "#]],
    );
}

#[test]
fn many_prompts_that_wait_for_their_images_do_not_hide_a_prompt_without_images() {
    // In the first case, all images have room. In the second, most prompts wait for room for their images.
    for rows_max in [1000, 12] {
        let config = SchedulerConfig { max_queue: 256, ..config() };
        let mut scheduler = Scheduler::new(config, CacheSize { block_tokens: 4, blocks_total: 1024 });
        scheduler.set_image_limits(ImageLimits { rows_max, max_num_encoder_input_tokens: 4 });
        let stop = StopCriteria { max_tokens: 1, ..StopCriteria::default() };
        for image in 0..130 {
            let mut request = NewRequest::new(u64::from(image), 1, vec![7; 4], stop.clone());
            let digest = ImageDigest([image; 32]);
            request.images.spans.push(ImageSpan { digest, start: 1, num_tokens: 2, first_row: 0 });
            scheduler.submit(request).expect("the queue has room");
        }
        scheduler.submit(NewRequest::new(130, 1, vec![7; 4], stop)).expect("the queue has room");
        let mut batch = Batch::default();
        scheduler.schedule(&mut batch);
        scheduler.check_invariants();
        let scheduled: Vec<_> = batch.sequences.iter().map(|sequence| sequence.id.request).collect();
        assert_eq!(scheduled, [130], "with {rows_max} rows");
    }
}

#[test]
fn a_prompt_whose_images_are_cached_does_not_wait_for_room() {
    check(
        config(),
        expect![[r#"
        > submit 1 ab......cdefgh image=A@2+6
        > step
        image A is needed by 1
        nothing
        > provide A
        > step
        1: 0+14 [0 1 2 3] -> 1
        1 started, 0 cached
        1 finished, Length
        > submit 2 a........b image=B@1+8
        > submit 3 c........d image=C@1+8
        > submit 4 ab......cdefghij image=A@2+6
        > step
        image B is needed by 2
        image A is evicted
        4: 12+4 [0 1 2 3] -> 4
        4 started, 12 cached
        4 finished, Length
    "#]],
    );
}

#[test]
fn images_of_requests_that_cannot_be_admitted_count_once() {
    check(
        SchedulerConfig { max_num_seqs: 1, ..config() },
        expect![[r#"
        > submit 1 ab max=9
        > submit 2 a....b image=A@1+4
        > submit 3 c....d image=A@1+4
        > submit 4 e......f image=B@1+6
        > images
        10 image tokens unencoded, 0 encoded, 0 hits, 0 misses
        > step
        1: 0+2 [0] -> 1
        1 started, 0 cached
        > abort 4
        > images
        4 image tokens unencoded, 0 encoded, 0 hits, 0 misses
        > abort 2
        > images
        4 image tokens unencoded, 0 encoded, 0 hits, 0 misses
        > abort 1
        > step
        image A is needed by 3
        nothing
        > images
        4 image tokens unencoded, 0 encoded, 0 hits, 1 misses
        > provide A
        > images
        0 image tokens unencoded, 4 encoded, 0 hits, 1 misses
        > abort 3
        > submit 5 g....h image=A@1+4
        > images
        0 image tokens unencoded, 4 encoded, 0 hits, 1 misses
    "#]],
    );
}

#[test]
fn images_of_cached_tokens_count_until_the_request_is_admitted() {
    check(
        config(),
        expect![[r#"
        > submit 1 ab......cdefgh image=A@2+6
        > step
        image A is needed by 1
        nothing
        > provide A
        > step
        1: 0+14 [0 1 2 3] -> 1
        1 started, 0 cached
        1 finished, Length
        > submit 2 b...........cd image=B@1+11
        > step
        image B is needed by 2
        image A is evicted
        nothing
        > provide B
        > step
        2: 0+14 [3 4 5 6] -> 2
        2 started, 0 cached
        2 finished, Length
        > submit 3 ab......cdefghij image=A@2+6
        > images
        6 image tokens unencoded, 11 encoded, 0 hits, 2 misses
        > step
        3: 12+4 [0 1 2 6] -> 3
        3 started, 12 cached
        3 finished, Length
        > images
        0 image tokens unencoded, 11 encoded, 0 hits, 2 misses
    "#]],
    );
}

#[test]
fn lookups_of_images_are_counted_once_for_each_sequence() {
    check(
        config(),
        expect![[r#"
        > submit 1 a......bcd image=A@1+6
        > submit 2 x......yzx image=A@1+6
        > step
        image A is needed by 1
        nothing
        > step
        nothing
        > images
        6 image tokens unencoded, 0 encoded, 1 hits, 1 misses
        > provide A
        > abort 1
        > abort 2
        > submit 3 y......x image=A@1+6
        > steps 1
        3 started, 0 cached
        3 finished, Length
        > images
        0 image tokens unencoded, 6 encoded, 2 hits, 1 misses
    "#]],
    );
}

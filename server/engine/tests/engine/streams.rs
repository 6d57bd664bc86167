//! Tests the streams of requests, including concurrent requests of which some are dropped or aborted.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use server_engine::sim::expected_tokens;
use server_engine::{Event, FinishReason, Request, Sampling, StopCriteria};
use tokio::task::JoinSet;

use crate::support::{Setup, VOCABULARY, outcome, prompt, request, sampled, settled, tokens};

/// Returns a random request. The prompt of every third request begins with the same tokens.
fn one_of_many(which: u32, rng: &mut StdRng) -> Request {
    let mut tokens = if which.is_multiple_of(3) { prompt(0, 40) } else { Vec::new() };
    tokens.extend(prompt(which, rng.random_range(1..60)));
    request(&tokens, rng.random_range(1..40))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_half_of_200_streams_does_not_affect_the_others() {
    let mut rng = StdRng::seed_from_u64(1);
    // Only two of the longest sequences fit into the cache, so sequences are preempted.
    let engine = Setup::new(40).start();
    let handle = engine.handle();
    let mut tasks = JoinSet::new();
    for which in 0..200 {
        let request = one_of_many(which, &mut rng);
        let expected = expected_tokens(&request.prompt, request.stop.max_tokens, VOCABULARY);
        let events_max = (which % 2 == 1).then(|| rng.random_range(0..request.stop.max_tokens + 2));
        let mut stream = handle.submit(request).unwrap();
        tasks.spawn(async move {
            match events_max {
                None => assert_eq!(tokens(stream).await, expected, "stream {which}"),
                Some(events_max) => {
                    for _ in 0..events_max {
                        let event = stream.next().await;
                        assert!(event.is_some(), "stream {which} ended early");
                    }
                }
            }
        });
    }
    tasks.join_all().await;
    settled(&handle).await;
    engine.shutdown().unwrap();
}

#[tokio::test]
async fn streams_dropped_at_any_step_release_their_blocks() {
    // The test releases each step, so that streams are dropped while their requests wait, prefill and decode.
    for seed in 0..20 {
        let mut rng = StdRng::seed_from_u64(seed);
        let (engine, gate) = Setup::new(60).start_gated();
        let handle = engine.handle();
        let mut streams = Vec::new();
        for which in 0..40 {
            let request = one_of_many(which, &mut rng);
            let expected = expected_tokens(&request.prompt, request.stop.max_tokens, VOCABULARY);
            let dropped = which % 2 == 1 && request.stop.max_tokens > 3;
            streams.push((which, handle.submit(request).unwrap(), expected, dropped));
        }
        let mut dropped = 0;
        while streams.iter().any(|stream| stream.3) {
            gate.arrive();
            streams.retain(|stream| {
                let drop_now = stream.3 && rng.random_bool(0.1);
                dropped += u32::from(drop_now);
                !drop_now
            });
            gate.pass();
        }
        drop(gate);
        assert!(dropped > 10, "{dropped} were dropped");
        for (which, stream, expected, _) in streams {
            assert_eq!(tokens(stream).await, expected, "stream {which} with seed {seed}");
        }
        settled(&handle).await;
    }
}

#[tokio::test]
async fn a_stream_dropped_during_a_step_is_not_in_the_next() {
    let (engine, gate) = Setup::new(100).start_gated();
    let handle = engine.handle();
    let running = handle.submit(request(&prompt(1, 20), 30)).unwrap();
    gate.arrive();
    let dropped = handle.submit(Request { num_sequences: 3, ..request(&prompt(2, 20), 30) }).unwrap();
    gate.pass();
    for _ in 0..2 {
        assert!(gate.arrive().sequences.len() > 1);
        gate.pass();
    }
    let batch = gate.arrive();
    assert_eq!(batch.sequences.len(), 4, "all three sequences have forked");
    assert_eq!(handle.load().borrow().load.running, 4);
    drop(dropped);
    gate.pass();
    assert_eq!(gate.arrive().sequences.len(), 1);
    let load = handle.load().borrow().load;
    assert_eq!((load.running, load.waiting), (1, 0));
    gate.pass();
    drop(gate);
    assert_eq!(tokens(running).await, expected_tokens(&prompt(1, 20), 30, VOCABULARY));
    settled(&handle).await;
}

#[tokio::test]
async fn an_aborted_sequence_is_not_in_the_next_step_and_does_not_affect_its_siblings() {
    let (engine, gate) = Setup::new(100).start_gated();
    let handle = engine.handle();
    let expected = expected_tokens(&prompt(1, 20), 30, VOCABULARY);
    let mut stream = handle.submit(Request { num_sequences: 3, ..request(&prompt(1, 20), 30) }).unwrap();
    for _ in 0..3 {
        gate.arrive();
        gate.pass();
    }
    assert_eq!(gate.arrive().sequences.len(), 3, "all sequences have forked");
    // The blocked step computes another token of the aborted sequence. This token is discarded.
    stream.abort(1);
    stream.abort(1);
    gate.pass();
    assert_eq!(gate.arrive().sequences.len(), 2);
    assert_eq!(handle.load().borrow().load.running, 2);
    gate.pass();
    drop(gate);
    let outcome = outcome(stream).await;
    assert_eq!(outcome.failure, None);
    assert!(outcome.tokens[1].is_empty() && outcome.reasons[1].is_none(), "{:?}", outcome.tokens[1]);
    assert_eq!([&outcome.tokens[0], &outcome.tokens[2]], [&expected; 2]);
    settled(&handle).await;
}

#[tokio::test]
async fn sequences_aborted_at_any_step_do_not_affect_the_others() {
    for seed in 0..20 {
        let mut rng = StdRng::seed_from_u64(seed);
        let (engine, gate) = Setup::new(60).start_gated();
        let handle = engine.handle();
        // This request runs longer than the others, so there is always a next step.
        let keeper = handle.submit(request(&prompt(99, 5), 40)).unwrap();
        let mut streams = Vec::new();
        for which in 0..12 {
            let request = Request { num_sequences: rng.random_range(1..5), ..one_of_many(which, &mut rng) };
            let expected = expected_tokens(&request.prompt, request.stop.max_tokens, VOCABULARY);
            let aborted = vec![false; request.num_sequences as usize];
            streams.push((handle.submit(request).unwrap(), expected, aborted));
        }
        for _ in 0..30 {
            gate.arrive();
            let (stream, _, aborted) = &mut streams[rng.random_range(0..12)];
            let index = rng.random_range(0..aborted.len());
            stream.abort(index as u32);
            aborted[index] = true;
            gate.pass();
        }
        drop(gate);
        assert_eq!(tokens(keeper).await, expected_tokens(&prompt(99, 5), 40, VOCABULARY));
        for (stream, expected, aborted) in streams {
            let outcome = outcome(stream).await;
            assert_eq!(outcome.failure, None, "seed {seed}");
            for (index, aborted) in aborted.into_iter().enumerate() {
                if !aborted {
                    assert_eq!(outcome.tokens[index], expected, "sequence {index} with seed {seed}");
                }
            }
        }
        settled(&handle).await;
    }
}

#[tokio::test]
async fn a_request_without_sequences_is_removed() {
    let mut setup = Setup::new(100);
    setup.engine.scheduler.max_num_seqs = 1;
    setup.engine.scheduler.max_queue = 2;
    let (engine, gate) = setup.start_gated();
    let handle = engine.handle();
    let running = handle.submit(request(&[1, 2, 3], 5)).unwrap();
    gate.arrive();
    let mut waiting = handle.submit(Request { num_sequences: 1, ..request(&[4], 5) }).unwrap();
    waiting.abort(0);
    assert!(waiting.next().await.is_none());
    gate.pass();
    gate.arrive();
    assert_eq!(handle.waiting_sequences(), 0, "while the stream is still held");
    gate.pass();
    drop(gate);
    assert_eq!(tokens(running).await, expected_tokens(&[1, 2, 3], 5, VOCABULARY));
    settled(&handle).await;
}

#[tokio::test]
async fn a_dropped_request_frees_its_queue_slot() {
    let mut setup = Setup::new(100);
    setup.engine.scheduler.max_num_seqs = 1;
    setup.engine.scheduler.max_queue = 2;
    let (engine, gate) = setup.start_gated();
    let handle = engine.handle();
    let running = handle.submit(request(&[1, 2, 3], 5)).unwrap();
    gate.arrive();
    let waiting = handle.submit(request(&[4], 5)).unwrap();
    drop(waiting);
    gate.pass();
    gate.arrive();
    assert_eq!(handle.waiting_sequences(), 0);
    // The number of submissions in the load includes the dropped request.
    assert_eq!((handle.load().borrow().submissions, handle.submissions()), (2, 2));
    gate.pass();
    drop(gate);
    assert_eq!(tokens(running).await, expected_tokens(&[1, 2, 3], 5, VOCABULARY));
}

#[tokio::test]
async fn a_seed_gives_the_same_output_alone_and_among_others() {
    let request = |seed| sampled(&prompt(9, 30), 25, seed);
    let mut alone = Vec::new();
    for seed in 0..8 {
        let engine = Setup::new(200).start();
        alone.push(tokens(engine.handle().submit(request(seed)).unwrap()).await);
    }
    let mut distinct = alone.clone();
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), 8, "different seeds give different outputs");

    let engine = Setup::new(60).start();
    let handle = engine.handle();
    let mut rng = StdRng::seed_from_u64(3);
    let mut others = Vec::new();
    let mut streams = Vec::new();
    for seed in 0..8 {
        for which in 0..6 {
            others.push(handle.submit(one_of_many(which + seed, &mut rng)).unwrap());
        }
        streams.push(handle.submit(request(u64::from(seed))).unwrap());
    }
    for (stream, alone) in streams.into_iter().zip(alone) {
        assert_eq!(tokens(stream).await, alone);
    }
}

#[tokio::test]
async fn prefix_caching_changes_no_output() {
    for prefix_caching in [false, true] {
        let mut setup = Setup::new(100);
        setup.engine.scheduler.prefix_caching = prefix_caching;
        let (engine, reports) = setup.start_observed();
        let handle = engine.handle();
        for (round, cached) in [(0, 0), (1, 48), (2, 48)] {
            let mut tokens = prompt(4, 50);
            tokens.extend(prompt(round, 7));
            let outcome = outcome(handle.submit(request(&tokens, 20)).unwrap()).await;
            assert_eq!(outcome.tokens, [expected_tokens(&tokens, 20, VOCABULARY)]);
            assert_eq!(outcome.cached_tokens, Some(if prefix_caching { cached } else { 0 }));
        }
        settled(&handle).await;
        engine.shutdown().unwrap();
        let (mut prompts, mut cached, mut prefill) = (0, 0, 0);
        for report in reports {
            prompts += report.prompt_tokens;
            cached += report.cached_tokens;
            prefill += report.prefill_tokens;
        }
        let expected = if prefix_caching { 96 } else { 0 };
        assert_eq!((prompts, cached, prefill), (171, expected, 171 - expected));
    }
}

#[tokio::test]
async fn a_tiny_cache_preempts_and_gives_the_output_of_a_large_one() {
    for prefix_caching in [false, true] {
        let mut setup = Setup::new(12);
        setup.engine.scheduler.prefix_caching = prefix_caching;
        let (engine, reports) = setup.start_observed();
        let handle = engine.handle();
        let streams: Vec<_> =
            (0..10).map(|which| handle.submit(request(&prompt(which, 12), 70)).unwrap()).collect();
        let drawn: Vec<_> =
            (0..4).map(|seed| handle.submit(sampled(&prompt(seed, 9), 60, 5)).unwrap()).collect();
        for (which, stream) in (0..).zip(streams) {
            assert_eq!(tokens(stream).await, expected_tokens(&prompt(which, 12), 70, VOCABULARY));
        }
        for (seed, stream) in (0..).zip(drawn) {
            let large = Setup::new(1000).start();
            let alone = tokens(large.handle().submit(sampled(&prompt(seed, 9), 60, 5)).unwrap()).await;
            assert_eq!(tokens(stream).await, alone);
        }
        settled(&handle).await;
        engine.shutdown().unwrap();
        let preemptions: u32 = reports.iter().map(|report| report.preemptions).sum();
        assert!(preemptions > 0);
    }
}

#[tokio::test]
async fn siblings_share_the_prompt_and_then_diverge() {
    for blocks_total in [12, 500] {
        let engine = Setup::new(blocks_total).start();
        let handle = engine.handle();
        let greedy = Request { num_sequences: 4, ..request(&prompt(3, 21), 30) };
        let greedy = outcome(handle.submit(greedy).unwrap()).await;
        assert_eq!(greedy.tokens, vec![expected_tokens(&prompt(3, 21), 30, VOCABULARY); 4]);
        assert_eq!(greedy.reasons, [Some(FinishReason::Length); 4]);

        let drawn = Request { num_sequences: 4, ..sampled(&prompt(3, 21), 30, 77) };
        let together = outcome(handle.submit(drawn.clone()).unwrap()).await;
        let alone = outcome(handle.submit(Request { num_sequences: 1, ..drawn.clone() }).unwrap()).await;
        assert_eq!(
            together.tokens[0], alone.tokens[0],
            "the first sequence does not depend on the number of sequences"
        );
        let mut distinct = together.tokens.clone();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), 4);
        settled(&handle).await;
    }
}

#[tokio::test]
async fn stop_tokens_end_a_sequence_after_min_tokens() {
    let engine = Setup::new(100).start();
    let handle = engine.handle();
    let free = expected_tokens(&prompt(5, 10), 20, VOCABULARY);
    let with_stop = |tokens_min| Request {
        stop: StopCriteria { stop_token_ids: vec![free[6]], max_tokens: 20, min_tokens: tokens_min },
        ..request(&prompt(5, 10), 20)
    };
    assert_eq!(free.iter().position(|&token| token == free[6]), Some(6), "otherwise the test is meaningless");

    let stopped = outcome(handle.submit(with_stop(6)).unwrap()).await;
    assert_eq!(stopped.tokens, [free[..7].to_vec()]);
    assert_eq!(stopped.reasons, [Some(FinishReason::Stop)]);
    let later = outcome(handle.submit(with_stop(7)).unwrap()).await;
    assert_eq!(later.tokens[0][..6], free[..6]);
    assert!(later.tokens[0].len() > 7 && !later.tokens[0][..7].contains(&free[6]), "{later:?}");
}

#[tokio::test]
async fn each_token_has_the_requested_number_of_logprobs() {
    let engine = Setup::new(100).start();
    let handle = engine.handle();
    for count in [0, 5] {
        let mut logprobs_request = request(&prompt(5, 10), 8);
        logprobs_request.sampling = Sampling { logprobs: Some(count), ..logprobs_request.sampling };
        let mut stream = handle.submit(logprobs_request).unwrap();
        let mut seen = 0;
        while let Some(event) = stream.next().await {
            if let Event::Token { token, logprobs, .. } = event {
                let logprobs = logprobs.unwrap();
                assert_eq!(logprobs.chosen.token, token);
                assert_eq!(logprobs.top.len(), count as usize);
                assert!(logprobs.top.is_sorted_by(|a, b| a.logprob >= b.logprob));
                assert!(logprobs.top.first().is_none_or(|top| *top == logprobs.chosen), "greedy");
                seen += 1;
            }
        }
        assert_eq!(seen, 8);
    }
}

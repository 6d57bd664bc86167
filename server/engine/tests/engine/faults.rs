//! Tests of failed steps, fatal errors of the runner, and rejected requests.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use server_engine::sim::{SimCosts, SimFault, SimFaultKind, expected_tokens};
use server_engine::{Engine, EngineState, Failure, Rejection, Request, Sampling, SubmitError};

use crate::support::{Setup, VOCABULARY, outcome, prompt, request, settled, tokens};

fn with_fault(step: u64, kind: SimFaultKind) -> Setup {
    let mut setup = Setup::new(100);
    setup.sim.faults.push(SimFault { step, kind });
    setup
}

#[tokio::test]
async fn a_failed_step_fails_its_requests_and_the_engine_continues() {
    for failing in 0..8 {
        let mut setup = with_fault(failing, SimFaultKind::Step);
        setup.engine.scheduler.max_num_seqs = 4;
        let (engine, gate) = setup.start_gated();
        let handle = engine.handle();
        // Submit a prompt of three chunks, a second prompt that shares them, and two others, so that there are more
        // sequences than can run at the same time.
        let mut shared = prompt(1, 150);
        shared.push(5);
        let requests = [
            Request { num_sequences: 3, ..request(&prompt(1, 150), 40) },
            request(&shared, 40),
            request(&prompt(2, 30), 10),
            request(&prompt(3, 30), 10),
        ];
        let streams = requests.clone().map(|request| handle.submit(request).unwrap());
        let mut rows = 0;
        for _ in 0..=failing {
            rows = gate.arrive().sequences.len();
            gate.pass();
        }
        drop(gate);
        let mut failed = 0;
        for (request, stream) in requests.into_iter().zip(streams) {
            let expected = expected_tokens(&request.prompt, request.stop.max_tokens, VOCABULARY);
            let outcome = outcome(stream).await;
            match &outcome.failure {
                None => assert_eq!(outcome.tokens, vec![expected; request.num_sequences as usize]),
                Some(failure) => {
                    assert_eq!(*failure, Failure::Step("a simulated fault".to_owned()));
                    assert!(outcome.tokens.iter().all(|tokens| expected.starts_with(tokens)));
                    failed += 1;
                }
            }
        }
        assert!(
            (1..=rows).contains(&failed),
            "{failed} requests failed with the {rows} sequences of step {failing}"
        );

        // The prefix cache contains no blocks of the failed step.
        for prompt in [prompt(1, 150), shared, prompt(2, 30)] {
            let again = tokens(handle.submit(request(&prompt, 40)).unwrap()).await;
            assert_eq!(again, expected_tokens(&prompt, 40, VOCABULARY), "after step {failing} failed");
        }
        settled(&handle).await;
        assert!(handle.is_alive());
    }
}

#[tokio::test]
async fn a_failed_step_does_not_change_the_measured_rates() {
    let mut setup = with_fault(1, SimFaultKind::Step);
    setup.sim.costs = SimCosts { step: Duration::from_millis(5), ..SimCosts::default() };
    let (engine, reports) = setup.start_observed();
    let handle = engine.handle();
    tokens(handle.submit(request(&prompt(1, 8), 1)).unwrap()).await;
    settled(&handle).await;
    let rate = handle.load().borrow().prefill_tokens_per_second;
    assert_eq!(rate, 8.0 / 0.005);
    // The failed step takes as long as the first step, but computes more tokens.
    let failed = outcome(handle.submit(request(&prompt(2, 64), 1)).unwrap()).await;
    assert!(failed.failure.is_some());
    settled(&handle).await;
    assert_eq!(handle.load().borrow().prefill_tokens_per_second, rate);
    engine.shutdown().unwrap();
    let last = reports.iter().last().unwrap();
    assert_eq!((last.requests_failed, last.step_time), (1, Duration::from_millis(5)));
}

#[tokio::test]
async fn invalid_logits_fail_only_their_request() {
    let (engine, gate) = with_fault(3, SimFaultKind::NotANumber(1)).start_gated();
    let handle = engine.handle();
    let first = handle.submit(request(&prompt(1, 9), 20)).unwrap();
    gate.arrive();
    let second = handle.submit(Request { num_sequences: 2, ..request(&prompt(2, 9), 20) }).unwrap();
    let third = handle.submit(request(&prompt(3, 9), 20)).unwrap();
    gate.pass();
    drop(gate);
    assert_eq!(tokens(first).await, expected_tokens(&prompt(1, 9), 20, VOCABULARY));
    let failed = outcome(second).await;
    assert!(matches!(&failed.failure, Some(Failure::Step(message)) if message.contains("NaN")));
    assert_eq!(failed.tokens.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2], "the tokens of steps 1 and 2");
    assert_eq!(tokens(third).await, expected_tokens(&prompt(3, 9), 20, VOCABULARY));
    settled(&handle).await;
}

#[tokio::test]
async fn a_bias_that_bans_all_tokens_fails_only_its_request_and_is_no_fault_of_the_engine() {
    let (engine, reports) = Setup::new(100).start_observed();
    let handle = engine.handle();
    let mut banned = request(&[1, 2], 5);
    banned.sampling.logit_bias = (0..VOCABULARY).map(|token| (token, f32::NEG_INFINITY)).collect();
    let other = handle.submit(request(&[1, 2], 5)).unwrap();
    let failed = outcome(handle.submit(banned).unwrap()).await;
    assert!(matches!(&failed.failure, Some(Failure::NoToken(_))), "{failed:?}");
    assert_eq!(tokens(other).await, expected_tokens(&[1, 2], 5, VOCABULARY));
    settled(&handle).await;
    engine.shutdown().unwrap();
    assert!(reports.iter().all(|report| report.requests_failed == 0));
}

#[tokio::test]
async fn a_fatal_error_fails_all_requests_and_is_reported() {
    for (kind, reason) in [
        (SimFaultKind::Fatal, "failed to run the model: a simulated fatal fault"),
        (SimFaultKind::Panic, "a simulated panic"),
    ] {
        let mut setup = with_fault(4, kind);
        setup.engine.scheduler.max_num_seqs = 2;
        let (engine, gate) = setup.start_gated();
        let handle = engine.handle();
        let streams: Vec<_> =
            (0..5).map(|which| handle.submit(request(&prompt(which, 10), 90)).unwrap()).collect();
        drop(gate);
        for stream in streams {
            let outcome = outcome(stream).await;
            assert_eq!(outcome.failure, Some(Failure::Stopped));
            assert!(!handle.is_alive(), "the engine is dead when its streams fail");
        }
        assert_eq!(handle.wait_for_failure().await.reason, reason);
        assert_eq!(handle.load().borrow().state, EngineState::Dead);
        assert_eq!(handle.submit(request(&[1], 1)).unwrap_err(), SubmitError::Stopped);
        assert_eq!(handle.drain().await.unwrap_err().reason, reason);
        assert_eq!(engine.shutdown().unwrap_err().reason, reason);
        assert_eq!(handle.waiting_sequences(), 0);
    }
}

#[tokio::test]
async fn draining_finishes_accepted_requests_and_rejects_new_ones() {
    let mut setup = Setup::new(100);
    setup.engine.scheduler.max_num_seqs = 2;
    let (engine, gate) = setup.start_gated();
    let handle = engine.handle();
    let streams: Vec<_> =
        (0..6).map(|which| handle.submit(request(&prompt(which, 10), 20)).unwrap()).collect();
    gate.arrive();
    handle.begin_drain();
    assert_eq!(handle.submit(request(&[1], 1)).unwrap_err(), SubmitError::Draining);
    assert!(handle.is_alive());
    gate.pass();
    gate.arrive();
    assert_eq!(handle.load().borrow().state, EngineState::Draining);
    gate.pass();
    drop(gate);
    handle.drain().await.unwrap();
    for (which, stream) in (0..).zip(streams) {
        assert_eq!(tokens(stream).await, expected_tokens(&prompt(which, 10), 20, VOCABULARY));
    }
    assert!(!handle.is_alive());
    assert_eq!(handle.submit(request(&[1], 1)).unwrap_err(), SubmitError::Stopped);
    let mut dead = std::pin::pin!(handle.wait_for_failure());
    assert_eq!(
        dead.as_mut().poll(&mut Context::from_waker(Waker::noop())),
        Poll::Pending,
        "the engine did not fail"
    );
    engine.shutdown().unwrap();
}

#[tokio::test]
async fn dropping_the_engine_fails_unfinished_requests() {
    let engine = Setup::new(1000).start();
    let handle = engine.handle();
    let mut stream = handle.submit(request(&[1, 2, 3], 7000)).unwrap();
    stream.next().await.unwrap();
    drop(engine);
    let mut last = None;
    while let Some(event) = stream.next().await {
        last = Some(event);
    }
    let finished = matches!(last, Some(server_engine::Event::Finished { .. }));
    assert!(finished || last == Some(server_engine::Event::Failed(Failure::Stopped)), "{last:?}");
    assert_eq!(handle.submit(request(&[1], 1)).unwrap_err(), SubmitError::Stopped);
    assert_eq!(handle.waiting_sequences(), 0);
}

#[tokio::test]
async fn a_full_queue_rejects_immediately() {
    let mut setup = Setup::new(100);
    setup.engine.scheduler.max_num_seqs = 1;
    setup.engine.scheduler.max_queue = 3;
    let (engine, gate) = setup.start_gated();
    let handle = engine.handle();
    let mut streams = vec![handle.submit(request(&[1, 2, 3], 4)).unwrap()];
    gate.arrive();
    gate.pass();
    gate.arrive();
    assert_eq!(handle.waiting_sequences(), 0, "the first request has started");
    for which in 0..3 {
        assert_eq!(handle.waiting_sequences(), which);
        streams.push(handle.submit(request(&[1, 2, 3], 4)).unwrap());
    }
    for _ in 0..2 {
        let refused = handle.submit(request(&[1, 2, 3], 4)).unwrap_err();
        assert_eq!(refused, SubmitError::Rejected(Rejection::QueueFull { max_queue: 3 }));
        assert_eq!(refused.to_string(), "the queue is full (limit: 3 sequences)");
    }
    gate.pass();
    drop(gate);
    for stream in streams {
        assert_eq!(tokens(stream).await, expected_tokens(&[1, 2, 3], 4, VOCABULARY));
    }
    assert_eq!(handle.waiting_sequences(), 0);
    assert_eq!(tokens(handle.submit(request(&[9], 4)).unwrap()).await, expected_tokens(&[9], 4, VOCABULARY));
}

#[tokio::test]
async fn requests_that_can_never_run_are_rejected_with_the_reason() {
    let mut setup = Setup::new(10);
    setup.engine.scheduler.max_num_seqs = 4;
    let engine = setup.start();
    let handle = engine.handle();
    let check = |request: Request, expected: SubmitError, message: &str| {
        let refused = handle.submit(request).unwrap_err();
        assert_eq!(refused, expected);
        assert!(refused.to_string().contains(message), "{refused}");
    };
    check(request(&[], 5), SubmitError::Rejected(Rejection::EmptyPrompt), "empty");
    let too_long = |prompt_tokens| Rejection::TooLong { prompt_tokens, max_model_len: 80 };
    check(request(&[1; 79], 2), SubmitError::Rejected(too_long(79)), "80");
    check(request(&[1; 3], u32::MAX), SubmitError::Rejected(too_long(3)), "3 prompt tokens");
    let many = Rejection::TooManySequences { num_sequences: 5, max_num_seqs: 4 };
    let five = Request { num_sequences: 5, ..request(&[1], 1) };
    check(five, SubmitError::Rejected(many), "5 sequences");
    let none = Request { num_sequences: 0, ..request(&[1], 1) };
    check(none, SubmitError::Invalid { parameter: "num_sequences" }, "num_sequences");
    let cold = Sampling { temperature: -1.0, ..Sampling::greedy() };
    let cold = Request { sampling: cold, ..request(&[1], 1) };
    check(cold, SubmitError::Invalid { parameter: "temperature" }, "temperature");
    let unknown = SubmitError::UnknownToken { token: VOCABULARY, vocabulary: VOCABULARY };
    check(request(&[1, VOCABULARY], 1), unknown, "token 300");
    let biased = Sampling { logit_bias: vec![(VOCABULARY, 1.0)], ..Sampling::greedy() };
    check(Request { sampling: biased, ..request(&[1], 1) }, unknown, "300 tokens");
    assert_eq!(handle.waiting_sequences(), 0);

    let longest = tokens(handle.submit(request(&[1; 79], 1)).unwrap()).await;
    assert_eq!(longest, expected_tokens(&[1; 79], 1, VOCABULARY));
}

#[test]
fn an_engine_with_invalid_limits_does_not_start() {
    let start = |change: fn(&mut Setup)| {
        let mut setup = Setup::new(10);
        change(&mut setup);
        let runner = Box::new(setup.runner());
        Engine::start(setup.engine, runner, Box::new(|_| {})).err().map(|error| error.to_string())
    };
    let message = |text: &str| Some(text.to_owned());
    let least = |what, min, value| Some(format!("{what} must be at least {min}, but it is {value}"));
    assert_eq!(
        start(|setup| setup.engine.scheduler.max_num_batched_tokens = 0),
        least("max_num_batched_tokens", 1, 0)
    );
    assert_eq!(start(|setup| setup.engine.scheduler.max_num_seqs = 0), least("max_num_seqs", 1, 0));
    assert_eq!(start(|setup| setup.engine.scheduler.max_queue = 0), least("max_queue", 1, 0));
    assert_eq!(start(|setup| setup.engine.scheduler.max_model_len = 1), least("max_model_len", 2, 1));
    let many = "max_queue must be at most 1048576, but it is 4294967295";
    assert_eq!(start(|setup| setup.engine.scheduler.max_queue = u32::MAX), message(many));
    assert_eq!(start(|_| {}), None);
}

//! Tests beam search: its results are the same as if no other request ran.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use server_engine::sim::{SimFault, SimFaultKind, expected_tokens};
use server_engine::{BeamSearch, EarlyStopping, Rejection, Request, Sampling, StopCriteria, SubmitError};
use tokio::task::JoinSet;

use crate::support::{Outcome, Setup, VOCABULARY, beams, outcome, prompt, request, sampled, settled, tokens};

fn search(which: u32, rng: &mut StdRng) -> Request {
    let groups = rng.random_range(1..3);
    let width = groups * rng.random_range(1..4);
    let beams = BeamSearch {
        num_groups: groups,
        diversity_penalty: if groups > 1 { 0.5 } else { 0.0 },
        length_penalty: rng.random_range(-0.5..2.0),
        early_stopping: [EarlyStopping::Immediate, EarlyStopping::Heuristic, EarlyStopping::Never]
            [rng.random_range(0..3)],
        ..beams(rng.random_range(1..=width))
    };
    let tokens_max = rng.random_range(1..40);
    let stop = StopCriteria {
        // With so many stop tokens, one is often among the most probable tokens.
        stop_token_ids: (0..rng.random_range(0..90)).map(|_| rng.random_range(0..VOCABULARY)).collect(),
        max_tokens: tokens_max,
        min_tokens: rng.random_range(0..=tokens_max.min(5)),
    };
    let repetition_penalty = if rng.random_bool(0.3) { 1.3 } else { 1.0 };
    let logprobs = rng.random_bool(0.3).then_some(2);
    let sampling = Sampling { repetition_penalty, logprobs, ..Sampling::greedy() };
    // Many prompts have the same beginning.
    let tokens = prompt(which % 5, rng.random_range(1..48));
    Request { num_sequences: width, beam_search: Some(beams), stop, sampling, ..request(&tokens, tokens_max) }
}

fn check(outcome: &Outcome, request: &Request) {
    assert_eq!(outcome.failure, None);
    assert!(outcome.cached_tokens.is_some());
    assert_eq!(outcome.tokens.len(), request.num_results() as usize);
    for (index, tokens) in outcome.tokens.iter().enumerate() {
        assert!(outcome.reasons[index].is_some() && tokens.len() <= request.stop.max_tokens as usize);
        assert!(
            !outcome.tokens[..index].contains(tokens) || request.beam_search.as_ref().unwrap().num_groups > 1
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beam_search_finds_the_same_results_alone_and_under_load() {
    let mut preempted = 0;
    for seed in 0..6 {
        let mut rng = StdRng::seed_from_u64(seed);
        let engine = Setup::new(70).start();
        let alone = Setup::new(2000).start();
        let (handle, alone_handle) = (engine.handle(), alone.handle());
        let mut tasks = JoinSet::new();
        for which in 0..60 {
            let request = match which % 3 {
                0 => sampled(&prompt(which % 5, 20), 30, u64::from(which)),
                _ => search(which, &mut rng),
            };
            let stream = handle.submit(request.clone()).unwrap();
            let is_dropped = rng.random_bool(0.15);
            let alone_handle = alone_handle.clone();
            tasks.spawn(async move {
                let mut stream = stream;
                if is_dropped {
                    stream.next().await;
                    return;
                }
                let together = outcome(stream).await;
                check(&together, &request);
                let alone = outcome(alone_handle.submit(request).unwrap()).await;
                assert_eq!(together.tokens, alone.tokens, "request {which} with seed {seed}");
                assert_eq!(together.reasons, alone.reasons, "request {which} with seed {seed}");
            });
        }
        tasks.join_all().await;
        settled(&handle).await;
        preempted += handle.load().borrow().load.preemptions_total;
        engine.shutdown().unwrap();
        alone.shutdown().unwrap();
    }
    assert!(preempted > 20, "{preempted}");
}

#[tokio::test]
async fn a_single_beam_is_greedy() {
    let engine = Setup::new(100).start();
    let request = Request { beam_search: Some(beams(1)), ..request(&prompt(1, 20), 30) };
    assert_eq!(
        tokens(engine.handle().submit(request).unwrap()).await,
        expected_tokens(&prompt(1, 20), 30, VOCABULARY)
    );
}

#[tokio::test]
async fn a_search_that_is_aborted_or_fails_releases_everything() {
    let mut setup = Setup::new(100);
    setup.sim.faults = vec![SimFault { step: 12, kind: SimFaultKind::Step }];
    let (engine, gate) = setup.start_gated();
    let handle = engine.handle();
    let search = Request { num_sequences: 3, beam_search: Some(beams(2)), ..request(&prompt(1, 20), 30) };
    let left = handle.submit(search.clone()).unwrap();
    for _ in 0..3 {
        gate.arrive();
        gate.pass();
    }
    assert_eq!(gate.arrive().sequences.len(), 3, "a sequence for each beam");
    drop(left);
    let failing = handle.submit(search.clone()).unwrap();
    gate.pass();
    assert_eq!(gate.arrive().sequences.len(), 1, "the prompt of the next request");
    gate.pass();
    drop(gate);
    let failed = outcome(failing).await;
    assert!(failed.tokens.is_empty() && failed.failure.is_some(), "{failed:?}");
    check(&outcome(handle.submit(search.clone()).unwrap()).await, &search);
    settled(&handle).await;
}

#[tokio::test]
async fn invalid_parameters_and_searches_that_never_fit_are_rejected() {
    let engine = Setup::new(100).start();
    let refused = |sequences, beams| {
        let request =
            Request { num_sequences: sequences, beam_search: Some(beams), ..request(&prompt(1, 20), 380) };
        engine.handle().submit(request).map(|_| ()).unwrap_err()
    };
    for (beams, parameter) in [
        (BeamSearch { num_results: 0, ..beams(1) }, "num_results"),
        (BeamSearch { num_results: 5, ..beams(1) }, "num_results"),
        (BeamSearch { num_groups: 3, ..beams(1) }, "num_groups"),
        (BeamSearch { num_groups: 0, ..beams(1) }, "num_groups"),
        (BeamSearch { length_penalty: f32::NAN, ..beams(1) }, "length_penalty"),
        (BeamSearch { diversity_penalty: f32::INFINITY, ..beams(1) }, "diversity_penalty"),
    ] {
        assert_eq!(refused(4, beams), SubmitError::Invalid { parameter });
    }
    // Two sequences of 400 tokens fit into 100 blocks of 8 tokens, but three do not.
    let longest = Rejection::TooLong { prompt_tokens: 20, max_model_len: 33 * 8 };
    assert_eq!(refused(3, beams(1)), SubmitError::Rejected(longest));
    assert_eq!(engine.handle().limits().requests.lockstep_model_len(2), 400);
}

#[tokio::test]
async fn missing_results_are_empty() {
    let engine = Setup::new(100).start();
    let sampling = Sampling { allowed_token_ids: Some([7].into()), ..Sampling::greedy() };
    let search =
        Request { num_sequences: 3, beam_search: Some(beams(3)), sampling, ..request(&prompt(1, 20), 5) };
    let outcome = outcome(engine.handle().submit(search).unwrap()).await;
    assert_eq!(outcome.tokens, [vec![7; 5], vec![], vec![]]);
    assert!(outcome.reasons.iter().all(Option::is_some));
    settled(&engine.handle()).await;
}

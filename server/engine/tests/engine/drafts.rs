//! Tests that lookup drafts change only the number of steps.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use server_engine::sim::SimCosts;
use server_engine::{DraftCounts, Event, PromptLookup, Request, Sampling, StepReport, StopCriteria};
use tokio::task::JoinSet;

use crate::support::{Setup, VOCABULARY, outcome, prompt, request, sampled, settled};

fn lookup() -> Option<PromptLookup> {
    Some(PromptLookup { max_ngram_size: 3, num_draft_tokens: 5, prediction: Vec::new() })
}

/// Returns a request with few allowed tokens, so that its output is repetitive.
pub(crate) fn of_few_words(which: u32, rng: &mut StdRng) -> Request {
    let tokens_max = rng.random_range(1..60);
    let tokens = prompt(which % 5, rng.random_range(1..50));
    let base = if rng.random_bool(0.5) {
        request(&tokens, tokens_max)
    } else {
        sampled(&tokens, tokens_max, which.into())
    };
    let words = rng.random_range(1..5);
    let sampling = Sampling {
        allowed_token_ids: Some((20..20 + words).collect()),
        logprobs: rng.random_bool(0.3).then_some(2),
        presence_penalty: if rng.random_bool(0.3) { 0.4 } else { 0.0 },
        ..base.sampling
    };
    let stop = StopCriteria {
        stop_token_ids: if rng.random_bool(0.3) { vec![21] } else { Vec::new() },
        max_tokens: tokens_max,
        min_tokens: rng.random_range(0..=tokens_max.min(9)),
    };
    let lookup = PromptLookup {
        max_ngram_size: rng.random_range(1..12),
        num_draft_tokens: rng.random_range(1..20),
        prediction: (0..rng.random_range(0..30)).map(|_| rng.random_range(20..24)).collect(),
    };
    Request { sampling, stop, num_sequences: rng.random_range(1..4), lookup: Some(lookup), ..base }
}

pub(crate) async fn events(mut stream: server_engine::TokenStream) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some(event) = stream.next().await {
        events.push(event);
    }
    events
}

/// Returns the `Token` and `Finished` events of each sequence, without the counts of drafts.
pub(crate) fn output_events(events: &[Event]) -> Vec<Vec<Event>> {
    let mut outputs: Vec<Vec<Event>> = Vec::new();
    for event in events {
        let (index, event) = match event {
            Event::Token { index, token, logprobs, .. } => {
                let (index, token, logprobs) = (*index, *token, logprobs.clone());
                (index, Event::Token { index, token, logprobs, drafts: DraftCounts::default() })
            }
            &Event::Finished { index, reason, .. } => {
                (index, Event::Finished { index, reason, drafts: DraftCounts::default() })
            }
            Event::Failed(failure) => panic!("{failure}"),
            _ => continue,
        };
        outputs.resize(outputs.len().max(index as usize + 1), Vec::new());
        outputs[index as usize].push(event);
    }
    outputs
}

pub(crate) fn counts(events: &[Event]) -> DraftCounts {
    let mut counts = DraftCounts::default();
    for event in events {
        if let Event::Finished { drafts, .. } = event {
            counts.accepted += drafts.accepted;
            counts.rejected += drafts.rejected;
        }
    }
    counts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookup_drafts_change_no_output() {
    let (mut accepted, mut rejected, mut preempted) = (0, 0, 0);
    for seed in 0..6 {
        let mut rng = StdRng::seed_from_u64(seed);
        let (engine, alone) = (Setup::new(60).start(), Setup::new(2000).start());
        let (handle, alone_handle) = (engine.handle(), alone.handle());
        let mut tasks = JoinSet::new();
        for which in 0..60 {
            let request = of_few_words(which, &mut rng);
            let stream = handle.submit(request.clone()).unwrap();
            let is_dropped = rng.random_bool(0.1);
            let alone_handle = alone_handle.clone();
            tasks.spawn(async move {
                let mut stream = stream;
                if is_dropped {
                    stream.next().await;
                    return DraftCounts::default();
                }
                let together = events(stream).await;
                let plain = Request { lookup: None, ..request };
                let alone = events(alone_handle.submit(plain).unwrap()).await;
                assert_eq!(
                    output_events(&together),
                    output_events(&alone),
                    "request {which} with seed {seed}"
                );
                counts(&together)
            });
        }
        while let Some(counts) = tasks.join_next().await {
            let counts = counts.unwrap();
            accepted += counts.accepted;
            rejected += counts.rejected;
        }
        settled(&handle).await;
        preempted += handle.load().borrow().load.preemptions_total;
        engine.shutdown().unwrap();
        alone.shutdown().unwrap();
    }
    assert!(accepted > 1000 && rejected > 1000 && preempted > 20, "{accepted} {rejected} {preempted}");
}

/// Returns the step reports of a request that runs alone.
async fn steps(request: Request, costs: SimCosts) -> Vec<StepReport> {
    let mut setup = Setup::new(200);
    setup.sim.costs = costs;
    let (engine, reports) = setup.start_observed();
    outcome(engine.handle().submit(request).expect("the queue has room")).await;
    engine.shutdown().expect("the engine has not failed");
    reports.iter().collect()
}

pub(crate) fn costs(step: u64, prefill_token: u64, decode_token: u64) -> SimCosts {
    let [step, prefill_token, decode_token] = [step, prefill_token, decode_token].map(Duration::from_millis);
    SimCosts { step, prefill_token, decode_token }
}

#[tokio::test]
async fn accepted_drafts_save_steps() {
    // The request generates the same token repeatedly.
    let sampling = Sampling { allowed_token_ids: Some([7].into()), ..Sampling::greedy() };
    let base = Request { sampling, ..request(&prompt(1, 20), 60) };
    let plain = steps(base.clone(), costs(10, 1, 1)).await;
    let guessed = steps(Request { lookup: lookup(), ..base.clone() }, costs(10, 1, 1)).await;
    assert_eq!(plain.len(), 60);
    assert!(guessed.len() < 20, "{}", guessed.len());
    let sum = |of: fn(&StepReport) -> u32| guessed.iter().map(of).sum::<u32>();
    assert_eq!(sum(|report| report.generated_tokens), 60);
    assert!(sum(|report| report.accepted_tokens) as usize == 60 - guessed.len());
    assert_eq!(sum(|report| report.drafted_tokens), sum(|report| report.accepted_tokens));
    assert_eq!(sum(|report| report.prefill_tokens), 20);
    // With a predicted output, drafts are proposed from the first token on.
    let prediction = vec![7; 40];
    let lookup = Some(PromptLookup { prediction, ..lookup().unwrap() });
    assert!(steps(Request { lookup, ..base }, costs(10, 1, 1)).await.len() <= guessed.len());
}

#[tokio::test]
async fn drafts_that_are_rejected_or_expensive_soon_stop() {
    for (words, costs) in [(20, costs(10, 1, 1)), (2, costs(0, 9, 10)), (200, costs(10, 3, 1))] {
        let sampling = Sampling { allowed_token_ids: Some((20..20 + words).collect()), ..Sampling::greedy() };
        let base = Request { sampling, ..request(&prompt(1, 20), 500) };
        let time =
            |reports: Vec<StepReport>| -> Duration { reports.iter().map(|report| report.step_time).sum() };
        let plain = time(steps(base.clone(), costs).await);
        let guessed = time(steps(Request { lookup: lookup(), ..base }, costs).await);
        assert!(guessed.as_secs_f64() <= plain.as_secs_f64() * 1.05, "{words} words: {guessed:?} {plain:?}");
    }
}

#[tokio::test]
async fn a_prediction_with_unknown_tokens_is_rejected() {
    let engine = Setup::new(100).start();
    let lookup = Some(PromptLookup { prediction: vec![VOCABULARY], ..lookup().unwrap() });
    let refused = engine.handle().submit(Request { lookup, ..request(&prompt(1, 20), 5) }).map(|_| ());
    assert!(refused.unwrap_err().to_string().contains("not in the vocabulary"));
}

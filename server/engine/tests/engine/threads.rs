//! Tests that the number of sampling threads does not change the events of a request.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use server_engine::{DraftCounts, EngineOptions, Event, PromptLookup, Request, TokenStream};

use crate::guides::one_of_many;
use crate::support::{Setup, settled};

/// Returns the events of a request, without the events and the draft counts that depend on other requests.
async fn events(mut stream: TokenStream) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some(event) = stream.next().await {
        match event {
            Event::Started { .. } => {}
            Event::Token { index, token, logprobs, .. } => {
                events.push(Event::Token { index, token, logprobs, drafts: DraftCounts::default() });
            }
            Event::Finished { index, reason, .. } => {
                events.push(Event::Finished { index, reason, drafts: DraftCounts::default() });
            }
            event => events.push(event),
        }
    }
    // The events of different sequences can arrive in any order.
    events.sort_by_key(|event| match event {
        Event::Token { index, .. } | Event::Finished { index, .. } => *index,
        _ => 0,
    });
    events
}

/// Whether the process has threads that sample in addition to an engine's thread.
fn has_helpers() -> bool {
    let names = std::fs::read_dir("/proc/self/task").unwrap();
    let name =
        |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.unwrap().path().join("comm"));
    // A thread of another test may end meanwhile.
    names.filter_map(|task| name(task).ok()).any(|name| name.starts_with("sampling-"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_do_not_depend_on_the_number_of_threads() {
    let mut expected: Vec<Vec<Event>> = Vec::new();
    for threads in [1, 2, 8] {
        let mut setup = Setup::new(500);
        // A step needs enough logits to occupy eight threads.
        setup.sim.vocabulary = 80_000;
        setup.engine.scheduler.max_num_batched_tokens = 256;
        let options = EngineOptions { sampling_threads: Some(threads), ..EngineOptions::default() };
        let engine = setup.start_with(options).unwrap();
        let handle = engine.handle();
        let mut rng = StdRng::seed_from_u64(5);
        let mut streams = Vec::new();
        for which in 0..48 {
            let (mut request, _) = one_of_many(which, &mut rng);
            request.stop.max_tokens = request.stop.max_tokens.min(8);
            request.sampling.prompt_logprobs = (which % 8 == 0).then_some(2);
            let lookup = PromptLookup { max_ngram_size: 2, num_draft_tokens: 3, prediction: Vec::new() };
            let lookup = rng.random_bool(0.5).then_some(lookup);
            streams.push(handle.submit(Request { lookup, ..request }).unwrap());
        }
        for (which, stream) in streams.into_iter().enumerate() {
            let events = events(stream).await;
            assert!(
                !events.iter().any(|event| matches!(event, Event::Failed(_))),
                "request {which}: {events:?}"
            );
            match expected.get(which) {
                None => expected.push(events),
                Some(expected) => assert_eq!(events, *expected, "request {which} with {threads} threads"),
            }
        }
        settled(&handle).await;
        assert!(threads == 1 || has_helpers(), "the steps are too small for {threads} threads");
        engine.shutdown().unwrap();
    }
}

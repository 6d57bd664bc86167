//! Tests adapters: the output of a request depends only on its own adapter, and not on other requests in the batch or
//! on the blocks of other requests in the cache.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use server_engine::sim::expected_tokens_with;
use server_engine::{BeamSearch, EarlyStopping, Event, PromptLookup, Request, SubmitError};
use tokio::task::JoinSet;

use crate::support::{Setup, VOCABULARY, beams, prompt, request, settled, tokens};

fn setup(blocks_total: u32) -> Setup {
    Setup { adapters: 3, ..Setup::new(blocks_total) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_request_uses_its_adapter_in_mixed_batches_and_after_preemption() {
    let mut rng = StdRng::seed_from_u64(4);
    let (engine, reports) = setup(40).start_observed();
    let handle = engine.handle();
    let mut tasks = JoinSet::new();
    for which in 0..150 {
        let adapter = which % 4;
        // There are few prompts, so that each one is used with every adapter.
        let mut one = Request { adapter, ..request(&prompt(which / 4 % 3, 45), rng.random_range(1..60)) };
        match rng.random_range(0..3) {
            0 => {
                one.lookup =
                    Some(PromptLookup { max_ngram_size: 3, num_draft_tokens: 5, prediction: vec![1, 2, 3] });
            }
            1 => one.beam_search = Some(BeamSearch { early_stopping: EarlyStopping::Never, ..beams(1) }),
            _ => {}
        }
        let expected = expected_tokens_with(adapter, &one.prompt, one.stop.max_tokens, VOCABULARY);
        let stream = handle.submit(one).unwrap();
        tasks.spawn(async move { assert_eq!(tokens(stream).await, expected, "request {which}") });
    }
    tasks.join_all().await;
    settled(&handle).await;
    engine.shutdown().unwrap();
    let reports: Vec<_> = reports.iter().collect();
    assert!(reports.iter().any(|report| report.preemptions > 0), "some sequences were preempted");
    assert!(reports.iter().any(|report| report.cached_tokens > 0), "some prompts were cached");
}

#[tokio::test]
async fn only_requests_with_the_same_adapter_and_salt_share_cached_blocks() {
    let engine = setup(100).start();
    let handle = engine.handle();
    let cached = async |adapter, salt| {
        let request = Request { adapter, cache_salt: salt, ..request(&prompt(1, 33), 1) };
        let mut stream = handle.submit(request).unwrap();
        let Some(Event::Started { cached_tokens }) = stream.next().await else {
            panic!("the request starts")
        };
        while stream.next().await.is_some() {}
        cached_tokens
    };
    for (adapter, salt) in [(0, 0), (1, 0), (2, 0), (1, 7), (2, 7), (0, 7)] {
        assert_eq!(
            (cached(adapter, salt).await, cached(adapter, salt).await),
            (0, 32),
            "adapter {adapter} with salt {salt}"
        );
    }
}

#[tokio::test]
async fn an_unknown_adapter_is_rejected() {
    let invalid = |adapters, adapter| {
        let engine = Setup { adapters, ..Setup::new(10) }.start();
        engine.handle().submit(Request { adapter, ..request(&[1], 1) }).err()
    };
    let refused = Some(SubmitError::Invalid { parameter: "adapter" });
    assert_eq!((invalid(0, 0), invalid(0, 1), invalid(3, 3), invalid(3, 4)), (None, refused, None, refused));
}

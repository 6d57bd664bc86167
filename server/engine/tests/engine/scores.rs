//! Tests the log probabilities of prompts, the salts of cached blocks, allowed tokens and bad words.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use server_engine::{Event, Request, Sampling, ScoredToken, TokenLogprobs, TokenStream};
use tokio::task::JoinSet;

use crate::support::{Setup, prompt, request, settled};

/// Reads a stream to its end, and returns the log probabilities of the prompt and of the generated tokens.
async fn logprobs(mut stream: TokenStream) -> (Option<Vec<ScoredToken>>, Vec<TokenLogprobs>) {
    let (mut scores, mut tokens) = (None, Vec::new());
    while let Some(event) = stream.next().await {
        match event {
            Event::Scored { tokens: scored } => {
                assert!(tokens.is_empty(), "scores come before the first token");
                assert!(scores.replace(scored).is_none(), "scores come once");
            }
            Event::Token { logprobs, .. } => tokens.extend(logprobs.map(|logprobs| *logprobs)),
            Event::Failed(failure) => panic!("{failure}"),
            Event::Started { .. } | Event::Finished { .. } => {}
        }
    }
    (scores, tokens)
}

fn scored(mut request: Request, count: u32) -> Request {
    request.sampling.prompt_logprobs = Some(count);
    request
}

#[tokio::test]
async fn a_prompt_has_the_log_probabilities_of_its_generation() {
    let engine = Setup::new(100).start();
    let handle = engine.handle();
    let begin = prompt(7, 30);
    let mut first = request(&begin, 150);
    first.sampling = Sampling { logprobs: Some(3), temperature: 1.0, ..first.sampling };
    let (scores, generated) = logprobs(handle.submit(first).unwrap()).await;
    assert_eq!((scores, generated.len()), (None, 150));

    // The prompt of the next request contains the generated text, and is computed in several chunks.
    let tokens: Vec<_> =
        begin.iter().copied().chain(generated.iter().map(|generated| generated.chosen.token)).collect();
    let (scores, _) = logprobs(handle.submit(scored(request(&tokens, 1), 3)).unwrap()).await;
    let scores = scores.unwrap();
    assert_eq!(scores.len(), tokens.len() - 1);
    for (score, token) in scores[begin.len() - 1..].iter().zip(&generated) {
        assert_eq!(score.logprobs, *token);
        let place = token.top.iter().position(|top| top.token == token.chosen.token);
        match place {
            Some(place) => assert_eq!(score.rank as usize, place + 1),
            None => assert!(score.rank > 3),
        }
    }
    settled(&handle).await;
}

#[tokio::test]
async fn scores_are_complete_after_preemptions() {
    // Only two of the longest sequences fit into the cache, so sequences are preempted.
    let (engine, reports) = Setup::new(40).start_observed();
    let handle = engine.handle();
    let mut rng = StdRng::seed_from_u64(5);
    let mut tasks = JoinSet::new();
    for which in 0..60 {
        let tokens = prompt(which % 20, rng.random_range(1..150));
        let asks = which % 3 == 0;
        let plain = Request { num_sequences: 1 + which % 2, ..request(&tokens, rng.random_range(1..60)) };
        let stream = handle.submit(if asks { scored(plain, 1) } else { plain }).unwrap();
        tasks.spawn(async move {
            let (scores, _) = logprobs(stream).await;
            assert_eq!(scores.is_some(), asks);
            for (score, token) in scores.iter().flatten().zip(&tokens[1..]) {
                assert_eq!(score.logprobs.chosen.token, *token);
            }
            assert!(scores.is_none_or(|scores| scores.len() + 1 == tokens.len()));
        });
    }
    tasks.join_all().await;
    settled(&handle).await;
    engine.shutdown().unwrap();
    assert!(
        reports.iter().map(|report| report.preemptions).sum::<u32>() > 0,
        "some sequences were preempted"
    );
}

#[tokio::test]
async fn prompts_with_different_salts_share_no_cached_blocks() {
    let engine = Setup::new(100).start();
    let handle = engine.handle();
    let cached = async |salt| {
        let mut stream = handle.submit(Request { cache_salt: salt, ..request(&prompt(1, 33), 1) }).unwrap();
        let Some(Event::Started { cached_tokens }) = stream.next().await else {
            panic!("the request starts")
        };
        while stream.next().await.is_some() {}
        cached_tokens
    };
    assert_eq!((cached(0).await, cached(0).await), (0, 32));
    assert_eq!((cached(9).await, cached(9).await, cached(8).await), (0, 32, 0));
}

#[tokio::test]
async fn allowed_tokens_and_bad_words_restrict_the_output() {
    let engine = Setup::new(100).start();
    let handle = engine.handle();
    let generated = async |sampling: Sampling| {
        let mut stream = handle.submit(Request { sampling, ..request(&prompt(3, 20), 60) }).unwrap();
        let mut tokens = Vec::new();
        while let Some(event) = stream.next().await {
            if let Event::Token { token, .. } = event {
                tokens.push(token);
            }
        }
        tokens
    };
    let allowed = Sampling { allowed_token_ids: Some([4, 5, 6, 7].into()), ..Sampling::greedy() };
    let tokens = generated(allowed.clone()).await;
    assert!(tokens.len() == 60 && tokens.iter().all(|token| (4..8).contains(token)), "{tokens:?}");
    assert!(tokens.windows(2).any(|pair| pair == [4, 5]) && tokens.contains(&6), "{tokens:?}");

    let tokens = generated(Sampling { bad_words: [vec![4, 5], vec![6]].into(), ..allowed }).await;
    assert!(!tokens.windows(2).any(|pair| pair == [4, 5]) && !tokens.contains(&6), "{tokens:?}");
    assert!(tokens.contains(&4) && tokens.contains(&5), "each of them may occur alone: {tokens:?}");
}

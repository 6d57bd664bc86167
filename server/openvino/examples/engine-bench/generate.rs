//! `generate`: sends requests through the engine, and records the time of each token.

use std::task::Poll;
use std::time::Instant;

use serde_json::{Value, json};
use server_engine::{
    Engine, EngineHandle, Event, FinishReason, Request, Sampling, StopCriteria, TokenLogprob, TokenLogprobs,
    TokenStream,
};

use crate::scenario::{Generate, Work};
use crate::{Args, Runner};

/// The state of a request.
#[derive(Default)]
struct Progress {
    stream: Option<TokenStream>,
    arrived: f64,
    cached_tokens: Option<u32>,
    tokens: Vec<u32>,
    times: Vec<f64>,
    logprobs: Vec<Value>,
    finish_reason: Option<&'static str>,
    error: Option<String>,
    ended: bool,
}

pub(crate) fn run(args: &Args, runner: Runner, scenario: &Generate) -> anyhow::Result<Value> {
    let engine = Engine::start(args.engine_config(), Box::new(runner), Box::new(|_| {}))?;
    let handle = engine.handle();
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(all(args, &handle, &scenario.warmup));
    let (requests, seconds) = runtime.block_on(all(args, &handle, &scenario.requests));
    engine.shutdown()?;
    let requests = requests.into_iter().zip(&scenario.requests);
    let requests: Vec<Value> = requests.map(|(one, work)| report(one, work)).collect();
    Ok(json!({ "seconds": seconds, "requests": requests }))
}

async fn all(args: &Args, handle: &EngineHandle, work: &[Work]) -> (Vec<Progress>, f64) {
    let clock = Instant::now();
    let mut progress: Vec<Progress> = work.iter().map(|_| Progress::default()).collect();
    let mut last = 0.0;
    std::future::poll_fn(|context| {
        loop {
            submit_due(args, handle, work, &mut progress, &clock);
            let mut moved = false;
            for one in progress.iter_mut().filter(|one| !one.ended) {
                while let Some(Poll::Ready(event)) =
                    one.stream.as_mut().map(|stream| stream.poll_next(context))
                {
                    last = clock.elapsed().as_secs_f64();
                    moved = true;
                    take(one, event, last);
                }
            }
            if progress.iter().all(|one| one.ended) {
                return Poll::Ready(());
            }
            if !moved {
                return Poll::Pending;
            }
        }
    })
    .await;
    (progress, last)
}

/// Submits the requests that are due and have not been submitted yet.
fn submit_due(args: &Args, handle: &EngineHandle, work: &[Work], progress: &mut [Progress], clock: &Instant) {
    for index in 0..work.len() {
        let due = work[index].arrival.is_none_or(|arrival| {
            let other = &progress[arrival.after_request];
            other.ended || other.tokens.len() >= arrival.tokens
        });
        let one = &mut progress[index];
        if !due || one.stream.is_some() || one.ended {
            continue;
        }
        one.arrived = clock.elapsed().as_secs_f64();
        match handle.submit(Request { adapter: args.adapter_of(index), ..request(args, &work[index]) }) {
            Ok(stream) => one.stream = Some(stream),
            Err(error) => {
                one.error = Some(error.to_string());
                one.ended = true;
            }
        }
    }
}

fn request(args: &Args, work: &Work) -> Request {
    let sampling = Sampling { logprobs: work.logprobs, ..Sampling::greedy() };
    let stop = StopCriteria {
        stop_token_ids: if work.ignore_eos { Vec::new() } else { args.stop_token.clone() },
        max_tokens: work.max_tokens,
        min_tokens: 0,
    };
    Request::new(work.prompt.clone(), sampling, stop)
}

/// Processes an event of a request; `None` means that its stream has ended.
fn take(one: &mut Progress, event: Option<Event>, now: f64) {
    match event {
        Some(Event::Started { cached_tokens }) => one.cached_tokens = Some(cached_tokens),
        Some(Event::Token { token, logprobs, .. }) => {
            one.tokens.push(token);
            one.times.push(now);
            one.logprobs.extend(logprobs.map(|logprobs| pairs(&logprobs)));
        }
        Some(Event::Finished { reason, .. }) => {
            one.finish_reason = Some(match reason {
                FinishReason::Stop => "stop",
                FinishReason::Length => "length",
            });
            one.ended = true;
        }
        Some(Event::Failed(failure)) => one.error = Some(failure.to_string()),
        // The requests of a `generate` scenario do not ask for scores.
        Some(Event::Scored { .. }) | None => {}
    }
    if one.error.is_some() {
        one.ended = true;
    }
    if one.ended {
        one.stream = None;
    }
}

fn pairs(logprobs: &TokenLogprobs) -> Value {
    let pair = |one: &TokenLogprob| json!([one.token, one.logprob]);
    json!({ "chosen": logprobs.chosen.logprob, "top": logprobs.top.iter().map(pair).collect::<Vec<_>>() })
}

fn report(one: Progress, work: &Work) -> Value {
    json!({
        "arrived": one.arrived,
        "cached_tokens": one.cached_tokens,
        "tokens": one.tokens,
        "times": one.times,
        "logprobs": work.logprobs.map(|_| one.logprobs),
        "finish_reason": one.finish_reason,
        "error": one.error,
    })
}

//! Tests sleep mode: the cache is cleared, requests wake the engine, and failures are reported and can be retried.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::task::{Context, Poll, Waker};

use server_engine::sim::{SimRunner, expected_tokens};
use server_engine::{
    CacheLayout, Engine, EngineState, Failure, Logits, ModelRunner, RunError, SleepError, SleepLevel,
    StepReport,
};
use server_scheduler::Batch;

use crate::support::{Outcome, Setup, VOCABULARY, outcome, prompt, request, settled, tokens};

/// The calls that a [`FailingWakeRunner`] has received, and the number of wake-ups that are still to fail.
#[derive(Debug, Default)]
struct SleepCalls {
    wakes: AtomicU32,
    failures: AtomicU32,
    levels: std::sync::Mutex<Vec<SleepLevel>>,
}

/// A runner whose first wake-ups fail. [`SleepCalls::failures`] contains their number.
struct FailingWakeRunner {
    inner: SimRunner,
    calls: Arc<SleepCalls>,
    fatal: bool,
}

impl ModelRunner for FailingWakeRunner {
    fn layout(&self) -> CacheLayout {
        self.inner.layout()
    }

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        self.inner.run(batch)
    }

    fn sleep(&mut self, level: SleepLevel) {
        self.calls.levels.lock().unwrap().push(level);
        self.inner.sleep(level);
    }

    fn wake(&mut self) -> Result<(), RunError> {
        self.calls.wakes.fetch_add(1, Ordering::Relaxed);
        let fails = |left: u32| left.checked_sub(1);
        if self.calls.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fails).is_ok() {
            return Err(RunError { message: "a simulated failure".to_owned(), fatal: self.fatal });
        }
        self.inner.wake()
    }
}

pub(crate) fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    std::pin::Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn engine_with_sleep(
    failures: u32,
    fatal: bool,
) -> (Engine, Arc<SleepCalls>, std::sync::mpsc::Receiver<StepReport>) {
    let setup = Setup::new(100);
    let calls = Arc::new(SleepCalls { failures: AtomicU32::new(failures), ..SleepCalls::default() });
    let runner = FailingWakeRunner { inner: setup.runner(), calls: Arc::clone(&calls), fatal };
    let (sender, reports) = channel();
    let observer = Box::new(move |report: &StepReport| drop(sender.send(report.clone())));
    (Engine::start(setup.engine, Box::new(runner), observer).unwrap(), calls, reports)
}

async fn is_right(engine: &Engine, which: u32) -> Outcome {
    let outcome = outcome(engine.handle().submit(request(&prompt(which, 40), 20)).unwrap()).await;
    assert_eq!(outcome.tokens, [expected_tokens(&prompt(which, 40), 20, VOCABULARY)]);
    outcome
}

#[tokio::test]
async fn sleep_clears_the_cache_and_changes_no_output() {
    let (engine, calls, reports) = engine_with_sleep(0, false);
    let handle = engine.handle();
    is_right(&engine, 1).await;
    let cached = is_right(&engine, 1).await.cached_tokens;
    assert!(cached > Some(30), "{cached:?}");
    for level in [SleepLevel::Cache, SleepLevel::Model] {
        settled(&handle).await;
        handle.sleep(level).await.unwrap();
        assert_eq!(handle.sleep_level(), Some(level));
        let load = *handle.load().borrow();
        assert_eq!((load.state, load.load.blocks_free), (EngineState::Serving, 100), "{load:?}");
        assert_eq!(is_right(&engine, 1).await.cached_tokens, Some(0), "the cache was released");
        assert_eq!(handle.sleep_level(), None);
        assert_eq!(is_right(&engine, 1).await.cached_tokens, cached);
    }
    assert_eq!(calls.wakes.load(Ordering::Relaxed), 2);
    drop(engine);
    assert_eq!(reports.iter().filter(|report| report.wake_time.is_some()).count(), 2);
}

#[tokio::test]
async fn many_requests_wake_the_engine_once() {
    let (engine, calls, _reports) = engine_with_sleep(0, false);
    let handle = engine.handle();
    handle.sleep(SleepLevel::Model).await.unwrap();
    let streams: Vec<_> =
        (0..20).map(|which| handle.submit(request(&prompt(which, 9), 12)).unwrap()).collect();
    for (which, stream) in (0..).zip(streams) {
        assert_eq!(tokens(stream).await, expected_tokens(&prompt(which, 9), 12, VOCABULARY));
    }
    assert_eq!(calls.wakes.load(Ordering::Relaxed), 1);
    handle.wake().await.unwrap();
    assert_eq!(calls.wakes.load(Ordering::Relaxed), 1, "the runner is awake");
}

#[tokio::test]
async fn a_deeper_sleep_level_releases_more_and_a_lighter_one_nothing() {
    let (engine, calls, _reports) = engine_with_sleep(0, false);
    let handle = engine.handle();
    for level in [SleepLevel::Cache, SleepLevel::Cache, SleepLevel::Model, SleepLevel::Cache] {
        handle.sleep(level).await.unwrap();
    }
    assert_eq!(handle.sleep_level(), Some(SleepLevel::Model));
    assert_eq!(*calls.levels.lock().unwrap(), [SleepLevel::Cache, SleepLevel::Model]);
    handle.wake().await.unwrap();
    assert_eq!(handle.sleep_level(), None);
    is_right(&engine, 3).await;
}

#[tokio::test]
async fn a_failed_wake_up_fails_waiting_requests_and_the_next_tries_again() {
    let (engine, calls, reports) = engine_with_sleep(2, false);
    let handle = engine.handle();
    handle.sleep(SleepLevel::Model).await.unwrap();
    let failed = outcome(handle.submit(request(&prompt(1, 9), 5)).unwrap()).await;
    assert_eq!(failed.failure, Some(Failure::Wake("a simulated failure".to_owned())));
    assert_eq!(handle.sleep_level(), Some(SleepLevel::Model));
    assert_eq!(handle.wake().await, Err(SleepError::Wake("a simulated failure".to_owned())));
    assert!(handle.is_alive());
    settled(&handle).await;
    is_right(&engine, 1).await;
    assert_eq!(calls.wakes.load(Ordering::Relaxed), 3);
    drop(engine);
    let failed: u32 = reports.iter().map(|report| report.requests_failed).sum();
    assert_eq!(failed, 1);
}

#[tokio::test]
async fn a_fatal_wake_up_error_ends_the_engine() {
    let (engine, _calls, _reports) = engine_with_sleep(1, true);
    let handle = engine.handle();
    handle.sleep(SleepLevel::Model).await.unwrap();
    let failed = outcome(handle.submit(request(&prompt(1, 9), 5)).unwrap()).await;
    assert_eq!(failed.failure, Some(Failure::Stopped));
    assert!(handle.wait_for_failure().await.reason.contains("a simulated failure"));
    assert_eq!(handle.sleep(SleepLevel::Cache).await, Err(SleepError::Stopped));
}

#[tokio::test]
async fn a_busy_engine_does_not_sleep_and_a_sleeping_one_stops_immediately() {
    let (engine, gate) = Setup::new(100).start_gated();
    let handle = engine.handle();
    let stream = handle.submit(request(&prompt(1, 9), 5)).unwrap();
    gate.arrive();
    // The command is in the channel; the engine reads it after the step.
    let mut pending_sleep = Box::pin(handle.sleep(SleepLevel::Cache));
    assert!(poll_once(&mut pending_sleep).is_pending());
    gate.pass();
    gate.arrive();
    assert_eq!(pending_sleep.await, Err(SleepError::Busy));
    drop(gate);
    assert_eq!(tokens(stream).await, expected_tokens(&prompt(1, 9), 5, VOCABULARY));
    settled(&handle).await;
    handle.sleep(SleepLevel::Cache).await.unwrap();
    handle.drain().await.unwrap();
    assert_eq!(handle.sleep(SleepLevel::Cache).await, Err(SleepError::Stopped));
    engine.shutdown().unwrap();
}

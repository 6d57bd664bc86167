//! Tests guides that are slower than the model: they delay only their own sequences, and change no token.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use parking_lot::ReentrantMutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use server_engine::{
    Clock, CommitLock, Failure, Guide, GuideError, GuideState, Progress, PromptLookup, Request, TokenId,
    TokenSet,
};
use tokio::task::JoinSet;

use crate::guides::{Form, check, one_of_many};
use crate::support::{Outcome, Setup, beams, outcome, prompt, request, sampled, settled};

/// A latch that another thread opens, and for which guides wait.
#[derive(Debug, Default)]
struct Latch {
    is_open: Mutex<bool>,
    changed: Condvar,
}

impl Latch {
    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn wait(&self) {
        drop(self.changed.wait_while(self.is_open.lock().unwrap(), |open| !*open).unwrap());
    }
}

/// The reason why a form is slow.
#[derive(Clone, Debug)]
enum Slowness {
    /// The allowed tokens after this number of tokens are computed only when the latch is open.
    Latch(usize, Arc<Latch>),
    /// Computing the allowed tokens takes this long on this clock.
    Time(Clock, Duration),
    /// Guides lock the shared state while they compute allowed tokens, sometimes for a long time.
    Random(Arc<ReentrantMutex<()>>),
}

#[derive(Clone, Debug)]
struct SlowGuide(Form, Slowness);

#[derive(Debug)]
struct SlowGuideState {
    state: Box<dyn GuideState>,
    count: usize,
    slowness: Slowness,
}

impl Guide for SlowGuide {
    fn start(&self) -> Result<Box<dyn GuideState>, GuideError> {
        Ok(Box::new(SlowGuideState { state: self.0.start()?, count: 0, slowness: self.1.clone() }))
    }
}

impl GuideState for SlowGuideState {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<Progress, GuideError> {
        match &self.slowness {
            Slowness::Latch(count, latch) if *count == self.count => latch.wait(),
            Slowness::Latch(..) => {}
            Slowness::Time(clock, time) => clock.spend(*time),
            Slowness::Random(shared) => {
                let _hold = shared.lock();
                // At every fifth token, spin long enough for the engine to compute several steps of other requests.
                for _ in 0..if self.count.is_multiple_of(5) { 100_000 } else { 0 } {
                    std::hint::spin_loop();
                }
                return self.state.allow(allowed);
            }
        }
        self.state.allow(allowed)
    }

    fn commit(&mut self, token: TokenId) -> Result<Progress, GuideError> {
        self.count += 1;
        self.state.commit(token)
    }

    fn try_lock_commit(&self) -> Option<CommitLock> {
        let Slowness::Random(shared) = &self.slowness else { return Some(Box::new(())) };
        shared.try_lock_arc().map(|guard| Box::new(guard) as CommitLock)
    }

    fn fork(&self) -> Box<dyn GuideState> {
        Box::new(Self { state: self.state.fork(), count: self.count, slowness: self.slowness.clone() })
    }
}

fn slow_guide(form: &Form, slowness: Slowness) -> Option<Arc<dyn Guide>> {
    Some(Arc::new(SlowGuide(form.clone(), slowness)))
}

/// Returns the outcome of a request. Panics if the request has not ended within a minute.
async fn timely(stream: server_engine::TokenStream) -> Outcome {
    let outcome = tokio::time::timeout(Duration::from_secs(60), outcome(stream)).await;
    outcome.expect("no request waits for the guide of another")
}

#[tokio::test]
async fn a_slow_guide_delays_only_its_own_sequence_and_changes_no_token() {
    for has_beams in [false, true] {
        let (engine, reports) = Setup::new(200).start_observed();
        let handle = engine.handle();
        let form = Form::new(7, 20);
        let beam_search = has_beams.then(|| beams(2));
        let lookup = Some(PromptLookup { max_ngram_size: 3, num_draft_tokens: 4, prediction: Vec::new() });
        let base = Request { num_sequences: 2, beam_search, lookup, ..sampled(&prompt(1, 16), 30, 5) };
        let alone = Request { guide: form.guide(), ..base.clone() };
        let alone = timely(handle.submit(alone).unwrap()).await;
        for count in [0, 4] {
            let latch = Arc::new(Latch::default());
            let guide = slow_guide(&form, Slowness::Latch(count, Arc::clone(&latch)));
            let held = handle.submit(Request { guide, ..base.clone() }).unwrap();
            // Another request runs while the guide is blocked.
            let other = timely(handle.submit(request(&prompt(8, 30), 60)).unwrap()).await;
            assert_eq!(other.tokens[0].len(), 60);
            latch.open();
            let held = timely(held).await;
            assert_eq!((held.tokens, held.reasons), (alone.tokens.clone(), alone.reasons.clone()));
        }
        settled(&handle).await;
        engine.shutdown().unwrap();
        assert!(reports.iter().map(|report| report.sequence_suspensions).sum::<u32>() > 0);
    }
}

#[tokio::test]
async fn a_suspended_sequence_can_be_aborted_and_the_engine_stopped() {
    let engine = Setup::new(100).start();
    let handle = engine.handle();
    let latch = Arc::new(Latch::default());
    let guide = slow_guide(&Form::new(7, 20), Slowness::Latch(2, Arc::clone(&latch)));
    let held = Request { guide, num_sequences: 2, ..request(&prompt(1, 16), 30) };
    let mut stream = handle.submit(held.clone()).unwrap();
    for _ in 0..3 {
        stream.next().await.unwrap();
    }
    stream.abort(1);
    drop(stream);
    // The thread still runs the guide. Its result is dropped when it finishes, because the sequence was aborted.
    timely(handle.submit(request(&prompt(2, 9), 5)).unwrap()).await;
    settled(&handle).await;
    let waiting = handle.submit(held).unwrap();
    latch.open();
    assert_eq!(timely(waiting).await.failure, None);
    engine.shutdown().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_guides_change_no_token_under_load() {
    let (mut suspended, mut preempted) = (0, 0);
    for seed in 0..4 {
        let mut rng = StdRng::seed_from_u64(100 + seed);
        let (engine, reports) = Setup::new(60).start_observed();
        let alone = Setup::new(2000).start();
        let (handle, alone_handle) = (engine.handle(), alone.handle());
        let shared = Arc::new(ReentrantMutex::default());
        let mut tasks = JoinSet::new();
        for which in 0..40 {
            let (request, form) = one_of_many(which, &mut rng);
            let guide =
                form.as_ref().and_then(|form| slow_guide(form, Slowness::Random(Arc::clone(&shared))));
            let lookup = rng.random_bool(0.3).then(|| PromptLookup {
                max_ngram_size: 3,
                num_draft_tokens: 4,
                prediction: Vec::new(),
            });
            let stream = handle.submit(Request { guide, lookup, ..request.clone() }).unwrap();
            let is_dropped = rng.random_bool(0.1);
            let alone_handle = alone_handle.clone();
            tasks.spawn(async move {
                let mut stream = stream;
                if is_dropped {
                    stream.next().await;
                    return;
                }
                let together = timely(stream).await;
                check(&together, &request, form.as_ref());
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
        suspended += reports.iter().map(|report| report.sequence_suspensions).sum::<u32>();
    }
    assert!(suspended > 100 && preempted > 10, "{suspended} {preempted}");
}

#[tokio::test]
async fn a_form_that_takes_too_long_fails_only_its_request() {
    let setup = Setup::new(200);
    let clock = setup.engine.clock.clone();
    let engine = setup.start();
    let handle = engine.handle();
    let with = |time: Duration| {
        let guide = slow_guide(&Form::new(3, 40), Slowness::Time(clock.clone(), time));
        handle.submit(Request { guide, ..request(&prompt(1, 10), 50) }).unwrap()
    };
    // The limit is thirty seconds, plus twenty milliseconds for each token.
    let fine = timely(with(Duration::from_millis(200))).await;
    assert_eq!((fine.failure, fine.tokens[0].len()), (None, 40));
    let slow = timely(with(Duration::from_secs(1))).await;
    let failure = slow.failure.expect("the guide takes too long");
    assert!(matches!(failure, Failure::TooComplex(_)), "{failure}");
    assert!(failure.to_string().contains("30.6 s"), "{failure}");
    assert_eq!(slow.tokens[0].len(), 31);
    settled(&handle).await;
}

#[tokio::test]
async fn preempted_sequences_take_no_room_in_the_queue() {
    let mut setup = Setup::new(12);
    setup.engine.scheduler.max_num_seqs = 4;
    setup.engine.scheduler.max_queue = 3;
    let (engine, gate) = setup.start_gated();
    let handle = engine.handle();
    let latch = Arc::new(Latch::default());
    let held = |which, prompt_tokens| {
        let guide = slow_guide(&Form::new(7, 20), Slowness::Latch(0, Arc::clone(&latch)));
        let request = Request { guide, num_sequences: 3, ..request(&prompt(which, prompt_tokens), 2) };
        handle.submit(request).unwrap()
    };
    let long = handle.submit(request(&prompt(0, 8), 85)).unwrap();
    gate.arrive();
    gate.pass();
    gate.arrive();
    let mut streams = Vec::new();
    for (which, prompt_tokens) in [(1, 48), (2, 8)] {
        streams.push(held(which, prompt_tokens));
        // The sequences run, and are suspended. Then they are preempted, because the long sequence needs their blocks.
        for running in [4, 1] {
            while handle.load().borrow().load.running != running {
                gate.pass();
                gate.arrive();
            }
        }
    }
    assert_eq!((handle.load().borrow().load.waiting, handle.waiting_sequences()), (6, 0));
    streams.push(held(3, 8));
    latch.open();
    gate.pass();
    drop(gate);
    assert_eq!(timely(long).await.tokens[0].len(), 85);
    for stream in streams {
        let outcome = timely(stream).await;
        assert_eq!(outcome.failure, None);
        assert!(outcome.tokens.len() == 3 && outcome.tokens.iter().all(|tokens| tokens.len() == 2));
    }
    settled(&handle).await;
}

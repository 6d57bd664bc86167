//! Tests guided sequences: their output matches the form and does not depend on other requests.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, mpsc};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use server_engine::{
    Event, Failure, FinishReason, Guide, GuideError, GuideState, Progress, Request, Sampling, StopCriteria,
    TokenId, TokenSet,
};
use tokio::task::JoinSet;

use crate::support::{Outcome, Setup, VOCABULARY, beams, outcome, prompt, request, sampled, settled, tokens};

/// A form in which all previous tokens determine which tokens are allowed next: usually several, and sometimes only
/// one. The form may end after any multiple of three tokens, and ends after `length` tokens.
#[derive(Clone, Debug)]
pub(crate) struct Form {
    seed: u64,
    length: u32,
    /// The number of tokens after which the form fails, and the kind of failure. The number does not matter for
    /// [`Fault::Start`].
    fault: Option<(u32, Fault)>,
    /// Tokens that the form never allows.
    stops: Vec<TokenId>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Start,
    Allow,
    Commit,
    CommitPanic,
    Panic,
    /// No token is allowed.
    DeadEnd,
}

#[derive(Clone, Debug)]
struct FormState {
    form: Form,
    tokens: Vec<TokenId>,
}

impl Form {
    pub(crate) fn new(seed: u64, length: u32) -> Self {
        Self { seed, length, fault: None, stops: Vec::new() }
    }

    fn failing(at: u32, fault: Fault) -> Self {
        Self { fault: Some((at, fault)), ..Self::new(1, 20) }
    }

    fn without(self, stops: &[TokenId]) -> Self {
        Self { stops: stops.to_vec(), ..self }
    }

    pub(crate) fn guide(&self) -> Option<Arc<dyn Guide>> {
        Some(Arc::new(self.clone()))
    }

    fn allows(&self, before: &[TokenId], token: TokenId) -> bool {
        let hash = |value: u64| {
            let mut hasher = DefaultHasher::new();
            (self.seed, before, value).hash(&mut hasher);
            hasher.finish()
        };
        if self.stops.contains(&token) {
            return false;
        }
        match hash(u64::MAX) % 4 {
            0 => {
                let mut tokens = (hash(0) as u32 % VOCABULARY..VOCABULARY).chain(0..VOCABULARY);
                tokens.find(|token| !self.stops.contains(token)) == Some(token)
            }
            1 => hash(u64::from(token)) % 40 == 0 || token < 4,
            _ => hash(u64::from(token)) % 3 > 0,
        }
    }

    /// Checks that `output`, which ended for `reason`, matches the form.
    fn check(&self, output: &[TokenId], reason: FinishReason) {
        let stopped = output.last().is_some_and(|last| self.stops.contains(last));
        let form = &output[..output.len() - usize::from(stopped)];
        for (place, &token) in form.iter().enumerate() {
            assert!(self.allows(&form[..place], token), "{token} at {place} of {output:?}");
        }
        let ended = form.len() == self.length as usize;
        match reason {
            FinishReason::Stop => {
                assert!(ended || form.len().is_multiple_of(3), "{output:?} ended in the middle");
            }
            FinishReason::Length => assert!(!ended, "{output:?} is complete"),
        }
    }
}

impl Guide for Form {
    fn start(&self) -> Result<Box<dyn GuideState>, GuideError> {
        let state = FormState { form: self.clone(), tokens: Vec::new() };
        match self.fault {
            Some((_, Fault::Start)) => Err(GuideError::Failed("the guide cannot start".to_owned())),
            _ => Ok(Box::new(state)),
        }
    }
}

impl FormState {
    fn progress(&self) -> Progress {
        match self.tokens.len() as u32 {
            length if length == self.form.length => Progress::Ended,
            length if length.is_multiple_of(3) => Progress::MayEnd,
            _ => Progress::Open,
        }
    }

    fn fault(&self) -> Option<Fault> {
        self.form.fault.filter(|fault| fault.0 == self.tokens.len() as u32).map(|fault| fault.1)
    }
}

impl GuideState for FormState {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<Progress, GuideError> {
        assert!(allowed.is_empty(), "the set is empty");
        match self.fault() {
            Some(Fault::Allow) => return Err(GuideError::TooComplex("the guide cannot continue".to_owned())),
            Some(Fault::Panic) => panic!("a simulated panic"),
            Some(Fault::DeadEnd) => return Ok(Progress::Open),
            _ => {}
        }
        if self.progress() != Progress::Ended {
            let tokens = (0..VOCABULARY).filter(|&token| self.form.allows(&self.tokens, token));
            tokens.for_each(|token| allowed.insert(token));
        }
        Ok(self.progress())
    }

    fn commit(&mut self, token: TokenId) -> Result<Progress, GuideError> {
        assert!(self.form.allows(&self.tokens, token), "{token} was not allowed after {:?}", self.tokens);
        match self.fault() {
            Some(Fault::Commit) => return Err(GuideError::Failed("the guide rejects the token".to_owned())),
            Some(Fault::CommitPanic) => panic!("a simulated panic"),
            _ => {}
        }
        self.tokens.push(token);
        Ok(self.progress())
    }

    fn fork(&self) -> Box<dyn GuideState> {
        Box::new(self.clone())
    }
}

/// Returns a request of a random kind, and its form, if it has one.
pub(crate) fn one_of_many(which: u32, rng: &mut StdRng) -> (Request, Option<Form>) {
    let mut tokens = if which.is_multiple_of(3) { prompt(0, 40) } else { Vec::new() };
    tokens.extend(prompt(which, rng.random_range(1..60)));
    let tokens_max = rng.random_range(1..40);
    let base = if rng.random_bool(0.5) {
        request(&tokens, tokens_max)
    } else {
        sampled(&tokens, tokens_max, u64::from(which))
    };
    let stop = StopCriteria {
        stop_token_ids: (0..rng.random_range(0..3)).map(|_| rng.random_range(0..VOCABULARY)).collect(),
        max_tokens: tokens_max,
        min_tokens: rng.random_range(0..=tokens_max.min(5)),
    };
    let form = Form::new(u64::from(which), rng.random_range(1..40)).without(&stop.stop_token_ids);
    let form = (!which.is_multiple_of(4)).then_some(form);
    let logprobs = rng.random_bool(0.3).then_some(2);
    let sequences = rng.random_range(1..4);
    let beam_search = rng.random_bool(0.3).then(|| beams(sequences));
    let request = Request {
        num_sequences: sequences,
        beam_search,
        stop,
        sampling: Sampling { logprobs, ..base.sampling.clone() },
        guide: form.as_ref().and_then(Form::guide),
        ..base
    };
    (request, form)
}

pub(crate) fn check(outcome: &Outcome, request: &Request, form: Option<&Form>) {
    assert_eq!(outcome.failure, None);
    assert_eq!(outcome.tokens.len(), request.num_sequences as usize);
    for (tokens, reason) in outcome.tokens.iter().zip(&outcome.reasons) {
        if let Some(form) = form {
            form.check(tokens, reason.unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guided_sequences_follow_their_forms_with_the_same_output_alone_and_under_load() {
    for seed in 0..6 {
        let mut rng = StdRng::seed_from_u64(seed);
        // Each request runs in an engine with a small cache, in which sequences are preempted, and then in one with a
        // large cache.
        let engine = Setup::new(60).start();
        let alone = Setup::new(2000).start();
        let (handle, alone_handle) = (engine.handle(), alone.handle());
        let mut tasks = JoinSet::new();
        for which in 0..60 {
            let (request, form) = one_of_many(which, &mut rng);
            let stream = handle.submit(request.clone()).unwrap();
            let dropped_after = rng.random_bool(0.2).then(|| rng.random_range(0..20));
            let alone_handle = alone_handle.clone();
            tasks.spawn(async move {
                let mut stream = stream;
                if let Some(events) = dropped_after {
                    for _ in 0..events {
                        if stream.next().await.is_none() {
                            break;
                        }
                    }
                    return;
                }
                let together = outcome(stream).await;
                check(&together, &request, form.as_ref());
                let stream = alone_handle.submit(request).unwrap();
                let alone = outcome(stream).await;
                assert_eq!(together.tokens, alone.tokens, "request {which} with seed {seed}");
                assert_eq!(together.reasons, alone.reasons, "request {which} with seed {seed}");
            });
        }
        tasks.join_all().await;
        settled(&handle).await;
        engine.shutdown().unwrap();
        alone.shutdown().unwrap();
    }
}

#[tokio::test]
async fn a_complete_form_ends_the_sequence() {
    let engine = Setup::new(100).start();
    let form = Form::new(5, 6);
    let base = Request { guide: form.guide(), ..request(&prompt(1, 10), 50) };
    let stops: Vec<TokenId> = Vec::new();
    // The sequence ends with `FinishReason::Stop` even if it reaches its maximum number of tokens at the same time, or
    // has not reached the minimum.
    for stop in [
        StopCriteria { stop_token_ids: stops.clone(), max_tokens: 50, min_tokens: 0 },
        StopCriteria { stop_token_ids: stops.clone(), max_tokens: 6, min_tokens: 0 },
        StopCriteria { stop_token_ids: stops, max_tokens: 50, min_tokens: 20 },
    ] {
        let outcome = outcome(engine.handle().submit(Request { stop, ..base.clone() }).unwrap()).await;
        assert_eq!((outcome.tokens[0].len(), outcome.reasons[0]), (6, Some(FinishReason::Stop)));
        form.check(&outcome.tokens[0], FinishReason::Stop);
    }
    settled(&engine.handle()).await;
}

#[tokio::test]
async fn stop_tokens_are_sampled_only_where_the_form_may_end() {
    let engine = Setup::new(100).start();
    // Every token is a stop token, so no token remains for the form. The form may be empty, so the sequence stops
    // immediately.
    let form = Form::new(9, 30);
    let stop = StopCriteria { stop_token_ids: (0..VOCABULARY).collect(), max_tokens: 50, min_tokens: 0 };
    let base = sampled(&prompt(2, 10), 50, 4);
    let all = Request { guide: form.guide(), stop, ..base.clone() };
    let first = outcome(engine.handle().submit(all).unwrap()).await;
    assert_eq!((first.tokens, first.reasons), (vec![Vec::new()], vec![Some(FinishReason::Stop)]));
    let mut lengths = Vec::new();
    for seed in 0..40 {
        let stop = StopCriteria { stop_token_ids: vec![17], max_tokens: 50, min_tokens: 4 };
        let sampling = Sampling { logit_bias: vec![(17, 1000.0)], seed, ..base.sampling.clone() };
        let form = Form::new(seed, 30).without(&[17]);
        let request = Request { guide: form.guide(), stop, sampling, ..base.clone() };
        let outcome = outcome(engine.handle().submit(request).unwrap()).await;
        assert_eq!(outcome.reasons[0], Some(FinishReason::Stop));
        form.check(&outcome.tokens[0], FinishReason::Stop);
        lengths.push(outcome.tokens[0].len());
    }
    // The form may end after any multiple of three tokens. `min_tokens` is four, so the form ends after six tokens, and
    // the stop token follows.
    assert!(lengths.iter().all(|&length| length == 7), "{lengths:?}");
    settled(&engine.handle()).await;
}

#[tokio::test]
async fn a_failing_guide_fails_only_its_request() {
    let engine = Setup::new(200).start();
    let handle = engine.handle();
    let other = handle.submit(request(&prompt(8, 30), 60)).unwrap();
    let faults =
        [Fault::Start, Fault::Allow, Fault::Commit, Fault::CommitPanic, Fault::Panic, Fault::DeadEnd];
    for fault in faults {
        let form = Form::failing(4, fault);
        let guided = Request { guide: form.guide(), num_sequences: 2, ..request(&prompt(1, 10), 50) };
        let fine = Request { guide: Form::new(3, 12).guide(), ..request(&prompt(1, 10), 50) };
        let (guided, fine) = (handle.submit(guided).unwrap(), handle.submit(fine).unwrap());
        let guided = outcome(guided).await;
        let failure = guided.failure.unwrap_or_else(|| panic!("{fault:?} fails the request"));
        assert_eq!(matches!(failure, Failure::NoToken(_)), matches!(fault, Fault::DeadEnd), "{failure}");
        assert_eq!(matches!(failure, Failure::TooComplex(_)), matches!(fault, Fault::Allow), "{failure}");
        assert!(
            ["the form of the answer", "the answer to the form in the request"]
                .iter()
                .any(|text| failure.to_string().contains(text)),
            "{failure}"
        );
        assert_eq!(tokens(fine).await.len(), 12);
    }
    assert_eq!(tokens(other).await.len(), 60);
    settled(&handle).await;
    engine.shutdown().unwrap();
}

#[tokio::test]
async fn allowed_tokens_are_computed_while_the_model_runs() {
    let (engine, gate) = Setup::new(100).start_gated();
    let handle = engine.handle();
    let (observed, seen) = mpsc::channel();
    #[derive(Debug)]
    struct RecordingGuide(Form, mpsc::Sender<()>);
    #[derive(Debug)]
    struct RecordingGuideState(Box<dyn GuideState>, mpsc::Sender<()>);
    impl Guide for RecordingGuide {
        fn start(&self) -> Result<Box<dyn GuideState>, GuideError> {
            Ok(Box::new(RecordingGuideState(self.0.start()?, self.1.clone())))
        }
    }
    impl GuideState for RecordingGuideState {
        fn allow(&mut self, allowed: &mut TokenSet) -> Result<Progress, GuideError> {
            self.1.send(()).unwrap();
            self.0.allow(allowed)
        }
        fn commit(&mut self, token: TokenId) -> Result<Progress, GuideError> {
            self.0.commit(token)
        }
        fn fork(&self) -> Box<dyn GuideState> {
            Box::new(Self(self.0.fork(), self.1.clone()))
        }
    }
    let guide: Arc<dyn Guide> = Arc::new(RecordingGuide(Form::new(2, 9), observed));
    let mut stream = handle.submit(Request { guide: Some(guide), ..request(&prompt(1, 20), 30) }).unwrap();
    for _ in 0..9 {
        gate.arrive();
        // The guide computes the allowed tokens while the step of the model is still blocked.
        seen.recv().unwrap();
        gate.pass();
    }
    let mut count = 0;
    while let Some(event) = stream.next().await {
        count += u32::from(matches!(event, Event::Token { .. }));
    }
    assert_eq!(count, 9);
    drop(gate);
    settled(&handle).await;
}

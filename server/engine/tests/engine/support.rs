//! An engine with the simulated runner, and requests for it.

use std::sync::mpsc::{Receiver, Sender, channel};

use server_engine::sim::{SimConfig, SimCosts, SimRunner};
use server_engine::{
    BeamSearch, CacheLayout, Clock, EarlyStopping, Engine, EngineConfig, EngineHandle, EngineOptions,
    EngineState, Event, Failure, FinishReason, Logits, ModelRunner, Request, RunError, Sampling,
    SchedulerConfig, StartError, StepReport, StopCriteria, TokenId, TokenStream,
};
use server_scheduler::{Batch, BlockId};

pub(crate) const VOCABULARY: u32 = 300;

/// The configuration of an engine.
pub(crate) struct Setup {
    pub(crate) sim: SimConfig,
    pub(crate) engine: EngineConfig,
    pub(crate) adapters: u32,
}

impl Setup {
    /// Returns a configuration with a cache of this many blocks of 8 tokens, chunks of 64 tokens, and steps that take
    /// no simulated time.
    pub(crate) fn new(blocks_total: u32) -> Self {
        let clock = Clock::simulated();
        Self {
            sim: SimConfig {
                block_tokens: 8,
                blocks_total,
                vocabulary: VOCABULARY,
                costs: SimCosts::default(),
                faults: Vec::new(),
            },
            engine: EngineConfig {
                scheduler: SchedulerConfig {
                    max_num_batched_tokens: 64,
                    max_chunk_tokens: 64,
                    max_itl: None,
                    max_num_seqs: 32,
                    max_queue: 1000,
                    max_model_len: 100_000,
                    prefix_caching: true,
                    kv_eviction_tokens: None,
                },
                clock,
            },
            adapters: 0,
        }
    }

    pub(crate) fn runner(&self) -> SimRunner {
        SimRunner::new(self.sim.clone(), self.engine.clock.clone()).with_adapters(self.adapters)
    }

    pub(crate) fn start(self) -> Engine {
        Engine::start(self.engine.clone(), Box::new(self.runner()), Box::new(|_| {})).unwrap()
    }

    /// Starts an engine with these options.
    pub(crate) fn start_with(self, options: EngineOptions) -> Result<Engine, StartError> {
        let runner = Box::new(self.runner());
        Engine::start_with_options(self.engine, runner, options, Box::new(|_| {}))
    }

    /// Starts an engine that sends a report of each step. The channel is unbounded.
    pub(crate) fn start_observed(self) -> (Engine, Receiver<StepReport>) {
        let (sender, reports) = channel();
        let observer = Box::new(move |report: &StepReport| drop(sender.send(report.clone())));
        (Engine::start(self.engine.clone(), Box::new(self.runner()), observer).unwrap(), reports)
    }

    /// Starts an engine whose steps wait at the gate.
    pub(crate) fn start_gated(self) -> (Engine, Gate) {
        self.start_gated_with(EngineOptions::default())
    }

    /// Starts an engine like [`Self::start_gated`], with these options.
    pub(crate) fn start_gated_with(self, options: EngineOptions) -> (Engine, Gate) {
        let (batches, shown) = channel();
        let (go, permits) = channel();
        let runner = GatedRunner { inner: self.runner(), batches, permits };
        let (sender, reports) = channel();
        let observer = Box::new(move |report: &StepReport| drop(sender.send(report.clone())));
        let engine = Engine::start_with_options(self.engine, Box::new(runner), options, observer).unwrap();
        (engine, Gate { shown, go, reports })
    }
}

/// Blocks each step before it is computed, until the step may [`pass`](Self::pass) or the gate is dropped.
pub(crate) struct Gate {
    shown: Receiver<Batch>,
    go: Sender<()>,
    pub(crate) reports: Receiver<StepReport>,
}

impl Gate {
    /// Waits until a step is blocked, and returns its batch.
    pub(crate) fn arrive(&self) -> Batch {
        self.shown.recv().unwrap()
    }

    /// Unblocks the current step.
    pub(crate) fn pass(&self) {
        self.go.send(()).unwrap();
    }

    /// Unblocks the current and all later steps, and returns the receiver of the reports.
    pub(crate) fn release(self) -> Receiver<StepReport> {
        self.reports
    }
}

struct GatedRunner {
    inner: SimRunner,
    batches: Sender<Batch>,
    permits: Receiver<()>,
}

impl ModelRunner for GatedRunner {
    fn layout(&self) -> CacheLayout {
        self.inner.layout()
    }

    fn block_scores(&self) -> &[f32] {
        self.inner.block_scores()
    }

    fn adapters(&self) -> u32 {
        self.inner.adapters()
    }

    fn read_block(&self, block: BlockId, bytes: &mut [u8]) -> Result<(), RunError> {
        self.inner.read_block(block, bytes)
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), RunError> {
        self.inner.write_block(block, bytes)
    }

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        // Both calls fail once the gate has been dropped.
        let _ = self.batches.send(batch.clone());
        let _ = self.permits.recv();
        self.inner.run(batch)
    }
}

pub(crate) fn request(prompt: &[TokenId], tokens_max: u32) -> Request {
    let stop = StopCriteria { stop_token_ids: Vec::new(), max_tokens: tokens_max, min_tokens: 0 };
    Request::new(prompt.to_vec(), Sampling::greedy(), stop)
}

/// Returns a request that samples with a temperature at which different seeds produce different output.
pub(crate) fn sampled(prompt: &[TokenId], tokens_max: u32, seed: u64) -> Request {
    let sampling =
        Sampling { temperature: 4.0, top_p: 0.98, repetition_penalty: 1.1, seed, ..Sampling::greedy() };
    Request { sampling, ..request(prompt, tokens_max) }
}

/// Returns the parameters of a beam search with one group and this number of results.
pub(crate) fn beams(results: u32) -> BeamSearch {
    BeamSearch {
        num_results: results,
        num_groups: 1,
        length_penalty: 1.0,
        diversity_penalty: 0.0,
        early_stopping: EarlyStopping::Heuristic,
        stop_strings: None,
    }
}

/// Returns a prompt of `length` tokens, which are determined by `which`.
pub(crate) fn prompt(which: u32, length: u32) -> Vec<TokenId> {
    (0..length).map(|position| (which * 7919 + position * position * 31 + 17) % VOCABULARY).collect()
}

/// The outcome of a request.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) cached_tokens: Option<u32>,
    /// The tokens of each sequence.
    pub(crate) tokens: Vec<Vec<TokenId>>,
    pub(crate) reasons: Vec<Option<FinishReason>>,
    pub(crate) failure: Option<Failure>,
}

/// Reads a stream to its end, and checks the order of its events.
pub(crate) async fn outcome(mut stream: TokenStream) -> Outcome {
    let mut outcome = Outcome::default();
    while let Some(event) = stream.next().await {
        add(&mut outcome, event);
    }
    assert!(stream.next().await.is_none() && stream.try_next().is_none(), "no event follows the end");
    outcome
}

pub(crate) fn add(outcome: &mut Outcome, event: Event) {
    assert!(outcome.failure.is_none(), "{event:?} after a failure");
    if let Event::Token { index, .. } | Event::Finished { index, .. } = event
        && outcome.tokens.len() <= index as usize
    {
        outcome.tokens.resize(index as usize + 1, Vec::new());
        outcome.reasons.resize(index as usize + 1, None);
    }
    match event {
        Event::Started { cached_tokens } => {
            assert!(outcome.tokens.is_empty(), "started after a token");
            assert!(outcome.cached_tokens.replace(cached_tokens).is_none(), "started twice");
        }
        Event::Token { index, token, .. } => {
            assert!(outcome.cached_tokens.is_some(), "a token before the start");
            let index = index as usize;
            assert!(outcome.reasons[index].is_none(), "a token after the end");
            outcome.tokens[index].push(token);
        }
        Event::Finished { index, reason, .. } => {
            assert!(outcome.reasons[index as usize].replace(reason).is_none(), "finished twice");
        }
        Event::Scored { .. } => assert!(outcome.tokens.is_empty(), "scored after a token"),
        Event::Failed(failure) => outcome.failure = Some(failure),
    }
}

/// Returns the output of a request's only sequence.
pub(crate) async fn tokens(stream: TokenStream) -> Vec<TokenId> {
    let outcome = outcome(stream).await;
    assert_eq!(outcome.failure, None);
    assert_eq!(outcome.tokens.len(), 1);
    outcome.tokens.into_iter().next().unwrap()
}

/// Waits until the engine is idle, and checks that no blocks are in use and the queue is empty.
pub(crate) async fn settled(handle: &EngineHandle) {
    let mut load = handle.load();
    let idle = load
        .wait_for(|now| now.state == EngineState::Serving && now.load.running == 0 && now.load.waiting == 0);
    let now = idle.await.unwrap().load;
    assert_eq!(now.blocks_active, 0, "{now:?}");
    assert_eq!(now.blocks_free + now.blocks_evictable, now.blocks_total, "{now:?}");
    assert_eq!(handle.waiting_sequences(), 0);
}

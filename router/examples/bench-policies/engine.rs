//! A replica in virtual time: the server's own scheduler, and a model whose step time is computed from the batch. The
//! replica can be cloned, so that the oracle can simulate which replica would generate the first token of a request
//! earliest.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use server_scheduler::{
    Batch, CacheSize, Event, Load, NewRequest, SampledToken, ScheduledSequence, Scheduler, SchedulerConfig,
    StopCriteria, TokenId,
};

/// Virtual time since the start, in nanoseconds.
pub(crate) type Nanos = u64;

/// One second, in nanoseconds.
pub(crate) const SECOND: Nanos = 1_000_000_000;

/// The tokens of a request. The router receives only a part of this information.
#[derive(Debug)]
pub(crate) struct Spec {
    /// The prompt, followed by the answer.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) prompt_tokens: u32,
}

impl Spec {
    pub(crate) fn output_tokens(&self) -> u32 {
        self.tokens.len() as u32 - self.prompt_tokens
    }
}

/// The sizes and speeds of a replica.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineConfig {
    pub(crate) block_tokens: u32,
    pub(crate) blocks_total: u32,
    pub(crate) max_num_batched_tokens: u32,
    pub(crate) max_chunk_tokens: u32,
    pub(crate) max_num_seqs: u32,
    /// The part of a step's duration that does not depend on its tokens.
    pub(crate) step: Nanos,
    /// The time per token of a sequence that computes several tokens in a step.
    pub(crate) prefill_token: Nanos,
    /// The time per token of a sequence that computes a single token in a step.
    pub(crate) decode_token: Nanos,
}

/// An event at the end of a step: the first or the last token of a request has been generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The first token has been generated.
    First { request: usize },
    /// The last token has been generated.
    Finished { request: usize },
}

#[derive(Clone, Debug)]
pub(crate) struct Engine {
    pub(crate) config: EngineConfig,
    scheduler: Scheduler,
    batch: Batch,
    /// The duration of the step in flight.
    step_time: Nanos,
    requests: BTreeMap<u64, Rc<Spec>>,
    /// The number of prompt tokens that were cached.
    pub(crate) cached_tokens: u64,
    /// The total number of prompt tokens.
    pub(crate) prompt_tokens: u64,
    prefill: Speed,
    decode: Speed,
}

/// An observed speed, averaged in the same way as in the server.
#[derive(Clone, Copy, Debug, Default)]
struct Speed {
    tokens: f64,
    seconds: f64,
}

impl Speed {
    fn add(&mut self, tokens: u32, seconds: f64) {
        if tokens > 0 {
            let decay = (-seconds / 5.0).exp();
            self.tokens = self.tokens * decay + f64::from(tokens);
            self.seconds = self.seconds * decay + seconds;
        }
    }

    fn per_second(self) -> f32 {
        if self.seconds > 0.0 { (self.tokens / self.seconds) as f32 } else { 0.0 }
    }
}

impl Engine {
    pub(crate) fn new(config: EngineConfig) -> Self {
        let settings = SchedulerConfig {
            max_num_batched_tokens: config.max_num_batched_tokens,
            max_chunk_tokens: config.max_chunk_tokens,
            max_itl: None,
            max_num_seqs: config.max_num_seqs,
            max_queue: u32::MAX,
            max_model_len: config.blocks_total * config.block_tokens,
            prefix_caching: true,
            kv_eviction_tokens: None,
        };
        let cache = CacheSize { block_tokens: config.block_tokens, blocks_total: config.blocks_total };
        let scheduler = Scheduler::new(settings, cache);
        Self {
            config,
            scheduler,
            batch: Batch::default(),
            step_time: 0,
            requests: BTreeMap::new(),
            cached_tokens: 0,
            prompt_tokens: 0,
            prefill: Speed::default(),
            decode: Speed::default(),
        }
    }

    pub(crate) fn submit(&mut self, request: usize, spec: Rc<Spec>) {
        let id = request as u64;
        let stop = StopCriteria { max_tokens: spec.output_tokens(), ..StopCriteria::default() };
        let prompt = spec.tokens[..spec.prompt_tokens as usize].to_vec();
        self.scheduler
            .submit(NewRequest::new(id, 1, prompt, stop))
            .expect("each request fits into the cache");
        self.requests.insert(id, spec);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    pub(crate) fn prefill_tokens_per_second(&self) -> f32 {
        self.prefill.per_second()
    }

    pub(crate) fn decode_tokens_per_second(&self) -> f32 {
        self.decode.per_second()
    }

    pub(crate) fn load(&self) -> Load {
        self.scheduler.load()
    }

    /// Schedules the next step and returns its duration. The engine must not be idle.
    pub(crate) fn begin_step(&mut self) -> Nanos {
        self.scheduler.schedule(&mut self.batch);
        assert!(!self.batch.sequences.is_empty(), "a scheduler with work schedules a batch");
        let EngineConfig { step, prefill_token, decode_token, .. } = self.config;
        let time = |sequence: &ScheduledSequence| match sequence.tokens.len() as Nanos {
            1 => decode_token,
            count => count * prefill_token,
        };
        self.step_time = step + self.batch.sequences.iter().map(time).sum::<Nanos>();
        self.record_speeds();
        self.step_time
    }

    fn record_speeds(&mut self) {
        let (mut prefill, mut generated) = (0, 0);
        for sequence in &self.batch.sequences {
            let prompt_tokens = self.requests[&sequence.id.request].prompt_tokens;
            if sequence.tokens.len() > 1 || sequence.computed_tokens < prompt_tokens {
                prefill += sequence.tokens.len() as u32;
            }
            generated += sequence.samples.len() as u32;
        }
        let seconds = self.step_time as f64 / SECOND as f64;
        self.prefill.add(prefill, seconds);
        self.decode.add(generated, seconds);
    }

    /// Completes the step in flight: each sequence that samples continues with the next token of its request.
    pub(crate) fn end_step(&mut self, outcomes: &mut Vec<Outcome>) {
        let mut sampled = Vec::new();
        for sequence in self.batch.sampling_sequences() {
            let position = sequence.computed_tokens + sequence.tokens.len() as u32;
            let spec = &self.requests[&sequence.id.request];
            if position == spec.prompt_tokens {
                outcomes.push(Outcome::First { request: sequence.id.request as usize });
            }
            sampled.push(SampledToken::new(sequence.id, spec.tokens[position as usize]));
        }
        let mut events = Vec::new();
        self.scheduler.commit(&self.batch, &sampled, &mut events);
        self.scheduler.record_step(&self.batch, Duration::from_nanos(self.step_time));
        for event in events {
            match event {
                Event::Started { sequence, cached_tokens } => {
                    self.cached_tokens += u64::from(cached_tokens);
                    self.prompt_tokens += u64::from(self.requests[&sequence.request].prompt_tokens);
                }
                Event::Finished { sequence, .. } => {
                    self.requests.remove(&sequence.request);
                    outcomes.push(Outcome::Finished { request: sequence.request as usize });
                }
            }
        }
    }
}

//! Measures the time that the engine's thread spends per step outside the model: sampling, committing tokens to guides,
//! scheduling and sending events. The model is a table of logits, so a step has no other costs.
//!
//! `make bench-sampling` prints a table for each number of threads in `--threads`.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints a table")]

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use server_engine::{
    CacheLayout, Clock, Engine, EngineConfig, EngineOptions, Guide, GuideError, GuideState, Logits,
    ModelRunner, Progress, Request, RunError, Sampling, SchedulerConfig, StepReport, StopCriteria, TokenId,
    TokenSet,
};
use server_scheduler::Batch;

const USAGE: &str =
    "usage: bench-sampling [--threads N,…] [--sequences N,…] [--vocabulary N] [--steps N] [--only NAME]";
const PROMPT_TOKENS: u32 = 500;

struct Args {
    threads: Vec<usize>,
    sequences: Vec<u32>,
    vocabulary: u32,
    steps: u32,
    only: Option<String>,
}

/// A runner that returns the same logits in each step.
struct TableRunner {
    logits: Vec<f32>,
    vocabulary: u32,
}

impl ModelRunner for TableRunner {
    fn layout(&self) -> CacheLayout {
        CacheLayout { block_tokens: 16, blocks_total: 20_000, block_bytes: 1, vocabulary: self.vocabulary }
    }

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        let rows = batch.logits_indices().count();
        Ok(Logits::new(&self.logits[..rows * self.vocabulary as usize], self.vocabulary))
    }
}

/// A guide that allows the same tokens at every position.
#[derive(Clone, Debug)]
struct ConstantGuide {
    allowed: Arc<TokenSet>,
}

impl Guide for ConstantGuide {
    fn start(&self) -> Result<Box<dyn GuideState>, GuideError> {
        Ok(Box::new(self.clone()))
    }
}

impl GuideState for ConstantGuide {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<Progress, GuideError> {
        allowed.insert_words(self.allowed.words());
        Ok(Progress::Open)
    }

    fn commit(&mut self, _: TokenId) -> Result<Progress, GuideError> {
        Ok(Progress::Open)
    }

    fn fork(&self) -> Box<dyn GuideState> {
        Box::new(self.clone())
    }
}

/// The tokens that a guide allows.
#[derive(Clone, Copy)]
enum Form {
    /// One in 2,000 tokens, as at a position where only a few words can follow.
    Sparse,
    /// 19 of 20 tokens, as inside a JSON string.
    Dense,
}

impl Form {
    fn guide(self, vocabulary: u32) -> Arc<dyn Guide> {
        let is_allowed = |token: &TokenId| match self {
            Self::Sparse => token.is_multiple_of(2000),
            Self::Dense => !(token * 7).is_multiple_of(20),
        };
        let mut allowed = TokenSet::new(vocabulary);
        (0..vocabulary).filter(is_allowed).for_each(|token| allowed.insert(token));
        Arc::new(ConstantGuide { allowed: Arc::new(allowed) })
    }
}

struct Case {
    name: &'static str,
    sampling: Sampling,
    form: Option<Form>,
}

fn cases() -> Vec<Case> {
    let greedy = Sampling::greedy();
    let hot = Sampling { temperature: 1.0, ..greedy.clone() };
    let case = |name, sampling: &Sampling| Case { name, sampling: sampling.clone(), form: None };
    let guided = |name, sampling, form| Case { form: Some(form), ..case(name, sampling) };
    let nucleus = Sampling { temperature: 0.7, top_p: 0.95, ..greedy.clone() };
    vec![
        case("greedy", &greedy),
        case("greedy, penalties", &Sampling { repetition_penalty: 1.1, ..greedy.clone() }),
        case("greedy, 5 logprobs", &Sampling { logprobs: Some(5), ..greedy.clone() }),
        case("temperature 1", &hot),
        case("top_p 0.95", &nucleus),
        case("top_p 0.95, temperature 1", &Sampling { top_p: 0.95, ..hot.clone() }),
        case("top_k 50", &Sampling { top_k: 50, ..hot.clone() }),
        case("top_k 20, top_p 0.8", &Sampling { top_k: 20, top_p: 0.8, ..nucleus.clone() }),
        case("min_p 0.05", &Sampling { min_p: 0.05, ..hot.clone() }),
        guided("greedy, sparse guide", &greedy, Form::Sparse),
        guided("greedy, dense guide", &greedy, Form::Dense),
        guided("top_p 0.95, sparse guide", &nucleus, Form::Sparse),
        guided("top_p 0.95, dense guide", &nucleus, Form::Dense),
    ]
}

fn main() -> ExitCode {
    let args = match args(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(message) => {
            eprintln!("error: {message}\n{USAGE}");
            return ExitCode::FAILURE;
        }
    };
    println!("ms per step outside the model, fastest of {} steps, {} logits", args.steps, args.vocabulary);
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime can be built");
    for &threads in &args.threads {
        let counts: Vec<String> = args.sequences.iter().map(|count| format!("{count:>8}")).collect();
        println!("\n{:<28}{}", format!("threads: {threads}"), counts.concat());
        for case in cases().iter().filter(|case| args.only.as_ref().is_none_or(|only| only == case.name)) {
            let times = args.sequences.iter().map(|&count| {
                let time = runtime.block_on(measure(case, count, threads, &args));
                format!("{:>8.2}", time.as_secs_f64() * 1e3)
            });
            println!("{:<28}{}", case.name, times.collect::<String>());
        }
    }
    ExitCode::SUCCESS
}

/// Returns the shortest time that a decode step spends outside the model, because other processes disturb the minimum
/// least.
async fn measure(case: &Case, sequences: u32, threads: usize, args: &Args) -> Duration {
    let runner = TableRunner { logits: logits(sequences, args.vocabulary), vocabulary: args.vocabulary };
    let config = EngineConfig {
        scheduler: SchedulerConfig {
            max_num_batched_tokens: 4 * PROMPT_TOKENS,
            max_chunk_tokens: 4 * PROMPT_TOKENS,
            max_itl: None,
            max_num_seqs: sequences,
            max_queue: sequences,
            max_model_len: PROMPT_TOKENS + args.steps + 64,
            prefix_caching: true,
            kv_eviction_tokens: None,
        },
        clock: Clock::real(),
    };
    let (sender, reports) = channel();
    let observer = Box::new(move |report: &StepReport| drop(sender.send(report.clone())));
    let options = EngineOptions { sampling_threads: Some(threads), ..EngineOptions::default() };
    let engine = Engine::start_with_options(config, Box::new(runner), options, observer)
        .expect("the configuration is valid");
    let handle = engine.handle();
    let mut streams = Vec::new();
    for seed in 0..sequences {
        let prompt = (0..PROMPT_TOKENS).map(|token| (token * 7 + seed) % args.vocabulary).collect();
        let sampling = Sampling { seed: u64::from(seed), ..case.sampling.clone() };
        let stop = StopCriteria { stop_token_ids: Vec::new(), max_tokens: args.steps + 30, min_tokens: 0 };
        let guide = case.form.map(|form| form.guide(args.vocabulary));
        let request = Request { guide, ..Request::new(prompt, sampling, stop) };
        streams.push(handle.submit(request).expect("the request is valid"));
    }
    for stream in &mut streams {
        while stream.next().await.is_some() {}
    }
    engine.shutdown().expect("the engine does not fail");
    let is_decode = |report: &StepReport| report.generated_tokens == sequences && report.prefill_tokens == 0;
    let cost =
        |report: StepReport| report.step_time.saturating_sub(report.run_time + report.structured_output_wait);
    reports.iter().filter(is_decode).map(cost).min().unwrap_or_default()
}

/// Logits that are distributed like those of a language model: most of them follow a bell curve, and a few are high.
fn logits(sequences: u32, vocabulary: u32) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(1);
    let mut logits = Vec::new();
    for _ in 0..sequences {
        let start = logits.len();
        logits.extend((0..vocabulary).map(|_| (0..4).map(|_| rng.random_range(-2.0f32..2.0)).sum::<f32>()));
        for _ in 0..40 {
            logits[start + rng.random_range(0..vocabulary as usize)] = rng.random_range(8f32..16.0);
        }
    }
    logits
}

fn args(given: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut args =
        Args { threads: vec![1], sequences: vec![1, 8, 32, 64], vocabulary: 152_000, steps: 40, only: None };
    let mut given = given;
    while let Some(name) = given.next() {
        let value = given.next().ok_or_else(|| format!("{name} needs a value"))?;
        let number = |text: &str| text.parse::<u32>().map_err(|error| format!("{name} {text}: {error}"));
        let numbers = || value.split(',').map(number).collect::<Result<Vec<u32>, String>>();
        match name.as_str() {
            "--threads" => args.threads = numbers()?.into_iter().map(|count| count as usize).collect(),
            "--sequences" => args.sequences = numbers()?,
            "--vocabulary" => args.vocabulary = number(&value)?,
            "--steps" => args.steps = number(&value)?,
            "--only" => args.only = Some(value),
            _ => return Err(format!("unknown argument {name}")),
        }
    }
    Ok(args)
}

//! Runs a scenario in this process, either on an engine or directly on the model. `tests/bench/README.md` describes the
//! scenarios. Benchmarks and conformance tests compare the results with those of other engines.

mod floor;
mod generate;
mod scenario;
mod score;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use clap::Parser;
use scenario::Scenario;
use serde_json::{Value, json};
use server_openvino::{ActivationPrecision, AdapterSource, Config, LoadReport, OpenVinoRunner, load};

/// Runs one scenario and writes its result.
#[derive(Debug, Parser)]
struct Args {
    /// A GGUF file, or the directory of an OpenVINO IR.
    #[arg(long)]
    model: PathBuf,
    /// The file of the scenario.
    #[arg(long)]
    scenario: PathBuf,
    /// The file to which the result is written.
    #[arg(long)]
    out: PathBuf,
    /// The directory of the model cache.
    #[arg(long)]
    cache_dir: Option<PathBuf>,
    /// The precision in which native projections multiply activations: auto or int8.
    #[arg(long, default_value = "auto")]
    activation_precision: String,
    /// Size of the KV cache in MiB.
    #[arg(long, default_value_t = 2048)]
    kv_cache_mib: u64,
    /// Maximum number of tokens processed in one step.
    #[arg(long, default_value_t = 512)]
    max_num_batched_tokens: u32,
    /// Maximum number of tokens processed in a step that both generates tokens and processes prompts.
    #[arg(long, default_value_t = 128)]
    max_chunk_tokens: u32,
    /// Target time in milliseconds of a step with decodes.
    #[arg(long)]
    max_itl_ms: Option<u64>,
    /// Fraction of the attention mass that the selected keys of long prompts must cover.
    #[arg(long)]
    sparse_attention: Option<f32>,
    /// Maximum number of tokens of a generating sequence that remain in the KV cache.
    #[arg(long)]
    kv_eviction_tokens: Option<u32>,
    /// Maximum number of sequences that run at the same time.
    #[arg(long, default_value_t = 256)]
    max_num_seqs: u32,
    /// Disable prefix caching, so that every prompt is computed completely.
    #[arg(long)]
    no_prefix_caching: bool,
    /// A property for the device's plugin, `KEY=VALUE`. Repeatable.
    #[arg(long)]
    plugin_config: Vec<String>,
    /// The directory of an adapter. Repeatable.
    #[arg(long)]
    lora: Vec<PathBuf>,
    /// The numbers of the adapters that requests use in turn; 0 means none. By default, requests use all adapters in
    /// turn.
    #[arg(long, value_delimiter = ',')]
    lora_turns: Vec<u32>,
    /// A token that ends a sequence unless the scenario sets `ignore_eos`. Repeatable.
    #[arg(long)]
    stop_token: Vec<u32>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let text = std::fs::read_to_string(&args.scenario)
        .with_context(|| format!("failed to read {}", args.scenario.display()))?;
    let scenario: Scenario = serde_json::from_str(&text)
        .with_context(|| format!("failed to parse {}", args.scenario.display()))?;
    let started = Instant::now();
    let (runner, loaded) = load(&args.config()?, &mut |_| {})?;
    let load_seconds = started.elapsed().as_secs_f64();
    let memory_loaded =
        json!({ "anon_bytes": status_bytes("RssAnon:"), "file_bytes": status_bytes("RssFile:") });
    let directory = args.scenario.parent().unwrap_or(Path::new("."));
    let (kind, body) = match scenario {
        Scenario::Generate(work) => ("generate", generate::run(&args, runner, &work)?),
        Scenario::Floor(work) => ("floor", floor::run(&args, runner, &work)?),
        Scenario::Score(work) => ("score", score::run(runner, &work, directory)?),
    };
    let mut result = args.head(kind, &loaded);
    result["load_seconds"] = json!(load_seconds);
    result["from_cache"] = json!(loaded.from_cache);
    result["memory_loaded"] = memory_loaded;
    result["memory_peak_bytes"] = json!(status_bytes("VmHWM:"));
    let Value::Object(body) = body else { anyhow::bail!("invariant: a result is an object") };
    result.as_object_mut().context("invariant: the head is an object")?.extend(body);
    std::fs::write(&args.out, serde_json::to_string(&result)?)
        .with_context(|| format!("failed to write {}", args.out.display()))
}

impl Args {
    fn config(&self) -> anyhow::Result<Config> {
        let plugin_config = self
            .plugin_config
            .iter()
            .map(|one| one.split_once('=').with_context(|| format!("--plugin-config {one} is not KEY=VALUE")))
            .map(|one| one.map(|(key, value)| (key.to_owned(), value.to_owned())))
            .collect::<anyhow::Result<_>>()?;
        let activation_precision = match self.activation_precision.as_str() {
            "auto" => ActivationPrecision::Auto,
            "int8" => ActivationPrecision::Int8,
            other => anyhow::bail!("--activation-precision must be auto or int8, not {other}"),
        };
        Ok(Config {
            plugin_config,
            kv_cache_bytes: Some(self.kv_cache_mib << 20),
            activation_precision,
            cache_dir: self.cache_dir.clone(),
            adapters: self.adapters(),
            sparse_attention: self.sparse_attention,
            block_scores: self.kv_eviction_tokens.is_some(),
            ..Config::new(self.model.clone())
        })
    }

    fn adapters(&self) -> Vec<AdapterSource> {
        let source = |(number, path): (usize, &PathBuf)| AdapterSource {
            name: (number + 1).to_string(),
            path: path.clone(),
        };
        self.lora.iter().enumerate().map(source).collect()
    }

    /// Returns the number of the adapter of the request with this index; 0 means none.
    fn adapter_of(&self, index: usize) -> u32 {
        match (&self.lora_turns[..], self.lora.len()) {
            ([], 0) => 0,
            ([], count) => (index % count) as u32 + 1,
            (turns, _) => turns[index % turns.len()],
        }
    }

    fn head(&self, kind: &str, loaded: &LoadReport) -> Value {
        let threads = self.plugin_config.iter().find_map(|one| one.strip_prefix("INFERENCE_NUM_THREADS="));
        let threads = threads
            .and_then(|threads| threads.parse().ok())
            .or_else(|| std::thread::available_parallelism().ok().map(usize::from));
        json!({
            "engine": "ovfleet",
            "version": env!("CARGO_PKG_VERSION"),
            "model": self.model,
            "kind": kind,
            "config": {
                "inference_precision": loaded.inference_precision,
                "kv_cache_precision": loaded.kv_cache_precision,
                "threads": threads,
                "max_num_batched_tokens": self.max_num_batched_tokens,
                "max_chunk_tokens": self.max_chunk_tokens,
                "max_itl_ms": self.max_itl_ms,
                "activation_precision": self.activation_precision,
                "sparse_attention": self.sparse_attention,
                "kv_cache_bytes": u64::from(loaded.layout.blocks_total) * loaded.layout.block_bytes,
                "block_tokens": loaded.layout.block_tokens,
                "prefix_caching": !self.no_prefix_caching,
            },
        })
    }

    /// The configuration of the engine.
    fn engine_config(&self) -> server_engine::EngineConfig {
        server_engine::EngineConfig {
            scheduler: server_engine::SchedulerConfig {
                max_num_batched_tokens: self.max_num_batched_tokens,
                max_chunk_tokens: self.max_chunk_tokens,
                max_itl: self.max_itl_ms.map(std::time::Duration::from_millis),
                max_num_seqs: self.max_num_seqs,
                max_queue: 4096,
                max_model_len: u32::MAX,
                prefix_caching: !self.no_prefix_caching,
                kv_eviction_tokens: self.kv_eviction_tokens,
            },
            clock: server_engine::Clock::real(),
        }
    }
}

/// A size in bytes that the system reports for this process, such as the peak of its resident memory (`VmHWM:`).
fn status_bytes(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

type Runner = OpenVinoRunner;

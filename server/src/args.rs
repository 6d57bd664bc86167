//! The command line and the environment. The comments on the fields are the help text and the reference in the
//! documentation.

mod adapter;
mod limits;
mod parsers;
mod sim;
mod sleep;
mod spill;
mod store;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum, value_parser};
use process::env_with_prefix;
pub use process::logs::LogFormat;
pub use process::units::ByteSize;
use process::units::{duration, proper_fraction};
use server_parsers::{ReasoningFormat, ToolFormat};

pub use adapter::NamedAdapter;
pub use limits::LimitArgs;
pub use parsers::ParserChoice;
pub use sim::SimArgs;
pub use sleep::SleepArgs;
pub use spill::SpillArgs;
pub use store::StoreArgs;

use crate::drain::DrainArgs;
use crate::fetch::FetchArgs;
use crate::media::MediaPolicy;

/// Serve a language model on OpenVINO with OpenAI's API.
///
/// The model is a GGUF file or the directory of an OpenVINO IR. Any OpenAI client can use it at http://HOST:PORT/v3 (or
/// /v1). Every option can also be set with the environment variable that is listed with it.
#[derive(Clone, Debug, Parser)]
#[command(name = "ovfleet-server", version, max_term_width = 110, after_long_help = EXAMPLES)]
#[command(mut_args(env_with_prefix("OVFLEET_")))]
pub struct Args {
    /// The subcommand; without one, the server runs.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// The model: a GGUF file, the first part of a split GGUF model, or a directory with openvino_model.xml or
    /// openvino_language_model.xml, and tokenizer.json.
    ///
    /// `--backend sim` uses only its tokenizer and chat template, or a byte tokenizer if no model is given.
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,

    /// The name of the model in requests. Repeatable; the model is served under all of these names.
    ///
    /// Default: the name of the file or directory.
    #[arg(long = "model-name", value_name = "NAME", value_delimiter = ',')]
    pub model_names: Vec<String>,

    /// A LoRA adapter and its name, which requests use as their model. Repeatable.
    ///
    /// PATH is a directory in PEFT's format, with adapter_config.json and adapter_model.safetensors. Requests with
    /// different adapters, and without one, are computed in the same step. `--backend sim` does not read the
    /// directories.
    #[arg(long = "lora", value_name = "NAME=PATH", value_delimiter = ',')]
    pub adapters: Vec<NamedAdapter>,

    /// The format of the model's tool calls: auto, none, hermes3, llama3, mistral, devstral, phi4, gptoss, qwen3coder,
    /// lfm2, gemma4, minicpm5, deepseek or granite.
    ///
    /// auto detects the format in the chat template; a model whose template has no known format is instructed to use
    /// hermes3. With none, tool calls remain in the text of the answer.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = parsers::choice::<ToolFormat>)]
    pub tool_parser: ParserChoice<ToolFormat>,

    /// The format of the model's reasoning: auto, none, qwen3, deepseek, gptoss, gemma4, minicpm5, granite or mistral.
    ///
    /// auto detects the format in the chat template. With none, reasoning remains in the text of the answer.
    #[arg(
        long,
        value_name = "NAME",
        default_value = "auto",
        value_parser = parsers::choice::<ReasoningFormat>
    )]
    pub reasoning_parser: ParserChoice<ReasoningFormat>,

    /// The address to listen on. 0.0.0.0 makes the server reachable from other machines.
    #[arg(long, default_value = "127.0.0.1", help_heading = "Network")]
    pub host: IpAddr,

    /// The port of the API, the probes and the metrics. 0 selects a free port.
    #[arg(long, default_value_t = 8000, help_heading = "Network")]
    pub port: u16,

    /// The port of the gRPC services: load reports for routers, and grpc.health.v1. 0 selects a free port.
    #[arg(long, default_value_t = 50051, help_heading = "Network")]
    pub grpc_port: u16,

    /// An additional port, on the same address, that serves only `/metrics`, `/v2/health/live` and `/v2/health/ready`. 0
    /// selects a free port.
    ///
    /// Its connections do not count toward --max-connections, so that probes and scrapes are answered regardless
    /// of the number of clients. The API's port serves these paths too. Default: none.
    #[arg(long, value_name = "PORT", help_heading = "Network")]
    pub admin_port: Option<u16>,

    /// A file with the replica token. Requests to the API and calls for load reports are rejected without it, so that
    /// only routers can send them.
    ///
    /// The file has one token per line: 16 to 256 letters, digits and -._~+/=. All tokens in the file are accepted. The
    /// file is reloaded when it changes. Routers need this flag with the same file. The admin port needs no token.
    /// Default: no token is required.
    #[arg(long, value_name = "PATH", help_heading = "Network")]
    pub replica_token_file: Option<PathBuf>,

    /// The backend: the OpenVINO runtime, or a simulator that answers gibberish at a given speed.
    #[arg(long, value_enum, default_value = "openvino", help_heading = "Engine")]
    pub backend: Backend,

    /// The OpenVINO device: CPU, GPU, GPU.1, AUTO or HETERO:GPU,CPU. Only CPU is tested. NPU is not supported, because
    /// OpenVINO has no paged attention for it.
    #[arg(long, default_value = "CPU", help_heading = "Engine")]
    pub device: String,

    /// The NUMA node that the server runs on. The server uses only the processors of this node and, if the
    /// system permits it, only its memory.
    ///
    /// On a machine with several nodes, run one replica per node, because the memory of other nodes is slower.
    /// Default: all nodes.
    #[arg(long, value_name = "NUMBER", help_heading = "Engine")]
    pub numa_node: Option<u32>,

    /// Number of groups of threads that divide the weights and the KV heads among each other, at most 64. Use the number
    /// of NUMA nodes, so that each group runs on a node and reads only the memory of that node.
    ///
    /// The answers do not depend on the number. With 1, the threads are not bound to nodes. The speed has not been
    /// measured on a machine with several nodes; one replica per node (--numa-node) is the alternative. Only the work
    /// of the native kernels is divided.
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=64),
        help_heading = "Engine"
    )]
    pub tensor_parallel_size: u32,

    /// Size of the KV cache. Accepts a unit, such as 2GiB. With --draft-model it includes the caches of both models.
    ///
    /// Default: half of the memory that is free after the model is loaded, but at most what --max-num-seqs sequences of
    /// the maximum length need.
    ///
    /// If exceeded: cached prefixes are evicted first; then waiting sequences are not started, and the youngest running
    /// sequences are preempted and computed again later.
    #[arg(long, value_name = "SIZE", help_heading = "Engine")]
    pub kv_cache_size: Option<ByteSize>,

    /// Size of the cache for the outputs of the image encoder of a vision-language model.
    ///
    /// If exceeded: outputs that no request needs are evicted, and further images wait to be encoded.
    #[arg(long, value_name = "SIZE", default_value = "512MiB", help_heading = "Engine")]
    pub image_cache_size: ByteSize,

    /// The precision of the KV cache: u8, bf16, f16, f32 or u4.
    ///
    /// u4 is noticeably less exact than u8 and uses 0.6 times the memory of u8. Default: the device's preferred
    /// precision.
    #[arg(long, value_name = "TYPE", help_heading = "Engine")]
    pub kv_cache_precision: Option<String>,

    /// The precision in which the native kernels multiply activations by quantized weights. With AMX, both values
    /// select bf16.
    #[arg(long, value_enum, default_value = "auto", help_heading = "Engine")]
    pub activation_precision: ActivationPrecision,

    /// Directory in which compiled models are stored, so that the next start is faster.
    ///
    /// For a GGUF file with adapters or on a device other than CPU, the rewritten graph is stored instead.
    /// Vision-language models are not cached, nor are IRs with adapters or on other devices.
    #[arg(long, value_name = "PATH", help_heading = "Engine")]
    pub cache_dir: Option<PathBuf>,

    /// A property of OpenVINO's plugin, or several as a JSON object. Repeatable.
    #[arg(
        long = "plugin-config",
        value_name = "KEY=VALUE",
        value_parser = plugin_config,
        help_heading = "Engine"
    )]
    pub plugin_config: Vec<Properties>,

    /// Maximum number of sequences that run at the same time.
    ///
    /// If exceeded: further sequences wait; a request that alone has more sequences gets 400,
    /// `integer_above_max_value`.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 256,
        value_parser = value_parser!(u32).range(1..=65_536),
        help_heading = "Engine"
    )]
    pub max_num_seqs: u32,

    /// Maximum number of tokens computed in one step.
    ///
    /// If exceeded: the rest of a prompt is computed in the following steps.
    #[arg(
        long,
        alias = "max-batched-tokens",
        value_name = "COUNT",
        default_value_t = 512,
        value_parser = value_parser!(u32).range(1..=1_048_576),
        help_heading = "Engine"
    )]
    pub max_num_batched_tokens: u32,

    /// Maximum number of tokens computed in one step that both generates tokens and computes prompts. A lower value
    /// shortens the pauses between streamed tokens; a higher value computes long prompts faster. If there
    /// are N waiting prompts per generating sequence, the step may be N times as large.
    ///
    /// If exceeded: the rest of the prompts is computed in the following steps.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 128,
        value_parser = value_parser!(u32).range(1..=1_048_576),
        help_heading = "Engine"
    )]
    pub max_chunk_tokens: u32,

    /// Target for the time between two tokens of a sequence while prompts are computed in the same steps, such as
    /// `100ms`. Each step computes as many prompt tokens as are predicted to fit into this time, based on the durations
    /// of earlier steps, but at least 16. The target replaces --max-chunk-tokens. With a target, generation does not pause
    /// while images are encoded. Default: no target
    #[arg(long, value_name = "DURATION", value_parser = duration, help_heading = "Engine")]
    pub max_itl: Option<Duration>,

    /// Fraction of the attention weight that is computed for prompts of at least 2,048 tokens, such as 0.95. Each chunk
    /// attends only to the blocks of the KV cache that together have this fraction of the weight, as estimated from
    /// some of the chunk's tokens. Long prompts are computed faster, but their results are no longer exact. Generated
    /// tokens attend to all blocks. Default: the attention is exact
    #[arg(long, value_name = "SHARE", value_parser = proper_fraction, help_heading = "Engine")]
    pub sparse_attention: Option<f32>,

    /// Maximum number of tokens of a generating sequence that stay in the KV cache, rounded down to whole blocks. The
    /// minimum is four blocks. Eviction makes long sequences faster and leaves room for others, but their output is
    /// no longer exact, and later prompts cannot reuse their blocks. Default: no tokens are evicted.
    ///
    /// If exceeded: the blocks to which the latest tokens paid the least attention are evicted.
    #[arg(long, value_name = "COUNT", value_parser = value_parser!(u32).range(1..), help_heading = "Engine")]
    pub kv_eviction_tokens: Option<u32>,

    /// Maximum number of tokens of a prompt and its completion together. Default: the context length of the model,
    /// or the capacity of the KV cache if that is less.
    ///
    /// If exceeded: the request gets 400, `context_length_exceeded`.
    #[arg(long, value_name = "COUNT", value_parser = value_parser!(u32).range(2..), help_heading = "Engine")]
    pub max_model_len: Option<u32>,

    /// Compute every prompt completely instead of reusing the cached blocks of prompts with the same beginning.
    #[arg(long, help_heading = "Engine")]
    pub no_prefix_caching: bool,

    /// Enable prompt lookup for all requests: propose draft tokens from earlier occurrences of the last tokens in the
    /// prompt and the answer.
    ///
    /// The model verifies draft tokens, so they do not change answers; tokens are proposed only while that saves time.
    /// Answers that repeat much of their prompt are generated faster. Requests with `prediction` or `max_ngram_size`
    /// always use it.
    #[arg(long, help_heading = "Engine")]
    pub prompt_lookup: bool,

    /// A small model with the same vocabulary that proposes draft tokens: a GGUF file or the directory of an IR.
    ///
    /// The model verifies draft tokens, so they do not change answers; tokens are proposed only while that saves time.
    /// Both models share --kv-cache-size and the options of the device and the weights. With `--backend sim`, the
    /// draft model is simulated too.
    #[arg(long, value_name = "PATH", help_heading = "Engine")]
    pub draft_model: Option<PathBuf>,

    /// Follow OVMS's rules where they differ from OpenAI's, for clients that were written for OVMS.
    ///
    /// Errors are `{"error": "message"}`, also in streams; statuses and the events of responses do not change.
    /// Completions without `max_tokens` run until the end token, and `best_of` alone enables beam search. Messages
    /// without content, paths below `/v3/v1/` and trailing slashes are accepted, and `/v1/config` and
    /// `/v2/models/{name}/ready` exist.
    #[arg(long, help_heading = "Network")]
    pub ovms_compat: bool,

    /// The log level: error, warn, info, debug or trace, or a level per crate, such as info,server=debug. The level
    /// debug logs a line for each request. Prompts and answers are never logged.
    #[arg(long, value_name = "FILTER", default_value = "info", help_heading = "Logs")]
    pub log: String,

    /// The format of the logs, which are written to standard error.
    #[arg(long, value_enum, default_value = "text", help_heading = "Logs")]
    pub log_format: LogFormat,

    /// The flags of the server's limits.
    #[command(flatten)]
    pub limits: LimitArgs,

    /// The flags for images that requests refer to by URL or path.
    #[command(flatten)]
    pub media: MediaPolicy,

    /// The flags for evicted blocks of the KV cache.
    #[command(flatten)]
    pub spill: SpillArgs,

    /// The flags of stored responses and conversations.
    #[command(flatten)]
    pub store: StoreArgs,

    /// The flags of sleep.
    #[command(flatten)]
    pub sleep: SleepArgs,

    /// The flags of the simulator.
    #[command(flatten)]
    pub sim: SimArgs,
}

const EXAMPLES: &str = "\
Examples:
  ovfleet-server --model model.gguf
  ovfleet-server --model ./ir --model-name chat --host 0.0.0.0 --kv-cache-size 8GiB --cache-dir ./cache
  ovfleet-server --backend sim --sim-step-time 20ms

Then:
  curl http://127.0.0.1:8000/v3/chat/completions -d \\
    '{\"model\": \"model\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'";

/// A subcommand of the server.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Download and verify the files of a model.
    Fetch(Box<FetchArgs>),
    /// Mark a running server as not ready and wait until it has finished its requests.
    Drain(DrainArgs),
    /// Compile the grammar on standard input within limits of time and memory. The server uses this command itself.
    #[command(hide = true)]
    TryGrammar,
}

/// The backend that computes the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// The OpenVINO runtime on a device.
    #[value(name = "openvino")]
    OpenVino,
    /// A simulator without weights; flags set its step times.
    Sim,
}

impl Backend {
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OpenVino => "openvino",
            Self::Sim => "sim",
        }
    }
}

/// The precision in which the native kernels multiply activations by quantized weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ActivationPrecision {
    /// A precision whose rounding errors do not exceed those of bf16 inference.
    Auto,
    /// Faster and less exact: activations are rounded to 8 bits, with a scale for each 32 of them, except for outliers.
    /// With some models, the rounding errors exceed those of bf16.
    Int8,
}

/// Properties of OpenVINO's plugin by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Properties(pub Vec<(String, String)>);

fn plugin_config(text: &str) -> Result<Properties, String> {
    if text.trim_start().starts_with('{') {
        let object: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(text).map_err(|error| format!("not a JSON object: {error}"))?;
        let properties = object.into_iter().map(|(key, value)| match value {
            serde_json::Value::String(value) => Ok((key, value)),
            value @ (serde_json::Value::Number(_) | serde_json::Value::Bool(_)) => {
                Ok((key, value.to_string()))
            }
            _ => Err(format!("the value of {key} must be a string, a number or a boolean")),
        });
        return properties.collect::<Result<_, _>>().map(Properties);
    }
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => {
            Ok(Properties(vec![(key.trim().to_owned(), value.to_owned())]))
        }
        _ => Err("must be KEY=VALUE or a JSON object".to_owned()),
    }
}

#[cfg(test)]
mod tests;

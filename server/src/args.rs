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

/// Serve a language model with OpenVINO through the OpenAI API.
///
/// The model is a GGUF file or an OpenVINO IR directory. Any OpenAI client can use it at http://HOST:PORT/v3 (or /v1).
/// Every flag can also be set by the environment variable that is listed with it.
#[derive(Clone, Debug, Parser)]
#[command(name = "ovfleet-server", version, max_term_width = 110, after_long_help = EXAMPLES)]
#[command(mut_args(env_with_prefix("OVFLEET_")))]
pub struct Args {
    /// The subcommand; without one, the server runs.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// The model: a GGUF file, the first part of a split GGUF model, or a directory with tokenizer.json and either
    /// openvino_model.xml or openvino_language_model.xml.
    ///
    /// Required with `--backend openvino`. `--backend sim` loads no weights: it uses only the tokenizer, the chat
    /// template, the default parameters and the context length of the model. Without --model, the simulator uses a
    /// built-in byte tokenizer and chat template.
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,

    /// The model name that requests use. Repeatable; the model is served under all given names.
    ///
    /// Default: the name of the directory, or of the file without `.gguf` and `-00001-of-0000N`.
    #[arg(long = "model-name", value_name = "NAME", value_delimiter = ',')]
    pub model_names: Vec<String>,

    /// A LoRA adapter, as NAME=PATH. Requests select it by using NAME as the model name. Repeatable.
    ///
    /// PATH is a directory in PEFT format, with adapter_config.json and adapter_model.safetensors. One step can serve
    /// requests with different adapters and requests without an adapter. `--backend sim` does not read the directory.
    #[arg(long = "lora", value_name = "NAME=PATH", value_delimiter = ',')]
    pub adapters: Vec<NamedAdapter>,

    /// The format of the model's tool calls: auto, none, hermes3, llama3, mistral, devstral, phi4, gptoss, qwen3coder,
    /// lfm2, gemma4, minicpm5, deepseek or granite.
    ///
    /// auto detects the format from the chat template; if the template uses no known format or does not render tools,
    /// the server instructs the model to use hermes3. With none, tool calls are returned as part of the text.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = parsers::choice::<ToolFormat>)]
    pub tool_parser: ParserChoice<ToolFormat>,

    /// The format of the model's reasoning: auto, none, qwen3, deepseek, gptoss, gemma4, minicpm5, granite or mistral.
    ///
    /// auto detects the format from the chat template. With none, reasoning is returned as part of the text.
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

    /// The port of the gRPC services for load reports to routers, for health checks (grpc.health.v1) and for draining
    /// the server. 0 selects a free port.
    #[arg(long, default_value_t = 50051, help_heading = "Network")]
    pub grpc_port: u16,

    /// An additional port, on the address given by `--host`, that serves only `/metrics`, `/v2/health/live` and
    /// `/v2/health/ready`. 0 selects a free port.
    ///
    /// Its connections do not count toward --max-connections, so that probes and scrapes succeed regardless of the
    /// number of clients. The API port serves these paths, too. Default: none.
    #[arg(long, value_name = "PORT", help_heading = "Network")]
    pub admin_port: Option<u16>,

    /// A file with the replica token. The server rejects API requests and gRPC calls without the token, so that clients
    /// cannot bypass the routers.
    ///
    /// The file contains one token per line, each with 16 to 256 characters: letters, digits and -._~+/=. The server
    /// accepts every token in the file, and reloads the file when it changes. Pass the same file to the routers. Probes
    /// and scrapes on the API port require the token, too; the admin port and gRPC health checks do not. Default: no
    /// token is required.
    #[arg(long, value_name = "PATH", help_heading = "Network")]
    pub replica_token_file: Option<PathBuf>,

    /// The backend: the OpenVINO runtime, or a simulator that generates gibberish (or the answers given by
    /// --sim-answer) at a configurable speed.
    #[arg(long, value_enum, default_value = "openvino", help_heading = "Engine")]
    pub backend: Backend,

    /// The OpenVINO device, such as CPU, GPU, GPU.1, AUTO or HETERO:GPU,CPU. Only CPU is tested. NPU is not supported,
    /// because OpenVINO has no paged attention for NPUs.
    #[arg(long, default_value = "CPU", help_heading = "Engine")]
    pub device: String,

    /// The NUMA node on which the server runs. The server uses only the processors of this node and, if the system
    /// permits it, only the memory of this node.
    ///
    /// On a machine with several nodes, run one replica per node, because access to the memory of other nodes is
    /// slower. Default: all nodes.
    #[arg(long, value_name = "NUMBER", help_heading = "Engine")]
    pub numa_node: Option<u32>,

    /// Number of thread groups, at most 64, among which the weights and the KV heads are divided. Set it to the number
    /// of NUMA nodes, so that each group runs on one node and reads its part of the weights and of the KV cache from
    /// the memory of that node.
    ///
    /// The number does not change the output. With 1, threads are bound to a node only if --numa-node is set. The speed
    /// on machines with several NUMA nodes has not been measured. The alternative is to run one replica per node
    /// (--numa-node). Only the native kernels divide their work in this way.
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=64),
        help_heading = "Engine"
    )]
    pub tensor_parallel_size: u32,

    /// Size of the KV cache. Accepts a unit suffix, as in 2GiB. With --draft-model, the size includes the caches of
    /// both models.
    ///
    /// Default: half of the memory that is free after the model is loaded, but at most as much as --max-num-seqs
    /// sequences of --max-model-len tokens need.
    ///
    /// If exceeded: cached prefixes are evicted first; then no waiting sequences are started, and the youngest running
    /// sequences are preempted and recomputed later.
    #[arg(long, value_name = "SIZE", help_heading = "Engine")]
    pub kv_cache_size: Option<ByteSize>,

    /// Size of the cache for the image encoder outputs of a vision-language model. The outputs for the images of a
    /// single request may exceed this size.
    ///
    /// If exceeded: outputs that no request needs are evicted, and further images wait to be encoded.
    #[arg(long, value_name = "SIZE", default_value = "512MiB", help_heading = "Engine")]
    pub image_cache_size: ByteSize,

    /// The precision of the KV cache: u8, bf16, f16, f32 or u4.
    ///
    /// u4 needs 0.6 times as much memory as u8, but is noticeably less accurate. Default: the precision that the device
    /// prefers, which is u8 on CPUs.
    #[arg(long, value_name = "TYPE", help_heading = "Engine")]
    pub kv_cache_precision: Option<String>,

    /// The precision in which the native kernels multiply activations by quantized weights. With AMX, both values
    /// select bf16.
    #[arg(long, value_enum, default_value = "auto", help_heading = "Engine")]
    pub activation_precision: ActivationPrecision,

    /// Directory in which compiled models are cached, so that the next start is faster.
    ///
    /// For GGUF files with adapters, the rewritten graph is cached instead of the compiled model. Vision-language
    /// models and IRs with adapters are not cached. On devices other than CPU, the server caches only the rewritten
    /// graphs of GGUF files, and passes the directory to the plugin as CACHE_DIR.
    #[arg(long, value_name = "PATH", help_heading = "Engine")]
    pub cache_dir: Option<PathBuf>,

    /// A property of the OpenVINO plugin as KEY=VALUE, or several properties as a JSON object. Repeatable.
    #[arg(
        long = "plugin-config",
        value_name = "KEY=VALUE",
        value_parser = plugin_config,
        help_heading = "Engine"
    )]
    pub plugin_config: Vec<Properties>,

    /// Maximum number of sequences that run at the same time. A value greater than --max-num-batched-tokens is reduced
    /// to that number.
    ///
    /// If exceeded: further sequences wait; a single request with more sequences than the limit is rejected
    /// with 400, `integer_above_max_value`.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 256,
        value_parser = value_parser!(u32).range(1..=65_536),
        help_heading = "Engine"
    )]
    pub max_num_seqs: u32,

    /// Maximum number of tokens processed in one step. An image whose tokens attend to each other is processed in one
    /// step even if it has more tokens than this limit.
    ///
    /// If exceeded: the rest of the prompt is processed in the following steps.
    #[arg(
        long,
        alias = "max-batched-tokens",
        value_name = "COUNT",
        default_value_t = 512,
        value_parser = value_parser!(u32).range(1..=1_048_576),
        help_heading = "Engine"
    )]
    pub max_num_batched_tokens: u32,

    /// Maximum number of tokens processed in a step that both generates tokens and processes prompts. A lower value
    /// shortens the pauses between streamed tokens; a higher value processes long prompts faster. Regardless of the
    /// number of generating sequences, at least a quarter of this number is available to prompts. Later chunks of a
    /// long prompt may be smaller than this minimum, so that all chunks of the prompt take about the same time. The
    /// limit is raised to a multiple of this number, up to --max-num-batched-tokens, if there are several waiting
    /// prompts per generating sequence, if at least 8 prompts wait, or if at least 2 prompts wait and at least 16
    /// sequences generate tokens. While several tenants have requests, or had some recently, the limit is not raised,
    /// and also applies to steps that only process prompts. In that case, less than a quarter of this number may be
    /// available to prompts.
    ///
    /// If exceeded: the rest of the prompts is processed in the following steps.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 128,
        value_parser = value_parser!(u32).range(1..=1_048_576),
        help_heading = "Engine"
    )]
    pub max_chunk_tokens: u32,

    /// Target, such as `100ms`, for the inter-token latency of generating sequences while prompts are processed in the
    /// same steps. Each step processes as many prompt tokens as are predicted to fit into this time, but at least 16.
    /// The prediction is based on the durations of earlier steps. Until step times can be predicted, steps are limited
    /// to a quarter of --max-chunk-tokens, of which prompts may use at least a quarter. After that, --max-chunk-tokens
    /// limits steps only while several tenants have requests, or had some recently. With a target, the server does not
    /// pause generation to speed up the encoding of images. Default: no target
    #[arg(long, value_name = "DURATION", value_parser = duration, help_heading = "Engine")]
    pub max_itl: Option<Duration>,

    /// Fraction of the attention weight, such as 0.95, that sparse attention must cover in prompts of more than 1,920
    /// tokens. Each group of up to 128 prompt tokens attends to itself, to the first 128 tokens, and to as many other
    /// groups of 128 earlier tokens as are needed to reach this fraction. The attention weights of these groups are
    /// estimated from a sample of the attending tokens. Long prompts are processed faster, but the results are
    /// approximate. Generated tokens attend to all tokens, except in steps that verify draft tokens or recompute a
    /// preempted sequence. Requires the native attention kernels. Default: the attention is exact
    #[arg(long, value_name = "SHARE", value_parser = proper_fraction, help_heading = "Engine")]
    pub sparse_attention: Option<f32>,

    /// Maximum number of tokens of a generating sequence that stay in the KV cache, rounded down to whole blocks. The
    /// minimum is four blocks. Eviction makes long sequences faster and frees memory for other sequences, but the
    /// output of long sequences is approximate. Once blocks of a sequence have been evicted, later prompts can reuse
    /// only those of its blocks that also belong to other sequences or other cached prefixes, unless --kv-spill-dir is
    /// set. Eviction requires the native attention kernels, does not apply to beam search, and cannot be combined with
    /// --draft-model. Default: no tokens are evicted.
    ///
    /// If exceeded: the blocks that have received the least attention from the generated tokens are evicted, except for
    /// the first block, the most recent blocks, and blocks that also belong to other sequences or other cached
    /// prefixes.
    #[arg(long, value_name = "COUNT", value_parser = value_parser!(u32).range(1..), help_heading = "Engine")]
    pub kv_eviction_tokens: Option<u32>,

    /// Maximum number of tokens of a prompt and its completion together. A length greater than the capacity of the KV
    /// cache is reduced to that capacity. Default: the context length of the model.
    ///
    /// If exceeded: the request is rejected with 400, `context_length_exceeded`. If the request does not limit the
    /// length of its output, the output ends at this limit with the finish reason `length`.
    #[arg(long, value_name = "COUNT", value_parser = value_parser!(u32).range(2..), help_heading = "Engine")]
    pub max_model_len: Option<u32>,

    /// Disable prefix caching: compute every prompt in full instead of reusing the cached blocks of a common prefix.
    #[arg(long, help_heading = "Engine")]
    pub no_prefix_caching: bool,

    /// Enable prompt lookup for all requests: search the prompt and the output for earlier occurrences of the latest
    /// tokens, and propose the tokens that followed these occurrences as draft tokens.
    ///
    /// The model verifies draft tokens, so they do not change the output. There are two exceptions: --sparse-attention,
    /// and the plugin's kernels, whose results depend on the batch. Tokens are proposed only while that saves time.
    /// Outputs that repeat much of their prompt are generated faster. Requests with `prediction` or `max_ngram_size` use
    /// prompt lookup even without this flag.
    #[arg(long, help_heading = "Engine")]
    pub prompt_lookup: bool,

    /// A small model that proposes draft tokens: a GGUF file or an IR directory. It must have the same vocabulary as
    /// the model.
    ///
    /// The model verifies draft tokens, so they do not change the output, with the same exceptions as for
    /// --prompt-lookup. Tokens are proposed only while that saves time. Both models share the memory given by
    /// --kv-cache-size, and use the same device, precisions and plugin properties. With `--backend sim`, the draft model
    /// is simulated, too.
    #[arg(long, value_name = "PATH", help_heading = "Engine")]
    pub draft_model: Option<PathBuf>,

    /// Follow the OVMS API where it differs from the OpenAI API, for clients that were written for OVMS.
    ///
    /// Errors have the form `{"error": "message"}`, in streams as well; HTTP statuses and the events of the Responses
    /// API do not change. Completions without `max_tokens` run until the end-of-sequence token or until the context is
    /// full, unless `generation_config.json` sets `max_new_tokens`. A `best_of` above 1 enables beam search if
    /// `use_beam_search` is not set. The server accepts messages without content, paths below `/v3/v1/` and trailing
    /// slashes, and serves `/v1/config` and `/v2/models/{name}/ready`.
    #[arg(long, help_heading = "Network")]
    pub ovms_compat: bool,

    /// The log level: error, warn, info, debug or trace. Modules can have separate levels, as in info,server=debug. At
    /// the debug level, the server logs a line for each request that generates tokens; other successful requests are
    /// not logged. Prompts and answers are never logged.
    #[arg(long, value_name = "FILTER", default_value = "info", help_heading = "Logs")]
    pub log: String,

    /// The format of the logs, which are written to standard error.
    #[arg(long, value_enum, default_value = "text", help_heading = "Logs")]
    pub log_format: LogFormat,

    /// The flags for the server's limits.
    #[command(flatten)]
    pub limits: LimitArgs,

    /// The flags for images that requests refer to by URL or path.
    #[command(flatten)]
    pub media: MediaPolicy,

    /// The flags for spilling evicted blocks of the KV cache to disk.
    #[command(flatten)]
    pub spill: SpillArgs,

    /// The flags for stored responses and conversations.
    #[command(flatten)]
    pub store: StoreArgs,

    /// The flags for sleep mode.
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
    /// Compile the grammar from standard input within limits of time and memory. The server uses this command itself.
    #[command(hide = true)]
    TryGrammar,
}

/// The backend that runs the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// The OpenVINO runtime on the device given by --device.
    #[value(name = "openvino")]
    OpenVino,
    /// A simulator that loads no weights; the --sim-* flags configure it.
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
    /// Faster but less accurate: all activations except outliers are quantized to 8 bits in groups of 32. With some
    /// models, the rounding errors exceed those of bf16 inference.
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

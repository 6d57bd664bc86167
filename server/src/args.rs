//! The command line, which is also where the environment is read. The comments on the fields are the help
//! text and the reference in the documentation.

mod adapter;
mod limits;
mod parsers;
mod sim;
mod sleep;
mod spill;
mod store;
mod units;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use server_parsers::{ReasoningFormat, ToolFormat};

pub use adapter::NamedAdapter;
pub use limits::LimitArgs;
pub use parsers::ParserChoice;
pub use sim::SimArgs;
pub use sleep::SleepArgs;
pub use spill::SpillArgs;
pub use store::StoreArgs;
pub use units::ByteSize;
pub(crate) use units::{duration, share};

use crate::drain::DrainArgs;
use crate::fetch::FetchArgs;

/// Serve a language model on OpenVINO, with OpenAI's API.
///
/// Give it a model, a GGUF file or the directory of an OpenVINO IR, and talk to it with any OpenAI client at
/// http://HOST:PORT/v3 (or /v1). Every option can also be given as an environment variable, named beside it.
#[derive(Clone, Debug, Parser)]
#[command(name = "server", version, max_term_width = 110, after_long_help = EXAMPLES)]
pub struct Args {
    /// Something else than serving.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// The model: a GGUF file, or a directory with openvino_model.xml and tokenizer.json.
    ///
    /// With `--backend sim` only its tokenizer and chat template are used, and without it a tokenizer of
    /// bytes.
    #[arg(long, env = "OVFLEET_MODEL", value_name = "PATH")]
    pub model: Option<PathBuf>,

    /// The name by which requests ask for the model. Repeatable; the first is the one in the list of models.
    ///
    /// Default: the file's or directory's name.
    #[arg(long = "model-name", env = "OVFLEET_MODEL_NAME", value_name = "NAME", value_delimiter = ',')]
    pub model_names: Vec<String>,

    /// A LoRA adapter to load, and the name by which requests ask for it as their model. Repeatable.
    ///
    /// PATH is a folder as PEFT writes it, with adapter_config.json and adapter_model.safetensors. Requests with any
    /// adapter and with none are computed together. With `--backend sim` the folders are not read.
    #[arg(long = "lora", env = "OVFLEET_LORA", value_name = "NAME=PATH", value_delimiter = ',')]
    pub adapters: Vec<NamedAdapter>,

    /// How the model writes calls of tools: auto, none, hermes3, llama3, mistral, devstral, phi4, gptoss, qwen3coder,
    /// lfm2, gemma4, minicpm5, deepseek or granite.
    ///
    /// auto tells it by the chat template; a model whose template tells nothing is asked to write hermes3. With none
    /// calls are text.
    #[arg(
        long,
        env = "OVFLEET_TOOL_PARSER",
        value_name = "NAME",
        default_value = "auto",
        value_parser = parsers::choice::<ToolFormat>
    )]
    pub tool_parser: ParserChoice<ToolFormat>,

    /// How the model writes its reasoning: auto, none, qwen3, deepseek, gptoss, gemma4, minicpm5, granite or
    /// mistral.
    ///
    /// auto tells it by the chat template. With none reasoning is text.
    #[arg(
        long,
        env = "OVFLEET_REASONING_PARSER",
        value_name = "NAME",
        default_value = "auto",
        value_parser = parsers::choice::<ReasoningFormat>
    )]
    pub reasoning_parser: ParserChoice<ReasoningFormat>,

    /// The address to listen on. 0.0.0.0 makes the server reachable from other machines.
    #[arg(long, env = "OVFLEET_HOST", default_value = "127.0.0.1", help_heading = "Network")]
    pub host: IpAddr,

    /// The port of the HTTP API, of health and of metrics. 0 takes any free one.
    #[arg(long, env = "OVFLEET_PORT", default_value_t = 8000, help_heading = "Network")]
    pub port: u16,

    /// The port of the gRPC services: the load report to the router, and grpc.health.v1. 0 takes any free one.
    #[arg(long, env = "OVFLEET_GRPC_PORT", default_value_t = 50051, help_heading = "Network")]
    pub grpc_port: u16,

    /// A port for `/metrics`, `/v2/health/live` and `/v2/health/ready` alone, on the same host. 0 takes any free one.
    ///
    /// Connections to it are not counted in --max-connections, so that probes and scrapes are answered whatever clients
    /// do. The API's port serves these paths as well. Default: no such port.
    #[arg(long, env = "OVFLEET_ADMIN_PORT", value_name = "PORT", help_heading = "Network")]
    pub admin_port: Option<u16>,

    /// A file with the replica token: requests to the API and load reports need it, so that only routers reach them.
    ///
    /// The file has one token per line, 16 to 256 letters, digits and -._~+/=, each of which is accepted. It is read again
    /// when it changes. Routers get the same file with the same flag. The admin port needs no token. Default: no token
    /// is needed.
    #[arg(long, env = "OVFLEET_REPLICA_TOKEN_FILE", value_name = "PATH", help_heading = "Network")]
    pub replica_token_file: Option<PathBuf>,

    /// What computes: the OpenVINO runtime, or a simulator that answers gibberish at a set speed.
    #[arg(long, env = "OVFLEET_BACKEND", value_enum, default_value = "openvino", help_heading = "Engine")]
    pub backend: Backend,

    /// The OpenVINO device: CPU, GPU, GPU.1, AUTO or HETERO:GPU,CPU. Only CPU is tested. NPU does not work, because
    /// OpenVINO has no paged attention for it.
    #[arg(long, env = "OVFLEET_DEVICE", default_value = "CPU", help_heading = "Engine")]
    pub device: String,

    /// The NUMA node to run on: its processors alone, and memory of it alone where the system lets a process say so.
    ///
    /// For one replica on each node of a machine with several: another node's memory is slower to read.
    /// Default: wherever the process may run.
    #[arg(long, env = "OVFLEET_NUMA_NODE", value_name = "NUMBER", help_heading = "Engine")]
    pub numa_node: Option<u32>,

    /// Size of the KV cache. Accepts a unit, such as 2GiB. With --draft-model it covers the caches of both models.
    ///
    /// Default: half of the memory that is free once the model is loaded, but no more than --max-num-seqs sequences
    /// of the maximum length need.
    ///
    /// Beyond it: cached prefixes are evicted first; then waiting sequences are not started, and the youngest running
    /// sequences are preempted and computed again later.
    #[arg(long, env = "OVFLEET_KV_CACHE_SIZE", value_name = "SIZE", help_heading = "Engine")]
    pub kv_cache_size: Option<ByteSize>,

    /// The precision of the KV cache: u8, bf16, f16, f32, or u4, which is not exact.
    ///
    /// u4 takes half of the memory of u8, and the plugin's kernels. Default: what the device prefers.
    #[arg(long, env = "OVFLEET_KV_CACHE_PRECISION", value_name = "TYPE", help_heading = "Engine")]
    pub kv_cache_precision: Option<String>,

    /// How the quantised weights of a GGUF file are held.
    #[arg(long, env = "OVFLEET_WEIGHTS", value_enum, default_value = "auto", help_heading = "Engine")]
    pub weights: WeightsForm,

    /// Whether large steps, those that compute prompts, get a second copy of the weights in f32.
    ///
    /// That is faster on processors that do not multiply 8-bit integers, and costs 4 bytes a parameter. The copy
    /// is made once the server is ready.
    #[arg(long, env = "OVFLEET_UNPACK_WEIGHTS", value_enum, default_value = "auto", help_heading = "Engine")]
    pub unpack_weights: Unpack,

    /// A directory where rewritten and compiled models are kept, so that the next start is faster.
    #[arg(long, env = "OVFLEET_CACHE_DIR", value_name = "PATH", help_heading = "Engine")]
    pub cache_dir: Option<PathBuf>,

    /// A property for OpenVINO's plugin. Repeatable; or several as a JSON object.
    #[arg(
        long = "plugin-config",
        env = "OVFLEET_PLUGIN_CONFIG",
        value_name = "KEY=VALUE",
        value_parser = plugin_config,
        help_heading = "Engine"
    )]
    pub plugin_config: Vec<Properties>,

    /// Number of sequences that run at the same time.
    ///
    /// Beyond it: further sequences wait; a request that alone has more sequences gets 400,
    /// `integer_above_max_value`.
    #[arg(
        long,
        env = "OVFLEET_MAX_NUM_SEQS",
        value_name = "COUNT",
        default_value_t = 256,
        value_parser = clap::value_parser!(u32).range(1..=65_536),
        help_heading = "Engine"
    )]
    pub max_num_seqs: u32,

    /// Number of tokens computed in one step.
    ///
    /// Beyond it: the rest of a prompt is computed in the following steps.
    #[arg(
        long,
        env = "OVFLEET_MAX_BATCHED_TOKENS",
        value_name = "COUNT",
        default_value_t = 512,
        value_parser = clap::value_parser!(u32).range(1..=1_048_576),
        help_heading = "Engine"
    )]
    pub max_batched_tokens: u32,

    /// Number of tokens computed in one step that both generates tokens and computes prompts. A lower value shortens
    /// the pauses between streamed tokens; a higher value computes long prompts faster. If several prompts wait for
    /// each generating sequence, the step may be that many times as large.
    ///
    /// Beyond it: the rest of the prompts is computed in the following steps.
    #[arg(
        long,
        env = "OVFLEET_MAX_CHUNK_TOKENS",
        value_name = "COUNT",
        default_value_t = 128,
        value_parser = clap::value_parser!(u32).range(1..=1_048_576),
        help_heading = "Engine"
    )]
    pub max_chunk_tokens: u32,

    /// Longest time there should be between two tokens of a sequence while prompts are computed beside it, such as
    /// `100ms`: as much of the prompts is computed in a step as fits into it by what steps took so far (16 tokens at least),
    /// in place of --max-chunk-tokens. What the sequences take without prompts is not changed by it. Default: no such time
    #[arg(
        long,
        env = "OVFLEET_MAX_ITL",
        value_name = "DURATION",
        value_parser = duration,
        help_heading = "Engine"
    )]
    pub max_itl: Option<Duration>,

    /// Long prompts look only at those parts of their KV cache that have this share of the attention's weight, such as 0.95,
    /// as far as some of their tokens tell: from 2,048 tokens on they are computed the faster the longer they are, and no
    /// longer exactly. What is generated looks at all. Default: all of it, exactly
    #[arg(
        long,
        env = "OVFLEET_SPARSE_ATTENTION",
        value_name = "SHARE",
        value_parser = share,
        help_heading = "Engine"
    )]
    pub sparse_attention: Option<f32>,

    /// Number of tokens of a generating sequence that stay in the KV cache, rounded down to whole blocks. The minimum
    /// is four blocks. Eviction makes long sequences faster and leaves room for others, but their output is no longer
    /// exact, and later prompts cannot reuse their blocks. Default: all tokens stay.
    ///
    /// Beyond it: the blocks to which the latest tokens paid the least attention are evicted.
    #[arg(
        long,
        env = "OVFLEET_KV_EVICTION_TOKENS",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..),
        help_heading = "Engine"
    )]
    pub kv_eviction_tokens: Option<u32>,

    /// Number of tokens of a prompt and its completion together. Default: the context length of the model, or what
    /// the KV cache holds if that is less.
    ///
    /// Beyond it: 400, `context_length_exceeded`.
    #[arg(
        long,
        env = "OVFLEET_MAX_MODEL_LEN",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(2..),
        help_heading = "Engine"
    )]
    pub max_model_len: Option<u32>,

    /// Compute every prompt anew instead of reusing what is cached of prompts that begin the same.
    #[arg(long, env = "OVFLEET_NO_PREFIX_CACHING", help_heading = "Engine")]
    pub no_prefix_caching: bool,

    /// Guess what comes next, for all requests, from where the last tokens were before: in the prompt and the answer.
    ///
    /// Guesses are computed beside the token that is known, as far as that saves time, and change no answer. Answers
    /// that repeat much of their prompt come faster. Requests with `prediction` or `max_ngram_size` have it in any case.
    #[arg(long, env = "OVFLEET_PROMPT_LOOKUP", help_heading = "Engine")]
    pub prompt_lookup: bool,

    /// A small model that guesses what the model will say, with the same tokens: a GGUF file or the directory of an IR.
    ///
    /// Guesses are computed beside the token that is known, as far as that saves time, and change no answer. Both models
    /// share --kv-cache-size, and the options of the device and of the weights. The simulator guesses by itself.
    #[arg(long, env = "OVFLEET_DRAFT_MODEL", value_name = "PATH", help_heading = "Engine")]
    pub draft_model: Option<PathBuf>,

    /// Follow OVMS's rules where they differ from OpenAI's, for clients that were written for OVMS.
    ///
    /// Errors are `{"error": "what is wrong"}`, in streams too; statuses and the events of responses stay as they are.
    /// Completions without `max_tokens` run to the end of the text, `best_of` alone searches beams, a message may lack
    /// its content, `/v3/v1/` and a trailing slash are accepted, and `/v1/config` and `/v2/models/{name}/ready` answer.
    #[arg(long, env = "OVFLEET_OVMS_COMPAT", help_heading = "Network")]
    pub ovms_compat: bool,

    /// What is logged: error, warn, info, debug, trace, or per part, e.g. info,server=debug. One line for
    /// each request at debug. Prompts and answers are never logged.
    #[arg(long, env = "OVFLEET_LOG", value_name = "FILTER", default_value = "info", help_heading = "Logs")]
    pub log: String,

    /// How logs are written, to standard error.
    #[arg(long, env = "OVFLEET_LOG_FORMAT", value_enum, default_value = "text", help_heading = "Logs")]
    pub log_format: LogFormat,

    /// How much the server takes on.
    #[command(flatten)]
    pub limits: LimitArgs,

    /// Where blocks go that the KV cache gives up.
    #[command(flatten)]
    pub spill: SpillArgs,

    /// What is kept of responses.
    #[command(flatten)]
    pub store: StoreArgs,

    /// When memory is given back.
    #[command(flatten)]
    pub sleep: SleepArgs,

    /// What the simulator simulates.
    #[command(flatten)]
    pub sim: SimArgs,
}

const EXAMPLES: &str = "\
Examples:
  server --model model.gguf
  server --model ./ir --model-name chat --host 0.0.0.0 --kv-cache-size 8GiB --cache-dir ./cache
  server --backend sim --sim-step-time 20ms

Then:
  curl http://127.0.0.1:8000/v3/chat/completions -d \\
    '{\"model\": \"model\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'";

/// Something else than serving.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Bring a model's files into a folder, whole and checked.
    Fetch(Box<FetchArgs>),
    /// Tell a running server that no more requests will be sent, and wait until it has finished those it has.
    Drain(DrainArgs),
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// The OpenVINO runtime.
    #[value(name = "openvino")]
    OpenVino,
    /// A simulator: no weights, costs in real time.
    Sim,
}

impl Backend {
    /// As on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OpenVino => "openvino",
            Self::Sim => "sim",
        }
    }
}

/// Whether large steps get f32 weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Unpack {
    /// Where it is faster and memory allows.
    Auto,
    /// They use the weights that others use.
    Never,
    /// They do, if the model has integer weights at all.
    Always,
}

/// How the quantised weights of a GGUF file are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WeightsForm {
    /// Exact: `compact`, or `fine` where the plugin's kernels gain by it and memory allows.
    Auto,
    /// Exact and small: as the file has them.
    Compact,
    /// Exact to a few thousandths of a quantisation step, and fast: 8 bits a weight.
    Fine,
    /// Small and fast, but not exact: zero points are rounded.
    Rounded,
}

/// How logs are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines: one JSON object on each line.
    Json,
}

/// Properties for OpenVINO's plugin, by name.
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
            _ => Err(format!("the value of {key} is neither a string, a number nor a boolean")),
        });
        return properties.collect::<Result<_, _>>().map(Properties);
    }
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => {
            Ok(Properties(vec![(key.trim().to_owned(), value.to_owned())]))
        }
        _ => Err("neither KEY=VALUE nor a JSON object".to_owned()),
    }
}

#[cfg(test)]
mod tests;

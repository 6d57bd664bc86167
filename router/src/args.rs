//! The command line. Its flags can also be set by environment variables and by the keys of the configuration file. The
//! comments on the fields are the help text and the reference documentation.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use clap::{Parser, ValueEnum, value_parser};
use process::env_with_prefix;
use process::logs::LogFormat;
use process::units::{ByteSize, duration, fraction, interval};

use crate::discovery::{DnsName, FixedReplica, ServiceName};
use crate::policy::Policy;

/// Route requests to the replicas of one or more models, based on the load of each replica.
///
/// Clients use the address of the router instead of that of a replica; the API is the same. Every flag can also be set
/// by the environment variable that is listed with it, or in the file given by --config, where the key is the name of
/// the flag without its leading dashes. The command line overrides the file, and the file overrides the environment.
/// The values of a repeatable flag on the command line are added to those in the file.
#[derive(Clone, Debug, Parser)]
#[command(name = "ovfleet-router", version, max_term_width = 110, args_override_self = true, after_long_help = EXAMPLES)]
#[command(mut_args(env_with_prefix("OVFLEET_ROUTER_")))]
pub struct Args {
    /// A YAML file that sets further flags, such as `policy: kv`. It is reloaded when it changes. Most changes take
    /// effect immediately, and none interrupts streams. The router logs a warning for each changed flag that takes
    /// effect only after a restart, such as `port` or `drain-timeout`.
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,

    /// The address of a replica: HOST:PORT/GRPC_PORT, where PORT serves the API and GRPC_PORT serves the load reports.
    /// Repeatable. Without GRPC_PORT, the router receives no load reports from the replica, and knows only how many of
    /// its own requests are in flight there.
    #[arg(long = "replica", value_name = "ADDRESS", value_delimiter = ',', help_heading = "Replicas")]
    pub replicas: Vec<FixedReplica>,

    /// A DNS name that resolves to the addresses of replicas, with their ports as in `--replica`: NAME:PORT/GRPC_PORT.
    /// Repeatable.
    #[arg(long = "replicas-dns", value_name = "NAME", value_delimiter = ',', help_heading = "Replicas")]
    pub replicas_dns: Vec<DnsName>,

    /// A Kubernetes Service whose endpoints are replicas: NAMESPACE/NAME, or NAME in the namespace of the router.
    /// Repeatable. The router needs permission to get, list and watch EndpointSlices.
    #[arg(
        long = "replicas-service",
        value_name = "SERVICE",
        value_delimiter = ',',
        help_heading = "Replicas"
    )]
    pub replicas_service: Vec<ServiceName>,

    /// In the Services given by `--replicas-service`, the name of the port on which replicas serve their API.
    #[arg(long, value_name = "NAME", default_value = "http", help_heading = "Replicas")]
    pub http_port_name: String,

    /// In the Services given by `--replicas-service`, the name of the port on which replicas report their load.
    #[arg(long, value_name = "NAME", default_value = "grpc", help_heading = "Replicas")]
    pub grpc_port_name: String,

    /// The interval between DNS lookups, at least 100ms.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = interval, help_heading = "Replicas")]
    pub dns_interval: Duration,

    /// A file with the replica token, which authenticates the router to replicas. Pass the same file to the replicas.
    ///
    /// The file contains one token per line, each with 16 to 256 characters: letters, digits and -._~+/=. The router
    /// sends all tokens with each request, and reloads the file when it changes. Default: no token is sent.
    #[arg(long, value_name = "PATH", help_heading = "Replicas")]
    pub replica_token_file: Option<PathBuf>,

    /// The address to listen on. 0.0.0.0 makes the router reachable from other machines.
    #[arg(long, default_value = "127.0.0.1", help_heading = "Network")]
    pub host: IpAddr,

    /// The port of the API, the probes, the metrics and the console. 0 selects a free port.
    #[arg(long, default_value_t = 8000, help_heading = "Network")]
    pub port: u16,

    /// An additional port, on the address given by `--host`, that serves only /metrics, /v2/health/live and
    /// /v2/health/ready. It has its own thread and its own connection limit, so that probes succeed regardless of the
    /// number of API clients. 0 selects a free port. Default: none.
    #[arg(long, value_name = "PORT", help_heading = "Network")]
    pub admin_port: Option<u16>,

    /// The port of the gRPC service that reports to the operator which replicas receive requests. The service listens
    /// on the address given by `--host`. 0 selects a free port. Default: none.
    #[arg(long, value_name = "PORT", help_heading = "Network")]
    pub grpc_port: Option<u16>,

    /// Number of threads that serve requests. Default: one per processor.
    #[arg(
        long,
        value_name = "COUNT",
        value_parser = value_parser!(u32).range(1..=1024),
        help_heading = "Network"
    )]
    pub threads: Option<u32>,

    /// The routing policy: kv (the shortest estimated time to the first token), least-requests, power-of-two,
    /// round-robin, or session (the same replica for requests with the same x-session-id header or `user` field).
    #[arg(long, default_value = "kv", help_heading = "Routing")]
    pub policy: Policy,

    /// The age above which a load report is ignored. Until the next report, the router knows only how many of its own
    /// requests are in flight at the replica.
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = duration, help_heading = "Routing")]
    pub report_ttl: Duration,

    /// Maximum number of attempts to send a request to a replica before the client receives the first byte. Attempts
    /// that fail to connect do not count. A request that may change stored objects is not retried if a replica may have
    /// processed it, unless its HTTP method is idempotent, such as DELETE.
    ///
    /// If exceeded: the client receives the error of the last attempt, which is the replica's error response or, if the
    /// replica sent none, 502 (`replicas_failed`) or 504 (`replicas_timed_out`).
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 4,
        value_parser = value_parser!(u32).range(1..=16),
        help_heading = "Routing"
    )]
    pub attempts: u32,

    /// Maximum number of retries as a percentage of the requests. This limit prevents retries from multiplying the load
    /// during a failure. Unused retries are saved for later failures. Retries after a failure to connect, after a
    /// rejected replica token, or after the status 429 or 503 do not count. 0 disables all other retries.
    ///
    /// If exceeded: the client receives the error of the last attempt, as with `--attempts`.
    #[arg(
        long,
        value_name = "PERCENT",
        default_value_t = 20,
        value_parser = value_parser!(u32).range(0..=100),
        help_heading = "Routing"
    )]
    pub retry_budget_percent: u32,

    /// Time within which a replica must accept a connection.
    ///
    /// If exceeded: the router tries another replica or, if there is no other, the same one again. If no replica
    /// accepts a connection within `--replica-wait-timeout`, the client receives 502 (`replicas_failed`) or 503
    /// (`no_replica`). If the time in the `x-ovfleet-timeout` header of the request passes first, the client receives
    /// 504 (`replicas_timed_out`) or 503 (`no_replica`).
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration, help_heading = "Routing")]
    pub connect_timeout: Duration,

    /// Time within which a replica must begin a streaming response.
    ///
    /// If exceeded: the request is retried if `--attempts` and `--retry-budget-percent` permit it; otherwise, the
    /// client receives 504, `replicas_timed_out`.
    #[arg(
        long,
        value_name = "TIME",
        default_value = "60s",
        value_parser = duration,
        help_heading = "Routing"
    )]
    pub first_token_timeout: Duration,

    /// Time within which a replica must complete a non-streaming response of up to 1 MiB, or must begin a larger one.
    ///
    /// If exceeded: the request is retried if `--attempts` and `--retry-budget-percent` permit it; otherwise, the
    /// client receives 504, `replicas_timed_out`.
    #[arg(
        long,
        value_name = "TIME",
        default_value = "10m",
        value_parser = duration,
        help_heading = "Routing"
    )]
    pub answer_timeout: Duration,

    /// Maximum time without data from the replica after the response to the client has begun.
    ///
    /// If exceeded: a streaming response ends with an error event; any other response is aborted.
    #[arg(
        long,
        value_name = "TIME",
        default_value = "60s",
        value_parser = duration,
        help_heading = "Routing"
    )]
    pub idle_timeout: Duration,

    /// Time without a load report after which a replica that has reported before is considered hung. The timeout does
    /// not apply to a replica that is draining or that discovery no longer lists, because the reports of such a replica
    /// may end before its last requests do.
    ///
    /// If exceeded: requests whose response has not begun are retried as if `--first-token-timeout` were exceeded,
    /// provided that at least one replica of the model is not considered hung. A response that has begun ends with an
    /// error once no data has arrived for the time given by `--hang-timeout`.
    #[arg(
        long,
        value_name = "TIME",
        default_value = "10s",
        value_parser = duration,
        help_heading = "Routing"
    )]
    pub hang_timeout: Duration,

    /// Maximum number of requests for one model that wait in the router because no replica has capacity.
    ///
    /// If exceeded: further requests are rejected with 429, `queue_full`, and `Retry-After`.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 1024,
        value_parser = value_parser!(u32).range(0..=1_048_576),
        help_heading = "Queue"
    )]
    pub queue_requests: u32,

    /// Maximum estimated number of prompt tokens in the requests for one model that wait in the router because no
    /// replica has capacity. A request may exceed this limit if no other request is waiting.
    ///
    /// If exceeded: further requests are rejected with 429, `queue_full`, and `Retry-After`.
    #[arg(long, value_name = "COUNT", default_value_t = 4_000_000, help_heading = "Queue")]
    pub queue_tokens: u64,

    /// Maximum time that a request waits for a replica with capacity.
    ///
    /// If exceeded: the request is rejected with 429, `queue_timeout`, and `Retry-After`.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration, help_heading = "Queue")]
    pub queue_timeout: Duration,

    /// Maximum number of requests, over all models, that wait while no replica of their model is available.
    /// `--queue-requests` and `--queue-tokens` do not apply to these requests.
    ///
    /// If exceeded: further requests are rejected with 503, `no_replica`, and `Retry-After`.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 256,
        value_parser = value_parser!(u32).range(0..=1_048_576),
        help_heading = "Queue"
    )]
    pub replica_wait_requests: u32,

    /// Maximum time that a request waits for a replica of its model to become available.
    ///
    /// If exceeded: the request is rejected with 503, `no_replica`, and `Retry-After`. If only some replicas have
    /// reported their models, and none of these replicas serves the requested model, the request is rejected with 404,
    /// `model_not_found`, instead.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration, help_heading = "Queue")]
    pub replica_wait_timeout: Duration,

    /// A file with the API keys that the router accepts, one per line. A key can be followed by a space and a name,
    /// which is used in the logs and by `--key-isolation name`. A # begins a comment. The file is reloaded when it
    /// changes. If the file contains no key, all API requests are rejected. Default: no key is required.
    #[arg(long, value_name = "PATH", help_heading = "Access")]
    pub api_keys: Option<PathBuf>,

    /// Maximum number of requests per minute for each API key. Each router counts separately. The limit has no effect
    /// without --api-keys. Default: unlimited.
    ///
    /// If exceeded: further requests are rejected with 429, `rate_limit_exceeded`, and `Retry-After`.
    #[arg(long, value_name = "COUNT", help_heading = "Access")]
    pub requests_per_minute: Option<u32>,

    /// Maximum number of prompt and completion tokens per minute for each API key. Each router counts separately. The
    /// limit has no effect without --api-keys. Default: unlimited.
    ///
    /// If exceeded: further requests that use tokens are rejected with 429, `rate_limit_exceeded`, and `Retry-After`
    /// (omitted if the rejected request alone exceeds the limit).
    #[arg(long, value_name = "COUNT", help_heading = "Access")]
    pub tokens_per_minute: Option<u32>,

    /// How API keys map to tenants. Requests of different tenants never share stored responses, conversations or cached
    /// prompts, and the `cached_tokens` of one tenant reveal nothing about the prompts of another. This flag has no
    /// effect without --api-keys.
    #[arg(long, value_enum, default_value = "key", help_heading = "Access")]
    pub key_isolation: KeyIsolation,

    /// Maximum size of a request body, including base64-encoded images. Accepts a unit suffix, as in 4MiB.
    ///
    /// If exceeded: the request is rejected with 413, `request_too_large`.
    #[arg(long, value_name = "SIZE", default_value = "32MiB", help_heading = "Limits")]
    pub max_body_bytes: ByteSize,

    /// Maximum total size of request bodies in memory. The received bytes of a body count toward the limit until the
    /// body is no longer needed for a retry. Up to one eighth of the total is reserved for bodies of up to 64 KiB.
    ///
    /// If exceeded: further requests are rejected with 429, `body_buffer_full`, and `Retry-After`.
    #[arg(long, value_name = "SIZE", default_value = "128MiB", help_heading = "Limits")]
    pub max_buffered_body_bytes: ByteSize,

    /// Maximum size of the headers of a request. With HTTP/1.1, values below 8KiB have the same effect as 8KiB.
    ///
    /// If exceeded: the request is rejected with 431, and the response has no body.
    #[arg(long, value_name = "SIZE", default_value = "16KiB", help_heading = "Limits")]
    pub max_header_bytes: ByteSize,

    /// Maximum number of open client connections to the API.
    ///
    /// If exceeded: further connections wait, and connections that have been idle for one second are closed to make
    /// room for them.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 8192,
        value_parser = value_parser!(u32).range(1..=1_048_576),
        help_heading = "Limits"
    )]
    pub max_connections: u32,

    /// Maximum number of requests that the router handles at the same time, including waiting ones.
    ///
    /// If exceeded: further requests are rejected with 429, `too_many_requests`, and `Retry-After`.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 16_384,
        value_parser = value_parser!(u32).range(1..=1_048_576),
        help_heading = "Limits"
    )]
    pub max_concurrent_requests: u32,

    /// Time within which a client must send the headers of a request, and the same time again for its body. Idle
    /// connections are closed after the same time.
    ///
    /// If exceeded: the connection is closed; if only the body is late, the client first receives 408,
    /// `request_incomplete`.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration, help_heading = "Limits")]
    pub read_timeout: Duration,

    /// Maximum time for which a client may stop reading a response while data is available.
    ///
    /// If exceeded: the response is aborted, and the router cancels the request at the replica.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration, help_heading = "Limits")]
    pub write_timeout: Duration,

    /// Time within which requests must finish after SIGTERM or SIGINT.
    ///
    /// If exceeded: the remaining requests are aborted.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration, help_heading = "Limits")]
    pub drain_timeout: Duration,

    /// The log level: error, warn, info, debug or trace. Modules can have separate levels, as in info,router=debug.
    #[arg(long, value_name = "FILTER", default_value = "info", help_heading = "Logs and traces")]
    pub log: String,

    /// The format of the logs, which are written to standard error.
    #[arg(long, value_enum, default_value = "text", help_heading = "Logs and traces")]
    pub log_format: LogFormat,

    /// Log a line for each request with its client, endpoint, replica and duration, but never its prompt or answer.
    #[arg(long, help_heading = "Logs and traces")]
    pub access_log: bool,

    /// The OTLP endpoint (gRPC) to which spans are sent, such as http://collector:4317. Default: none; trace headers
    /// are then forwarded to replicas unchanged.
    #[arg(long, value_name = "URL", help_heading = "Logs and traces")]
    pub otlp_endpoint: Option<String>,

    /// Among the requests without a trace header, the fraction that the router traces, from 0 to 1. For a request with
    /// a trace header, the sampling decision in the header applies.
    #[arg(
        long,
        value_name = "RATIO",
        default_value = "0.01",
        value_parser = fraction,
        help_heading = "Logs and traces"
    )]
    pub trace_sampling_ratio: f32,
}

const EXAMPLES: &str = "\
Examples:
  ovfleet-router --replica 127.0.0.1:8001/50051 --replica 127.0.0.1:8002/50052
  ovfleet-router --host 0.0.0.0 --replicas-service models/chat --replicas-service models/code
  ovfleet-router --config router.yaml

Then list the models and open the console:
  curl http://127.0.0.1:8000/v3/models
  http://127.0.0.1:8000/console";

/// The settings that are in effect now. They are replaced as a whole when the configuration file changes.
pub type Settings = Arc<ArcSwap<Args>>;

/// How requests are assigned to tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KeyIsolation {
    /// Each key is a tenant.
    Key,
    /// Keys with the same name in the file of API keys belong to the same tenant, so that a key can be replaced without
    /// losing access to stored objects. A key without a name is a separate tenant.
    Name,
    /// All requests belong to the same tenant, regardless of their keys.
    None,
}

#[cfg(test)]
mod tests;

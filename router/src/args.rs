//! The command line, which is also where the environment is read and what the keys of the configuration file
//! are named after. The comments on the fields are the help text and the reference in the documentation.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::discovery::{DnsName, FixedReplica, ServiceName};
use crate::policy::Policy;

mod units;

pub use units::ByteSize;
use units::{duration, policy, share};

/// Spread requests over the replicas of one or more models, by their load.
///
/// Clients use the router's address instead of a replica's; the API is the replicas'. Every option can also be
/// given as an environment variable, named beside it, or in the file given by --config, where an option is a
/// key without its dashes. The command line counts before the file, and the file before the environment.
#[derive(Clone, Debug, Parser)]
#[command(name = "router", version, max_term_width = 110, args_override_self = true, after_long_help = EXAMPLES)]
pub struct Args {
    /// A YAML file with further options, e.g. `policy: kv`. It is read again when it changes: what it says of
    /// replicas, routing, timeouts, queues and rates then applies at once, and no stream notices.
    #[arg(long, env = "OVFLEET_ROUTER_CONFIG", value_name = "PATH")]
    pub config: Option<PathBuf>,

    /// A replica, by the address of its API and the port of its load reports: HOST:PORT/GRPC_PORT. Repeatable.
    /// Without GRPC_PORT its load is not known and it is judged by what this router has sent it.
    #[arg(
        long = "replica",
        env = "OVFLEET_ROUTER_REPLICA",
        value_name = "ADDRESS",
        value_delimiter = ',',
        help_heading = "Replicas"
    )]
    pub replicas: Vec<FixedReplica>,

    /// A name whose every address in DNS is a replica: NAME:PORT/GRPC_PORT. Repeatable.
    #[arg(
        long = "replicas-dns",
        env = "OVFLEET_ROUTER_REPLICAS_DNS",
        value_name = "NAME",
        value_delimiter = ',',
        help_heading = "Replicas"
    )]
    pub replicas_dns: Vec<DnsName>,

    /// A Kubernetes Service whose endpoints are replicas: NAMESPACE/NAME, or NAME in the router's own
    /// namespace. Repeatable. The router needs to get, list and watch its EndpointSlices.
    #[arg(
        long = "replicas-service",
        env = "OVFLEET_ROUTER_REPLICAS_SERVICE",
        value_name = "SERVICE",
        value_delimiter = ',',
        help_heading = "Replicas"
    )]
    pub replicas_service: Vec<ServiceName>,

    /// The name of the Service's port on which replicas serve their API.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_HTTP_PORT_NAME",
        value_name = "NAME",
        default_value = "http",
        help_heading = "Replicas"
    )]
    pub http_port_name: String,

    /// The name of the Service's port on which replicas report their load.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_GRPC_PORT_NAME",
        value_name = "NAME",
        default_value = "grpc",
        help_heading = "Replicas"
    )]
    pub grpc_port_name: String,

    /// How often names are looked up in DNS.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_DNS_INTERVAL",
        value_name = "TIME",
        default_value = "5s",
        value_parser = duration,
        help_heading = "Replicas"
    )]
    pub dns_interval: Duration,

    /// The address to listen on. 0.0.0.0 makes the router reachable from other machines.
    #[arg(long, env = "OVFLEET_ROUTER_HOST", default_value = "127.0.0.1", help_heading = "Network")]
    pub host: IpAddr,

    /// The port of the API, of health, metrics and the console. 0 takes any free one.
    #[arg(long, env = "OVFLEET_ROUTER_PORT", default_value_t = 8000, help_heading = "Network")]
    pub port: u16,

    /// Threads that pass requests on. Default: one for each processor.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_THREADS",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..=1024),
        help_heading = "Network"
    )]
    pub threads: Option<u32>,

    /// How replicas are compared: kv, least-requests, power-of-two, round-robin, or session (by the header
    /// x-session-id or the body's `user`).
    #[arg(
        long,
        env = "OVFLEET_ROUTER_POLICY",
        default_value = "kv",
        value_parser = policy,
        help_heading = "Routing"
    )]
    pub policy: Policy,

    /// The age at which a load report does not count any more.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_REPORT_TTL",
        value_name = "TIME",
        default_value = "3s",
        value_parser = duration,
        help_heading = "Routing"
    )]
    pub report_ttl: Duration,

    /// Replicas a request is tried on at most, all before its first byte.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_ATTEMPTS",
        value_name = "COUNT",
        default_value_t = 4,
        value_parser = clap::value_parser!(u32).range(1..=16),
        help_heading = "Routing"
    )]
    pub attempts: u32,

    /// The share of requests that may be tried again, so that trouble is not multiplied; a few a second may
    /// always.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_RETRY_SHARE",
        value_name = "SHARE",
        default_value = "0.2",
        value_parser = share,
        help_heading = "Routing"
    )]
    pub retry_share: f32,

    /// Time in which a replica has to accept a connection.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_CONNECT_TIMEOUT",
        value_name = "TIME",
        default_value = "1s",
        value_parser = duration,
        help_heading = "Routing"
    )]
    pub connect_timeout: Duration,

    /// Time in which a streamed answer has to begin, at one replica.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_FIRST_TOKEN_TIMEOUT",
        value_name = "TIME",
        default_value = "60s",
        value_parser = duration,
        help_heading = "Routing"
    )]
    pub first_token_timeout: Duration,

    /// Time in which an answer that is not streamed has to come, at one replica.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_ANSWER_TIMEOUT",
        value_name = "TIME",
        default_value = "10m",
        value_parser = duration,
        help_heading = "Routing"
    )]
    pub answer_timeout: Duration,

    /// Longest silence within an answer.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_IDLE_TIMEOUT",
        value_name = "TIME",
        default_value = "60s",
        value_parser = duration,
        help_heading = "Routing"
    )]
    pub idle_timeout: Duration,

    /// Time without a load report after which a replica that used to report is taken to hang: requests without
    /// a first byte go elsewhere, answers that have begun end with an error.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_HANG_TIMEOUT",
        value_name = "TIME",
        default_value = "10s",
        value_parser = duration,
        help_heading = "Routing"
    )]
    pub hang_timeout: Duration,

    /// Requests that wait in the router because no replica has room; further ones are refused with 429.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_QUEUE_REQUESTS",
        value_name = "COUNT",
        default_value_t = 1024,
        value_parser = clap::value_parser!(u32).range(0..=1_048_576),
        help_heading = "Queue"
    )]
    pub queue_requests: u32,

    /// Prompt tokens of the requests that wait.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_QUEUE_TOKENS",
        value_name = "COUNT",
        default_value_t = 4_000_000,
        help_heading = "Queue"
    )]
    pub queue_tokens: u64,

    /// Longest time that a request waits for room.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_QUEUE_TIMEOUT",
        value_name = "TIME",
        default_value = "30s",
        value_parser = duration,
        help_heading = "Queue"
    )]
    pub queue_timeout: Duration,

    /// Requests that wait while there is no replica at all; further ones are refused with 503.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_WAITING_ROOM",
        value_name = "COUNT",
        default_value_t = 256,
        value_parser = clap::value_parser!(u32).range(0..=1_048_576),
        help_heading = "Queue"
    )]
    pub waiting_room: u32,

    /// Longest time that a request waits for a replica to appear.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_WAITING_ROOM_TIMEOUT",
        value_name = "TIME",
        default_value = "10s",
        value_parser = duration,
        help_heading = "Queue"
    )]
    pub waiting_room_timeout: Duration,

    /// A file with the keys that clients have to show, one a line, each followed by a name for logs and rates
    /// if wanted; # begins a comment. It is read again when it changes. Without it everybody is served.
    #[arg(long, env = "OVFLEET_ROUTER_API_KEYS", value_name = "PATH", help_heading = "Access")]
    pub api_keys: Option<PathBuf>,

    /// Requests a minute with one key; further ones are refused with 429.
    #[arg(long, env = "OVFLEET_ROUTER_KEY_REQUESTS", value_name = "COUNT", help_heading = "Access")]
    pub key_requests: Option<u32>,

    /// Tokens a minute with one key, prompts and answers together.
    #[arg(long, env = "OVFLEET_ROUTER_KEY_TOKENS", value_name = "COUNT", help_heading = "Access")]
    pub key_tokens: Option<u32>,

    /// Bytes of a request's body, e.g. 4MiB; larger ones are refused with 413.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_MAX_BODY_BYTES",
        value_name = "SIZE",
        default_value = "8MiB",
        help_heading = "Limits"
    )]
    pub max_body_bytes: ByteSize,

    /// Bytes of a request's head; larger ones are refused with 431.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_MAX_HEADER_BYTES",
        value_name = "SIZE",
        default_value = "64KiB",
        help_heading = "Limits"
    )]
    pub max_header_bytes: ByteSize,

    /// Open connections of clients; further ones wait.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_MAX_CONNECTIONS",
        value_name = "COUNT",
        default_value_t = 16_384,
        value_parser = clap::value_parser!(u32).range(1..=1_048_576),
        help_heading = "Limits"
    )]
    pub max_connections: u32,

    /// Requests in work at once, waiting ones included; further ones are refused with 429.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_MAX_CONCURRENT_REQUESTS",
        value_name = "COUNT",
        default_value_t = 16_384,
        value_parser = clap::value_parser!(u32).range(1..=1_048_576),
        help_heading = "Limits"
    )]
    pub max_concurrent_requests: u32,

    /// Time a client may take to send the head of a request, and again for its body.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_READ_TIMEOUT",
        value_name = "TIME",
        default_value = "30s",
        value_parser = duration,
        help_heading = "Limits"
    )]
    pub read_timeout: Duration,

    /// Time in which requests are finished after SIGTERM or SIGINT, before they are cut off.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_DRAIN_TIMEOUT",
        value_name = "TIME",
        default_value = "30s",
        value_parser = duration,
        help_heading = "Limits"
    )]
    pub drain_timeout: Duration,

    /// What is logged: error, warn, info, debug, trace, or per part, e.g. info,router=debug.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_LOG",
        value_name = "FILTER",
        default_value = "info",
        help_heading = "Logs and traces"
    )]
    pub log: String,

    /// How logs are written, to standard error.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_LOG_FORMAT",
        value_enum,
        default_value = "text",
        help_heading = "Logs and traces"
    )]
    pub log_format: LogFormat,

    /// Log a line for each request: who, what, where and how long, never prompts or answers.
    #[arg(long, env = "OVFLEET_ROUTER_ACCESS_LOG", help_heading = "Logs and traces")]
    pub access_log: bool,

    /// Where spans are sent, by OTLP over gRPC, e.g. http://collector:4317. Default: nowhere; trace headers
    /// are passed on to replicas in any case.
    #[arg(long, env = "OVFLEET_ROUTER_OTLP_ENDPOINT", value_name = "URL", help_heading = "Logs and traces")]
    pub otlp_endpoint: Option<String>,

    /// The share of requests traced of those that come without a trace of their own.
    #[arg(
        long,
        env = "OVFLEET_ROUTER_TRACE_SHARE",
        value_name = "SHARE",
        default_value = "0.01",
        value_parser = share,
        help_heading = "Logs and traces"
    )]
    pub trace_share: f32,
}

const EXAMPLES: &str = "\
Examples:
  router --replica 127.0.0.1:8001/50051 --replica 127.0.0.1:8002/50052
  router --host 0.0.0.0 --replicas-service models/chat --replicas-service models/code
  router --config router.yaml

Then:
  curl http://127.0.0.1:8000/v3/models
  and a browser at http://127.0.0.1:8000/console";

/// How logs are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines: one JSON object on each line.
    Json,
}

#[cfg(test)]
mod tests;

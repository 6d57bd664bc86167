//! Renders the command lines of the server and the router, for pods and for child processes of `ovfleet-operator
//! local`.

use std::net::IpAddr;
use std::time::Duration;

use operator_api::{KeyIsolation, LogLevel, MediaSources, Retry};
use serde_json::{Map, Value, json};

use super::replica_token;
use crate::names::REVISION_VARIABLE;
use crate::ports::{ADMIN_PORT, GRPC_PORT, HTTP_PORT};
use crate::valid_deployment::{EngineSettings, FetchedModel, ModelSource, RouterSettings, ServerSettings};

/// Whether Kubernetes expands the arguments of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expansion {
    /// The arguments are those of a child process, which receives them unchanged.
    None,
    /// The arguments are those of a container, in which Kubernetes replaces `$(NAME)` with the environment variable
    /// `NAME`, and `$$` with `$`.
    Container,
}

impl Expansion {
    /// Returns the argument with which the process receives `argument`.
    fn literal(self, argument: String) -> String {
        match self {
            Self::None => argument,
            Self::Container => argument.replace('$', "$$"),
        }
    }
}

/// The options that servers and routers share and that depend on where they run.
#[derive(Clone, Copy, Debug)]
pub struct ProcessOptions {
    host: IpAddr,
    port: u16,
    grpc_port: u16,
    /// The port of probes and metrics; `None` if they are served on `port`.
    admin_port: Option<u16>,
    /// The path of the file with the replica token, if replicas require a token.
    replica_token_file: Option<&'static str>,
    log_format: &'static str,
    expansion: Expansion,
}

impl ProcessOptions {
    /// Returns the options for a pod.
    #[must_use]
    pub fn in_pod(host: IpAddr) -> Self {
        Self {
            host,
            port: HTTP_PORT,
            grpc_port: GRPC_PORT,
            admin_port: Some(ADMIN_PORT),
            replica_token_file: Some(replica_token::FILE),
            log_format: "json",
            expansion: Expansion::Container,
        }
    }

    /// Returns the options for a child process on this machine. With port 0, the process uses any free port. Replicas
    /// need no token, because they are reachable from this machine only.
    #[must_use]
    pub fn in_child_process(host: IpAddr, port: u16) -> Self {
        Self {
            host,
            port,
            grpc_port: 0,
            admin_port: None,
            replica_token_file: None,
            log_format: "text",
            expansion: Expansion::None,
        }
    }

    fn flags(&self, drain_timeout: Duration, log: LogLevel) -> Vec<String> {
        let mut flags = vec![
            format!("--host={}", self.host),
            format!("--port={}", self.port),
            format!("--grpc-port={}", self.grpc_port),
            format!("--drain-timeout={}", time(drain_timeout)),
            format!("--log={}", log.name()),
            format!("--log-format={}", self.log_format),
        ];
        flags.extend(self.admin_port.map(|port| format!("--admin-port={port}")));
        flags
    }

    fn replica_token_flag(&self) -> Option<String> {
        self.replica_token_file.map(|path| format!("--replica-token-file={path}"))
    }

    /// Returns the arguments with which a process receives `flags` and the user's additional flags. The latter are not
    /// escaped, so that they can refer to environment variables.
    fn arguments(&self, flags: Vec<String>, extra_args: &[String]) -> Vec<String> {
        let flags = flags.into_iter().map(|flag| self.expansion.literal(flag));
        flags.chain(extra_args.iter().cloned()).collect()
    }
}

/// Returns the arguments of a server that serves the model at `path` under `names`.
#[must_use]
pub fn server(server: &ServerSettings, path: &str, names: &[String], options: ProcessOptions) -> Vec<String> {
    let mut flags = vec![format!("--model={path}")];
    flags.extend(names.iter().map(|name| format!("--model-name={name}")));
    flags.extend(options.flags(server.drain_timeout, server.log));
    flags.extend(options.replica_token_flag());
    flags.extend(engine(&server.engine));
    options.arguments(flags, &server.engine.extra_args)
}

/// The flags of a server for the settings of its engine, except for the user's additional flags.
fn engine(engine: &EngineSettings) -> Vec<String> {
    let mut flags = vec![format!("--device={}", engine.device)];
    flags.extend(engine.kv_cache_size.map(|bytes| format!("--kv-cache-size={bytes}")));
    let precision = engine.kv_cache_precision;
    flags.extend(precision.map(|precision| format!("--kv-cache-precision={}", precision.name())));
    if !engine.prefix_caching {
        flags.push("--no-prefix-caching".to_owned());
    }
    flags.push(format!("--max-num-seqs={}", engine.max_num_seqs));
    flags.push(format!("--max-num-batched-tokens={}", engine.max_num_batched_tokens));
    flags.extend(engine.max_model_len.map(|tokens| format!("--max-model-len={tokens}")));
    let MediaSources { allowed_domains, allowed_networks, allow_redirects } = &engine.media;
    flags.extend(allowed_domains.iter().map(|host| format!("--allowed-media-domains={host}")));
    flags.extend(allowed_networks.iter().map(|network| format!("--allowed-media-networks={network}")));
    if *allow_redirects {
        flags.push("--media-url-allow-redirects".to_owned());
    }
    flags.extend(engine.plugin_config.iter().map(|(name, value)| format!("--plugin-config={name}={value}")));
    flags
}

/// Returns the command that drains a server in a pod before Kubernetes stops it.
#[must_use]
pub fn drain(server: &ServerSettings) -> Vec<String> {
    vec![
        "/usr/local/bin/ovfleet-server".to_owned(),
        "drain".to_owned(),
        format!("--grpc-port={GRPC_PORT}"),
        format!("--timeout={}", time(server.drain_timeout)),
        format!("--replica-token-file={}", replica_token::FILE),
    ]
}

/// Returns the arguments of `ovfleet-server fetch` that specify the source of a model. A container reads the revision
/// from an environment variable.
#[must_use]
pub fn source(fetched: &FetchedModel, expansion: Expansion) -> Vec<String> {
    let flag = |name: &str, value: &str| expansion.literal(format!("--{name}={value}"));
    let mut flags = Vec::new();
    match &fetched.source {
        ModelSource::HuggingFace { repo, revision, endpoint, files } => {
            flags.push(flag("hf-repo", repo));
            flags.push(match expansion {
                Expansion::None => flag("hf-revision", &revision.requested),
                Expansion::Container => format!("--hf-revision=$({REVISION_VARIABLE})"),
            });
            flags.push(flag("hf-endpoint", endpoint));
            flags.extend(files.iter().map(|file| flag("hf-file", file)));
        }
        ModelSource::Http { url, sha256 } => {
            flags.push(flag("url", url));
            flags.extend(sha256.iter().map(|sha256| flag("sha256", sha256)));
        }
        ModelSource::S3 { object, region, endpoint, sha256 } => {
            flags.push(flag("s3-object", object));
            flags.push(flag("s3-region", region));
            flags.extend(endpoint.iter().map(|endpoint| flag("s3-endpoint", endpoint)));
            flags.extend(sha256.iter().map(|sha256| flag("sha256", sha256)));
        }
    }
    flags.extend(fetched.format.map(|format| flag("format", format)));
    flags
}

/// The paths of the files that a router reads.
#[derive(Clone, Copy, Debug, Default)]
pub struct RouterFiles<'a> {
    /// The path of the configuration file.
    pub config: &'a str,
    /// The path of the file with API keys, if requests need a key.
    pub api_keys: Option<&'a str>,
}

/// Returns the arguments of a router for the settings that cannot change while it runs.
#[must_use]
pub fn router(
    router: &RouterSettings,
    files: RouterFiles<'_>,
    options: ProcessOptions,
    drain_timeout: Duration,
) -> Vec<String> {
    let mut flags = options.flags(drain_timeout, router.log);
    flags.push(format!("--config={}", files.config));
    flags.extend(files.api_keys.map(|path| format!("--api-keys={path}")));
    flags.extend(options.replica_token_flag());
    if router.access_log {
        flags.push("--access-log".to_owned());
    }
    flags.extend(router.otlp_endpoint.as_ref().map(|endpoint| format!("--otlp-endpoint={endpoint}")));
    options.arguments(flags, &router.extra_args)
}

/// Returns the content of a router's configuration file, which the router reloads when the file changes. `replicas`
/// contains the options that determine how the router discovers replicas.
#[must_use]
pub fn router_config(router: &RouterSettings, replicas: Map<String, Value>) -> String {
    let mut options = replicas;
    let mut set = |name: &str, value: Value| drop(options.insert(name.to_owned(), value));
    set("policy", json!(router.policy.name()));
    set("attempts", json!(router.attempts));
    set("connect-timeout", json!(time(router.connect_timeout)));
    set("first-token-timeout", json!(time(router.first_token_timeout)));
    set("answer-timeout", json!(time(router.answer_timeout)));
    set("idle-timeout", json!(time(router.idle_timeout)));
    set("queue-requests", json!(router.queue_requests));
    set("queue-tokens", json!(router.queue_tokens));
    set("queue-timeout", json!(time(router.queue_timeout)));
    if let Some(requests) = router.requests_per_minute {
        set("requests-per-minute", json!(requests));
    }
    if let Some(tokens) = router.tokens_per_minute {
        set("tokens-per-minute", json!(tokens));
    }
    // Omit the defaults of these options, so that routers of an earlier release, which reject the options, can start.
    if router.retry_budget_percent != Retry::default().budget_percent {
        set("retry-budget-percent", json!(router.retry_budget_percent));
    }
    if router.key_isolation != KeyIsolation::default() {
        set("key-isolation", json!(router.key_isolation.name()));
    }
    serde_yaml::to_string(&options).expect("invariant: strings and numbers can be serialized as YAML")
}

/// Returns a duration in the format of flags.
#[must_use]
pub fn time(duration: Duration) -> String {
    if duration.subsec_millis() == 0 {
        format!("{}s", duration.as_secs())
    } else {
        format!("{}ms", duration.as_millis())
    }
}

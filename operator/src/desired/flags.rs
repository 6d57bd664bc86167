//! The command lines of the server and the router. The same for pods and for child processes.

use std::time::Duration;

use operator_api::{Engine, KeyIsolation};
use serde_json::{Map, Value, json};

use crate::manifest::quantity;
use crate::validate::{Router, Server};

/// Where a process listens, how routers and replicas recognize each other, and how it logs.
#[derive(Clone, Copy, Debug)]
pub struct Listen<'a> {
    /// The address.
    pub host: &'a str,
    /// The port of HTTP.
    pub port: u16,
    /// The port of gRPC.
    pub grpc_port: u16,
    /// The port of probes and metrics; without, they are served on the port of HTTP.
    pub admin_port: Option<u16>,
    /// The file with the replica token, if replicas need one.
    pub replica_token_file: Option<&'a str>,
    /// `json` for machines, `text` for people.
    pub log_format: &'a str,
}

/// The flags of a server that serves the model at `path` under `names`.
#[must_use]
pub fn server(server: &Server, path: &str, names: &[String], listen: Listen<'_>) -> Vec<String> {
    let mut flags = vec![format!("--model={path}")];
    flags.extend(names.iter().map(|name| format!("--model-name={name}")));
    flags.extend([
        format!("--host={}", listen.host),
        format!("--port={}", listen.port),
        format!("--grpc-port={}", listen.grpc_port),
        format!("--drain-timeout={}", time(server.drain_timeout)),
        format!("--log={}", server.log.name()),
        format!("--log-format={}", listen.log_format),
    ]);
    flags.extend(listen.admin_port.map(|port| format!("--admin-port={port}")));
    flags.extend(listen.replica_token_file.map(|path| format!("--replica-token-file={path}")));
    flags.extend(engine(&server.engine));
    flags
}

fn engine(engine: &Engine) -> Vec<String> {
    let mut flags = vec![format!("--device={}", engine.device)];
    let cache = &engine.kv_cache;
    if let Some(bytes) = cache.size.as_ref().and_then(|size| quantity(&size.0)) {
        flags.push(format!("--kv-cache-size={}", bytes / 1000));
    }
    flags.extend(cache.precision.map(|precision| format!("--kv-cache-precision={}", precision.flag())));
    if !cache.prefix_caching {
        flags.push("--no-prefix-caching".to_owned());
    }
    flags.push(format!("--max-num-seqs={}", engine.max_num_seqs));
    flags.push(format!("--max-batched-tokens={}", engine.max_batched_tokens));
    flags.extend(engine.max_model_len.map(|tokens| format!("--max-model-len={tokens}")));
    flags.extend(engine.plugin_config.iter().map(|(name, value)| format!("--plugin-config={name}={value}")));
    flags.extend(engine.extra_args.iter().cloned());
    flags
}

/// The flags of a router for what cannot change while it runs. `files` are the paths of its options and of API keys.
#[must_use]
pub fn router(router: &Router, files: [Option<&str>; 2], listen: Listen<'_>, drain: Duration) -> Vec<String> {
    let [options, keys] = files;
    let mut flags = vec![
        format!("--host={}", listen.host),
        format!("--port={}", listen.port),
        format!("--grpc-port={}", listen.grpc_port),
        format!("--drain-timeout={}", time(drain)),
        format!("--log={}", router.log.name()),
        format!("--log-format={}", listen.log_format),
    ];
    flags.extend(listen.admin_port.map(|port| format!("--admin-port={port}")));
    flags.extend(options.map(|path| format!("--config={path}")));
    flags.extend(keys.map(|path| format!("--api-keys={path}")));
    flags.extend(listen.replica_token_file.map(|path| format!("--replica-token-file={path}")));
    if router.access_log {
        flags.push("--access-log".to_owned());
    }
    flags.extend(router.tracing.as_ref().map(|tracing| format!("--otlp-endpoint={}", tracing.endpoint)));
    flags.extend(router.extra_args.iter().cloned());
    flags
}

/// The router's file of options: what it takes up while it runs.
#[must_use]
pub fn router_options(router: &Router, replicas: Map<String, Value>) -> String {
    let [connect, first_token, answer, idle] = router.timeouts;
    let mut options = replicas;
    let mut set = |name: &str, value: Value| drop(options.insert(name.to_owned(), value));
    set("policy", json!(router.policy.name()));
    set("attempts", json!(router.attempts));
    set("retry-share", json!(f64::from(router.retry_percent) / 100.0));
    set("connect-timeout", json!(time(connect)));
    set("first-token-timeout", json!(time(first_token)));
    set("answer-timeout", json!(time(answer)));
    set("idle-timeout", json!(time(idle)));
    set("queue-requests", json!(router.queue_requests));
    set("queue-tokens", json!(router.queue_tokens));
    set("queue-timeout", json!(time(router.queue_timeout)));
    let [requests, tokens] = router.rates;
    if let Some(requests) = requests {
        set("key-requests", json!(requests));
    }
    if let Some(tokens) = tokens {
        set("key-tokens", json!(tokens));
    }
    // Without it for the default, so that routers of former versions, which do not know the option, can start.
    if router.key_isolation != KeyIsolation::default() {
        set("key-isolation", json!(router.key_isolation.name()));
    }
    serde_yaml::to_string(&options).expect("invariant: texts and numbers are YAML")
}

/// As the flags have it.
#[must_use]
pub fn time(duration: Duration) -> String {
    if duration.subsec_millis() == 0 {
        format!("{}s", duration.as_secs())
    } else {
        format!("{}ms", duration.as_millis())
    }
}

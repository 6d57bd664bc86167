//! Runs one resource on this machine, with the same validation and flags as on a cluster and with child processes
//! instead of pods. Settings that have a meaning only on a cluster, such as resource limits, placement and network
//! policies, are ignored.
//!
//! ```text
//! file ─► resource ─► validate ─► adapt ─► (fetch) ─► processes: servers, router ─► supervise until a signal
//! ```
//!
//! Each server listens on a free port that the kernel chooses, and logs the number of the port; the router's
//! configuration file lists these ports. Another process therefore cannot take a port between its selection and its
//! use. No child process outlives this process, however this process exits.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use operator_api::LogLevel;
use process::signals::EndSignals;

use crate::args::LocalArgs;
use crate::observe::ObservedState;
use crate::valid_deployment::ServerSettings;
use crate::validate::{Defaults, validate};

mod child;
mod console;
mod die_with_parent;
mod installation;
mod numa;
mod output;
mod processes;
mod resource;

use console::print;
pub(crate) use die_with_parent::run as die_with_parent;
use installation::Installation;
use processes::Processes;

/// Time that a server or router of `ovfleet-operator local` has to exit after its drain timeout.
///
/// If exceeded: the process is killed.
const EXIT_TIME: Duration = Duration::from_secs(5);
/// The size of each replica's KV cache in bytes if the resource does not set it. The default of a server is up to half
/// of the free memory, which is too much for each of several replicas on one machine.
const KV_CACHE_SIZE: u64 = 1 << 30;
/// The property of the OpenVINO plugin that sets the number of inference threads of a replica.
const THREADS: &str = "INFERENCE_NUM_THREADS";

/// Runs the resource until a termination signal arrives.
///
/// # Errors
/// An argument or the resource is invalid, the model cannot be fetched, or a process fails permanently.
pub(crate) async fn run(args: LocalArgs) -> anyhow::Result<()> {
    let mut signals = EndSignals::of_terminal()?;
    let text = std::fs::read_to_string(&args.file)
        .with_context(|| format!("failed to read {}", args.file.display()))?;
    let mut object =
        resource::read(&text, &args.settings).with_context(|| args.file.display().to_string())?;
    if let Some(replicas) = args.replicas {
        object.spec.replicas = replicas;
        object.spec.suspend = false;
    }
    let defaults = Defaults::with_images("", "");
    let mut valid = validate(&object, &ObservedState::default(), &defaults)?;
    ensure!(
        valid.server.replicas > 0,
        "the resource has 0 replicas or is suspended: set a positive number of replicas with --replicas"
    );
    if valid.router.api_keys.is_some() && args.api_keys.is_none() {
        bail!("the resource sets access.apiKeysSecretRef: pass a file of API keys with --api-keys");
    }
    let directory = tempfile::Builder::new()
        .prefix("ovfleet-")
        .tempdir()
        .context("failed to create a temporary directory")?;
    let installation = Installation::new(args, directory)?;
    adapt(&mut valid.server, &installation.cache()?);
    valid.router.log = at_least_info(valid.router.log);
    let model = tokio::select! {
        model = installation.model(&valid) => model?,
        () = signals.next() => return Ok(()),
    };
    let mut processes = Processes::start(&installation, &valid, &model)?;
    let outcome = tokio::select! {
        outcome = processes.supervise() => outcome,
        () = signals.next() => {
            print("Shutting down: finishing the running requests");
            Ok(())
        }
    };
    tokio::select! {
        () = processes.stop(valid.server.drain_timeout + EXIT_TIME) => {}
        // On a second signal, the processes are killed when they are dropped.
        () = signals.next() => {}
    }
    outcome
}

/// Adapts the settings of a replica to a process on this machine. The log level becomes at least `info`. Settings that
/// the resource omits get values with which the replicas share the processors and the memory, and store compiled models
/// in the cache directory.
fn adapt(server: &mut ServerSettings, cache: &Path) {
    // The address of the server is read from its log, which contains the address at the level `info`.
    server.log = at_least_info(server.log);
    let engine = &mut server.engine;
    engine.kv_cache_size.get_or_insert(KV_CACHE_SIZE);
    if engine.device == "CPU" {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = processors / usize::try_from(server.replicas).unwrap_or(1).max(1);
        engine.plugin_config.entry(THREADS.to_owned()).or_insert_with(|| threads.max(1).to_string());
    }
    if !engine.extra_args.iter().any(|argument| argument.starts_with("--cache-dir")) {
        engine.extra_args.push(format!("--cache-dir={}", cache.join("compiled").display()));
    }
}

fn at_least_info(level: LogLevel) -> LogLevel {
    match level {
        LogLevel::Error | LogLevel::Warn => LogLevel::Info,
        level => level,
    }
}

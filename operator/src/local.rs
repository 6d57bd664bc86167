//! One resource on this machine: the same resource, the same flags, with child processes for pods. What a cluster does
//! beyond that, limits and placement and policies, is left out.
//!
//! ```text
//! file ─► resource ─► validate ─► adapt ─► (fetch) ─► processes: servers, router ─► supervise until a signal
//! ```
//!
//! Servers take any free port and tell the router's configuration where they are, so no port is promised to anybody
//! before it is taken. No process outlives this one, however it ends.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use operator_api::LogLevel;
use serde_json::json;
use tempfile::TempDir;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::LocalArgs;
use crate::observe::Observed;
use crate::validate::{Defaults, Fetched, Files, Server, ValidDeployment, validate};

mod child;
mod lines;
mod numa;
mod processes;
mod resource;
mod tether;

use child::{Child, Program};
use processes::Processes;
pub(crate) use tether::run as tether;

/// Time that a server or router of `operator local` has to end after its drain timeout.
///
/// Beyond it: the process is killed.
const FAREWELL: Duration = Duration::from_secs(5);
/// The KV cache of each replica where the resource states none: by themselves each would take half of the memory.
const KV_CACHE: &str = "1Gi";
/// The property that says how many processors a replica computes on.
const THREADS: &str = "INFERENCE_NUM_THREADS";

/// Runs it until a signal.
///
/// # Errors
/// The resource or a program is not what it should be.
pub(crate) async fn run(args: LocalArgs) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    let text = std::fs::read_to_string(&args.file)
        .with_context(|| format!("failed to read {}", args.file.display()))?;
    let mut object =
        resource::read(&text, &args.settings).with_context(|| args.file.display().to_string())?;
    if let Some(replicas) = args.replicas {
        object.spec.replicas = replicas;
        object.spec.suspend = false;
    }
    let defaults = Defaults::with_images("", "");
    let mut valid = validate(&object, &Observed::default(), &defaults)?;
    ensure!(valid.server.replicas > 0, "the resource wants no replicas: say how many by --replicas");
    if valid.router.keys.is_some() && args.api_keys.is_none() {
        bail!("the resource has access.apiKeysSecretRef: give the file of keys by --api-keys");
    }
    let folder = tempfile::Builder::new().prefix("ovfleet-").tempdir().context("failed to make a folder")?;
    let place = Place::new(args, folder)?;
    adapt(&mut valid.server, &place.cache()?);
    valid.router.log = at_least_info(valid.router.log);
    let model = tokio::select! {
        model = place.model(&valid) => model?,
        () = signals.next() => return Ok(()),
    };
    let mut processes = Processes::start(&place, &valid, &model)?;
    let outcome = tokio::select! {
        outcome = processes.supervise() => outcome,
        () = signals.next() => {
            say("asked to end: finishing what is under way");
            Ok(())
        }
    };
    tokio::select! {
        () = processes.end(valid.server.drain_timeout + FAREWELL) => {}
        // Asked twice: what is left is killed as it is dropped.
        () = signals.next() => {}
    }
    outcome
}

/// To standard output, for people.
fn say(text: &str) {
    use std::io::Write as _;
    // Nobody reads it any more: no reason to end.
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// What is a pod's share of a node in a cluster is a process's share of this machine here, unless the resource says.
fn adapt(server: &mut Server, cache: &Path) {
    // It is from this that addresses are learnt.
    server.log = at_least_info(server.log);
    let engine = &mut server.engine;
    engine.kv_cache.size.get_or_insert_with(|| Quantity(KV_CACHE.to_owned()));
    if engine.device == "CPU" {
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        let each = all / usize::try_from(server.replicas).unwrap_or(1).max(1);
        engine.plugin_config.entry(THREADS.to_owned()).or_insert_with(|| each.max(1).to_string());
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

/// Where things are on this machine.
struct Place {
    args: LocalArgs,
    server: PathBuf,
    router: PathBuf,
    /// For what is written while it runs.
    folder: TempDir,
}

impl Place {
    fn new(args: LocalArgs, folder: TempDir) -> anyhow::Result<Self> {
        let server = program(args.server.as_deref(), "server")?;
        let router = program(args.router.as_deref(), "router")?;
        Ok(Self { args, server, router, folder })
    }

    /// The path of the model, fetched if need be.
    async fn model(&self, valid: &ValidDeployment) -> anyhow::Result<String> {
        if let Some(model) = &self.args.model {
            ensure!(model.exists(), "there is no model at {}", model.display());
            return Ok(model.display().to_string());
        }
        match &valid.files {
            Files::Fetched(fetched) => self.fetch(fetched).await,
            Files::Mounted(_) => bail!(
                "the model is in a claim or an image, which this machine does not have: give its path by --model"
            ),
        }
    }

    async fn fetch(&self, fetched: &Fetched) -> anyhow::Result<String> {
        let key = crate::manifest::digest(&json!(fetched.flags));
        let into = self.cache()?.join("models").join(key);
        std::fs::create_dir_all(&into).with_context(|| format!("failed to create {}", into.display()))?;
        let mut flags = vec!["fetch".to_owned(), format!("--into={}", into.display())];
        match (&self.args.credentials, &fetched.secret) {
            (Some(credentials), _) => flags.push(format!("--credentials={}", credentials.display())),
            (None, Some(secret)) => {
                bail!("the resource names the Secret {secret} for fetching: give a folder by --credentials");
            }
            (None, None) => {}
        }
        flags.extend(fetched.flags.iter().cloned());
        say("Fetching: the model");
        let program = Program { name: "fetch".to_owned(), path: self.server.clone(), flags };
        let (status, why) = Child::start(program)?.wait().await?;
        ensure!(status.success(), "the model could not be fetched: {why}");
        Ok(into.join("current").display().to_string())
    }

    fn cache(&self) -> anyhow::Result<PathBuf> {
        if let Some(cache) = &self.args.cache {
            return Ok(cache.clone());
        }
        let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
        Ok(base.context("there is no folder for caches: give one by --cache")?.join("ovfleet"))
    }
}

/// A program: the one that was given, the one beside this one, or whatever the system finds.
fn program(given: Option<&Path>, name: &str) -> anyhow::Result<PathBuf> {
    if let Some(given) = given {
        ensure!(given.is_file(), "there is no program {}", given.display());
        return Ok(given.to_owned());
    }
    let own = std::env::current_exe().context("failed to find this program")?;
    let beside = own.with_file_name(name);
    Ok(if beside.is_file() { beside } else { PathBuf::from(name) })
}

/// What asks the process to end: Ctrl-C, a signal, or that its terminal is gone.
struct Signals([Signal; 3]);

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("failed to listen for signals");
        Ok(Self([
            listen(SignalKind::terminate())?,
            listen(SignalKind::interrupt())?,
            listen(SignalKind::hangup())?,
        ]))
    }

    async fn next(&mut self) {
        let [terminate, interrupt, hangup] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

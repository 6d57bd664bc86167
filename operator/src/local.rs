//! One resource on this machine: the same resource, the same flags, with child processes for pods. What a cluster does
//! beyond that, limits and placement and policies, is left out.
//!
//! ```text
//! file ─► resource ─► validate ─► (fetch) ─► servers, router ─► supervise until a signal ─► router ends, servers end
//! ```

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use operator_api::LogLevel;
use serde_json::{Map, json};
use tempfile::TempDir;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::LocalArgs;
use crate::desired::flags::{self, Listen};
use crate::observe::Observed;
use crate::validate::{Defaults, Fetched, Files, ValidDeployment, validate};

mod child;
mod resource;

use child::{Child, Program};

/// How often processes are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// Time that a process has beyond its drain timeout until it is killed.
const FAREWELL: Duration = Duration::from_secs(5);

/// Runs it until a signal.
///
/// # Errors
/// The resource or a program is not what it should be.
pub(crate) async fn run(args: LocalArgs) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    let text = std::fs::read_to_string(&args.file)
        .with_context(|| format!("failed to read {}", args.file.display()))?;
    let mut object = resource::read(&text).with_context(|| args.file.display().to_string())?;
    object.spec.replicas = args.replicas.unwrap_or(object.spec.replicas);
    let defaults =
        Defaults { server_image: String::new(), router_image: String::new(), image_pull_policy: None };
    let mut valid = validate(&object, &Observed::default(), &defaults)?;
    // It is from this that ports are learnt.
    valid.server.log = at_least_info(valid.server.log);
    valid.router.log = at_least_info(valid.router.log);
    if valid.router.keys.is_some() && args.api_keys.is_none() {
        bail!("the resource has access.apiKeysSecretRef: give the file of keys by --api-keys");
    }
    let folder = tempfile::Builder::new().prefix("ovfleet-").tempdir().context("failed to make a folder")?;
    let place = Place::new(args, folder)?;
    let model = tokio::select! {
        model = place.model(&valid) => model?,
        () = signals.next() => return Ok(()),
    };
    let mut fleet = Fleet::new(&place, &valid, &model)?;
    let outcome = tokio::select! {
        outcome = fleet.supervise() => outcome,
        () = signals.next() => Ok(()),
    };
    say("asked to end: finishing what is under way");
    tokio::select! {
        () = fleet.end(valid.server.drain_timeout + FAREWELL) => {}
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
        let into = self.cache()?.join(key);
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
        let code = Child::start(program)?.wait().await?;
        if !code.success() {
            bail!("the model could not be fetched");
        }
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
        anyhow::ensure!(given.is_file(), "there is no program {}", given.display());
        return Ok(given.to_owned());
    }
    let own = std::env::current_exe().context("failed to find this program")?;
    let beside = own.with_file_name(name);
    Ok(if beside.is_file() { beside } else { PathBuf::from(name) })
}

/// The processes.
struct Fleet {
    servers: Vec<Child>,
    router: Child,
    model: String,
    endpoint: SocketAddr,
}

impl Fleet {
    fn new(place: &Place, valid: &ValidDeployment, model: &str) -> anyhow::Result<Self> {
        let host = Ipv4Addr::LOCALHOST.to_string();
        let mut servers = Vec::new();
        let mut addresses = Vec::new();
        for number in 0..valid.server.replicas {
            let (port, grpc_port) = (free_port()?, free_port()?);
            let listen = Listen { host: &host, port, grpc_port, log_format: "text" };
            let program = Program {
                name: format!("server-{number}"),
                path: place.server.clone(),
                flags: flags::server(&valid.server, model, &valid.model_names, listen),
            };
            addresses.push(json!(format!("{host}:{port}/{grpc_port}")));
            servers.push(Child::start(program)?.probed(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port)));
        }
        let options = place.folder.path().join("router.yaml");
        let replicas = Map::from_iter([("replica".to_owned(), json!(addresses))]);
        std::fs::write(&options, flags::router_options(&valid.router, replicas))
            .with_context(|| format!("failed to write {}", options.display()))?;
        let (address, port) = (place.args.host, place.args.port);
        let router_host = address.to_string();
        let listen = Listen { host: &router_host, port, grpc_port: 0, log_format: "text" };
        let files = [options.to_str(), place.args.api_keys.as_deref().and_then(Path::to_str)];
        let program = Program {
            name: "router".to_owned(),
            path: place.router.clone(),
            flags: flags::router(&valid.router, files, listen, valid.server.drain_timeout),
        };
        let probed = if address.is_unspecified() { IpAddr::from(Ipv4Addr::LOCALHOST) } else { address };
        let endpoint = SocketAddr::new(probed, port);
        let router = Child::start(program)?.probed(endpoint);
        Ok(Self { servers, router, model: valid.model_names[0].clone(), endpoint })
    }

    /// Starts again what ends, and says how things are whenever that changes.
    async fn supervise(&mut self) -> anyhow::Result<()> {
        let mut said = String::new();
        let mut was_ready = false;
        loop {
            for child in self.servers.iter_mut().chain([&mut self.router]) {
                child.look().await?;
            }
            let ready = self.servers.iter().filter(|server| server.is_ready()).count();
            let wanted = self.servers.len();
            let phase = match (self.router.is_ready(), ready) {
                (true, ready) if ready == wanted && wanted > 0 => "Ready",
                _ if was_ready => "Degraded",
                _ => "Starting",
            };
            was_ready |= phase == "Ready";
            let status = format!(
                "{phase}: {ready}/{wanted} replicas ready, model {} at http://{}/v3",
                self.model, self.endpoint
            );
            if status != said {
                say(&status);
                said = status;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Ends them all, the router first, so that it does not send requests to those that leave.
    async fn end(&mut self, limit: Duration) {
        self.router.end(limit).await;
        futures_util::future::join_all(self.servers.iter_mut().map(|server| server.end(limit))).await;
    }
}

/// A port that nobody had a moment ago.
fn free_port() -> anyhow::Result<u16> {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("there is no free port")?;
    Ok(listener.local_addr()?.port())
}

struct Signals(Signal, Signal);

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("failed to listen for signals");
        Ok(Self(listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?))
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

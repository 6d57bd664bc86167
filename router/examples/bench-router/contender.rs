//! The setups that are compared: a router, a forwarder, or no program between the load and the replicas.

use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::Args;
use crate::client::{Client, Kind};
use crate::process::Process;
use crate::report::Replica;
use crate::upstream::Upstream;

/// The longest time that a program may take until it can send requests to each replica.
const READY_MAX: Duration = Duration::from_secs(90);

/// A program that forwards requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Name {
    /// The router of this repository.
    Ovfleet,
    /// vllm-router.
    Vllm,
    /// sglang-router.
    Sglang,
    /// A forwarder that only copies bytes.
    Forward,
}

impl Name {
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Ovfleet => "ovfleet",
            Self::Vllm => "vllm-router",
            Self::Sglang => "sglang-router",
            Self::Forward => "bytes only",
        }
    }

    /// Whether the figures of ovfleet's router are compared with those of this program.
    pub(crate) fn is_peer(self) -> bool {
        matches!(self, Self::Vllm | Self::Sglang)
    }

    fn command(self, args: &Args, port: u16, upstream: &Upstream) -> anyhow::Result<Command> {
        let urls = upstream.addresses().into_iter().map(|address| format!("http://{address}"));
        let mut command = match self {
            Self::Ovfleet => {
                let mut command = Command::new(&args.router);
                for replica in &upstream.replicas {
                    command.arg(format!("--replica={}/{}", replica.http, replica.grpc.port()));
                }
                // The default configuration, with the policy `kv`.
                command.args(["--port", &port.to_string()]);
                return Ok(command);
            }
            Self::Forward => {
                let mut command = Command::new(std::env::current_exe()?);
                let targets: Vec<String> = upstream.addresses().iter().map(ToString::to_string).collect();
                command.args(["--forward", &port.to_string(), "--forward-to", &targets.join(",")]);
                return Ok(command);
            }
            Self::Vllm => peer(args, "vllm"),
            Self::Sglang => peer(args, "sglang"),
        };
        command.args(["--host", "127.0.0.1", "--port", &port.to_string(), "--policy", "round_robin"]);
        // This log level omits the log lines of requests.
        command.args(["--log-level", if self == Self::Vllm { "warning" } else { "warn" }]);
        command.args([
            "--prometheus-port",
            &free_port()?.to_string(),
            "--worker-startup-check-interval",
            "1",
        ]);
        command.arg("--worker-urls").args(urls);
        Ok(command)
    }

    /// The name and the version of the program.
    pub(crate) fn version(self, args: &Args) -> anyhow::Result<String> {
        let mut command = match self {
            Self::Forward => return Ok("a process that only forwards bytes".to_owned()),
            Self::Ovfleet => {
                let mut command = Command::new("git");
                command.args([
                    "-C",
                    env!("CARGO_MANIFEST_DIR"),
                    "describe",
                    "--always",
                    "--dirty",
                    "--abbrev=9",
                ]);
                command
            }
            Self::Vllm => peer(args, "vllm"),
            Self::Sglang => peer(args, "sglang"),
        };
        if self != Self::Ovfleet {
            command.arg("--version");
        }
        let output = command.output().with_context(|| format!("failed to run {command:?}"))?;
        ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
        Ok(format!("{} {}", self.text(), String::from_utf8_lossy(&output.stdout).trim()))
    }
}

fn peer(args: &Args, name: &str) -> Command {
    let mut command = Command::new(&args.python);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/bench/peer_router.py")).arg(name);
    command
}

/// Requests a page that the router itself serves.
async fn page(target: SocketAddr, path: &str) -> anyhow::Result<String> {
    let mut connection = TcpStream::connect(target).await?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: router.example\r\nconnection: close\r\n\r\n");
    connection.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    connection.read_to_string(&mut text).await?;
    Ok(text)
}

/// A free port. If another process binds it first, the router fails to start.
fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A running program, or the direct path to the replicas.
pub(crate) struct Contender {
    /// `None` if the load goes directly to the replicas.
    pub(crate) router: Option<(Name, Process)>,
    pub(crate) targets: Vec<SocketAddr>,
}

impl Contender {
    pub(crate) fn direct(upstream: &Upstream) -> Self {
        Self { router: None, targets: upstream.addresses() }
    }

    /// Starts a program and waits until it can send requests to every replica.
    pub(crate) async fn start(name: Name, args: &Args, upstream: &Upstream) -> anyhow::Result<Self> {
        let port = free_port()?;
        let mut process = Process::start(name.command(args, port, upstream)?)?;
        let target = SocketAddr::from(([127, 0, 0, 1], port));
        let seen = |replica: &Arc<Replica>| replica.seen.load(Ordering::Relaxed);
        let before: Vec<u64> = upstream.replicas.iter().map(seen).collect();
        let started = Instant::now();
        loop {
            process.check()?;
            let asked = async { Client::connect(target, Kind::Json).await?.ask().await };
            let problem = asked.await.err();
            let is_ready = match name {
                // By default, ovfleet prefers to send requests with a common prefix to the same replica, so these
                // requests need not reach every replica. Its list of replicas shows whether it can use all of them.
                Name::Ovfleet => {
                    let known = page(target, "/debug/replicas").await.unwrap_or_default();
                    known.matches("\"state\":\"serving\"").count() == upstream.replicas.len()
                }
                // These programs are ready once every replica has received a request.
                Name::Vllm | Name::Sglang | Name::Forward => {
                    upstream.replicas.iter().zip(&before).all(|(replica, &before)| seen(replica) > before)
                }
            };
            if is_ready && problem.is_none() {
                break;
            }
            if started.elapsed() > READY_MAX {
                let problem =
                    problem.map_or_else(|| "some replicas are not used".to_owned(), |it| it.to_string());
                bail!("the program is not ready after {READY_MAX:?} ({problem}): {}", process.command());
            }
            if problem.is_some() {
                // Requests fail until the router listens and knows of a replica.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(Self { router: Some((name, process)), targets: vec![target] })
    }

    pub(crate) fn text(&self) -> &'static str {
        self.router.as_ref().map_or("direct", |(name, _)| name.text())
    }

    /// Whether this is a router of another project.
    pub(crate) fn is_another(&self) -> bool {
        self.router.as_ref().is_some_and(|(name, _)| name.is_peer())
    }

    pub(crate) fn process(&mut self) -> Option<&mut Process> {
        self.router.as_mut().map(|(_, process)| process)
    }
}

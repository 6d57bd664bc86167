//! The processes of a resource: servers first, the router once all of them listen. Where servers are, the router reads
//! from its configuration, which follows them as they come and go; which of them get requests, and how full they are, is
//! the router's word, as it is in a cluster.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures_util::StreamExt as _;
use serde_json::{Map, json};
use tokio::time::timeout;

use super::child::{Child, Program};
use super::lines::Listens;
use super::{Place, numa, say};
use crate::desired::flags::{self, Listen};
use crate::fleet::{ReportedReplica, RouterReport, watch_replicas};
use crate::status::percent;
use crate::validate::ValidDeployment;

/// How processes listen and log. Replicas need no token: they listen on this machine only.
const LISTEN: Listen<'static> = Listen {
    host: "",
    port: 0,
    grpc_port: 0,
    admin_port: None,
    replica_token_file: None,
    log_format: "text",
};
/// How often processes are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// How often the router is asked while all is well.
const ASK_INTERVAL: Duration = Duration::from_secs(2);

/// Time in which the router has to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// The processes.
pub(super) struct Processes<'a> {
    place: &'a Place,
    valid: &'a ValidDeployment,
    servers: Vec<Child>,
    router: Option<Child>,
    /// The port that the router listens on.
    port: u16,
    /// Where the router was told that servers are.
    told: Vec<String>,
    /// What the router has said last, if it answered.
    seen: Option<View>,
}

/// What a router says.
struct View {
    admitted: BTreeSet<String>,
    kv_percent: Option<i32>,
}

impl<'a> Processes<'a> {
    /// Starts the servers.
    ///
    /// # Errors
    /// The operating system refuses.
    pub(super) fn start(place: &'a Place, valid: &'a ValidDeployment, model: &str) -> anyhow::Result<Self> {
        let host = Ipv4Addr::LOCALHOST.to_string();
        let listen = Listen { host: &host, port: 0, ..LISTEN };
        let flags = flags::server(&valid.server, model, &valid.model_names, listen);
        let nodes = numa::nodes();
        let servers = (1..=valid.server.replicas).map(|number| {
            let mut flags = flags.clone();
            flags.extend(numa::flag(&nodes, number as usize - 1, &flags));
            Child::start(Program { name: format!("replica-{number}"), path: place.server.clone(), flags })
        });
        Ok(Self {
            place,
            valid,
            servers: servers.collect::<anyhow::Result<_>>()?,
            router: None,
            port: place.args.port,
            told: Vec::new(),
            seen: None,
        })
    }

    /// Starts again what ends, and says how things are whenever that changes.
    ///
    /// # Errors
    /// A process has ended for a reason that will not pass.
    pub(super) async fn supervise(&mut self) -> anyhow::Result<()> {
        let mut said = String::new();
        let mut was_ready = false;
        let mut asked = Instant::now();
        loop {
            for child in self.servers.iter_mut().chain(&mut self.router) {
                child.look().await?;
            }
            self.introduce()?;
            let is_ready = self.ready() == self.servers.len();
            if !is_ready || asked.elapsed() > ASK_INTERVAL {
                asked = Instant::now();
                self.ask().await;
            }
            let status = self.status(was_ready);
            if status != said {
                say(&status);
                said = status;
            }
            if self.ready() == self.servers.len() && !was_ready {
                was_ready = true;
                say(&self.example());
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Tells the router where servers are, and starts it once all of them have a place.
    fn introduce(&mut self) -> anyhow::Result<()> {
        let is_first = self.router.is_none();
        if is_first && self.servers.iter().any(|server| server.listens().is_none()) {
            return Ok(());
        }
        let options = self.place.folder.path().join("router.yaml");
        let places: Vec<String> = self.servers.iter().filter_map(Child::listens).map(place).collect();
        if places != self.told {
            let replicas = Map::from_iter([("replica".to_owned(), json!(places))]);
            write(&options, &flags::router_options(&self.valid.router, replicas))?;
            self.told = places;
        }
        if is_first {
            let (flags, path) = (self.router_flags(&options), self.place.router.clone());
            self.router = Some(Child::start(Program { name: "router".to_owned(), path, flags })?);
        }
        if let (0, Some(listens)) = (self.port, self.router.as_ref().and_then(Child::listens)) {
            // The next one is to be found where this one is.
            self.port = listens.http.port();
            let flags = self.router_flags(&options);
            self.router.iter_mut().for_each(|router| router.set_flags(flags.clone()));
        }
        Ok(())
    }

    fn router_flags(&self, options: &Path) -> Vec<String> {
        let args = &self.place.args;
        let host = args.host.to_string();
        let listen = Listen { host: &host, port: self.port, ..LISTEN };
        let files = [options.to_str(), args.api_keys.as_deref().and_then(Path::to_str)];
        flags::router(&self.valid.router, files, listen, self.valid.server.drain_timeout)
    }

    /// Where the router answers, if it runs.
    fn endpoint(&self) -> Option<SocketAddr> {
        Some(local(self.router.as_ref()?.listens()?.http))
    }

    /// Where the router reports which replicas it has admitted, if it runs.
    fn reports(&self) -> Option<SocketAddr> {
        Some(local(self.router.as_ref()?.listens()?.grpc?))
    }

    /// Asks the router whom it sends requests.
    async fn ask(&mut self) {
        self.seen = match self.reports() {
            None => None,
            Some(address) => {
                timeout(ANSWER_LIMIT, first_report(address)).await.ok().flatten().map(View::from)
            }
        };
        let Some(seen) = &self.seen else { return };
        self.router.iter_mut().for_each(Child::works);
        for server in &mut self.servers {
            if is_admitted(server, seen) {
                server.works();
            }
        }
    }

    /// How many replicas get requests.
    fn ready(&self) -> usize {
        match (&self.seen, self.endpoint()) {
            (Some(seen), Some(_)) => self.servers.iter().filter(|server| is_admitted(server, seen)).count(),
            _ => 0,
        }
    }

    fn status(&self, was_ready: bool) -> String {
        let (ready, wanted) = (self.ready(), self.servers.len());
        let phase = match (ready == wanted, was_ready) {
            (true, _) => "Ready",
            (false, true) => "Degraded",
            (false, false) => "Starting",
        };
        let mut text = format!("{phase}: {ready}/{wanted} replicas ready");
        if let (Some(percent), true) = (self.seen.as_ref().and_then(|seen| seen.kv_percent), ready > 0) {
            text.push_str(&format!(", {percent} % of the KV cache in use"));
        }
        if let Some(endpoint) = self.endpoint() {
            text.push_str(&format!(", {} at http://{endpoint}/v3", self.valid.model_names[0]));
        }
        text
    }

    /// What to try first.
    fn example(&self) -> String {
        let Some(endpoint) = self.endpoint() else { return String::new() };
        let key = if self.valid.router.keys.is_some() { " -H 'Authorization: Bearer KEY'" } else { "" };
        let model = &self.valid.model_names[0];
        format!(
            "
Ready. Paste this into another terminal; Ctrl-C here ends the router and its servers:

  curl http://{endpoint}/v3/chat/completions -H 'Content-Type: application/json'{key} -d '{{
    \"model\": \"{model}\",
    \"temperature\": 0,
    \"messages\": [{{\"role\": \"user\", \"content\": \"What is the capital of France?\"}}]
  }}'

Or open http://{endpoint}/console
"
        )
    }

    /// Ends them all, the router first, so that it does not send requests to those that leave.
    pub(super) async fn end(&mut self, limit: Duration) {
        if let Some(router) = &mut self.router {
            router.end(limit).await;
        }
        futures_util::future::join_all(self.servers.iter_mut().map(|server| server.end(limit))).await;
    }
}

/// Where something that listens at `address` can be reached from this machine.
fn local(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        ip if !ip.is_unspecified() => address,
        IpAddr::V4(_) => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), address.port()),
        IpAddr::V6(_) => SocketAddr::new(Ipv6Addr::LOCALHOST.into(), address.port()),
    }
}

async fn first_report(address: SocketAddr) -> Option<RouterReport> {
    watch_replicas(address.to_string()).await?.next().await
}

impl From<RouterReport> for View {
    fn from(report: RouterReport) -> Self {
        let sum =
            |of: fn(&ReportedReplica) -> u32| report.replicas.iter().map(of).map(f64::from).sum::<f64>();
        let kv_percent = percent((sum(|replica| replica.blocks_active), sum(|replica| replica.blocks_total)));
        let ready = report.replicas.into_iter().filter(|replica| replica.is_ready);
        Self { admitted: ready.map(|replica| replica.address).collect(), kv_percent }
    }
}

/// A server as the router's configuration has it.
fn place(listens: Listens) -> String {
    match listens.grpc {
        Some(grpc) => format!("{}/{}", listens.http, grpc.port()),
        None => listens.http.to_string(),
    }
}

/// Whether the router that said what was `seen` sends requests to `server`.
fn is_admitted(server: &Child, seen: &View) -> bool {
    server.listens().is_some_and(|listens| seen.admitted.contains(&listens.http.to_string()))
}

/// Writes a file that somebody else reads at any moment.
fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let part = path.with_extension("part");
    std::fs::write(&part, text)
        .and_then(|()| std::fs::rename(&part, path))
        .with_context(|| format!("failed to write {}", path.display()))
}

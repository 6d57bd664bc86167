//! The processes of a resource: the servers, and the router once all of them listen. The router reads the addresses
//! of the servers from its configuration file, which is updated when a server restarts. As on a cluster, the router
//! reports which replicas it has admitted and the usage of their KV caches.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures_util::StreamExt as _;
use serde_json::{Map, json};
use tokio::time::timeout;

use super::child::{Child, Program};
use super::console::print;
use super::installation::Installation;
use super::numa;
use super::output::ListenAddresses;
use crate::desired::flags::{self, ProcessOptions, RouterFiles};
use crate::pod_reports::{RouterReport, watch_replicas};
use crate::valid_deployment::ValidDeployment;

/// The interval at which processes are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// The interval at which a report is requested from the router while all replicas are ready.
const REPORT_INTERVAL: Duration = Duration::from_secs(2);
/// The timeout for a report of the router.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// The processes of a resource.
pub(super) struct Processes<'a> {
    installation: &'a Installation,
    valid: &'a ValidDeployment,
    servers: Vec<Child>,
    router: Option<Child>,
    /// The port that the router listens on; 0 if the kernel chooses the port and has not chosen it yet.
    port: u16,
    /// The addresses of servers in the router's configuration file.
    configured: Vec<String>,
    /// The last report of the router; `None` if it did not respond.
    report: Option<ReplicaReport>,
}

/// The part of a router's report that this module uses.
struct ReplicaReport {
    /// The addresses of the replicas that the router has admitted.
    admitted: BTreeSet<String>,
    kv_cache_percent: Option<i32>,
}

impl<'a> Processes<'a> {
    /// Starts the servers.
    ///
    /// # Errors
    /// A process could not be started.
    pub(super) fn start(
        installation: &'a Installation,
        valid: &'a ValidDeployment,
        model: &str,
    ) -> anyhow::Result<Self> {
        let options = ProcessOptions::in_child_process(Ipv4Addr::LOCALHOST.into(), 0);
        let flags = flags::server(&valid.server, model, &valid.model_names, options);
        let nodes = numa::nodes();
        let servers = (1..=valid.server.replicas).map(|number| {
            let mut flags = flags.clone();
            flags.extend(numa::flag(&nodes, number as usize - 1, &flags));
            let name = format!("replica-{number}");
            Child::start(Program { name, path: installation.server.clone(), flags })
        });
        Ok(Self {
            installation,
            valid,
            servers: servers.collect::<anyhow::Result<_>>()?,
            router: None,
            port: installation.args.port,
            configured: Vec::new(),
            report: None,
        })
    }

    /// Restarts processes that exit, and prints status changes.
    ///
    /// # Errors
    /// A process has failed permanently or cannot be started, or the router's configuration file cannot be written.
    pub(super) async fn supervise(&mut self) -> anyhow::Result<()> {
        let mut printed = String::new();
        let mut was_ready = false;
        let mut requested = Instant::now();
        loop {
            for child in self.servers.iter_mut().chain(&mut self.router) {
                child.check().await?;
            }
            self.configure_router()?;
            let is_ready = self.ready() == self.servers.len();
            if !is_ready || requested.elapsed() > REPORT_INTERVAL {
                requested = Instant::now();
                self.request_report().await;
            }
            let status = self.status(was_ready);
            if status != printed {
                print(&status);
                printed = status;
            }
            if self.ready() == self.servers.len() && !was_ready {
                was_ready = true;
                print(&self.example());
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }

    /// Writes the addresses of the servers into the router's configuration file, and starts the router once all
    /// servers listen.
    fn configure_router(&mut self) -> anyhow::Result<()> {
        let is_first = self.router.is_none();
        if is_first && self.servers.iter().any(|server| server.addresses().is_none()) {
            return Ok(());
        }
        let config = self.installation.directory.path().join("router.yaml");
        let replicas: Vec<String> =
            self.servers.iter().filter_map(Child::addresses).map(replica_option).collect();
        if replicas != self.configured {
            let options = Map::from_iter([("replica".to_owned(), json!(replicas))]);
            write_atomically(&config, &flags::router_config(&self.valid.router, options))?;
            self.configured = replicas;
        }
        if is_first {
            let (flags, path) = (self.router_flags(&config), self.installation.router.clone());
            self.router = Some(Child::start(Program { name: "router".to_owned(), path, flags })?);
        }
        if let (0, Some(addresses)) = (self.port, self.router.as_ref().and_then(Child::addresses)) {
            // A restarted router must listen on the same port.
            self.port = addresses.http.port();
            let flags = self.router_flags(&config);
            self.router.iter_mut().for_each(|router| router.set_flags(flags.clone()));
        }
        Ok(())
    }

    fn router_flags(&self, config: &Path) -> Vec<String> {
        let args = &self.installation.args;
        let options = ProcessOptions::in_child_process(args.host, self.port);
        let config = config.display().to_string();
        let api_keys = args.api_keys.as_ref().map(|path| path.display().to_string());
        let files = RouterFiles { config: &config, api_keys: api_keys.as_deref() };
        flags::router(&self.valid.router, files, options, self.valid.server.drain_timeout)
    }

    /// The address of the router's API, if it runs.
    fn endpoint(&self) -> Option<SocketAddr> {
        Some(reachable(self.router.as_ref()?.addresses()?.http))
    }

    /// The address at which the router reports on its replicas, if it runs.
    fn report_address(&self) -> Option<SocketAddr> {
        Some(reachable(self.router.as_ref()?.addresses()?.grpc?))
    }

    /// Requests a report from the router.
    async fn request_report(&mut self) {
        self.report = match self.report_address() {
            None => None,
            Some(address) => {
                timeout(REPORT_TIMEOUT, first_report(address)).await.ok().flatten().map(ReplicaReport::from)
            }
        };
        let Some(report) = &self.report else { return };
        self.router.iter_mut().for_each(Child::set_worked);
        for server in &mut self.servers {
            if is_admitted(server, report) {
                server.set_worked();
            }
        }
    }

    /// The number of replicas that receive requests.
    fn ready(&self) -> usize {
        match (&self.report, self.endpoint()) {
            (Some(report), Some(_)) => {
                self.servers.iter().filter(|server| is_admitted(server, report)).count()
            }
            _ => 0,
        }
    }

    fn status(&self, was_ready: bool) -> String {
        let (ready, desired) = (self.ready(), self.servers.len());
        let phase = match (ready == desired, was_ready) {
            (true, _) => "Ready",
            (false, true) => "Degraded",
            (false, false) => "Starting",
        };
        let mut text = format!("{phase}: {ready}/{desired} replicas ready");
        let percent = self.report.as_ref().and_then(|report| report.kv_cache_percent);
        if let (Some(percent), true) = (percent, ready > 0) {
            text.push_str(&format!(", {percent}% of the KV cache in use"));
        }
        if let Some(endpoint) = self.endpoint() {
            text.push_str(&format!(", {} at http://{endpoint}/v3", self.valid.model_names[0]));
        }
        text
    }

    /// Returns an example request for the user.
    fn example(&self) -> String {
        let Some(endpoint) = self.endpoint() else { return String::new() };
        let key = if self.valid.router.api_keys.is_some() { " -H 'Authorization: Bearer KEY'" } else { "" };
        let model = &self.valid.model_names[0];
        format!(
            "
Ready. Run this in another terminal; Ctrl-C here stops the router and its servers:

  curl http://{endpoint}/v3/chat/completions -H 'Content-Type: application/json'{key} -d '{{
    \"model\": \"{model}\",
    \"temperature\": 0,
    \"messages\": [{{\"role\": \"user\", \"content\": \"What is the capital of France?\"}}]
  }}'

Or open http://{endpoint}/console
"
        )
    }

    /// Stops all processes: the router first, so that it sends no requests to servers that are stopping.
    pub(super) async fn stop(&mut self, limit: Duration) {
        if let Some(router) = &mut self.router {
            router.stop(limit).await;
        }
        futures_util::future::join_all(self.servers.iter_mut().map(|server| server.stop(limit))).await;
    }
}

/// The address at which a process that listens on `address` is reachable from this machine.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        ip if !ip.is_unspecified() => address,
        IpAddr::V4(_) => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), address.port()),
        IpAddr::V6(_) => SocketAddr::new(Ipv6Addr::LOCALHOST.into(), address.port()),
    }
}

async fn first_report(address: SocketAddr) -> Option<RouterReport> {
    watch_replicas(address.to_string()).await?.next().await
}

impl From<RouterReport> for ReplicaReport {
    fn from(report: RouterReport) -> Self {
        let kv_cache_percent = report.cache_usage().percent();
        let ready = report.replicas.into_iter().filter(|replica| replica.is_ready);
        Self { admitted: ready.map(|replica| replica.address).collect(), kv_cache_percent }
    }
}

/// The value of the router's option `replica` for a server.
fn replica_option(addresses: ListenAddresses) -> String {
    match addresses.grpc {
        Some(grpc) => format!("{}/{}", addresses.http, grpc.port()),
        None => addresses.http.to_string(),
    }
}

/// Whether the router sends requests to `server`.
fn is_admitted(server: &Child, report: &ReplicaReport) -> bool {
    server.addresses().is_some_and(|addresses| report.admitted.contains(&addresses.http.to_string()))
}

/// Replaces a file atomically, because another process may read it at any time.
fn write_atomically(path: &Path, text: &str) -> anyhow::Result<()> {
    let part = path.with_extension("part");
    std::fs::write(&part, text)
        .and_then(|()| std::fs::rename(&part, path))
        .with_context(|| format!("failed to write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    use operator_api::LlmDeployment;

    use super::*;
    use crate::args::LocalArgs;
    use crate::observe::ObservedState;
    use crate::validate::{Defaults, validate};

    /// Without `--api-keys`, the router would answer requests that have no key.
    #[test]
    fn the_router_gets_the_file_of_keys_even_if_its_path_is_not_utf8() {
        let args = LocalArgs {
            file: "chat.yaml".into(),
            model: None,
            replicas: None,
            settings: Vec::new(),
            host: Ipv4Addr::LOCALHOST.into(),
            port: 0,
            cache: None,
            credentials: None,
            api_keys: Some(OsStr::from_bytes(b"keys-\xff").into()),
            server: None,
            router: None,
        };
        let directory = tempfile::tempdir().unwrap();
        let installation = Installation { args, server: "server".into(), router: "router".into(), directory };
        let object = json!({
            "apiVersion": "ovfleet.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat"},
            "spec": {"model": {"source": {"pvc": {"claim": "models"}}}},
        });
        let object: LlmDeployment = serde_json::from_value(object).unwrap();
        let defaults = Defaults::with_images("", "");
        let valid = validate(&object, &ObservedState::default(), &defaults).unwrap();
        let processes = Processes {
            installation: &installation,
            valid: &valid,
            servers: Vec::new(),
            router: None,
            port: 0,
            configured: Vec::new(),
            report: None,
        };
        let flags = processes.router_flags(Path::new("router.yaml"));
        assert!(flags.iter().any(|flag| flag.starts_with("--api-keys=keys-")), "{flags:?}");
    }
}

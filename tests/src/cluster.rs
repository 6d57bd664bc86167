//! A real Kubernetes control plane for a test: etcd, kube-apiserver and, on request, the controllers, as child
//! processes on free ports of the loopback interface. The cluster has no node, so pods never run. This module is
//! independent of the products of this repository.
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! let cluster = tests::cluster::ControlPlane::start().await?;
//! let client = cluster.client().await?;
//! let namespace = tests::cluster::namespace(&client, "example").await?;
//! # Ok(())
//! # }
//! ```

use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::api::{Api, ObjectMeta, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use tempfile::TempDir;

use crate::process::Process;

mod certificates;
mod programs;

use certificates::{Authority, Identity};
pub use programs::Program;

/// The time limit for starting each process, on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(120);
/// The time between two readiness checks.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The number of ports to try, because another process may bind a free port before the API server does.
const PORT_ATTEMPTS_MAX: usize = 3;
/// The group with all permissions.
const ADMINS: &str = "system:masters";

/// A running control plane. Its processes are killed and its files removed when it is dropped, or when the process that
/// started it ends.
#[derive(Debug)]
pub struct ControlPlane {
    // The processes are dropped in this order: clients before their servers.
    controllers: Vec<Process>,
    api_server: Option<Process>,
    etcd: Process,
    guard: Guard,
    authority: Authority,
    service_accounts: Identity,
    etcd_url: String,
    port: u16,
    kubeconfig: PathBuf,
    directory: TempDir,
}

impl ControlPlane {
    /// Starts etcd and the API server and waits until the latter is ready.
    ///
    /// # Errors
    /// A program is missing or is not ready within two minutes; the message contains its output.
    pub async fn start() -> anyhow::Result<Self> {
        let directory = tempfile::Builder::new().prefix("control-plane-").tempdir()?;
        let mut guard = Guard::start(directory.path())?;
        let authority = Authority::new(directory.path())?;
        let service_accounts = authority.service_accounts()?;
        authority.server("api-server", &["127.0.0.1", "localhost", "kubernetes.default.svc"])?;
        let (etcd, etcd_url) = start_etcd(directory.path())?;
        guard.add(&etcd)?;
        let mut cluster = Self {
            controllers: Vec::new(),
            api_server: None,
            etcd,
            guard,
            authority,
            service_accounts,
            etcd_url,
            port: 0,
            kubeconfig: PathBuf::new(),
            directory,
        };
        for attempt in 1.. {
            cluster.port = free_port()?;
            cluster.kubeconfig = cluster.kubeconfig_for("admin", Some(ADMINS))?;
            match cluster.start_api_server().await {
                Ok(()) => break,
                Err(error) if attempt < PORT_ATTEMPTS_MAX && format!("{error:#}").contains("in use") => {}
                Err(error) => return Err(error),
            }
        }
        Ok(cluster)
    }

    /// Starts a control plane with the controllers, which create ReplicaSets and pods and collect garbage.
    ///
    /// # Errors
    /// Returns the same errors as [`ControlPlane::start`].
    pub async fn start_with_controllers() -> anyhow::Result<Self> {
        let mut cluster = Self::start().await?;
        cluster.start_controllers().await?;
        Ok(cluster)
    }

    /// Starts the Kubernetes controller manager.
    ///
    /// # Errors
    /// Returns the same errors as [`ControlPlane::start`].
    pub async fn start_controllers(&mut self) -> anyhow::Result<()> {
        let kubeconfig = self.kubeconfig_for("controllers", Some(ADMINS))?;
        let mut command = Command::new(Program::ControllerManager.find()?);
        for name in ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"] {
            command.arg(flag(name, kubeconfig.display()));
        }
        command
            // Port 0 disables the listener.
            .args(["--leader-elect=false", "--secure-port=0"])
            .arg(flag("service-account-private-key-file", self.service_accounts.key.display()))
            .arg(flag("root-ca-file", self.authority.certificate().display()))
            // With the default rate limits, the controllers need four seconds to start.
            .args(["--kube-api-qps=500", "--kube-api-burst=1000", "--concurrent-gc-syncs=20"])
            .current_dir(self.directory.path());
        let process = Process::start(&mut command)?;
        self.guard.add(&process)?;
        self.controllers.push(process);
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client().await?, "default");
        let end = Instant::now() + START_LIMIT;
        while accounts.get_opt("default").await?.is_none() {
            self.check_alive(end, "the controllers to be ready")?;
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// The URL of the API server.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// The path of the kubeconfig of a client with all permissions.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Writes a kubeconfig for `user`, a member of `group` if one is given. Users outside `system:masters` can access
    /// no objects until a role binding grants permissions.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn kubeconfig_for(&self, user: &str, group: Option<&str>) -> anyhow::Result<PathBuf> {
        self.authority.kubeconfig(&self.url(), user, group)
    }

    /// Creates a client with all permissions.
    ///
    /// # Errors
    /// The kubeconfig cannot be read.
    pub async fn client(&self) -> anyhow::Result<kube::Client> {
        client(&self.kubeconfig).await
    }

    /// Creates a client that authenticates as `user`, like [`ControlPlane::kubeconfig_for`].
    ///
    /// # Errors
    /// The kubeconfig cannot be written or read.
    pub async fn client_for(&self, user: &str, group: Option<&str>) -> anyhow::Result<kube::Client> {
        client(&self.kubeconfig_for(user, group)?).await
    }

    /// The IDs of the processes, each of which leads its own process group.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let servers = self.api_server.iter().chain([&self.etcd]);
        self.controllers.iter().chain(servers).map(Process::id).collect()
    }

    /// The command for `kubectl` with `arguments`, as a user with all permissions.
    ///
    /// # Errors
    /// `kubectl` is missing.
    pub fn kubectl(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new(Program::Kubectl.find()?);
        command.env("KUBECONFIG", &self.kubeconfig).env("HOME", self.directory.path()).args(arguments);
        Ok(command)
    }

    /// Kills the API server. Its port and its data are retained.
    ///
    /// # Errors
    /// The guard has ended.
    pub fn kill_api_server(&mut self) -> anyhow::Result<()> {
        if let Some(server) = self.api_server.take() {
            self.guard.forget(&server)?;
        }
        Ok(())
    }

    /// Starts or restarts the API server on the same port, and waits until it is ready.
    ///
    /// # Errors
    /// Returns the same errors as [`ControlPlane::start`].
    pub async fn start_api_server(&mut self) -> anyhow::Result<()> {
        let server = Process::start(&mut self.api_server_command()?)?;
        self.guard.add(&server)?;
        self.api_server = Some(server);
        let client = self.client().await?;
        let end = Instant::now() + START_LIMIT;
        loop {
            let request = http::Request::get("/readyz").body(Vec::new())?;
            if client.request_text(request).await.is_ok_and(|answer| answer == "ok") {
                return Ok(());
            }
            self.check_alive(end, "the API server to be ready")?;
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn api_server_command(&self) -> anyhow::Result<Command> {
        let directory = self.directory.path();
        let authority = self.authority.certificate();
        let keys = &self.service_accounts;
        let mut command = Command::new(Program::ApiServer.find()?);
        command
            .args(["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"])
            .args(["--authorization-mode=Node,RBAC", "--service-cluster-ip-range=10.96.0.0/16"])
            .args(["--allow-privileged=true", "--service-account-issuer=https://kubernetes.default.svc"])
            .arg(flag("etcd-servers", &self.etcd_url))
            .arg(flag("secure-port", self.port))
            .arg(flag("cert-dir", directory.display()))
            .arg(flag("tls-cert-file", directory.join("api-server.crt").display()))
            .arg(flag("tls-private-key-file", directory.join("api-server.key").display()))
            .arg(flag("client-ca-file", authority.display()))
            .arg(flag("service-account-key-file", keys.certificate.display()))
            .arg(flag("service-account-signing-key-file", keys.key.display()))
            // Without these flags, the log repeats harmless errors.
            .arg(flag("requestheader-client-ca-file", authority.display()))
            .args(["--requestheader-allowed-names=nobody", "--requestheader-group-headers=X-Remote-Group"])
            .args(["--requestheader-username-headers=X-Remote-User"])
            .args(["--requestheader-extra-headers-prefix=X-Remote-Extra-"]);
        Ok(command)
    }

    /// Fails if a process has ended, or if the time `end` has passed while waiting for `what`.
    fn check_alive(&mut self, end: Instant, what: &str) -> anyhow::Result<()> {
        let is_late = Instant::now() > end;
        for process in self.controllers.iter_mut().chain(&mut self.api_server).chain([&mut self.etcd]) {
            if is_late || process.has_ended() {
                bail!(
                    "a process ended or {START_LIMIT:?} passed while waiting for {what}:\n{}",
                    last_lines(&process.output())
                );
            }
        }
        Ok(())
    }
}

/// Creates a namespace whose name begins with `prefix`, and returns its name.
///
/// # Errors
/// The API server rejects the request.
pub async fn namespace(client: &kube::Client, prefix: &str) -> anyhow::Result<String> {
    let metadata = ObjectMeta { generate_name: Some(format!("{prefix}-")), ..ObjectMeta::default() };
    let namespace = Namespace { metadata, ..Namespace::default() };
    let created = Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &namespace).await?;
    created.metadata.name.context("the namespace has no name")
}

/// Creates a client that is configured only by the file `kubeconfig`.
///
/// # Errors
/// The file cannot be read or is invalid.
pub async fn client(kubeconfig: &Path) -> anyhow::Result<kube::Client> {
    let config = Kubeconfig::read_from(kubeconfig)?;
    let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
    Ok(kube::Client::try_from(config)?)
}

fn start_etcd(directory: &Path) -> anyhow::Result<(Process, String)> {
    let mut command = Command::new(Program::Etcd.find()?);
    command
        .arg(flag("data-dir", directory.join("etcd").display()))
        .args(["--listen-client-urls=http://127.0.0.1:0", "--listen-peer-urls=http://127.0.0.1:0"])
        .args(["--advertise-client-urls=http://127.0.0.1:0", "--unsafe-no-fsync"]);
    let etcd = Process::start(&mut command)?;
    let address = etcd.await_line(START_LIMIT, |line| {
        let entry: serde_json::Value = serde_json::from_str(line).ok()?;
        let serving = entry["msg"].as_str()?.starts_with("serving client traffic insecurely");
        serving.then(|| entry["address"].as_str().map(str::to_owned)).flatten()
    })?;
    Ok((etcd, format!("http://{address}")))
}

fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

fn flag(name: &str, value: impl std::fmt::Display) -> String {
    format!("--{name}={value}")
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

/// A process that kills the control plane and removes its directory when the test process has ended. Destructors alone
/// are not sufficient, because a killed test does not run them.
#[derive(Debug)]
struct Guard {
    child: Child,
}

impl Guard {
    fn start(directory: &Path) -> anyhow::Result<Self> {
        use std::os::unix::process::CommandExt as _;
        // The standard input is closed when the test process ends.
        let script = r#"
            declare -A groups
            while read -r word group; do
              case $word in
                add) groups[$group]=1 ;;
                forget) unset "groups[$group]" ;;
                end) exit 0 ;;
              esac
            done
            for group in "${!groups[@]}"; do kill -s KILL -- "-$group"; done
            rm -rf -- "$1"
        "#;
        let child = Command::new("bash")
            .args(["-c", script, "guard"])
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("failed to run bash")?;
        Ok(Self { child })
    }

    fn add(&mut self, process: &Process) -> anyhow::Result<()> {
        self.send(&format!("add {}", process.id()))
    }

    /// Removes `process` from the guard before it is killed, because its ID may be reused afterward.
    fn forget(&mut self, process: &Process) -> anyhow::Result<()> {
        self.send(&format!("forget {}", process.id()))
    }

    fn send(&mut self, line: &str) -> anyhow::Result<()> {
        let stdin = self.child.stdin.as_mut().context("the guard has no standard input")?;
        writeln!(stdin, "{line}").context("failed to write to the guard")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // The processes have ended by now, and their IDs may have been reused.
        drop(self.send("end"));
        drop(self.child.wait());
    }
}

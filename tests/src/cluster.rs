//! A real Kubernetes control plane for a test: etcd, kube-apiserver and, on request, the controllers and the
//! scheduler, as child processes on free ports of the loopback interface. There is no node: pods are objects
//! that nobody runs. It knows nothing of this repository's products.
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

/// How long each part may take to be ready, on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(120);
/// How often a server is asked whether it is ready.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Between finding a free port and the API server taking it, somebody else may have.
const PORT_ATTEMPTS_MAX: usize = 3;
/// The group that may do everything.
const ADMINS: &str = "system:masters";

/// A running control plane. Dropping it kills its processes and removes its files; so does, should it come to
/// that, the end of the process that holds it.
#[derive(Debug)]
pub struct ControlPlane {
    // In the order in which they are dropped: clients of a server before it.
    controllers: Vec<Process>,
    api_server: Option<Process>,
    etcd: Process,
    guard: Guard,
    authority: Authority,
    service_accounts: Identity,
    etcd_url: String,
    port: u16,
    kubeconfig: PathBuf,
    folder: TempDir,
}

impl ControlPlane {
    /// Starts etcd and the API server and waits until the latter is ready.
    ///
    /// # Errors
    /// A program is missing, or not ready within two minutes; the message then has what it wrote.
    pub async fn start() -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("control-plane-").tempdir()?;
        let mut guard = Guard::start(folder.path())?;
        let authority = Authority::new(folder.path())?;
        let service_accounts = authority.service_accounts()?;
        authority.server("api-server", &["127.0.0.1", "localhost", "kubernetes.default.svc"])?;
        let (etcd, etcd_url) = start_etcd(folder.path())?;
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
            folder,
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

    /// [`ControlPlane::start`], with the controllers: Deployments get ReplicaSets and those pods, Jobs get
    /// pods, and what an owner leaves behind is deleted.
    ///
    /// # Errors
    /// As [`ControlPlane::start`].
    pub async fn start_with_controllers() -> anyhow::Result<Self> {
        let mut cluster = Self::start().await?;
        cluster.start_controllers().await?;
        Ok(cluster)
    }

    /// Starts the controllers.
    ///
    /// # Errors
    /// As [`ControlPlane::start`].
    pub async fn start_controllers(&mut self) -> anyhow::Result<()> {
        let kubeconfig = self.kubeconfig_for("controllers", Some(ADMINS))?;
        let mut command = self.controller(Program::ControllerManager, &kubeconfig)?;
        command
            .arg(flag("service-account-private-key-file", self.service_accounts.key.display()))
            .arg(flag("root-ca-file", self.authority.certificate().display()))
            // With the usual limits the controllers take four seconds to start.
            .args(["--kube-api-qps=500", "--kube-api-burst=1000", "--concurrent-gc-syncs=20"]);
        self.add_controller(&mut command)?;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client().await?, "default");
        let end = Instant::now() + START_LIMIT;
        while accounts.get_opt("default").await?.is_none() {
            self.check_alive(end, "the controllers to be ready")?;
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Starts the scheduler, which needs Node objects to put pods on.
    ///
    /// # Errors
    /// It is missing or cannot be started.
    pub fn start_scheduler(&mut self) -> anyhow::Result<()> {
        let kubeconfig = self.kubeconfig_for("scheduler", Some(ADMINS))?;
        let mut command = self.controller(Program::Scheduler, &kubeconfig)?;
        self.add_controller(&mut command)
    }

    /// Where the API server listens.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// The configuration of a client that may do everything.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Writes the configuration of a client that is `user`, in `group` if given. Nobody outside
    /// `system:masters` has rights until a role gives them some.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn kubeconfig_for(&self, user: &str, group: Option<&str>) -> anyhow::Result<PathBuf> {
        self.authority.kubeconfig(&self.url(), user, group)
    }

    /// A client that may do everything.
    ///
    /// # Errors
    /// Its configuration cannot be read.
    pub async fn client(&self) -> anyhow::Result<kube::Client> {
        client(&self.kubeconfig).await
    }

    /// A client for [`ControlPlane::kubeconfig_for`].
    ///
    /// # Errors
    /// Its configuration cannot be written or read.
    pub async fn client_for(&self, user: &str, group: Option<&str>) -> anyhow::Result<kube::Client> {
        client(&self.kubeconfig_for(user, group)?).await
    }

    /// The processes, by number, each the leader of a group of its own.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let servers = self.api_server.iter().chain([&self.etcd]);
        self.controllers.iter().chain(servers).map(Process::id).collect()
    }

    /// `kubectl` with `arguments`, as a user who may do everything.
    ///
    /// # Errors
    /// It is missing.
    pub fn kubectl(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new(Program::Kubectl.find()?);
        command.env("KUBECONFIG", &self.kubeconfig).env("HOME", self.folder.path()).args(arguments);
        Ok(command)
    }

    /// Ends the API server without warning. Its port and its data stay.
    ///
    /// # Errors
    /// The guard is gone.
    pub fn kill_api_server(&mut self) -> anyhow::Result<()> {
        if let Some(server) = self.api_server.take() {
            self.guard.forget(&server)?;
        }
        Ok(())
    }

    /// Starts the API server, again on the same port when it was killed, and waits until it is ready.
    ///
    /// # Errors
    /// As [`ControlPlane::start`].
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
        let folder = self.folder.path();
        let authority = self.authority.certificate();
        let keys = &self.service_accounts;
        let mut command = Command::new(Program::ApiServer.find()?);
        command
            .args(["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"])
            .args(["--authorization-mode=Node,RBAC", "--service-cluster-ip-range=10.96.0.0/16"])
            .args(["--allow-privileged=true", "--service-account-issuer=https://kubernetes.default.svc"])
            .arg(flag("etcd-servers", &self.etcd_url))
            .arg(flag("secure-port", self.port))
            .arg(flag("cert-dir", folder.display()))
            .arg(flag("tls-cert-file", folder.join("api-server.crt").display()))
            .arg(flag("tls-private-key-file", folder.join("api-server.key").display()))
            .arg(flag("client-ca-file", authority.display()))
            .arg(flag("service-account-key-file", keys.certificate.display()))
            .arg(flag("service-account-signing-key-file", keys.key.display()))
            // Without these its log repeats harmless errors.
            .arg(flag("requestheader-client-ca-file", authority.display()))
            .args(["--requestheader-allowed-names=nobody", "--requestheader-group-headers=X-Remote-Group"])
            .args(["--requestheader-username-headers=X-Remote-User"])
            .args(["--requestheader-extra-headers-prefix=X-Remote-Extra-"]);
        Ok(command)
    }

    fn controller(&self, program: Program, kubeconfig: &Path) -> anyhow::Result<Command> {
        let mut command = Command::new(program.find()?);
        for name in ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"] {
            command.arg(flag(name, kubeconfig.display()));
        }
        // Port 0 is none.
        command.args(["--leader-elect=false", "--secure-port=0"]).current_dir(self.folder.path());
        Ok(command)
    }

    fn add_controller(&mut self, command: &mut Command) -> anyhow::Result<()> {
        let process = Process::start(command)?;
        self.guard.add(&process)?;
        self.controllers.push(process);
        Ok(())
    }

    /// Fails when a process has ended, or `end` is past while waiting for `what`.
    fn check_alive(&mut self, end: Instant, what: &str) -> anyhow::Result<()> {
        let late = Instant::now() > end;
        for process in self.controllers.iter_mut().chain(&mut self.api_server).chain([&mut self.etcd]) {
            if late || process.has_ended() {
                bail!("waited in vain for {what}:\n{}", last_lines(&process.output()));
            }
        }
        Ok(())
    }
}

/// Creates a namespace whose name begins with `prefix` and gives its name.
///
/// # Errors
/// The API server refuses.
pub async fn namespace(client: &kube::Client, prefix: &str) -> anyhow::Result<String> {
    let metadata = ObjectMeta { generate_name: Some(format!("{prefix}-")), ..ObjectMeta::default() };
    let namespace = Namespace { metadata, ..Namespace::default() };
    let created = Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &namespace).await?;
    created.metadata.name.context("a namespace without a name")
}

/// A client configured by the file `kubeconfig` and nothing else.
///
/// # Errors
/// The file cannot be read or is wrong.
pub async fn client(kubeconfig: &Path) -> anyhow::Result<kube::Client> {
    let config = Kubeconfig::read_from(kubeconfig)?;
    let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
    Ok(kube::Client::try_from(config)?)
}

fn start_etcd(folder: &Path) -> anyhow::Result<(Process, String)> {
    let mut command = Command::new(Program::Etcd.find()?);
    command
        .arg(flag("data-dir", folder.join("etcd").display()))
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

/// A process that ends others and removes a folder once the process that started it is gone, however it
/// went: a test that is killed drops nothing.
#[derive(Debug)]
struct Guard {
    child: Child,
}

impl Guard {
    fn start(folder: &Path) -> anyhow::Result<Self> {
        use std::os::unix::process::CommandExt as _;
        // The standard input ends with whoever holds its other end.
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
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("failed to run bash")?;
        Ok(Self { child })
    }

    fn add(&mut self, process: &Process) -> anyhow::Result<()> {
        self.tell(&format!("add {}", process.id()))
    }

    /// Leaves `process` alone from now on: it is about to be ended, and its number may be reused.
    fn forget(&mut self, process: &Process) -> anyhow::Result<()> {
        self.tell(&format!("forget {}", process.id()))
    }

    fn tell(&mut self, line: &str) -> anyhow::Result<()> {
        let stdin = self.child.stdin.as_mut().context("the guard has no input")?;
        writeln!(stdin, "{line}").context("failed to tell the guard")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // The others are gone by now, and their numbers may be anybody's.
        drop(self.tell("end"));
        drop(self.child.wait());
    }
}

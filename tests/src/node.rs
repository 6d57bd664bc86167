//! The Kubernetes node that `tests/cluster/node.sh` starts, for tests that run inside it: Helm, kubectl, pods and their
//! processes. `make e2e` prepares the node and runs the tests.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::process;

/// The IP address of the node, which pods can reach.
pub const ADDRESS: &str = "10.99.0.1";
/// The namespace that the chart installs the operator into.
pub const OPERATOR_NAMESPACE: &str = "ovfleet";

/// The time limit for reaching a state. It is long, so that it ends only tests that hang: several nodes share the
/// processors of the machine, so reaching a state takes several times as long as on an idle machine.
pub const LIMIT: Duration = Duration::from_secs(600);

/// The time between two evaluations of an awaited condition. Most evaluations start `kubectl`, which takes a tenth of a
/// second of processor time.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Polls `state` like [`process::await_state`], but less often.
///
/// # Errors
/// Returns the same errors as [`process::await_state`].
pub fn await_state<T>(
    what: &str,
    limit: Duration,
    state: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    process::await_state_every(POLL_INTERVAL, what, limit, state)
}

/// The directory of the node, with its logs and process IDs.
///
/// # Errors
/// The test is not running inside a node.
pub fn directory() -> anyhow::Result<PathBuf> {
    std::env::var_os("NODE")
        .map(PathBuf::from)
        .context("the test is not running inside a node; run it with `make e2e`")
}

/// Runs a program and returns its standard output.
///
/// # Errors
/// The program cannot be started or fails; the message contains its output.
pub fn run(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    run_with_input(program, arguments, "")
}

/// Runs a program like [`run`], with the standard input `input`.
///
/// # Errors
/// Returns the same errors as [`run`].
pub fn run_with_input(program: &str, arguments: &[&str], input: &str) -> anyhow::Result<String> {
    use std::io::{Seek as _, Write as _};
    directory()?;
    let mut file = tempfile::tempfile()?;
    file.write_all(input.as_bytes())?;
    file.rewind()?;
    let output = Command::new(program)
        .args(arguments)
        .current_dir(crate::root())
        .stdin(file)
        .output()
        .with_context(|| format!("failed to start {program}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("{program} {}: {text}{}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    Ok(text)
}

/// Runs `kubectl` with `arguments`.
///
/// # Errors
/// Returns the same errors as [`run`].
pub fn kubectl(arguments: &[&str]) -> anyhow::Result<String> {
    run("kubectl", arguments)
}

/// Returns the JSON output of `kubectl get`.
///
/// # Errors
/// Returns the same errors as [`run`].
pub fn get(arguments: &[&str]) -> anyhow::Result<Value> {
    let text = kubectl(&[&["get", "--output=json"], arguments].concat())?;
    Ok(serde_json::from_str(&text)?)
}

/// Applies `manifest` in a namespace.
///
/// # Errors
/// Returns the same errors as [`run`].
pub fn apply(namespace: &str, manifest: &str) -> anyhow::Result<String> {
    run_with_input("kubectl", &["apply", "--namespace", namespace, "--filename=-"], manifest)
}

/// An installed release of the chart. Dropping it uninstalls the release and deletes the custom resource definition.
#[derive(Debug)]
pub struct Release {
    helm: &'static str,
    is_installed: bool,
}

impl Release {
    /// Installs the chart with the program `helm` (`helm3` or `helm4`), the built images and further `arguments`.
    ///
    /// # Errors
    /// Returns the same errors as [`run`]; Helm fails if the operator is not ready within [`LIMIT`]. The error also
    /// lists the pods and events of the operator's namespace, and describes the node.
    pub fn install(helm: &'static str, arguments: &[&str]) -> anyhow::Result<Self> {
        Self::install_chart(helm, "charts/ovfleet", arguments)
    }

    /// Installs another chart, such as that of an earlier release. [`Release::upgrade`] then upgrades to
    /// `charts/ovfleet` of this source tree.
    ///
    /// # Errors
    /// Returns the same errors as [`Release::install`].
    pub fn install_chart(helm: &'static str, chart: &str, arguments: &[&str]) -> anyhow::Result<Self> {
        let release = Self { helm, is_installed: true };
        release.helm(&["install", "--create-namespace"], chart, arguments)?;
        Ok(release)
    }

    /// Upgrades the release to `charts/ovfleet` of this source tree.
    ///
    /// # Errors
    /// Returns the same errors as [`Release::install`].
    pub fn upgrade(&self, arguments: &[&str]) -> anyhow::Result<String> {
        self.helm(&["upgrade"], "charts/ovfleet", arguments)
    }

    fn helm(&self, command: &[&str], chart: &str, arguments: &[&str]) -> anyhow::Result<String> {
        let timeout = format!("{}s", LIMIT.as_secs());
        let fixed = ["--namespace", OPERATOR_NAMESPACE, "--wait", "--timeout", &timeout, "ovfleet", chart];
        let images = ["--values", "tests/cluster/values.yaml"];
        let output = run(self.helm, &[command, &fixed, &images, arguments].concat());
        output.with_context(|| {
            let pods = kubectl(&["get", "pods,events", "--namespace", OPERATOR_NAMESPACE]);
            let node = kubectl(&["describe", "nodes"]);
            [pods, node].map(|text| text.unwrap_or_else(|error| error.to_string())).join("\n")
        })
    }

    /// Uninstalls the release as a user does, so the custom resource definition remains.
    ///
    /// # Errors
    /// Returns the same errors as [`run`].
    pub fn uninstall(mut self) -> anyhow::Result<()> {
        self.is_installed = false;
        self.remove()
    }

    fn remove(&self) -> anyhow::Result<()> {
        let fixed =
            ["uninstall", "--namespace", OPERATOR_NAMESPACE, "--wait", "--ignore-not-found", "ovfleet"];
        run(self.helm, &fixed)?;
        Ok(())
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        if !self.is_installed {
            return;
        }
        // Helm retains the definition on purpose, but the next test needs a clean node.
        drop(self.remove());
        drop(kubectl(&[
            "delete",
            "crd",
            "llmdeployments.ovfleet.dev",
            "--ignore-not-found",
            "--timeout=60s",
        ]));
    }
}

/// A namespace that enforces the restricted Pod Security Standard. Dropping it deletes the namespace.
#[derive(Debug)]
pub struct Namespace {
    /// The name of the namespace.
    pub name: String,
}

impl Namespace {
    /// Creates the namespace `name`.
    ///
    /// # Errors
    /// The namespace already exists.
    pub fn new(name: &str) -> anyhow::Result<Self> {
        kubectl(&["create", "namespace", name])?;
        let namespace = Self { name: name.to_owned() };
        kubectl(&["label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted"])?;
        Ok(namespace)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        drop(kubectl(&["delete", "namespace", &self.name, "--wait=true", "--timeout=180s"]));
    }
}

/// Returns the address of a Service: its DNS name in the cluster and its first port.
///
/// # Errors
/// Returns the same errors as [`run`].
pub fn service_address(namespace: &str, name: &str) -> anyhow::Result<String> {
    let service = get(&["service", "--namespace", namespace, name])?;
    Ok(format!("{name}.{namespace}.svc.cluster.local:{}", service["spec"]["ports"][0]["port"]))
}

/// The names of the pods that `selector` selects, excluding those that are being deleted.
///
/// # Errors
/// Returns the same errors as [`run`].
pub fn pods(namespace: &str, selector: &str) -> anyhow::Result<Vec<String>> {
    pod_fields(namespace, selector, "/metadata/name")
}

fn pod_fields(namespace: &str, selector: &str, pointer: &str) -> anyhow::Result<Vec<String>> {
    let pods = get(&["pods", "--namespace", namespace, "--selector", selector])?;
    let pods = pods["items"].as_array().into_iter().flatten();
    let pods = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(pods.filter_map(|pod| pod.pointer(pointer)?.as_str().map(str::to_owned)).collect())
}

/// The IDs of the processes of a pod that run `program`.
///
/// # Errors
/// The pod does not exist, or does not run the program.
pub fn processes(namespace: &str, pod: &str, program: &str) -> anyhow::Result<Vec<u32>> {
    let uid = get(&["pod", "--namespace", namespace, pod])?;
    let uid = uid["metadata"]["uid"].as_str().context("the pod has no UID")?.to_owned();
    let mut ids = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Ok(id) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        // A process may end in the meantime.
        let cgroups = std::fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        let is_program = std::fs::read_link(entry.path().join("exe"))
            .is_ok_and(|path| path.file_name().is_some_and(|name| name == program));
        if is_program && cgroups.contains(&uid) {
            ids.push(id);
        }
    }
    if ids.is_empty() {
        bail!("the pod {namespace}/{pod} does not run {program}");
    }
    Ok(ids)
}

/// Sends SIGKILL to the processes of a pod that run `program`.
///
/// # Errors
/// Returns the same errors as [`processes`].
pub fn kill(namespace: &str, pod: &str, program: &str) -> anyhow::Result<()> {
    for id in processes(namespace, pod, program)? {
        run("kill", &["-s", "KILL", &id.to_string()])?;
    }
    Ok(())
}

/// Sends SIGKILL to a component of the node, such as `kube-apiserver`. The node restarts it immediately.
///
/// # Errors
/// The node has no component `name`.
pub fn kill_component(name: &str) -> anyhow::Result<()> {
    let id = std::fs::read_to_string(directory()?.join("pids").join(name))?;
    run("kill", &["-s", "KILL", id.trim()])?;
    Ok(())
}

/// The IP addresses of the pods that `selector` selects, excluding those that are being deleted.
///
/// # Errors
/// Returns the same errors as [`run`].
pub fn addresses(namespace: &str, selector: &str) -> anyhow::Result<Vec<String>> {
    pod_fields(namespace, selector, "/status/podIP")
}

/// A write to the API server by the operator.
#[derive(Clone, Debug)]
pub struct Write {
    /// The time of the API server's response, in RFC 3339 with microseconds, so that times are comparable as text.
    pub time: String,
    /// The IP address of the pod that sent the request.
    pub address: String,
    /// The verb, the resource and the name of the written object.
    pub what: String,
    /// The HTTP status of the response.
    pub status: u64,
}

/// All writes by operators since the start of the node, except writes of Leases, from the API server's audit log.
///
/// # Errors
/// The audit log cannot be read.
pub fn operator_writes() -> anyhow::Result<Vec<Write>> {
    let log = std::fs::read_to_string(directory()?.join("log/audit.log"))
        .context("failed to read the audit log")?;
    // The last line may be incomplete.
    let events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let writes = events.filter(|event| event["objectRef"]["resource"] != "leases").map(|event| {
        let text =
            |pointer: &str| event.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let what =
            ["/verb", "/objectRef/resource", "/objectRef/name", "/objectRef/subresource"].map(text).join(" ");
        Write {
            time: text("/stageTimestamp"),
            address: text("/sourceIPs/0"),
            what: what.trim_end().to_owned(),
            status: event["responseStatus"]["code"].as_u64().unwrap_or_default(),
        }
    });
    Ok(writes.collect())
}

/// Waits until the status of an LLMDeployment is up to date and one of its conditions has `status` and `reason`.
/// Returns the message of the condition.
///
/// # Errors
/// The wait takes longer than [`LIMIT`]; the error lists the conditions, the pods and the events of the namespace.
pub fn await_condition(
    namespace: &str,
    name: &str,
    condition: &str,
    status: &str,
    reason: &str,
) -> anyhow::Result<String> {
    let message = await_state(&format!("{name}: {condition}={status}, {reason}"), LIMIT, || {
        let resource = get(&["llmd", name, "--namespace", namespace])?;
        let is_current = resource["status"]["observedGeneration"] == resource["metadata"]["generation"];
        let conditions = resource["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let matching = conditions.iter().find(|found| {
            found["type"] == condition && found["status"] == status && found["reason"] == reason
        });
        anyhow::ensure!(is_current && matching.is_some(), "{:#}", Value::from(conditions.clone()));
        Ok(matching.map(|found| found["message"].as_str().unwrap_or_default().to_owned()))
    });
    message.with_context(|| kubectl(&["get", "pods,events", "--namespace", namespace]).unwrap_or_default())
}

/// Creates a PersistentVolume that pods of the node can share, with the storage class `here`, and returns the directory
/// of the volume.
///
/// # Errors
/// Returns the same errors as [`run`].
pub fn shared_volume(name: &str) -> anyhow::Result<PathBuf> {
    let directory = directory()?.join("volumes").join(name);
    std::fs::create_dir_all(&directory)?;
    // The user of the pods does not own the directory, so all users may write to it.
    std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o777))?;
    let volume = format!(
        "
apiVersion: v1
kind: PersistentVolume
metadata: {{name: {name}}}
spec:
  capacity: {{storage: 1Gi}}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: here
  hostPath: {{path: {}}}
",
        directory.display()
    );
    run_with_input("kubectl", &["apply", "--filename=-"], &volume)?;
    Ok(directory)
}

//! The node that `tests/cluster/node.sh` starts, seen from a test that runs inside it: Helm, kubectl, pods and
//! their processes. It needs what `make e2e` prepares.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::Value;

/// The address of the node, which pods reach too.
pub const ADDRESS: &str = "10.99.0.1";
/// Where the charts put the operator.
pub const OPERATOR_NAMESPACE: &str = "ovfleet";
/// How often a state is looked at that nobody announces.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The folder of the node: its logs, and the numbers of its processes.
///
/// # Errors
/// This does not run inside a node.
pub fn folder() -> anyhow::Result<PathBuf> {
    std::env::var_os("NODE").map(PathBuf::from).context("no node here: run `make e2e`")
}

/// Runs a program and gives what it wrote to its standard output.
///
/// # Errors
/// It cannot be started or fails; the message has all that it wrote.
pub fn run(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    run_with_input(program, arguments, "")
}

/// [`run`], with `input`.
///
/// # Errors
/// As [`run`].
pub fn run_with_input(program: &str, arguments: &[&str], input: &str) -> anyhow::Result<String> {
    use std::io::{Seek as _, Write as _};
    folder()?;
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

/// Runs `kubectl`.
///
/// # Errors
/// As [`run`].
pub fn kubectl(arguments: &[&str]) -> anyhow::Result<String> {
    run("kubectl", arguments)
}

/// What `kubectl get` gives, as JSON.
///
/// # Errors
/// As [`run`].
pub fn get(arguments: &[&str]) -> anyhow::Result<Value> {
    let text = kubectl(&[&["get", "--output=json"], arguments].concat())?;
    Ok(serde_json::from_str(&text)?)
}

/// Applies `manifest`.
///
/// # Errors
/// As [`run`].
pub fn apply(namespace: &str, manifest: &str) -> anyhow::Result<String> {
    run_with_input("kubectl", &["apply", "--namespace", namespace, "--filename=-"], manifest)
}

/// Looks at a state until it is the one wanted. Unlike the await in [`crate::process`], a look that fails counts as
/// "not yet": the API server may be on its way back.
///
/// # Errors
/// It does not come within `limit`; the message says what the last look gave.
pub fn await_state<T>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let end = Instant::now() + limit;
    loop {
        let seen = look();
        if let Ok(Some(value)) = seen {
            return Ok(value);
        }
        if Instant::now() > end {
            let seen = seen.err().map_or_else(String::new, |error| format!(": {error:#}"));
            bail!("waited {limit:?} for {what}{seen}");
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// A release of the chart, gone with this value.
#[derive(Debug)]
pub struct Release {
    helm: &'static str,
    is_installed: bool,
}

impl Release {
    /// Installs the chart with `helm` (`helm3`, `helm4`), the images that were built, and further `arguments`.
    ///
    /// # Errors
    /// As [`run`]; among others, when the operator is not ready within a minute.
    pub fn install(helm: &'static str, arguments: &[&str]) -> anyhow::Result<Self> {
        let release = Self { helm, is_installed: true };
        release.helm(&["install", "--create-namespace"], arguments)?;
        Ok(release)
    }

    /// Installs the chart again over what is there.
    ///
    /// # Errors
    /// As [`Release::install`].
    pub fn upgrade(&self, arguments: &[&str]) -> anyhow::Result<String> {
        self.helm(&["upgrade"], arguments)
    }

    fn helm(&self, command: &[&str], arguments: &[&str]) -> anyhow::Result<String> {
        let fixed =
            ["--namespace", OPERATOR_NAMESPACE, "--wait", "--timeout", "60s", "ovfleet", "charts/ovfleet"];
        let images = ["--values", "tests/cluster/values.yaml"];
        run(self.helm, &[command, &fixed, &images, arguments].concat())
    }

    /// Removes it as a user does: the definition of the resource stays.
    ///
    /// # Errors
    /// As [`run`].
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
        // So that what comes next finds the node as it was; the definition stays by intention, and goes here.
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

/// A namespace of the test's own in which the restricted Pod Security Standard is enforced; gone with this value.
#[derive(Debug)]
pub struct Namespace {
    /// Its name.
    pub name: String,
}

impl Namespace {
    /// Makes it.
    ///
    /// # Errors
    /// It is there already.
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

/// The names of the running pods that `selector` selects, those that leave not.
///
/// # Errors
/// As [`run`].
pub fn pods(namespace: &str, selector: &str) -> anyhow::Result<Vec<String>> {
    let pods = get(&["pods", "--namespace", namespace, "--selector", selector])?;
    let pods = pods["items"].as_array().into_iter().flatten();
    let staying = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(staying.filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned)).collect())
}

/// The numbers of the processes of a pod whose program is called `program`.
///
/// # Errors
/// There is no such pod, or no such process in it.
pub fn processes(namespace: &str, pod: &str, program: &str) -> anyhow::Result<Vec<u32>> {
    let uid = get(&["pod", "--namespace", namespace, pod])?;
    let uid = uid["metadata"]["uid"].as_str().context("a pod without an identity")?.to_owned();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Ok(id) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        // Processes end while this looks at them.
        let cgroups = std::fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        let is_program = std::fs::read_link(entry.path().join("exe"))
            .is_ok_and(|path| path.file_name().is_some_and(|name| name == program));
        if is_program && cgroups.contains(&uid) {
            found.push(id);
        }
    }
    if found.is_empty() {
        bail!("no process {program} in {namespace}/{pod}");
    }
    Ok(found)
}

/// Ends a program of the pod without warning.
///
/// # Errors
/// As [`processes`].
pub fn kill(namespace: &str, pod: &str, program: &str) -> anyhow::Result<()> {
    for id in processes(namespace, pod, program)? {
        run("kill", &["-s", "KILL", &id.to_string()])?;
    }
    Ok(())
}

/// Ends a program of the node itself (`kube-apiserver`) without warning. It is started again at once.
///
/// # Errors
/// There is none of that name.
pub fn kill_component(name: &str) -> anyhow::Result<()> {
    let id = std::fs::read_to_string(folder()?.join("pids").join(name))?;
    run("kill", &["-s", "KILL", id.trim()])?;
    Ok(())
}

/// The IP addresses of the running pods that `selector` selects, without those that are being deleted.
///
/// # Errors
/// As [`run`].
pub fn addresses(namespace: &str, selector: &str) -> anyhow::Result<Vec<String>> {
    let pods = get(&["pods", "--namespace", namespace, "--selector", selector])?;
    let pods = pods["items"].as_array().into_iter().flatten();
    let staying = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(staying.filter_map(|pod| pod["status"]["podIP"].as_str().map(str::to_owned)).collect())
}

/// A write to the API server by the operator.
#[derive(Clone, Debug)]
pub struct Write {
    /// When the API server responded, in RFC 3339 with microseconds: comparable as text.
    pub time: String,
    /// The IP address of the pod that sent it.
    pub address: String,
    /// What was written: verb, resource and name.
    pub what: String,
    /// The HTTP status of the response.
    pub status: u64,
}

/// All writes by operators since the start of the node, except those of Leases, from the API server's audit log.
///
/// # Errors
/// There is no audit log.
pub fn operator_writes() -> anyhow::Result<Vec<Write>> {
    let log = std::fs::read_to_string(folder()?.join("log/audit.log")).context("no audit log")?;
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

impl Release {
    /// [`Release::install`] of another chart, such as one of an earlier release. [`Release::upgrade`] then upgrades it to
    /// the present one.
    ///
    /// # Errors
    /// As [`Release::install`].
    pub fn install_chart(helm: &'static str, chart: &str, arguments: &[&str]) -> anyhow::Result<Self> {
        let release = Self { helm, is_installed: true };
        let fixed = [
            "install",
            "--create-namespace",
            "--namespace",
            OPERATOR_NAMESPACE,
            "--wait",
            "--timeout",
            "60s",
        ];
        let named = ["ovfleet", chart, "--values", "tests/cluster/values.yaml"];
        run(helm, &[&fixed[..], &named[..], arguments].concat())?;
        Ok(release)
    }
}

/// Waits until a condition of an LLMDeployment has a status and a reason and the whole status is about the present spec.
/// Returns the message of the condition.
///
/// # Errors
/// It does not become so within two minutes; the error lists the conditions, the pods and the events of the namespace.
pub fn await_condition(
    namespace: &str,
    name: &str,
    (condition, status, reason): (&str, &str, &str),
) -> anyhow::Result<String> {
    const LIMIT: Duration = Duration::from_secs(120);
    let seen = await_state(&format!("{name}: {condition}={status}, {reason}"), LIMIT, || {
        let resource = get(&["llmd", name, "--namespace", namespace])?;
        let is_current = resource["status"]["observedGeneration"] == resource["metadata"]["generation"];
        let conditions = resource["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let found = conditions.iter().find(|found| {
            found["type"] == condition && found["status"] == status && found["reason"] == reason
        });
        anyhow::ensure!(is_current && found.is_some(), "{:#}", Value::from(conditions.clone()));
        Ok(found.map(|found| found["message"].as_str().unwrap_or_default().to_owned()))
    });
    seen.with_context(|| kubectl(&["get", "pods,events", "--namespace", namespace]).unwrap_or_default())
}

/// A PersistentVolume of the storage class `here` that all pods of the node share, and its folder.
///
/// # Errors
/// As [`run`].
pub fn shared_volume(name: &str) -> anyhow::Result<PathBuf> {
    let folder = folder()?.join("volumes").join(name);
    std::fs::create_dir_all(&folder)?;
    // Pods run as a user that the node does not know.
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777))?;
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
        folder.display()
    );
    run_with_input("kubectl", &["apply", "--filename=-"], &volume)?;
    Ok(folder)
}

//! Runs the real server as a child process.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, bail};

use crate::process::{ExitReport, Process, await_condition};

/// The time limit for loading the sample model, on a busy machine.
pub const START_LIMIT: Duration = Duration::from_secs(120);
/// Flags that make responses independent of the other sequences in the batch, and of the processor. With the defaults
/// (an 8-bit KV cache, and bf16 on processors that support it), near-ties between tokens can resolve differently in
/// batches of different shapes.
pub const EXACT: [&str; 6] = [
    "--kv-cache-precision",
    "f32",
    "--plugin-config",
    "INFERENCE_PRECISION_HINT=f32",
    "--kv-cache-size",
    "1GiB",
];
/// The time limit for shutting down after a signal.
pub const STOP_LIMIT: Duration = Duration::from_secs(60);

/// A server that is ready. Dropping it kills its process.
#[derive(Debug)]
pub struct Server {
    process: Process,
    address: String,
}

/// The path of the server binary, as [`built`] returns it.
///
/// # Errors
/// The binary does not exist.
pub fn binary() -> anyhow::Result<PathBuf> {
    built("ovfleet-server")
}

/// The path of the binary `name` that was built together with this test.
///
/// # Errors
/// The binary does not exist.
pub fn built(name: &str) -> anyhow::Result<PathBuf> {
    let test = std::env::current_exe()?;
    let directory = test.parent().and_then(Path::parent).context("the test is not in a target directory")?;
    let binary = directory.join(name);
    if !binary.is_file() {
        bail!("{} does not exist: build it with `cargo test --workspace --no-run`", binary.display());
    }
    Ok(binary)
}

/// The cache directory that the servers of all tests share, so that only the first one compiles the model. Each build
/// of the server has its own directory; the directories of other builds are removed.
///
/// # Panics
/// Panics if the server has not been built.
#[must_use]
pub fn cache_dir() -> String {
    const PREFIX: &str = "cache-of-";
    let binary = binary().expect("the server is built");
    let built =
        binary.metadata().and_then(|file| file.modified()).expect("the binary has a modification time");
    let built = built.duration_since(UNIX_EPOCH).expect("the binary was built after 1970").as_nanos();
    let temporary =
        binary.parent().and_then(Path::parent).expect("the server is in a target directory").join("tmp");
    let name = format!("{PREFIX}{built}");
    for other in std::fs::read_dir(&temporary).into_iter().flatten().flatten() {
        let other_name = other.file_name().to_string_lossy().into_owned();
        if other_name.starts_with(PREFIX) && other_name != name {
            // Another test may be removing the same directory.
            let _ = std::fs::remove_dir_all(other.path());
        }
    }
    temporary.join(name).display().to_string()
}

/// The command for a server without arguments and without ovfleet's variables in its environment.
///
/// # Errors
/// The server has not been built.
pub fn bare_command() -> anyhow::Result<Command> {
    Ok(without_settings(Command::new(binary()?)))
}

/// Removes ovfleet's variables (`OVFLEET_*`) from the environment of `command`.
#[must_use]
pub fn without_settings(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("OVFLEET_")) {
        command.env_remove(name);
    }
    command
}

/// The command for a server with the sample model and `arguments` on free ports.
///
/// # Errors
/// The server has not been built.
pub fn command(arguments: &[&str]) -> anyhow::Result<Command> {
    command_for(&crate::sample_model(), arguments)
}

/// The command for a server with `model` and `arguments` on free ports.
///
/// # Errors
/// The server has not been built.
pub fn command_for(model: &Path, arguments: &[&str]) -> anyhow::Result<Command> {
    let mut command = bare_command()?;
    command.arg("--model").arg(model);
    command.args(["--host", "127.0.0.1", "--port", "0", "--grpc-port", "0"]).args(arguments);
    Ok(command)
}

impl Server {
    /// Starts a server with the sample model and `arguments` and waits until it is ready.
    ///
    /// # Errors
    /// The server does not become ready within [`START_LIMIT`].
    pub fn start(arguments: &[&str]) -> anyhow::Result<Self> {
        if !crate::sample_model().is_file() {
            bail!("the sample model does not exist: run `make fetch`");
        }
        Self::from_command(&mut command(arguments)?)
    }

    /// Starts a server with a simulated model called `scripted`, whose steps take no time. It returns `answers`, whose
    /// reasoning is in Qwen's format, in the successive turns of a conversation.
    ///
    /// # Errors
    /// Returns the same errors as [`Server::start`].
    pub fn scripted(answers: &[&str], arguments: &[&str]) -> anyhow::Result<Self> {
        const TIMES: [&str; 3] = ["--sim-step-time", "--sim-prefill-token-time", "--sim-decode-token-time"];
        let mut command = bare_command()?;
        command.args(["--backend", "sim", "--model-name", "scripted", "--reasoning-parser", "qwen3"]);
        command.args(TIMES.iter().flat_map(|time| [time, "0ms"]));
        command.args(["--host", "127.0.0.1", "--port", "0", "--grpc-port", "0"]).args(arguments);
        command.args(answers.iter().flat_map(|answer| ["--sim-answer", answer]));
        Self::from_command(&mut command)
    }

    /// Starts `command`, which runs a server on a free port, and waits until it is ready.
    ///
    /// # Errors
    /// Returns the same errors as [`Server::start`].
    pub fn from_command(command: &mut Command) -> anyhow::Result<Self> {
        let process = Process::start(command)?;
        let address = process.await_line(START_LIMIT, address)?;
        let server = Self { process, address };
        await_condition("the server to be ready", START_LIMIT, || server.is_ready().then_some(()))
            .with_context(|| server.process.output())?;
        Ok(server)
    }

    /// Returns the server that the tests of one binary share. The first call starts it with [`Server::named`], and
    /// dropping the last reference stops it.
    ///
    /// # Panics
    /// Panics if the server cannot be started.
    #[must_use]
    pub fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<Server>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let server = Arc::new(Self::named().expect("the server starts"));
            *shared = Arc::downgrade(&server);
            server
        })
    }

    /// Starts a server with the sample model under the name `smollm2`, with [`EXACT`] and the shared [`cache_dir`].
    ///
    /// # Errors
    /// Returns the same errors as [`Server::start`].
    pub fn named() -> anyhow::Result<Self> {
        let cache_dir = cache_dir();
        let arguments = ["--model-name", "smollm2", "--cache-dir", &cache_dir];
        Self::start(&[&EXACT[..], &arguments].concat())
    }

    /// The URL of `path` on this server.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The host and port that the server listens on.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The host and port of the gRPC services.
    ///
    /// # Panics
    /// Panics if the log does not contain the address, which a server logs before it is ready.
    #[must_use]
    pub fn grpc_address(&self) -> String {
        let output = self.process.output();
        let (_, address) = output.split_once("gRPC on ").expect("the log contains the gRPC address");
        address.lines().next().unwrap_or_default().trim().to_owned()
    }

    /// The process of the server.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Waits until the process has ended.
    ///
    /// # Errors
    /// The process does not end within [`STOP_LIMIT`].
    pub fn wait(self) -> anyhow::Result<ExitReport> {
        self.process.wait(STOP_LIMIT)
    }

    fn is_ready(&self) -> bool {
        // The port of the API may require a token, but the admin port does not.
        let has_admin_port = self.process.output().contains(ADMIN_MARK);
        let address = if has_admin_port { admin_address(&self.process) } else { self.address.clone() };
        probe(&address, "/v2/health/ready").is_ok_and(|status| status == 200)
    }
}

/// Sends a GET request without an asynchronous runtime and returns the status.
///
/// # Errors
/// No HTTP response is received.
pub fn probe(address: &str, path: &str) -> anyhow::Result<u16> {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(
        format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).context("no HTTP response")
}

/// The text before the address of the admin port in the log.
const ADMIN_MARK: &str = "metrics and probes on ";

/// The host and port of the metrics and probes of a server or router with `--admin-port`.
///
/// # Panics
/// Panics if the log does not contain the address, which a process logs before it is ready.
#[must_use]
pub fn admin_address(process: &Process) -> String {
    let output = process.output();
    let (_, address) = output.split_once(ADMIN_MARK).expect("the log contains the address of the probes");
    address.lines().next().unwrap_or_default().trim().to_owned()
}

/// Parses the HTTP address in a line of the log.
pub(crate) fn address(line: &str) -> Option<String> {
    let address = line.split("http://").nth(1)?;
    let end = address.find(|letter: char| !letter.is_ascii_digit() && letter != '.' && letter != ':');
    let address = address[..end.unwrap_or(address.len())].trim_end_matches(['.', ':']);
    address.contains(':').then(|| address.to_owned())
}

#[cfg(test)]
mod tests {
    use super::address;

    #[test]
    fn finds_the_address_in_a_line_of_the_log() {
        assert_eq!(
            address("INFO listening on http://127.0.0.1:4321 grpc=1"),
            Some("127.0.0.1:4321".to_owned())
        );
        assert_eq!(address("INFO loading"), None);
    }
}

//! The real server as a child process.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, bail};

use crate::process::{Ended, Process, await_condition};

/// How long a server may take to load the sample model, on a busy machine.
pub const START_LIMIT: Duration = Duration::from_secs(120);
/// Makes what one request gets independent of what else is in its batch, and of the processor. With an 8-bit KV cache, or
/// with activations rounded to 8 bits where the processor multiplies these, as by default, the shape of a batch can tip the
/// balance between tokens that are nearly as probable.
pub const EXACT: [&str; 8] = [
    "--kv-cache-precision",
    "f32",
    "--plugin-config",
    "INFERENCE_PRECISION_HINT=f32",
    "--plugin-config",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE=0",
    "--kv-cache-size",
    "1GiB",
];
/// How long a server may take to end after it was asked to.
pub const STOP_LIMIT: Duration = Duration::from_secs(60);

/// A server that is ready. Dropping it kills it.
#[derive(Debug)]
pub struct Server {
    process: Process,
    address: String,
}

/// The server binary, as [`built`].
///
/// # Errors
/// There is none.
pub fn binary() -> anyhow::Result<PathBuf> {
    built("server")
}

/// The binary of this name that was built together with this test.
///
/// # Errors
/// There is none.
pub fn built(name: &str) -> anyhow::Result<PathBuf> {
    let test = std::env::current_exe()?;
    let folder = test.parent().and_then(Path::parent).context("the test is not in a target folder")?;
    let binary = folder.join(name);
    if !binary.is_file() {
        bail!("{} is not there: build it with `cargo build -p {name}`", binary.display());
    }
    Ok(binary)
}

/// The folder in which servers of tests keep what they compile, so that only the first compiles. It is for the server as
/// it is built now: those of former builds are removed.
///
/// # Panics
/// If there is no server.
#[must_use]
pub fn kept() -> String {
    const PREFIX: &str = "kept-by-";
    let binary = binary().expect("the server is built");
    let built = binary.metadata().and_then(|file| file.modified()).expect("the server has a time");
    let built = built.duration_since(UNIX_EPOCH).expect("it was built after 1970").as_nanos();
    let temporary =
        binary.parent().and_then(Path::parent).expect("the server is in a target folder").join("tmp");
    let name = format!("{PREFIX}{built}");
    for other in std::fs::read_dir(&temporary).into_iter().flatten().flatten() {
        let other_name = other.file_name().to_string_lossy().into_owned();
        if other_name.starts_with(PREFIX) && other_name != name {
            // Another test may be doing the same.
            let _ = std::fs::remove_dir_all(other.path());
        }
    }
    temporary.join(name).display().to_string()
}

/// A server without arguments, and without those that the environment holds.
///
/// # Errors
/// The server is not there.
pub fn bare_command() -> anyhow::Result<Command> {
    Ok(without_settings(Command::new(binary()?)))
}

/// `command` without the settings that the environment holds.
#[must_use]
pub fn without_settings(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("OVFLEET_")) {
        command.env_remove(name);
    }
    command
}

/// A server on a free port, with the sample model, and `arguments`.
///
/// # Errors
/// The server or the model is not there.
pub fn command(arguments: &[&str]) -> anyhow::Result<Command> {
    command_for(&crate::sample_model(), arguments)
}

/// A server on a free port, with `model` and `arguments`.
///
/// # Errors
/// The server is not there.
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
    /// It does not become ready within [`START_LIMIT`].
    pub fn start(arguments: &[&str]) -> anyhow::Result<Self> {
        if !crate::sample_model().is_file() {
            bail!("the sample model is not there: run `make fetch`");
        }
        Self::from_command(&mut command(arguments)?)
    }

    /// Starts a server, `scripted`, whose simulated model thinks as Qwen's do, takes no time and says `answers` in its
    /// turns of a conversation.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn scripted(answers: &[&str], arguments: &[&str]) -> anyhow::Result<Self> {
        const TIMES: [&str; 3] = ["--sim-step-time", "--sim-prefill-token-time", "--sim-decode-row-time"];
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
    /// As [`Server::start`].
    pub fn from_command(command: &mut Command) -> anyhow::Result<Self> {
        let process = Process::start(command)?;
        let address = process.await_line(START_LIMIT, address)?;
        let server = Self { process, address };
        await_condition("the server to be ready", START_LIMIT, || server.is_ready().then_some(()))
            .with_context(|| server.process.output())?;
        Ok(server)
    }

    /// The server that the tests of one binary share, as [`Server::named`]: started by the first that asks, ended with
    /// the last that lets go.
    ///
    /// # Panics
    /// If it cannot be started.
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

    /// The server with the sample model, [`EXACT`], that is called `smollm2`. What clients are tested with has one graph,
    /// since a second one would be compiled beside half of what they do, and starts from what is [`kept`].
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn named() -> anyhow::Result<Self> {
        let kept = kept();
        let own = ["--model-name", "smollm2", "--unpack-weights", "never", "--cache-dir", &kept];
        Self::start(&[&EXACT[..], &own].concat())
    }

    /// `path` on this server.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Host and port it listens on.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Host and port of its gRPC services.
    ///
    /// # Panics
    /// If it does not say where they are, which it does before it is ready.
    #[must_use]
    pub fn grpc_address(&self) -> String {
        let output = self.process.output();
        let (_, address) = output.split_once("gRPC on ").expect("it says where its gRPC services are");
        address.lines().next().unwrap_or_default().trim().to_owned()
    }

    /// The process.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Waits for its end, once something has made it end.
    ///
    /// # Errors
    /// It goes on.
    pub fn wait(self) -> anyhow::Result<Ended> {
        self.process.wait(STOP_LIMIT)
    }

    fn is_ready(&self) -> bool {
        // The API's port may need a token.
        let has_admin_port = self.process.output().contains(ADMIN_MARK);
        let address = if has_admin_port { admin_address(&self.process) } else { self.address.clone() };
        probe(&address, "/v2/health/ready").is_ok_and(|status| status == 200)
    }
}

/// The status of a GET request, without an asynchronous runtime.
///
/// # Errors
/// Nobody answers.
pub fn probe(address: &str, path: &str) -> anyhow::Result<u16> {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(
        format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).context("no HTTP answer")
}

/// What precedes the address of the admin port in the log.
const ADMIN_MARK: &str = "metrics and probes on ";

/// Host and port at which a process serves metrics and probes, of a server or a router with `--admin-port`.
///
/// # Panics
/// If the process does not say where they are, which it does before it is ready.
#[must_use]
pub fn admin_address(process: &Process) -> String {
    let output = process.output();
    let (_, address) = output.split_once(ADMIN_MARK).expect("it says where its probes are");
    address.lines().next().unwrap_or_default().trim().to_owned()
}

/// The HTTP address in the line of the log that tells it.
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

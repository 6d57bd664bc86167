//! The official clients, each with a script of its own: `clients/python` and `clients/js`, which `scripts/clients`
//! installs. They are ends of their own: what a script finds wrong it says, and leaves with a status.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::process::Process;

/// How long a script may take, on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(300);
/// What each script says at its end.
const PASSED: &str = "scenarios passed";

/// A client's language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// The package `openai` of PyPI.
    Python,
    /// The package `openai` of npm.
    JavaScript,
}

impl Client {
    /// Runs the script of this name with `arguments`.
    ///
    /// # Panics
    /// If the client is not installed, or the script finds something wrong.
    pub fn run(self, script: &str, arguments: &[&str]) {
        self.start(script, arguments).passed();
    }

    /// Starts the script of this name with `arguments`.
    ///
    /// # Panics
    /// If the client is not installed.
    #[must_use]
    pub fn start(self, script: &str, arguments: &[&str]) -> Running {
        let folder = crate::root().join("tests/clients");
        let mut command = match self {
            Self::Python => {
                let mut command = Command::new(python());
                command.arg("-B").arg(folder.join(format!("python/{script}.py")));
                command
            }
            Self::JavaScript => {
                let mut command = Command::new("node");
                command.arg(folder.join(format!("js/{script}.js")));
                command
            }
        };
        Running(Process::start(command.args(arguments)).expect("the client starts"))
    }
}

/// A script that runs.
#[derive(Debug)]
pub struct Running(Process);

impl Running {
    /// Its process.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.0
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// If it has found something wrong.
    pub fn passed(self) {
        let ended = self.0.wait(LIMIT).expect("the client ends");
        assert!(ended.status.success() && ended.output.contains(PASSED), "{}", ended.output);
    }
}

/// Runs the script of this name with both clients at once, and at each of `urls`: a server computes what several ask for
/// in hardly more time than what one does.
///
/// # Panics
/// As [`Client::run`].
pub fn run(script: &str, urls: &[&str], arguments: &[&str]) {
    let clients = urls.iter().flat_map(|url| [(Client::Python, *url), (Client::JavaScript, *url)]);
    let running: Vec<Running> =
        clients.map(|(client, url)| client.start(script, &[&[url], arguments].concat())).collect();
    running.into_iter().for_each(Running::passed);
}

/// Runs the script of this name with both clients, one after the other: for what depends on who else asks, such as which
/// of several replicas is chosen.
///
/// # Panics
/// As [`Client::run`].
pub fn run_in_turns(script: &str, arguments: &[&str]) {
    Client::Python.run(script, arguments);
    Client::JavaScript.run(script, arguments);
}

/// A Python with the official client.
///
/// # Panics
/// If it is not installed.
#[must_use]
pub fn python() -> PathBuf {
    let python = crate::root().join(".deps/venv-clients/bin/python");
    assert!(python.exists(), "the Python client is not installed: run `scripts/clients`");
    python
}

//! The official OpenAI clients, LangChain and the AI SDK, which `scripts/clients` installs, and the scripts that use
//! them in `clients/python` and `clients/js`. A script reports failures in its output and by its exit status.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::process::Process;

/// The time limit for a script, on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(300);
/// The last words of the output of a successful script.
const PASSED: &str = "scenarios passed";

/// The language of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// The packages `openai` and `langchain-openai`.
    Python,
    /// The packages `openai`, `ai` and `@ai-sdk/*`.
    JavaScript,
}

impl Client {
    /// Runs the script `script` with `arguments`.
    ///
    /// # Panics
    /// Panics if the client is not installed, or the script fails.
    pub fn run(self, script: &str, arguments: &[&str]) {
        self.start(script, arguments).assert_success();
    }

    /// Starts the script `script` with `arguments`.
    ///
    /// # Panics
    /// Panics if the client is not installed.
    #[must_use]
    pub fn start(self, script: &str, arguments: &[&str]) -> ClientScript {
        let directory = crate::root().join("tests/clients");
        let mut command = match self {
            Self::Python => {
                let mut command = Command::new(python());
                command.arg("-B").arg(directory.join(format!("python/{script}.py")));
                command
            }
            Self::JavaScript => {
                let mut command = Command::new("node");
                command.arg(directory.join(format!("js/{script}.js")));
                command
            }
        };
        ClientScript(Process::start(command.args(arguments)).expect("the client starts"))
    }
}

/// A running script of a client.
#[derive(Debug)]
pub struct ClientScript(Process);

impl ClientScript {
    /// Returns the process that runs the script.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.0
    }

    /// Waits until the script has succeeded.
    ///
    /// # Panics
    /// Panics if the script fails or does not end within [`LIMIT`].
    pub fn assert_success(self) {
        let ended = self.0.wait(LIMIT).expect("the client ends");
        assert!(ended.status.success() && ended.output.contains(PASSED), "{}", ended.output);
    }
}

/// Runs the script `script` with both clients and for each of `urls` concurrently, because a server batches concurrent
/// requests.
///
/// # Panics
/// Panics in the same cases as [`Client::run`].
pub fn run(script: &str, urls: &[&str], arguments: &[&str]) {
    let clients = urls.iter().flat_map(|url| [(Client::Python, *url), (Client::JavaScript, *url)]);
    let scripts: Vec<ClientScript> =
        clients.map(|(client, url)| client.start(script, &[&[url], arguments].concat())).collect();
    scripts.into_iter().for_each(ClientScript::assert_success);
}

/// Runs the script `script` with both clients, one after the other, because concurrent requests would affect its
/// result, such as the choice of a replica.
///
/// # Panics
/// Panics in the same cases as [`Client::run`].
pub fn run_in_turns(script: &str, arguments: &[&str]) {
    Client::Python.run(script, arguments);
    Client::JavaScript.run(script, arguments);
}

/// The path of a Python interpreter with the packages of [`Client::Python`].
///
/// # Panics
/// Panics if the client is not installed.
#[must_use]
pub fn python() -> PathBuf {
    let python = crate::root().join(".deps/venv-clients/bin/python");
    assert!(python.exists(), "the Python client is not installed: run `scripts/clients`");
    python
}

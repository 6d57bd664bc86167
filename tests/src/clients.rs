//! The official OpenAI clients, which `scripts/clients` installs, and the scripts that use them in `clients/python` and
//! `clients/js`. A script reports failures in its output and by its exit status.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::process::Process;

/// The time limit for a script, on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(300);
/// The last words of the output of a script that succeeds.
const PASSED: &str = "scenarios passed";

/// An official client library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// The package `openai` for Python.
    Python,
    /// The package `openai` for JavaScript.
    JavaScript,
}

impl Client {
    /// Runs the script `script` with `arguments`.
    ///
    /// # Panics
    /// If the client is not installed, or the script fails.
    pub fn run(self, script: &str, arguments: &[&str]) {
        self.start(script, arguments).assert_success();
    }

    /// Starts the script `script` with `arguments`.
    ///
    /// # Panics
    /// If the client is not installed.
    #[must_use]
    pub fn start(self, script: &str, arguments: &[&str]) -> ClientScript {
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
        ClientScript(Process::start(command.args(arguments)).expect("the client starts"))
    }
}

/// A running script of a client.
#[derive(Debug)]
pub struct ClientScript(Process);

impl ClientScript {
    /// The process of the script.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.0
    }

    /// Waits until the script has succeeded.
    ///
    /// # Panics
    /// If the script fails or does not end within [`LIMIT`].
    pub fn assert_success(self) {
        let ended = self.0.wait(LIMIT).expect("the client ends");
        assert!(ended.status.success() && ended.output.contains(PASSED), "{}", ended.output);
    }
}

/// Runs the script `script` with both clients and for each of `urls` concurrently, because a server batches concurrent
/// requests.
///
/// # Panics
/// In the same cases as [`Client::run`].
pub fn run(script: &str, urls: &[&str], arguments: &[&str]) {
    let clients = urls.iter().flat_map(|url| [(Client::Python, *url), (Client::JavaScript, *url)]);
    let scripts: Vec<ClientScript> =
        clients.map(|(client, url)| client.start(script, &[&[url], arguments].concat())).collect();
    scripts.into_iter().for_each(ClientScript::assert_success);
}

/// Runs the script `script` with both clients, one after the other, because concurrent requests would affect its result,
/// such as the choice of a replica.
///
/// # Panics
/// In the same cases as [`Client::run`].
pub fn run_in_turns(script: &str, arguments: &[&str]) {
    Client::Python.run(script, arguments);
    Client::JavaScript.run(script, arguments);
}

/// The path of a Python interpreter with the official client.
///
/// # Panics
/// If the client is not installed.
#[must_use]
pub fn python() -> PathBuf {
    let python = crate::root().join(".deps/venv-clients/bin/python");
    assert!(python.exists(), "the Python client is not installed: run `scripts/clients`");
    python
}

/// A code block of a page that is marked with `<!-- tested: TEXT -->`.
#[derive(Debug)]
pub struct Example {
    /// The language of the code block.
    pub language: String,
    /// The text that the output must contain.
    pub expected: String,
    /// The code of the block, unchanged.
    pub code: String,
}

/// Returns the tested code blocks of a page of the repository.
///
/// # Panics
/// If the page does not exist or has no tested block.
#[must_use]
pub fn examples(page: &str) -> Vec<Example> {
    let text = std::fs::read_to_string(crate::root().join(page)).expect("the page is in the tree");
    let blocks = text.split("<!-- tested: ").skip(1);
    let examples: Vec<Example> = blocks
        .map(|block| {
            let (expected, rest) = block.split_once(" -->\n```").expect("a block follows the mark");
            let (language, rest) = rest.split_once('\n').expect("a block has a first line");
            let (code, _) = rest.split_once("\n```").expect("a block ends");
            Example { language: language.to_owned(), expected: expected.to_owned(), code: code.to_owned() }
        })
        .collect();
    assert!(!examples.is_empty(), "{page} has no tested block");
    examples
}

impl Example {
    /// Runs the code, with the address in it replaced by `address`.
    ///
    /// # Panics
    /// If the code fails, or if its output does not contain the expected text.
    pub fn run(&self, address: &str) {
        const ADDRESS: &str = "127.0.0.1:8000";
        let Self { language, expected, code } = self;
        assert!(code.contains(ADDRESS), "{code}");
        let mut command = match language.as_str() {
            "sh" => Command::new("bash"),
            "python" => Command::new(python()),
            "js" => Command::new("node"),
            other => panic!("blocks in {other} cannot be tested"),
        };
        match language.as_str() {
            "js" => command.args(["--input-type=module", "--eval"]),
            _ => command.arg("-c"),
        };
        // Node.js resolves the imported packages relative to this folder.
        command.arg(code.replace(ADDRESS, address)).current_dir(crate::root().join("tests/clients/js"));
        let ended =
            Process::start(&mut command).expect("the block starts").wait(LIMIT).expect("the block ends");
        assert!(ended.status.success() && ended.output.contains(expected), "{code}\n{}", ended.output);
    }
}

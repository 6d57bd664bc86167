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

/// A block of a page that is marked with `<!-- tested: TEXT -->`.
#[derive(Debug)]
pub struct Example {
    /// The language of the block.
    pub language: String,
    /// The text that its output must contain.
    pub expected: String,
    /// The block as it stands in the page.
    pub code: String,
}

/// The tested blocks of a page of the repository.
///
/// # Panics
/// If there is no such page, or if it has no tested block.
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
    /// Runs the block as it stands, with `address` in place of the address in the page.
    ///
    /// # Panics
    /// If it fails, or if its output lacks what is expected.
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
        // The packages that the blocks import are found from here.
        command.arg(code.replace(ADDRESS, address)).current_dir(crate::root().join("tests/clients/js"));
        let ended =
            Process::start(&mut command).expect("the block starts").wait(LIMIT).expect("the block ends");
        assert!(ended.status.success() && ended.output.contains(expected), "{code}\n{}", ended.output);
    }
}

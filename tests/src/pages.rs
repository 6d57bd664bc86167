//! Runs the code blocks that the pages mark as tested (`tidy::code_blocks`).

use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use tempfile::TempDir;

use crate::clients::{LIMIT, python};
use crate::cluster::Program;
use crate::process::Process;
use crate::server::{built, without_settings};
use crate::tidy::{CodeBlock, Mark, Scene, Tree, code_blocks, has_tested_blocks};

/// The address in blocks that use a server.
const ADDRESS: &str = "127.0.0.1:8000";
/// Functions for blocks that start the programs of ovfleet. Each program runs until it prints the expected text.
const PROGRAMS: &str = r#"set -euo pipefail
export OVFLEET_PORT=0 OVFLEET_GRPC_PORT=0 OVFLEET_ROUTER_PORT=0 PORT=0
run_until_expected() {
  local line output pid found=
  exec {output}< <(exec "$@" 2>&1)
  pid=$!
  while [[ -z "$found" ]] && IFS= read -r line <&"$output"; do
    printf '%s\n' "$line"
    [[ "$line" != *"$EXPECTED"* ]] || found=1
  done
  kill "$pid" 2>/dev/null || true
  wait "$pid" || true
  [[ -n "$found" ]] || { echo "the output does not contain $EXPECTED: $*"; return 1; }
}
ovfleet-server() { run_until_expected "$PROGRAMS/ovfleet-server" "$@"; }
ovfleet-router() { run_until_expected "$PROGRAMS/ovfleet-router" "$@"; }
ovfleet-operator() { run_until_expected "$PROGRAMS/ovfleet-operator" "$@"; }
make() { run_until_expected make --directory "$ROOT" --old-file=build BIN="$PROGRAMS" "$@"; }
"#;
/// Functions for blocks that use a Kubernetes API server. They remove the flags `--wait`, with which Helm would wait
/// for a node, and `--watch`, with which kubectl would never end.
const API_SERVER: &str = r#"set -euo pipefail
kubectl() {
  local argument arguments=()
  for argument in "$@"; do [[ "$argument" == --watch ]] || arguments+=("$argument"); done
  command kubectl "${arguments[@]}"
}
helm() {
  local argument arguments=()
  for argument in "$@"; do [[ "$argument" == --wait ]] || arguments+=("$argument"); done
  helm4 "${arguments[@]}"
}
"#;

/// A tested code block of a page.
#[derive(Debug)]
pub struct Example {
    /// The path of the page.
    pub page: String,
    /// The environment that the block needs.
    pub scene: Scene,
    /// The text that the output must contain.
    pub expected: String,
    block: CodeBlock,
}

/// Returns the tested blocks of all pages, in order on each page.
///
/// # Panics
/// Panics if the repository cannot be read.
#[must_use]
pub fn examples() -> Vec<Example> {
    let tree = Tree::read(&crate::root()).expect("the repository can be read");
    let mut examples = Vec::new();
    for page in tree.files.iter().filter(|file| has_tested_blocks(&file.path)) {
        for block in code_blocks(&page.text) {
            if let Some(Mark::Tested { scene, expected }) = block.mark.clone() {
                examples.push(Example { page: page.path.clone(), scene, expected, block });
            }
        }
    }
    examples
}

/// Creates the directory in which blocks run, with the files that the pages mention.
///
/// # Errors
/// A file cannot be written.
pub fn directory() -> anyhow::Result<TempDir> {
    let directory = tempfile::tempdir()?;
    for name in ["charts", "crds", "deploy"] {
        std::os::unix::fs::symlink(crate::root().join(name), directory.path().join(name))?;
    }
    let sample = std::fs::read_to_string(crate::root().join("deploy/samples/smollm2.yaml"))?;
    std::fs::write(
        directory.path().join("assistant.yaml"),
        sample.replace("name: smollm2", "name: assistant"),
    )?;
    std::fs::write(directory.path().join("keys"), "0123456789abcdef0123456789abcdef team-a\n")?;
    Ok(directory)
}

impl Example {
    /// Runs the code, with the address in it replaced by `address`.
    ///
    /// # Panics
    /// Panics if the code fails, or if its output does not contain the expected text.
    pub fn run_with_server(&self, address: &str) {
        let code = &self.block.code;
        let mut command = match self.block.language.as_str() {
            "sh" => Command::new("bash"),
            "python" => Command::new(python()),
            "js" => Command::new("node"),
            other => panic!("{}: blocks in {other} cannot be tested", self.page),
        };
        match self.block.language.as_str() {
            "js" => command.args(["--input-type=module", "--eval"]),
            _ => command.arg("-c"),
        };
        assert!(code.contains(ADDRESS), "{}: the block does not contain {ADDRESS}: {code}", self.page);
        // Node.js resolves the imported packages relative to this directory.
        command.arg(code.replace(ADDRESS, address)).current_dir(crate::root().join("tests/clients/js"));
        self.assert_output(&mut command);
    }

    /// Runs the code in `directory`. The code starts programs of ovfleet.
    ///
    /// # Panics
    /// Panics if the code fails, or if a program ends without having printed the expected text.
    pub fn run_programs(&self, directory: &Path) {
        let code = format!("{PROGRAMS}{}", self.with_sample_model());
        let mut command = without_settings(Command::new("bash"));
        // If make runs the test, its variables would affect the make that the block runs.
        for name in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MODEL", "REPLICAS", "ARGS"] {
            command.env_remove(name);
        }
        let programs = built("ovfleet-server").expect("the programs are built");
        command
            .args(["-c", &code])
            .env("PROGRAMS", programs.parent().expect("invariant: the path of a program has a directory"))
            .env("ROOT", crate::root())
            .env("EXPECTED", &self.expected)
            .current_dir(directory);
        self.assert_output(&mut command);
    }

    /// Returns the command that starts the server of this block on a free port.
    ///
    /// # Errors
    /// The server has not been built.
    pub fn server(&self) -> anyhow::Result<Command> {
        let binary = built("ovfleet-server")?;
        let directory = binary.parent().context("the path of the program has no directory")?;
        let mut command = without_settings(Command::new("bash"));
        let code = self.with_sample_model().replace("ovfleet-server ", "exec \"$PROGRAMS/ovfleet-server\" ");
        command.args(["-c", &code]).env("PROGRAMS", directory).env("OVFLEET_GRPC_PORT", "0");
        Ok(command)
    }

    /// Runs the code in `directory`, against the API server of `kubeconfig`.
    ///
    /// # Panics
    /// Panics if the code fails, or if its output does not contain the expected text.
    pub fn run_with_api_server(&self, directory: &Path, kubeconfig: &Path) {
        let code = format!("{API_SERVER}{}", self.block.code.replace("NAME", "assistant"));
        self.assert_output(api_command(directory, kubeconfig).args(["-c", &code]));
    }

    /// Whether the block installs the chart.
    #[must_use]
    pub fn installs_the_chart(&self) -> bool {
        self.block.code.contains("helm install ")
    }

    /// Returns the code with the sample model in place of its models, and with free ports.
    fn with_sample_model(&self) -> String {
        let model = crate::sample_model().display().to_string();
        let mut code = self.block.code.replace("target/release/", "");
        for name in ["models/qwen3-4b-q4_k_m.gguf", "model.gguf", "my-model"] {
            code = code.replace(name, &model);
        }
        for port in ["--port 8000", "--port 9000"] {
            code = code.replace(port, "--port 0");
        }
        code.replace("PORT=8080", "PORT=0").replace("--admin-port 8081", "--admin-port 0")
    }

    fn assert_output(&self, command: &mut Command) {
        let Self { page, expected, block, .. } = self;
        let ended = Process::start(command).expect("the block starts").wait(LIMIT).expect("the block ends");
        assert!(
            ended.status.success() && ended.output.contains(expected),
            "{page}:{}: expected {expected}\n{}\n{}",
            block.line,
            block.code,
            ended.output
        );
    }
}

/// The command `bash` in `directory`, with the Kubernetes programs on its `PATH` and the credentials in `kubeconfig`.
///
/// # Panics
/// Panics if kubectl is missing.
#[must_use]
pub fn api_command(directory: &Path, kubeconfig: &Path) -> Command {
    let tools = crate::root().join(".deps/tools/bin");
    let kubectl = Program::Kubectl.find().expect("kubectl is built");
    let path = [tools.as_path(), kubectl.parent().expect("invariant: the path of a program has a directory")]
        .map(|directory| directory.display().to_string())
        .join(":");
    let system = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("bash");
    command
        .env("PATH", format!("{path}:{system}"))
        .env("KUBECONFIG", kubeconfig)
        .env("HOME", directory)
        .current_dir(directory);
    command
}

//! Trials of grammars, each in a separate process that ends when it exceeds its limits. The process is this program
//! with the hidden subcommand `try-grammar`.

use std::io::{self, Read as _, Write as _};
use std::process::{Command, ExitCode, Output, Stdio, exit};
use std::time::Duration;

use anyhow::Context as _;
use server_guidance::{Trial, TrialError, try_grammar};

/// CPU time to compile a form that may be expensive. The server compiles the form only after a separate process has
/// compiled it within this limit. One such form is compiled at a time.
///
/// If exceeded: 400, `invalid_value`.
const TRIAL_CPU_MAX: Duration = Duration::from_secs(2);
/// Memory to compile a form that may be expensive.
///
/// If exceeded: 400, `invalid_value`.
const TRIAL_MEMORY_BYTES_MAX: usize = 256 << 20;
/// Wall-clock time to compile a form that may be expensive, regardless of how much CPU time the compilation receives.
///
/// If exceeded: 400, `invalid_value`.
const TRIAL_TIME_MAX: Duration = Duration::from_secs(60);
/// The interval at which a trial process checks whether it exceeds its limits.
const WATCH_PERIOD: Duration = Duration::from_millis(2);

/// The name of the subcommand.
const SUBCOMMAND: &str = "try-grammar";
/// The exit code for a grammar that cannot be compiled; standard output contains the reason.
const INVALID: u8 = 10;
/// The exit code for a trial that exceeded its limits.
const EXCEEDED: u8 = 11;

/// Runs each trial in a separate process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrialProcesses;

impl Trial for TrialProcesses {
    fn run(&self, request: &[u8]) -> Result<(), TrialError> {
        let output = run_process(request).map_err(|error| {
            TrialError::Failed(format!(
                "failed to check the form of the answer in a separate process: {error:#}"
            ))
        })?;
        match output.status.code().map(|code| code as u8) {
            Some(0) => Ok(()),
            Some(INVALID) => Err(TrialError::Invalid(String::from_utf8_lossy(&output.stdout).into_owned())),
            // A process that runs out of memory or stack before it checks its limits is killed by a signal, so it has
            // no exit code.
            Some(EXCEEDED) | None => Err(TrialError::TooExpensive(format!(
                "takes too much time or memory to compile (limits: {} s of processor time, {} s of elapsed time and {} \
                 MiB of memory)",
                TRIAL_CPU_MAX.as_secs(),
                TRIAL_TIME_MAX.as_secs(),
                TRIAL_MEMORY_BYTES_MAX >> 20
            ))),
            Some(code) => {
                let stderr = String::from_utf8_lossy(&output.stderr);
                Err(TrialError::Failed(format!(
                    "the process that checks the form of the answer exited with code {code}: {stderr}"
                )))
            }
        }
    }
}

fn run_process(request: &[u8]) -> anyhow::Result<Output> {
    // The link points to this program even after its file has been replaced.
    let program = if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe()? };
    let mut child = Command::new(program)
        .arg(SUBCOMMAND)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("failed to start the process")?;
    let mut input = child.stdin.take().context("the process has no standard input")?;
    // The child writes only after it has read everything, so the processes do not wait for each other. If the child has
    // already ended, writing fails, and the child's exit code shows the reason.
    let _ = input.write_all(request);
    drop(input);
    child.wait_with_output().context("failed to wait for the process")
}

/// The error of a trial process whose grammar cannot be compiled. The process has written the reason to standard
/// output.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the grammar cannot be compiled")]
pub(crate) struct InvalidGrammar;

impl InvalidGrammar {
    /// Returns the exit code of the process.
    pub(crate) fn exit_code(self) -> ExitCode {
        ExitCode::from(INVALID)
    }
}

/// Runs a trial in this process. The request is read from standard input. The process exits when it exceeds a limit.
///
/// # Errors
/// The grammar cannot be compiled ([`InvalidGrammar`]), or reading standard input or writing standard output fails.
pub(crate) fn run_trial() -> anyhow::Result<()> {
    let mut request = Vec::new();
    io::stdin().lock().read_to_end(&mut request).context("failed to read standard input")?;
    std::thread::spawn(watch);
    let Err(problem) = try_grammar(&request) else { return Ok(()) };
    io::stdout().lock().write_all(problem.as_bytes()).context("failed to write to standard output")?;
    Err(InvalidGrammar.into())
}

/// Ends this process when it exceeds the limits of a trial.
#[expect(clippy::disallowed_methods, reason = "only the end of the process stops the compilation")]
fn watch() {
    let start = std::time::Instant::now();
    loop {
        let exceeds = memory_bytes().is_some_and(|bytes| bytes > TRIAL_MEMORY_BYTES_MAX)
            || cpu_time() > TRIAL_CPU_MAX
            || start.elapsed() > TRIAL_TIME_MAX;
        if exceeds {
            exit(EXCEEDED.into());
        }
        std::thread::sleep(WATCH_PERIOD);
    }
}

/// Returns the processor time that this process has used.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Returns the resident memory of this process in bytes, or `None` if the system does not report it.
fn memory_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = text.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size())
}

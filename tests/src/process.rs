//! Child processes of a test. Their output is captured, tests wait for them with time limits, and dropping a process
//! kills its whole group.

use std::io::{BufRead as _, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

/// The time between two evaluations of an awaited condition.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Polls `condition` until it returns a value.
///
/// # Errors
/// `condition` returns no value within `limit`. The error describes the condition with `what`.
pub fn await_condition<T>(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Option<T>,
) -> anyhow::Result<T> {
    await_state(what, limit, || Ok(condition()))
}

/// Polls `state` until it returns a value. An error counts as "not yet", because a server may be restarting.
///
/// # Errors
/// `state` returns no value within `limit`. If the last evaluation failed, the message contains its error.
pub fn await_state<T>(
    what: &str,
    limit: Duration,
    state: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    await_state_every(POLL_INTERVAL, what, limit, state)
}

/// Polls `state` like [`await_state`], with `interval` between two evaluations.
///
/// # Errors
/// Returns the same errors as [`await_state`].
pub fn await_state_every<T>(
    interval: Duration,
    what: &str,
    limit: Duration,
    mut state: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let end = Instant::now() + limit;
    loop {
        let last = state();
        if let Ok(Some(value)) = last {
            return Ok(value);
        }
        if Instant::now() > end {
            let error = last.err().map_or_else(String::new, |error| format!(": {error:#}"));
            bail!("timed out after {limit:?} waiting for {what}{error}");
        }
        std::thread::sleep(interval);
    }
}

/// The output of a process so far: the lines of both streams.
#[derive(Debug, Default)]
struct Output {
    state: Mutex<OutputState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct OutputState {
    lines: Vec<String>,
    streams_open: usize,
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, OutputState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A child process in its own process group.
#[derive(Debug)]
pub struct Process {
    child: Child,
    output: Arc<Output>,
    readers: Vec<JoinHandle<()>>,
}

/// The exit status and the output of a process that has ended.
#[derive(Debug)]
pub struct ExitReport {
    /// The exit status of the process.
    pub status: ExitStatus,
    /// The lines of both output streams.
    pub output: String,
}

impl Process {
    /// Starts `command` without input and captures its output.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        use std::os::unix::process::CommandExt as _;
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("failed to start {}", command.get_program().display()))?;
        let output = Arc::new(Output::default());
        let mut readers = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            readers.push(capture(stdout, &output));
        }
        if let Some(stderr) = child.stderr.take() {
            readers.push(capture(stderr, &output));
        }
        Ok(Self { child, output, readers })
    }

    /// The ID of the process and of its group.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The output so far, from both streams.
    #[must_use]
    pub fn output(&self) -> String {
        self.output.lock().lines.join("\n")
    }

    /// Whether the process has ended.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for a line of the output for which `find` returns a value.
    ///
    /// # Errors
    /// The process closes its output, or `limit` passes, before such a line is written.
    pub fn await_line<T>(&self, limit: Duration, find: impl Fn(&str) -> Option<T>) -> anyhow::Result<T> {
        let end = Instant::now() + limit;
        let mut state = self.output.lock();
        let mut seen = 0;
        loop {
            if let Some(value) = state.lines[seen..].iter().find_map(|line| find(line)) {
                return Ok(value);
            }
            seen = state.lines.len();
            let left = end.saturating_duration_since(Instant::now());
            if state.streams_open == 0 || left.is_zero() {
                bail!("the expected line is not in the output:\n{}", state.lines.join("\n"));
            }
            state = self.output.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends `signal` (such as "TERM" or "STOP") to the process.
    ///
    /// # Errors
    /// The process does not exist.
    pub fn signal(&self, signal: &str) -> anyhow::Result<()> {
        kill(signal, &self.id().to_string())
    }

    /// Sends `signal` to all processes of the group, as a terminal does on Ctrl-C.
    ///
    /// # Errors
    /// The group does not exist.
    pub fn signal_group(&self, signal: &str) -> anyhow::Result<()> {
        kill(signal, &format!("-{}", self.id()))
    }

    /// Waits until the process has ended and its output is closed.
    ///
    /// # Errors
    /// The process does not end within `limit`.
    pub fn wait(mut self, limit: Duration) -> anyhow::Result<ExitReport> {
        let status = await_condition("the process to end", limit, || self.child.try_wait().transpose())
            .with_context(|| self.output())??;
        for reader in self.readers.drain(..) {
            // A stream is closed when the last process that inherited it has ended.
            drop(reader.join());
        }
        Ok(ExitReport { status, output: self.output() })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The ID of the process group cannot be reused until the child is reaped, so the signal cannot reach another
        // group.
        if matches!(self.child.try_wait(), Ok(None)) {
            drop(self.signal_group("KILL"));
            drop(self.child.wait());
        }
    }
}

/// Returns the ID and the program name of each descendant of process `id`.
///
/// # Errors
/// `/proc` cannot be read.
pub fn descendants(id: u32) -> anyhow::Result<Vec<(u32, String)>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Ok(child) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        // The process may have ended in the meantime.
        let Some((name, _, parent)) = stat(child) else { continue };
        all.push((child, name, parent));
    }
    let mut descendants = Vec::new();
    let mut parents = vec![id];
    while let Some(parent) = parents.pop() {
        for (child, name, _) in all.iter().filter(|(.., of)| *of == parent) {
            parents.push(*child);
            descendants.push((*child, name.clone()));
        }
    }
    Ok(descendants)
}

/// Whether process `id` is running. A zombie does not count as running.
#[must_use]
pub fn is_running(id: u32) -> bool {
    stat(id).is_some_and(|(_, state, _)| !matches!(state, 'Z' | 'X'))
}

/// Kills process `id` with SIGKILL.
///
/// # Errors
/// The process does not exist.
pub fn kill_process(id: u32) -> anyhow::Result<()> {
    kill("KILL", &id.to_string())
}

/// The program name, the state and the parent ID of a process.
fn stat(id: u32) -> Option<(String, char, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name is in parentheses and may contain any character.
    let (name, rest) = text.split_once('(')?.1.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    Some((name.to_owned(), fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Whether process group `id` has any process.
#[must_use]
pub fn group_exists(id: u32) -> bool {
    kill("0", &format!("-{id}")).is_ok()
}

/// Sends a signal to a process or, with a minus sign before the ID, to a group.
pub(crate) fn kill(signal: &str, target: &str) -> anyhow::Result<()> {
    let status = Command::new("bash")
        .args(["-c", "kill -s \"$1\" -- \"$2\" 2>/dev/null", "kill", signal, target])
        .status()
        .context("failed to run bash")?;
    if !status.success() {
        bail!("failed to send the signal {signal} to {target}, which may have ended");
    }
    Ok(())
}

fn capture(stream: impl Read + Send + 'static, output: &Arc<Output>) -> JoinHandle<()> {
    output.lock().streams_open += 1;
    let output = Arc::clone(output);
    std::thread::spawn(move || {
        for line in BufReader::new(stream).split(b'\n') {
            let Ok(line) = line else { break };
            output.lock().lines.push(String::from_utf8_lossy(&line).into_owned());
            output.changed.notify_all();
        }
        output.lock().streams_open -= 1;
        output.changed.notify_all();
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    fn bash(script: &str) -> Process {
        Process::start(Command::new("bash").args(["-c", script])).expect("bash starts")
    }

    #[test]
    fn captures_output_and_status() {
        let report = bash("echo out; echo err >&2; exit 3").wait(LIMIT).unwrap();
        assert_eq!(report.status.code(), Some(3));
        assert!(report.output.contains("out") && report.output.contains("err"));
    }

    #[test]
    fn awaiting_a_line_fails_when_the_output_ends_without_it() {
        let process = bash("echo one; echo two; exec sleep 60");
        assert_eq!(
            process.await_line(LIMIT, |line| line.strip_prefix("tw").map(str::to_owned)).unwrap(),
            "o"
        );
        let process = bash("echo one");
        assert!(process.await_line(LIMIT, |line| (line == "two").then_some(())).is_err());
    }

    #[test]
    fn dropping_a_process_kills_its_whole_group() {
        let process = bash("sleep 60 & echo started; wait");
        process.await_line(LIMIT, |line| (line == "started").then_some(())).unwrap();
        let group = process.id();
        assert!(group_exists(group));
        drop(process);
        await_condition("the group to end", LIMIT, || (!group_exists(group)).then_some(())).unwrap();
    }
}

//! Child processes that do not outlive their test: output gathered, waiting bounded, killed when dropped.

use std::io::{BufRead as _, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

/// How often a condition is looked at that nobody announces.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Looks at `condition` until it holds.
///
/// # Errors
/// It does not within `limit`; `what` says what was awaited.
pub fn await_condition<T>(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Option<T>,
) -> anyhow::Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        if Instant::now() > end {
            bail!("waited {limit:?} for {what}");
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// What a process has written so far, both streams together, line by line.
#[derive(Debug, Default)]
struct Output {
    written: Mutex<Written>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Written {
    lines: Vec<String>,
    streams_open: usize,
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, Written> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running child in a process group of its own.
#[derive(Debug)]
pub struct Process {
    child: Child,
    output: Arc<Output>,
    readers: Vec<JoinHandle<()>>,
}

/// A process that has ended.
#[derive(Debug)]
pub struct Ended {
    /// How.
    pub status: ExitStatus,
    /// What it wrote, both streams together.
    pub output: String,
}

impl Process {
    /// Starts `command` with its output gathered and no input.
    ///
    /// # Errors
    /// It cannot be started.
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
            readers.push(gather(stdout, &output));
        }
        if let Some(stderr) = child.stderr.take() {
            readers.push(gather(stderr, &output));
        }
        Ok(Self { child, output, readers })
    }

    /// The number of the process, and of its group.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it has written so far.
    #[must_use]
    pub fn output(&self) -> String {
        self.output.lock().lines.join("\n")
    }

    /// Whether it is over.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for a line from which `find` makes something.
    ///
    /// # Errors
    /// The process closes its output, or `limit` passes, before there is one.
    pub fn await_line<T>(&self, limit: Duration, find: impl Fn(&str) -> Option<T>) -> anyhow::Result<T> {
        let end = Instant::now() + limit;
        let mut written = self.output.lock();
        let mut seen = 0;
        loop {
            if let Some(found) = written.lines[seen..].iter().find_map(|line| find(line)) {
                return Ok(found);
            }
            seen = written.lines.len();
            let left = end.saturating_duration_since(Instant::now());
            if written.streams_open == 0 || left.is_zero() {
                bail!("the awaited line is not in the output:\n{}", written.lines.join("\n"));
            }
            written =
                self.output.changed.wait_timeout(written, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends `signal` ("TERM", "INT", "KILL") to the process.
    ///
    /// # Errors
    /// It is gone.
    pub fn signal(&self, signal: &str) -> anyhow::Result<()> {
        kill(signal, &self.id().to_string())
    }

    /// Sends `signal` to the process and all it has started, as a terminal does on Ctrl-C.
    ///
    /// # Errors
    /// They are gone.
    pub fn signal_group(&self, signal: &str) -> anyhow::Result<()> {
        kill(signal, &format!("-{}", self.id()))
    }

    /// Waits for the end of the process and of its output.
    ///
    /// # Errors
    /// It does not end within `limit`.
    pub fn wait(mut self, limit: Duration) -> anyhow::Result<Ended> {
        let status = await_condition("the process to end", limit, || self.child.try_wait().transpose())
            .with_context(|| self.output())??;
        for reader in self.readers.drain(..) {
            // A reader ends with its stream, and that with the last process that holds it.
            drop(reader.join());
        }
        Ok(Ended { status, output: self.output() })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The group still has this number as long as the child has not been waited for.
        if matches!(self.child.try_wait(), Ok(None)) {
            drop(self.signal_group("KILL"));
            drop(self.child.wait());
        }
    }
}

/// The processes that `id` has started, directly or not, each with the name of its program.
///
/// # Errors
/// The system does not tell.
pub fn descendants(id: u32) -> anyhow::Result<Vec<(u32, String)>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Ok(child) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        // It may have ended since.
        let Some((name, _, parent)) = stat(child) else { continue };
        all.push((child, name, parent));
    }
    let mut found = Vec::new();
    let mut parents = vec![id];
    while let Some(parent) = parents.pop() {
        for (child, name, _) in all.iter().filter(|(.., of)| *of == parent) {
            parents.push(*child);
            found.push((*child, name.clone()));
        }
    }
    Ok(found)
}

/// Whether process `id` runs. One that has ended and that nobody has asked after does not.
#[must_use]
pub fn runs(id: u32) -> bool {
    stat(id).is_some_and(|(_, state, _)| !matches!(state, 'Z' | 'X'))
}

/// Ends process `id` without warning.
///
/// # Errors
/// It is gone.
pub fn kill_process(id: u32) -> anyhow::Result<()> {
    kill("KILL", &id.to_string())
}

/// The name of a process's program, its state, and who has started it.
fn stat(id: u32) -> Option<(String, char, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name is in brackets and may hold anything.
    let (name, rest) = text.split_once('(')?.1.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    Some((name.to_owned(), fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Whether any process of group `id` is left.
#[must_use]
pub fn group_exists(id: u32) -> bool {
    kill("0", &format!("-{id}")).is_ok()
}

/// Sends a signal to a process or, with a minus before its number, to a group.
pub(crate) fn kill(signal: &str, target: &str) -> anyhow::Result<()> {
    let status = Command::new("bash")
        .args(["-c", "kill -s \"$1\" -- \"$2\" 2>/dev/null", "kill", signal, target])
        .status()
        .context("failed to run bash")?;
    if !status.success() {
        bail!("no process {target} to send {signal} to");
    }
    Ok(())
}

fn gather(stream: impl Read + Send + 'static, output: &Arc<Output>) -> JoinHandle<()> {
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
    fn gathers_output_and_status() {
        let ended = bash("echo out; echo err >&2; exit 3").wait(LIMIT).unwrap();
        assert_eq!(ended.status.code(), Some(3));
        assert!(ended.output.contains("out") && ended.output.contains("err"));
    }

    #[test]
    fn awaits_a_line_and_notices_when_it_cannot_come() {
        let process = bash("echo one; echo two; exec sleep 60");
        assert_eq!(
            process.await_line(LIMIT, |line| line.strip_prefix("tw").map(str::to_owned)).unwrap(),
            "o"
        );
        let process = bash("echo one");
        assert!(process.await_line(LIMIT, |line| (line == "two").then_some(())).is_err());
    }

    #[test]
    fn a_dropped_process_is_gone_with_all_it_started() {
        let process = bash("sleep 60 & echo started; wait");
        process.await_line(LIMIT, |line| (line == "started").then_some(())).unwrap();
        let group = process.id();
        assert!(group_exists(group));
        drop(process);
        await_condition("the group to be gone", LIMIT, || (!group_exists(group)).then_some(())).unwrap();
    }
}

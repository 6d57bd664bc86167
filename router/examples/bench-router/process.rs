//! Measures the processor time and the memory of a process, as the kernel reports them.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};

/// A child process. Dropping it kills the process.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    /// The command line, which is shown with the results.
    command: String,
}

/// The memory of a process in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    /// The resident memory, including mapped files.
    pub(crate) resident: u64,
    /// The part of the resident memory that the process has allocated itself.
    pub(crate) anonymous: u64,
}

impl Process {
    pub(crate) fn start(mut command: Command) -> anyhow::Result<Self> {
        let text = format!("{command:?}");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Ok(Self { child: child.with_context(|| format!("failed to start {text}"))?, command: text })
    }

    /// Checks that the process is running.
    ///
    /// # Errors
    /// The process has exited.
    pub(crate) fn check(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("the program exited ({status}): {}", self.command),
            None => Ok(()),
        }
    }

    /// The processor time of the existing threads, with nanosecond resolution if the kernel provides it.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        let directory = format!("/proc/{}/task", self.child.id());
        let mut nanoseconds = 0;
        for task in std::fs::read_dir(&directory).with_context(|| format!("failed to list {directory}"))? {
            // A thread may have exited in the meantime.
            let Ok(text) = std::fs::read_to_string(task?.path().join("schedstat")) else { continue };
            let used: u64 = text.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0);
            nanoseconds += used;
        }
        if nanoseconds == 0 { self.cpu_in_ticks() } else { Ok(Duration::from_nanos(nanoseconds)) }
    }

    /// The processor time with a resolution of one hundredth of a second, for kernels that do not report it in
    /// nanoseconds.
    fn cpu_in_ticks(&self) -> anyhow::Result<Duration> {
        const TICKS_PER_SECOND: f64 = 100.0;
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // The name of the process is in parentheses and may itself contain parentheses, so split at the last one.
        let fields: Vec<&str> =
            text.rsplit(") ").next().unwrap_or_default().split_ascii_whitespace().collect();
        let ticks = |at: usize| fields.get(at).and_then(|text| text.parse::<f64>().ok());
        let (user, system) = ticks(11).zip(ticks(12)).context("failed to read the processor time")?;
        Ok(Duration::from_secs_f64((user + system) / TICKS_PER_SECOND))
    }

    pub(crate) fn memory(&self) -> anyhow::Result<Memory> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let kibibytes = line.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok());
            kibibytes.map(|kibibytes| kibibytes * 1024).with_context(|| format!("{name} is missing"))
        };
        Ok(Memory { resident: field("VmRSS:")?, anonymous: field("RssAnon:")? })
    }

    /// The command line of the process.
    pub(crate) fn command(&self) -> &str {
        &self.command
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

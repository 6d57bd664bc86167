//! A process that is measured: what it used of the processor, and what it holds of memory, as the kernel tells.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};

/// A process that we started. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    /// Its command line, for who wants to try it.
    command: String,
}

/// Memory of a process, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    /// All that is in memory, files included.
    pub(crate) resident: u64,
    /// Of it, what it has allocated.
    pub(crate) anonymous: u64,
}

impl Process {
    pub(crate) fn start(mut command: Command) -> anyhow::Result<Self> {
        let text = format!("{command:?}");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Ok(Self { child: child.with_context(|| format!("failed to start {text}"))?, command: text })
    }

    /// Says so if it has ended.
    ///
    /// # Errors
    /// It has.
    pub(crate) fn check(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("it ended ({status}): {}", self.command),
            None => Ok(()),
        }
    }

    /// The processor time that its threads have used, to the nanosecond where the kernel counts so.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        let folder = format!("/proc/{}/task", self.child.id());
        let mut nanoseconds = 0;
        for task in std::fs::read_dir(&folder).with_context(|| format!("failed to list {folder}"))? {
            // A thread may have ended since.
            let Ok(text) = std::fs::read_to_string(task?.path().join("schedstat")) else { continue };
            let used: u64 = text.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0);
            nanoseconds += used;
        }
        if nanoseconds == 0 { self.cpu_in_ticks() } else { Ok(Duration::from_nanos(nanoseconds)) }
    }

    /// The same to the hundredth of a second, for kernels without the other.
    fn cpu_in_ticks(&self) -> anyhow::Result<Duration> {
        const TICKS_PER_SECOND: f64 = 100.0;
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // The name, which may have anything in it, ends with the last bracket.
        let fields: Vec<&str> =
            text.rsplit(") ").next().unwrap_or_default().split_ascii_whitespace().collect();
        let ticks = |at: usize| fields.get(at).and_then(|text| text.parse::<f64>().ok());
        let (user, system) = ticks(11).zip(ticks(12)).context("failed to read a process's time")?;
        Ok(Duration::from_secs_f64((user + system) / TICKS_PER_SECOND))
    }

    pub(crate) fn memory(&self) -> anyhow::Result<Memory> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let kibibytes = line.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok());
            kibibytes.map(|kibibytes| kibibytes * 1024).with_context(|| format!("{name} is not told"))
        };
        Ok(Memory { resident: field("VmRSS:")?, anonymous: field("RssAnon:")? })
    }

    /// How it was started.
    pub(crate) fn command(&self) -> &str {
        &self.command
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

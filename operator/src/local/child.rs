//! A child process. Its output is forwarded with its name, and [`Child::check`] restarts it when it exits. This module
//! decides whether an exit is a permanent failure or a restart may help.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::console::print;
use super::output::{ListenAddresses, ProcessOutput, forward};
use crate::pod::exit_reason;

/// The shortest pause before a restart.
const BACKOFF_MIN: Duration = Duration::from_millis(500);
/// The longest pause before a restart.
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// Run time after which an exit no longer counts as a consecutive failure.
const STABLE_TIME: Duration = Duration::from_secs(30);
/// Number of consecutive times that `ovfleet-operator local` restarts a process that was killed, or exited with code 0,
/// before it was ready for the first time. A process that exits with another code before it was ready is not restarted.
///
/// If exceeded: `ovfleet-operator local` exits with an error.
const FAILURES_MAX: u32 = 5;

/// A program and its arguments.
#[derive(Clone, Debug)]
pub(super) struct Program {
    /// The name under which the output of the process is printed.
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) flags: Vec<String>,
}

/// A child process. It is killed when the value is dropped, and when this process exits in any way.
#[derive(Debug)]
pub(super) struct Child {
    program: Program,
    process: Option<tokio::process::Child>,
    lines: JoinSet<()>,
    output: watch::Receiver<ProcessOutput>,
    started: Instant,
    failures: u32,
    /// Whether the process has ever been ready to serve requests.
    has_worked: bool,
    /// The time at which the process is restarted.
    restart: Option<Instant>,
}

impl Child {
    /// Starts the process. Only the main thread may call this function, because the kernel kills the child when the
    /// calling thread exits.
    pub(super) fn start(program: Program) -> anyhow::Result<Self> {
        let mut child = Self {
            program,
            process: None,
            lines: JoinSet::new(),
            output: watch::channel(ProcessOutput::default()).1,
            started: Instant::now(),
            failures: 0,
            has_worked: false,
            restart: None,
        };
        child.spawn()?;
        Ok(child)
    }

    /// Returns the addresses that the process listens on, if it runs and has logged them.
    pub(super) fn addresses(&self) -> Option<ListenAddresses> {
        self.process.as_ref()?;
        self.output.borrow().addresses
    }

    /// Records that the process has been ready to serve requests, so that a restart may help if it exits.
    pub(super) fn set_worked(&mut self) {
        self.has_worked = true;
    }

    /// Sets the flags for the next start.
    pub(super) fn set_flags(&mut self, flags: Vec<String>) {
        self.program.flags = flags;
    }

    fn spawn(&mut self) -> anyhow::Result<()> {
        let Program { name, path, flags } = &self.program;
        let parent = format!("--parent={}", std::process::id());
        let wrapper = ["die-with-parent".into(), parent.into(), "--".into(), path.clone().into_os_string()];
        // This link points to the running program, even if its file has been replaced.
        let mut process = Command::new("/proc/self/exe")
            .args(wrapper.into_iter().chain(flags.iter().map(OsString::from)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            // Ctrl-C in a terminal signals this process only, which then stops its children in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("failed to start {}", path.display()))?;
        self.started = Instant::now();
        let (sender, output) = watch::channel(ProcessOutput::default());
        if let Some(stream) = process.stdout.take() {
            self.lines.spawn(forward(name.clone(), stream, sender.clone()));
        }
        if let Some(stream) = process.stderr.take() {
            self.lines.spawn(forward(name.clone(), stream, sender));
        }
        self.output = output;
        self.process = Some(process);
        Ok(())
    }

    /// Waits until the process exits, and returns its status and the reason.
    pub(super) async fn wait(&mut self) -> anyhow::Result<(ExitStatus, String)> {
        let process = self.process.as_mut().context("the process is not running")?;
        let status =
            process.wait().await.with_context(|| format!("failed to wait for {}", self.program.name))?;
        Ok((status, self.exit_reason(status).await))
    }

    /// Returns the reason for an exit, from the output of the process or else from its status.
    async fn exit_reason(&mut self, status: ExitStatus) -> String {
        // The last lines may not have been read yet.
        while self.lines.join_next().await.is_some() {}
        let reason = exit_reason(&self.output.borrow().error);
        if reason.is_empty() { status.to_string() } else { reason }
    }

    /// Checks whether the process has exited, and restarts it after a pause.
    ///
    /// # Errors
    /// The process failed, or exited too often, before it was ready for the first time, so it would probably fail again
    /// after a restart; or it could not be restarted.
    pub(super) async fn check(&mut self) -> anyhow::Result<()> {
        if let Some(process) = &mut self.process
            && let Some(status) = process
                .try_wait()
                .with_context(|| format!("failed to read the exit status of {}", self.program.name))?
        {
            self.process = None;
            let reason = self.exit_reason(status).await;
            let name = &self.program.name;
            self.failures = if self.started.elapsed() > STABLE_TIME { 1 } else { self.failures + 1 };
            // A process that was killed may not have failed on its own.
            let has_failed = status.code().is_some_and(|code| code != 0);
            if !self.has_worked && (has_failed || self.failures > FAILURES_MAX) {
                bail!("{name}: {reason}");
            }
            let pause = BACKOFF_MIN.saturating_mul(1 << (self.failures - 1).min(16)).min(BACKOFF_MAX);
            print(&format!("{name} has exited ({reason}) and will be restarted in {pause:?}"));
            self.restart = Some(Instant::now() + pause);
        }
        if self.process.is_none() && self.restart.is_some_and(|restart| restart <= Instant::now()) {
            self.restart = None;
            self.spawn()?;
        }
        Ok(())
    }

    /// Sends SIGTERM to the process, and kills it if it has not exited within `limit`.
    pub(super) async fn stop(&mut self, limit: Duration) {
        self.restart = None;
        let Some(process) = &mut self.process else { return };
        let pid = process.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        // The process may have exited already.
        let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
        if tokio::time::timeout(limit, process.wait()).await.is_err() {
            print(&format!("{} did not exit within {limit:?}: killing it", self.program.name));
            let _ = process.kill().await;
        }
        self.process = None;
        while self.lines.join_next().await.is_some() {}
    }
}

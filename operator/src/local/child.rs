//! A child process: its lines under its name, started again when it ends, asked to end and killed if it does not. It
//! decides what an end means: whether the same would happen again, or another start may help.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::lines::{Listens, Said, pass_on};
use super::say;
use crate::pod::last_words;

/// The pauses before it is started again: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
/// Having run for so long, it is not counted among those that fail in a row.
const WORKED: Duration = Duration::from_secs(30);
/// Number of consecutive times that `operator local` restarts a process that was killed, or exited with code 0,
/// before it ever worked. A process that exits with another code before it ever worked is not restarted.
///
/// Beyond it: `operator local` ends with an error.
const FAILURES_MAX: u32 = 5;

/// What to run.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) flags: Vec<String>,
}

/// A child process. Dropping it kills it, and so does the end of this process, however it comes.
#[derive(Debug)]
pub(super) struct Child {
    program: Program,
    process: Option<tokio::process::Child>,
    lines: JoinSet<()>,
    said: watch::Receiver<Said>,
    started: Instant,
    failures: u32,
    /// Whether it has ever done what it is for.
    has_worked: bool,
    /// When it is to be started again.
    again: Option<Instant>,
}

impl Child {
    /// Starts it. To be called by the thread that lives as long as this process, as the child ends with that thread.
    pub(super) fn start(program: Program) -> anyhow::Result<Self> {
        let mut child = Self {
            program,
            process: None,
            lines: JoinSet::new(),
            said: watch::channel(Said::default()).1,
            started: Instant::now(),
            failures: 0,
            has_worked: false,
            again: None,
        };
        child.spawn()?;
        Ok(child)
    }

    /// Where it listens, if it runs and has said so.
    pub(super) fn listens(&self) -> Option<Listens> {
        self.process.as_ref()?;
        self.said.borrow().listens
    }

    /// It was seen doing what it is for, so if it ends, another start may help.
    pub(super) fn works(&mut self) {
        self.has_worked = true;
    }

    /// From the next start on it has these flags.
    pub(super) fn set_flags(&mut self, flags: Vec<String>) {
        self.program.flags = flags;
    }

    fn spawn(&mut self) -> anyhow::Result<()> {
        let Program { name, path, flags } = &self.program;
        let parent = format!("--parent={}", std::process::id());
        let tether = ["tether".into(), parent.into(), "--".into(), path.clone().into_os_string()];
        // This very program, even if its file has been replaced meanwhile.
        let mut process = Command::new("/proc/self/exe")
            .args(tether.into_iter().chain(flags.iter().map(OsString::from)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            // A terminal's interrupt is for this process; children are told in their turn.
            .process_group(0)
            .spawn()
            .with_context(|| format!("failed to start {}", path.display()))?;
        self.started = Instant::now();
        let (sender, said) = watch::channel(Said::default());
        if let Some(stream) = process.stdout.take() {
            self.lines.spawn(pass_on(name.clone(), stream, sender.clone()));
        }
        if let Some(stream) = process.stderr.take() {
            self.lines.spawn(pass_on(name.clone(), stream, sender));
        }
        self.said = said;
        self.process = Some(process);
        Ok(())
    }

    /// Waits until it has ended, and gives how and, if it told, why.
    pub(super) async fn wait(&mut self) -> anyhow::Result<(ExitStatus, String)> {
        let process = self.process.as_mut().context("it does not run")?;
        let status = process.wait().await.context("failed to wait for a process")?;
        Ok((status, self.why(status).await))
    }

    /// Why it has ended, in its own words if it had any.
    async fn why(&mut self, status: ExitStatus) -> String {
        // Its last words may still be on their way.
        while self.lines.join_next().await.is_some() {}
        let words = last_words(&self.said.borrow().error);
        if words.is_empty() { status.to_string() } else { words }
    }

    /// Looks whether it runs, and starts it again if it does not.
    ///
    /// # Errors
    /// It has ended by itself before it ever worked, and so would do it again.
    pub(super) async fn look(&mut self) -> anyhow::Result<()> {
        if let Some(process) = &mut self.process
            && let Some(status) = process.try_wait().context("failed to look at a process")?
        {
            self.process = None;
            let why = self.why(status).await;
            let name = &self.program.name;
            self.failures = if self.started.elapsed() > WORKED { 1 } else { self.failures + 1 };
            // It had the choice, unlike one that was killed.
            let has_refused = status.code().is_some_and(|code| code != 0);
            if !self.has_worked && (has_refused || self.failures > FAILURES_MAX) {
                bail!("{name}: {why}");
            }
            let pause = PAUSES.0.saturating_mul(1 << (self.failures - 1).min(16)).min(PAUSES.1);
            say(&format!("{name} has ended ({why}); it is started again in {pause:?}"));
            self.again = Some(Instant::now() + pause);
        }
        if self.process.is_none() && self.again.is_some_and(|again| again <= Instant::now()) {
            self.again = None;
            self.spawn()?;
        }
        Ok(())
    }

    /// Asks it to end, and kills it if it has not within `limit`.
    pub(super) async fn end(&mut self, limit: Duration) {
        self.again = None;
        let Some(process) = &mut self.process else { return };
        let pid = process.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        // It may have ended by now.
        let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
        if tokio::time::timeout(limit, process.wait()).await.is_err() {
            say(&format!("{} does not end: it is killed", self.program.name));
            let _ = process.kill().await;
        }
        self.process = None;
        while self.lines.join_next().await.is_some() {}
    }
}

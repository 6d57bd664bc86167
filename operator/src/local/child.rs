//! A child process: its lines under its name, started again when it ends, asked to end and killed if it does not.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;
use tokio::task::JoinSet;

use super::say;

/// The pauses before it is started again: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
/// Having run for so long, it counts as having worked.
const WORKED: Duration = Duration::from_secs(30);
/// Starts in a row that may fail before it is given up.
const FAILURES_MAX: u32 = 5;
/// Time in which a process answers a probe.
const PROBE_LIMIT: Duration = Duration::from_secs(2);
/// Bytes of a line that is passed on.
const LINE_BYTES_MAX: usize = 64 << 10;

/// What to run.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) flags: Vec<String>,
}

/// A child process. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Child {
    program: Program,
    process: Option<tokio::process::Child>,
    lines: JoinSet<()>,
    started: Instant,
    failures: u32,
    /// When it is to be started again.
    again: Option<Instant>,
    probe: Option<SocketAddr>,
    is_ready: bool,
    client: reqwest::Client,
}

impl Child {
    pub(super) fn start(program: Program) -> anyhow::Result<Self> {
        let mut child = Self {
            program,
            process: None,
            lines: JoinSet::new(),
            started: Instant::now(),
            failures: 0,
            again: None,
            probe: None,
            is_ready: false,
            client: crate::fleet::client(),
        };
        child.spawn()?;
        Ok(child)
    }

    /// It is asked at `address` whether it is ready.
    pub(super) fn probed(mut self, address: SocketAddr) -> Self {
        self.probe = Some(address);
        self
    }

    pub(super) fn is_ready(&self) -> bool {
        self.is_ready
    }

    fn spawn(&mut self) -> anyhow::Result<()> {
        let Program { name, path, flags } = &self.program;
        let mut process = Command::new(path)
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            // A terminal's interrupt is for this process; children are told in their turn.
            .process_group(0)
            .spawn()
            .with_context(|| format!("failed to start {}", path.display()))?;
        self.started = Instant::now();
        if let Some(stream) = process.stdout.take() {
            self.lines.spawn(pass_on(name.clone(), stream));
        }
        if let Some(stream) = process.stderr.take() {
            self.lines.spawn(pass_on(name.clone(), stream));
        }
        self.process = Some(process);
        Ok(())
    }

    /// Waits until it has ended.
    pub(super) async fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        let process = self.process.as_mut().context("it does not run")?;
        let status = process.wait().await.context("failed to wait for a process")?;
        while self.lines.join_next().await.is_some() {}
        Ok(status)
    }

    /// Looks whether it runs, starts it again if it does not, and asks whether it is ready.
    ///
    /// # Errors
    /// It ends time and again.
    pub(super) async fn look(&mut self) -> anyhow::Result<()> {
        if let Some(process) = &mut self.process
            && let Some(status) = process.try_wait().context("failed to look at a process")?
        {
            self.process = None;
            self.is_ready = false;
            self.failures = if self.started.elapsed() > WORKED { 1 } else { self.failures + 1 };
            let name = &self.program.name;
            if self.failures > FAILURES_MAX {
                bail!("{name} ended {} times in a row ({status})", self.failures);
            }
            let pause = PAUSES.0.saturating_mul(1 << (self.failures - 1)).min(PAUSES.1);
            say(&format!("{name} has ended ({status}); it is started again in {pause:?}"));
            self.again = Some(Instant::now() + pause);
        }
        if self.process.is_none() && self.again.is_some_and(|again| again <= Instant::now()) {
            self.again = None;
            self.spawn()?;
        }
        if let (Some(address), true) = (self.probe, self.process.is_some()) {
            let request = self.client.get(format!("http://{address}/v2/health/ready")).timeout(PROBE_LIMIT);
            self.is_ready = request.send().await.is_ok_and(|answer| answer.status().is_success());
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

/// Passes lines on, with the name of whom they are of.
async fn pass_on(name: String, stream: impl tokio::io::AsyncRead + Unpin) {
    let mut reader = BufReader::with_capacity(LINE_BYTES_MAX, stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        // What is longer than the buffer comes in pieces.
        match reader.fill_buf().await {
            Ok([]) | Err(_) => return,
            Ok(bytes) => {
                let end = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |at| at + 1);
                line.extend_from_slice(&bytes[..end]);
                reader.consume(end);
            }
        }
        if !line.ends_with(b"\n") {
            // The rest of it follows.
            let mut rest = Vec::new();
            let _ = tokio::io::AsyncReadExt::take(&mut reader, LINE_BYTES_MAX as u64)
                .read_until(b'\n', &mut rest)
                .await;
            line.extend_from_slice(&rest);
        }
        eprintln!("{name} | {}", String::from_utf8_lossy(&line).trim_end());
    }
}

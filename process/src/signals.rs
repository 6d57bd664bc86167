//! Handles the signals that terminate a process.

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Receives the signals that terminate the process: SIGTERM, SIGINT and, with [`Self::of_terminal`], SIGHUP.
#[derive(Debug)]
pub struct EndSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Option<Signal>,
}

impl EndSignals {
    /// Handles SIGTERM and SIGINT from now on. Must be called within a Tokio runtime.
    ///
    /// # Errors
    /// The signal handlers cannot be installed.
    pub fn new() -> anyhow::Result<Self> {
        let handle = |kind| signal(kind).context("failed to install a signal handler");
        let (terminate, interrupt) = (handle(SignalKind::terminate())?, handle(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt, hangup: None })
    }

    /// Handles SIGTERM, SIGINT and SIGHUP, which a process receives when its terminal is closed. Must be called within
    /// a Tokio runtime.
    ///
    /// # Errors
    /// The signal handlers cannot be installed.
    pub fn of_terminal() -> anyhow::Result<Self> {
        let hangup = signal(SignalKind::hangup()).context("failed to install a signal handler")?;
        Ok(Self { hangup: Some(hangup), ..Self::new()? })
    }

    /// Waits for the next of these signals.
    ///
    /// # Cancel safety
    /// No signal is lost if the future is dropped.
    pub async fn next(&mut self) {
        let Self { terminate, interrupt, hangup } = self;
        let hung_up = async {
            match hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hung_up => {}
        }
    }
}

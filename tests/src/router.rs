//! Runs the real router as a child process.

use std::process::Command;

use anyhow::Context as _;

use crate::process::{ExitReport, Process, await_condition};
use crate::server::{START_LIMIT, STOP_LIMIT, Server, address, built, probe, without_settings};

/// A router that is ready. Dropping it kills its process.
#[derive(Debug)]
pub struct Router {
    process: Process,
    address: String,
}

/// The router argument that adds `server` as a replica, with the port of the server's load reports.
#[must_use]
pub fn replica(server: &Server) -> String {
    let grpc = server.grpc_address();
    format!("--replica={}/{}", server.address(), grpc.rsplit(':').next().unwrap_or_default())
}

/// The command for a router with `arguments` on a free port, without ovfleet's variables in its environment.
///
/// # Errors
/// The router has not been built.
pub fn command(arguments: &[String]) -> anyhow::Result<Command> {
    let mut command = without_settings(Command::new(built("ovfleet-router")?));
    command.args(["--host", "127.0.0.1", "--port", "0"]).args(arguments);
    Ok(command)
}

impl Router {
    /// Starts a router with `arguments` and waits until it is ready.
    ///
    /// # Errors
    /// The router does not become ready within [`START_LIMIT`].
    pub fn start(arguments: &[String]) -> anyhow::Result<Self> {
        Self::from_command(&mut command(arguments)?)
    }

    /// Starts `command`, which runs a router on a free port, and waits until it is ready.
    ///
    /// # Errors
    /// The router does not become ready within [`START_LIMIT`].
    pub fn from_command(command: &mut Command) -> anyhow::Result<Self> {
        let process = Process::start(command)?;
        let address = process.await_line(START_LIMIT, address)?;
        let router = Self { process, address };
        await_condition("the router to be ready", START_LIMIT, || {
            probe(&router.address, "/v2/health/ready").is_ok_and(|status| status == 200).then_some(())
        })
        .with_context(|| router.process.output())?;
        Ok(router)
    }

    /// The URL of `path` on this router.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The host and port that the router listens on.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The process of the router.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Waits until the process has ended.
    ///
    /// # Errors
    /// The process does not end within [`STOP_LIMIT`].
    pub fn wait(self) -> anyhow::Result<ExitReport> {
        self.process.wait(STOP_LIMIT)
    }
}

//! The real router as a child process, in front of servers.

use std::process::Command;

use anyhow::Context as _;

use crate::process::{Ended, Process, await_condition};
use crate::server::{START_LIMIT, STOP_LIMIT, Server, address, built, probe, without_settings};

/// A router that is ready. Dropping it kills it.
#[derive(Debug)]
pub struct Router {
    process: Process,
    address: String,
}

/// A server as an argument of the router: its address, and the port of its load reports.
#[must_use]
pub fn replica(server: &Server) -> String {
    let grpc = server.grpc_address();
    format!("--replica={}/{}", server.address(), grpc.rsplit(':').next().unwrap_or_default())
}

/// A router on a free port, with `arguments`, without those that the environment holds.
///
/// # Errors
/// The router has not been built.
pub fn command(arguments: &[String]) -> anyhow::Result<Command> {
    let mut command = without_settings(Command::new(built("router")?));
    command.args(["--host", "127.0.0.1", "--port", "0"]).args(arguments);
    Ok(command)
}

impl Router {
    /// Starts a router with `arguments` and waits until it is ready.
    ///
    /// # Errors
    /// It does not become ready within [`START_LIMIT`].
    pub fn start(arguments: &[String]) -> anyhow::Result<Self> {
        Self::from_command(&mut command(arguments)?)
    }

    /// Starts `command`, which runs a router on a free port, and waits until it is ready.
    ///
    /// # Errors
    /// It does not become ready within [`START_LIMIT`].
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

    /// `path` on this router.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Host and port it listens on.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The process.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Waits for its end, once something has made it end.
    ///
    /// # Errors
    /// It goes on.
    pub fn wait(self) -> anyhow::Result<Ended> {
        self.process.wait(STOP_LIMIT)
    }
}

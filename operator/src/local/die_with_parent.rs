//! Executes a program that the kernel kills when the parent process exits in any way. A process can request this only
//! for itself, so `ovfleet-operator local` starts this subcommand, which then replaces itself with the program.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context as _, ensure};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::args::DieWithParentArgs;

/// Replaces this process with the program. Returns only if that fails.
///
/// # Errors
/// The program cannot be executed, or the parent process has already exited.
pub(crate) fn run(args: DieWithParentArgs) -> anyhow::Result<()> {
    let DieWithParentArgs { parent, command } = args;
    set_parent_process_death_signal(Some(Signal::KILL)).context("failed to set the parent-death signal")?;
    // The parent may have exited before the signal was set.
    let present = getppid().map(|parent| parent.as_raw_nonzero().get());
    ensure!(present == Some(parent), "the parent process {parent} has exited");
    let (program, flags) = command.split_first().context("no program is given")?;
    let error = Command::new(program).args(flags).exec();
    Err(error).with_context(|| format!("failed to start {}", program.display()))
}

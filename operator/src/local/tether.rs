//! Becoming a program that does not outlive whoever started it: the kernel kills it when that process is gone, however
//! it went. This is a step between, run by this very binary, because what the kernel is told holds for whoever tells it.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context as _, ensure};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::args::TetherArgs;

/// Becomes the program. It returns only if that fails.
///
/// # Errors
/// There is no such program, or whoever started this has gone already.
pub(crate) fn run(args: TetherArgs) -> anyhow::Result<()> {
    let TetherArgs { parent, command } = args;
    set_parent_process_death_signal(Some(Signal::KILL)).context("failed to be tied to another process")?;
    // It may have gone before that was known.
    let present = getppid().map(|parent| parent.as_raw_nonzero().get());
    ensure!(present == Some(parent), "the process {parent} that started this has gone");
    let (program, flags) = command.split_first().context("there is no program to run")?;
    let error = Command::new(program).args(flags).exec();
    Err(error).with_context(|| format!("failed to start {}", program.display()))
}

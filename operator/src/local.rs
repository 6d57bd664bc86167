//! One resource on this machine.

use crate::args::LocalArgs;

/// Runs it.
///
/// # Errors
/// It cannot.
pub(crate) async fn run(_: LocalArgs) -> anyhow::Result<()> {
    anyhow::bail!("not yet")
}

//! Messages to the user on standard output.

use std::io::Write as _;

/// Prints a line for the user.
pub(super) fn print(text: &str) {
    // A closed standard output is no reason to stop the replicas.
    let _ = writeln!(std::io::stdout(), "{text}");
}

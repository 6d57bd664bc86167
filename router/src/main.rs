//! The router's process.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::SUCCESS
}

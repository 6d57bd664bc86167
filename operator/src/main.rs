//! The operator's process: parse the arguments, run, tell what went wrong.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match operator::Args::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The chain of causes, once, on one line.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

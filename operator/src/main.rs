//! The process of the operator: it parses the arguments, runs, and prints the error if it fails.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match operator::Args::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The alternate format prints the error with its sources on one line.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

//! The entry point of the operator. It parses the arguments, runs the subcommand, and prints the
//! error if that fails.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match operator::Args::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The alternate format prints the error and its causes on one line.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

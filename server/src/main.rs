//! The process of the server: parses the arguments, runs the server, and reports errors.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match server::Args::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Print the chain of causes on one line.
            eprintln!("error: {error:#}");
            server::exit_code(&error)
        }
    }
}

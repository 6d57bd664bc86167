//! The server's process: parse the arguments, run, tell what went wrong.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match server::Args::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The chain of causes, once, on one line.
            eprintln!("error: {error:#}");
            server::exit_code(&error)
        }
    }
}

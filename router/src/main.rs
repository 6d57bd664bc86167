//! The router's process: parse the arguments, run, tell what went wrong.

use std::process::ExitCode;

fn main() -> ExitCode {
    match router::CommandLine::new(std::env::args_os()).run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The chain of causes, once, on one line.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

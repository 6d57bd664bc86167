//! The router's process: parses the arguments, runs the router, and reports errors.

use std::process::ExitCode;

/// Unlike glibc's allocator, this one returns the memory of a burst of large bodies to the operating system.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match router::CommandLine::new(std::env::args_os()).run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Print the chain of causes once, on one line.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

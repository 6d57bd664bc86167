//! Compares routing policies with the same traffic in virtual time. The replicas run the server's own scheduler.
//!
//! A run depends only on its seed: it uses no clock and no network, and its result does not depend on threads. `make
//! bench-policies` prints the table, and `--update` also writes it to `docs/performance/results.md`. The tests of this
//! example run fewer requests and check the targets of the default policy.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints a table")]

use std::process::ExitCode;

use arena::{Arena, Competitor};
use table::Table;

mod arena;
mod engine;
mod fleet;
mod routers;
mod table;
mod workload;

#[cfg(test)]
mod tests;

const USAGE: &str = "usage: bench-policies [--seeds N] [--requests N] [--update]";

struct Args {
    seeds: u64,
    requests: usize,
    update: bool,
}

fn main() -> ExitCode {
    let args = match args(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(message) => {
            eprintln!("error: {message}\n{USAGE}");
            return ExitCode::FAILURE;
        }
    };
    let arena = Arena { replicas: 8, requests: args.requests, seeds: (1..=args.seeds).collect() };
    let table = Table::new(&arena, Competitor::all());
    println!("{}", table.markdown());
    if args.update
        && let Err(message) = table::update(&table.markdown())
    {
        eprintln!("error: {message}");
        return ExitCode::FAILURE;
    }
    let missed = table.missed();
    for target in &missed {
        eprintln!("missed: {target}");
    }
    if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn args(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut args = Args { seeds: 5, requests: 3000, update: false };
    while let Some(word) = words.next() {
        let mut number = || {
            let value = words.next().ok_or(format!("{word} must be followed by a number"))?;
            value
                .parse::<u64>()
                .ok()
                .filter(|&value| value > 0)
                .ok_or(format!("{word} must be a positive number, not {value:?}"))
        };
        match word.as_str() {
            "--seeds" => args.seeds = number()?,
            "--requests" => args.requests = number()? as usize,
            "--update" => args.update = true,
            _ => return Err(format!("unknown argument {word:?}")),
        }
    }
    Ok(args)
}

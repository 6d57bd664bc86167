//! Compares routing policies with the same traffic in virtual time. The replicas run the server's own scheduler.
//!
//! The results depend only on the arguments: they do not depend on the clock or on the number of threads, and no
//! network is used. `make bench-policies` prints the tables, and `--update` also writes them to
//! `docs/performance/results.md`. The tests of this example run fewer requests and check the targets of the default
//! policy.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints a table")]

use std::process::ExitCode;

use clap::Parser as _;
use clap::builder::RangedU64ValueParser;

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

const RESULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/performance/results.md");

/// Compares routing policies with the same traffic in virtual time.
#[derive(Debug, clap::Parser)]
#[command(name = "bench-policies")]
struct Args {
    /// The number of seeds. Each figure is the median over the seeds.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// The number of requests of each kind of traffic.
    #[arg(long, default_value_t = 3000, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    requests: usize,
    /// Write the tables to docs/performance/results.md.
    #[arg(long)]
    update: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let arena = Arena { replicas: 8, requests: args.requests, seeds: (1..=args.seeds).collect() };
    let table = Table::new(&arena, Competitor::all());
    println!("{}", table.markdown());
    if args.update
        && let Err(error) =
            process::reference::update_section(RESULTS.as_ref(), "bench-policies", &table.markdown())
    {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    let missed = table.missed();
    for target in &missed {
        eprintln!("missed: {target}");
    }
    if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

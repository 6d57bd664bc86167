//! Measures the cost of the router, in comparison with two other routers, a forwarder and no router, in a single run.
//!
//! ```text
//! load (this thread) ─► ovfleet | vllm-router | sglang-router | forwarder | nothing ─► upstream (a thread) ─► load
//! ```
//!
//! Every case runs against each contender in turn, in an order that rotates from round to round. Except for memory,
//! which is measured once, the figures are medians of the rounds. The processor time is that of the router, according
//! to the kernel. The added latency is the latency of the load through the router minus its latency without a router,
//! in the same round. `make bench-router` runs the benchmark; `--update` writes the tables into
//! `docs/performance/results.md`.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints tables")]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser as _;
use rustix::process::{Resource, getrlimit, setrlimit};

use contender::Name;
use rounds::Case;

mod answer;
mod client;
mod contender;
mod forward;
mod load;
mod process;
mod report;
mod rounds;
mod table;
mod upstream;

/// Compares the router with other routers, in front of replicas that answer immediately.
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "bench-router")]
struct Args {
    /// The number of rounds. Each figure is the median over the rounds.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The duration of each case in each round, in seconds.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// The number of replicas behind the router.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    replicas: u32,
    /// Prefixes of the names of the cases to run. Default: all cases.
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// The routers to run, in addition to the run without a router.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Name::Ovfleet, Name::Vllm, Name::Sglang, Name::Forward])]
    routers: Vec<Name>,
    /// The path of the router's executable.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/release/ovfleet-router"))]
    router: PathBuf,
    /// The Python interpreter for which the other routers are installed.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../.deps/venv-routers/bin/python"))]
    python: PathBuf,
    /// The number of silent streams while memory is measured. The number is reduced if the limit on open files is too
    /// low.
    #[arg(long, default_value_t = 10_000)]
    streams: usize,
    /// The number of replicas behind the router while memory is measured.
    #[arg(long, default_value_t = 100)]
    memory_replicas: u32,
    /// Write the tables to docs/performance/results.md.
    #[arg(long)]
    update: bool,
    /// Fail if a figure does not meet its requirement.
    #[arg(long)]
    strict: bool,
    /// Run the forwarder on this port.
    #[arg(long, hide = true, requires = "forward_to")]
    forward: Option<u16>,
    /// The targets of the forwarder.
    #[arg(long, hide = true, value_delimiter = ',')]
    forward_to: Vec<SocketAddr>,
}

impl Args {
    fn time(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }

    fn cases(&self) -> Vec<Case> {
        let wanted = |case: &Case| {
            self.cases.is_empty() || self.cases.iter().any(|name| case.name().starts_with(name.as_str()))
        };
        Case::ALL.into_iter().filter(wanted).collect()
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns whether all requirements are met. Without `--strict`, returns `true` in any case.
fn run(args: &Args) -> anyhow::Result<bool> {
    raise_file_limit()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if let Some(port) = args.forward {
        return runtime.block_on(forward::run(port, args.forward_to.as_slice().into())).map(|()| true);
    }
    let results = runtime.block_on(rounds::run(args))?;
    let (text, is_good) = table::markdown(args, &results)?;
    println!("{text}");
    if args.update {
        let results = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/performance/results.md");
        ::process::reference::update_section(results.as_ref(), "bench-router", &text)?;
    }
    Ok(is_good || !args.strict)
}

/// Raises the limit on open files, which child processes inherit.
fn raise_file_limit() -> anyhow::Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    Ok(setrlimit(Resource::Nofile, limit)?)
}

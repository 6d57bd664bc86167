//! What the router costs, beside two others and beside none, in one run.
//!
//! ```text
//! load (this thread) ─► ovfleet | vllm-router | sglang-router | forwarder | nothing ─► upstream (a thread) ─► load
//! ```
//!
//! Every case runs against each contender in turns, in an order that turns from round to round; figures are medians of
//! the rounds. What counts as processor time is the router's own, as the kernel accounts it; what counts as added
//! latency is what the same load takes through the router less what it takes directly, in the same round.
//! `make bench-router` runs it; `--update` writes the tables into `docs/performance/results.md`.
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

/// Compares the router with others in front of a replica that answers at once.
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "bench-router")]
struct Args {
    /// Rounds; figures are their medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds that each case runs in each round.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// Replicas behind the router.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    replicas: u32,
    /// The cases to run, by the beginnings of their names; all without it.
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// The routers to run, beside the direct way.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Name::Ovfleet, Name::Vllm, Name::Sglang, Name::Forward])]
    routers: Vec<Name>,
    /// Our router.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/release/router"))]
    router: PathBuf,
    /// The Python that the others are installed for.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../.deps/venv-routers/bin/python"))]
    python: PathBuf,
    /// Streams that are open and silent while memory is looked at; fewer if the process may not have as many files.
    #[arg(long, default_value_t = 10_000)]
    streams: usize,
    /// Replicas behind the router while memory is looked at.
    #[arg(long, default_value_t = 100)]
    memory_replicas: u32,
    /// Put the tables into docs/performance/results.md.
    #[arg(long)]
    update: bool,
    /// Fail if a figure is not as wanted.
    #[arg(long)]
    strict: bool,
    /// Be the process that only passes bytes on, at this port,
    #[arg(long, hide = true, requires = "forward_to")]
    forward: Option<u16>,
    /// to these.
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

/// Whether all is as wanted, or nobody asked for that.
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
        table::update(&text)?;
    }
    Ok(is_good || !args.strict)
}

/// Connections are files, and those that we start inherit what we may have.
fn raise_file_limit() -> anyhow::Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    Ok(setrlimit(Resource::Nofile, limit)?)
}

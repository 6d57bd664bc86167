//! Runs every case against every contender in each round, and collects the samples.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::Args;
use crate::client::{Kind, RequestTimes};
use crate::contender::{Contender, Name};
use crate::load::{self, Clients, PacedStreams};
use crate::process::Memory;
use crate::upstream::Upstream;

/// The number of requests per second in the cases with a fixed rate.
const RATE: u32 = 500;
/// The number of concurrent paced streams.
const PACED_STREAMS: usize = 256;
/// The number of clients that disconnect in a round.
pub(crate) const LEAVING: usize = 10;

/// A case of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Case {
    /// Whole answers for this number of clients, each of which sends the next request immediately.
    Json(usize),
    /// Short streams for this number of clients.
    Stream(usize),
    /// Whole answers at a fixed rate.
    JsonRate,
    /// Short streams at a fixed rate.
    StreamRate,
    /// Paced streams.
    Paced,
    /// Clients that disconnect while their streams are silent.
    Leave,
}

impl Case {
    pub(crate) const ALL: [Self; 10] = [
        Self::Json(1),
        Self::Json(32),
        Self::Json(256),
        Self::Stream(1),
        Self::Stream(32),
        Self::Stream(256),
        Self::JsonRate,
        Self::StreamRate,
        Self::Paced,
        Self::Leave,
    ];

    /// The name on the command line.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Json(clients) => format!("json-{clients}"),
            Self::Stream(clients) => format!("stream-{clients}"),
            Self::JsonRate => "rate-json".to_owned(),
            Self::StreamRate => "rate-stream".to_owned(),
            Self::Paced => "paced".to_owned(),
            Self::Leave => "leave".to_owned(),
        }
    }
}

/// The result of a case in seconds. For streams at a fixed rate, the latency is the time until the first byte of the
/// body. For clients that disconnect, `p99` is the longest time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    /// The processor time of the router per request, or per event of paced streams.
    pub(crate) cpu: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

/// All measurements.
#[derive(Debug, Default)]
pub(crate) struct Results {
    /// The samples by case and contender (`None` without a router), and then by round. A round in which the contender
    /// failed has no sample.
    pub(crate) samples: BTreeMap<(Case, Option<usize>), BTreeMap<usize, Sample>>,
    /// The memory of each router without streams and with `streams` streams, or `None` if the measurement failed.
    pub(crate) memory: Vec<Option<(Memory, Memory)>>,
    pub(crate) streams: usize,
}

/// Runs all rounds.
pub(crate) async fn run(args: &Args) -> anyhow::Result<Results> {
    let mut results = Results::default();
    let cases = args.cases();
    if !cases.is_empty() {
        let mut upstream = Upstream::start(args.replicas).await?;
        let mut contenders = vec![(None, Contender::direct(&upstream))];
        for (index, &name) in args.routers.iter().enumerate() {
            contenders.push((Some(index), Contender::start(name, args, &upstream).await?));
        }
        for round in 0..args.rounds as usize {
            for &case in &cases {
                for turn in 0..contenders.len() {
                    let count = contenders.len();
                    let (index, contender) = &mut contenders[(turn + round) % count];
                    let sample = match sample(args, case, contender, &mut upstream).await {
                        Ok(Some(sample)) => sample,
                        Ok(None) => continue,
                        // Do not end the benchmark: the figures of this router are the medians of its other samples.
                        Err(error) if contender.is_another() => {
                            eprintln!("  {:12} {} failed: {error:#}", case.name(), contender.text());
                            continue;
                        }
                        Err(error) => return Err(error),
                    };
                    eprintln!(
                        "  {:12} round {}  {:14} {:8.1} us of processor time, p50 {:9.1} us, p99 {:9.1} us",
                        case.name(),
                        round + 1,
                        contender.text(),
                        sample.cpu * 1e6,
                        sample.p50 * 1e6,
                        sample.p99 * 1e6
                    );
                    results.samples.entry((case, *index)).or_default().insert(round, sample);
                }
            }
        }
    }
    if args.cases.is_empty() || args.cases.iter().any(|name| name == "memory") {
        memory(args, &mut results).await?;
    }
    Ok(results)
}

/// Runs one case against one contender. Returns `None` if the case needs a router and there is none.
async fn sample(
    args: &Args,
    case: Case,
    contender: &mut Contender,
    upstream: &mut Upstream,
) -> anyhow::Result<Option<Sample>> {
    let targets = contender.targets.clone();
    Ok(Some(match case {
        Case::Json(count) | Case::Stream(count) => {
            let kind = if matches!(case, Case::Json(_)) { Kind::Json } else { Kind::Stream };
            let clients = Clients::connect(&targets, count, kind).await?;
            let (took, cpu) = measured(contender, clients.ask_for(args.time())).await?;
            summary(took.into_iter().map(|took| took.whole), cpu)
        }
        Case::JsonRate | Case::StreamRate => {
            let kind = if case == Case::JsonRate { Kind::Json } else { Kind::Stream };
            let clients = Clients::connect(&targets, 8, kind).await?;
            let (took, cpu) = measured(contender, clients.ask_at(RATE, args.time())).await?;
            let delay = |took: RequestTimes| if kind == Kind::Json { took.whole } else { took.first };
            summary(took.into_iter().map(delay), cpu)
        }
        Case::Paced => {
            if contender.router.is_none() {
                return Ok(None);
            }
            let mut streams = PacedStreams::open(&targets, PACED_STREAMS).await?;
            let before = streams.events();
            let time = args.time();
            let ((), cpu) = measured(contender, async move {
                tokio::time::sleep(time).await;
                anyhow::Ok(())
            })
            .await?;
            let events = streams.events() - before;
            let ended = streams.ended()?;
            ensure!(ended < PACED_STREAMS, "all streams ended early");
            if ended > 0 {
                eprintln!("  {} ended {ended} of {PACED_STREAMS} streams early", contender.text());
            }
            Sample { cpu: cpu.as_secs_f64() / events as f64, ..Sample::default() }
        }
        Case::Leave => {
            if contender.router.is_none() {
                return Ok(None);
            }
            let mut delays = load::leave(targets[0], &mut upstream.gone, LEAVING).await?;
            delays.sort_by(f64::total_cmp);
            Sample { cpu: 0.0, p50: at(&delays, 0.5), p99: at(&delays, 1.0) }
        }
    }))
}

/// The result of `work`, and the processor time that the router has used meanwhile.
async fn measured<T>(
    contender: &mut Contender,
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<(T, Duration)> {
    let Some(process) = contender.process() else { return Ok((work.await?, Duration::ZERO)) };
    process.check()?;
    let before = process.cpu()?;
    let result = work.await?;
    Ok((result, process.cpu()?.saturating_sub(before)))
}

fn summary(delays: impl Iterator<Item = Duration>, cpu: Duration) -> Sample {
    let mut delays: Vec<f64> = delays.map(|delay| delay.as_secs_f64()).collect();
    delays.sort_by(f64::total_cmp);
    Sample { cpu: cpu.as_secs_f64() / delays.len() as f64, p50: at(&delays, 0.5), p99: at(&delays, 0.99) }
}

/// The quantile `part` of sorted values.
fn at(sorted: &[f64], part: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * part).round() as usize).copied().unwrap_or(f64::NAN)
}

/// Measures the memory of each router with many replicas, without and with many silent streams.
async fn memory(args: &Args, results: &mut Results) -> anyhow::Result<()> {
    /// The number of open files for everything except streams.
    const OTHERS: usize = 600;
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    // Each stream uses two sockets in the router and two in this process.
    let most = (usize::try_from(files).unwrap_or(usize::MAX) / 2).saturating_sub(OTHERS);
    results.streams = args.streams.min(most);
    for &name in &args.routers {
        let measured = memory_of(name, args, results.streams).await;
        results.memory.push(match measured {
            Ok(memory) => Some(memory),
            Err(error) if name != Name::Ovfleet => {
                eprintln!("  memory       {} failed: {error:#}", name.text());
                None
            }
            Err(error) => return Err(error),
        });
    }
    Ok(())
}

/// Measures the memory of a router without and with silent streams.
async fn memory_of(name: Name, args: &Args, count: usize) -> anyhow::Result<(Memory, Memory)> {
    let upstream = Upstream::start(args.memory_replicas).await?;
    let mut contender = Contender::start(name, args, &upstream).await?;
    let targets = contender.targets.clone();
    let process = contender.process().context("invariant: a router has a process")?;
    let before = process.memory()?;
    let streams = load::open_streams(&targets, count).await?;
    let after = process.memory()?;
    eprintln!(
        "  memory       {:14} {:.1} MiB, with {} streams {:.1} MiB",
        name.text(),
        before.resident as f64 / 1048576.0,
        streams.len(),
        after.resident as f64 / 1048576.0
    );
    Ok((before, after))
}

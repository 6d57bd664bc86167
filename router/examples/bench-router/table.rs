//! Formats the measured figures as tables, and compares them with their requirements.

use std::fmt::Write as _;
use std::process::Command;

use anyhow::Context as _;

use crate::Args;
use crate::contender::Name;
use crate::process::Memory;
use crate::rounds::{Case, LEAVING, Results, Sample};

/// The largest permitted ratio of our router's figure to the best figure of the other routers.
const RATIO_MAX: f64 = 0.8;
/// The largest permitted median of the added latency at a fixed request rate, in seconds.
const ADDED_P50_MAX: f64 = 100e-6;
const ADDED_P99_MAX: f64 = 1e-3;
/// The largest permitted time until a replica notices that a client has disconnected, in seconds.
const GONE_MAX: f64 = 0.1;

/// The requirement for a figure.
#[derive(Clone, Copy)]
enum Requirement {
    /// The ratio to the best figure of the other routers must not exceed this value.
    Ratio(f64),
    /// The figure must not exceed this value.
    Most(f64),
    /// The figure is compared with those of the other routers, without a requirement.
    Compared,
    /// The figure has no requirement.
    None,
}

/// Formats a figure.
type Show = fn(f64) -> String;

struct Tables<'a> {
    args: &'a Args,
    results: &'a Results,
    text: String,
    is_good: bool,
}

/// All tables, and whether every figure meets its requirement.
///
/// # Errors
/// The date, the version of a router, or the description of the machine cannot be determined.
pub(crate) fn markdown(args: &Args, results: &Results) -> anyhow::Result<(String, bool)> {
    let mut tables = Tables { args, results, text: String::new(), is_good: true };
    tables.preface()?;
    tables.closed();
    tables.rates();
    tables.memory();
    Ok((tables.text, tables.is_good))
}

impl Tables<'_> {
    fn preface(&mut self) -> anyhow::Result<()> {
        let versions: Result<Vec<_>, _> =
            self.args.routers.iter().map(|name| name.version(self.args)).collect();
        let today = Command::new("date").arg("+%F").output().context("failed to run the program `date`")?;
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        writeln!(
            self.text,
            "`make bench-router ARGS=\"{}\"` on {}: {}; medians of {} rounds, {} s for each case, {} replicas.\n\
             Machine: {}.",
            arguments.join(" "),
            String::from_utf8_lossy(&today.stdout).trim(),
            versions?.join(", "),
            self.args.rounds,
            self.args.seconds,
            self.args.replicas,
            machine()?
        )?;
        Ok(())
    }

    /// Adds the processor time and the added latency for clients that send their next request as soon as the previous
    /// answer is complete.
    fn closed(&mut self) {
        let cases: Vec<(Case, String)> = [1, 32, 256]
            .into_iter()
            .map(|count| (Case::Json(count), format!("JSON, {count} concurrent")))
            .chain(
                [1, 32, 256].map(|count| (Case::Stream(count), format!("short stream, {count} concurrent"))),
            )
            .filter(|(case, _)| self.has(*case))
            .collect();
        if cases.is_empty() {
            return;
        }
        self.head("processor time of the router for a request, us");
        for (case, title) in &cases {
            let figures = self.figures(*case, |sample| sample.cpu);
            self.row(title, &figures, Requirement::Ratio(RATIO_MAX), micros);
        }
        self.head("requests per second on one core");
        for (case, title) in &cases {
            let figures: Vec<f64> =
                self.figures(*case, |sample| sample.cpu).into_iter().map(|cpu| 1.0 / cpu).collect();
            self.row(title, &figures, Requirement::None, whole);
        }
        for (part, get) in [("p50", p50 as fn(&Sample) -> f64), ("p99", p99)] {
            self.head(&format!("added latency of a whole answer, {part}, us"));
            for (case, title) in &cases {
                let figures = self.added(*case, get);
                self.row(title, &figures, Requirement::Ratio(RATIO_MAX), micros);
            }
        }
    }

    /// Adds the figures at a fixed request rate, for paced streams, and for clients that disconnect.
    fn rates(&mut self) {
        let rates =
            [(Case::JsonRate, "JSON, whole answer"), (Case::StreamRate, "short stream, to the first event")];
        if rates.iter().any(|(case, _)| self.has(*case)) {
            self.head("added latency at 500 requests/s, us");
            for (case, title) in rates {
                if self.has(case) {
                    let (median, tail) = (self.added(case, p50), self.added(case, p99));
                    self.row(&format!("{title}, p50"), &median, Requirement::Most(ADDED_P50_MAX), micros);
                    self.row(&format!("{title}, p99"), &tail, Requirement::Most(ADDED_P99_MAX), micros);
                }
            }
        }
        if self.has(Case::Paced) {
            self.head("256 streams of 50 events/s each");
            let cpu = self.figures(Case::Paced, |sample| sample.cpu);
            self.row("processor time for an event, us", &cpu, Requirement::Compared, micros);
            let rate: Vec<f64> = cpu.into_iter().map(|cpu| 1.0 / cpu).collect();
            self.row("events per second on one core", &rate, Requirement::None, whole);
        }
        if self.has(Case::Leave) {
            self.head("time until the replica notices that the client has left, ms");
            let (median, longest) = (self.figures(Case::Leave, p50), self.figures(Case::Leave, p99));
            self.row(&format!("median of {LEAVING}"), &median, Requirement::None, millis);
            self.row(&format!("longest of {LEAVING}"), &longest, Requirement::Most(GONE_MAX), millis);
        }
    }

    fn memory(&mut self) {
        let memory = &self.results.memory;
        if memory.is_empty() {
            return;
        }
        let of = |get: fn(&(Memory, Memory)) -> u64| -> Vec<f64> {
            memory.iter().map(|it| it.as_ref().map_or(f64::NAN, |it| get(it) as f64)).collect()
        };
        let (before, after) = (of(|it| it.0.resident), of(|it| it.1.resident));
        let own = of(|it| it.1.anonymous);
        let streams = self.results.streams;
        let each: Vec<f64> =
            before.iter().zip(&after).map(|(before, after)| (after - before) / streams as f64).collect();
        let replicas = self.args.memory_replicas;
        self.head(&format!("memory with {replicas} replicas, MiB"));
        self.row("at rest", &before, Requirement::None, mebibytes);
        self.row(&format!("with {streams} silent streams"), &after, Requirement::None, mebibytes);
        self.row("allocated memory, without the program", &own, Requirement::None, mebibytes);
        self.row("memory of one stream, KiB", &each, Requirement::None, |bytes| {
            format!("{:.1}", bytes / 1024.0)
        });
    }

    fn has(&self, case: Case) -> bool {
        self.results.samples.keys().any(|(known, index)| *known == case && index.is_some())
    }

    /// The figure of each router in a case: the median of the rounds.
    fn figures(&self, case: Case, get: impl Fn(&Sample) -> f64) -> Vec<f64> {
        let samples = |index| self.results.samples.get(&(case, Some(index)));
        let of = |index| samples(index).map_or(f64::NAN, |samples| median(samples.values().map(&get)));
        (0..self.args.routers.len()).map(of).collect()
    }

    /// The amount by which each router increases a figure in a case: the median, over the rounds, of the difference
    /// between the figures with and without the router in the same round.
    fn added(&self, case: Case, get: fn(&Sample) -> f64) -> Vec<f64> {
        let samples = |contender| self.results.samples.get(&(case, contender));
        let of = |index| {
            let (Some(through), Some(direct)) = (samples(Some(index)), samples(None)) else {
                return f64::NAN;
            };
            median(through.iter().filter_map(|(round, sample)| Some(get(sample) - get(direct.get(round)?))))
        };
        (0..self.args.routers.len()).map(of).collect()
    }

    fn head(&mut self, title: &str) {
        let names: Vec<&str> = self.args.routers.iter().map(|name| name.text()).collect();
        let _ = writeln!(self.text, "\n| {title} | {} | ratio | requirement |", names.join(" | "));
        let _ = writeln!(self.text, "|---|{}---|---|", "---|".repeat(names.len()));
    }

    fn row(&mut self, title: &str, figures: &[f64], requirement: Requirement, show: Show) {
        let routers = &self.args.routers;
        let ours = routers.iter().position(|&name| name == Name::Ovfleet).map(|index| figures[index]);
        let others = routers.iter().zip(figures).filter(|(name, _)| name.is_peer());
        // The best figure, or NaN if no other router has one.
        let best = others.map(|(_, &figure)| figure).reduce(f64::min);
        let ratio = ours.zip(best).map(|(ours, best)| ours / best);
        // If a figure was not measured, it is NaN, and the requirement is not met. If there is no other router, the ratio is
        // not checked.
        let (said, is_met) = match requirement {
            Requirement::Ratio(most) => (format!("≤ {most:.2}"), ratio.map(|ratio| ratio <= most)),
            Requirement::Most(most) => (format!("≤ {}", show(most)), ours.map(|ours| ours <= most)),
            Requirement::Compared | Requirement::None => (String::new(), None),
        };
        self.is_good &= is_met != Some(false);
        let mark = match is_met {
            Some(true) => " ✓",
            Some(false) => " ✗",
            None => "",
        };
        let cell = |&figure: &f64| if figure.is_nan() { "failed".to_owned() } else { show(figure) };
        let cells: Vec<String> = figures.iter().map(cell).collect();
        // Show the ratio only for figures that are compared. For all of them, lower is better. A rate is not compared,
        // because the time from which it is computed is already compared.
        let ratio = match requirement {
            Requirement::Ratio(_) | Requirement::Compared => ratio
                .filter(|ratio| ratio.is_finite())
                .map_or_else(String::new, |ratio| format!("**{ratio:.2}**")),
            _ => String::new(),
        };
        let _ = writeln!(self.text, "| {title} | {} | {ratio} | {said}{mark} |", cells.join(" | "));
    }
}

fn p50(sample: &Sample) -> f64 {
    sample.p50
}

fn p99(sample: &Sample) -> f64 {
    sample.p99
}

fn micros(seconds: f64) -> String {
    format!("{:.1}", seconds * 1e6)
}

fn millis(seconds: f64) -> String {
    // The benchmark waits at most 500 ms for a replica to notice that its client has disconnected.
    if seconds.is_finite() { format!("{:.2}", seconds * 1e3) } else { "> 500".to_owned() }
}

fn whole(number: f64) -> String {
    format!("{number:.0}")
}

fn mebibytes(bytes: f64) -> String {
    format!("{:.1}", bytes / 1048576.0)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[count / 2],
        count => (values[count / 2 - 1] + values[count / 2]) / 2.0,
    }
}

/// A description of the machine in one line.
fn machine() -> anyhow::Result<String> {
    let read = |path| std::fs::read_to_string(path).with_context(|| format!("failed to read {path}"));
    let value = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_once(':')).map_or(String::new(), |(_, value)| value.trim().to_owned())
    };
    let processor = value(&read("/proc/cpuinfo")?, "model name");
    let memory = value(&read("/proc/meminfo")?, "MemTotal");
    let kibibytes: f64 = memory.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(f64::NAN);
    let cores = std::thread::available_parallelism()?;
    Ok(format!("{processor}, {cores} cores, {:.0} GiB", kibibytes / 1048576.0))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[test]
    fn a_sample_is_compared_with_that_without_a_router_in_the_same_round() {
        let args = Args::parse_from(["bench-router", "--routers", "ovfleet"]);
        let (case, mut results) = (Case::Json(1), Results::default());
        let sample = |p50| Sample { p50, ..Sample::default() };
        results.samples.insert((case, None), [(0, sample(1.0)), (1, sample(5.0)), (2, sample(3.0))].into());
        // The router failed in the first round.
        results.samples.insert((case, Some(0)), [(1, sample(5.5)), (2, sample(3.5))].into());
        let tables = Tables { args: &args, results: &results, text: String::new(), is_good: true };
        assert_eq!(tables.added(case, p50), [0.5]);
    }

    #[test]
    fn a_requirement_is_not_met_without_the_figures_that_it_compares() {
        let row = |routers: &str, figures: &[f64]| {
            let args = Args::parse_from(["bench-router", "--routers", routers]);
            let results = Results::default();
            let mut tables = Tables { args: &args, results: &results, text: String::new(), is_good: true };
            tables.row("title", figures, Requirement::Ratio(0.5), whole);
            (tables.is_good, tables.text)
        };
        let both = "ovfleet,vllm";
        assert_eq!(row(both, &[1.0, 2.0]), (true, "| title | 1 | 2 | **0.50** | ≤ 0.50 ✓ |\n".to_owned()));
        assert_eq!(row(both, &[2.0, 2.0]), (false, "| title | 2 | 2 | **1.00** | ≤ 0.50 ✗ |\n".to_owned()));
        for figures in [[f64::NAN, 2.0], [1.0, f64::NAN]] {
            let (is_good, text) = row(both, &figures);
            assert!(!is_good && text.ends_with(" |  | ≤ 0.50 ✗ |\n"), "{text}");
        }
        // Another router that failed does not count if a third one has a figure.
        assert!(row("ovfleet,vllm,sglang", &[1.0, f64::NAN, 2.0]).0);
        assert_eq!(row("ovfleet", &[1.0]), (true, "| title | 1 |  | ≤ 0.50 |\n".to_owned()));
    }
}

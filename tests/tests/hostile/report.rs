//! Prints the table of results row by row.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::bail;

use super::fleet::PerProcess;

/// The result of an attack that met the limits.
pub(crate) struct Row {
    pub(crate) attack: &'static str,
    /// The ratio of the 99th percentile latency to that without an attack, in each measurement; the last measurement
    /// counts.
    pub(crate) slowdowns: Vec<f64>,
    /// The 99th percentile latency of the other clients' requests during the attack.
    pub(crate) p99: Duration,
    /// The number of the other clients' requests during the attack.
    pub(crate) answers: usize,
    pub(crate) slowest_probe: Duration,
    /// The peak of resident memory in bytes, including mapped files.
    pub(crate) peaks: PerProcess<u64>,
    /// The anonymous memory after the attack, in bytes.
    pub(crate) after: PerProcess<u64>,
    pub(crate) elapsed: Duration,
    /// The summary of the responses to the attacker.
    pub(crate) summary: String,
}

/// The report, which is printed row by row and retains only the failures.
pub(crate) struct Report {
    failures: Vec<String>,
}

impl Report {
    /// Creates an empty report and prints the head of its table; `before` is the anonymous memory of the processes in
    /// bytes.
    pub(crate) fn new(before: PerProcess<u64>) -> Self {
        let report = Self { failures: Vec::new() };
        report.line(&format!("memory before the first attack: {} MiB (router + server)", mebibytes(before)));
        report.line(&format!(
            "{:26} {:>6} {:>8} {:>7} {:>8} {:>11} {:>11} {:>6}  {}",
            "attack",
            "p99",
            "p99",
            "answers",
            "slowest",
            "peak MiB",
            "after MiB",
            "time",
            "responses to the attacker"
        ));
        report.line(&format!("{:26} {:>6} {:>8} {:>7} {:>8}", "", "times", "", "of others", "probe"));
        report
    }

    pub(crate) fn row(&self, row: &Row) {
        let slowdown = row.slowdowns.last().copied().unwrap_or_default();
        let mut line = format!(
            "{:26} {slowdown:>6.2} {:>5} ms {:>7} {:>5} ms {:>11} {:>11} {:>4} s  {}",
            row.attack,
            row.p99.as_millis(),
            row.answers,
            row.slowest_probe.as_millis(),
            mebibytes(row.peaks),
            mebibytes(row.after),
            row.elapsed.as_secs(),
            row.summary,
        );
        if let [earlier @ .., _] = row.slowdowns.as_slice()
            && !earlier.is_empty()
        {
            let _ = write!(line, " (measured again after {earlier:.1?})");
        }
        self.line(&line);
    }

    pub(crate) fn remark(&self, name: &str, remark: &str) {
        self.line(&format!("{name:26} {remark}"));
    }

    pub(crate) fn failure(&mut self, name: &str, error: &anyhow::Error) {
        self.line(&format!("{name:26} FAILED: {error:#}"));
        self.failures.push(format!("{name} ({error:#})"));
    }

    #[expect(clippy::print_stdout, reason = "the report is the output of the suite")]
    fn line(&self, line: &str) {
        println!("{line}");
    }

    /// Fails if any attack has failed.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        if self.failures.is_empty() {
            return Ok(());
        }
        bail!("failed: {}", self.failures.join(", "))
    }
}

fn mebibytes(bytes: PerProcess<u64>) -> String {
    format!("{} + {}", bytes.router >> 20, bytes.server >> 20)
}

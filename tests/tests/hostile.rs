//! `make hostile`: attacks a real router and a real server, each under a memory limit of 2 GiB.
//!
//! While each attack runs, well-behaved clients chat through the router and both processes are probed. After the
//! attack, both processes must still run and use about as much memory as before. Every probe must have succeeded in
//! time, the other clients must not have lost a request, and their 99th percentile latency must be at most four times
//! the latency without an attack.
//!
//! Attacks run in a separate process with a low priority, so that the results measure the attacked processes and not
//! the cost of the attacker on a shared machine. The arguments select attacks by a part of their names; without
//! arguments, all attacks run.

mod hostile {
    pub(crate) mod attacks;
    pub(crate) mod bystander;
    pub(crate) mod client;
    pub(crate) mod fleet;
    pub(crate) mod raw;
    pub(crate) mod report;
}

use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use hostile::attacks::{ATTACKS, Attack};
use hostile::bystander::{Bystander, Observations};
use hostile::client::Targets;
use hostile::fleet::{Fleet, PerProcess};
use hostile::report::{Report, Row};
use tests::memory::ProcessMemory;

/// The maximum ratio of the 99th percentile latency of the other clients during an attack to that without one. On one
/// machine with two processors, two measurements of the same attack returned 2.1 and 3.4, so the limit allows for this
/// variation.
const SLOWDOWN_MAX: f64 = 4.0;
/// The time limit for a probe.
const PROBE_LIMIT: Duration = Duration::from_secs(1);
/// The number of responses to the other clients before the first attack.
const ANSWERS_BEFORE_ALL: usize = 72;
/// The number of responses to the other clients right before an attack.
const ANSWERS_BEFORE: usize = 24;
/// The maximum number of responses in the baseline of an attack, which consists of the latest responses without an
/// attack. The 99th percentile of only a few responses is their maximum, which varies by 50%.
const CALM_ANSWERS_MAX: usize = 240;
/// The minimum number of responses to the other clients during an attack. A short attack is repeated until the clients
/// have received them.
const ANSWERS_DURING: usize = 24;
/// The time limit for one attack.
const ATTACK_LIMIT: Duration = Duration::from_secs(150);
/// The number of measurements after which a slowdown counts as a failure. Other load on the machine is temporary, but
/// the effect of a defect recurs.
const MEASUREMENTS: usize = 3;
/// The argument with which this program runs as the attacker.
const ATTACKER: &str = "--attacker";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    match arguments.as_slice() {
        [flag, name, router, server, server_grpc, key, other_key] if flag == ATTACKER => {
            let [router, server, server_grpc, key, other_key] =
                [router, server, server_grpc, key, other_key].map(String::clone);
            runtime.block_on(attack(name, Targets { router, server, server_grpc, key, other_key }))
        }
        names => runtime.block_on(run_suite(names)),
    }
}

/// Runs one attack and repeats it until the standard input ends. Prints a line about each run.
#[expect(clippy::print_stdout, reason = "the attacker reports over its standard output")]
async fn attack(name: &str, targets: Targets) -> anyhow::Result<()> {
    let attack = ATTACKS.iter().find(|attack| attack.name == name).context("no such attack")?;
    let enough = tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()));
    loop {
        println!("{}", (attack.run)(targets.clone()).await?);
        if enough.is_finished() {
            return Ok(());
        }
    }
}

/// The process of an attacker, which is killed when it is dropped.
struct Attacker {
    process: tokio::process::Child,
    start: Instant,
}

impl Attacker {
    fn start(attack: &Attack, targets: &Targets) -> anyhow::Result<Self> {
        // Ten thousand connections need ten thousand file descriptors.
        let script = "ulimit -S -n \"$(ulimit -H -n)\"; exec nice -n 19 \"$0\" \"$@\"";
        let mut command = tokio::process::Command::new("sh");
        command.args(["-c", script]).arg(std::env::current_exe()?).args([ATTACKER, attack.name]);
        let Targets { router, server, server_grpc, key, other_key } = targets;
        command.args([router, server, server_grpc, key, other_key]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        Ok(Self { process: command.spawn()?, start: Instant::now() })
    }

    /// Waits for the current run of the attack, and returns the report on the first run.
    async fn finish(mut self) -> anyhow::Result<String> {
        drop(self.process.stdin.take());
        let limit = ATTACK_LIMIT.saturating_sub(self.start.elapsed());
        let output = tokio::time::timeout(limit, self.process.wait_with_output()).await;
        let output = output.with_context(|| format!("the attack took longer than {ATTACK_LIMIT:?}"))??;
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let reports = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(reports.lines().next().context("the attack did not report a result")?.to_owned())
    }
}

/// The responses to an attack and its effect on other clients.
struct Measurement {
    summary: String,
    slowdown: f64,
    observed: Observations,
}

/// Adds observations without an attack to `calm`.
async fn observe_calm(fleet: &Fleet, answers: usize, calm: &mut Observations) -> anyhow::Result<()> {
    let mut bystander = Bystander::start(&fleet.client(), &fleet.probed());
    bystander.answered(answers).await.context("before the attack")?;
    calm.append(bystander.stop().await.context("before the attack")?, CALM_ANSWERS_MAX);
    Ok(())
}

async fn measure(fleet: &Fleet, attack: &Attack, calm: &mut Observations) -> anyhow::Result<Measurement> {
    let client = fleet.client();
    observe_calm(fleet, ANSWERS_BEFORE, calm).await?;
    let mut bystander = Bystander::start(&client, &fleet.probed());
    let attacker = Attacker::start(attack, &fleet.targets())?;
    let answered = bystander.answered(ANSWERS_DURING).await;
    let summary = attacker.finish().await?;
    answered?;
    let observed = bystander.stop().await?;
    let slowdown = observed.p99().as_secs_f64() / calm.p99().as_secs_f64();
    Ok(Measurement { summary, slowdown, observed })
}

/// Measures an attack until its slowdown is within the limit, at most [`MEASUREMENTS`] times.
async fn judge(
    fleet: &Fleet,
    attack: &Attack,
    before: PerProcess<ProcessMemory>,
    calm: &mut Observations,
) -> anyhow::Result<Row> {
    fleet.reset_peaks()?;
    let start = Instant::now();
    let mut slowdowns = Vec::new();
    loop {
        let measured = measure(fleet, attack, calm).await?;
        slowdowns.push(measured.slowdown);
        ensure!(
            measured.observed.slowest_probe <= PROBE_LIMIT,
            "a probe took {:.1?} (limit: {PROBE_LIMIT:?})",
            measured.observed.slowest_probe
        );
        if measured.slowdown > SLOWDOWN_MAX {
            ensure!(
                slowdowns.len() < MEASUREMENTS,
                "the 99th percentile latency of other clients was more than {SLOWDOWN_MAX} times the baseline in \
                 each of {MEASUREMENTS} measurements ({slowdowns:.1?}); responses to the attacker: {}",
                measured.summary
            );
            continue;
        }
        let peaks = fleet.memory()?.map(|memory| memory.peak);
        let after = fleet.settled(before).await?.map(|memory| memory.anonymous);
        fleet.check_logs()?;
        return Ok(Row {
            attack: attack.name,
            slowdowns,
            p99: measured.observed.p99(),
            answers: measured.observed.count(),
            slowest_probe: measured.observed.slowest_probe,
            peaks,
            after,
            elapsed: start.elapsed(),
            summary: measured.summary,
        });
    }
}

async fn run_suite(names: &[String]) -> anyhow::Result<()> {
    let chosen: Vec<&Attack> = ATTACKS
        .iter()
        .filter(|attack| names.is_empty() || names.iter().any(|name| attack.name.contains(name.as_str())))
        .collect();
    ensure!(!chosen.is_empty(), "no attack name contains any of {names:?}");
    let fleet = Fleet::start()?;
    fleet.warm_up().await.context("failed to warm up the processes")?;
    let before = fleet.memory()?;
    let mut calm = Observations::default();
    observe_calm(&fleet, ANSWERS_BEFORE_ALL, &mut calm).await?;
    let mut report = Report::new(before.map(|memory| memory.anonymous));
    for attack in chosen {
        match judge(&fleet, attack, before, &mut calm).await {
            Ok(row) => report.row(&row),
            Err(error) => report.failure(attack.name, &error),
        }
        // Stop if a process has exited, because the remaining attacks cannot be measured.
        fleet.memory()?;
    }
    match fleet.stop().await {
        Ok(summary) => report.remark("signal_to_end", &summary),
        Err(error) => report.failure("signal_to_end", &error),
    }
    report.finish()
}

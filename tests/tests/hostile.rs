//! `make hostile`: attacks on a real router and a real server, each under a memory limit of 2 GiB.
//!
//! While each attack runs, another client chats through the router and both processes are probed. Afterwards both still
//! run, their memory is back, every probe was answered in time, and the other client lost nothing and waited at most three
//! times as long as without the attack.

mod hostile {
    pub(crate) mod attacks;
    pub(crate) mod bystander;
    pub(crate) mod raw;
}

use std::time::Duration;

use anyhow::{Context as _, ensure};
use hostile::attacks::{ATTACKS, Attack, Targets};
use hostile::bystander::{Bystander, Observed};
use serde_json::json;
use tests::http;
use tests::memory::{MemoryLimit, of_process};
use tests::process::Process;
use tests::router::Router;
use tests::server::{Server, command};

/// Memory that each process may use.
const MEMORY_BYTES: u64 = 2 << 30;
/// Memory that may remain after an attack, in percent of what was in use before it.
const REMAINING_PERCENT: u64 = 110;
/// How long memory may take to fall back after an attack.
const SETTLE_LIMIT: Duration = Duration::from_secs(90);
/// How long one attack may take.
const ATTACK_LIMIT: Duration = Duration::from_secs(180);
/// How much longer the 99th percentile of the other client's requests may be during an attack.
const SLOWDOWN_MAX: f64 = 3.0;
/// How long a probe may take.
const PROBE_LIMIT: Duration = Duration::from_secs(1);

/// The router, the server behind it, and the limits that both run under.
struct Fleet {
    router: Router,
    server: Server,
    _limits: [MemoryLimit; 2],
}

impl Fleet {
    fn start() -> anyhow::Result<Self> {
        let limits = [MemoryLimit::new(MEMORY_BYTES)?, MemoryLimit::new(MEMORY_BYTES)?];
        let arguments = ["--model-name", "smollm2", "--kv-cache-size", "256MiB", "--admin-port", "0"];
        let server = Server::from_command(&mut limits[0].wrap(&command(&arguments)?))?;
        let arguments = [tests::router::replica(&server), "--admin-port=0".to_owned()];
        let router = Router::from_command(&mut limits[1].wrap(&tests::router::command(&arguments)?))?;
        Ok(Self { router, server, _limits: limits })
    }

    fn processes(&self) -> [(&'static str, &Process); 2] {
        [("router", self.router.process()), ("server", self.server.process())]
    }

    fn targets(&self) -> Targets {
        Targets { router: self.router.address().to_owned(), server: self.server.address().to_owned() }
    }

    /// Anonymous memory of router and server.
    fn memory(&self) -> anyhow::Result<[u64; 2]> {
        let mut memory = [0; 2];
        for (bytes, (name, process)) in memory.iter_mut().zip(self.processes()) {
            *bytes = of_process(process.id())
                .with_context(|| format!("the {name} has exited: {}", last_lines(process)))?
                .anonymous;
        }
        Ok(memory)
    }
}

fn last_lines(process: &Process) -> String {
    let output = process.output();
    let lines: Vec<&str> = output.lines().rev().take(20).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}

/// Fills the KV cache and warms up what grows with ordinary use, so that memory before an attack is that of a busy server.
async fn warm_up(fleet: &Fleet) -> anyhow::Result<()> {
    let url = fleet.router.url("/v1/completions");
    for round in 0..4 {
        let requests = (0..8).map(|prompt| {
            let body = json!({"model": "smollm2", "prompt": format!("{round} {prompt} ").repeat(700), "max_tokens": 4});
            let url = url.clone();
            async move { http::post(&url, &body).await }
        });
        for answer in http::all(requests).await {
            ensure!(answer?.status == 200, "an ordinary prompt is answered");
        }
    }
    Ok(())
}

/// Waits until both processes are back at the memory they had before.
async fn settled(fleet: &Fleet, before: [u64; 2]) -> anyhow::Result<[u64; 2]> {
    let end = tokio::time::Instant::now() + SETTLE_LIMIT;
    let mut poll = tokio::time::interval(Duration::from_millis(250));
    loop {
        poll.tick().await;
        let now = fleet.memory()?;
        let back = now.iter().zip(before).all(|(now, before)| *now <= before * REMAINING_PERCENT / 100);
        if back {
            return Ok(now);
        }
        ensure!(tokio::time::Instant::now() < end, "memory is {now:?} bytes, it was {before:?}");
    }
}

struct Outcome {
    summary: String,
    observed: Observed,
    memory: [u64; 2],
}

async fn run(fleet: &Fleet, attack: &Attack, before: [u64; 2]) -> anyhow::Result<Outcome> {
    let bystander = Bystander::start(fleet.router.url("/v1/chat/completions"), fleet.probes());
    let attacked = tokio::time::timeout(ATTACK_LIMIT, (attack.run)(fleet.targets())).await;
    let observed = bystander.stop().await;
    let summary = attacked.context("the attack did not end in time")??;
    let observed = observed?;
    let memory = settled(fleet, before).await?;
    Ok(Outcome { summary, observed, memory })
}

impl Fleet {
    /// The addresses that a kubelet would probe.
    fn probes(&self) -> Vec<String> {
        self.processes().map(|(_, process)| tests::server::admin_address(process)).to_vec()
    }
}

fn mebibytes(bytes: [u64; 2]) -> String {
    format!("{} + {} MiB", bytes[0] >> 20, bytes[1] >> 20)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attacks_hurt_nobody_else() {
    let fleet = Fleet::start().expect("router and server start");
    warm_up(&fleet).await.expect("ordinary prompts are answered");
    let bystander = Bystander::start(fleet.router.url("/v1/chat/completions"), fleet.probes());
    bystander.answered(50).await;
    let calm = bystander.stop().await.expect("the client is served while nothing else happens");
    let before = fleet.memory().expect("both run");
    println!("calm: p99 {:.0?}, memory {}", calm.percentile(99), mebibytes(before));

    let only = std::env::var("ATTACK").ok();
    let mut failures = Vec::new();
    for attack in ATTACKS.iter().filter(|attack| only.as_ref().is_none_or(|only| attack.name.contains(only)))
    {
        match run(&fleet, attack, before).await {
            Ok(Outcome { summary, observed, memory }) => {
                let slowdown = observed.percentile(99).as_secs_f64() / calm.percentile(99).as_secs_f64();
                println!(
                    "{}: {summary}; p99 {slowdown:.1} times, slowest probe {:.0?}, memory {}",
                    attack.name,
                    observed.slowest_probe,
                    mebibytes(memory)
                );
                if slowdown > SLOWDOWN_MAX {
                    failures
                        .push(format!("{}: another client waits {slowdown:.1} times as long", attack.name));
                }
                if observed.slowest_probe > PROBE_LIMIT {
                    failures.push(format!("{}: a probe took {:?}", attack.name, observed.slowest_probe));
                }
            }
            Err(error) => {
                println!("{}: FAILED: {error:#}", attack.name);
                failures.push(format!("{}: {error:#}", attack.name));
                if fleet.memory().is_err() {
                    break;
                }
            }
        }
    }
    for (name, process) in fleet.processes() {
        let output = process.output();
        assert!(!output.contains("panicked"), "the {name} panicked:\n{output}");
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

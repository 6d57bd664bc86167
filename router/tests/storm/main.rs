//! Sends ten thousand requests through the real router process to sixteen replicas that hang, slow down, reset streams,
//! stop reporting, reject requests and are replaced at random. Regardless of these faults, each request that fails
//! before the first byte of its answer is answered by another replica, the other requests end properly, and no booking
//! remains at the end.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod client;
mod replica;

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::task::JoinSet;

use client::{Client, RequestOutcome};
use replica::{Fault, Replica};

const SEED: u64 = 16;
const REPLICAS: usize = 16;
const REQUESTS: usize = 10_000;
const CLIENTS: usize = 48;
/// Maximum number of replicas with faults at the same time, which is low enough that a replica is always available.
const FAULTY_MAX: usize = 6;
/// Number of requests after which the faults change.
const REQUESTS_PER_FAULT: usize = 60;

struct Router {
    child: Child,
    address: String,
}

impl Drop for Router {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn router(replicas: &[Arc<Replica>], log: &mut JoinSet<String>) -> Router {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ovfleet-router"));
    for replica in replicas {
        command.arg(format!("--replica={}/{}", replica.http, replica.grpc.port()));
    }
    command.args([
        "--port=0",
        "--threads=2",
        "--attempts=8",
        "--retry-budget-percent=100",
        "--connect-timeout=5s",
    ]);
    command.args([
        "--first-token-timeout=2s",
        "--answer-timeout=2s",
        "--idle-timeout=2s",
        "--hang-timeout=2s",
    ]);
    command.args(["--replica-wait-timeout=60s", "--queue-timeout=60s", "--max-body-bytes=1MiB"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let stderr = tokio::process::ChildStderr::from_std(child.stderr.take().unwrap()).unwrap();
    let mut lines = BufReader::new(stderr);
    let mut line = String::new();
    lines.read_line(&mut line).await.unwrap();
    let address = line.split_once("http://").unwrap().1.trim().to_owned();
    log.spawn(async move {
        let mut rest = String::new();
        let _ = lines.read_to_string(&mut rest).await;
        rest
    });
    Router { child, address }
}

#[derive(Default)]
struct Tally {
    begun: AtomicUsize,
    whole: AtomicUsize,
    broken: AtomicUsize,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_requests_to_sixteen_replicas_with_faults_are_all_answered() {
    println!("seed {SEED}");
    let mut tasks = JoinSet::new();
    let (mut replicas, unanswered) = (Vec::new(), Arc::default());
    for number in 0..REPLICAS {
        replicas.push(Replica::start(SEED + number as u64, Arc::clone(&unanswered), &mut tasks).await);
    }
    let mut log = JoinSet::new();
    let router = router(&replicas, &mut log).await;
    client::await_replicas(&router.address, REPLICAS).await;

    let tally = Arc::new(Tally::default());
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        let (tally, address) = (Arc::clone(&tally), router.address.clone());
        clients.spawn(async move {
            let mut rng = StdRng::seed_from_u64(SEED ^ (number as u64) << 32);
            let mut client = Client::new(address);
            while tally.begun.fetch_add(1, Ordering::Relaxed) < REQUESTS {
                match client.ask(&mut rng).await {
                    RequestOutcome::Whole => tally.whole.fetch_add(1, Ordering::Relaxed),
                    RequestOutcome::Broken => tally.broken.fetch_add(1, Ordering::Relaxed),
                };
            }
        });
    }
    let mut rng = StdRng::seed_from_u64(SEED);
    let mut faulty: Vec<usize> = Vec::new();
    let mut next = REQUESTS_PER_FAULT;
    loop {
        tokio::select! {
            ended = clients.join_next() => match ended {
                Some(ended) => ended.unwrap(),
                None => break,
            },
            () = tokio::time::sleep(Duration::from_millis(5)) => {}
        }
        // The faults change after a fixed number of requests instead of a fixed time, so that a slow machine gets the
        // same number of faults.
        if tally.begun.load(Ordering::Relaxed) < next {
            continue;
        }
        next += REQUESTS_PER_FAULT;
        if faulty.len() >= FAULTY_MAX {
            replicas[faulty.remove(0)].set(Fault::None);
        }
        let number = rng.random_range(0..REPLICAS);
        if !faulty.contains(&number) {
            replicas[number].set(Fault::draw(&mut rng));
            faulty.push(number);
        }
    }
    let (whole, broken) = (tally.whole.load(Ordering::Relaxed), tally.broken.load(Ordering::Relaxed));
    assert_eq!(whole + broken, REQUESTS);
    assert!(broken > 0 && broken < REQUESTS / 5, "{broken} of {REQUESTS} were cut off");
    println!("{whole} whole, {broken} ended with an error event");
    for replica in &replicas {
        replica.set(Fault::None);
    }
    client::await_nothing_booked(&router.address).await;
    let answered: Vec<usize> = replicas.iter().map(|replica| replica.answered()).collect();
    println!("answered by replica: {answered:?}");
    let mean = REQUESTS / REPLICAS;
    assert!(
        answered.iter().all(|&count| count > 0 && count < 4 * mean),
        "the load is unbalanced: {answered:?}"
    );
    drop(router);
    let log = log.join_next().await.unwrap().unwrap();
    assert!(!log.contains("panicked"), "{log}");
}

//! The observers of an attack: well-behaved clients that chat through the router, and probes of both processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tests::server::probe;
use tokio::task::JoinSet;

use super::client::{Client, chat};

/// The number of well-behaved clients, each of which sends one request at a time.
const CLIENTS: usize = 2;
/// The number of tokens of each response.
const ANSWER_TOKENS: usize = 16;
/// The time between two probes of a process.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// The time between two reads of the number of responses.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The time limit for all awaited responses together. A client that fails ends the wait earlier.
const ANSWERS_LIMIT: Duration = Duration::from_secs(120);

/// The clients and the probers, which run until they are stopped.
pub(crate) struct Bystander {
    stopping: Arc<AtomicBool>,
    answers: Arc<AtomicUsize>,
    clients: JoinSet<anyhow::Result<Vec<Duration>>>,
    probers: Vec<JoinHandle<anyhow::Result<Duration>>>,
}

/// The observations of the clients and the probers.
#[derive(Default)]
pub(crate) struct Observations {
    /// The end-to-end latency of each request.
    answers: Vec<Duration>,
    /// The duration of the slowest probe.
    pub(crate) slowest_probe: Duration,
}

impl Observations {
    /// The time within which 99% of the responses were complete.
    pub(crate) fn p99(&self) -> Duration {
        let mut sorted = self.answers.clone();
        sorted.sort();
        sorted[sorted.len() * 99 / 100]
    }

    /// Appends later observations, and retains only the latest `answers_max` responses.
    pub(crate) fn append(&mut self, later: Self, answers_max: usize) {
        self.answers.extend(later.answers);
        self.answers.drain(..self.answers.len().saturating_sub(answers_max));
        self.slowest_probe = self.slowest_probe.max(later.slowest_probe);
    }

    /// The number of responses.
    pub(crate) fn count(&self) -> usize {
        self.answers.len()
    }
}

impl Bystander {
    /// Starts clients with the API key of `client`, and a prober for each address in `probed`.
    pub(crate) fn start(client: &Client, probed: &[String]) -> Self {
        let stopping = Arc::new(AtomicBool::new(false));
        let answers = Arc::new(AtomicUsize::new(0));
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            clients.spawn(send_chats(client.clone(), number, Arc::clone(&stopping), Arc::clone(&answers)));
        }
        let mut probers = Vec::new();
        for address in probed {
            let (address, stopping) = (address.clone(), Arc::clone(&stopping));
            probers.push(std::thread::spawn(move || send_probes(&address, &stopping)));
        }
        Self { stopping, answers, clients, probers }
    }

    /// Waits for `count` more responses, and fails if a client has failed.
    pub(crate) async fn answered(&mut self, count: usize) -> anyhow::Result<()> {
        let end = Instant::now() + ANSWERS_LIMIT;
        let awaited = self.answers.load(Ordering::Relaxed) + count;
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        while self.answers.load(Ordering::Relaxed) < awaited {
            poll.tick().await;
            if let Some(failed) = self.clients.try_join_next() {
                failed?.context("a request of another client failed")?;
            }
            ensure!(
                Instant::now() < end,
                "the other clients received fewer than {count} responses in {ANSWERS_LIMIT:?}"
            );
        }
        Ok(())
    }

    /// Stops the clients and probers, and returns their observations. A lost response or a failed probe is an error.
    pub(crate) async fn stop(mut self) -> anyhow::Result<Observations> {
        self.stopping.store(true, Ordering::Relaxed);
        let mut answers = Vec::new();
        while let Some(times) = self.clients.join_next().await {
            answers.extend(times?.context("a request of another client failed")?);
        }
        ensure!(!answers.is_empty(), "the other clients received no response");
        let mut slowest_probe = Duration::ZERO;
        for prober in self.probers.drain(..) {
            let slowest = prober.join().map_err(|_| anyhow::anyhow!("a prober panicked"))?;
            slowest_probe = slowest_probe.max(slowest.context("a probe failed")?);
        }
        Ok(Observations { answers, slowest_probe })
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
    }
}

async fn send_chats(
    client: Client,
    number: usize,
    stopping: Arc<AtomicBool>,
    answers: Arc<AtomicUsize>,
) -> anyhow::Result<Vec<Duration>> {
    let mut times = Vec::new();
    while !stopping.load(Ordering::Relaxed) {
        let content = format!("Client {number} wants to know about the number {}.", times.len());
        let parameters = serde_json::json!({"max_tokens": ANSWER_TOKENS, "ignore_eos": true});
        let start = Instant::now();
        let (status, body) = client.post("/v1/chat/completions", &chat(&content, parameters)).await?;
        ensure!(status == 200, "status {status}: {body}");
        let tokens = body.pointer("/usage/completion_tokens").and_then(Value::as_u64);
        ensure!(tokens == Some(ANSWER_TOKENS as u64), "the response is incomplete: {body}");
        times.push(start.elapsed());
        answers.fetch_add(1, Ordering::Relaxed);
    }
    Ok(times)
}

/// Probes as a kubelet does, with a new connection for each probe. The prober runs on its own thread, so that the other
/// tasks of this program do not affect its measurements.
fn send_probes(address: &str, stopping: &AtomicBool) -> anyhow::Result<Duration> {
    let mut slowest = Duration::ZERO;
    while !stopping.load(Ordering::Relaxed) {
        for path in ["/v2/health/live", "/v2/health/ready"] {
            let start = Instant::now();
            let status = probe(address, path)?;
            ensure!(status == 200, "{path} of {address} returned status {status}");
            slowest = slowest.max(start.elapsed());
        }
        std::thread::sleep(PROBE_INTERVAL);
    }
    Ok(slowest)
}

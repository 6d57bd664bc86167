//! What others notice of an attack: a client that chats through the router, and probes of both processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::json;
use tests::http;
use tokio::task::{AbortHandle, JoinSet};

/// Time between two probes of a process.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);

/// A client that sends one request after the other, and a prober.
pub(crate) struct Bystander {
    stopping: Arc<AtomicBool>,
    answers: Arc<AtomicUsize>,
    client: JoinSet<anyhow::Result<Vec<Duration>>>,
    client_task: AbortHandle,
    prober: JoinSet<anyhow::Result<Duration>>,
}

/// What they saw.
pub(crate) struct Observed {
    /// Times to whole answers, sorted.
    answers: Vec<Duration>,
    /// The longest time that a probe took.
    pub(crate) slowest_probe: Duration,
}

impl Observed {
    /// The time within which `percent` of the answers were complete.
    pub(crate) fn percentile(&self, percent: usize) -> Duration {
        self.answers[(self.answers.len() * percent / 100).min(self.answers.len() - 1)]
    }
}

impl Bystander {
    /// Starts both: the client with chats at `url`, the prober with `probes`.
    pub(crate) fn start(url: String, probes: Vec<String>) -> Self {
        let stopping = Arc::new(AtomicBool::new(false));
        let answers = Arc::new(AtomicUsize::new(0));
        let (mut client, mut prober) = (JoinSet::new(), JoinSet::new());
        let client_task = client.spawn(chat(url, Arc::clone(&stopping), Arc::clone(&answers)));
        prober.spawn(probe(probes, Arc::clone(&stopping)));
        Self { stopping, answers, client, client_task, prober }
    }

    /// Waits until the client has had `count` answers, or has failed.
    pub(crate) async fn answered(&self, count: usize) {
        let mut poll = tokio::time::interval(PROBE_INTERVAL);
        while self.answers.load(Ordering::Relaxed) < count && !self.client_task.is_finished() {
            poll.tick().await;
        }
    }

    /// Ends both and gives what they saw. An answer that was lost or a probe that failed is an error.
    pub(crate) async fn stop(mut self) -> anyhow::Result<Observed> {
        // At least a few requests see the attack's aftermath, however short it was.
        self.answered(self.answers.load(Ordering::Relaxed) + 5).await;
        self.stopping.store(true, Ordering::Relaxed);
        let mut answers = self
            .client
            .join_next()
            .await
            .context("the client was started")??
            .context("the other client lost an answer")?;
        let slowest_probe =
            self.prober.join_next().await.context("the prober was started")??.context("a probe failed")?;
        answers.sort();
        Ok(Observed { answers, slowest_probe })
    }
}

async fn chat(
    url: String,
    stopping: Arc<AtomicBool>,
    answers: Arc<AtomicUsize>,
) -> anyhow::Result<Vec<Duration>> {
    let mut times = Vec::new();
    while !stopping.load(Ordering::Relaxed) {
        let body = json!({
            "model": "smollm2",
            "messages": [{"role": "user", "content": format!("Tell me about the number {}.", times.len())}],
            "max_tokens": 8,
            "ignore_eos": true,
        });
        let start = Instant::now();
        let answer = http::post(&url, &body).await?;
        ensure!(answer.status == 200, "status {}: {}", answer.status, answer.body);
        ensure!(answer.body["usage"]["completion_tokens"] == 8, "a whole answer: {}", answer.body);
        times.push(start.elapsed());
        answers.fetch_add(1, Ordering::Relaxed);
    }
    Ok(times)
}

async fn probe(addresses: Vec<String>, stopping: Arc<AtomicBool>) -> anyhow::Result<Duration> {
    let mut ticks = tokio::time::interval(PROBE_INTERVAL);
    let mut slowest = Duration::ZERO;
    while !stopping.load(Ordering::Relaxed) {
        ticks.tick().await;
        for address in &addresses {
            let start = Instant::now();
            let answer = http::get(&format!("http://{address}/v2/health/live")).await?;
            ensure!(answer.status == 200, "{address}: status {}", answer.status);
            slowest = slowest.max(start.elapsed());
        }
    }
    Ok(slowest)
}

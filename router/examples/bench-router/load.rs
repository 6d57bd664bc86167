//! The load: sequential requests, requests at a fixed rate, or many open streams.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::client::{Client, Kind, RequestTimes};

/// The number of connections that are opened concurrently.
const OPENED_AT_ONCE: usize = 64;
/// The longest wait for a replica to notice that a client has disconnected.
const GONE_MAX: Duration = Duration::from_millis(500);

/// Connected clients that have received an answer, so that their connections are open before the measurement.
pub(crate) struct Clients {
    clients: Vec<Client>,
    targets: Vec<SocketAddr>,
    kind: Kind,
}

impl Clients {
    pub(crate) async fn connect(targets: &[SocketAddr], count: usize, kind: Kind) -> anyhow::Result<Self> {
        let mut clients = Vec::with_capacity(count);
        for &target in targets.iter().cycle().take(count) {
            clients.push(Client::connect(target, kind).await?);
        }
        // All clients start at the same time, because a router opens as many connections as there are concurrent
        // requests.
        let mut asking = JoinSet::new();
        for mut client in clients.drain(..) {
            asking.spawn(async move {
                client.ask().await?;
                anyhow::Ok(client)
            });
        }
        while let Some(asked) = asking.join_next().await {
            clients.push(asked??);
        }
        Ok(Self { clients, targets: targets.to_vec(), kind })
    }

    /// Lets each client send its next request as soon as it has received the previous answer.
    pub(crate) async fn ask_for(self, time: Duration) -> anyhow::Result<Vec<RequestTimes>> {
        let until = Instant::now() + time;
        let mut tasks = JoinSet::new();
        for mut client in self.clients {
            tasks.spawn(async move {
                let mut all = Vec::new();
                while Instant::now() < until {
                    all.push(client.ask().await?);
                }
                anyhow::Ok(all)
            });
        }
        let mut all = Vec::new();
        while let Some(ended) = tasks.join_next().await {
            all.extend(ended??);
        }
        Ok(all)
    }

    /// Sends requests at a fixed rate, whether or not the previous ones have been answered.
    pub(crate) async fn ask_at(mut self, rate: u32, time: Duration) -> anyhow::Result<Vec<RequestTimes>> {
        let mut ticks = tokio::time::interval(Duration::from_secs(1) / rate);
        let mut under_way = JoinSet::new();
        let mut all = Vec::new();
        let count = (time.as_secs_f64() * f64::from(rate)) as usize;
        for number in 0..count {
            loop {
                tokio::select! {
                    Some(ended) = under_way.join_next() => {
                        let (client, took): (Client, anyhow::Result<RequestTimes>) = ended?;
                        all.push(took?);
                        self.clients.push(client);
                    }
                    _ = ticks.tick() => break,
                }
            }
            let mut client = match self.clients.pop() {
                Some(client) => client,
                None => Client::connect(self.targets[number % self.targets.len()], self.kind).await?,
            };
            under_way.spawn(async move {
                let took = client.ask().await;
                (client, took)
            });
        }
        while let Some(ended) = under_way.join_next().await {
            all.push(ended?.1?);
        }
        Ok(all)
    }
}

/// Opens `count` streams and reads the first event of each.
pub(crate) async fn open_streams(targets: &[SocketAddr], count: usize) -> anyhow::Result<Vec<Client>> {
    let mut open = Vec::with_capacity(count);
    let mut opening = JoinSet::new();
    let mut targets = targets.iter().cycle();
    while open.len() < count {
        while opening.len() < OPENED_AT_ONCE.min(count - open.len()) {
            let Some(&target) = targets.next() else { return Ok(open) };
            opening.spawn(async move {
                let mut client = Client::connect(target, Kind::Idle).await?;
                client.open().await?;
                anyhow::Ok(client)
            });
        }
        if let Some(opened) = opening.join_next().await {
            open.push(opened??);
        }
    }
    Ok(open)
}

/// Paced streams and the number of their events.
pub(crate) struct PacedStreams {
    tasks: JoinSet<anyhow::Result<()>>,
    events: Arc<AtomicU64>,
}

impl PacedStreams {
    pub(crate) async fn open(targets: &[SocketAddr], count: usize) -> anyhow::Result<Self> {
        let events = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        for &target in targets.iter().cycle().take(count) {
            let mut client = Client::connect(target, Kind::Paced).await?;
            let answer = client.open().await?;
            let events = Arc::clone(&events);
            tasks.spawn(async move { client.count(answer, &events).await });
        }
        Ok(Self { tasks, events })
    }

    /// The number of events of all streams so far.
    pub(crate) fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }

    /// Returns the number of streams that have ended since the previous call.
    ///
    /// # Errors
    /// A stream broke.
    pub(crate) fn ended(&mut self) -> anyhow::Result<usize> {
        let mut count = 0;
        while let Some(ended) = self.tasks.try_join_next() {
            ended??;
            count += 1;
        }
        Ok(count)
    }
}

/// Measures the time in seconds until a replica notices that a client has disconnected, for `count` clients. The time
/// is infinite if the replica does not notice within [`GONE_MAX`].
pub(crate) async fn leave(
    target: SocketAddr,
    gone: &mut mpsc::Receiver<Instant>,
    count: usize,
) -> anyhow::Result<Vec<f64>> {
    let mut all = Vec::with_capacity(count);
    for _ in 0..count {
        let mut client = Client::connect(target, Kind::Idle).await?;
        client.open().await?;
        while gone.try_recv().is_ok() {}
        let left = Instant::now();
        drop(client);
        let ended = tokio::time::timeout(GONE_MAX, gone.recv()).await;
        all.push(match ended {
            Ok(Some(at)) => at.saturating_duration_since(left).as_secs_f64(),
            _ => f64::INFINITY,
        });
    }
    Ok(all)
}

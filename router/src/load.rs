//! Receives the load reports of replicas: one stream per replica, which is reopened with a backoff when it breaks. For
//! replicas that do not report their load, this module requests the list of models over HTTP.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use http::{Request, Uri, header};
use proto::v1alpha1::WatchLoadRequest;
use proto::v1alpha1::replica_client::ReplicaClient;
use serde::Deserialize;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::MissedTickBehavior;
use tonic::transport::Endpoint;

use crate::discovery::DiscoveredReplica;
use crate::dispatch::Dispatcher;
use crate::proxy::request_body::RequestBody;
use crate::proxy::upstream::{ReplicaConnection, rejects_router};
use crate::replica::{ListedModel, Replica};
use crate::replicas::ReplicasUpdate;

/// Time within which a replica must accept a connection for load reports, and within which it must then open the
/// stream. A replica must also return its list of models within this time.
///
/// If exceeded: the router retries.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time between two load reports on an open stream. Replicas report at least every second.
///
/// If exceeded: the router reopens the stream.
const SILENCE_MAX: Duration = Duration::from_secs(15);
/// The first pause before a stream is reopened. It doubles with each failure.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
/// The longest pause before a stream is reopened.
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// The interval between requests for the models of a replica that does not report its load.
const MODELS_INTERVAL: Duration = Duration::from_secs(2);
/// Size of the list of models that a replica returns.
///
/// If exceeded: the router ignores the list, and requests it again later.
const MODELS_BYTES_MAX: usize = 256 * 1024;
/// Size of a load report.
///
/// If exceeded: the router reopens the stream.
const REPORT_BYTES_MAX: usize = 256 * 1024;
/// The interval at which the ledgers are checked for dispatches that were lost on the network.
const EXPIRE_INTERVAL: Duration = Duration::from_secs(5);
/// The interval at which waiting requests are compared with all replicas, to find room that no report announces.
const PLACE_INTERVAL: Duration = Duration::from_millis(100);

/// Follows discovery, and receives the reports of each replica until the replica is removed.
///
/// # Cancel safety
/// Dropping the future ends all tasks that it has started.
pub async fn run(dispatcher: Arc<Dispatcher>, mut discovered: watch::Receiver<Vec<DiscoveredReplica>>) {
    let mut tasks = JoinSet::new();
    let mut listening: Vec<(Arc<Replica>, AbortHandle)> = Vec::new();
    let mut expiries = interval(EXPIRE_INTERVAL);
    let mut place_ticks = interval(PLACE_INTERVAL);
    loop {
        let present = discovered.borrow_and_update().clone();
        let ReplicasUpdate { added, removed } = dispatcher.replicas.update(&present);
        for replica in &removed {
            tracing::info!(replica = replica.discovered.name, "a replica was removed");
            dispatcher.health().remove(replica.identity);
        }
        listening.retain(|(replica, task)| {
            let stays = !replica.is_removed();
            if !stays {
                task.abort();
            }
            stays
        });
        for replica in added {
            tracing::info!(replica = replica.discovered.name, "a replica was added");
            dispatcher.health().add(replica.identity);
            let (dispatcher, reporter) = (Arc::clone(&dispatcher), Arc::clone(&replica));
            let task = tasks.spawn(async move { listen(&dispatcher, &reporter).await });
            listening.push((replica, task));
        }
        dispatcher.place_all_waiting();
        loop {
            tokio::select! {
                changed = discovered.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return,
                },
                Some(_) = tasks.join_next() => {}
                _ = expiries.tick() => expire(&dispatcher),
                _ = place_ticks.tick() => dispatcher.place_all_waiting(),
            }
        }
    }
}

fn interval(period: Duration) -> tokio::time::Interval {
    let mut interval = tokio::time::interval(period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

fn expire(dispatcher: &Dispatcher) {
    for replica in dispatcher.replicas.all().iter() {
        let expired = replica.ledger.expire(Instant::now());
        if expired > 0 {
            dispatcher.metrics().record_expired_dispatches(expired);
            tracing::debug!(
                replica = replica.discovered.name,
                expired,
                "dispatches that no load report includes no longer count as load"
            );
        }
    }
}

/// Receives the reports of a replica, or requests its models if it does not report its load, until the task is aborted.
async fn listen(dispatcher: &Arc<Dispatcher>, replica: &Arc<Replica>) {
    let mut backoff = BACKOFF_MIN;
    loop {
        let started = Instant::now();
        let ended = match replica.discovered.grpc {
            Some(address) => receive_reports(dispatcher, replica, address).await,
            None => poll_models(dispatcher, replica).await,
        };
        let problem = ended.err().map_or_else(
            || "the replica closed the stream of load reports".to_owned(),
            |error| format!("{error:#}"),
        );
        {
            let mut status = replica.status();
            if status.is_connected || status.problem.is_none() {
                tracing::warn!(
                    replica = replica.discovered.name,
                    problem,
                    "failed to receive the load reports or the models of the replica"
                );
            }
            status.is_connected = false;
            status.problem = Some(problem);
        }
        if started.elapsed() > BACKOFF_MAX {
            backoff = BACKOFF_MIN;
        }
        // The jitter spreads the attempts of several routers.
        tokio::time::sleep(backoff.mul_f64(jitter(started))).await;
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

/// Returns a random factor between 0.5 and 1.5.
fn jitter(moment: Instant) -> f64 {
    use std::hash::{BuildHasher as _, RandomState};
    let random = RandomState::new().hash_one(moment);
    0.5 + (random >> 11) as f64 / (1_u64 << 53) as f64
}

/// Receives a stream of reports until it breaks.
async fn receive_reports(
    dispatcher: &Arc<Dispatcher>,
    replica: &Arc<Replica>,
    address: SocketAddr,
) -> anyhow::Result<()> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(SILENCE_MAX);
    let channel = endpoint.connect().await.context("failed to connect")?;
    let mut client = ReplicaClient::new(channel).max_decoding_message_size(REPORT_BYTES_MAX);
    let mut request = tonic::Request::new(WatchLoadRequest { router: dispatcher.replicas.router() });
    dispatcher.replicas.authenticate(request.metadata_mut().as_mut());
    let opened = tokio::time::timeout(CONNECT_TIMEOUT, client.watch_load(request)).await;
    let mut stream = opened
        .with_context(|| {
            format!("the replica did not open the stream of load reports within {CONNECT_TIMEOUT:?}")
        })?
        .context("failed to open the stream of load reports")?
        .into_inner();
    {
        let mut status = replica.status();
        status.is_connected = true;
        status.problem = None;
    }
    let mut listing = std::pin::pin!(list_models_once(dispatcher, replica));
    loop {
        let message = tokio::select! {
            message = tokio::time::timeout(SILENCE_MAX, stream.message()) => message,
            () = &mut listing => continue,
        };
        let Some(load) = message
            .with_context(|| format!("the replica sent no load report for {SILENCE_MAX:?}"))?
            .context("the stream of load reports broke")?
        else {
            return Ok(());
        };
        let Some(changes) = dispatcher.replicas.observe(replica, load, Instant::now()) else { continue };
        if changes.is_new_process {
            dispatcher.health().reset(replica.identity);
        }
        dispatcher.place_waiting_at(replica);
    }
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    #[serde(flatten)]
    listed: ListedModel,
}

fn by_name(models: Vec<Model>) -> BTreeMap<String, ListedModel> {
    models.into_iter().map(|Model { id, listed }| (id, listed)).collect()
}

/// Requests the list of models of a replica, because the load reports contain only the names, and retries until the
/// replica has listed its models. The future stays pending after that, so that the caller can race it against the
/// stream of reports.
async fn list_models_once(dispatcher: &Dispatcher, replica: &Replica) {
    loop {
        let answer = tokio::time::timeout(CONNECT_TIMEOUT, request_models(dispatcher, replica)).await;
        if let Ok(Ok((models, _))) = answer
            && !models.is_empty()
        {
            replica.status().listed_models = by_name(models);
            return std::future::pending().await;
        }
        tokio::time::sleep(MODELS_INTERVAL).await;
    }
}

/// Requests the models of a replica periodically, until a request fails.
async fn poll_models(dispatcher: &Arc<Dispatcher>, replica: &Arc<Replica>) -> anyhow::Result<()> {
    loop {
        let answer = tokio::time::timeout(CONNECT_TIMEOUT, request_models(dispatcher, replica)).await;
        let (models, store_id) = answer
            .with_context(|| format!("the replica did not list its models within {CONNECT_TIMEOUT:?}"))??;
        let names = models.iter().map(|model| model.id.clone()).collect();
        replica.status().listed_models = by_name(models);
        dispatcher.replicas.observe_models(replica, names, store_id);
        dispatcher.place_waiting_at(replica);
        tokio::time::sleep(MODELS_INTERVAL).await;
    }
}

/// The header with the `store_id` of a replica that does not report its load.
const STORE_ID: &str = "x-ovfleet-store-id";

/// Requests the models of a replica and the ID of its store, which is 0 if the replica has no store.
async fn request_models(dispatcher: &Dispatcher, replica: &Replica) -> anyhow::Result<(Vec<Model>, u64)> {
    let mut connection = ReplicaConnection::connect(replica.discovered.http, CONNECT_TIMEOUT)
        .await
        .context("failed to connect")?;
    let mut request = Request::new(RequestBody::default());
    *request.uri_mut() = Uri::from_static("/v3/models");
    request.headers_mut().insert(header::HOST, replica.authority.clone());
    dispatcher.replicas.authenticate(request.headers_mut());
    let head = connection.send(request).await.context("failed to list the models")?;
    anyhow::ensure!(
        !rejects_router(&head),
        "the replica rejected this router, because the router's replica token is missing or invalid"
    );
    anyhow::ensure!(
        head.status.is_success(),
        "the replica answered GET /v3/models with status {}",
        head.status
    );
    let mut body = Vec::new();
    while let Some(bytes) = connection.next().await {
        body.extend_from_slice(&bytes.context("failed to read the list of models")?);
        anyhow::ensure!(
            body.len() <= MODELS_BYTES_MAX,
            "the list of models is larger than {MODELS_BYTES_MAX} bytes"
        );
    }
    let list: ModelList = serde_json::from_slice(&body).context("failed to parse the list of models")?;
    let store_id = head.headers.get(STORE_ID).and_then(|value| value.to_str().ok());
    let store_id = store_id.and_then(|value| u64::from_str_radix(value, 16).ok()).unwrap_or(0);
    Ok((list.data, store_id))
}

//! Listens to what replicas report: one stream each, opened again with patience when it breaks. Replicas that
//! report nothing are asked for their models over HTTP.

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
use crate::dispatch::Dispatch;
use crate::proxy::request_body::RequestBody;
use crate::proxy::upstream::{Link, rejects_router};
use crate::replica::Replica;
use crate::replicas::ReplicasUpdate;

/// Time in which a replica must open a stream of load reports.
///
/// Beyond it: the router tries again.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for which a replica may send no load report on an open stream. Replicas report every second.
///
/// Beyond it: the router opens the stream again.
const SILENCE_MAX: Duration = Duration::from_secs(15);
/// The pause before a stream is opened again: at first,
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// and at most, since it doubles.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// How often a replica that reports nothing is asked for its models.
const MODELS_INTERVAL: Duration = Duration::from_secs(2);
/// Size of the list of models that a replica returns.
///
/// Beyond it: the router ignores the list and requests it again later.
const MODELS_BYTES_MAX: usize = 256 * 1024;
/// Size of a load report.
///
/// Beyond it: the router opens the stream again.
const REPORT_BYTES_MAX: usize = 256 * 1024;
/// How often the ledgers are looked through for dispatches that were lost.
const EXPIRE_INTERVAL: Duration = Duration::from_secs(5);
/// How often requests that wait are compared with all replicas, for room that no report announces.
const PUMP_INTERVAL: Duration = Duration::from_millis(100);

/// Follows what discovery finds, and listens to each replica for as long as it is there.
///
/// # Cancel safety
/// Dropping it ends all it has begun.
pub async fn run(dispatch: Arc<Dispatch>, mut found: watch::Receiver<Vec<DiscoveredReplica>>) {
    let mut tasks = JoinSet::new();
    let mut listening: Vec<(Arc<Replica>, AbortHandle)> = Vec::new();
    let mut expiries = interval(EXPIRE_INTERVAL);
    let mut pumps = interval(PUMP_INTERVAL);
    loop {
        let present = found.borrow_and_update().clone();
        let ReplicasUpdate { added, removed } = dispatch.replicas.update(&present);
        for replica in &removed {
            tracing::info!(replica = replica.discovered.name, "a replica is gone");
            dispatch.health().remove(replica.identity);
        }
        listening.retain(|(replica, task)| {
            let stays = !replica.is_removed();
            if !stays {
                task.abort();
            }
            stays
        });
        for replica in added {
            tracing::info!(replica = replica.discovered.name, "a replica is there");
            dispatch.health().add(replica.identity);
            let (dispatch, listened) = (Arc::clone(&dispatch), Arc::clone(&replica));
            let task = tasks.spawn(async move { listen(&dispatch, &listened).await });
            listening.push((replica, task));
        }
        dispatch.pump_all();
        loop {
            tokio::select! {
                changed = found.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return,
                },
                Some(_) = tasks.join_next() => {}
                _ = expiries.tick() => expire(&dispatch),
                _ = pumps.tick() => dispatch.pump_all(),
            }
        }
    }
}

fn interval(period: Duration) -> tokio::time::Interval {
    let mut interval = tokio::time::interval(period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

fn expire(dispatch: &Dispatch) {
    for replica in dispatch.replicas.all().iter() {
        let expired = replica.ledger.expire(Instant::now());
        if expired > 0 {
            dispatch.metrics().record_expired_dispatches(expired);
            tracing::debug!(replica = replica.discovered.name, expired, "dispatches that no report included");
        }
    }
}

/// Listens to a replica until it is not wanted any more.
async fn listen(dispatch: &Arc<Dispatch>, replica: &Arc<Replica>) {
    let mut pause = PAUSE_MIN;
    loop {
        let began = Instant::now();
        let ended = match replica.discovered.grpc {
            Some(address) => reports(dispatch, replica, address).await,
            None => models(dispatch, replica).await,
        };
        let problem = ended.err().map_or_else(|| "the stream ended".to_owned(), |error| format!("{error:#}"));
        {
            let mut status = replica.status();
            if status.is_connected || status.problem.is_none() {
                tracing::warn!(replica = replica.discovered.name, problem, "the load is not reported");
            }
            status.is_connected = false;
            status.problem = Some(problem);
        }
        if began.elapsed() > PAUSE_MAX {
            pause = PAUSE_MIN;
        }
        // Not all routers at the same moment.
        tokio::time::sleep(pause.mul_f64(jitter(began))).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// From a half to one and a half.
fn jitter(moment: Instant) -> f64 {
    use std::hash::{BuildHasher as _, RandomState};
    let random = RandomState::new().hash_one(moment);
    0.5 + (random >> 11) as f64 / (1_u64 << 53) as f64
}

/// Takes in a stream of reports until it breaks.
async fn reports(
    dispatch: &Arc<Dispatch>,
    replica: &Arc<Replica>,
    address: SocketAddr,
) -> anyhow::Result<()> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(SILENCE_MAX);
    let channel = endpoint.connect().await.context("failed to connect")?;
    let mut client = ReplicaClient::new(channel).max_decoding_message_size(REPORT_BYTES_MAX);
    let mut request = tonic::Request::new(WatchLoadRequest { router: dispatch.replicas.router() });
    dispatch.replicas.authenticate(request.metadata_mut().as_mut());
    let opened = tokio::time::timeout(CONNECT_TIMEOUT, client.watch_load(request)).await;
    let mut stream = opened.context("it did not answer in time")?.context("failed to listen")?.into_inner();
    {
        let mut status = replica.status();
        status.is_connected = true;
        status.problem = None;
    }
    let mut described = std::pin::pin!(describe(dispatch, replica));
    loop {
        let message = tokio::select! {
            message = tokio::time::timeout(SILENCE_MAX, stream.message()) => message,
            () = &mut described => continue,
        };
        let Some(load) = message.context("it says nothing any more")?.context("the stream broke")? else {
            return Ok(());
        };
        let Some(changed) = dispatch.replicas.observe(replica, load, Instant::now()) else { continue };
        if changed.is_new_process {
            dispatch.health().reset(replica.identity);
        }
        dispatch.pump_at(replica);
    }
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    max_model_len: Option<u64>,
}

/// What of their lists is passed on.
fn max_model_lens(models: &[Model]) -> BTreeMap<String, u64> {
    models.iter().filter_map(|model| Some((model.id.clone(), model.max_model_len?))).collect()
}

/// Asks a replica that reports for what its reports do not say of its models, until it has answered. Never ends.
async fn describe(dispatch: &Dispatch, replica: &Replica) {
    loop {
        let asked = tokio::time::timeout(CONNECT_TIMEOUT, ask_models(dispatch, replica)).await;
        if let Ok(Ok((models, _))) = asked
            && !models.is_empty()
        {
            replica.status().max_model_lens = max_model_lens(&models);
            return std::future::pending().await;
        }
        tokio::time::sleep(MODELS_INTERVAL).await;
    }
}

/// Asks for the models again and again.
async fn models(dispatch: &Arc<Dispatch>, replica: &Arc<Replica>) -> anyhow::Result<()> {
    loop {
        let asked = tokio::time::timeout(CONNECT_TIMEOUT, ask_models(dispatch, replica)).await;
        let (models, keeper) = asked.context("it did not answer in time")??;
        replica.status().max_model_lens = max_model_lens(&models);
        let names = models.into_iter().map(|model| model.id).collect();
        dispatch.replicas.observe_models(replica, names, keeper);
        dispatch.pump_at(replica);
        tokio::time::sleep(MODELS_INTERVAL).await;
    }
}

/// The header by which a replica that does not report says which number is in the names of what it keeps.
const KEEPER: &str = "x-ovfleet-keeper";

/// Its models, and the number in the names of what it keeps; 0 if it does not say.
async fn ask_models(dispatch: &Dispatch, replica: &Replica) -> anyhow::Result<(Vec<Model>, u64)> {
    let mut link =
        Link::connect(replica.discovered.http, CONNECT_TIMEOUT).await.context("failed to connect")?;
    let mut request = Request::new(RequestBody::default());
    *request.uri_mut() = Uri::from_static("/v3/models");
    request.headers_mut().insert(header::HOST, replica.authority.clone());
    dispatch.replicas.authenticate(request.headers_mut());
    let head = link.send(request).await.context("failed to ask")?;
    anyhow::ensure!(!rejects_router(&head), "it rejected the replica token of this router");
    anyhow::ensure!(head.status.is_success(), "it answered {}", head.status);
    let mut body = Vec::new();
    while let Some(bytes) = link.next().await {
        body.extend_from_slice(&bytes.context("the answer broke off")?);
        anyhow::ensure!(body.len() <= MODELS_BYTES_MAX, "its list of models is too long");
    }
    let list: ModelList = serde_json::from_slice(&body).context("this is no list of models")?;
    let keeper = head.headers.get(KEEPER).and_then(|keeper| keeper.to_str().ok());
    let keeper = keeper.and_then(|keeper| u64::from_str_radix(keeper, 16).ok()).unwrap_or(0);
    Ok((list.data, keeper))
}

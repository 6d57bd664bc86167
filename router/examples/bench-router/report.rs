//! The load reports of a replica, as the server sends them: one when a router connects, one 20 ms after a change, and
//! otherwise one every second. Each report lists the dispatches that it includes.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use proto::v1alpha1::replica_server::{self, ReplicaServer};
use proto::v1alpha1::{
    DispatchRange, Dispatches, DrainProgress, DrainRequest, Load, State, WatchLoadRequest,
};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use crate::client::MODEL;

/// Changes within this time are combined in one report.
const GATHERED: Duration = Duration::from_millis(20);
/// The time between reports if nothing changes.
const INTERVAL: Duration = Duration::from_secs(1);
/// The number of cache blocks, which is larger than the load needs.
const BLOCKS: u32 = 1 << 20;

/// The ID of the router and the number of the dispatch in the header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dispatch {
    pub(crate) router: u64,
    pub(crate) number: u64,
}

impl Dispatch {
    /// Parses the header.
    pub(crate) fn read(value: &str) -> Option<Self> {
        let (router, number) = value.split_once('/')?;
        Some(Self { router: u64::from_str_radix(router, 16).ok()?, number: number.parse().ok()? })
    }
}

/// A simulated replica.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    epoch: u64,
    /// The number of requests so far.
    pub(crate) seen: AtomicU64,
    now: Mutex<ReplicaState>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct ReplicaState {
    report: u64,
    running: u32,
    /// The ID of the router that sent the last request with a dispatch header. `included` contains the numbers of its
    /// dispatches.
    router: u64,
    included: Vec<DispatchRange>,
}

/// An active request. Dropping it ends the request.
pub(crate) struct Work<'a>(&'a Replica);

impl Replica {
    pub(crate) fn new(epoch: u64, http: SocketAddr, grpc: SocketAddr) -> Self {
        let (now, changed) = (Mutex::default(), Notify::new());
        Self { http, grpc, epoch: epoch + 1, seen: AtomicU64::new(0), now, changed }
    }

    /// Starts a request.
    pub(crate) fn work(&self, dispatch: Option<Dispatch>) -> Work<'_> {
        self.seen.fetch_add(1, Ordering::Relaxed);
        let mut now = self.now();
        now.running += 1;
        if let Some(Dispatch { router, number }) = dispatch {
            if now.router != router {
                now.router = router;
                now.included.clear();
            }
            include(&mut now.included, number);
        }
        drop(now);
        self.changed.notify_one();
        Work(self)
    }

    fn now(&self) -> MutexGuard<'_, ReplicaState> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, router: u64) -> Load {
        let mut now = self.now();
        now.report += 1;
        let ranges = if now.router == router { now.included.clone() } else { Vec::new() };
        let blocks_active = now.running * 5;
        let blocks_evictable = BLOCKS / 2;
        Load {
            epoch: self.epoch,
            report: now.report,
            state: State::Serving.into(),
            models: vec![MODEL.to_owned()],
            blocks_total: BLOCKS,
            blocks_active,
            blocks_evictable,
            blocks_free: BLOCKS - blocks_evictable - blocks_active,
            block_tokens: 16,
            running: now.running,
            sequences_max: 1 << 15,
            requests_max: 1 << 15,
            prefill_tokens_per_second: 20_000.0,
            decode_tokens_per_second: 5_000.0,
            dispatches: Some(Dispatches { router, ranges }),
            ..Load::default()
        }
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        self.0.now().running -= 1;
        self.0.changed.notify_one();
    }
}

/// Adds a number to ascending ranges that are not adjacent.
fn include(ranges: &mut Vec<DispatchRange>, number: u64) {
    let at = ranges.partition_point(|range| range.first <= number);
    if at > 0 && ranges[at - 1].last + 1 >= number {
        ranges[at - 1].last = ranges[at - 1].last.max(number);
    } else {
        ranges.insert(at, DispatchRange { first: number, last: number });
        return join(ranges, at);
    }
    join(ranges, at - 1);
}

/// Joins a range with the next one if they are adjacent.
fn join(ranges: &mut Vec<DispatchRange>, at: usize) {
    if ranges.get(at + 1).is_some_and(|next| next.first == ranges[at].last + 1) {
        ranges[at].last = ranges.remove(at + 1).last;
    }
}

/// Serves the reports of a replica.
pub(crate) async fn serve(replica: Arc<Replica>, listener: TcpListener) {
    let server = tonic::transport::Server::builder().add_service(ReplicaServer::new(Reports(replica)));
    if let Err(error) = server.serve_with_incoming(TcpListenerStream::new(listener)).await {
        eprintln!("warning: a replica stopped reporting: {error}");
    }
}

struct Reports(Arc<Replica>);

type ReportStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl replica_server::Replica for Reports {
    type WatchLoadStream = ReportStream<Load>;
    type DrainStream = ReportStream<DrainProgress>;

    async fn watch_load(
        &self,
        request: Request<WatchLoadRequest>,
    ) -> Result<Response<Self::WatchLoadStream>, Status> {
        let router = request.into_inner().router;
        let first = stream::iter([Ok::<_, Status>(self.0.report(router))]);
        let further = stream::unfold(Arc::clone(&self.0), move |replica| async move {
            if tokio::time::timeout(INTERVAL, replica.changed.notified()).await.is_ok() {
                tokio::time::sleep(GATHERED).await;
            }
            Some((Ok(replica.report(router)), replica))
        });
        Ok(Response::new(first.chain(further).boxed()))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<Self::DrainStream>, Status> {
        Err(Status::unimplemented("these replicas do not support draining"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_any_order_form_the_fewest_ranges() {
        let mut ranges = Vec::new();
        for number in [3, 1, 2, 7, 5, 9, 6, 8, 4] {
            include(&mut ranges, number);
            assert!(ranges.windows(2).all(|pair| pair[0].last + 1 < pair[1].first), "{ranges:?}");
        }
        assert_eq!(ranges, [DispatchRange { first: 1, last: 9 }]);
    }
}

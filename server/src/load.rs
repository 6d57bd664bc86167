//! The load reports of the replica: one task creates the reports, and a stream for each router forwards them.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use proto::v1alpha1::replica_server::Replica;
use proto::v1alpha1::{DrainProgress, DrainRequest, Load, State, WatchLoadRequest};
use server_engine::{EngineLoad, EngineState};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status};

use crate::app::App;
use crate::lifecycle::Phase;

/// Changes within this time are combined into one report.
const COALESCE: Duration = Duration::from_millis(20);
/// The time after which a report is sent even without a significant change.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// A change in the number of active or evictable blocks is reported before the next heartbeat if it exceeds the total
/// number of blocks divided by this number.
const BLOCKS_PART: u32 = 50;
/// Number of open gRPC streams that report the load or the progress of draining.
///
/// If exceeded: the gRPC call fails with `RESOURCE_EXHAUSTED`.
const STREAMS_MAX: usize = 256;

/// Sends load reports. Never returns.
///
/// # Cancel safety
/// Dropping the future stops the reports.
pub async fn publish(app: App, reports: watch::Sender<Load>) {
    let mut phase = app.lifecycle().watch();
    let mut engine: Option<watch::Receiver<EngineLoad>> = None;
    let mut number = 0;
    loop {
        phase.mark_unchanged();
        if engine.is_none() {
            engine = app.loaded().map(|served| served.engine.load());
        }
        let reported = engine.as_mut().map_or_else(EngineLoad::default, |engine| *engine.borrow_and_update());
        number += 1;
        // Send the report under the lock of the dispatches, so that a reader gets exactly the dispatches that the
        // report includes.
        app.dispatches()
            .include_accepted(reported.submissions, || reports.send_replace(report(&app, &reported, number)));
        let heartbeat = Instant::now() + HEARTBEAT;
        tokio::select! {
            // Waiting never fails, because `app` owns the sender.
            _ = phase.changed() => sleep(COALESCE).await,
            () = significant_change(&mut engine, reported) => sleep(COALESCE).await,
            () = sleep_until(heartbeat) => {}
        }
    }
}

/// Waits until the engine's load differs significantly from the reported load.
async fn significant_change(engine: &mut Option<watch::Receiver<EngineLoad>>, reported: EngineLoad) {
    if let Some(engine) = engine
        && engine.wait_for(|load| differs(&reported, load)).await.is_ok()
    {
        return;
    }
    // Without an engine, or after it has ended, only the phase can change.
    std::future::pending().await
}

fn differs(reported: &EngineLoad, current: &EngineLoad) -> bool {
    let (before, after) = (&reported.load, &current.load);
    let far = |before: u32, after: u32, total: u32| before.abs_diff(after) > total / BLOCKS_PART;
    (reported.state, reported.sleep_level) != (current.state, current.sleep_level)
        || (before.running, before.waiting) != (after.running, after.waiting)
        || before.unencoded_image_tokens != after.unencoded_image_tokens
        || before.blocks_total != after.blocks_total
        || far(before.blocks_active, after.blocks_active, after.blocks_total)
        || far(before.blocks_evictable, after.blocks_evictable, after.blocks_total)
}

fn report(app: &App, engine: &EngineLoad, number: u64) -> Load {
    let state = match app.lifecycle().phase() {
        Phase::Starting => State::Starting,
        // The engine's thread is still starting, so the size of its cache is unknown.
        Phase::Serving if engine.state == EngineState::Starting => State::Starting,
        Phase::Serving if app.is_ready() => State::Serving,
        Phase::Draining | Phase::Stopping => State::Draining,
        Phase::Serving | Phase::Stopped => State::Stopped,
    };
    let served = app.loaded();
    let load = &engine.load;
    Load {
        epoch: app.epoch(),
        report: number,
        state: state.into(),
        models: served.map_or_else(Vec::new, |served| served.model.served_names().cloned().collect()),
        blocks_total: load.blocks_total,
        blocks_active: load.blocks_active,
        blocks_evictable: load.blocks_evictable,
        blocks_free: load.blocks_free,
        block_tokens: served.map_or(0, |served| served.block_tokens),
        running: load.running,
        waiting: load.waiting,
        uncomputed_tokens: load.uncomputed_tokens,
        sequences_max: served.map_or(0, |served| served.max_num_seqs),
        requests_max: u32::try_from(app.admission().max_requests()).unwrap_or(u32::MAX),
        prefill_tokens_per_second: engine.prefill_tokens_per_second,
        decode_tokens_per_second: engine.decode_tokens_per_second,
        preemptions_total: load.preemptions_total,
        unencoded_image_tokens: load.unencoded_image_tokens,
        image_tokens_per_second: engine.image_tokens_per_second,
        sleeping: engine.sleep_level.is_some(),
        // The stream of each router adds the dispatches of that router.
        dispatches: None,
        store_id: app.store().id_if_enabled(),
    }
}

/// The gRPC service that reports the load and drains the server.
#[derive(Clone, Debug)]
pub struct ReplicaService {
    app: App,
    reports: watch::Receiver<Load>,
    streams: Arc<Semaphore>,
}

impl ReplicaService {
    /// Creates a service that forwards the reports that [`publish`] sends.
    pub fn new(app: App, reports: watch::Receiver<Load>) -> Self {
        Self { app, reports, streams: Arc::new(Semaphore::new(STREAMS_MAX)) }
    }

    fn permit(&self) -> Result<OwnedSemaphorePermit, Status> {
        Arc::clone(&self.streams)
            .try_acquire_owned()
            .map_err(|_| Status::resource_exhausted(format!("too many open streams (limit: {STREAMS_MAX})")))
    }
}

type ReplyStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Replica for ReplicaService {
    type WatchLoadStream = ReplyStream<Load>;
    type DrainStream = ReplyStream<DrainProgress>;

    async fn watch_load(
        &self,
        request: Request<WatchLoadRequest>,
    ) -> Result<Response<Self::WatchLoadStream>, Status> {
        let permit = self.permit()?;
        let router = request.into_inner().router;
        let subscription = self.app.dispatches().subscribe(router);
        let (app, latest) = (self.app.clone(), self.reports.clone());
        // The stream begins with the current report, if there is one.
        let reports = WatchStream::new(self.reports.clone()).filter_map(move |_| {
            let _open = (&permit, &subscription);
            // Send the latest report and its dispatches. The report may be newer than the one that woke this stream.
            let load = app
                .dispatches()
                .with_included(router, |dispatches| Load { dispatches, ..latest.borrow().clone() });
            std::future::ready((load.report > 0).then_some(Ok(load)))
        });
        Ok(Response::new(Box::pin(reports)))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<Self::DrainStream>, Status> {
        let permit = self.permit()?;
        tracing::info!("draining: the server is no longer ready");
        self.app.lifecycle().advance(Phase::Draining);
        let state = (self.app.clone(), self.reports.clone(), None, permit);
        // The progress is checked whenever a report is sent, which happens at least once per second.
        let progress = stream::unfold(state, |(app, mut reports, sent, permit)| async move {
            if sent == Some(0) {
                return None;
            }
            loop {
                let requests = u32::try_from(app.requests()).unwrap_or(u32::MAX);
                if sent != Some(requests) {
                    return Some((Ok(DrainProgress { requests }), (app, reports, Some(requests), permit)));
                }
                reports.changed().await.ok()?;
            }
        });
        Ok(Response::new(Box::pin(progress)))
    }
}

//! The replica's load, told to the router: one task makes the reports, each caller's stream passes them on.

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

/// Changes within this time are one report.
const COALESCE: Duration = Duration::from_millis(20);
/// The longest time without a report.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// A change of the blocks in use matters if it is this part of all of them.
const BLOCKS_PART: u32 = 50;
/// Number of open gRPC streams, such as load reports to routers.
///
/// Beyond it: the gRPC call fails with `RESOURCE_EXHAUSTED`.
const STREAMS_MAX: usize = 256;

/// Makes reports for as long as it is polled.
///
/// # Cancel safety
/// Dropping it ends the reports.
pub async fn publish(app: App, reports: watch::Sender<Load>) {
    let mut phase = app.lifecycle().watch();
    let mut engine: Option<watch::Receiver<EngineLoad>> = None;
    let mut number = 0;
    loop {
        phase.mark_unchanged();
        if engine.is_none() {
            engine = app.loaded().map(|serving| serving.engine.load());
        }
        let told = engine.as_mut().map_or_else(EngineLoad::default, |engine| *engine.borrow_and_update());
        number += 1;
        // As one: whoever reads a report finds with it what it includes, no more and no less.
        app.dispatches().settle(told.submissions, || reports.send_replace(report(&app, &told, number)));
        let heartbeat = Instant::now() + HEARTBEAT;
        tokio::select! {
            // The sender is in `app`.
            _ = phase.changed() => sleep(COALESCE).await,
            () = matters(&mut engine, told) => sleep(COALESCE).await,
            () = sleep_until(heartbeat) => {}
        }
    }
}

/// Waits until the engine's load differs from what was told by more than who listens wants to ignore.
async fn matters(engine: &mut Option<watch::Receiver<EngineLoad>>, told: EngineLoad) {
    if let Some(engine) = engine
        && engine.wait_for(|load| differs(&told, load)).await.is_ok()
    {
        return;
    }
    // Without an engine, or after its end, only the phase changes.
    std::future::pending().await
}

fn differs(told: &EngineLoad, present: &EngineLoad) -> bool {
    let (before, after) = (&told.load, &present.load);
    let far = |before: u32, after: u32, total: u32| before.abs_diff(after) > total / BLOCKS_PART;
    (told.state, told.sleep_level) != (present.state, present.sleep_level)
        || (before.running, before.waiting) != (after.running, after.waiting)
        || before.blocks_total != after.blocks_total
        || far(before.blocks_active, after.blocks_active, after.blocks_total)
        || far(before.blocks_evictable, after.blocks_evictable, after.blocks_total)
}

fn report(app: &App, engine: &EngineLoad, number: u64) -> Load {
    let state = match app.lifecycle().phase() {
        Phase::Starting => State::Starting,
        // The engine's thread is not up yet, and its cache not told.
        Phase::Serving if engine.state == EngineState::Starting => State::Starting,
        Phase::Serving if app.is_ready() => State::Serving,
        Phase::Draining | Phase::Stopping => State::Draining,
        Phase::Serving | Phase::Stopped => State::Stopped,
    };
    let serving = app.loaded();
    let load = &engine.load;
    Load {
        epoch: app.epoch(),
        report: number,
        state: state.into(),
        models: serving.map_or_else(Vec::new, |serving| serving.model.served_names().cloned().collect()),
        blocks_total: load.blocks_total,
        blocks_active: load.blocks_active,
        blocks_evictable: load.blocks_evictable,
        blocks_free: load.blocks_free,
        block_tokens: serving.map_or(0, |serving| serving.block_tokens),
        running: load.running,
        waiting: load.waiting,
        uncomputed_tokens: load.uncomputed_tokens,
        sequences_max: serving.map_or(0, |serving| serving.sequences_max),
        requests_max: u32::try_from(app.admission().requests_max()).unwrap_or(u32::MAX),
        prefill_tokens_per_second: engine.prefill_tokens_per_second,
        decode_tokens_per_second: engine.decode_tokens_per_second,
        preemptions_total: load.preemptions_total,
        asleep: engine.sleep_level.is_some(),
        // They differ by listener.
        dispatches: None,
        store_id: if app.store().is_on() { app.store().keeper() } else { 0 },
    }
}

/// The gRPC service.
#[derive(Clone, Debug)]
pub struct ReplicaService {
    app: App,
    reports: watch::Receiver<Load>,
    streams: Arc<Semaphore>,
}

impl ReplicaService {
    /// Passes on what [`publish`] sends.
    pub fn new(app: App, reports: watch::Receiver<Load>) -> Self {
        Self { app, reports, streams: Arc::new(Semaphore::new(STREAMS_MAX)) }
    }

    fn permit(&self) -> Result<OwnedSemaphorePermit, Status> {
        Arc::clone(&self.streams)
            .try_acquire_owned()
            .map_err(|_| Status::resource_exhausted(format!("{STREAMS_MAX} streams are open already")))
    }
}

type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Replica for ReplicaService {
    type WatchLoadStream = Streamed<Load>;
    type DrainStream = Streamed<DrainProgress>;

    async fn watch_load(
        &self,
        request: Request<WatchLoadRequest>,
    ) -> Result<Response<Self::WatchLoadStream>, Status> {
        let permit = self.permit()?;
        let router = request.into_inner().router;
        let listening = self.app.dispatches().listen(router);
        let (app, present) = (self.app.clone(), self.reports.clone());
        // The present report comes at once, unless there is none yet.
        let reports = WatchStream::new(self.reports.clone()).filter_map(move |_| {
            let _open = (&permit, &listening);
            // The latest that there is by now, with what it includes.
            let load =
                app.dispatches().told(router, |dispatches| Load { dispatches, ..present.borrow().clone() });
            std::future::ready((load.report > 0).then_some(Ok(load)))
        });
        Ok(Response::new(Box::pin(reports)))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<Self::DrainStream>, Status> {
        let permit = self.permit()?;
        tracing::info!("asked to drain: not ready any more");
        self.app.lifecycle().advance(Phase::Draining);
        let state = (self.app.clone(), self.reports.clone(), None, permit);
        // Reports come with every change and at least once a second: often enough to count by.
        let progress = stream::unfold(state, |(app, mut reports, told, permit)| async move {
            if told == Some(0) {
                return None;
            }
            loop {
                let requests = u32::try_from(app.requests()).unwrap_or(u32::MAX);
                if told != Some(requests) {
                    return Some((Ok(DrainProgress { requests }), (app, reports, Some(requests), permit)));
                }
                reports.changed().await.ok()?;
            }
        });
        Ok(Response::new(Box::pin(progress)))
    }
}

//! Runs the process from start to end. The process binds its ports before it loads the model, so that errors are
//! reported immediately. It answers probes while it loads the model, serves requests until it receives a signal, and
//! then finishes the remaining requests.

mod services;
mod settings;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use axum::Router;
use process::logs;
use process::signals::EndSignals;
use proto::replica_token::ReplicaTokenFile;
use server_engine::{Engine, EngineHandle};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::api_rules::ApiRules;
use crate::app::{App, ServedModel};
use crate::args::{Args, Command, SleepArgs};
use crate::authentication::authenticated;
use crate::backend::BackendConfig;
use crate::compat::ovms_api;
use crate::lifecycle::Phase;
use crate::limits::{HttpLimits, InvalidGrammar, run_trial};
use crate::metrics::Metrics;
use crate::routes::{SleepApi, admin_router, router_with};
use crate::sleep::{level, sleep_when_idle};
use crate::{allocator, backend, fetch, listen, numa};
use services::{service_error, spawn_services};
use settings::Settings;

/// Time for clients to receive their errors after the engine has died.
const ERROR_DELIVERY_TIMEOUT: Duration = Duration::from_secs(1);
/// Time to store the background responses that are aborted when the process exits.
///
/// If exceeded: the final states of the remaining responses are not stored.
const STORE_TIMEOUT: Duration = Duration::from_secs(2);
/// Time within which the engine must stop after the last request, including writing cached blocks to
/// `--kv-spill-dir`. Together with [`STORE_TIMEOUT`], this is less than the time that remains of a pod's grace period
/// after `--drain-timeout`.
///
/// If exceeded: the process exits with an error, and cached blocks that are not yet written are lost.
const END_TIMEOUT: Duration = Duration::from_secs(12);

/// Returns the exit code of a process that failed with this error.
#[must_use]
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    if let Some(invalid) = error.downcast_ref::<InvalidGrammar>() {
        return invalid.exit_code();
    }
    error.downcast_ref::<fetch::Error>().map_or(ExitCode::FAILURE, fetch::Error::exit_code)
}

impl Args {
    /// Runs the subcommand or, without one, the server until it receives a signal to stop.
    ///
    /// # Errors
    /// The subcommand failed, the server could not start, the engine or a service of the server failed, the engine did
    /// not stop in time, or the server received a second signal while stopping.
    pub fn run(self) -> anyhow::Result<()> {
        logs::start(&self.log, self.log_format)?;
        // Bind before any other thread starts, because threads inherit the binding.
        numa::bind(self.numa_node, self.tensor_parallel_size)?;
        allocator::use_one_arena();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .context("failed to start the asynchronous runtime")?;
        let outcome = match self.command.clone() {
            Some(Command::Fetch(fetch)) => runtime.block_on(fetch.run()).map_err(Into::into),
            Some(Command::Drain(drain)) => runtime.block_on(drain.run()),
            Some(Command::TryGrammar) => run_trial(),
            None => runtime.block_on(run(self)),
        };
        // Do not wait for requests that are still being prepared.
        runtime.shutdown_background();
        outcome
    }
}

async fn run(args: Args) -> anyhow::Result<()> {
    let settings = args.into_settings();
    settings.backend.check()?;
    settings.limits.check()?;
    let token = settings.replica_token_file.as_deref().map(ReplicaTokenFile::open).transpose()?;
    let mut signals = EndSignals::new()?;
    let http = listen::bind(settings.host, settings.ports.http)?;
    let grpc = listen::bind(settings.host, settings.ports.grpc)?;
    let admin = match settings.ports.admin {
        Some(port) => Some(listen::bind(settings.host, port)?),
        None => None,
    };
    let names = settings.backend.names();
    let metrics = Metrics::new(&names[0], settings.backend.backend.name());
    let app = App::with_media(settings.limits, metrics.clone(), &settings.store, settings.media.clone())?;
    tracing::info!("listening on http://{}, gRPC on {}", http.local_addr()?, grpc.local_addr()?);
    // The admin port stays open until the process exits, so that probes are answered while the remaining requests
    // finish.
    let mut admin_listener = JoinSet::new();
    if let Some(admin) = admin {
        tracing::info!("serving metrics and probes on {}", admin.local_addr()?);
        let router = listen::conforming(admin_router(app.clone()));
        let limits = settings.limits.of_admin_port();
        admin_listener.spawn(listen::serve(admin, router, limits, CancellationToken::new()));
    }
    let mut server = HttpServer::new(app.clone());
    server.serve(http, api(&app, &settings, token.clone()), settings.limits);
    let mut services = JoinSet::new();
    spawn_services(&mut services, &app, grpc, token).await;

    let loading = load(settings.backend, metrics)?;
    let engine = tokio::select! {
        loaded = loading => {
            let (served, engine) = loaded.map_err(|_| anyhow!("the thread that loads the model panicked"))??;
            app.serve(served);
            engine
        }
        () = signals.next() => {
            tracing::info!("stopping: received a signal while the model was being loaded");
            return Ok(());
        }
        Some(ended) = services.join_next() => return Err(service_error(ended)),
    };
    tracing::info!("ready");
    let handle = engine.handle();
    tokio::select! {
        () = signals.next() => {}
        () = sleep_automatically(handle.clone(), &settings.sleep) => {}
        error = handle.wait_for_failure() => {
            server.deliver_errors().await;
            return Err(error.into());
        }
        Some(ended) = services.join_next() => return Err(service_error(ended)),
    }
    server.drain(settings.drain_timeout, &mut signals).await?;
    stop_engine(engine, signals).await
}

/// Returns the API with the layers that the settings enable.
fn api(app: &App, settings: &Settings, token: Option<ReplicaTokenFile>) -> Router {
    let sleep = if settings.sleep.enable_sleep_mode { SleepApi::Enabled } else { SleepApi::Disabled };
    let api = listen::conforming(router_with(app.clone(), sleep));
    let api = match settings.backend.api_rules {
        ApiRules::OpenAi => api,
        ApiRules::Ovms => ovms_api(api, app.clone()),
    };
    match token {
        Some(token) => authenticated(api, token, app.clone()),
        None => api,
    }
}

/// Puts the engine to sleep when it is idle, if this is enabled. Never returns.
async fn sleep_automatically(engine: EngineHandle, settings: &SleepArgs) {
    match (settings.sleep_after, level(settings.sleep_level)) {
        (Some(after), Some(level)) => sleep_when_idle(engine, after, level).await,
        _ => std::future::pending().await,
    }
}

/// Loads the model on a separate thread. When the process stops, it does not wait for this thread.
fn load(
    config: BackendConfig,
    metrics: Metrics,
) -> anyhow::Result<oneshot::Receiver<anyhow::Result<(ServedModel, Engine)>>> {
    let (sender, receiver) = oneshot::channel();
    std::thread::Builder::new()
        .name("load".to_owned())
        .spawn(move || {
            // Sending fails if the process is stopping, because the receiver has been dropped.
            let _ = sender.send(backend::start(&config, &metrics));
        })
        .context("failed to start the thread that loads the model")?;
    Ok(receiver)
}

/// The listener of the API, which can be stopped.
struct HttpServer {
    app: App,
    stop: CancellationToken,
    listener: JoinSet<()>,
}

impl HttpServer {
    fn new(app: App) -> Self {
        Self { app, stop: CancellationToken::new(), listener: JoinSet::new() }
    }

    fn serve(&mut self, http: TcpListener, api: Router, limits: HttpLimits) {
        self.listener.spawn(listen::serve(http, api, limits, self.stop.clone()));
    }

    /// Waits until the requests in progress are finished, or aborts them when `timeout` has passed since the first
    /// request to drain or to stop. Afterward, the engine is idle.
    async fn drain(&mut self, timeout: Duration, signals: &mut EndSignals) -> anyhow::Result<()> {
        let Self { app, stop, listener } = self;
        let started = Instant::now();
        app.lifecycle().advance(Phase::Stopping);
        let left = app.lifecycle().drain_time_left(timeout);
        stop.cancel();
        tracing::info!(requests = app.requests(), timeout = ?left, "stopping: finishing requests");
        let finished = async {
            listener.join_next().await;
            app.background().finished().await;
        };
        tokio::select! {
            () = finished => {}
            () = tokio::time::sleep(left) => {
                tracing::warn!(
                    requests = app.requests(),
                    "drain timeout reached: aborting the remaining requests"
                );
                listener.shutdown().await;
                app.background().stop();
                if tokio::time::timeout(STORE_TIMEOUT, app.background().finished()).await.is_err() {
                    tracing::warn!(timeout = ?STORE_TIMEOUT, "failed to store all background responses in time");
                }
            }
            () = signals.next() => bail!("second signal: aborted the remaining requests"),
        }
        // Drop background responses that could not be stored, which aborts their sequences.
        app.background().cut_off();
        tracing::info!(ms = started.elapsed().as_millis() as u64, "no requests remain");
        Ok(())
    }

    /// Waits until clients have received their errors after the engine has died, but at most for
    /// [`ERROR_DELIVERY_TIMEOUT`].
    async fn deliver_errors(&mut self) {
        self.app.lifecycle().advance(Phase::Stopped);
        self.stop.cancel();
        let _ = tokio::time::timeout(ERROR_DELIVERY_TIMEOUT, self.listener.join_next()).await;
    }
}

/// Stops the idle engine.
async fn stop_engine(engine: Engine, mut signals: EndSignals) -> anyhow::Result<()> {
    let stopped = tokio::task::spawn_blocking(move || engine.shutdown());
    tokio::select! {
        stopped = stopped => {
            stopped
                .context("the engine panicked while it stopped")?
                .context("the engine failed while it stopped")
        }
        () = tokio::time::sleep(END_TIMEOUT) => bail!("the engine did not stop within {END_TIMEOUT:?}"),
        () = signals.next() => bail!("received a second signal while the engine was stopping"),
    }
}

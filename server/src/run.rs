//! The process from start to end: ports first, so that a mistake there costs no time; then the model, while
//! probes are already answered; then requests, until a signal; then what is left of them.

use std::convert::Infallible;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use proto::replica_token::ReplicaTokenFile;
use proto::v1alpha1::replica_server::ReplicaServer;
use server_engine::{Engine, EngineHandle};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::app::{App, Serving};
use crate::args::{Args, Command, SleepArgs};
use crate::authentication::{RequireToken, authenticated, follow};
use crate::compat::{ApiRules, ovms_api};
use crate::lifecycle::Phase;
use crate::limits::Limits;
use crate::load::{ReplicaService, publish};
use crate::metrics::Metrics;
use crate::routes::{Sleep, admin_router, router_with};
use crate::sleep::{level, sleep_when_idle};
use crate::store::StoreConfig;
use crate::{allocator, backend, fetch, listen, numa, telemetry};

/// Time for the errors to reach the clients when the engine has died.
const FAREWELL: Duration = Duration::from_secs(1);
/// Time to store the background responses that are cut off when the process ends.
///
/// Beyond it: they are not stored.
const STORE_TIMEOUT: Duration = Duration::from_secs(2);
/// Time in which the engine must stop after the last request, including writing cached blocks to the spill directory.
/// Together with [`STORE_TIMEOUT`] it is less than what a pod's grace period leaves after `--drain-timeout`.
///
/// Beyond it: the process ends with an error, and cached blocks that are not yet written are lost.
const END_TIMEOUT: Duration = Duration::from_secs(12);

/// What a process ends with that has failed.
#[must_use]
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    error.downcast_ref::<fetch::Error>().map_or(ExitCode::FAILURE, fetch::Error::exit_code)
}

impl Args {
    /// Does what the subcommand says or, without one, runs the server until it is asked to end.
    ///
    /// # Errors
    /// It could not start, its engine died, or it was asked to end twice.
    pub fn run(self) -> anyhow::Result<()> {
        telemetry::start(&self.log, self.log_format)?;
        // Before there is another thread: those that are started run where this one does.
        numa::place(self.numa_node)?;
        allocator::use_one_arena();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .context("failed to start the asynchronous runtime")?;
        let outcome = match self.command.clone() {
            Some(Command::Fetch(fetch)) => runtime.block_on(fetch.run()).map_err(Into::into),
            Some(Command::Drain(drain)) => runtime.block_on(drain.run()),
            None => runtime.block_on(run(self)),
        };
        // A request that is still being prepared is of no use to anybody.
        runtime.shutdown_background();
        outcome
    }

    fn split(self) -> Settings {
        let Self {
            command: _,
            model,
            model_names,
            adapters,
            tool_parser,
            reasoning_parser,
            host,
            port,
            grpc_port,
            admin_port,
            replica_token_file,
            backend,
            device,
            numa_node: _,
            kv_cache_size,
            kv_cache_precision,
            weights,
            unpack_weights,
            cache_dir,
            plugin_config,
            max_num_seqs,
            max_batched_tokens,
            max_chunk_tokens,
            max_itl,
            sparse_attention,
            kv_eviction_tokens,
            max_model_len,
            no_prefix_caching,
            prompt_lookup,
            draft_model,
            ovms_compat,
            log: _,
            log_format: _,
            limits,
            spill,
            store,
            sleep,
            sim,
        } = self;
        Settings {
            host,
            ports: Ports { http: port, grpc: grpc_port, admin: admin_port },
            replica_token_file,
            drain_timeout: limits.drain_timeout,
            limits: limits.http(),
            sleep,
            store: store.config(),
            backend: backend::Config {
                backend,
                model,
                names: model_names,
                adapters,
                tool_format: tool_parser.given(),
                reasoning_format: reasoning_parser.given(),
                openvino: backend::OpenVino {
                    device,
                    cache_bytes: kv_cache_size.map(|size| size.0),
                    cache_precision: kv_cache_precision,
                    weights,
                    unpack: unpack_weights,
                    cache_dir,
                    properties: plugin_config,
                    attention_share: sparse_attention,
                },
                sim,
                sequences_max: max_num_seqs,
                batch_tokens_max: max_batched_tokens,
                chunk_tokens_max: max_chunk_tokens,
                step_time_max: max_itl,
                waiting_max: limits.max_queue,
                sequence_tokens_max: max_model_len,
                prefix_caching: !no_prefix_caching,
                cached_tokens_max: kv_eviction_tokens,
                prompt_lookup,
                api_rules: if ovms_compat { ApiRules::Ovms } else { ApiRules::OpenAi },
                draft_model,
                spill: spill.folder(),
                tokenizer_memory: limits.max_tokenizer_memory.to_usize(),
            },
        }
    }
}

struct Settings {
    host: std::net::IpAddr,
    ports: Ports,
    replica_token_file: Option<PathBuf>,
    drain_timeout: Duration,
    limits: Limits,
    sleep: SleepArgs,
    store: StoreConfig,
    backend: backend::Config,
}

/// The ports to listen on.
struct Ports {
    http: u16,
    grpc: u16,
    /// Of metrics and probes, if they have one of their own.
    admin: Option<u16>,
}

async fn run(args: Args) -> anyhow::Result<()> {
    let settings = args.split();
    settings.backend.check()?;
    settings.limits.check()?;
    let token = settings.replica_token_file.as_deref().map(ReplicaTokenFile::open).transpose()?;
    let mut signals = Signals::new()?;
    let http = listen::bind(settings.host, settings.ports.http).await?;
    let grpc = listen::bind(settings.host, settings.ports.grpc).await?;
    let admin = match settings.ports.admin {
        Some(port) => Some(listen::bind(settings.host, port).await?),
        None => None,
    };
    let names = settings.backend.names();
    let metrics = Metrics::new(&names[0], settings.backend.backend.name());
    let app = App::with_store(settings.limits, metrics.clone(), &settings.store)?;
    tracing::info!("listening on http://{}, gRPC on {}", http.local_addr()?, grpc.local_addr()?);
    // It ends with the process: probes are answered while requests are finished.
    let mut admin_listener = JoinSet::new();
    if let Some(admin) = admin {
        tracing::info!("metrics and probes on {}", admin.local_addr()?);
        let router = listen::conforming(admin_router(app.clone()));
        let limits = settings.limits.of_admin_port();
        admin_listener.spawn(listen::serve(admin, router, limits, CancellationToken::new()));
    }
    let stop = CancellationToken::new();
    let mut listener = JoinSet::new();
    let sleep = if settings.sleep.enable_sleep_mode { Sleep::OnRequest } else { Sleep::ByItself };
    let api = listen::conforming(router_with(app.clone(), sleep));
    let api = match settings.backend.api_rules {
        ApiRules::OpenAi => api,
        ApiRules::Ovms => ovms_api(api, app.clone()),
    };
    let api = match token.clone() {
        Some(token) => authenticated(api, token, app.clone()),
        None => api,
    };
    listener.spawn(listen::serve(http, api, settings.limits, stop.clone()));
    let mut services = JoinSet::new();
    spawn_services(&mut services, &app, grpc, token).await;

    let loading = load(settings.backend, metrics)?;
    let engine = tokio::select! {
        loaded = loading => {
            let (serving, engine) = loaded.map_err(|_| anyhow!("loading the model panicked"))??;
            app.serve(serving);
            engine
        }
        () = signals.next() => {
            tracing::info!("asked to end while the model was being loaded");
            return Ok(());
        }
        Some(ended) = services.join_next() => return Err(service_ended(ended)),
    };
    tracing::info!("ready");
    let handle = engine.handle();
    tokio::select! {
        () = signals.next() => {}
        () = fall_asleep(handle.clone(), &settings.sleep) => {}
        died = handle.wait_for_failure() => return farewell(&app, &stop, &mut listener, died).await,
        Some(ended) = services.join_next() => return Err(service_ended(ended)),
    }
    drain(&app, (&stop, &mut listener), settings.drain_timeout, &mut signals).await?;
    end(engine, signals).await
}

/// Puts the engine to sleep when it is to sleep by itself. Never ends.
async fn fall_asleep(engine: EngineHandle, settings: &SleepArgs) {
    match (settings.sleep_after, level(settings.sleep_level)) {
        (Some(after), Some(level)) => sleep_when_idle(engine, after, level).await,
        _ => std::future::pending().await,
    }
}

/// Loads the model on a thread of its own, which the process does not wait for if it is to end.
fn load(
    config: backend::Config,
    metrics: Metrics,
) -> anyhow::Result<oneshot::Receiver<anyhow::Result<(Serving, Engine)>>> {
    let (sender, receiver) = oneshot::channel();
    std::thread::Builder::new()
        .name("load".to_owned())
        .spawn(move || {
            // Nobody waits for it any more if the process is to end.
            let _ = sender.send(backend::start(&config, &metrics));
        })
        .context("failed to start a thread")?;
    Ok(receiver)
}

/// What runs beside the API, for as long as the process.
async fn spawn_services(
    services: &mut JoinSet<anyhow::Result<Infallible>>,
    app: &App,
    grpc: TcpListener,
    token: Option<ReplicaTokenFile>,
) {
    if let Some(token) = token.clone() {
        tracing::info!("only requests with the replica token are served");
        services.spawn(follow(token));
    }
    let (reports, receiver) = watch::channel(proto::v1alpha1::Load::default());
    let (health, health_service) = tonic_health::server::health_reporter();
    // Before anybody can ask: a reporter that was told nothing says that all is well.
    tell(&health, app.lifecycle().phase()).await;
    let service = ReplicaService::new(app.clone(), receiver);
    let replica = ReplicaServer::with_interceptor(service, RequireToken(token));
    let publisher = app.clone();
    services.spawn(async move {
        publish(publisher, reports).await;
        bail!("the load is not reported any more")
    });
    services.spawn(async move {
        let server = tonic::transport::Server::builder().add_service(health_service).add_service(replica);
        server.serve_with_incoming(TcpListenerStream::new(grpc)).await.context("the gRPC server failed")?;
        bail!("the gRPC server ended")
    });
    services.spawn(allocator::trim_excess());
    let app = app.clone();
    services.spawn(async move {
        let mut phase = app.lifecycle().watch();
        loop {
            let present = *phase.borrow_and_update();
            tell(&health, present).await;
            phase.changed().await.context("the lifecycle ended")?;
        }
    });
}

/// Tells the health service's callers whether requests should be sent here.
async fn tell(health: &HealthReporter, phase: Phase) {
    let status = if phase == Phase::Serving { ServingStatus::Serving } else { ServingStatus::NotServing };
    for service in ["", "ovfleet.v1alpha1.Replica"] {
        health.set_service_status(service, status).await;
    }
}

fn service_ended(ended: Result<anyhow::Result<Infallible>, tokio::task::JoinError>) -> anyhow::Error {
    match ended {
        Ok(Ok(never)) => match never {},
        Ok(Err(error)) => error,
        Err(error) => anyhow!(error).context("a part of the server panicked"),
    }
}

/// Finishes what is under way, no longer than what is left of `timeout`; then cuts off whatever is left, so that the
/// engine has nothing more to do.
async fn drain(
    app: &App,
    (stop, listener): (&CancellationToken, &mut JoinSet<()>),
    timeout: Duration,
    signals: &mut Signals,
) -> anyhow::Result<()> {
    let started = Instant::now();
    app.lifecycle().advance(Phase::Stopping);
    let left = app.lifecycle().drain_time_left(timeout);
    stop.cancel();
    tracing::info!(requests = app.requests(), timeout = ?left, "asked to end: finishing what is under way");
    let finished = async {
        listener.join_next().await;
        app.background().finished().await;
    };
    tokio::select! {
        () = finished => {}
        () = tokio::time::sleep(left) => {
            tracing::warn!(requests = app.requests(), "out of time: cutting off what is left");
            listener.shutdown().await;
            app.background().stop();
            if tokio::time::timeout(STORE_TIMEOUT, app.background().finished()).await.is_err() {
                tracing::warn!(timeout = ?STORE_TIMEOUT, "failed to store all responses in the background in time");
            }
        }
        () = signals.next() => bail!("asked to end twice: cut off what was under way"),
    }
    // Whatever still holds a place in the engine lets go of it.
    app.background().cut_off();
    tracing::info!(ms = started.elapsed().as_millis() as u64, "all requests are finished");
    Ok(())
}

/// Ends the engine, which has nothing left to do.
async fn end(engine: Engine, mut signals: Signals) -> anyhow::Result<()> {
    let ended = tokio::task::spawn_blocking(move || engine.shutdown());
    tokio::select! {
        ended = ended => ended.context("the engine's end panicked")?.context("the engine failed at its end"),
        () = tokio::time::sleep(END_TIMEOUT) => bail!("the engine did not end within {END_TIMEOUT:?}"),
        () = signals.next() => bail!("asked to end twice"),
    }
}

/// Lets the clients have their errors before the process ends.
async fn farewell(
    app: &App,
    stop: &CancellationToken,
    listener: &mut JoinSet<()>,
    died: server_engine::EngineError,
) -> anyhow::Result<()> {
    app.lifecycle().advance(Phase::Stopped);
    stop.cancel();
    let _ = tokio::time::timeout(FAREWELL, listener.join_next()).await;
    Err(died.into())
}

/// The signals that ask the process to end.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let handle = |kind| signal(kind).context("failed to handle signals");
        Ok(Self { terminate: handle(SignalKind::terminate())?, interrupt: handle(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

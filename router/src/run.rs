//! The process from start to end: the port first, so that a mistake there costs no time; then replicas are
//! looked for while requests already come; until a signal; then what is left of them.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use futures_util::future::join_all;
use proto::replica_token::ReplicaTokenFile;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::args::Args;
use crate::config::{self, CommandLine};
use crate::discovery::{self, Sources};
use crate::listen::{self, Surface, Threads};
use crate::trace::Tracer;
use crate::{load, telemetry};

/// How often files are looked at.
const FILES_INTERVAL: Duration = Duration::from_millis(500);

impl CommandLine {
    /// Runs the router until it is asked to end. Ends the process itself only if the command line is not
    /// understood or asks for help.
    ///
    /// # Errors
    /// It could not start, or it was asked to end twice.
    pub fn run(self) -> anyhow::Result<()> {
        let mut args = self.parse();
        let text = args.config.as_deref().map(config::read).transpose()?;
        if let (Some(path), Some(text)) = (args.config.clone(), &text) {
            args = self.with_file(&path, text)?;
        }
        telemetry::start(&args.log, args.log_format)?;
        // Requests have threads of their own; this one looks after all the rest.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("failed to start the asynchronous runtime")?;
        let outcome = runtime.block_on(run(Files { line: self, text, keys: None }, args));
        runtime.shutdown_background();
        outcome
    }
}

async fn run(mut files: Files, args: Args) -> anyhow::Result<()> {
    if args.replicas.is_empty() && args.replicas_dns.is_empty() && args.replicas_service.is_empty() {
        bail!("no replicas: give --replica, --replicas-dns or --replicas-service");
    }
    let mut signals = Signals::new()?;
    let listener = listen::bind(args.host, args.port)?;
    let beside = [(Surface::Admin, args.admin_port), (Surface::Grpc, args.grpc_port)];
    let beside = beside.into_iter().filter_map(|(surface, port)| Some((surface, port?)));
    let beside: anyhow::Result<Vec<_>> =
        beside.map(|(surface, port)| Ok((surface, listen::bind(args.host, port)?))).collect();
    let beside = beside?;
    let threads = match args.threads {
        Some(threads) => threads as usize,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let tracer =
        args.otlp_endpoint.as_deref().map(|endpoint| Tracer::new(endpoint, args.trace_share)).transpose()?;
    let (connections_max, drain_timeout) = (args.max_connections as usize, args.drain_timeout);
    let (sources, wanted) = watch::channel(Sources::of(&args));
    let app = App::new(args, tracer);
    files.read_keys(&app)?;
    if let Some(path) = &app.settings().replica_token_file {
        app.dispatch().replicas.set_token_file(ReplicaTokenFile::open(path)?);
    }
    let address_of =
        |wanted| beside.iter().find(|(surface, _)| *surface == wanted).map(|(_, port)| port.local_addr());
    let http = listener.local_addr()?;
    match address_of(Surface::Grpc).transpose()? {
        Some(grpc) => tracing::info!("listening on http://{http}, gRPC on {grpc}"),
        None => tracing::info!("listening on http://{http}"),
    }
    if let Some(admin) = address_of(Surface::Admin).transpose()? {
        tracing::info!("metrics and probes on {admin}");
    }

    let stop = CancellationToken::new();
    let mut threads = Threads::start(&app, Surface::Api, threads, &stop)?;
    let beside = Beside::start(&app, beside)?;
    let mut beside_runs = std::pin::pin!(beside.run());
    let mut services = JoinSet::new();
    let (found, replicas) = watch::channel(Vec::new());
    services.spawn(discovery::run(wanted, found));
    services.spawn(load::run(std::sync::Arc::clone(app.dispatch()), replicas));
    services.spawn(follow_files(files, app.clone(), sources));
    services.spawn(tell_ready(app.clone()));
    tokio::select! {
        () = threads.accept(listener, connections_max, &stop) => {}
        () = &mut beside_runs => {}
        () = signals.next() => {}
        Some(ended) = services.join_next() => {
            return Err(ended.map_or_else(anyhow::Error::from, |()| anyhow!("a part of the router ended")));
        }
    }
    app.stop();
    stop.cancel();
    // Probes are answered until the end.
    let outcome = tokio::select! {
        outcome = drain(&app, &mut threads, drain_timeout, &mut signals) => outcome,
        () = &mut beside_runs => Ok(()),
    };
    threads.cut_off();
    // It blocks, and what it sends goes through this thread's runtime.
    tokio::task::spawn_blocking(move || app.tracer().map(Tracer::flush))
        .await
        .context("failed to send spans")?;
    outcome
}

/// Number of open connections to the port given by `--admin-port`, and to the one given by `--grpc-port`.
///
/// Beyond it: further connections wait, and connections without a request are closed after one second to make room
/// for them.
const BESIDE_CONNECTIONS_MAX: usize = 64;

/// The ports beside the API's, each with a thread and connections of its own.
struct Beside {
    listeners: Vec<(TcpListener, Threads)>,
    stop: CancellationToken,
}

impl Beside {
    fn start(app: &App, listeners: Vec<(Surface, TcpListener)>) -> anyhow::Result<Self> {
        let stop = CancellationToken::new();
        let start = |(surface, listener): (Surface, TcpListener)| {
            Ok((listener, Threads::start(app, surface, 1, &stop)?))
        };
        let listeners: anyhow::Result<_> = listeners.into_iter().map(start).collect();
        Ok(Self { listeners: listeners?, stop })
    }

    /// Accepts connections for as long as it is polled.
    async fn run(self) {
        let Self { listeners, stop } = self;
        let (listeners, threads): (Vec<_>, Vec<_>) = listeners.into_iter().unzip();
        let accept = |(listener, threads)| Threads::accept(threads, listener, BESIDE_CONNECTIONS_MAX, &stop);
        join_all(listeners.into_iter().zip(&threads).map(accept)).await;
        std::future::pending().await
    }
}

impl Sources {
    fn of(args: &Args) -> Self {
        Self {
            fixed: args.replicas.clone(),
            dns: args.replicas_dns.clone(),
            services: args.replicas_service.clone(),
            dns_interval: args.dns_interval,
            port_names: [args.http_port_name.clone(), args.grpc_port_name.clone()],
        }
    }
}

/// Says so, once, when the first model is served.
async fn tell_ready(app: App) {
    let mut changes = app.dispatch().replicas.changes();
    while !app.is_ready() {
        // The sender is in `app`.
        let _ = changes.changed().await;
    }
    tracing::info!("ready");
    std::future::pending().await
}

/// Finishes what is under way, no longer than `timeout`.
async fn drain(
    app: &App,
    threads: &mut Threads,
    timeout: Duration,
    signals: &mut Signals,
) -> anyhow::Result<()> {
    let started = Instant::now();
    tracing::info!(requests = app.requests(), ?timeout, "asked to end: finishing what is under way");
    tokio::select! {
        () = threads.finished() => {}
        () = tokio::time::sleep(timeout) => {
            tracing::warn!(requests = app.requests(), "out of time: cutting off what is left");
            return Ok(());
        }
        () = signals.next() => bail!("asked to end twice: cut off what was under way"),
    }
    tracing::info!(ms = started.elapsed().as_millis() as u64, "all requests are finished");
    Ok(())
}

/// The files that are read again when they change, as they were read last.
struct Files {
    line: CommandLine,
    text: Option<String>,
    keys: Option<String>,
}

impl Files {
    fn read_keys(&mut self, app: &App) -> anyhow::Result<()> {
        let Some(path) = app.settings().api_keys.clone() else { return Ok(()) };
        let keys =
            app.access().read(&path).with_context(|| format!("failed to read keys of {}", path.display()))?;
        self.keys = config::read(&path).ok();
        tell_keys(keys);
        Ok(())
    }

    /// Reads `path` again, and gives its text if that has changed.
    fn changed(known: &mut Option<String>, path: &Path) -> Option<String> {
        let text = match config::read(path) {
            Ok(text) => text,
            Err(error) => {
                // Said once: what was known is forgotten, so that the file counts as changed when it is back.
                if known.take().is_some() {
                    tracing::warn!(error = %anyhow::Error::from(error), "a file is gone: what it said stays");
                }
                return None;
            }
        };
        if known.as_ref() == Some(&text) {
            return None;
        }
        *known = Some(text.clone());
        Some(text)
    }
}

/// Takes over what changes in files, and refuses what makes no sense with the reason.
async fn follow_files(mut files: Files, app: App, sources: watch::Sender<Sources>) {
    loop {
        tokio::time::sleep(FILES_INTERVAL).await;
        reload_token(&app);
        let (config, keys) = {
            let settings = app.settings();
            (settings.config.clone(), settings.api_keys.clone())
        };
        if let Some(path) = config
            && let Some(text) = Files::changed(&mut files.text, &path)
        {
            match files.line.with_file(&path, &text) {
                Ok(args) => {
                    tell_fixed(&app.settings(), &args);
                    sources.send_if_modified(|present| {
                        let wanted = Sources::of(&args);
                        let differs = *present != wanted;
                        *present = wanted;
                        differs
                    });
                    app.set_settings(args);
                    tracing::info!(path = %path.display(), "the configuration has changed");
                }
                Err(error) => {
                    let error = anyhow::Error::from(error);
                    tracing::error!(
                        error = format!("{error:#}"),
                        "the configuration is wrong: the old one stays"
                    );
                }
            }
        }
        if let Some(path) = keys
            && Files::changed(&mut files.keys, &path).is_some()
        {
            match app.access().read(&path) {
                Ok(keys) => tell_keys(keys),
                Err(error) => {
                    let error = anyhow::Error::from(error);
                    tracing::error!(
                        error = format!("{error:#}"),
                        "the API keys are wrong: the old ones stay"
                    );
                }
            }
        }
    }
}

/// Reads the file of replica tokens again.
fn reload_token(app: &App) {
    let Some(file) = app.dispatch().replicas.token_file() else { return };
    match file.reload() {
        Ok(Some(tokens)) => tracing::info!(tokens, "the replica token has changed"),
        Ok(None) => {}
        Err(error) => {
            let error = format!("{:#}", anyhow::Error::from(error));
            tracing::error!(error, "failed to reload the replica token: the previous one stays in effect");
        }
    }
}

/// Says how many keys are valid, and warns if that is none.
fn tell_keys(keys: usize) {
    if keys == 0 {
        tracing::warn!("the file of API keys has no key: every request is refused");
    } else {
        tracing::info!(keys, "only requests with a key are served");
    }
}

/// Says which changes have to wait for the next start.
fn tell_fixed(present: &Args, wanted: &Args) {
    let differs = [
        ("host", present.host != wanted.host),
        ("port", present.port != wanted.port),
        ("admin-port", present.admin_port != wanted.admin_port),
        ("grpc-port", present.grpc_port != wanted.grpc_port),
        ("threads", present.threads != wanted.threads),
        ("replica-token-file", present.replica_token_file != wanted.replica_token_file),
        ("max-header-bytes", present.max_header_bytes != wanted.max_header_bytes),
        ("max-connections", present.max_connections != wanted.max_connections),
        ("drain-timeout", present.drain_timeout != wanted.drain_timeout),
        ("log", present.log != wanted.log),
        ("log-format", present.log_format != wanted.log_format),
        ("otlp-endpoint", present.otlp_endpoint != wanted.otlp_endpoint),
        ("trace-share", present.trace_share.to_bits() != wanted.trace_share.to_bits()),
    ];
    for (option, _) in differs.iter().filter(|(_, differs)| *differs) {
        tracing::warn!(option, "this option takes effect on the next start");
    }
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

//! Runs the process: first binds the ports, so that a port in use is reported immediately; then discovers replicas and
//! accepts requests; and on a signal, finishes the requests in flight.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use futures_util::future::join_all;
use process::error::chain;
use process::logs;
use process::signals::EndSignals;
use proto::replica_token::ReplicaTokenFile;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::args::Args;
use crate::config::{self, CommandLine};
use crate::discovery::{self, PortNames, Sources};
use crate::listen::{self, ListenerKind, Threads};
use crate::load;
use process::trace::Tracer;

/// The interval at which files are checked for changes.
const FILE_CHECK_INTERVAL: Duration = Duration::from_millis(500);

impl CommandLine {
    /// Runs the router until a signal stops it. This method exits the process only if the command line is invalid or
    /// requests help.
    ///
    /// # Errors
    /// The router could not start, a background task ended unexpectedly, or a second signal arrived while the router
    /// was stopping.
    pub fn run(self) -> anyhow::Result<()> {
        let mut args = self.parse();
        let text = args.config.as_deref().map(config::read).transpose()?;
        if let (Some(path), Some(text)) = (args.config.clone(), &text) {
            args = self.with_file(&path, text)?;
        }
        logs::start(&args.log, args.log_format)?;
        // This thread accepts connections and runs the background tasks. Other threads serve the requests.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("failed to start the asynchronous runtime")?;
        let outcome = runtime.block_on(run(Files { command_line: self, text, keys: None }, args));
        runtime.shutdown_background();
        outcome
    }
}

async fn run(mut files: Files, args: Args) -> anyhow::Result<()> {
    if args.replicas.is_empty() && args.replicas_dns.is_empty() && args.replicas_service.is_empty() {
        bail!("no source of replicas: set --replica, --replicas-dns or --replicas-service");
    }
    let mut signals = EndSignals::new()?;
    let listener = listen::bind(args.host, args.port)?;
    let side_ports = [(ListenerKind::Admin, args.admin_port), (ListenerKind::Grpc, args.grpc_port)];
    let side_ports = side_ports.into_iter().filter_map(|(kind, port)| Some((kind, port?)));
    let side_listeners: anyhow::Result<Vec<_>> =
        side_ports.map(|(kind, port)| Ok((kind, listen::bind(args.host, port)?))).collect();
    let side_listeners = side_listeners?;
    let threads = match args.threads {
        Some(threads) => threads as usize,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let tracer = args
        .otlp_endpoint
        .as_deref()
        .map(|endpoint| Tracer::new("ovfleet-router", endpoint, args.trace_sampling_ratio))
        .transpose()?;
    let (max_connections, drain_timeout) = (args.max_connections as usize, args.drain_timeout);
    let (sources, sources_receiver) = watch::channel(Sources::from_args(&args));
    let app = App::new(args, tracer);
    files.read_keys(&app)?;
    if let Some(path) = &app.settings().replica_token_file {
        app.dispatcher().replicas.set_token_file(ReplicaTokenFile::open(path)?);
    }
    let address_of = |searched| {
        side_listeners.iter().find(|(kind, _)| *kind == searched).map(|(_, port)| port.local_addr())
    };
    let http = listener.local_addr()?;
    match address_of(ListenerKind::Grpc).transpose()? {
        Some(grpc) => tracing::info!("listening on http://{http}, gRPC on {grpc}"),
        None => tracing::info!("listening on http://{http}"),
    }
    if let Some(admin) = address_of(ListenerKind::Admin).transpose()? {
        tracing::info!("serving metrics and probes on {admin}");
    }

    let stop = CancellationToken::new();
    let mut threads = Threads::start(&app, ListenerKind::Api, threads, &stop)?;
    let side_servers = SideServers::start(&app, side_listeners)?;
    let mut side_servers = std::pin::pin!(side_servers.run());
    let mut services = JoinSet::new();
    let (discovered, replicas) = watch::channel(Vec::new());
    services.spawn(discovery::run(sources_receiver, discovered));
    services.spawn(load::run(std::sync::Arc::clone(app.dispatcher()), replicas));
    services.spawn(watch_files(files, app.clone(), sources));
    services.spawn(log_when_ready(app.clone()));
    tokio::select! {
        () = threads.accept(listener, max_connections, &stop) => {}
        () = &mut side_servers => {}
        () = signals.next() => {}
        Some(ended) = services.join_next() => {
            return Err(ended.map_or_else(anyhow::Error::from, |()| anyhow!("a background task of the router ended unexpectedly")));
        }
    }
    app.stop();
    stop.cancel();
    // The servers on the admin and gRPC ports continue to run until the process ends, so that probes are still
    // answered.
    let outcome = tokio::select! {
        outcome = drain(&app, &mut threads, drain_timeout, &mut signals) => outcome,
        () = &mut side_servers => Ok(()),
    };
    threads.abort();
    // Flush on another thread: `flush` blocks its thread while the runtime of this thread sends the spans.
    tokio::task::spawn_blocking(move || app.tracer().map(Tracer::flush))
        .await
        .context("failed to send the last spans")?;
    outcome
}

/// Number of open connections to each of the ports given by `--admin-port` and `--grpc-port`.
///
/// If exceeded: further connections wait, and connections that have been idle for one second are closed to make room
/// for them.
const SIDE_CONNECTIONS_MAX: usize = 64;

/// The servers on the ports other than the port of the API. Each has its own thread and connections.
struct SideServers {
    listeners: Vec<(TcpListener, Threads)>,
    stop: CancellationToken,
}

impl SideServers {
    fn start(app: &App, listeners: Vec<(ListenerKind, TcpListener)>) -> anyhow::Result<Self> {
        let stop = CancellationToken::new();
        let start = |(kind, listener): (ListenerKind, TcpListener)| {
            Ok((listener, Threads::start(app, kind, 1, &stop)?))
        };
        let listeners: anyhow::Result<_> = listeners.into_iter().map(start).collect();
        Ok(Self { listeners: listeners?, stop })
    }

    /// Accepts connections until the future is dropped.
    async fn run(self) {
        let Self { listeners, stop } = self;
        let (listeners, threads): (Vec<_>, Vec<_>) = listeners.into_iter().unzip();
        let accept = |(listener, threads)| Threads::accept(threads, listener, SIDE_CONNECTIONS_MAX, &stop);
        join_all(listeners.into_iter().zip(&threads).map(accept)).await;
        std::future::pending().await
    }
}

impl Sources {
    fn from_args(args: &Args) -> Self {
        Self {
            fixed: args.replicas.clone(),
            dns: args.replicas_dns.clone(),
            services: args.replicas_service.clone(),
            dns_interval: args.dns_interval,
            port_names: PortNames { http: args.http_port_name.clone(), grpc: args.grpc_port_name.clone() },
        }
    }
}

/// Logs `ready` once a replica of any model is available. Never completes.
async fn log_when_ready(app: App) {
    let mut changes = app.dispatcher().replicas.changes();
    while !app.is_ready() {
        // Waiting cannot fail, because `app` owns the sender.
        let _ = changes.changed().await;
    }
    tracing::info!("ready");
    std::future::pending().await
}

/// Waits until the requests in flight are finished, for at most `timeout`.
async fn drain(
    app: &App,
    threads: &mut Threads,
    timeout: Duration,
    signals: &mut EndSignals,
) -> anyhow::Result<()> {
    let started = Instant::now();
    tracing::info!(requests = app.requests_in_flight(), ?timeout, "stopping: waiting for requests in flight");
    tokio::select! {
        () = threads.finished() => {}
        () = tokio::time::sleep(timeout) => {
            let requests = app.requests_in_flight();
            tracing::warn!(requests, "drain timeout reached: aborting the remaining requests");
            return Ok(());
        }
        () = signals.next() => bail!("second signal: aborted the remaining requests"),
    }
    tracing::info!(ms = started.elapsed().as_millis() as u64, "all requests are finished");
    Ok(())
}

/// The files that are reloaded when they change, with the content that was read last.
struct Files {
    command_line: CommandLine,
    text: Option<String>,
    keys: Option<String>,
}

impl Files {
    fn read_keys(&mut self, app: &App) -> anyhow::Result<()> {
        let Some(path) = app.settings().api_keys.clone() else { return Ok(()) };
        // Record the content before reading the keys, so that the next check notices a change between the two.
        self.keys = config::read(&path).ok();
        let keys = app
            .access()
            .read(&path)
            .with_context(|| format!("failed to read the API keys from {}", path.display()))?;
        log_key_count(keys);
        Ok(())
    }

    /// Rereads `path`, and returns its content if it has changed.
    fn changed(known: &mut Option<String>, path: &Path) -> Option<String> {
        let text = match config::read(path) {
            Ok(text) => text,
            Err(error) => {
                // Warn only once. Clear the stored content, so that the file counts as changed once it is readable
                // again.
                if known.take().is_some() {
                    tracing::warn!(
                        error = chain(&error),
                        "failed to reload a file: the previous content remains in effect"
                    );
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

/// Applies changes of files, and logs a message if a file has become invalid or unreadable.
async fn watch_files(mut files: Files, app: App, sources: watch::Sender<Sources>) {
    loop {
        tokio::time::sleep(FILE_CHECK_INTERVAL).await;
        reload_replica_tokens(&app);
        let (config, keys) = {
            let settings = app.settings();
            (settings.config.clone(), settings.api_keys.clone())
        };
        if let Some(path) = config
            && let Some(text) = Files::changed(&mut files.text, &path)
        {
            match files.command_line.with_file(&path, &text) {
                Ok(mut args) => {
                    warn_about_restart(&app.settings(), &args);
                    // A reload that removes `api-keys` must not admit clients without keys.
                    args.api_keys = args.api_keys.or(keys.clone());
                    sources.send_if_modified(|present| {
                        let changed = Sources::from_args(&args);
                        let differs = *present != changed;
                        *present = changed;
                        differs
                    });
                    app.set_settings(args);
                    tracing::info!(path = %path.display(), "reloaded the configuration");
                }
                Err(error) => tracing::error!(
                    error = chain(&error),
                    "failed to reload the configuration: the previous one remains in effect"
                ),
            }
        }
        if let Some(path) = keys
            && Files::changed(&mut files.keys, &path).is_some()
        {
            match app.access().read(&path) {
                Ok(keys) => log_key_count(keys),
                Err(error) => tracing::error!(
                    error = chain(&error),
                    "failed to reload the API keys: the previous ones remain in effect"
                ),
            }
        }
    }
}

/// Reloads the file of replica tokens if it has changed.
fn reload_replica_tokens(app: &App) {
    let Some(file) = app.dispatcher().replicas.token_file() else { return };
    match file.reload() {
        Ok(Some(tokens)) => tracing::info!(tokens, "the replica tokens have changed"),
        Ok(None) => {}
        Err(error) => tracing::error!(
            error = chain(&error),
            "failed to reload the replica tokens: the previous tokens remain in effect"
        ),
    }
}

/// Logs the number of valid keys, and warns if there are none.
fn log_key_count(keys: usize) {
    if keys == 0 {
        tracing::warn!("the file of API keys contains no key: all API requests are rejected");
    } else {
        tracing::info!(keys, "API requests require an API key");
    }
}

/// Warns about changed flags that take effect only after a restart.
fn warn_about_restart(present: &Args, changed: &Args) {
    let differs = [
        ("host", present.host != changed.host),
        ("port", present.port != changed.port),
        ("admin-port", present.admin_port != changed.admin_port),
        ("grpc-port", present.grpc_port != changed.grpc_port),
        ("threads", present.threads != changed.threads),
        ("api-keys", present.api_keys.is_some() && changed.api_keys.is_none()),
        ("replica-token-file", present.replica_token_file != changed.replica_token_file),
        ("max-connections", present.max_connections != changed.max_connections),
        ("drain-timeout", present.drain_timeout != changed.drain_timeout),
        ("log", present.log != changed.log),
        ("log-format", present.log_format != changed.log_format),
        ("otlp-endpoint", present.otlp_endpoint != changed.otlp_endpoint),
        (
            "trace-sampling-ratio",
            present.trace_sampling_ratio.to_bits() != changed.trace_sampling_ratio.to_bits(),
        ),
    ];
    for (flag, _) in differs.iter().filter(|(_, differs)| *differs) {
        tracing::warn!(flag, "the new value of this flag takes effect after a restart");
    }
}

//! The process on a cluster: probes first; then the wait for the resource's definition and for the Lease; then the
//! controllers, one for each namespace or one for all, until a signal or until the Lease is lost.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::Api;
use kube::runtime::wait::{await_condition, conditions::is_crd_established};
use kube::{Client, CustomResourceExt as _};
use operator_api::LlmDeployment;
use rand::RngExt as _;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::admin::Admin;
use crate::args::{Args, Command, RunArgs};
use crate::controller::{self, Scope};
use crate::fleet::{Network, PodClient};
use crate::leader::{self, Election};
use crate::manifest::Kind;
use crate::metrics::Metrics;
use crate::trace::Tracer;
use crate::upgrades::Upgrades;
use crate::validate::{Defaults, PodUser};
use crate::{local, telemetry};

/// How often is looked whether the definition is there, by whoever may not watch definitions.
const DEFINITION_PAUSE: Duration = Duration::from_secs(2);
/// Time in which the operator finishes its work after SIGTERM or SIGINT.
///
/// Beyond it: the work is cut off, and the process ends with an error.
const FAREWELL: Duration = Duration::from_secs(20);

impl Args {
    /// Does what the command line asks for.
    ///
    /// # Errors
    /// It cannot be done.
    pub fn run(self) -> anyhow::Result<()> {
        let Self { command, log, log_format } = self;
        let command = match command {
            Command::Crd => return print_crd(),
            Command::Tether(args) => return local::tether(args),
            command => command,
        };
        telemetry::start(&log, log_format)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .context("failed to start the asynchronous runtime")?;
        match command {
            Command::Run(args) => runtime.block_on(run(args)),
            Command::Local(args) => runtime.block_on(local::run(args)),
            Command::Crd | Command::Tether(_) => Ok(()),
        }
    }
}

fn print_crd() -> anyhow::Result<()> {
    use std::io::Write as _;
    let yaml = serde_yaml::to_string(&operator_api::crd()).context("failed to write the definition")?;
    std::io::stdout().write_all(yaml.as_bytes()).context("failed to write the definition")
}

/// How the operator looks after a cluster.
#[derive(Clone, Debug)]
pub struct Config {
    /// Which namespaces; all if there are none.
    pub namespaces: Vec<String>,
    /// How resources are looked after.
    pub controller: controller::Config,
    /// The Lease whose holder acts; without, this process does.
    pub lease: Option<leader::Config>,
}

async fn run(args: RunArgs) -> anyhow::Result<()> {
    let client = Client::try_default().await.context("failed to find the cluster")?;
    let listener = TcpListener::bind((args.host, args.port))
        .await
        .with_context(|| format!("failed to listen on {}:{}", args.host, args.port))?;
    tracing::info!("probes and metrics on http://{}", listener.local_addr()?);
    let config = config(args, &client)?;
    let tracer = config.controller.tracer.clone();
    let stop = CancellationToken::new();
    let mut signals = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let metrics = Metrics::default();
    let admin = Admin::new(metrics.clone());
    let mut work = JoinSet::new();
    let mut pages = JoinSet::new();
    pages.spawn(axum::serve(listener, admin.clone().router()).into_future());
    work.spawn(look_after(client, config, (admin, metrics), stop.clone()));
    tokio::select! {
        Some(ended) = work.join_next() => return ended.context("the operator panicked")?,
        _ = pages.join_next() => bail!("the server of probes ended"),
        _ = signals.0.recv() => {}
        _ = signals.1.recv() => {}
    }
    tracing::info!("asked to end: finishing what is under way");
    stop.cancel();
    let outcome = match tokio::time::timeout(FAREWELL, work.join_next()).await {
        Ok(Some(ended)) => ended.context("the operator panicked")?,
        Ok(None) => Ok(()),
        Err(_) => bail!("out of time: what was under way is cut off"),
    };
    // It blocks, and what it sends goes through this thread's runtime.
    let flush = move || tracer.iter().for_each(Tracer::flush);
    tokio::task::spawn_blocking(flush).await.context("failed to send spans")?;
    outcome
}

fn config(args: RunArgs, client: &Client) -> anyhow::Result<Config> {
    let RunArgs {
        namespaces,
        server_image,
        router_image,
        image_pull_policy,
        host: _,
        port: _,
        no_leader_election,
        lease_namespace,
        lease_name,
        lease_duration,
        identity,
        load_interval,
        concurrency,
        max_concurrent_upgrades,
        ip_family,
        otlp_endpoint,
    } = args;
    let identity = identity.unwrap_or_else(|| format!("{}_{:08x}", host_name(), rand::rng().random::<u32>()));
    let lease = leader::Config {
        namespace: lease_namespace.unwrap_or_else(|| client.default_namespace().to_owned()),
        name: lease_name,
        identity,
        duration: lease_duration.max(Duration::from_secs(1)),
    };
    Ok(Config {
        namespaces,
        controller: controller::Config {
            defaults: Defaults {
                server_image,
                router_image,
                image_pull_policy,
                listen: ip_family.listen(std::env::var("KUBERNETES_SERVICE_HOST").ok().as_deref()),
                // Once the cluster can be asked.
                pod_user: PodUser::Fixed,
            },
            load_interval: (!load_interval.is_zero()).then_some(load_interval),
            concurrency,
            max_concurrent_upgrades,
            tracer: otlp_endpoint.as_deref().map(Tracer::new).transpose()?,
        },
        lease: (!no_leader_election).then_some(lease),
    })
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "operator".to_owned() } else { name.to_owned() }
}

/// Looks after a cluster until `stop`.
///
/// # Errors
/// The Lease was lost, or a watch has ended: whoever started this should start it again.
pub async fn look_after(
    client: Client,
    config: Config,
    told: (Admin, Metrics),
    stop: CancellationToken,
) -> anyhow::Result<()> {
    look_after_with(client, config, (told.0, told.1, Arc::new(Network::default())), stop).await
}

/// [`look_after`], with another way to reach pods.
///
/// # Errors
/// As [`look_after`].
pub async fn look_after_with(
    client: Client,
    config: Config,
    (admin, metrics, pods): (Admin, Metrics, Arc<dyn PodClient>),
    stop: CancellationToken,
) -> anyhow::Result<()> {
    admin.waits_for(Some("the definition of LLMDeployment"));
    tokio::select! {
        established = definition(&client, config.namespaces.first()) => established?,
        () = stop.cancelled() => return Ok(()),
    }
    admin.waits_for(None);
    let mut election = config.lease.clone().map(|lease| Election::new(&client, lease));
    if let Some(election) = &mut election {
        tracing::info!("waits for the lease");
        tokio::select! {
            () = election.acquire() => {}
            () = stop.cancelled() => return Ok(()),
        }
    }
    tracing::info!("acts");
    metrics.leads(true);
    let controllers = control(&client, &config, (&admin, &metrics, &pods), stop);
    let outcome = match &mut election {
        None => controllers.await,
        Some(election) => tokio::select! {
            outcome = controllers => outcome,
            // Controllers are dropped at once: from here on another operator may act.
            lost = election.hold() => match lost {
                Ok(never) => match never {},
                Err(error) => return Err(error),
            },
        },
    };
    metrics.leads(false);
    if let Some(election) = &mut election {
        election.release().await?;
    }
    outcome
}

async fn control(
    client: &Client,
    config: &Config,
    (admin, metrics, pods): (&Admin, &Metrics, &Arc<dyn PodClient>),
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let monitors = knows_monitors(client).await?;
    let mut config = config.clone();
    config.controller.defaults.pod_user = pod_user(client).await?;
    let scopes: Vec<Option<String>> = if config.namespaces.is_empty() {
        vec![None]
    } else {
        config.namespaces.iter().cloned().map(Some).collect()
    };
    let upgrades = Upgrades::new(usize::from(config.controller.max_concurrent_upgrades), scopes.len());
    let mut controllers = JoinSet::new();
    for namespace in scopes {
        let (known, knows) = tokio::sync::oneshot::channel();
        let scope = Scope {
            client: client.clone(),
            namespace,
            monitors,
            pods: pods.clone(),
            upgrades: upgrades.clone(),
            metrics: metrics.clone(),
        };
        controllers.spawn(controller::run(scope, config.controller.clone(), stop.clone(), known));
        let admin = admin.clone();
        controllers.spawn(async move {
            if let Ok(store) = knows.await {
                admin.knows(store);
            }
            Ok(())
        });
    }
    while let Some(ended) = controllers.join_next().await {
        ended.map_err(|error| anyhow!(error).context("a controller panicked"))??;
    }
    Ok(())
}

/// Waits until the cluster knows the resource.
async fn definition(client: &Client, namespace: Option<&String>) -> anyhow::Result<()> {
    let name = LlmDeployment::crd_name();
    // Whoever looks after single namespaces may not be allowed to see definitions; that the resource can be listed
    // says as much.
    let listed: Api<LlmDeployment> = match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    loop {
        let error = match listed.list_metadata(&kube::api::ListParams::default().limit(1)).await {
            Ok(_) => return Ok(()),
            Err(error) => error,
        };
        if namespace.is_none() {
            break;
        }
        tracing::warn!(%error, "waits for the definition of LLMDeployment");
        tokio::time::sleep(DEFINITION_PAUSE).await;
    }
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    await_condition(definitions, name, is_crd_established())
        .await
        .context("failed to wait for the definition")?;
    Ok(())
}

/// Who decides which user pods run as: OpenShift does, by its security context constraints.
async fn pod_user(client: &Client) -> anyhow::Result<PodUser> {
    let groups = client.list_api_groups().await.context("failed to list the API groups of the cluster")?;
    let is_openshift = groups.groups.iter().any(|group| group.name == "security.openshift.io");
    Ok(if is_openshift { PodUser::Platform } else { PodUser::Fixed })
}

/// Whether the cluster has the Prometheus operator's resources.
async fn knows_monitors(client: &Client) -> anyhow::Result<bool> {
    let kind = Kind::ServiceMonitor;
    match client.list_api_group_resources(&kind.api_version()).await {
        Ok(list) => Ok(list.resources.iter().any(|resource| resource.kind == kind.name())),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error).context("failed to ask the cluster what it knows"),
    }
}

//! Runs the operator on a cluster. It serves probes, waits for the custom resource definition and for the Lease,
//! and then runs the controllers, one for each namespace or one for all namespaces, until it receives a termination
//! signal or loses the Lease.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use futures_util::future::join_all;
use kube::Client;
use kube::api::{ApiResource, ListParams};
use operator_api::LlmDeployment;
use rand::RngExt as _;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::admin::Admin;
use crate::args::{Args, Command, RunArgs};
use crate::client::{objects_api, with_request_timeout};
use crate::controller::{self, Scope};
use crate::leader::{self, Election};
use crate::local;
use crate::metrics::Metrics;
use crate::pod_reports::{NetworkClient, PodClient};
use crate::upgrades::UpgradeLimiter;
use crate::validate::{Defaults, PodUser};
use crate::watch::has_service_monitors;
use process::signals::EndSignals;
use process::trace::Tracer;

/// The interval at which the operator checks for the custom resource definition.
const DEFINITION_INTERVAL: Duration = Duration::from_secs(2);
/// The interval at which a cluster without the kind ServiceMonitor is checked for it.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(300);
/// Time within which the operator must finish its work after SIGTERM or SIGINT.
///
/// If exceeded: the work is canceled, and the process exits with an error.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);

impl Args {
    /// Runs the subcommand that the arguments select.
    ///
    /// # Errors
    /// The subcommand fails.
    pub fn run(self) -> anyhow::Result<()> {
        let Self { command, log, log_format } = self;
        let command = match command {
            Command::Crd => return print_crd(),
            Command::DieWithParent(args) => return local::die_with_parent(args),
            command => command,
        };
        process::logs::start(&log, log_format)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .context("failed to start the asynchronous runtime")?;
        match command {
            Command::Run(args) => runtime.block_on(run(args)),
            Command::Local(args) => runtime.block_on(local::run(args)),
            Command::Crd | Command::DieWithParent(_) => Ok(()),
        }
    }
}

fn print_crd() -> anyhow::Result<()> {
    use std::io::Write as _;
    let yaml = serde_yaml::to_string(&operator_api::crd())
        .context("failed to serialize the CustomResourceDefinition")?;
    std::io::stdout()
        .write_all(yaml.as_bytes())
        .context("failed to write the CustomResourceDefinition to standard output")
}

/// The configuration of the operator on a cluster.
#[derive(Clone, Debug)]
pub struct Config {
    /// The namespaces that the operator manages; empty for all namespaces.
    pub namespaces: Vec<String>,
    /// The configuration of each controller.
    pub controller: controller::Config,
    /// The configuration of leader election; `None` to run without it.
    pub lease: Option<leader::Config>,
}

/// The services that the operator uses on a cluster.
#[derive(Clone)]
pub struct Services {
    /// The HTTP server for probes and metrics.
    pub admin: Admin,
    /// The metrics of the operator.
    pub metrics: Metrics,
    /// The client that connects to pods.
    pub pods: Arc<dyn PodClient>,
}

async fn run(args: RunArgs) -> anyhow::Result<()> {
    let client = Client::try_default().await.context("failed to load the Kubernetes configuration")?;
    let listener = TcpListener::bind((args.host, args.port))
        .await
        .with_context(|| format!("failed to listen on {}:{}", args.host, args.port))?;
    tracing::info!("serving probes and metrics on http://{}", listener.local_addr()?);
    let config = config(args, &client)?;
    let tracer = config.controller.tracer.clone();
    let stop = CancellationToken::new();
    let mut signals = EndSignals::new()?;
    let metrics = Metrics::default();
    let admin = Admin::new(metrics.clone());
    let mut controllers = JoinSet::new();
    let mut probes = JoinSet::new();
    probes.spawn(axum::serve(listener, admin.clone().router()).into_future());
    let services = Services { admin, metrics, pods: Arc::new(NetworkClient::default()) };
    controllers.spawn(manage(client, config, services, stop.clone()));
    tokio::select! {
        Some(ended) = controllers.join_next() => return ended.context("the operator panicked")?,
        _ = probes.join_next() => bail!("the server for probes and metrics has stopped"),
        () = signals.next() => {}
    }
    tracing::info!("shutting down: finishing the running reconciles");
    stop.cancel();
    let outcome = match tokio::time::timeout(SHUTDOWN_TIMEOUT, controllers.join_next()).await {
        Ok(Some(ended)) => ended.context("the operator panicked")?,
        Ok(None) => Ok(()),
        Err(_) => {
            bail!("the operator did not finish its work and release the lease within {SHUTDOWN_TIMEOUT:?}")
        }
    };
    // Flushing blocks the calling thread until this runtime has sent the spans, so it runs on another thread.
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
        max_concurrent_reconciles,
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
                host: ip_family.unspecified_address(std::env::var("KUBERNETES_SERVICE_HOST").ok().as_deref()),
                // `run_controllers` replaces this value, because it depends on the cluster.
                pod_user: PodUser::Fixed,
            },
            load_interval: (!load_interval.is_zero()).then_some(load_interval),
            max_concurrent_reconciles,
            max_concurrent_upgrades,
            discovery_interval: DISCOVERY_INTERVAL,
            tracer: otlp_endpoint
                .as_deref()
                .map(|endpoint| Tracer::new("ovfleet-operator", endpoint, 1.0))
                .transpose()?,
        },
        lease: (!no_leader_election).then_some(lease),
    })
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "operator".to_owned() } else { name.to_owned() }
}

/// Manages the LLMDeployments of a cluster until `stop` is canceled. A request fails if the API server does not answer
/// it in time.
///
/// # Errors
/// The Lease was lost or could not be released, the cluster's API groups or API resources could not be listed, or a
/// watch has ended. The process should be restarted.
pub async fn manage(
    client: Client,
    config: Config,
    services: Services,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let client = with_request_timeout(client);
    services.admin.set_waits_for(Some("the CustomResourceDefinition of LLMDeployment"));
    tokio::select! {
        () = await_definition(&client, config.namespaces.first()) => {}
        () = stop.cancelled() => return Ok(()),
    }
    services.admin.set_waits_for(None);
    let mut election = config.lease.clone().map(|lease| Election::new(&client, lease));
    if let Some(election) = &mut election {
        tracing::info!("waiting for the lease");
        tokio::select! {
            () = election.acquire() => {}
            () = stop.cancelled() => return Ok(()),
        }
    }
    let message = if election.is_some() { "this process is the leader" } else { "starting to reconcile" };
    tracing::info!("{message}");
    services.metrics.set_leader(true);
    let controllers = run_controllers(&client, &config, &services, stop);
    let outcome = match &mut election {
        None => controllers.await,
        Some(election) => tokio::select! {
            outcome = controllers => outcome,
            // The controllers are dropped immediately, because another operator may be the leader now.
            lost = election.hold() => match lost {
                Ok(never) => match never {},
                Err(error) => return Err(error),
            },
        },
    };
    services.metrics.set_leader(false);
    if let Some(election) = &mut election {
        election.release().await.context("failed to release the lease")?;
    }
    outcome
}

async fn run_controllers(
    client: &Client,
    config: &Config,
    services: &Services,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    services.admin.set_waits_for(Some("the initial lists of objects"));
    let has_service_monitors = has_service_monitors(client)
        .await
        .context("failed to list the API resources of the Prometheus operator")?;
    let mut config = config.clone();
    config.controller.defaults.pod_user = pod_user(client).await?;
    let scopes = scopes(&config.namespaces);
    let upgrades = UpgradeLimiter::new(usize::from(config.controller.max_concurrent_upgrades), scopes.len());
    let mut controllers = JoinSet::new();
    let mut lists = Vec::new();
    for namespace in scopes {
        let (ready, is_ready) = tokio::sync::oneshot::channel();
        let scope = Scope {
            client: client.clone(),
            namespace,
            has_service_monitors,
            pods: services.pods.clone(),
            upgrades: upgrades.clone(),
            metrics: services.metrics.clone(),
        };
        controllers.spawn(controller::run(scope, config.controller.clone(), stop.clone(), ready));
        let admin = services.admin.clone();
        lists.push(async move { is_ready.await.map(|store| admin.add_store(store)) });
    }
    let admin = services.admin.clone();
    controllers.spawn(async move {
        // A list is missing only if its controller has ended.
        if join_all(lists).await.iter().all(Result::is_ok) {
            admin.set_waits_for(None);
        }
        Ok(())
    });
    while let Some(ended) = controllers.join_next().await {
        ended.map_err(|error| anyhow!(error).context("a controller panicked"))??;
    }
    Ok(())
}

/// Returns the scope of each controller: `None` for a single controller of all namespaces, or else each of `namespaces`
/// once, because two controllers of the same namespace would interfere with each other.
fn scopes(namespaces: &[String]) -> Vec<Option<String>> {
    if namespaces.is_empty() {
        return vec![None];
    }
    let unique: BTreeSet<&String> = namespaces.iter().collect();
    unique.into_iter().cloned().map(Some).collect()
}

/// Waits until the API server lists LLMDeployments, which requires that their definition is established.
///
/// Every error is retried, because the API server may be unavailable when this process starts. If the process exited
/// instead, Kubernetes would restart it with growing pauses of up to five minutes.
async fn await_definition(client: &Client, namespace: Option<&String>) {
    // List the resources instead of reading their definition: definitions are cluster-scoped, so an operator that is
    // limited to namespaces cannot have the permission to read them.
    let kind = ApiResource::erase::<LlmDeployment>(&());
    let resources = objects_api(client, namespace.map(String::as_str), &kind);
    while let Err(error) = resources.list_metadata(&ListParams::default().limit(1)).await {
        let error = format!("{:#}", anyhow!(error));
        tracing::warn!(error, "failed to list LLMDeployments; retrying in {DEFINITION_INTERVAL:?}");
        tokio::time::sleep(DEFINITION_INTERVAL).await;
    }
}

/// Detects who assigns the user that pods run as: OpenShift assigns the user through security context constraints.
async fn pod_user(client: &Client) -> anyhow::Result<PodUser> {
    let groups = client.list_api_groups().await.context("failed to list the API groups of the cluster")?;
    let is_openshift = groups.groups.iter().any(|group| group.name == "security.openshift.io");
    Ok(if is_openshift { PodUser::Platform } else { PodUser::Fixed })
}

#[cfg(test)]
mod tests {
    use super::scopes;

    #[test]
    fn each_namespace_has_one_controller() {
        let scopes_of = |namespaces: &[&str]| {
            let namespaces: Vec<String> = namespaces.iter().map(|&name| name.to_owned()).collect();
            scopes(&namespaces)
        };
        assert_eq!(scopes_of(&[]), [None]);
        let expected = ["a", "b"].map(|name| Some(name.to_owned()));
        assert_eq!(scopes_of(&["b", "a", "b"]), expected);
    }
}

//! Measures the cost of managing many resources with the operator. The operator, the API server, etcd and the
//! controllers of Kubernetes are real; the module `node` simulates the kubelet and the routers. `make bench-operator`
//! prints the table; `--update` also writes it into `docs/performance/results.md`.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints a table")]

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Parser as _;
use clap::builder::TypedValueParser as _;
use futures_util::future::try_join_all;
use kube::api::{Api, PostParams};
use kube::runtime::wait::{await_condition, conditions::is_crd_established};
use kube::{Client, CustomResourceExt as _};
use operator_api::LlmDeployment;
use serde_json::json;
use tests::cluster::ControlPlane;
use tests::process::Process;
use tokio::task::JoinSet;

use node::Node;
use process::Sample;
use table::Figures;

mod node;
mod process;
mod table;

const RESULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/performance/results.md");
/// The maximum time to wait for the start of the operator, and for the readiness of all resources.
const LIMIT: Duration = Duration::from_secs(900);
/// The pause between the readiness of all resources and the measurement of the idle operator. During the pause, the
/// operator publishes the last events, requests the usage of the KV caches from the routers of each resource at least
/// once, and writes it to the status.
const SETTLE: Duration = Duration::from_secs(80);
const NAMESPACE: &str = "bench";

/// Runs the operator against a real API server and measures the cost of managing many resources.
#[derive(Debug, clap::Parser)]
#[command(name = "bench-operator")]
struct Args {
    /// The number of resources.
    #[arg(long, default_value = "300", value_parser = clap::value_parser!(u16).range(1..).map(usize::from))]
    resources: usize,
    /// The time during which the idle operator is measured, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = clap::value_parser!(u16).range(1..).map(seconds))]
    idle: Duration,
    /// Write the table to docs/performance/results.md.
    #[arg(long)]
    update: bool,
}

fn seconds(count: u16) -> Duration {
    Duration::from_secs(count.into())
}

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("failed to start the asynchronous runtime")
        .and_then(|runtime| runtime.block_on(run(&args)));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args) -> anyhow::Result<()> {
    let cluster = ControlPlane::start_with_controllers().await?;
    let client = cluster.client().await?;
    prepare(&client).await?;
    let mut tasks = JoinSet::new();
    let node = Node::start(&client, NAMESPACE, args.resources, &mut tasks).await?;
    let operator = start(&cluster)?;
    let address = operator.await_line(LIMIT, |line| {
        line.split_once("serving probes and metrics on http://").map(|(_, address)| address.trim().to_owned())
    })?;
    operator.await_line(LIMIT, |line| line.contains("is the leader").then_some(()))?;
    let target = Target { operator: &operator, address: &address };
    let figures = tokio::select! {
        figures = measure(args, &client, &node, &target) => {
            figures.with_context(|| operator.output())?
        }
        Some(ended) = tasks.join_next() => match ended? {
            Ok(()) => bail!("a background task of the benchmark has ended unexpectedly"),
            Err(error) => return Err(error),
        },
    };
    let markdown = figures.markdown();
    println!("{markdown}");
    if args.update {
        ::process::reference::update_section(RESULTS.as_ref(), "bench-operator", &markdown)?;
    }
    Ok(())
}

/// Creates the custom resource definition and the namespace.
async fn prepare(client: &Client) -> anyhow::Result<()> {
    let definitions = Api::all(client.clone());
    definitions.create(&PostParams::default(), &operator_api::crd()).await?;
    await_condition(definitions, LlmDeployment::crd_name(), is_crd_established()).await?;
    let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(client.clone());
    let namespace = serde_json::from_value(json!({"metadata": {"name": NAMESPACE}}))?;
    namespaces.create(&PostParams::default(), &namespace).await?;
    Ok(())
}

/// Starts the operator that was built together with this program, with the subcommand that the chart uses.
fn start(cluster: &ControlPlane) -> anyhow::Result<Process> {
    let own = std::env::current_exe()?;
    let directory = own
        .parent()
        .and_then(std::path::Path::parent)
        .context("this program is not in a Cargo target directory")?;
    let mut command = tests::server::without_settings(Command::new(directory.join("ovfleet-operator")));
    Process::start(command.args(["run", "--port=0"]).env("KUBECONFIG", cluster.kubeconfig()))
}

/// The operator that is measured.
struct Target<'a> {
    operator: &'a Process,
    /// The address at which the operator serves its metrics.
    address: &'a str,
}

async fn measure(args: &Args, client: &Client, node: &Node, target: &Target<'_>) -> anyhow::Result<Figures> {
    let sample = async || Sample::take(target.operator.id(), target.address).await;
    let before = sample().await?;
    let started = Instant::now();
    let resources: Api<LlmDeployment> = Api::namespaced(client.clone(), NAMESPACE);
    let created = (0..args.resources).map(|number| {
        let object = json!({
            "apiVersion": "ovfleet.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": node::name(number)},
            "spec": {"model": {"source": {"pvc": {"claim": "models"}}}, "replicas": 1, "router": {"replicas": 1}},
        });
        let resources = resources.clone();
        async move {
            resources.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
            anyhow::Ok(())
        }
    });
    try_join_all(created).await?;
    let created = started.elapsed();
    eprintln!("{} resources created in {created:.1?}", args.resources);
    tokio::time::timeout(LIMIT, node.all_ready(&resources))
        .await
        .with_context(|| format!("not all resources became ready within {LIMIT:?}"))??;
    let converged = started.elapsed();
    eprintln!("all resources ready after {converged:.1?}");
    let after = sample().await?;
    tokio::time::sleep(SETTLE).await;
    let calm = sample().await?;
    eprintln!("measuring the idle operator for {:?}", args.idle);
    tokio::time::sleep(args.idle).await;
    let last = sample().await?;
    let objects = node.owned(client).await?;
    Ok(Figures {
        resources: args.resources,
        objects,
        created,
        converged,
        idle: args.idle,
        samples: [before, after, calm, last],
    })
}

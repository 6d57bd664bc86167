//! What clients see while a deployment is scaled, changed and hurt under continuous streaming traffic: nothing. Each
//! request is marked and accounted for. On the node that `make e2e` starts.

use serde_json::Value;
use tests::hub::Hub;
use tests::node::{self, Namespace, OPERATOR_NAMESPACE, Release, kubectl};
use tests::scene::{self, AROUND, LIMIT, ROUTER, SERVER, assert_none_failed};
use tests::traffic::{Account, Outcome, Traffic};

const CLIENTS: usize = 4;
const NAMESPACE: &str = "traffic";

fn manifest(hub: &Hub, replicas: u32, queue: u32) -> String {
    let more = format!(
        "
  engine:
    kvCache: {{size: 256Mi}}
    extraArgs: ['--max-queue={queue}']
  router: {{replicas: 2}}"
    );
    scene::manifest(NAMESPACE, hub, replicas, &more)
}

/// An installed chart, a deployment that is ready, and traffic through its Service.
struct Scene {
    hub: Hub,
    traffic: Traffic,
    // Dropped in this order.
    _namespace: Namespace,
    _release: Release,
}

impl Scene {
    async fn set(replicas: u32) -> anyhow::Result<Self> {
        let release = Release::install("helm4", &[])?;
        let namespace = Namespace::new(NAMESPACE)?;
        let hub = scene::hub().await?;
        node::apply(NAMESPACE, &manifest(&hub, replicas, 100))?;
        settled(replicas)?;
        let traffic = scene::traffic(NAMESPACE, CLIENTS, None).await?;
        Ok(Self { hub, traffic, _namespace: namespace, _release: release })
    }

    /// Lets some traffic pass over what has been done.
    async fn flow(&mut self) {
        self.traffic.flow(AROUND).await;
    }

    async fn end(self) -> Account {
        let Self { hub, traffic, _namespace, _release } = self;
        let account = traffic.stop().await;
        eprintln!("{}", account.summary());
        drop(hub);
        account
    }
}

fn settled(replicas: u32) -> anyhow::Result<()> {
    scene::settled(NAMESPACE, replicas)
}

fn scale(replicas: u32) -> anyhow::Result<()> {
    kubectl(&["scale", "llmd/chat", "--namespace", NAMESPACE, &format!("--replicas={replicas}")])?;
    settled(replicas)
}

#[tokio::test(flavor = "multi_thread")]
async fn scaling_up_and_down_loses_no_request() -> anyhow::Result<()> {
    let mut scene = Scene::set(1).await?;
    scale(3)?;
    scene.flow().await;
    scale(1)?;
    scene.flow().await;
    assert_none_failed(&scene.end().await);
    Ok(())
}

/// A rollout of arguments, edits faster than it can follow, one taken back while it is under way, and a replacement
/// of the whole resource.
#[tokio::test(flavor = "multi_thread")]
async fn changing_what_runs_loses_no_request() -> anyhow::Result<()> {
    let mut scene = Scene::set(2).await?;
    let apply = |queue: u32| node::apply(NAMESPACE, &manifest(&scene.hub, 2, queue)).map(drop);
    let first = node::pods(NAMESPACE, SERVER)?;

    apply(101)?;
    settled(2)?;
    let second = node::pods(NAMESPACE, SERVER)?;
    assert!(second.iter().all(|pod| !first.contains(pod)), "{first:?} {second:?}");

    for queue in 102..106 {
        apply(queue)?;
    }
    settled(2)?;

    apply(106)?;
    node::await_state("the rollout to be under way", LIMIT, || {
        Ok((node::pods(NAMESPACE, SERVER)?.len() > 2).then_some(()))
    })?;
    apply(105)?;
    settled(2)?;

    let replacement = manifest(&scene.hub, 2, 107);
    node::run_with_input("kubectl", &["replace", "--filename=-"], &replacement)?;
    settled(2)?;
    scene.flow().await;
    assert_none_failed(&scene.end().await);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn changing_the_image_loses_no_request() -> anyhow::Result<()> {
    let mut scene = Scene::set(2).await?;
    // The same image by another name is another image to Kubernetes.
    let image = "localhost/ovfleet/server:again";
    node::run(
        "ctr",
        &["--namespace", "k8s.io", "images", "tag", "--force", "localhost/ovfleet/server:e2e", image],
    )?;
    let patch = format!("{{\"spec\":{{\"engine\":{{\"image\":\"{image}\"}}}}}}");
    kubectl(&["patch", "llmd/chat", "--namespace", NAMESPACE, "--type=merge", "--patch", &patch])?;
    settled(2)?;
    for pod in node::pods(NAMESPACE, SERVER)? {
        let pod = node::get(&["pod", "--namespace", NAMESPACE, &pod])?;
        assert_eq!(pod["spec"]["containers"][0]["image"], image);
    }
    scene.flow().await;
    assert_none_failed(&scene.end().await);
    Ok(())
}

/// The streams that the replica was answering end with an error that says so; nothing else happens.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_replica_costs_its_own_streams_and_says_so() -> anyhow::Result<()> {
    let mut scene = Scene::set(2).await?;
    let pods = node::pods(NAMESPACE, SERVER)?;
    node::kill(NAMESPACE, &pods[0], "server")?;
    scene.flow().await;
    settled(2)?;
    scene.flow().await;
    let account = scene.end().await;
    let failures = account.failures();
    // No more than it can have had under way.
    assert!(failures.len() <= CLIENTS, "{}", account.summary());
    for failure in failures {
        assert!(
            matches!(&failure.outcome, Outcome::Failed(message) if !message.is_empty()),
            "{}",
            account.summary()
        );
    }
    Ok(())
}

/// Streams that the killed router was passing on break off, as their connection does. Whoever had nothing yet is answered
/// by the other one, on the next try of the client.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_router_costs_the_streams_it_was_passing_on() -> anyhow::Result<()> {
    let mut scene = Scene::set(2).await?;
    let pods = node::pods(NAMESPACE, ROUTER)?;
    assert_eq!(pods.len(), 2);
    node::kill(NAMESPACE, &pods[0], "router")?;
    scene.flow().await;
    settled(2)?;
    scene.flow().await;
    let account = scene.end().await;
    // No more than it can have had under way.
    assert!(account.failures().len() <= CLIENTS, "{}", account.summary());
    for failure in account.failures() {
        assert!(matches!(failure.outcome, Outcome::Broken(_)), "{}", account.summary());
    }
    Ok(())
}

/// Neither is needed for a request to be answered.
#[tokio::test(flavor = "multi_thread")]
async fn killing_the_operator_or_the_api_server_is_not_noticed() -> anyhow::Result<()> {
    let mut scene = Scene::set(2).await?;
    let operators = node::pods(OPERATOR_NAMESPACE, "app.kubernetes.io/name=ovfleet-operator")?;
    node::kill(OPERATOR_NAMESPACE, &operators[0], "operator")?;
    scene.flow().await;
    scale(3)?;

    let servers = identities()?;
    node::kill_component("kube-apiserver")?;
    scene.flow().await;
    settled(3)?;
    assert_eq!(identities()?, servers, "replicas were replaced");
    scale(2)?;
    scene.flow().await;
    assert_none_failed(&scene.end().await);
    Ok(())
}

fn identities() -> anyhow::Result<Vec<Value>> {
    let pods = node::get(&["pods", "--namespace", NAMESPACE, "--selector", SERVER])?;
    let pods = pods["items"].as_array().into_iter().flatten();
    let staying = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(staying.map(|pod| pod["metadata"]["uid"].clone()).collect())
}

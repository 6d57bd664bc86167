//! Tests a deployment under continuous streaming traffic: scaling and changing it loses no request, and killing one of
//! its processes breaks only the streams of that process. The outcome of every request is checked. The tests run on the
//! node that `make e2e` starts.

use std::time::Duration;

use serde_json::Value;
use tests::hub::Hub;
use tests::node::{self, LIMIT, Namespace, OPERATOR_NAMESPACE, Release, kubectl};
use tests::scene::{self, PAUSE, REQUESTS_AROUND_CHANGE, ROUTER, SERVER, assert_none_failed};
use tests::traffic::{Outcome, Traffic, TrafficReport};

const CLIENTS: usize = 4;
const NAMESPACE: &str = "traffic";
/// The number of kills after which at least one request must have failed.
const KILLS_MAX: usize = 5;

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

/// An installed chart, a ready deployment, and traffic through its Service.
struct Scene {
    hub: Hub,
    traffic: Traffic,
    // Fields are dropped in declaration order, so the namespace is deleted before the release. Dropping the release
    // also deletes the custom resource definition.
    _namespace: Namespace,
    _release: Release,
}

impl Scene {
    async fn set(replicas: u32) -> anyhow::Result<Self> {
        Self::with_pause(replicas, PAUSE).await
    }

    /// Sets the scene with clients that pause for `pause` between requests.
    async fn with_pause(replicas: u32, pause: Duration) -> anyhow::Result<Self> {
        let release = Release::install("helm4", &[])?;
        let namespace = Namespace::new(NAMESPACE)?;
        let hub = scene::hub().await?;
        node::apply(NAMESPACE, &manifest(&hub, replicas, 100))?;
        settled(replicas)?;
        let traffic = scene::traffic(NAMESPACE, CLIENTS, None, pause).await?;
        Ok(Self { hub, traffic, _namespace: namespace, _release: release })
    }

    /// Waits until [`REQUESTS_AROUND_CHANGE`] more requests have ended.
    async fn await_requests(&mut self) {
        self.traffic.await_requests(REQUESTS_AROUND_CHANGE).await;
    }

    /// Kills the process `process` in the pods that `selector` selects, in turn, until a request has failed. One kill
    /// may not be enough, because a request whose answer has not begun is retried. Clients reconnect to another pod, so
    /// killing the same pod again might affect no client.
    async fn kill_until_requests_fail(&mut self, selector: &str, process: &str) -> anyhow::Result<()> {
        for kill in 0..KILLS_MAX {
            let pods = node::pods(NAMESPACE, selector)?;
            assert_eq!(pods.len(), 2);
            node::kill(NAMESPACE, &pods[kill % 2], process)?;
            self.await_requests().await;
            settled(2)?;
            self.await_requests().await;
            if self.traffic.failures() > 0 {
                return Ok(());
            }
        }
        anyhow::bail!("no request failed although {process} was killed {KILLS_MAX} times")
    }

    async fn end(self) -> TrafficReport {
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
    let log = kubectl(&["logs", "--namespace", NAMESPACE, &node::pods(NAMESPACE, SERVER)?[0]])?;
    assert!(
        log.contains("limited the threads of the model"),
        "the model has more threads than processors\n{log}"
    );
    scale(3)?;
    scene.await_requests().await;
    scale(1)?;
    scene.await_requests().await;
    assert_none_failed(&scene.end().await);
    Ok(())
}

/// Rolls out new arguments, edits the resource faster than rollouts complete, reverts a running rollout, and replaces
/// the whole resource.
#[tokio::test(flavor = "multi_thread")]
async fn changing_the_resource_loses_no_request() -> anyhow::Result<()> {
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
    node::await_state("the rollout to start", LIMIT, || {
        Ok((node::pods(NAMESPACE, SERVER)?.len() > 2).then_some(()))
    })?;
    apply(105)?;
    settled(2)?;

    let replacement = manifest(&scene.hub, 2, 107);
    node::run_with_input("kubectl", &["replace", "--filename=-"], &replacement)?;
    settled(2)?;
    scene.await_requests().await;
    assert_none_failed(&scene.end().await);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn changing_the_image_loses_no_request() -> anyhow::Result<()> {
    let mut scene = Scene::set(2).await?;
    // Kubernetes treats another name of the same image as a different image.
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
    scene.await_requests().await;
    assert_none_failed(&scene.end().await);
    Ok(())
}

/// Only the streams of the killed replica fail, with an error event.
#[tokio::test(flavor = "multi_thread")]
async fn killing_a_replica_fails_only_its_own_streams_with_an_error() -> anyhow::Result<()> {
    let mut scene = Scene::with_pause(2, Duration::ZERO).await?;
    scene.kill_until_requests_fail(SERVER, "ovfleet-server").await?;
    let account = scene.end().await;
    let failures = account.failures();
    // Only requests that were in flight at the killed pod may fail, at most one for each client.
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

/// The streams of the killed router end with their connections. Clients without a response retry and reach the other
/// router.
#[tokio::test(flavor = "multi_thread")]
async fn killing_a_router_breaks_only_its_own_streams() -> anyhow::Result<()> {
    let mut scene = Scene::with_pause(2, Duration::ZERO).await?;
    scene.kill_until_requests_fail(ROUTER, "ovfleet-router").await?;
    let account = scene.end().await;
    // Only requests that were in flight at the killed pod may fail, at most one for each client.
    assert!(account.failures().len() <= CLIENTS, "{}", account.summary());
    for failure in account.failures() {
        assert!(matches!(failure.outcome, Outcome::Broken(_)), "{}", account.summary());
    }
    Ok(())
}

/// Requests depend neither on the operator nor on the API server.
#[tokio::test(flavor = "multi_thread")]
async fn killing_the_operator_or_the_api_server_loses_no_request() -> anyhow::Result<()> {
    let mut scene = Scene::set(2).await?;
    let operators = node::pods(OPERATOR_NAMESPACE, "app.kubernetes.io/name=ovfleet-operator")?;
    node::kill(OPERATOR_NAMESPACE, &operators[0], "ovfleet-operator")?;
    scene.await_requests().await;
    scale(3)?;

    let servers = identities()?;
    node::kill_component("kube-apiserver")?;
    scene.await_requests().await;
    settled(3)?;
    assert_eq!(identities()?, servers, "replicas were replaced");
    scale(2)?;
    scene.await_requests().await;
    assert_none_failed(&scene.end().await);
    Ok(())
}

fn identities() -> anyhow::Result<Vec<Value>> {
    let pods = node::get(&["pods", "--namespace", NAMESPACE, "--selector", SERVER])?;
    let pods = pods["items"].as_array().into_iter().flatten();
    let staying = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(staying.map(|pod| pod["metadata"]["uid"].clone()).collect())
}

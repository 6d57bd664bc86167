//! Tests operations on a running deployment under continuous streaming traffic: rotating API keys, replacing routers,
//! draining a node, losing an operator, autoscaling, suspending and resuming. The outcome of every request is checked.
//! The tests run on the node that `make e2e` starts.
//!
//! The steps share one deployment, because setting it up takes longer than most of them.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::{Value, json};
use tests::external_metrics::{self, ExternalMetrics};
use tests::node::{self, LIMIT, Namespace, OPERATOR_NAMESPACE, Release, kubectl};
use tests::scene::{self, PAUSE, REQUESTS_AROUND_CHANGE, ROUTER, SERVER};
use tests::traffic::{Outcome, Traffic};

const NAMESPACE: &str = "operations";
const OPERATOR: &str = "app.kubernetes.io/name=ovfleet-operator";
const CLIENTS: usize = 3;
/// The time after which another operator takes over from one that does not renew its Lease.
const LEASE_SECONDS: u64 = 10;
const OLD_KEY: &str = "old-3f9c0e7a5b1d4c2e";
const NEW_KEY: &str = "new-8a1b6c2d9e0f4a7b";

/// The fields that this file adds to the manifest of the scene.
const MORE: &str = "
  engine: {kvCache: {size: 256Mi}}
  router: {replicas: 2, keyIsolation: name}
  access: {apiKeysSecretRef: {name: keys}}
  drain: {timeout: 30s}";

#[tokio::test(flavor = "multi_thread")]
async fn operations_lose_no_request() -> anyhow::Result<()> {
    let lease = format!("extraArgs={{--lease-duration={LEASE_SECONDS}s}}");
    let _release = Release::install("helm4", &["--set", "replicas=2", "--set", &lease])?;
    let _namespace = Namespace::new(NAMESPACE)?;
    set_keys(&[OLD_KEY])?;
    let hub = scene::hub().await?;
    node::apply(NAMESPACE, &scene::manifest(NAMESPACE, &hub, 2, MORE))?;
    scene::settled(NAMESPACE, 2)?;
    let mut traffic = scene::traffic(NAMESPACE, CLIENTS, Some(OLD_KEY), PAUSE).await?;

    let mut began = Instant::now();
    let mut report = |step: &str| {
        eprintln!("{step}: {:.1?}", began.elapsed());
        began = Instant::now();
    };
    rotate_keys(&mut traffic).await?;
    report("keys rotated");
    replace_routers(&mut traffic).await?;
    report("routers replaced");
    drain_node(&mut traffic).await?;
    report("node drained");
    lose_operator(&mut traffic).await?;
    report("operator lost");
    autoscale(&mut traffic).await?;
    report("autoscaled");
    let account = traffic.stop().await;
    eprintln!("{}", account.summary());
    scene::assert_none_failed(&account);
    suspend_and_resume().await?;
    report("suspended and resumed");
    Ok(())
}

fn set_keys(keys: &[&str]) -> anyhow::Result<()> {
    let lines: String = keys.iter().map(|key| format!("{key} team\n")).collect();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"keys": lines},
    });
    node::apply(NAMESPACE, &secret.to_string()).map(drop)
}

/// Waits until every router responds with `status` to a request with `key`.
fn await_routers(key: &str, status: u16) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Handle::current();
    let http = tests::http::client();
    let what = format!("all routers to respond with status {status} to requests with the key {key}");
    node::await_state(&what, LIMIT, || {
        for address in node::addresses(NAMESPACE, ROUTER)? {
            let request = http.get(format!("http://{address}:8000/v3/models")).bearer_auth(key);
            let response = tokio::task::block_in_place(|| runtime.block_on(request.send()))?;
            anyhow::ensure!(response.status() == status, "{address}: {}", response.status());
        }
        Ok(Some(()))
    })
}

/// Adds the new key, switches the clients to it, and removes the old one.
async fn rotate_keys(traffic: &mut Traffic) -> anyhow::Result<()> {
    await_routers(NEW_KEY, 401)?;
    set_keys(&[OLD_KEY, NEW_KEY])?;
    await_routers(NEW_KEY, 200)?;
    await_routers(OLD_KEY, 200)?;
    traffic.use_key(NEW_KEY);
    traffic.await_requests(REQUESTS_AROUND_CHANGE).await;
    set_keys(&[NEW_KEY])?;
    await_routers(OLD_KEY, 401)?;
    await_routers(NEW_KEY, 200)?;
    traffic.await_requests(REQUESTS_AROUND_CHANGE).await;
    Ok(())
}

async fn replace_routers(traffic: &mut Traffic) -> anyhow::Result<()> {
    let (routers, servers) = (node::pods(NAMESPACE, ROUTER)?, node::pods(NAMESPACE, SERVER)?);
    let resources = json!({"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}});
    scene::patch(NAMESPACE, &json!({"spec": {"router": {"resources": resources}}}))?;
    node::await_state("all routers to be replaced", LIMIT, || {
        let present =
            kubectl(&["get", "pods", "--namespace", NAMESPACE, "--selector", ROUTER, "--output=name"])?;
        let is_replaced = routers.iter().all(|router| !present.contains(router.as_str()));
        Ok((is_replaced && present.lines().count() == 2).then_some(()))
    })?;
    scene::settled(NAMESPACE, 2)?;
    traffic.await_requests(REQUESTS_AROUND_CHANGE).await;
    assert_eq!(node::pods(NAMESPACE, SERVER)?, servers, "changing the routers replaced replicas");
    Ok(())
}

/// Drains the node, and then uncordons it. It is the only node, so until then no pod can replace an evicted one, and
/// the disruption budgets retain one replica and one router.
async fn drain_node(traffic: &mut Traffic) -> anyhow::Result<()> {
    let (routers, servers) = (node::pods(NAMESPACE, ROUTER)?, node::pods(NAMESPACE, SERVER)?);
    let drained =
        kubectl(&["drain", "node1", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=15s"]);
    let error = drained.err().context("all pods were evicted despite the disruption budgets")?.to_string();
    assert!(error.contains("violate the pod's disruption budget"), "{error}");
    for (selector, before) in [(SERVER, servers), (ROUTER, routers)] {
        let staying: Vec<_> =
            node::pods(NAMESPACE, selector)?.into_iter().filter(|pod| before.contains(pod)).collect();
        assert_eq!(staying.len(), 1, "of {before:?}: {staying:?}");
    }
    traffic.await_requests(REQUESTS_AROUND_CHANGE).await;
    kubectl(&["uncordon", "node1"])?;
    scene::settled(NAMESPACE, 2)?;
    traffic.await_requests(REQUESTS_AROUND_CHANGE).await;
    Ok(())
}

fn leader() -> anyhow::Result<String> {
    let lease = node::get(&["lease", "ovfleet", "--namespace", OPERATOR_NAMESPACE])?;
    Ok(lease["spec"]["holderIdentity"].as_str().context("the Lease has no holder")?.to_owned())
}

/// Stops the leading operator with SIGSTOP, as on a paused machine, so that another operator takes over. When the
/// former leader continues, it must write nothing.
async fn lose_operator(traffic: &mut Traffic) -> anyhow::Result<()> {
    let operators = node::pods(OPERATOR_NAMESPACE, OPERATOR)?;
    node::await_state("both operators to be ready", LIMIT, || {
        let pods = node::get(&["pods", "--namespace", OPERATOR_NAMESPACE, "--selector", OPERATOR])?;
        let ready = pods["items"].as_array().into_iter().flatten().filter(|pod| scene::is_true(pod, "Ready"));
        Ok((ready.count() == 2).then_some(()))
    })?;
    let former = leader()?;
    assert!(operators.contains(&former), "{former} of {operators:?}");
    let pod = || node::get(&["pod", &former, "--namespace", OPERATOR_NAMESPACE]);
    let restarts = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"].as_u64();
    let before = pod()?;
    let processes = node::processes(OPERATOR_NAMESPACE, &former, "ovfleet-operator")?;
    let signal = |name: &str| node::run("kill", &["-s", name, &processes[0].to_string()]);

    signal("STOP")?;
    let stopped = Instant::now();
    scene::patch(NAMESPACE, &json!({"spec": {"replicas": 1}}))?;
    node::await_state("another operator to apply the change", LIMIT, || {
        let deployment = node::get(&["deployment", "chat-server", "--namespace", NAMESPACE])?;
        Ok((deployment["spec"]["replicas"] == 1).then_some(()))
    })?;
    let absence = stopped.elapsed();
    eprintln!("the change was applied after {absence:.1?}, with a Lease of {LEASE_SECONDS} s");
    let successor = leader()?;
    assert_ne!(successor, former);
    scene::settled(NAMESPACE, 1)?;
    traffic.await_requests(REQUESTS_AROUND_CHANGE).await;

    signal("CONT")?;
    node::await_state("the former leader to restart", LIMIT, || {
        Ok((restarts(&pod()?) > restarts(&before)).then_some(()))
    })?;
    scene::patch(NAMESPACE, &json!({"spec": {"replicas": 2}}))?;
    scene::settled(NAMESPACE, 2)?;
    traffic.await_requests(REQUESTS_AROUND_CHANGE).await;

    let lease = node::get(&["lease", "ovfleet", "--namespace", OPERATOR_NAMESPACE])?;
    assert_eq!(lease["spec"]["holderIdentity"], Value::from(successor), "{lease:#}");
    let acquired = lease["spec"]["acquireTime"].as_str().context("the Lease has no acquireTime")?.to_owned();
    let address = before["status"]["podIP"].as_str().context("the pod has no address")?;
    let (own, others): (Vec<_>, Vec<_>) =
        node::operator_writes()?.into_iter().partition(|write| write.address == address);
    let since = |writes: &[node::Write]| {
        writes.iter().filter(|write| write.time > acquired).cloned().collect::<Vec<_>>()
    };
    assert!(own.len() > 1, "the audit log has no writes of the former leader");
    assert!(since(&others).len() > 1, "the successor has written nothing");
    assert!(since(&own).is_empty(), "the former leader has written after {acquired}: {:#?}", since(&own));
    // In the worst case, the leader stops just after a renewal. The successor may also observe this renewal late, and
    // it needs time to take over.
    assert!(absence < Duration::from_secs(2 * LEASE_SECONDS), "{absence:?}");
    Ok(())
}

/// Scales to one replica for every [`CLIENTS`] requests in flight, but to at most two replicas.
async fn autoscale(traffic: &mut Traffic) -> anyhow::Result<()> {
    let _metrics = ExternalMetrics::start()?;
    let autoscaler = json!({
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "chat"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "ovfleet.dev/v1alpha1", "kind": "LLMDeployment", "name": "chat"},
            "minReplicas": 1,
            "maxReplicas": 2,
            "metrics": [{"type": "External", "external": {
                "metric": {"name": external_metrics::METRIC},
                "target": {"type": "AverageValue", "averageValue": CLIENTS.to_string()},
            }}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 5}},
        },
    });
    node::apply(NAMESPACE, &autoscaler.to_string())?;
    scene::settled(NAMESPACE, 1).context("failed to scale down")?;
    traffic.await_requests(REQUESTS_AROUND_CHANGE).await;
    // These clients do not pause, because clients that pause would have too few requests in flight for the autoscaler
    // to add a replica.
    let more = scene::traffic(NAMESPACE, CLIENTS, Some(NEW_KEY), Duration::ZERO).await?;
    scene::settled(NAMESPACE, 2).context("failed to scale up")?;
    traffic.await_requests(REQUESTS_AROUND_CHANGE).await;
    let account = more.stop().await;
    eprintln!("{}", account.summary());
    assert_eq!(account.failures().len(), 0, "{}", account.summary());
    scene::settled(NAMESPACE, 1).context("failed to scale down again")?;
    traffic.await_requests(REQUESTS_AROUND_CHANGE).await;
    kubectl(&["delete", "horizontalpodautoscaler", "chat", "--namespace", NAMESPACE])?;
    Ok(())
}

/// Suspends and resumes the deployment. Requests sent before the suspension complete, those sent during the suspension
/// may be rejected or receive no response, but no stream is interrupted, and those sent after resuming succeed.
async fn suspend_and_resume() -> anyhow::Result<()> {
    let mut traffic = scene::traffic(NAMESPACE, CLIENTS, Some(NEW_KEY), PAUSE).await?;
    let suspended = traffic.elapsed();
    scene::patch(NAMESPACE, &json!({"spec": {"suspend": true}}))?;
    node::await_state("all pods to end", LIMIT, || {
        let resource = node::get(&["llmd", "chat", "--namespace", NAMESPACE])?;
        let pods = node::get(&["pods", "--namespace", NAMESPACE])?;
        let is_empty = pods["items"].as_array().is_some_and(Vec::is_empty);
        anyhow::ensure!(is_empty && resource["status"]["phase"] == "Suspended", "{:#}", resource["status"]);
        Ok(Some(()))
    })?;
    let resource = node::get(&["llmd", "chat", "--namespace", NAMESPACE])?;
    assert!(scene::is_true(&resource, "Ready") && !scene::is_true(&resource, "Available"), "{resource:#}");
    kubectl(&["get", "service", "chat", "--namespace", NAMESPACE])?;

    scene::patch(NAMESPACE, &json!({"spec": {"suspend": false}}))?;
    scene::settled(NAMESPACE, 1)?;
    scene::service_address(NAMESPACE)?;
    let resumed = traffic.elapsed();
    // Wait for the requests in flight, which may still fail, and for additional ones.
    traffic.await_requests(CLIENTS + REQUESTS_AROUND_CHANGE).await;
    let account = traffic.stop().await;
    eprintln!("{}", account.summary());
    for request in &account.requests {
        let may_be_refused = request.sent > suspended && request.sent < resumed;
        let is_expected = match request.outcome {
            Outcome::Answered => true,
            Outcome::Unanswered(_) | Outcome::Refused(503, _) => may_be_refused,
            _ => false,
        };
        assert!(is_expected, "{request:?}, suspended at {suspended:?}, resumed at {resumed:?}");
    }
    Ok(())
}

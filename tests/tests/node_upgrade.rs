//! Tests the upgrade from the previous release under continuous streaming traffic, as [the
//! guide](../../docs/how-to/upgrade.md) describes it: first the custom resource definition, then the chart. The tests
//! run on the node that `make e2e` starts.
//!
//! The previous release is commit 3432560, the last commit before upgrades waited for approval. `node_upgrade/`
//! contains its chart, and the objects (with only the fields that its operator applied) and the status that its
//! operator created for a resource. The first test creates these objects instead of running the previous operator; its
//! replicas and routers are the current programs with the arguments of the previous release.
//! [`the_programs_of_the_previous_release_can_be_upgraded`] runs all programs of the previous release, whose images
//! must be built from that commit. With `UPDATE_EXPECT`, it records the objects and the status again; then rename
//! `retry-share: 0.1` to `retry-budget-percent: 10` in the objects, because the flag has been renamed.

use std::path::PathBuf;

use anyhow::Context as _;
use serde_json::{Map, Value, json};
use tests::hub::Hub;
use tests::node::{self, LIMIT, Namespace, Release, kubectl};
use tests::scene::{self, PAUSE, ROUTER, SERVER};

const NAMESPACE: &str = "upgrade";
const CLIENTS: usize = 3;
const CHART: &str = "tests/tests/node_upgrade/ovfleet-3432560.tgz";
/// The kinds of objects that the previous operator applies, in the order in which this test creates them.
const KINDS: &str =
    "serviceaccounts,roles,rolebindings,networkpolicies,services,poddisruptionbudgets,configmaps,deployments";
/// The fields that this file adds to the manifest of the scene.
const MORE: &str = "
  engine: {kvCache: {size: 256Mi}}
  router: {replicas: 2}
  drain: {timeout: 30s}";

fn recorded(name: &str) -> PathBuf {
    tests::root().join("tests/tests/node_upgrade").join(name)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_restarts_no_replica_before_approval_and_loses_no_request() -> anyhow::Result<()> {
    let hub = scene::hub().await?;
    // Tag the current images with the names of the previous ones.
    for image in ["server", "router"] {
        let [present, previous] = ["e2e", "previous"].map(|tag| format!("localhost/ovfleet/{image}:{tag}"));
        node::run("ctr", &["--namespace", "k8s.io", "images", "tag", "--force", &present, &previous])?;
    }
    let release = Release::install_chart("helm4", CHART, &["--set", "replicas=0"])?;
    let _namespace = Namespace::new(NAMESPACE)?;
    node::apply(NAMESPACE, &scene::manifest(NAMESPACE, &hub, 2, MORE))?;
    create_recorded(&hub)?;
    upgrade(&release).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs images of the previous release, as localhost/ovfleet/NAME:previous"]
async fn the_programs_of_the_previous_release_can_be_upgraded() -> anyhow::Result<()> {
    let hub = scene::hub().await?;
    let tags = "image.tag=previous,serverImage.tag=previous,routerImage.tag=previous";
    let release = Release::install_chart("helm4", CHART, &["--set", tags])?;
    let _namespace = Namespace::new(NAMESPACE)?;
    node::apply(NAMESPACE, &scene::manifest(NAMESPACE, &hub, 2, MORE))?;
    scene::settled(NAMESPACE, 2)?;
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        record(&hub)?;
    }
    upgrade(&release).await
}

async fn upgrade(release: &Release) -> anyhow::Result<()> {
    let mut traffic = scene::traffic(NAMESPACE, CLIENTS, None, PAUSE).await?;
    let (servers, routers) = (identities(SERVER)?, identities(ROUTER)?);
    assert_eq!((servers.len(), routers.len()), (2, 2));

    let definition =
        ["apply", "--server-side", "--force-conflicts", "--filename", "crds/llmdeployments.yaml"];
    kubectl(&definition)?;
    scene::patch(NAMESPACE, &json!({"spec": {"upgradePolicy": "Manual"}}))?;
    release.upgrade(&["--reset-then-reuse-values", "--set", "replicas=1"])?;
    let available = node::await_state("the release to wait for approval", LIMIT, || {
        let resource = node::get(&["llmd", "chat", "--namespace", NAMESPACE])?;
        let release = &resource["status"]["release"];
        anyhow::ensure!(release["state"] == "Waiting", "{:#}", resource["status"]);
        Ok(release["available"].as_str().map(str::to_owned))
    })?;
    // The previous routers cannot report to the operator, so they are replaced without approval.
    node::await_state("all routers to be replaced", LIMIT, || {
        let present = identities(ROUTER)?;
        Ok((present.len() == 2 && routers.iter().all(|router| !present.contains(router))).then_some(()))
    })?;
    traffic.await_requests(2 * scene::REQUESTS_AROUND_CHANGE).await;
    assert_eq!(identities(SERVER)?, servers, "replicas were replaced without approval");
    let resource = node::get(&["llmd", "chat", "--namespace", NAMESPACE])?;
    assert!(scene::is_true(&resource, "Available"), "{:#}", resource["status"]);

    let approval = format!("ovfleet.dev/upgrade={available}");
    kubectl(&["annotate", "llmd", "chat", "--namespace", NAMESPACE, "--overwrite", &approval])?;
    node::await_state("the release to be applied", LIMIT, || {
        let resource = node::get(&["llmd", "chat", "--namespace", NAMESPACE])?;
        anyhow::ensure!(resource["status"]["release"]["state"] == "Current", "{:#}", resource["status"]);
        Ok(Some(()))
    })?;
    scene::settled(NAMESPACE, 2)?;
    traffic.await_requests(scene::REQUESTS_AROUND_CHANGE).await;
    let present = identities(SERVER)?;
    assert!(servers.iter().all(|server| !present.contains(server)), "{present:?}");
    let account = traffic.stop().await;
    eprintln!("{}", account.summary());
    scene::assert_none_failed(&account);
    Ok(())
}

/// Returns the UID of each pod, with the number of restarts of its first container, excluding pods that are being
/// deleted.
fn identities(selector: &str) -> anyhow::Result<Vec<String>> {
    let pods = node::get(&["pods", "--namespace", NAMESPACE, "--selector", selector])?;
    let pods = pods["items"].as_array().into_iter().flatten();
    let staying = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    let identity = |pod: &Value| {
        format!("{} {}", pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"])
    };
    Ok(staying.map(identity).collect())
}

/// Creates the objects and the status that the operator of the previous release stored for the resource, and admits
/// replicas as that operator did.
fn create_recorded(hub: &Hub) -> anyhow::Result<()> {
    let resource = node::get(&["llmd", "chat", "--namespace", NAMESPACE])?;
    let uid = resource["metadata"]["uid"].as_str().context("no uid")?;
    let read = |name: &str| -> anyhow::Result<String> {
        let text =
            std::fs::read_to_string(recorded(name)).with_context(|| format!("failed to read {name}"))?;
        Ok(text.replace("{uid}", uid).replace("{hub}", &hub.url()))
    };
    let apply = [
        "apply",
        "--server-side",
        "--field-manager=ovfleet-operator",
        "--namespace",
        NAMESPACE,
        "--filename=-",
    ];
    node::run_with_input("kubectl", &apply, &read("objects.yaml")?)?;
    node::await_state("the replicas to be ready", LIMIT, || {
        let pods = node::get(&["pods", "--namespace", NAMESPACE, "--selector", SERVER])?;
        let pods = pods["items"].as_array().context("no pods")?;
        for pod in
            pods.iter().filter(|pod| scene::is_true(pod, "ContainersReady") && !scene::is_true(pod, "Ready"))
        {
            let admitted =
                json!({"status": {"conditions": [{"type": "ovfleet.dev/routable", "status": "True"}]}});
            let name = pod["metadata"]["name"].as_str().context("no name")?;
            let patch = format!("--patch={admitted}");
            kubectl(&["patch", "pod", name, "--namespace", NAMESPACE, "--subresource=status", &patch])?;
        }
        Ok((pods.iter().filter(|pod| scene::is_true(pod, "Ready")).count() == 2).then_some(()))
    })?;
    let status: Value = serde_yaml::from_str(&read("status.yaml")?)?;
    let patch = format!("--patch={}", json!({"status": status}));
    kubectl(&[
        "patch",
        "llmd",
        "chat",
        "--namespace",
        NAMESPACE,
        "--subresource=status",
        "--type=merge",
        &patch,
    ])?;
    Ok(())
}

/// Writes the objects and the status that the operator has stored for the resource into the repository.
fn record(hub: &Hub) -> anyhow::Result<()> {
    let resource = node::get(&["llmd", "chat", "--namespace", NAMESPACE])?;
    let uid = resource["metadata"]["uid"].as_str().context("no uid")?;
    let write = |name: &str, text: String| {
        std::fs::write(recorded(name), text.replace(uid, "{uid}").replace(&hub.url(), "{hub}"))
    };
    write("status.yaml", serde_yaml::to_string(&resource["status"])?)?;
    let all = node::get(&["--show-managed-fields", "--namespace", NAMESPACE, KINDS])?;
    let mut text = String::new();
    for object in all["items"].as_array().into_iter().flatten() {
        let managers = object["metadata"]["managedFields"].as_array().into_iter().flatten();
        let mut applied = managers.filter(|manager| manager["manager"] == "ovfleet-operator");
        let Some(applied) = applied.find(|manager| manager["operation"] == "Apply") else {
            continue;
        };
        let mut reduced = applied_fields(object, &applied["fieldsV1"]);
        for name in ["apiVersion", "kind"] {
            reduced[name] = object[name].clone();
        }
        reduced["metadata"]["name"] = object["metadata"]["name"].clone();
        text += &format!("---\n{}", serde_yaml::to_string(&reduced)?);
    }
    write("objects.yaml", text)?;
    Ok(())
}

/// The part of `value` that `fields` lists, in the format of `managedFields`.
fn applied_fields(value: &Value, fields: &Value) -> Value {
    let listed = fields.as_object().cloned().unwrap_or_default();
    if listed.keys().all(|name| name == ".") {
        return value.clone();
    }
    match value {
        Value::Object(value) => {
            let part = |(name, fields): (&String, &Value)| {
                let name = name.strip_prefix("f:")?;
                Some((name.to_owned(), applied_fields(value.get(name)?, fields)))
            };
            Value::Object(listed.iter().filter_map(part).collect::<Map<_, _>>())
        }
        Value::Array(items) => {
            let part = |item: &Value| {
                listed.iter().find_map(|(key, fields)| {
                    let key: Value = serde_json::from_str(key.strip_prefix("k:")?).ok()?;
                    let is_it = key.as_object()?.iter().all(|(name, value)| item.get(name) == Some(value));
                    is_it.then(|| applied_fields(item, fields))
                })
            };
            Value::Array(items.iter().filter_map(part).collect())
        }
        other => other.clone(),
    }
}

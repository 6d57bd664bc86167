//! Tests cluster policies and missing prerequisites on the node that `make e2e` starts: missing Secrets, quotas, Pod
//! Security, private images, and pinned processors.

use std::collections::BTreeSet;

use anyhow::Context as _;
use tests::hub::Hub;
use tests::node::{self, LIMIT, Namespace, Release, await_condition, kubectl};
use tests::registry::Registry;

async fn hub(token: Option<&str>) -> anyhow::Result<Hub> {
    Hub::start_with_token(node::ADDRESS, "owner/model", &[&tests::sample_model()], token).await
}

/// The `spec.model` of a manifest with the repository of `hub`; `more` is appended to the model.
fn from_hub(hub: &Hub, more: &str) -> String {
    format!("{{source: {{hf: {{endpoint: '{}', repo: owner/model}}}}{more}}}", hub.url())
}

/// The manifest of a resource with `model` and `limits`; `more` is added to its spec.
fn manifest(name: &str, model: &str, limits: &str, more: &str) -> String {
    format!(
        "
apiVersion: ovfleet.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: {name}}}
spec:
  model: {model}
  engine: {{kvCache: {{size: 128Mi}}}}
  resources: {{limits: {{{limits}}}}}
  router: {{replicas: 1}}
{more}
"
    )
}

const MEMORY: &str = "memory: 1Gi";

fn secret(namespace: &str, name: &str, entry: &str) -> anyhow::Result<()> {
    let entry = format!("--from-literal={entry}");
    kubectl(&["create", "secret", "generic", name, "--namespace", namespace, &entry]).map(drop)
}

/// The messages of the events with `reason` that concern a resource.
fn events(namespace: &str, name: &str, reason: &str) -> anyhow::Result<Vec<String>> {
    let selector = format!("involvedObject.kind=LLMDeployment,involvedObject.name={name},reason={reason}");
    let events = node::get(&["events", "--namespace", namespace, "--field-selector", &selector])?;
    let events = events["items"].as_array().into_iter().flatten();
    Ok(events.filter_map(|event| event["message"].as_str().map(str::to_owned)).collect())
}

fn await_event(namespace: &str, name: &str, reason: &str, words: &str) -> anyhow::Result<()> {
    let what = format!("an event with the reason {reason} and a message that contains {words}");
    node::await_state(&what, LIMIT, || {
        let notes = events(namespace, name, reason)?;
        anyhow::ensure!(notes.iter().any(|note| note.contains(words)), "{notes:#?}");
        Ok(Some(()))
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_secret_is_reported_and_creating_it_is_sufficient() -> anyhow::Result<()> {
    let hub = hub(Some("hf_token")).await?;
    let _release = Release::install("helm4", &[])?;
    let namespace = Namespace::new("secrets")?;
    let name = namespace.name.as_str();
    let model = from_hub(&hub, ", credentialsSecretRef: {name: hub-token}");
    node::apply(name, &manifest("chat", &model, MEMORY, "  access: {apiKeysSecretRef: {name: api-keys}}"))?;

    let message = await_condition(name, "chat", "ReplicasReady", "False", "FailedMount")?;
    assert!(message.contains("secret \"hub-token\" not found"), "{message}");
    let message = await_condition(name, "chat", "RouterReady", "False", "FailedMount")?;
    assert!(message.contains("secret \"api-keys\" not found"), "{message}");
    await_condition(name, "chat", "Degraded", "True", "FailedMount")?;
    await_event(name, "chat", "FailedMount", "\"hub-token\"")?;
    await_event(name, "chat", "FailedMount", "\"api-keys\"")?;

    secret(name, "hub-token", "token=hf_token")?;
    secret(name, "api-keys", "keys=sk-1 somebody")?;
    await_condition(name, "chat", "Ready", "True", "Serving")?;
    await_condition(name, "chat", "Degraded", "False", "AsExpected")?;
    Ok(())
}

/// Sets the Pod Security level that the namespace enforces.
fn enforce(namespace: &str, level: &str) -> anyhow::Result<()> {
    let label = format!("pod-security.kubernetes.io/enforce={level}");
    kubectl(&["label", "namespace", namespace, "--overwrite", &label]).map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_denied_by_pod_security_or_a_quota_are_reported_with_the_reason() -> anyhow::Result<()> {
    let hub = hub(None).await?;
    let _release = Release::install("helm4", &[])?;
    let namespace = Namespace::new("denied")?;
    let name = namespace.name.as_str();
    let model = from_hub(&hub, "");
    for (level, spec, field) in [
        ("baseline", "{hostNetwork: true}", "hostNetwork=true"),
        ("restricted", "{securityContext: {runAsNonRoot: false}}", "runAsNonRoot=false"),
    ] {
        enforce(name, level)?;
        let overlay = format!("  podTemplate: {{spec: {spec}}}");
        node::apply(name, &manifest(level, &model, MEMORY, &overlay))?;
        let message = await_condition(name, level, "ReplicasReady", "False", "FailedCreate")?;
        let violation = format!("pods cannot be created: violates PodSecurity \"{level}:latest\"");
        assert!(message.starts_with(&violation) && message.contains(field), "{message}");
        await_condition(name, level, "Degraded", "True", "FailedCreate")?;
        await_event(name, level, "FailedCreate", field)?;
        if level == "baseline" {
            kubectl(&["delete", "llmd", level, "--namespace", name, "--timeout=60s"])?;
        }
    }
    node::apply(name, &manifest("restricted", &model, MEMORY, ""))?;
    await_condition(name, "restricted", "Ready", "True", "Serving")?;
    await_condition(name, "restricted", "Degraded", "False", "AsExpected")?;
    kubectl(&["delete", "llmd", "restricted", "--namespace", name, "--timeout=60s"])?;

    node::shared_volume("denied")?;
    kubectl(&["create", "quota", "none", "--namespace", name, "--hard=pods=0"])?;
    let shared = ", cache: {mode: shared, size: 1Gi, storageClass: here, accessMode: ReadWriteOnce}";
    node::apply(name, &manifest("shared", &from_hub(&hub, shared), MEMORY, ""))?;
    for condition in ["ModelAvailable", "RouterReady"] {
        let message = await_condition(name, "shared", condition, "False", "FailedCreate")?;
        assert!(message.starts_with("pods cannot be created: exceeded quota: none"), "{message}");
    }
    await_condition(name, "shared", "Degraded", "True", "FailedCreate")?;
    kubectl(&["delete", "quota", "none", "--namespace", name])?;
    await_condition(name, "shared", "Ready", "True", "Serving")?;
    await_condition(name, "shared", "Degraded", "False", "AsExpected")?;
    kubectl(&["delete", "llmd", "shared", "--namespace", name, "--timeout=60s"])?;
    kubectl(&["delete", "pv", "denied", "--wait=false"])?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_in_a_private_image_is_served_once_the_secret_to_pull_it_exists() -> anyhow::Result<()> {
    // `bWU6c2VjcmV0` is `me:secret` in base64.
    let registry =
        Registry::start("127.0.0.1", "models/smollm2", &tests::sample_model(), Some("Basic bWU6c2VjcmV0"))
            .await?;
    let _release = Release::install("helm4", &[])?;
    let namespace = Namespace::new("images")?;
    let name = namespace.name.as_str();
    let file = tests::sample_model();
    let file = file.file_name().context("the model has no file name")?.to_string_lossy();
    let model = format!("{{source: {{oci: {{image: '{}', path: {file}}}}}}}", registry.image());
    let secrets = "  security: {imagePullSecrets: [{name: registry}]}";
    node::apply(name, &manifest("chat", &model, MEMORY, secrets))?;

    let message = await_condition(name, "chat", "ReplicasReady", "False", "ImagePullBackOff")?;
    let named = format!("the image {} of the volume \"model\"", registry.image());
    assert!(message.starts_with(&named) && message.contains("the Secret \"registry\""), "{message}");
    await_condition(name, "chat", "Degraded", "True", "ImagePullBackOff")?;
    await_event(name, "chat", "ImagePullBackOff", "the Secret \"registry\"")?;

    let server = format!("--docker-server={}", registry.host());
    let account = ["--docker-username=me", "--docker-password=secret", &server];
    kubectl(
        &[&["create", "secret", "docker-registry", "registry", "--namespace", name], &account[..]].concat(),
    )?;
    await_condition(name, "chat", "Ready", "True", "Serving")?;
    await_condition(name, "chat", "ModelAvailable", "True", "Mounted")?;
    Ok(())
}

/// The distinct lists of processors on which the threads of a process may run, in the format of the kernel.
fn processors(process: u32) -> anyhow::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for thread in std::fs::read_dir(format!("/proc/{process}/task"))?.flatten() {
        // A thread may end in the meantime.
        let status = std::fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        found.extend(list.map(|list| list.trim().to_owned()));
    }
    Ok(found)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pinned_replica_has_a_processor_to_itself() -> anyhow::Result<()> {
    let hub = hub(None).await?;
    let _release = Release::install("helm4", &[])?;
    let namespace = Namespace::new("pinned")?;
    let name = namespace.name.as_str();
    let limits = "cpu: '1', memory: 1Gi";
    node::apply(name, &manifest("chat", &from_hub(&hub, ""), limits, "  placement: {cpuPinning: true}"))?;
    await_condition(name, "chat", "Ready", "True", "Serving")?;
    let pod = |component: &str| -> anyhow::Result<String> {
        let selector = format!("app.kubernetes.io/instance=chat,app.kubernetes.io/component={component}");
        node::pods(name, &selector)?.pop().context("no pod")
    };
    let (server, router) = (pod("server")?, pod("router")?);
    let class = node::get(&["pod", &server, "--namespace", name])?["status"]["qosClass"].clone();
    assert_eq!(class, "Guaranteed");

    let process = node::processes(name, &server, "ovfleet-server")?.pop().context("no server")?;
    let own = processors(process)?;
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    let [own] = own[..] else {
        anyhow::bail!("the threads of the server may run on different processors: {own:?}")
    };
    own.parse::<u32>()
        .with_context(|| format!("the server may run on processors {own} instead of on only one"))?;
    // The kubelet moves other pods to the remaining processors within a second.
    let router = node::processes(name, &router, "ovfleet-router")?.pop().context("no router")?;
    node::await_state("the router to run elsewhere", LIMIT, || {
        let others = processors(router)?;
        anyhow::ensure!(
            !others.iter().any(|list| list.split(['-', ',']).any(|end| end == own)),
            "{others:?}"
        );
        Ok(Some(()))
    })?;
    Ok(())
}

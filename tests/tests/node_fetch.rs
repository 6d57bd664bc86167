//! Models that come from elsewhere, on real nodes: credentials out of Secrets, a disk that is full, and a volume of all
//! replicas that keeps what is used. On the node that `make e2e` starts.

use std::collections::BTreeMap;
use std::time::Duration;

use tests::node::{self, Namespace, Release, kubectl};
use tests::s3::{Keys, S3};

const LIMIT: Duration = Duration::from_secs(120);
const NAMESPACE: &str = "fetching";

/// A service with the sample model under three names.
async fn s3() -> anyhow::Result<S3> {
    let model = std::fs::read(tests::sample_model())?;
    let objects: BTreeMap<_, _> =
        ["a", "b", "c"].map(|name| (format!("{name}/model.gguf"), model.clone())).into_iter().collect();
    let keys = Keys { access: "AKIATEST".to_owned(), secret: "right".to_owned(), token: None };
    S3::start(node::ADDRESS, ("models", "us-east-1"), keys, objects).await
}

fn secret(name: &str, key: &str) -> anyhow::Result<()> {
    let key = format!("--from-literal=secretAccessKey={key}");
    kubectl(&[
        "create",
        "secret",
        "generic",
        name,
        "--namespace",
        NAMESPACE,
        "--from-literal=accessKeyId=AKIATEST",
        &key,
    ])
    .map(drop)
}

/// A resource, the object's folder and the Secret of which are to be filled in, with `more` in its spec.
fn manifest(name: &str, s3: &S3, (folder, secret): (&str, &str), more: &str) -> String {
    format!(
        "
apiVersion: ovfleet.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: {name}, namespace: {NAMESPACE}}}
spec:
  model:
    source: {{s3: {{bucket: models, key: {folder}/model.gguf, endpoint: '{}'}}}}
    credentialsSecretRef: {{name: {secret}}}
{more}
  engine: {{kvCache: {{size: 256Mi}}}}
  resources: {{limits: {{memory: 1536Mi}}}}
  router: {{replicas: 1}}
",
        s3.url()
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_are_tried_and_a_full_disk_is_told() -> anyhow::Result<()> {
    let s3 = s3().await?;
    let _release = Release::install("helm4", &[])?;
    let _namespace = Namespace::new(NAMESPACE)?;
    secret("wrong", "guess")?;
    secret("right", "right")?;
    node::apply(NAMESPACE, &manifest("chat", &s3, ("a", "wrong"), ""))?;
    let message = node::await_condition(NAMESPACE, "chat", ("ModelAvailable", "False", "Unauthorized"))?;
    assert!(message.contains("refuses these credentials") && !message.contains("guess"), "{message}");
    node::apply(NAMESPACE, &manifest("chat", &s3, ("a", "right"), ""))?;
    node::await_condition(NAMESPACE, "chat", ("Ready", "True", "Serving"))?;

    let small =
        "  podTemplate: {spec: {volumes: [{name: model, emptyDir: {medium: Memory, sizeLimit: 20Mi}}]}}";
    node::apply(NAMESPACE, &manifest("small", &s3, ("a", "right"), small))?;
    let message = node::await_condition(NAMESPACE, "small", ("ModelAvailable", "False", "DiskFull"))?;
    assert!(message.contains("no room for /model/"), "{message}");
    node::await_condition(NAMESPACE, "small", ("Degraded", "True", "DiskFull"))?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shared_volume_keeps_the_model_that_is_served_and_the_one_before() -> anyhow::Result<()> {
    let s3 = s3().await?;
    let _release = Release::install("helm4", &[])?;
    let _namespace = Namespace::new(NAMESPACE)?;
    secret("right", "right")?;
    let folder = node::shared_volume("models")?;
    let shared = "    cache: {mode: shared, size: 1Gi, storageClass: here, accessMode: ReadWriteOnce}";
    let mut kept: Vec<Vec<String>> = Vec::new();
    for source in ["a", "b", "c", "b"] {
        node::apply(NAMESPACE, &manifest("chat", &s3, (source, "right"), shared))?;
        node::await_condition(NAMESPACE, "chat", ("Progressing", "False", "Done"))?;
        node::await_condition(NAMESPACE, "chat", ("Ready", "True", "Serving"))?;
        // What is leaving still uses what it has loaded, and the next fetch would let it be.
        node::await_state("the former replica to be gone", LIMIT, || {
            let resource = node::get(&["llmd", "chat", "--namespace", NAMESPACE])?;
            Ok((resource["status"]["drainingReplicas"] == 0).then_some(()))
        })?;
        let entries = folder.read_dir()?.flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        kept.push(names);
    }
    kubectl(&["delete", "llmd", "chat", "--namespace", NAMESPACE, "--timeout=60s"])?;
    kubectl(&["delete", "pv", "models", "--wait=false"])?;
    let counts: Vec<usize> = kept.iter().map(Vec::len).collect();
    assert_eq!(counts, [1, 2, 2, 2], "{kept:?}");
    assert!(!kept[2].contains(&kept[0][0]), "the first is gone: {kept:?}");
    assert_eq!(kept[2], kept[3], "what was served before was still there: {kept:?}");
    Ok(())
}

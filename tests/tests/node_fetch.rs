//! Tests fetching models on the node that `make e2e` starts: credentials from Secrets, a full disk, and a shared volume
//! that retains the models in use.

use std::collections::BTreeMap;

use tests::node::{self, LIMIT, Namespace, Release, kubectl};
use tests::s3::{Bucket, Credentials, S3};

const NAMESPACE: &str = "fetching";

/// A mock S3 service with the sample model in three directories.
async fn s3() -> anyhow::Result<S3> {
    let model = std::fs::read(tests::sample_model())?;
    let objects: BTreeMap<_, _> =
        ["a", "b", "c"].map(|name| (format!("{name}/model.gguf"), model.clone())).into_iter().collect();
    let credentials = Credentials {
        access_key_id: "AKIATEST".to_owned(),
        secret_access_key: "right".to_owned(),
        session_token: None,
    };
    let bucket = Bucket { name: "models".to_owned(), region: "us-east-1".to_owned(), credentials, objects };
    S3::start(node::ADDRESS, bucket).await
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

/// The manifest of a resource with the model in `directory` and the credentials in `secret`; `more` follows the fields
/// of `spec.model`, and adds fields to `spec.model` or to `spec`.
fn manifest(name: &str, s3: &S3, directory: &str, secret: &str, more: &str) -> String {
    format!(
        "
apiVersion: ovfleet.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: {name}, namespace: {NAMESPACE}}}
spec:
  model:
    source: {{s3: {{bucket: models, key: {directory}/model.gguf, endpoint: '{}'}}}}
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
async fn wrong_credentials_and_a_full_disk_are_reported() -> anyhow::Result<()> {
    let s3 = s3().await?;
    let _release = Release::install("helm4", &[])?;
    let _namespace = Namespace::new(NAMESPACE)?;
    secret("wrong", "guess")?;
    secret("right", "right")?;
    node::apply(NAMESPACE, &manifest("chat", &s3, "a", "wrong", ""))?;
    let message = node::await_condition(NAMESPACE, "chat", "ModelAvailable", "False", "Unauthorized")?;
    assert!(message.contains("rejects these credentials") && !message.contains("guess"), "{message}");
    node::apply(NAMESPACE, &manifest("chat", &s3, "a", "right", ""))?;
    node::await_condition(NAMESPACE, "chat", "Ready", "True", "Serving")?;

    let small =
        "  podTemplate: {spec: {volumes: [{name: model, emptyDir: {medium: Memory, sizeLimit: 20Mi}}]}}";
    node::apply(NAMESPACE, &manifest("small", &s3, "a", "right", small))?;
    let message = node::await_condition(NAMESPACE, "small", "ModelAvailable", "False", "DiskFull")?;
    assert!(
        message.contains("/model/") && message.contains("does not fit into its file system"),
        "{message}"
    );
    node::await_condition(NAMESPACE, "small", "Degraded", "True", "DiskFull")?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shared_volume_retains_the_current_and_the_previous_model() -> anyhow::Result<()> {
    let s3 = s3().await?;
    let _release = Release::install("helm4", &[])?;
    let _namespace = Namespace::new(NAMESPACE)?;
    secret("right", "right")?;
    let directory = node::shared_volume("models")?;
    let shared = "    cache: {mode: shared, size: 1Gi, storageClass: here, accessMode: ReadWriteOnce}";
    let mut stored: Vec<Vec<String>> = Vec::new();
    for source in ["a", "b", "c", "b"] {
        node::apply(NAMESPACE, &manifest("chat", &s3, source, "right", shared))?;
        node::await_condition(NAMESPACE, "chat", "Progressing", "False", "Done")?;
        node::await_condition(NAMESPACE, "chat", "Ready", "True", "Serving")?;
        // A replica that is shutting down still uses its model, so the next fetch would retain it.
        node::await_state("the previous replica to end", LIMIT, || {
            let resource = node::get(&["llmd", "chat", "--namespace", NAMESPACE])?;
            Ok((resource["status"]["drainingReplicas"] == 0).then_some(()))
        })?;
        let entries = directory.read_dir()?.flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        stored.push(names);
    }
    kubectl(&["delete", "llmd", "chat", "--namespace", NAMESPACE, "--timeout=60s"])?;
    kubectl(&["delete", "pv", "models", "--wait=false"])?;
    let counts: Vec<usize> = stored.iter().map(Vec::len).collect();
    assert_eq!(counts, [1, 2, 2, 2], "{stored:?}");
    assert!(!stored[2].contains(&stored[0][0]), "the first model still exists: {stored:?}");
    assert_eq!(stored[2], stored[3], "the previous model was fetched again: {stored:?}");
    Ok(())
}

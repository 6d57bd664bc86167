//! Tests a vision-language model as an LLMDeployment on the node that `make e2e` starts: the server with OpenVINO
//! answers questions about images through the router, reads them from the prefix cache, and fetches those that the
//! resource allows.

use std::path::Path;

use anyhow::Context as _;
use serde_json::{Value, json};
use tests::clients::{self, Client};
use tests::http::{self, metric};
use tests::hub::Hub;
use tests::node::{self, Namespace, Release};
use tests::picture::{bitmap, chat, question};
use tests::scene::{self, SERVER};
use tests::vision_model::{self, IMAGE_TOKENS};

const NAMESPACE: &str = "vision";
const IMAGE: &str = "image.bmp";

/// The manifest of a resource whose model is on `models`, and whose replica may fetch images from the mock Hub
/// `images`.
fn manifest(models: &Hub, images: &Hub) -> String {
    let host = images.url().replace("http://", "");
    format!(
        "
apiVersion: ovfleet.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: chat, namespace: {NAMESPACE}}}
spec:
  model: {{source: {{hf: {{endpoint: '{}', repo: owner/vision}}}}}}
  engine:
    kvCache: {{size: 64Mi}}
    media: {{allowedDomains: ['{host}'], allowedNetworks: ['{}/32']}}
  resources: {{limits: {{memory: 1Gi}}}}
  router: {{replicas: 1}}
",
        models.url(),
        node::ADDRESS
    )
}

/// Starts a web server with an image, and returns it with the URL of the image.
async fn web_server(directory: &Path, seed: u8) -> anyhow::Result<(Hub, String)> {
    let path = directory.join(IMAGE);
    std::fs::write(&path, bitmap(100, seed))?;
    let hub = Hub::start(node::ADDRESS, "owner/images", &[&path]).await?;
    let url = format!("{}/owner/images/resolve/main/{IMAGE}", hub.url());
    Ok((hub, url))
}

/// The number of images that the replica has encoded.
async fn encoded_images() -> anyhow::Result<f64> {
    let addresses = node::addresses(NAMESPACE, SERVER)?;
    let [address] = &addresses[..] else { anyhow::bail!("expected one replica, not {addresses:?}") };
    let metrics = http::get(&format!("http://{address}:8081/metrics")).await?.body;
    metric(metrics.as_str().unwrap_or_default(), "ovfleet_server_encoded_images_total").context("no metric")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vision_language_model_answers_about_images_through_the_router() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let files = vision_model::write(directory.path())?;
    let files: Vec<&Path> = files.iter().map(AsRef::as_ref).collect();
    let models = Hub::start(node::ADDRESS, "owner/vision", &files).await?;
    let (images, url) = web_server(directory.path(), 1).await?;
    let (_others, other_url) = web_server(directory.path(), 2).await?;
    let _release = Release::install("helm4", &[])?;
    let _namespace = Namespace::new(NAMESPACE)?;
    node::apply(NAMESPACE, &manifest(&models, &images))?;
    node::await_condition(NAMESPACE, "chat", "Ready", "True", "Serving")?;
    let service = format!("http://{}/v3", scene::service_address(NAMESPACE)?);

    // Send images to the chat completions and responses endpoints, with and without streaming.
    clients::run("images", &[&service], &["chat"]);
    Client::Python.run("langchain_images", &[&service, "chat"]);
    Client::JavaScript.run("ai_sdk_images", &[&service, "chat"]);

    // Ask about an image that the server fetches.
    let endpoint = format!("{service}/chat/completions");
    let ask = async |messages: &[Value]| http::post(&endpoint, &chat("chat", messages)).await;
    let encoded_before = encoded_images().await?;
    let first = question(&url, "What is this, and where was it taken?");
    let answer = ask(std::slice::from_ref(&first)).await?;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.body["usage"]["prompt_tokens_details"]["image_tokens"], IMAGE_TOKENS);
    assert_eq!(encoded_images().await?, encoded_before + 1.0);

    // In the next turn, the tokens of the image are in the prefix cache, so the image is not encoded again.
    let said = json!({"role": "assistant", "content": answer.text()});
    let turns = [first, said, json!({"role": "user", "content": "Sure?"})];
    let next = ask(&turns).await?;
    let details = &next.body["usage"]["prompt_tokens_details"];
    assert!(details["cached_tokens"].as_u64().is_some_and(|cached| cached > IMAGE_TOKENS), "{next:?}");
    let mut stream = chat("chat", &turns);
    stream["stream"] = true.into();
    assert_eq!(http::Stream::open(&endpoint, &stream).await?.text().await?, next.text());
    assert_eq!(encoded_images().await?, encoded_before + 1.0, "the image was encoded again");

    // Another port of the same host is not allowed.
    let refused = ask(&[question(&other_url, "What is this?")]).await?;
    assert_eq!(refused.status, 400, "{refused:?}");
    let error = &refused.body["error"];
    assert_eq!(error["code"], "invalid_image_url", "{refused:?}");
    assert_eq!(error["param"], "messages[0].content[0].image_url", "{refused:?}");
    Ok(())
}

//! Tests images in requests with the official clients, LangChain and the AI SDK, directly and through the router: with
//! a simulated model, whose output depends on the images, and with a tiny model on OpenVINO. `make conformance
//! ARGS="--parts images"` compares the answers of models with those of transformers.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};
use tests::clients::{self, Client};
use tests::http::{self, join_all, metric};
use tests::picture::{bitmap, chat, question};
use tests::router::{Router, replica};
use tests::server::{Server, bare_command, command_for};
use tests::vision_model::{self, IMAGE_TOKENS};

/// The name of the model.
const MODEL: &str = "vision";

/// Runs all scripts that send images, directly and through a router.
fn assert_clients_send_images(server: &Server) {
    let router = Router::start(&[replica(server)]).expect("the router starts");
    let urls = [server.url("/v3"), router.url("/v3")];
    clients::run("images", &[&urls[0], &urls[1]], &[MODEL]);
    let frameworks = [(Client::Python, "langchain_images"), (Client::JavaScript, "ai_sdk_images")];
    let runs = frameworks.iter().flat_map(|run| urls.iter().map(move |url| (run, url)));
    let scripts: Vec<_> = runs.map(|((client, script), url)| client.start(script, &[url, MODEL])).collect();
    scripts.into_iter().for_each(clients::ClientScript::assert_success);
}

#[test]
fn clients_send_images_to_a_simulated_model() {
    let mut command = bare_command().expect("the server is built");
    command.args(["--backend", "sim", "--sim-images", "--model-name", MODEL, "--sim-block-tokens", "4"]);
    command.args([
        "--sim-step-time",
        "0ms",
        "--sim-prefill-token-time",
        "0ms",
        "--sim-decode-token-time",
        "0ms",
    ]);
    command.args(["--host", "127.0.0.1", "--port", "0", "--grpc-port", "0"]);
    assert_clients_send_images(&Server::from_command(&mut command).expect("the server starts"));
}

/// Starts a server that serves the tiny model, and that may read images in `directory`.
fn openvino_server(directory: &Path) -> Server {
    let model = directory.join("model");
    std::fs::create_dir(&model).expect("the directory is writable");
    vision_model::write(&model).expect("the directory is writable");
    let directory = directory.display().to_string();
    let mut command = command_for(
        &model,
        &[
            "--model-name",
            MODEL,
            "--allowed-local-media-path",
            &directory,
            // Reading a large file may take a long time on a busy machine.
            "--image-fetch-timeout",
            "60s",
            "--kv-cache-size",
            "64MiB",
            "--kv-cache-precision",
            "f32",
            "--plugin-config",
            "INFERENCE_PRECISION_HINT=f32",
        ],
    )
    .expect("the server is built");
    Server::from_command(&mut command).expect("the server starts")
}

/// Writes an image to `directory` and returns its URL.
fn image_file(directory: &Path, side: u16, seed: u8) -> String {
    let path = directory.join(format!("{side}-{seed}.bmp"));
    std::fs::write(&path, bitmap(side, seed)).expect("the directory is writable");
    format!("file://{}", path.display())
}

/// Sends chat completion requests concurrently, asserts that all succeed, and returns the responses.
async fn answers(url: &str, requests: &[Vec<Value>]) -> Vec<http::Response> {
    let url = format!("{url}/chat/completions");
    let sent = join_all(requests.iter().map(|messages| {
        let (url, body) = (url.clone(), chat(MODEL, messages));
        async move { http::post(&url, &body).await.expect("the server responds") }
    }));
    let answers = sent.await;
    answers.iter().for_each(|answer| assert_eq!(answer.status, 200, "{answer:?}"));
    answers
}

async fn encoded_images(server: &Server) -> f64 {
    let metrics = http::get(&server.url("/metrics")).await.expect("the server responds").body;
    metric(metrics.as_str().unwrap_or_default(), "ovfleet_server_encoded_images_total").expect("a metric")
}

#[test]
fn clients_send_images_to_a_model_on_openvino() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    assert_clients_send_images(&openvino_server(directory.path()));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_turn_about_an_image_reads_it_from_the_prefix_cache() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let server = openvino_server(directory.path());
    let router = Router::start(&[replica(&server)]).expect("the router starts");
    let [first_image, other_image] = [1, 2].map(|seed| image_file(directory.path(), 100, seed));
    let ask = async |messages: &[Value]| {
        let [answer] = <[_; 1]>::try_from(answers(&router.url("/v3"), &[messages.to_vec()]).await)
            .expect("one response");
        answer
    };
    let first = question(&first_image, "What is this, and where was it taken?");
    let answer = ask(std::slice::from_ref(&first)).await;
    assert_eq!(encoded_images(&server).await, 1.0);
    let turns = [
        first,
        json!({"role": "assistant", "content": answer.text()}),
        json!({"role": "user", "content": "Sure?"}),
    ];
    let usage = &ask(&turns).await.body["usage"]["prompt_tokens_details"];
    assert_eq!(usage["image_tokens"], IMAGE_TOKENS);
    assert!(usage["cached_tokens"].as_u64().is_some_and(|cached| cached > IMAGE_TOKENS), "{usage}");
    assert_eq!(encoded_images(&server).await, 1.0, "the image was encoded again");
    let other = ask(&[question(&other_image, "What is this, and where was it taken?")]).await;
    assert_ne!(other.text(), answer.text());
    assert_eq!(other.body["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "{other:?}");
    assert_eq!(encoded_images(&server).await, 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_to_texts_do_not_depend_on_large_images_beside_them() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let server = openvino_server(directory.path());
    let texts: Vec<Vec<Value>> = (0..8)
        .map(|number| vec![json!({"role": "user", "content": format!("Tell me about the number {number}.")})])
        .collect();
    let alone = answers(&server.url("/v3"), &texts).await;
    let images =
        (0..4).map(|seed| vec![question(&image_file(directory.path(), 2500, seed), "What is this?")]);
    let mixed: Vec<Vec<Value>> = images.chain(texts.clone()).collect();
    let beside = answers(&server.url("/v3"), &mixed).await;
    let text_of = |answers: &[http::Response]| -> Vec<String> {
        answers.iter().map(|answer| answer.text().to_owned()).collect()
    };
    assert_eq!(text_of(&beside[4..]), text_of(&alone));
    // A model that ignores its prompt would also pass the comparison above, so check that the answers differ.
    for answers in [&beside[..4], &alone[..]] {
        let distinct: BTreeSet<String> = text_of(answers).into_iter().collect();
        assert!(distinct.len() > 1, "{distinct:?}");
    }
    assert_eq!(encoded_images(&server).await, 4.0);
}

//! Tests images in requests with the official clients, LangChain and the AI SDK, and a simulated model, whose output
//! depends on the images, directly and through the router. `make conformance ARGS="--parts images"` compares the models.

use tests::clients::{self, Client};
use tests::router::{Router, replica};
use tests::server::{Server, bare_command};

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

//! Tests images in requests with the official clients and a simulated model, whose output depends on the images,
//! directly and through the router. `make conformance ARGS="--parts images"` compares the models.

use tests::clients;
use tests::router::{Router, replica};
use tests::server::{Server, bare_command};

#[test]
fn the_official_clients_send_images() {
    let mut command = bare_command().expect("the server is built");
    command.args(["--backend", "sim", "--sim-images", "--model-name", "vision", "--sim-block-tokens", "4"]);
    command.args([
        "--sim-step-time",
        "0ms",
        "--sim-prefill-token-time",
        "0ms",
        "--sim-decode-token-time",
        "0ms",
    ]);
    command.args(["--host", "127.0.0.1", "--port", "0", "--grpc-port", "0"]);
    let server = Server::from_command(&mut command).expect("the server starts");
    let router = Router::start(&[replica(&server)]).expect("the router starts");
    clients::run("images", &[&server.url("/v3"), &router.url("/v3")], &["vision"]);
}

//! Parameters with the official clients over the real model, directly and through the router.

use std::process::Command;
use std::time::Duration;

use tests::process::Process;
use tests::router::{Router, replica};
use tests::server::Server;

const CLIENT_LIMIT: Duration = Duration::from_secs(300);

fn run(url: &str, model: &str) {
    let python = tests::root().join(".deps/venv-clients/bin/python");
    assert!(python.exists(), "the Python client is not installed: run `scripts/clients`");
    let mut python = Command::new(python);
    python.arg("-B").arg(tests::root().join("tests/clients/python/parameters.py"));
    let mut javascript = Command::new("node");
    javascript.arg(tests::root().join("tests/clients/js/parameters.js"));
    for mut command in [python, javascript] {
        let client = Process::start(command.args([url, model])).expect("the client starts");
        let ended = client.wait(CLIENT_LIMIT).expect("the client ends");
        assert!(ended.status.success() && ended.output.contains("scenarios passed"), "{}", ended.output);
    }
}

async fn model(server: &Server) -> String {
    let models = tests::http::get(&server.url("/v1/models")).await.expect("the models are listed");
    models.body["data"][0]["id"].as_str().expect("a model has an id").to_owned()
}

#[tokio::test]
async fn the_official_clients_use_them() {
    let server = Server::shared();
    run(&server.url("/v3"), &model(&server).await);
}

#[tokio::test]
async fn the_official_clients_use_them_through_the_router() {
    let server = Server::shared();
    let router = Router::start(&[replica(&server)]).expect("the router starts");
    run(&router.url("/v3"), &model(&server).await);
}

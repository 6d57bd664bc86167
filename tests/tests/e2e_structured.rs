//! Structured output with the official clients and the real model, which is held to what they ask for: directly and
//! through the router.

use std::process::Command;
use std::time::Duration;

use tests::process::Process;
use tests::router::{Router, replica};
use tests::server::{EXACT, Server};

const CLIENT_LIMIT: Duration = Duration::from_secs(300);

fn clients() -> [Command; 2] {
    let python = tests::root().join(".deps/venv-clients/bin/python");
    assert!(python.exists(), "the Python client is not installed: run `scripts/clients`");
    let mut python = Command::new(python);
    python.arg("-B").arg(tests::root().join("tests/clients/python/structured.py"));
    let mut javascript = Command::new("node");
    javascript.arg(tests::root().join("tests/clients/js/structured.js"));
    [python, javascript]
}

fn run(url: &str) {
    for mut command in clients() {
        let client = Process::start(command.args([url, "smollm2"])).expect("the client starts");
        let ended = client.wait(CLIENT_LIMIT).expect("the client ends");
        assert!(ended.status.success() && ended.output.contains("scenarios passed"), "{}", ended.output);
    }
}

#[test]
fn the_official_clients_get_what_their_models_ask_for_directly_and_through_the_router() {
    let server =
        Server::start(&[&EXACT[..], &["--model-name", "smollm2"]].concat()).expect("the server starts");
    run(&server.url("/v3"));
    let router = Router::start(&[replica(&server)]).expect("the router starts");
    run(&router.url("/v3"));
}

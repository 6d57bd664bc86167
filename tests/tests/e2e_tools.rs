//! Tools with the official clients: loops of three turns with a simulated model that says what is wanted, and with the
//! real one that is held to calls; directly and through the router.

use std::process::Command;
use std::time::Duration;

use tests::process::Process;
use tests::router::{Router, replica};
use tests::server::{EXACT, Server, bare_command};

const CLIENT_LIMIT: Duration = Duration::from_secs(300);

/// What the simulated model says in its three turns; the clients' scripts know it.
const ANSWERS: [&str; 3] = [
    "<think>\nLet me see.\n</think>\nI will look.\n<tool_call>\n\
     {\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 1}}\n</tool_call>",
    "<think>\nLet me see.\n</think>\n<tool_call>\n\
     {\"name\": \"get_weather\", \"arguments\": {\"city\": \"London\", \"days\": 1}}\n</tool_call>\n<tool_call>\n\
     {\"name\": \"compare\", \"arguments\": {\"one\": 21, \"other\": -4}}\n</tool_call>",
    "<think>\nLet me see.\n</think>\nParis is warmer.",
];

fn scripted() -> Server {
    let mut command = bare_command().expect("the server is there");
    command.args(["--backend", "sim", "--model-name", "scripted", "--reasoning-parser", "qwen3"]);
    command.args([
        "--sim-step-time",
        "0ms",
        "--sim-prefill-token-time",
        "0ms",
        "--sim-decode-row-time",
        "0ms",
    ]);
    command.args(["--host", "127.0.0.1", "--port", "0", "--grpc-port", "0"]);
    command.args(ANSWERS.iter().flat_map(|answer| ["--sim-answer", answer]));
    Server::from_command(&mut command).expect("the server starts")
}

fn clients() -> [Command; 2] {
    let python = tests::root().join(".deps/venv-clients/bin/python");
    assert!(python.exists(), "the Python client is not installed: run `scripts/clients`");
    let mut python = Command::new(python);
    python.arg("-B").arg(tests::root().join("tests/clients/python/tools.py"));
    let mut javascript = Command::new("node");
    javascript.arg(tests::root().join("tests/clients/js/tools.js"));
    [python, javascript]
}

fn run(url: &str, model: &str, kind: &str) {
    for mut command in clients() {
        let client = Process::start(command.args([url, model, kind])).expect("the client starts");
        let ended = client.wait(CLIENT_LIMIT).expect("the client ends");
        assert!(ended.status.success() && ended.output.contains("scenarios passed"), "{}", ended.output);
    }
}

#[test]
fn the_official_clients_loop_with_tools() {
    let server = scripted();
    run(&server.url("/v3"), "scripted", "scripted");
}

#[test]
fn the_official_clients_loop_with_tools_through_the_router() {
    let servers = [scripted(), scripted()];
    let router = Router::start(&servers.each_ref().map(replica)).expect("the router starts");
    run(&router.url("/v3"), "scripted", "scripted");
}

#[test]
fn the_real_model_calls_what_it_must() {
    let server =
        Server::start(&[&EXACT[..], &["--model-name", "smollm2"]].concat()).expect("the server starts");
    run(&server.url("/v3"), "smollm2", "required");
}

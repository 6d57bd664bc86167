//! The responses endpoint with the official clients: loops with tools by the server's memory, by the client's and in a
//! conversation, the background, forms; with a simulated model that says what is wanted and with the real one, directly
//! and through the router.

use std::process::Command;
use std::time::Duration;

use serde_json::json;
use tests::http;
use tests::process::Process;
use tests::router::{Router, replica};
use tests::server::{EXACT, Server, bare_command};

const CLIENT_LIMIT: Duration = Duration::from_secs(300);

/// What the simulated model says in its three turns; the clients' scripts know it.
const ANSWERS: [&str; 3] = [
    "<think>\nLet me see.\n</think>\n<tool_call>\n\
     {\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 1}}\n</tool_call>",
    "<think>\nLet me see.\n</think>\n<tool_call>\n\
     {\"name\": \"get_weather\", \"arguments\": {\"city\": \"London\", \"days\": 1}}\n</tool_call>\n<tool_call>\n\
     {\"name\": \"compare\", \"arguments\": {\"one\": 21, \"other\": -4}}\n</tool_call>",
    "<think>\nLet me see.\n</think>\nParis is warmer.",
];

fn scripted(arguments: &[&str]) -> Server {
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
    command.args(["--host", "127.0.0.1", "--port", "0", "--grpc-port", "0"]).args(arguments);
    command.args(ANSWERS.iter().flat_map(|answer| ["--sim-answer", answer]));
    Server::from_command(&mut command).expect("the server starts")
}

fn run(url: &str, model: &str, kind: &str) {
    let python = tests::root().join(".deps/venv-clients/bin/python");
    assert!(python.exists(), "the Python client is not installed: run `scripts/clients`");
    let mut python = Command::new(python);
    python.arg("-B").arg(tests::root().join("tests/clients/python/responses.py"));
    let mut javascript = Command::new("node");
    javascript.arg(tests::root().join("tests/clients/js/responses.js"));
    for mut command in [python, javascript] {
        let client = Process::start(command.args([url, model, kind])).expect("the client starts");
        let ended = client.wait(CLIENT_LIMIT).expect("the client ends");
        assert!(ended.status.success() && ended.output.contains("scenarios passed"), "{}", ended.output);
    }
}

#[test]
fn the_official_clients_work() {
    let server = scripted(&[]);
    run(&server.url("/v3"), "scripted", "scripted");
}

#[test]
fn the_official_clients_work_through_the_router() {
    let servers = [scripted(&[]), scripted(&[])];
    let mut arguments: Vec<String> = servers.each_ref().map(replica).into();
    // So that what finds its way back does not by chance.
    arguments.push("--policy=round-robin".to_owned());
    let router = Router::start(&arguments).expect("the router starts");
    run(&router.url("/v1"), "scripted", "scripted");
}

#[test]
fn the_real_model_answers_the_official_clients() {
    let server =
        Server::start(&[&EXACT[..], &["--model-name", "smollm2"]].concat()).expect("the server starts");
    run(&server.url("/v3"), "smollm2", "real");
}

#[tokio::test]
async fn what_a_directory_keeps_is_found_through_another_router_after_a_restart_and_else_is_a_404() {
    let folder = tempfile::tempdir().expect("there is room for a directory");
    let stored = format!("--response-store-dir={}", folder.path().display());
    let body = json!({"model": "scripted", "input": "Hi", "max_output_tokens": 4});
    let mut names = Vec::new();
    {
        let servers = [scripted(&[&stored]), scripted(&[])];
        for server in &servers {
            let answer = http::post(&server.url("/v3/responses"), &body).await.expect("an answer");
            names.push(answer.body["id"].as_str().expect("a response has an id").to_owned());
        }
    }
    let servers = [scripted(&[]), scripted(&[&stored])];
    let router = Router::start(&servers.each_ref().map(replica)).expect("the router starts");
    let mut statuses = Vec::new();
    for name in &names {
        let kept = http::get(&router.url(&format!("/v3/responses/{name}"))).await.expect("an answer");
        statuses.push(kept.status);
        let mut next = body.clone();
        next["previous_response_id"] = json!(name);
        statuses.push(http::post(&router.url("/v3/responses"), &next).await.expect("an answer").status);
    }
    assert_eq!(statuses, [200, 200, 404, 404]);
}

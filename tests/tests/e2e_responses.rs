//! Tests the Responses API with the official clients: tool loops with state on the server, on the client and in a
//! conversation, background responses, and structured outputs. The tests use a simulated model with scripted answers
//! and the real model, directly and through the router.

use serde_json::json;
use tests::router::{Router, replica};
use tests::server::Server;
use tests::{clients, http};

/// The answers that the simulated model returns in its three turns, and that the clients' scripts expect.
const ANSWERS: [&str; 3] = [
    "<think>\nLet me see.\n</think>\n<tool_call>\n\
     {\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 1}}\n</tool_call>",
    "<think>\nLet me see.\n</think>\n<tool_call>\n\
     {\"name\": \"get_weather\", \"arguments\": {\"city\": \"London\", \"days\": 1}}\n</tool_call>\n<tool_call>\n\
     {\"name\": \"compare\", \"arguments\": {\"one\": 21, \"other\": -4}}\n</tool_call>",
    "<think>\nLet me see.\n</think>\nParis is warmer.",
];

fn scripted(arguments: &[&str]) -> Server {
    Server::scripted(&ANSWERS, arguments).expect("the server starts")
}

#[test]
fn the_official_clients_work() {
    let server = scripted(&[]);
    clients::run("responses", &[&server.url("/v3")], &["scripted", "scripted"]);
}

#[test]
fn the_official_clients_work_through_the_router() {
    let servers = [scripted(&[]), scripted(&[])];
    let mut arguments: Vec<String> = servers.each_ref().map(replica).into();
    // With this policy, consecutive requests reach the replica that stores a response only if the router derives the
    // replica from the ID of the response.
    arguments.push("--policy=round-robin".to_owned());
    let router = Router::start(&arguments).expect("the router starts");
    clients::run("responses", &[&router.url("/v1")], &["scripted", "scripted"]);
}

#[test]
fn the_real_model_answers_the_official_clients() {
    let server = Server::named().expect("the server starts");
    clients::run("responses", &[&server.url("/v3")], &["smollm2", "real"]);
}

#[tokio::test]
async fn stored_responses_are_found_after_a_restart_only_with_a_directory() {
    let directory = tempfile::tempdir().expect("the directory can be created");
    let stored = format!("--response-store-dir={}", directory.path().display());
    let body = json!({"model": "scripted", "input": "Hi", "max_output_tokens": 4});
    let mut names = Vec::new();
    {
        let servers = [scripted(&[&stored]), scripted(&[])];
        for server in &servers {
            let answer = http::post(&server.url("/v3/responses"), &body).await.expect("the server responds");
            names.push(answer.body["id"].as_str().expect("the response has an ID").to_owned());
        }
    }
    let servers = [scripted(&[]), scripted(&[&stored])];
    let router = Router::start(&servers.each_ref().map(replica)).expect("the router starts");
    let mut statuses = Vec::new();
    for name in &names {
        let kept =
            http::get(&router.url(&format!("/v3/responses/{name}"))).await.expect("the server responds");
        statuses.push(kept.status);
        let mut next = body.clone();
        next["previous_response_id"] = json!(name);
        statuses
            .push(http::post(&router.url("/v3/responses"), &next).await.expect("the server responds").status);
    }
    assert_eq!(statuses, [200, 200, 404, 404]);
}

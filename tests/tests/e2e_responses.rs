//! The responses endpoint with the official clients: loops with tools by the server's memory, by the client's and in a
//! conversation, the background, forms; with a simulated model that says what is wanted and with the real one, directly
//! and through the router.

use serde_json::json;
use tests::router::{Router, replica};
use tests::server::Server;
use tests::{clients, http};

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
    // So that what finds its way back does not by chance.
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

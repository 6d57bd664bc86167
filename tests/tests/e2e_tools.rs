//! Tests tools with the official clients: loops of three turns with a simulated model and scripted answers, and
//! required calls with the real model, directly and through the router.

use tests::clients;
use tests::router::{Router, replica};
use tests::server::Server;

/// The answers that the simulated model returns in its three turns, and that the clients' scripts expect.
const ANSWERS: [&str; 3] = [
    "<think>\nLet me see.\n</think>\nI will look.\n<tool_call>\n\
     {\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 1}}\n</tool_call>",
    "<think>\nLet me see.\n</think>\n<tool_call>\n\
     {\"name\": \"get_weather\", \"arguments\": {\"city\": \"London\", \"days\": 1}}\n</tool_call>\n<tool_call>\n\
     {\"name\": \"compare\", \"arguments\": {\"one\": 21, \"other\": -4}}\n</tool_call>",
    "<think>\nLet me see.\n</think>\nParis is warmer.",
];

fn scripted() -> Server {
    Server::scripted(&ANSWERS, &[]).expect("the server starts")
}

#[test]
fn the_official_clients_loop_with_tools() {
    let server = scripted();
    clients::run("tools", &[&server.url("/v3")], &["scripted", "scripted"]);
}

#[test]
fn the_official_clients_loop_with_tools_through_the_router() {
    let servers = [scripted(), scripted()];
    let router = Router::start(&servers.each_ref().map(replica)).expect("the router starts");
    clients::run("tools", &[&router.url("/v3")], &["scripted", "scripted"]);
}

#[test]
fn the_real_model_calls_a_required_tool() {
    let server = Server::named().expect("the server starts");
    clients::run("tools", &[&server.url("/v3")], &["smollm2", "required"]);
}

//! Structured output with the official clients and the real model, which is held to what they ask for: directly and
//! through the router.

use tests::clients;
use tests::router::{Router, replica};
use tests::server::Server;

#[test]
fn the_official_clients_get_what_their_models_ask_for_directly_and_through_the_router() {
    let server = Server::named().expect("the server starts");
    let router = Router::start(&[replica(&server)]).expect("the router starts");
    clients::run("structured", &[&server.url("/v3"), &router.url("/v3")], &["smollm2"]);
}

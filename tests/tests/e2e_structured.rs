//! Tests structured outputs with the official clients and the real model, directly and through the
//! router.

use tests::clients;
use tests::router::{Router, replica};
use tests::server::Server;

#[test]
fn the_official_clients_get_outputs_that_match_their_models() {
    let server = Server::named().expect("the server starts");
    let router = Router::start(&[replica(&server)]).expect("the router starts");
    clients::run("structured", &[&server.url("/v3"), &router.url("/v3")], &["smollm2"]);
}

//! Tests request parameters with the official clients and the real model, directly and through the
//! router.

use tests::clients;
use tests::router::{Router, replica};
use tests::server::Server;

async fn model(server: &Server) -> String {
    let models = tests::http::get(&server.url("/v1/models")).await.expect("the models are listed");
    models.body["data"][0]["id"].as_str().expect("the model has an ID").to_owned()
}

#[tokio::test]
async fn the_official_clients_can_use_all_parameters_directly_and_through_the_router() {
    let server = Server::shared();
    let router = Router::start(&[replica(&server)]).expect("the router starts");
    clients::run("parameters", &[&server.url("/v3"), &router.url("/v3")], &[&model(&server).await]);
}

//! Tests the real model behind the OpenAI API, with plain HTTP and with the official clients.

use serde_json::{Value, json};
use tests::clients;
use tests::http::{self, Stream};
use tests::router::{Router, replica};
use tests::server::Server;

async fn model(server: &Server) -> String {
    let models = http::get(&server.url("/v1/models")).await.expect("the models are listed");
    models.body["data"][0]["id"].as_str().expect("the model has an ID").to_owned()
}

async fn paris(server: &Server) -> Value {
    json!({
        "model": model(server).await,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    })
}

#[tokio::test]
async fn says_paris_on_both_paths_streaming_and_not() {
    let server = Server::shared();
    let mut body = paris(&server).await;
    for version in ["/v1", "/v3"] {
        let url = server.url(&format!("{version}/chat/completions"));
        body["stream"] = json!(false);
        let whole = http::post(&url, &body).await.unwrap();
        assert_eq!(whole.status, 200, "{}", whole.body);
        assert!(whole.text().contains("Paris"), "{}", whole.body);
        body["stream"] = json!(true);
        assert_eq!(Stream::open(&url, &body).await.unwrap().text().await.unwrap(), whole.text());
    }
}

#[tokio::test]
async fn answers_probes_and_reports_metrics() {
    let server = Server::shared();
    for path in ["/v2/health/live", "/v2/health/ready", "/metrics"] {
        assert_eq!(http::get(&server.url(path)).await.unwrap().status, 200, "{path}");
    }
}

#[tokio::test]
async fn rejects_invalid_input_with_one_clear_message_and_keeps_serving() {
    let server = Server::shared();
    let url = server.url("/v3/chat/completions");
    let good = paris(&server).await;
    let with = |key: &str, value: Value| {
        let mut body = good.clone();
        body[key] = value;
        body.to_string()
    };
    let nested = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let cases = [
        ("malformed JSON", "{\"model\": ".to_owned(), 400),
        ("10,000 nested arrays", format!("{{\"messages\": {nested}}}"), 400),
        ("an array instead of an object", "[]".to_owned(), 400),
        ("an empty body", String::new(), 400),
        ("a wrong type", with("messages", json!("hello")), 400),
        ("a value out of range", with("temperature", json!(-1)), 400),
        ("a number too large", with("max_tokens", json!(1e30)), 400),
        ("no messages", with("messages", json!([])), 400),
        ("an unknown role", with("messages", json!([{"role": "oracle", "content": "x"}])), 400),
        (
            "a prompt too long",
            with("messages", json!([{"role": "user", "content": "word ".repeat(20_000)}])),
            400,
        ),
        ("an unknown model", with("model", json!("no-such-model")), 404),
    ];
    for (what, body, status) in cases {
        let answer = http::post_text(&url, body).await.unwrap();
        assert_eq!(answer.status, status, "{what}: {}", answer.body);
        let message = answer.body["error"]["message"].as_str().unwrap_or_default();
        assert!(message.len() > 10 && !message.contains("panicked"), "{what}: {}", answer.body);
    }
    let ignored = http::post_text(&url, with("no_such_field", json!({"a": [1]}))).await.unwrap();
    assert_eq!(ignored.status, 200, "an unknown field is not ignored: {}", ignored.body);
    let deep = with("no_such_field", json!("here")).replace("\"here\"", &nested);
    let deep = http::post_text(&url, deep).await.unwrap();
    assert!([200, 400].contains(&deep.status), "neither ignored nor rejected: {}", deep.body);
    assert!(!server.process().output().contains("panicked"), "{}", server.process().output());
}

#[tokio::test]
async fn rejects_a_body_that_is_too_large() {
    let server = Server::shared();
    let answer = http::post_text(&server.url("/v3/chat/completions"), " ".repeat(64 << 20)).await.unwrap();
    assert_eq!(answer.status, 413, "{}", answer.body);
    assert_eq!(http::get(&server.url("/v2/health/ready")).await.unwrap().status, 200);
}

#[tokio::test]
async fn the_official_clients_work() {
    let server = Server::shared();
    clients::run("client", &[&server.url("/v3")], &[&model(&server).await]);
}

#[tokio::test]
async fn the_official_clients_work_through_the_router() {
    let servers = [Server::named().unwrap(), Server::named().unwrap()];
    let router = Router::start(&servers.each_ref().map(replica)).unwrap();
    clients::run_in_turns("client", &[&router.url("/v3"), "smollm2"]);
}

//! Tests clients that disconnect.

use http_body_util::BodyExt as _;
use serde_json::json;

use crate::harness::{Answer, GatedRunner, Setup, chat};

const PATH: &str = "/v3/chat/completions";

#[tokio::test]
async fn a_dropped_stream_frees_its_blocks() {
    let (runner, permits) = GatedRunner::new("x");
    let server = Setup::new(runner).start();
    permits.send(()).unwrap();
    let mut response = server.open(PATH, chat(json!({"stream": true, "max_tokens": 400}))).await;
    let first = response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(first.starts_with(b"data: "));
    assert_eq!(server.app.requests(), 1);
    drop(response);
    assert_eq!(server.app.requests(), 0);
    drop(permits);
    server.idle().await;
    let metrics = server.get("/metrics").await.body;
    assert!(
        metrics.contains(r#"requests_total{endpoint="chat_completions",outcome="cancelled",status="2xx"} 1"#)
    );
}

#[tokio::test]
async fn a_request_dropped_before_its_first_token_frees_its_blocks() {
    let (runner, permits) = GatedRunner::new("x");
    let server = Setup::new(runner).start();
    {
        let request = server.open(PATH, chat(json!({"max_tokens": 400})));
        tokio::pin!(request);
        // Poll the request once, so that it waits for its first token, and then drop it.
        assert!(futures_util::poll!(&mut request).is_pending());
        assert_eq!(server.app.requests(), 1);
    }
    assert_eq!(server.app.requests(), 0);
    drop(permits);
    server.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn canceling_half_of_two_hundred_streams_does_not_change_the_others() {
    let mut setup = Setup::new(crate::harness::RepeatingRunner::new(
        "some text that goes on and on, ".bytes().map(u32::from),
    ));
    setup.limits.max_concurrent_requests = 200;
    let server = std::sync::Arc::new(setup.start());
    let body = |client: usize| {
        let content = "y".repeat(1 + client % 40);
        let messages = json!([{"role": "user", "content": content}]);
        chat(json!({"stream": true, "max_tokens": 40 + client % 60, "messages": messages}))
    };
    let mut alone = Vec::new();
    for client in 0..200 {
        alone.push(server.post(PATH, body(client)).await.text());
    }
    let mut clients = tokio::task::JoinSet::new();
    for (client, alone) in alone.into_iter().enumerate() {
        let server = std::sync::Arc::clone(&server);
        clients.spawn(async move {
            let mut response = server.open(PATH, body(client)).await;
            if client % 2 == 0 {
                // Some streams are dropped immediately, and some after a few chunks.
                for _ in 0..client % 7 {
                    response.body_mut().frame().await;
                }
            } else {
                assert_eq!(Answer::read(response).await.text(), alone, "client {client}");
            }
        });
    }
    clients.join_all().await;
    server.idle().await;
    assert_eq!(server.app.requests(), 0);
}

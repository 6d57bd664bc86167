//! Tests many concurrent streaming clients, half of which disconnect during the stream. The server must free the
//! resources of the disconnected clients, and the responses of the others must not change.

use std::time::Duration;

use anyhow::bail;
use serde_json::{Value, json};
use tests::http::{self, Stream, metric};
use tests::server::{EXACT, Server};

const CLIENTS: usize = 200;
const PROMPTS: usize = 16;
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

fn request(model: &Value, client: usize) -> Value {
    let words = ["river", "mountain", "clock", "garden", "violin", "window", "harbour", "winter"];
    json!({
        "model": model,
        "messages": [{
            "role": "user",
            "content": format!("Write a short story about a {} and a {}.", words[client % 8], words[client / 8 % 8]),
        }],
        "temperature": 0,
        "max_tokens": 24,
        "stream": true,
    })
}

/// Reads `events` events and disconnects, or reads the whole stream and returns its text.
async fn client(url: &str, body: &Value, events: Option<u64>) -> anyhow::Result<Option<String>> {
    let mut stream = Stream::open(url, body).await?;
    let Some(events) = events else { return Ok(Some(stream.text().await?)) };
    for _ in 0..events {
        if stream.next().await?.is_none() {
            break;
        }
    }
    Ok(None)
}

async fn metrics(server: &Server) -> String {
    http::get(&server.url("/metrics"))
        .await
        .expect("the server returns metrics")
        .body
        .as_str()
        .expect("metrics are text")
        .to_owned()
}

/// Starts a server with `arguments` and [`CLIENTS`] concurrent clients, half of which disconnect. The others must
/// receive the same responses as a client that sent the same prompts alone.
async fn assert_disconnects_go_unnoticed(arguments: &[&str]) {
    let server = Server::start(arguments).expect("the server starts");
    let url = server.url("/v1/chat/completions");
    let models = http::get(&server.url("/v1/models")).await.expect("the models are listed");
    let model = &models.body["data"][0]["id"];

    let mut alone = Vec::new();
    for prompt in 0..PROMPTS {
        let text = client(&url, &request(model, prompt), None)
            .await
            .expect("the server responds")
            .expect("the stream was read to its end");
        assert!(!text.is_empty());
        alone.push(text);
    }
    // The number of events after which each client disconnects, or `None` if the client reads the whole stream.
    let leaves: Vec<_> =
        (0..CLIENTS as u64).map(|client| (client % 2 == 1).then_some(client / 2 * 7 % 24)).collect();
    let bodies: Vec<Value> = (0..CLIENTS).map(|number| request(model, number / 2 % PROMPTS)).collect();
    let texts =
        http::join_all(bodies.iter().zip(&leaves).map(|(body, leave)| client(&url, body, *leave))).await;
    for (number, text) in texts.into_iter().enumerate() {
        match text.unwrap_or_else(|error| panic!("client {number}: {error:#}")) {
            Some(text) => assert_eq!(text, alone[number / 2 % PROMPTS], "client {number}"),
            None => assert!(leaves[number].is_some()),
        }
    }
    settled(&server).await.expect("all blocks are freed");
    assert!(!server.process().output().contains("panicked"), "{}", server.process().output());
}

#[tokio::test]
async fn disconnects_of_half_of_the_clients_do_not_affect_the_others() {
    assert_disconnects_go_unnoticed(&EXACT).await;
}

#[tokio::test]
async fn disconnects_do_not_affect_others_while_sequences_are_preempted() {
    assert_disconnects_go_unnoticed(&["--backend", "sim", "--sim-blocks", "128"]).await;
}

/// Waits until no block is active, and no sequence is running or waiting.
async fn settled(server: &Server) -> anyhow::Result<()> {
    let end = tokio::time::Instant::now() + SETTLE_LIMIT;
    loop {
        let text = metrics(server).await;
        let value = |name: &str| metric(&text, name).unwrap_or_else(|| panic!("no metric {name}:\n{text}"));
        let active = value("ovfleet_server_blocks_active");
        let running = value("ovfleet_server_sequences_running");
        let waiting = value("ovfleet_server_sequences_waiting");
        if active == 0.0 && running == 0.0 && waiting == 0.0 {
            return Ok(());
        }
        if tokio::time::Instant::now() > end {
            bail!(
                "{active} blocks are active, {running} sequences are running and {waiting} are waiting:\n{text}"
            );
        }
    }
}

//! Many streaming clients at once, half of which go away in the middle: nothing of theirs stays behind, and
//! the others notice nothing.

use std::time::Duration;

use anyhow::bail;
use serde_json::{Value, json};
use tests::http::{self, Stream, metric};
use tests::server::{EXACT, Server};

const CLIENTS: usize = 200;
const PROMPTS: usize = 16;
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

/// Where clients go away. Fixed, so that a failure can be repeated.
struct Draws(u64);

impl Draws {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

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

/// Reads `events` events and goes away, or reads all there are and gives the text.
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
        .expect("metrics are given")
        .body
        .as_str()
        .expect("metrics are text")
        .to_owned()
}

/// Waits until nobody holds a block any more.
/// Starts `arguments`, lets [`CLIENTS`] stream at once, half of which go away, and compares the others with
/// answers given before to one client at a time.
async fn half_of_many_go_away(arguments: &[&str]) {
    let server = Server::start(arguments).expect("the server starts");
    let url = server.url("/v1/chat/completions");
    let models = http::get(&server.url("/v1/models")).await.expect("the models are listed");
    let model = &models.body["data"][0]["id"];

    let mut alone = Vec::new();
    for prompt in 0..PROMPTS {
        let text = client(&url, &request(model, prompt), None).await.expect("an answer").expect("a text");
        assert!(!text.is_empty());
        alone.push(text);
    }
    let mut draws = Draws(1);
    let leaves: Vec<_> = (0..CLIENTS).map(|client| (client % 2 == 1).then(|| draws.below(24))).collect();
    let bodies: Vec<Value> = (0..CLIENTS).map(|number| request(model, number / 2 % PROMPTS)).collect();
    let texts = http::all(bodies.iter().zip(&leaves).map(|(body, leave)| client(&url, body, *leave))).await;
    for (number, text) in texts.into_iter().enumerate() {
        match text.unwrap_or_else(|error| panic!("client {number}: {error:#}")) {
            Some(text) => assert_eq!(text, alone[number / 2 % PROMPTS], "client {number}"),
            None => assert!(leaves[number].is_some()),
        }
    }
    settled(&server).await.expect("all blocks come back");
    assert!(!server.process().output().contains("panicked"), "{}", server.process().output());
}

#[tokio::test]
async fn half_of_200_clients_go_away_and_the_others_do_not_notice() {
    half_of_many_go_away(&EXACT).await;
}

#[tokio::test]
async fn the_same_while_blocks_run_out_and_sequences_are_preempted() {
    half_of_many_go_away(&["--backend", "sim", "--sim-blocks", "128"]).await;
}

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
            bail!("{active} blocks are held, {running} sequences run and {waiting} wait:\n{text}");
        }
    }
}

//! The attacks: each is what the audit of 3432560 found, or what a careless client does by itself.

use std::collections::BTreeMap;
use std::pin::Pin;

use anyhow::ensure;
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tests::http::{self, Answer};

use super::raw;

/// Whom to attack: host and port of each.
#[derive(Clone)]
pub(crate) struct Targets {
    pub(crate) router: String,
    pub(crate) server: String,
}

impl Targets {
    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.router)
    }
}

type Attempt = Pin<Box<dyn Future<Output = anyhow::Result<String>> + Send>>;

/// An attack, which gives a line about how it was answered.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    pub(crate) run: fn(Targets) -> Attempt,
}

macro_rules! attacks {
    ($($name:ident),* $(,)?) => {
        /// All attacks, in the order in which they run.
        pub(crate) const ATTACKS: &[Attack] =
            &[$(Attack { name: stringify!($name), run: |targets| Box::pin($name(targets)) }),*];
    };
}

attacks![
    references_to_one_item,
    huge_conversations,
    a_long_chain_of_responses,
    many_choices_with_lookup,
    expensive_grammars,
    exponential_patterns,
    thousands_of_alternatives,
    broken_tool_schemas,
    long_digits,
    long_prompts,
    truncation_of_long_conversations,
    bodies_that_never_end,
    silent_sockets,
    readers_that_never_read,
    slow_readers,
    disconnects,
    numbers_at_the_edge,
    broken_http,
];

/// Sends `requests`, `concurrent` of them at once, and counts the statuses of the answers. 0 is a broken connection.
async fn barrage(url: &str, concurrent: usize, requests: Vec<Value>) -> anyhow::Result<BTreeMap<u16, usize>> {
    let client = http::client();
    let mut statuses = BTreeMap::new();
    let mut answers = futures_util::stream::iter(requests)
        .map(|body| status_of(client.post(url).json(&body)))
        .buffer_unordered(concurrent);
    while let Some(status) = answers.next().await {
        *statuses.entry(status).or_default() += 1;
    }
    ensure!(!statuses.keys().any(|status| matches!(status, 0 | 500 | 502)), "{statuses:?}");
    Ok(statuses)
}

/// The status of an answer that was read whole, 0 if the connection broke.
async fn status_of(request: reqwest::RequestBuilder) -> u16 {
    let Ok(answer) = request.send().await else { return 0 };
    let status = answer.status().as_u16();
    if answer.bytes().await.is_ok() { status } else { 0 }
}

fn user(content: &str) -> Value {
    json!([{"role": "user", "content": content}])
}

fn chat(content: &str) -> Value {
    json!({"model": "smollm2", "max_tokens": 4, "messages": user(content)})
}

async fn create_conversation(targets: &Targets, text: &str) -> anyhow::Result<Answer> {
    let items = json!([{"type": "message", "role": "user", "content": text}]);
    http::post(&targets.url("/v1/conversations"), &json!({"items": items})).await
}

async fn delete(url: &str) -> anyhow::Result<()> {
    http::client().delete(url).send().await?;
    Ok(())
}

async fn references_to_one_item(targets: Targets) -> anyhow::Result<String> {
    let conversation = create_conversation(&targets, &"x".repeat(2 << 20)).await?;
    let Some(id) = conversation.body["id"].as_str() else {
        return Ok(format!("the item is rejected with {}", conversation.status));
    };
    let items = http::get(&targets.url(&format!("/v1/conversations/{id}/items"))).await?;
    let reference = json!({"type": "item_reference", "id": items.body["data"][0]["id"]});
    let input: Vec<Value> = vec![reference; 2500];
    let body = json!({"model": "smollm2", "conversation": id, "input": input, "max_output_tokens": 1});
    let statuses = barrage(&targets.url("/v1/responses"), 4, vec![body; 8]).await?;
    delete(&targets.url(&format!("/v1/conversations/{id}"))).await?;
    Ok(format!("{statuses:?}"))
}

async fn huge_conversations(targets: Targets) -> anyhow::Result<String> {
    let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
    let created = create_conversation(&targets, "start").await?;
    let id = created.body["id"].as_str().unwrap_or_default().to_owned();
    let url = targets.url(&format!("/v1/conversations/{id}/items"));
    let item = json!({"type": "message", "role": "user", "content": "y".repeat(1 << 20)});
    for _ in 0..8 {
        for (status, count) in barrage(&url, 8, vec![json!({"items": [item]}); 16]).await? {
            *statuses.entry(status).or_default() += count;
        }
    }
    let pages = http::all((0..32).map(|_| http::get(&url))).await;
    let refused = pages.iter().filter(|page| page.as_ref().is_ok_and(|page| page.status != 200)).count();
    delete(&targets.url(&format!("/v1/conversations/{id}"))).await?;
    Ok(format!("appends {statuses:?}, {refused} of 32 pages refused"))
}

async fn a_long_chain_of_responses(targets: Targets) -> anyhow::Result<String> {
    let url = targets.url("/v1/responses");
    let mut previous = Value::Null;
    let mut ids = Vec::new();
    for _ in 0..200 {
        let body = json!({"model": "smollm2", "input": "go on", "max_output_tokens": 1, "previous_response_id": previous});
        let answer = http::post(&url, &body).await?;
        if answer.status != 200 {
            break;
        }
        previous = answer.body["id"].clone();
        ids.push(previous.as_str().unwrap_or_default().to_owned());
    }
    for id in &ids {
        delete(&format!("{url}/{id}")).await?;
    }
    Ok(format!("{} links", ids.len()))
}

async fn many_choices_with_lookup(targets: Targets) -> anyhow::Result<String> {
    let body = json!({
        "model": "smollm2", "prompt": "one two three four ".repeat(800), "n": 128, "max_tokens": 2,
        "max_ngram_size": 8, "num_assistant_tokens": 4,
    });
    Ok(format!("{:?}", barrage(&targets.url("/v1/completions"), 2, vec![body; 2]).await?))
}

async fn expensive_grammars(targets: Targets) -> anyhow::Result<String> {
    let bodies: Vec<Value> = (0..16)
        .map(|number| {
            let mut body = chat(&format!("Write something, number {number}."));
            body["guided_regex"] = json!(format!("([a-z]{{1,8}} ){{1,{}}}(.|\\n)*{number}", 100 + number));
            body["max_tokens"] = json!(16);
            body
        })
        .collect();
    Ok(format!("{:?}", barrage(&targets.url("/v1/chat/completions"), 8, bodies).await?))
}

async fn exponential_patterns(targets: Targets) -> anyhow::Result<String> {
    let bodies: Vec<Value> = (0..256)
        .map(|number| {
            let mut body = chat("Write.");
            body["guided_regex"] = json!(format!("[ab]*a[ab]{{14}}c{number}"));
            body["max_tokens"] = json!(24);
            body
        })
        .collect();
    Ok(format!("{:?}", barrage(&targets.url("/v1/chat/completions"), 8, bodies).await?))
}

async fn thousands_of_alternatives(targets: Targets) -> anyhow::Result<String> {
    let bodies = [2_000, 4_000, 8_000]
        .map(|count| {
            let mut body = chat("Choose.");
            body["guided_choice"] = (0..count).map(|number| format!("choice {number}")).collect();
            body
        })
        .to_vec();
    Ok(format!("{:?}", barrage(&targets.url("/v1/chat/completions"), 3, bodies).await?))
}

async fn broken_tool_schemas(targets: Targets) -> anyhow::Result<String> {
    let tools: Vec<Value> = (0..512)
        .map(|number| {
            let parameters = json!({"type": "object", "properties": {"x": {"pattern": format!("(?={number})")}}});
            json!({"type": "function", "function": {"name": format!("tool_{number}"), "parameters": parameters}})
        })
        .collect();
    let mut body = chat("Call.");
    body["tools"] = json!(tools);
    body["tool_choice"] = json!("required");
    Ok(format!("{:?}", barrage(&targets.url("/v1/chat/completions"), 8, vec![body; 16]).await?))
}

async fn long_digits(targets: Targets) -> anyhow::Result<String> {
    let body = json!({"model": "smollm2", "content": "7".repeat(7 << 20)});
    Ok(format!("{:?}", barrage(&targets.url("/v1/tokenize"), 8, vec![body; 8]).await?))
}

async fn long_prompts(targets: Targets) -> anyhow::Result<String> {
    let body = json!({"model": "smollm2", "prompt": "1 2 3 ".repeat(80_000), "max_tokens": 1});
    Ok(format!("{:?}", barrage(&targets.url("/v1/completions"), 64, vec![body; 64]).await?))
}

async fn truncation_of_long_conversations(targets: Targets) -> anyhow::Result<String> {
    let input: Vec<Value> = (0..2_000)
        .map(|number| json!({"role": "user", "content": format!("{number} ").repeat(60)}))
        .collect();
    let body = json!({"model": "smollm2", "input": input, "truncation": "auto", "max_output_tokens": 1, "store": false});
    Ok(format!("{:?}", barrage(&targets.url("/v1/responses"), 8, vec![body; 8]).await?))
}

/// The status of the answer to a request whose body does not end.
async fn unfinished(address: String, bytes: std::sync::Arc<Vec<u8>>) -> u16 {
    raw::exchange(&address, &bytes).await.map_or(0, |answer| raw::status(&answer))
}

async fn bodies_that_never_end(targets: Targets) -> anyhow::Result<String> {
    const SENT: usize = 7 << 20;
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        8 << 20
    );
    let bytes = [request.as_bytes(), &vec![b' '; SENT]].concat();
    let bytes = std::sync::Arc::new(bytes);
    let mut attempts = Vec::new();
    for address in [&targets.router, &targets.server] {
        for _ in 0..200 {
            attempts.push(unfinished(address.clone(), std::sync::Arc::clone(&bytes)));
        }
    }
    let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
    for status in http::all(attempts).await {
        *statuses.entry(status).or_default() += 1;
    }
    Ok(format!("{statuses:?}"))
}

async fn silent_sockets(targets: Targets) -> anyhow::Result<String> {
    let mut sockets = Vec::new();
    for number in 0..10_000 {
        let address = if number % 2 == 0 { &targets.router } else { &targets.server };
        let connected = tokio::time::timeout(
            std::time::Duration::from_secs(2),
            tokio::net::TcpStream::connect(address.as_str()),
        );
        // The queue of connections that wait to be accepted may be full, as it should be.
        match connected.await {
            Ok(Ok(socket)) => sockets.push(socket),
            _ => break,
        }
    }
    let answer = http::post(&targets.url("/v1/chat/completions"), &chat("Hello")).await?;
    ensure!(answer.status == 200, "a request beside silent sockets: {}", answer.status);
    Ok(format!("{} sockets", sockets.len()))
}

async fn readers_that_never_read(targets: Targets) -> anyhow::Result<String> {
    let body = json!({
        "model": "smollm2", "messages": user("Count."), "max_tokens": 24, "stream": true,
        "logprobs": true, "top_logprobs": 20, "ignore_eos": true,
    });
    let mut streams = Vec::new();
    for number in 0..200 {
        let address = if number % 2 == 0 { &targets.router } else { &targets.server };
        let request = raw::post(address, "/v1/chat/completions", &body.to_string());
        streams.push(raw::never_reads(address, &request).await?);
        if number % 8 == 7 {
            // Ordinary work in between, so that what is measured is not the load itself.
            http::post(&targets.url("/v1/chat/completions"), &chat("Hello")).await?;
        }
    }
    Ok(format!("{} streams that nobody reads", streams.len()))
}

/// Reads an answer sixteen bytes at a time.
async fn slow_reader(address: String, request: Vec<u8>) -> anyhow::Result<u16> {
    use tokio::io::AsyncReadExt as _;
    let mut stream = raw::never_reads(&address, &request).await?;
    let mut pace = tokio::time::interval(std::time::Duration::from_millis(20));
    let mut text = Vec::new();
    while !text.ends_with(b"0\r\n\r\n") {
        pace.tick().await;
        let mut piece = [0; 16];
        let count = stream.read(&mut piece).await?;
        if count == 0 {
            break;
        }
        text.extend_from_slice(&piece[..count]);
    }
    Ok(raw::status(&text))
}

async fn slow_readers(targets: Targets) -> anyhow::Result<String> {
    let body = json!({"model": "smollm2", "messages": user("Count."), "max_tokens": 4, "stream": true});
    let request = raw::post(&targets.router, "/v1/chat/completions", &body.to_string());
    let readers: Vec<_> = (0..200).map(|_| slow_reader(targets.router.clone(), request.clone())).collect();
    let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
    let mut running = futures_util::stream::iter(readers).buffer_unordered(16);
    while let Some(status) = running.next().await {
        *statuses.entry(status?).or_default() += 1;
    }
    ensure!(statuses.keys().all(|status| matches!(status, 200 | 429)), "{statuses:?}");
    Ok(format!("{statuses:?}"))
}

async fn disconnects(targets: Targets) -> anyhow::Result<String> {
    let body =
        json!({"model": "smollm2", "messages": user("Tell a story."), "max_tokens": 512, "stream": true});
    for number in 0..200 {
        let address = if number % 2 == 0 { &targets.router } else { &targets.server };
        let request = raw::post(address, "/v1/chat/completions", &body.to_string());
        let stream = raw::never_reads(address, &request).await?;
        drop(stream);
    }
    Ok("200 clients left before their answer".to_owned())
}

async fn numbers_at_the_edge(targets: Targets) -> anyhow::Result<String> {
    let edges = ["1e-50", "3.5e38", "-0.0", "1e308", "9223372036854775808", "-1", "0", "1e-400"];
    let names = [
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "max_tokens",
        "seed",
        "n",
        "logprobs",
        "length_penalty",
    ];
    let mut bodies = Vec::new();
    for name in names {
        for edge in edges {
            let text = format!(r#"{{"model": "smollm2", "prompt": "x", "max_tokens": 2, "{name}": {edge}}}"#);
            bodies.push(serde_json::from_str(&text).unwrap_or(Value::Null));
        }
    }
    Ok(format!("{:?}", barrage(&targets.url("/v1/completions"), 8, bodies).await?))
}

async fn broken_http(targets: Targets) -> anyhow::Result<String> {
    let requests: [&[u8]; 10] = [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
        b"GET /v3/models/%ff HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n\xff\xff",
    ];
    let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
    for address in [&targets.router, &targets.server] {
        for request in requests {
            let answer = raw::exchange(address, request).await.unwrap_or_default();
            *statuses.entry(raw::status(&answer)).or_default() += 1;
        }
    }
    ensure!(statuses.keys().all(|status| *status < 500), "{statuses:?}");
    Ok(format!("{statuses:?}"))
}

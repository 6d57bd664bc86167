//! The HTTP client of the attacks, which sends many requests and counts the statuses of the responses.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tests::http;

/// The name of the model in all requests.
pub(crate) const MODEL: &str = "smollm2";
/// The time limit for a response. The router times out earlier.
const ANSWER_LIMIT: Duration = Duration::from_secs(150);

/// The host and port of the attacked processes, and the API keys of the router's clients.
#[derive(Clone)]
pub(crate) struct Targets {
    pub(crate) router: String,
    pub(crate) server: String,
    /// The host and gRPC port of the server.
    pub(crate) server_grpc: String,
    /// The key that the attacker uses.
    pub(crate) key: String,
    /// The key of another tenant.
    pub(crate) other_key: String,
}

/// The number of responses with each status. The status 0 stands for requests without a complete response, such as
/// those whose connection broke.
#[derive(Default)]
pub(crate) struct Statuses(BTreeMap<u16, usize>);

impl Statuses {
    pub(crate) fn add(&mut self, status: u16) {
        *self.0.entry(status).or_default() += 1;
    }

    pub(crate) fn extend(&mut self, others: Statuses) {
        for (status, count) in others.0 {
            *self.0.entry(status).or_default() += count;
        }
    }

    /// Fails unless every status is among `allowed`.
    pub(crate) fn only(self, allowed: &[u16]) -> anyhow::Result<Self> {
        ensure!(
            self.0.keys().all(|status| allowed.contains(status)),
            "statuses: {self}; allowed: {allowed:?}"
        );
        Ok(self)
    }

    /// Fails unless some responses have `status`, because an attack that never passes admission control proves nothing.
    pub(crate) fn some(self, status: u16) -> anyhow::Result<Self> {
        ensure!(self.0.contains_key(&status), "no response has status {status}; statuses: {self}");
        Ok(self)
    }
}

impl FromIterator<u16> for Statuses {
    fn from_iter<I: IntoIterator<Item = u16>>(statuses: I) -> Self {
        let mut all = Self::default();
        statuses.into_iter().for_each(|status| all.add(status));
        all
    }
}

impl fmt::Display for Statuses {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts: Vec<String> =
            self.0.iter().map(|(status, count)| format!("{count} x {status}")).collect();
        formatter.write_str(&counts.join(", "))
    }
}

/// A client that authenticates with one API key.
#[derive(Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    base: String,
    key: String,
}

impl Client {
    pub(crate) fn new(address: &str, key: &str) -> Self {
        Self { http: http::client(), base: format!("http://{address}"), key: key.to_owned() }
    }

    pub(crate) fn of_router(targets: &Targets) -> Self {
        Self::new(&targets.router, &targets.key)
    }

    pub(crate) fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base));
        request.bearer_auth(&self.key).timeout(ANSWER_LIMIT)
    }

    async fn answer(request: reqwest::RequestBuilder) -> anyhow::Result<(u16, Value)> {
        let answer = request.send().await?;
        let status = answer.status().as_u16();
        let text = answer.text().await?;
        Ok((status, serde_json::from_str(&text).unwrap_or(Value::String(text))))
    }

    /// Sends `body` and returns the status and the body of the response.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> anyhow::Result<(u16, Value)> {
        Self::answer(self.request(reqwest::Method::POST, path).json(body)).await
    }

    pub(crate) async fn get(&self, path: &str) -> anyhow::Result<(u16, Value)> {
        Self::answer(self.request(reqwest::Method::GET, path)).await
    }

    pub(crate) async fn delete(&self, path: &str) -> anyhow::Result<u16> {
        Ok(Self::answer(self.request(reqwest::Method::DELETE, path)).await?.0)
    }

    /// Sends all `bodies`, `concurrent` at a time. The bodies need not be valid JSON.
    pub(crate) async fn barrage(&self, path: &str, concurrent: usize, bodies: Vec<String>) -> Statuses {
        let requests = futures_util::stream::iter(bodies).map(|body| {
            let request = self.request(reqwest::Method::POST, path);
            status(request.header("content-type", "application/json").body(body))
        });
        requests.buffer_unordered(concurrent).collect::<Vec<_>>().await.into_iter().collect()
    }
}

/// Returns the status of the response, or 0 if no complete response was received.
async fn status(request: reqwest::RequestBuilder) -> u16 {
    let Ok(answer) = request.send().await else { return 0 };
    let status = answer.status().as_u16();
    if answer.bytes().await.is_ok() { status } else { 0 }
}

/// `count` copies of `body`.
pub(crate) fn copies(body: &Value, count: usize) -> Vec<String> {
    vec![body.to_string(); count]
}

/// A chat request for a short response, with `parameters`.
pub(crate) fn chat(content: &str, parameters: Value) -> Value {
    let messages = json!([{"role": "user", "content": content}]);
    merged(json!({"model": MODEL, "max_tokens": 4, "messages": messages}), parameters)
}

/// A completion request for a short response, with `parameters`.
pub(crate) fn completion(prompt: &str, parameters: Value) -> Value {
    merged(json!({"model": MODEL, "max_tokens": 4, "prompt": prompt}), parameters)
}

/// A request to the Responses API for a short response, with `parameters`.
pub(crate) fn response(input: &Value, parameters: Value) -> Value {
    merged(json!({"model": MODEL, "max_output_tokens": 1, "input": input}), parameters)
}

fn merged(mut body: Value, parameters: Value) -> Value {
    if let (Value::Object(body), Value::Object(parameters)) = (&mut body, parameters) {
        body.extend(parameters);
    }
    body
}

/// The string at `pointer` in a response.
pub(crate) fn text(body: &Value, pointer: &str) -> anyhow::Result<String> {
    let text = body.pointer(pointer).and_then(Value::as_str);
    Ok(text.with_context(|| format!("no string at {pointer} in {body:.300}"))?.to_owned())
}

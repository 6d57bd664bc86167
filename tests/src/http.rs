//! A client of the server's HTTP interface that knows no more of it than the tests need.

use anyhow::{Context as _, bail};
use futures_util::StreamExt as _;
use serde_json::Value;

/// An answer, whole.
#[derive(Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The body as JSON, or as a string where it is none.
    pub body: Value,
    /// The `Retry-After` header.
    pub retry_after: Option<String>,
}

impl Answer {
    /// The text of the first choice.
    #[must_use]
    pub fn text(&self) -> &str {
        let choice = &self.body["choices"][0];
        choice["message"]["content"].as_str().or_else(|| choice["text"].as_str()).unwrap_or_default()
    }
}

/// A client. Nobody here speaks TLS, but the library, built together with a crate that does, wants to know by what.
#[must_use]
pub fn client() -> reqwest::Client {
    // Fails if that is known already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::new()
}

/// Sends a GET request.
///
/// # Errors
/// There is no answer.
pub async fn get(url: &str) -> anyhow::Result<Answer> {
    answer(client().get(url)).await
}

/// Sends `body` as JSON.
///
/// # Errors
/// There is no answer.
pub async fn post(url: &str, body: &Value) -> anyhow::Result<Answer> {
    answer(client().post(url).json(body)).await
}

/// Sends `body` as it is and calls it JSON.
///
/// # Errors
/// There is no answer.
pub async fn post_text(url: &str, body: String) -> anyhow::Result<Answer> {
    answer(client().post(url).header("content-type", "application/json").body(body)).await
}

async fn answer(request: reqwest::RequestBuilder) -> anyhow::Result<Answer> {
    let response = request.send().await?;
    let status = response.status().as_u16();
    let retry_after =
        response.headers().get("retry-after").and_then(|value| value.to_str().ok()).map(str::to_owned);
    let text = response.text().await?;
    let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
    Ok(Answer { status, body, retry_after })
}

/// A streamed answer. Dropping it closes the connection.
pub struct Stream {
    response: reqwest::Response,
    buffer: Vec<u8>,
    done: bool,
}

impl Stream {
    /// Sends `body`, which asks for a stream, over a connection of its own.
    ///
    /// # Errors
    /// There is no answer, or it is no stream.
    pub async fn open(url: &str, body: &Value) -> anyhow::Result<Self> {
        let response = client().post(url).json(body).send().await?;
        let status = response.status();
        if !status.is_success() {
            bail!("status {status}: {}", response.text().await?);
        }
        Ok(Self { response, buffer: Vec::new(), done: false })
    }

    /// The next event, or nothing after the `[DONE]` that must end the stream.
    ///
    /// # Errors
    /// The stream breaks, ends early, or carries something else than JSON.
    pub async fn next(&mut self) -> anyhow::Result<Option<Value>> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let event = std::str::from_utf8(&event)?.trim();
                if event.starts_with(':') {
                    continue; // a comment that keeps the connection open
                }
                let data = event.strip_prefix("data:").context("an event without data")?.trim();
                if data == "[DONE]" {
                    self.done = true;
                    return Ok(None);
                }
                return Ok(Some(serde_json::from_str(data)?));
            }
            match self.response.chunk().await? {
                Some(chunk) => self.buffer.extend_from_slice(&chunk),
                None => bail!("the stream ended without [DONE]"),
            }
        }
    }

    /// The text of all events that are left, of the first choice.
    ///
    /// # Errors
    /// As [`Stream::next`].
    pub async fn text(mut self) -> anyhow::Result<String> {
        let mut text = String::new();
        while let Some(event) = self.next().await? {
            text.push_str(delta(&event));
        }
        Ok(text)
    }
}

/// The text that an event of a chat or a completion adds to its first choice.
#[must_use]
pub fn delta(event: &Value) -> &str {
    let choice = &event["choices"][0];
    choice["delta"]["content"].as_str().or_else(|| choice["text"].as_str()).unwrap_or_default()
}

/// Runs all of `futures` at once and gives what they give, in their order.
pub async fn all<T>(futures: impl IntoIterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut running: futures_util::stream::FuturesOrdered<_> = futures.into_iter().collect();
    let mut results = Vec::new();
    while let Some(result) = running.next().await {
        results.push(result);
    }
    results
}

/// The value of the metric `name`, all label sets added up, in the text that `/metrics` gives.
#[must_use]
pub fn metric(text: &str, name: &str) -> Option<f64> {
    let values: Vec<f64> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter(|line| line.split(['{', ' ']).next() == Some(name))
        .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
        .collect();
    (!values.is_empty()).then(|| values.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::metric;

    #[test]
    fn adds_up_a_metric_over_its_labels() {
        let text = "# TYPE a gauge\na{b=\"c d\"} 1\na{b=\"e\"} 2.5\nab 9\n";
        assert_eq!(metric(text, "a"), Some(3.5));
        assert_eq!(metric(text, "ab"), Some(9.0));
        assert_eq!(metric(text, "abc"), None);
    }
}

//! A minimal HTTP client for the API of the server and the router.

use anyhow::{Context as _, bail};
pub use futures_util::future::join_all;
use serde_json::Value;

/// A complete HTTP response.
#[derive(Debug)]
pub struct Response {
    /// The HTTP status code.
    pub status: u16,
    /// The body as JSON, or as a string if it is not JSON.
    pub body: Value,
    /// The value of the header `Retry-After`.
    pub retry_after: Option<String>,
}

impl Response {
    /// The generated text of the first choice.
    #[must_use]
    pub fn text(&self) -> &str {
        let choice = &self.body["choices"][0];
        choice["message"]["content"].as_str().or_else(|| choice["text"].as_str()).unwrap_or_default()
    }
}

/// Creates an HTTP client. Its connections do not use TLS, but reqwest is built with TLS for another crate and needs a
/// provider.
#[must_use]
pub fn client() -> reqwest::Client {
    // This fails if a provider is already installed; reqwest then uses that provider.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::new()
}

/// Sends a GET request to `url`.
///
/// # Errors
/// No response is received.
pub async fn get(url: &str) -> anyhow::Result<Response> {
    receive(client().get(url)).await
}

/// Sends a POST request with the JSON `body`.
///
/// # Errors
/// No response is received.
pub async fn post(url: &str, body: &Value) -> anyhow::Result<Response> {
    receive(client().post(url).json(body)).await
}

/// Sends a POST request with the content type `application/json` and with `body`, which need not be valid JSON.
///
/// # Errors
/// No response is received.
pub async fn post_text(url: &str, body: String) -> anyhow::Result<Response> {
    receive(client().post(url).header("content-type", "application/json").body(body)).await
}

async fn receive(request: reqwest::RequestBuilder) -> anyhow::Result<Response> {
    let response = request.send().await?;
    let status = response.status().as_u16();
    let retry_after =
        response.headers().get("retry-after").and_then(|value| value.to_str().ok()).map(str::to_owned);
    let text = response.text().await?;
    let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
    Ok(Response { status, body, retry_after })
}

/// A streamed response. Dropping it closes the connection.
pub struct Stream {
    response: reqwest::Response,
    buffer: Vec<u8>,
    done: bool,
}

impl Stream {
    /// Sends `body`, which requests a stream, over a new connection.
    ///
    /// # Errors
    /// No response is received, or its status is an error.
    pub async fn open(url: &str, body: &Value) -> anyhow::Result<Self> {
        let response = client().post(url).json(body).send().await?;
        let status = response.status();
        if !status.is_success() {
            bail!("status {status}: {}", response.text().await?);
        }
        Ok(Self { response, buffer: Vec::new(), done: false })
    }

    /// Returns the next event, or `None` after the `[DONE]` that ends the stream.
    ///
    /// # Errors
    /// The connection breaks, the stream ends without `[DONE]`, or an event is not JSON.
    pub async fn next(&mut self) -> anyhow::Result<Option<Value>> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let event = std::str::from_utf8(&event)?.trim();
                if event.starts_with(':') {
                    continue; // a comment, sent as a keep-alive
                }
                let data = event.strip_prefix("data:").context("the event has no data")?.trim();
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

    /// Reads the rest of the stream and returns the generated text of the first choice.
    ///
    /// # Errors
    /// Returns the same errors as [`Stream::next`].
    pub async fn text(mut self) -> anyhow::Result<String> {
        let mut text = String::new();
        while let Some(event) = self.next().await? {
            text.push_str(delta(&event));
        }
        Ok(text)
    }
}

/// The text that an event of a chat or completion stream adds to the first choice.
#[must_use]
pub fn delta(event: &Value) -> &str {
    let choice = &event["choices"][0];
    choice["delta"]["content"].as_str().or_else(|| choice["text"].as_str()).unwrap_or_default()
}

/// The value of the metric `name` in the Prometheus text format, summed over all labels.
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
    fn a_metric_is_summed_over_its_labels() {
        let text = "# TYPE a gauge\na{b=\"c d\"} 1\na{b=\"e\"} 2.5\nab 9\n";
        assert_eq!(metric(text, "a"), Some(3.5));
        assert_eq!(metric(text, "ab"), Some(9.0));
        assert_eq!(metric(text, "abc"), None);
    }
}

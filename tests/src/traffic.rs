//! Continuous streaming traffic for tests that change a fleet under load. Each request has an ID, and its outcome is
//! recorded. This module knows only as much about the servers as an OpenAI client does.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// The default number of times that the official clients retry a request whose connection failed before a response
/// began.
const RETRIES_MAX: u32 = 2;
/// The delay of the official clients before the first retry. It doubles with each retry and is reduced at random by up
/// to a quarter, so that clients that failed together do not retry together.
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// The time limit for a complete response. While replicas start on a machine with few processors, the responses of
/// other replicas take tens of seconds.
const RESPONSE_LIMIT: Duration = Duration::from_secs(300);

/// The configuration of the traffic.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The base URL of the API, such as `http://chat.default.svc.cluster.local`.
    pub url: String,
    /// The name of the model.
    pub model: String,
    /// The number of concurrent clients, each of which sends one request at a time.
    pub clients: usize,
    /// The length of each response in tokens.
    pub tokens: u32,
    /// The time between a response and the client's next request.
    pub pause: Duration,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// The response is complete, including the end of the stream.
    Answered,
    /// The response has an error status and this body.
    Refused(u16, String),
    /// The stream began and then reported an error.
    Failed(String),
    /// The stream began and was then interrupted.
    Broken(String),
    /// No response was received.
    Unanswered(String),
}

/// A completed or failed request.
#[derive(Clone, Debug)]
pub struct Request {
    /// The ID of the request, sent as `x-request-id`.
    pub id: String,
    /// The time from the start of the traffic until the request was sent.
    pub sent: Duration,
    /// The time from the request to the end of the response.
    pub duration: Duration,
    /// The number of retries, each after a connection that failed before a response began.
    pub retries: u32,
    /// How the request ended.
    pub outcome: Outcome,
}

/// All requests that have ended so far.
#[derive(Clone, Debug, Default)]
pub struct TrafficReport {
    /// The requests in the order in which they ended.
    pub requests: Vec<Request>,
}

impl TrafficReport {
    /// The requests without a complete response.
    #[must_use]
    pub fn failures(&self) -> Vec<&Request> {
        self.requests.iter().filter(|request| request.outcome != Outcome::Answered).collect()
    }

    /// A summary in one line, followed by a line for each kind of failure.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut times: Vec<Duration> = self.requests.iter().map(|request| request.duration).collect();
        times.sort();
        let at = |percent: usize| times.get(times.len() * percent / 100).copied().unwrap_or_default();
        let retries: u32 = self.requests.iter().map(|request| request.retries).sum();
        let mut text = format!(
            "{} requests, {} failed, {retries} retries; median duration {:.2?}, maximum {:.2?}",
            self.requests.len(),
            self.failures().len(),
            at(50),
            times.last().copied().unwrap_or_default(),
        );
        let mut kinds: BTreeMap<&Outcome, Vec<&Request>> = BTreeMap::new();
        for request in self.failures() {
            kinds.entry(&request.outcome).or_default().push(request);
        }
        for (outcome, requests) in kinds {
            let (first, last) = (requests[0], requests[requests.len() - 1]);
            text += &format!(
                "\n  {} x {outcome:?}: first {} (sent at {:.2?}, duration {:.2?}), last {} (sent at {:.2?})",
                requests.len(),
                first.id,
                first.sent,
                first.duration,
                last.id,
                last.sent
            );
        }
        text
    }
}

/// Traffic that continues until it is stopped.
#[derive(Debug)]
pub struct Traffic {
    started: Instant,
    stop: watch::Sender<bool>,
    /// The API key of the next requests.
    key: watch::Sender<Option<String>>,
    clients: JoinSet<()>,
    report: Arc<Mutex<TrafficReport>>,
    completed: watch::Receiver<usize>,
}

impl Traffic {
    /// Starts traffic without an API key.
    #[must_use]
    pub fn start(plan: &Plan) -> Self {
        Self::start_with_key(plan, None)
    }

    /// Starts traffic with an API key, if one is given.
    #[must_use]
    pub fn start_with_key(plan: &Plan, key: Option<&str>) -> Self {
        let (stop, stopped) = watch::channel(false);
        let (key, key_in_use) = watch::channel(key.map(str::to_owned));
        let (count, completed) = watch::channel(0);
        let count = Arc::new(count);
        let report = Arc::new(Mutex::new(TrafficReport::default()));
        let started = Instant::now();
        let mut clients = JoinSet::new();
        for client in 0..plan.clients {
            let (plan, stopped, report, count) =
                (plan.clone(), stopped.clone(), Arc::clone(&report), Arc::clone(&count));
            let key = key_in_use.clone();
            clients.spawn(async move {
                // The client reuses connections, as the official clients do.
                let http = crate::http::client();
                for number in 0_u64.. {
                    if *stopped.borrow() {
                        break;
                    }
                    let id = format!("{client}-{number}");
                    let sent = started.elapsed();
                    let key = key.borrow().clone();
                    let (outcome, retries) = send(&http, &plan, &id, key.as_deref()).await;
                    let request = Request { id, sent, duration: started.elapsed() - sent, retries, outcome };
                    {
                        let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
                        report.requests.push(request);
                        count.send_replace(report.requests.len());
                    }
                    tokio::time::sleep(plan.pause).await;
                }
            });
        }
        Self { started, stop, key, clients, report, completed }
    }

    /// Sends all further requests with another API key.
    pub fn use_key(&self, key: &str) {
        self.key.send_replace(Some(key.to_owned()));
    }

    /// The time since the start of the traffic, comparable to [`Request::sent`].
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Waits until `more` further requests have ended.
    pub async fn await_requests(&mut self, more: usize) {
        let end = *self.completed.borrow_and_update() + more;
        // The channel cannot close while the clients run.
        drop(self.completed.wait_for(|count| *count >= end).await);
    }

    /// The number of requests that have failed so far.
    #[must_use]
    pub fn failures(&self) -> usize {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).failures().len()
    }

    /// Stops sending requests, waits for those in flight, and returns the report on all requests.
    pub async fn stop(mut self) -> TrafficReport {
        self.stop.send_replace(true);
        while self.clients.join_next().await.is_some() {}
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn send(http: &reqwest::Client, plan: &Plan, id: &str, key: Option<&str>) -> (Outcome, u32) {
    let body = json!({
        "model": plan.model,
        "stream": true,
        "temperature": 0,
        "max_tokens": plan.tokens,
        "ignore_eos": true,
        "messages": [{"role": "user", "content": format!("Request {id}: count from one to twenty.")}],
    });
    for retries in 0.. {
        let mut request = http
            .post(format!("{}/v3/chat/completions", plan.url))
            .header("x-request-id", id)
            .timeout(RESPONSE_LIMIT)
            .json(&body);
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        // `send` returns when the head of the response has been received. From then on, the request is not retried,
        // because the client may already have used a part of the response.
        match request.send().await {
            Err(error) if !error.is_timeout() && retries < RETRIES_MAX => {
                tokio::time::sleep(delay(retries)).await;
            }
            Err(error) => return (Outcome::Unanswered(format!("{:#}", anyhow::Error::from(error))), retries),
            Ok(response) => return (read(response).await, retries),
        }
    }
    unreachable!("invariant: the last attempt returns")
}

/// The delay before the next retry, after `retries` retries.
fn delay(retries: u32) -> Duration {
    let random = RandomState::new().hash_one(retries) as f64 / u64::MAX as f64;
    (RETRY_DELAY * (1 << retries)).mul_f64(1.0 - 0.25 * random)
}

async fn read(response: reqwest::Response) -> Outcome {
    let status = response.status().as_u16();
    if status != 200 {
        return Outcome::Refused(status, response.text().await.unwrap_or_default());
    }
    let mut bytes = response.bytes_stream();
    let mut text = Vec::new();
    loop {
        match bytes.next().await {
            Some(Ok(chunk)) => text.extend_from_slice(&chunk),
            Some(Err(error)) => return outcome(&text, &format!("{:#}", anyhow::Error::from(error))),
            None => return outcome(&text, "the connection was closed"),
        }
    }
}

/// The outcome of a stream with the content `text` that ended for the reason `how`.
fn outcome(text: &[u8], how: &str) -> Outcome {
    let text = String::from_utf8_lossy(text);
    let mut is_done = false;
    let mut is_finished = false;
    for data in text.lines().filter_map(|line| line.strip_prefix("data:")) {
        let data = data.trim();
        is_done |= data == "[DONE]";
        let event: Value = serde_json::from_str(data).unwrap_or_default();
        if let Some(error) = event.get("error") {
            return Outcome::Failed(error["message"].as_str().unwrap_or_default().to_owned());
        }
        is_finished |= event["choices"][0]["finish_reason"].is_string();
    }
    if is_done && is_finished { Outcome::Answered } else { Outcome::Broken(how.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_without_its_end_is_broken() {
        let piece = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n";
        let finish = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"length\"}]}\n\n";
        let done = "data: [DONE]\n\n";
        let of = |text: &str| outcome(text.as_bytes(), "closed");
        assert_eq!(of(&format!("{piece}{finish}{done}")), Outcome::Answered);
        for text in ["", piece, &format!("{piece}{finish}"), &format!("{piece}{done}")] {
            assert_eq!(of(text), Outcome::Broken("closed".to_owned()), "{text}");
        }
        let error = "data: {\"error\":{\"message\":\"gone\"}}\n\n";
        assert_eq!(of(&format!("{piece}{error}{done}")), Outcome::Failed("gone".to_owned()));
    }

    /// Resets two of every three connections after the first bytes of the request have arrived.
    fn unreliable(listener: &std::net::TcpListener) {
        use std::io::{Read as _, Write as _};
        let event = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n";
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close";
        let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{event}", event.len());
        for (number, connection) in (1..).zip(listener.incoming()) {
            let mut connection = connection.unwrap();
            connection.read_exact(&mut [0; 64]).unwrap();
            if number % 3 == 0 {
                connection.write_all(answer.as_bytes()).unwrap();
                connection.shutdown(std::net::Shutdown::Write).unwrap();
                let _ = connection.read_to_end(&mut Vec::new());
            }
            // Closing a socket with unread data makes the kernel send a reset.
        }
    }

    #[tokio::test]
    async fn requests_whose_connection_breaks_before_a_response_are_retried() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || unreliable(&listener));
        let plan = Plan { url, model: "chat".to_owned(), clients: 1, tokens: 1, pause: Duration::ZERO };
        let mut traffic = Traffic::start(&plan);
        traffic.await_requests(2).await;
        let report = traffic.stop().await;
        assert_eq!(report.failures().len(), 0, "{}", report.summary());
        assert!(report.requests.iter().all(|request| request.retries == 2), "{}", report.summary());
    }

    #[test]
    fn the_summary_names_each_kind_of_failure_once() {
        let request = |id: &str, outcome| Request {
            id: id.to_owned(),
            sent: Duration::from_secs(1),
            duration: Duration::from_secs(2),
            retries: 1,
            outcome,
        };
        let report = TrafficReport {
            requests: vec![
                request("0-0", Outcome::Answered),
                request("0-1", Outcome::Broken("reset".to_owned())),
                request("1-0", Outcome::Broken("reset".to_owned())),
            ],
        };
        let summary = report.summary();
        assert!(summary.starts_with("3 requests, 2 failed, 3 retries"), "{summary}");
        assert!(summary.contains("2 x Broken(\"reset\"): first 0-1"), "{summary}");
        assert_eq!(summary.lines().count(), 2, "{summary}");
    }
}

//! Continuous streaming traffic, each request of which is marked and accounted for: what a client sees while a cluster
//! changes beneath it. It knows no more of the servers than an OpenAI client does.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// As often as the official clients do it by default: a request is sent again whose connection failed before anything
/// of its answer came.
const RETRIES_MAX: u32 = 2;
/// As the official clients wait before that, doubled each time, and a quarter less at random, so that those who failed
/// together do not come again together.
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// Longer than this, no answer takes that comes at all.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// What is sent.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The address of the API, as in `http://10.96.1.2`.
    pub url: String,
    /// The model to ask for.
    pub model: String,
    /// Clients that ask at once, each again as soon as it has its answer.
    pub clients: usize,
    /// Length of answers, in tokens.
    pub tokens: u32,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// All of the answer came, and its end.
    Answered,
    /// It was refused with this status.
    Refused(u16, String),
    /// The answer began and then said that it failed.
    Failed(String),
    /// The answer began and broke off.
    Broken(String),
    /// There was no answer at all.
    Unanswered(String),
}

/// A request that has ended.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its mark, also sent as `x-request-id`.
    pub mark: String,
    /// When it was sent, counted from the start of the traffic.
    pub sent: Duration,
    /// How long it took.
    pub took: Duration,
    /// How often it was sent before, in vain, as its connection failed before anything of an answer came.
    pub retries: u32,
    /// How it ended.
    pub outcome: Outcome,
}

/// All requests of a stretch of time.
#[derive(Clone, Debug, Default)]
pub struct Account {
    /// In the order of their ends.
    pub requests: Vec<Request>,
}

impl Account {
    /// Those that were not answered.
    #[must_use]
    pub fn failures(&self) -> Vec<&Request> {
        self.requests.iter().filter(|request| request.outcome != Outcome::Answered).collect()
    }

    /// One line, and one for each kind of failure.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut times: Vec<Duration> = self.requests.iter().map(|request| request.took).collect();
        times.sort();
        let at = |percent: usize| times.get(times.len() * percent / 100).copied().unwrap_or_default();
        let retries: u32 = self.requests.iter().map(|request| request.retries).sum();
        let mut text = format!(
            "{} requests, {} failed, {retries} sent again; took {:.2?} at the median, {:.2?} at most",
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
                "\n  {} x {outcome:?}: first {} (sent at {:.2?}, took {:.2?}), last {} (sent at {:.2?})",
                requests.len(),
                first.mark,
                first.sent,
                first.took,
                last.mark,
                last.sent
            );
        }
        text
    }
}

/// Traffic that flows until it is stopped.
#[derive(Debug)]
pub struct Traffic {
    started: Instant,
    stop: watch::Sender<bool>,
    /// The API key of the next requests.
    key: watch::Sender<Option<String>>,
    clients: JoinSet<()>,
    ended: Arc<Mutex<Account>>,
    counted: watch::Receiver<usize>,
}

impl Traffic {
    /// Starts it.
    #[must_use]
    pub fn start(plan: &Plan) -> Self {
        Self::start_with_key(plan, None)
    }

    /// [`Traffic::start`], with an API key.
    #[must_use]
    pub fn start_with_key(plan: &Plan, key: Option<&str>) -> Self {
        let (stop, stopped) = watch::channel(false);
        let (key, key_in_use) = watch::channel(key.map(str::to_owned));
        let (count, counted) = watch::channel(0);
        let count = Arc::new(count);
        let ended = Arc::new(Mutex::new(Account::default()));
        let started = Instant::now();
        let mut clients = JoinSet::new();
        for client in 0..plan.clients {
            let (plan, stopped, ended, count) =
                (plan.clone(), stopped.clone(), Arc::clone(&ended), Arc::clone(&count));
            let key = key_in_use.clone();
            clients.spawn(async move {
                // Connections are kept between requests, as clients do it.
                let http = crate::http::client();
                for number in 0_u64.. {
                    if *stopped.borrow() {
                        break;
                    }
                    let mark = format!("{client}-{number}");
                    let sent = started.elapsed();
                    let key = key.borrow().clone();
                    let (outcome, retries) = ask(&http, &plan, &mark, key.as_deref()).await;
                    let request = Request { mark, sent, took: started.elapsed() - sent, retries, outcome };
                    let mut account = ended.lock().unwrap_or_else(PoisonError::into_inner);
                    account.requests.push(request);
                    count.send_replace(account.requests.len());
                }
            });
        }
        Self { started, stop, key, clients, ended, counted }
    }

    /// Sends the next requests with another API key.
    pub fn use_key(&self, key: &str) {
        self.key.send_replace(Some(key.to_owned()));
    }

    /// The time since the start of the traffic, comparable to [`Request::sent`].
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Waits until `more` further requests have ended, so that what was done before is behind them.
    pub async fn flow(&mut self, more: usize) {
        let end = *self.counted.borrow_and_update() + more;
        // It cannot close while clients run.
        drop(self.counted.wait_for(|count| *count >= end).await);
    }

    /// Waits for the requests under way and gives the account of all.
    pub async fn stop(mut self) -> Account {
        self.stop.send_replace(true);
        while self.clients.join_next().await.is_some() {}
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn ask(http: &reqwest::Client, plan: &Plan, mark: &str, key: Option<&str>) -> (Outcome, u32) {
    let body = json!({
        "model": plan.model,
        "stream": true,
        "temperature": 0,
        "max_tokens": plan.tokens,
        "ignore_eos": true,
        "messages": [{"role": "user", "content": format!("Request {mark}: count from one to twenty.")}],
    });
    for retries in 0.. {
        let mut request = http
            .post(format!("{}/v3/chat/completions", plan.url))
            .header("x-request-id", mark)
            .timeout(ANSWER_LIMIT)
            .json(&body);
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        // That there is an answer means that its head has come. From then on nothing is sent again: the client may
        // have seen a part of it.
        match request.send().await {
            Err(error) if !error.is_timeout() && retries < RETRIES_MAX => {
                tokio::time::sleep(delay(retries)).await;
            }
            Err(error) => return (Outcome::Unanswered(chain(&error)), retries),
            Ok(response) => return (read(response).await, retries),
        }
    }
    unreachable!("invariant: the last try returns")
}

/// The pause before a request is sent again that was sent again `retries` times.
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
            Some(Err(error)) => return ended(&text, &chain(&error)),
            None => return ended(&text, "the connection was closed"),
        }
    }
}

/// What a stream was that ended with `how`.
fn ended(text: &[u8], how: &str) -> Outcome {
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

fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_answered_only_with_its_end() {
        let piece = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n";
        let finish = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"length\"}]}\n\n";
        let done = "data: [DONE]\n\n";
        let of = |text: &str| ended(text.as_bytes(), "closed");
        assert_eq!(of(&format!("{piece}{finish}{done}")), Outcome::Answered);
        for text in ["", piece, &format!("{piece}{finish}"), &format!("{piece}{done}")] {
            assert_eq!(of(text), Outcome::Broken("closed".to_owned()), "{text}");
        }
        let error = "data: {\"error\":{\"message\":\"gone\"}}\n\n";
        assert_eq!(of(&format!("{piece}{error}{done}")), Outcome::Failed("gone".to_owned()));
    }

    /// Somebody who resets each connection once there is a request on it, but for one in three, on a thread that ends
    /// with the process.
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
            // What was not read makes the kernel answer with a reset.
        }
    }

    #[tokio::test]
    async fn what_breaks_before_anything_of_the_answer_is_sent_again_and_counted() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || unreliable(&listener));
        let plan = Plan { url, model: "chat".to_owned(), clients: 1, tokens: 1 };
        let mut traffic = Traffic::start(&plan);
        traffic.flow(2).await;
        let account = traffic.stop().await;
        assert_eq!(account.failures().len(), 0, "{}", account.summary());
        assert!(account.requests.iter().all(|request| request.retries == 2), "{}", account.summary());
    }

    #[test]
    fn the_summary_names_each_kind_of_failure_once() {
        let request = |mark: &str, outcome| Request {
            mark: mark.to_owned(),
            sent: Duration::from_secs(1),
            took: Duration::from_secs(2),
            retries: 1,
            outcome,
        };
        let account = Account {
            requests: vec![
                request("0-0", Outcome::Answered),
                request("0-1", Outcome::Broken("reset".to_owned())),
                request("1-0", Outcome::Broken("reset".to_owned())),
            ],
        };
        let summary = account.summary();
        assert!(summary.starts_with("3 requests, 2 failed, 3 sent again"), "{summary}");
        assert!(summary.contains("2 x Broken(\"reset\"): first 0-1"), "{summary}");
        assert_eq!(summary.lines().count(), 2, "{summary}");
    }
}

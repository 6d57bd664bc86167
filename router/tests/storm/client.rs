//! A client that checks that each answer belongs to its request, and that the answer is complete or ends with an error
//! event.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use rand::RngExt as _;
use rand::rngs::StdRng;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::replica::EVENTS;

/// The way in which an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    Whole,
    /// The answer ended with an error event.
    Broken,
}

pub(crate) struct Client {
    address: String,
    connection: Option<(SendRequest<Full<Bytes>>, JoinSet<()>)>,
}

impl Client {
    pub(crate) fn new(address: String) -> Self {
        Self { address, connection: None }
    }

    async fn send(&mut self, request: http::Request<Full<Bytes>>) -> (u16, String) {
        if self.connection.as_ref().is_none_or(|(sender, _)| sender.is_closed()) {
            let stream = TcpStream::connect(&self.address).await.unwrap();
            let (sender, connection) = handshake(TokioIo::new(stream)).await.unwrap();
            let mut driver = JoinSet::new();
            driver.spawn(async move { drop(connection.await) });
            self.connection = Some((sender, driver));
        }
        let (sender, _) = self.connection.as_mut().unwrap();
        sender.ready().await.unwrap();
        let response = sender.send_request(request).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    /// Sends a chat and checks the answer.
    pub(crate) async fn ask(&mut self, rng: &mut StdRng) -> RequestOutcome {
        let (id, stream) = (format!("{:016x}", rng.random::<u64>()), rng.random_bool(0.7));
        let prompt = "word ".repeat(rng.random_range(1..400));
        let body = format!(
            r#"{{"model":"m","stream":{stream},"user":"{id}","max_tokens":6,"messages":[{{"role":"user","content":"{prompt}"}}]}}"#
        );
        let request = http::Request::post("/v3/chat/completions")
            .header("host", "router")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .unwrap();
        let (status, answer) = self.send(request).await;
        assert_eq!(status, 200, "{answer}");
        if !stream {
            assert!(answer.contains(&id), "{answer}");
            return RequestOutcome::Whole;
        }
        let events: Vec<&str> = answer.split_terminator("\n\n").collect();
        assert_eq!(events.last(), Some(&"data: [DONE]"), "{answer}");
        let is_error = |event: &&&str| event.contains("\"replica_failed\"");
        let errors = events.iter().filter(is_error).count();
        for (number, event) in events[..events.len() - 1 - errors].iter().enumerate() {
            assert_eq!(*event, format!("data: {{\"id\":\"{id}\",\"number\":{number}}}"), "{answer}");
        }
        if errors == 0 {
            assert_eq!(events.len(), EVENTS as usize + 1, "{answer}");
            return RequestOutcome::Whole;
        }
        assert!(errors == 1 && events.len() > 2, "an error comes after a first event: {answer}");
        RequestOutcome::Broken
    }

    async fn get(&mut self, path: &str) -> String {
        let request = http::Request::get(path).header("host", "router").body(Full::default()).unwrap();
        self.send(request).await.1
    }
}

const LIMIT: Duration = Duration::from_secs(60);

async fn await_page(address: &str, path: &str, condition: impl Fn(&str) -> bool) {
    let mut client = Client::new(address.to_owned());
    let mut page = String::new();
    let waited = tokio::time::timeout(LIMIT, async {
        loop {
            page = client.get(path).await;
            if condition(&page) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    if waited.await.is_err() {
        panic!("{page}");
    }
}

/// Waits until the router reports exactly `count` ready replicas.
pub(crate) async fn await_replicas(address: &str, count: usize) {
    await_page(address, "/debug/replicas", |page| page.matches("\"state\":\"serving\"").count() == count)
        .await;
}

/// Waits until the router has no requests in flight and every ledger is at zero.
pub(crate) async fn await_nothing_booked(address: &str) {
    let is_over = |page: &str| {
        let names = [
            "requests_in_flight",
            "requests_queued",
            "requests_without_replica",
            "replica_in_flight",
            "replica_unreported",
        ];
        names.iter().all(|name| {
            let name = format!("ovfleet_router_{name}");
            let lines = page.lines().filter(|line| line.split(['{', ' ']).next() == Some(&name));
            lines.map(|line| line.rsplit(' ').next().unwrap()).all(|value| value == "0")
        })
    };
    await_page(address, "/metrics", is_over).await;
}

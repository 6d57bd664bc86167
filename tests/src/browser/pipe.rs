//! The two pipes of a browser: calls and their answers by number, and events. Messages are JSON, a zero byte after
//! each. It knows no method of the protocol beyond which events are worth keeping.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{ChildStdin, ChildStdout};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::LIMIT;

/// The events that are kept.
const KEPT: [&str; 5] = [
    "Log.entryAdded",
    "Network.requestWillBeSent",
    "Network.webSocketCreated",
    "Runtime.consoleAPICalled",
    "Runtime.exceptionThrown",
];
/// Most events that are kept. A page with more is not listened to any longer, and calls fail.
const EVENTS_MAX: usize = 100_000;

/// A connection. Calls may come from any thread.
#[derive(Debug)]
pub(super) struct Pipe {
    input: Mutex<Input>,
    heard: Arc<Heard>,
}

#[derive(Debug)]
struct Input {
    stream: ChildStdin,
    calls: u64,
}

#[derive(Debug, Default)]
struct Heard {
    messages: Mutex<Messages>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Messages {
    answers: HashMap<u64, Value>,
    events: Vec<Value>,
    is_over: bool,
}

impl Heard {
    fn lock(&self) -> MutexGuard<'_, Messages> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pipe {
    /// Listens to `output` for as long as it is open.
    pub(super) fn new(input: ChildStdin, output: ChildStdout) -> Self {
        let heard = Arc::new(Heard::default());
        let listener = Arc::clone(&heard);
        // It ends with the browser, which closes its end.
        std::thread::spawn(move || listen(output, &listener));
        Self { input: Mutex::new(Input { stream: input, calls: 0 }), heard }
    }

    /// Calls a method, of the browser or of the page of a session.
    ///
    /// # Errors
    /// It is refused, or not answered within [`LIMIT`].
    pub(super) fn call(&self, session: Option<&str>, method: &str, params: Value) -> anyhow::Result<Value> {
        let number =
            self.send(session, method, params).with_context(|| format!("failed to call {method}"))?;
        let end = Instant::now() + LIMIT;
        let mut messages = self.heard.lock();
        loop {
            if let Some(mut answer) = messages.answers.remove(&number) {
                if let Some(error) = answer.get("error") {
                    bail!("{method}: {error}");
                }
                return Ok(answer["result"].take());
            }
            let left = end.saturating_duration_since(Instant::now());
            if messages.is_over || left.is_zero() {
                bail!("{method} is not answered");
            }
            messages =
                self.heard.changed.wait_timeout(messages, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The events of a session so far.
    pub(super) fn events(&self, session: &str) -> Vec<Value> {
        let messages = self.heard.lock();
        messages.events.iter().filter(|event| event["sessionId"] == session).cloned().collect()
    }

    fn send(&self, session: Option<&str>, method: &str, params: Value) -> anyhow::Result<u64> {
        let mut input = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        input.calls += 1;
        let number = input.calls;
        let mut message = json!({"id": number, "method": method});
        message["params"] = params;
        if let Some(session) = session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        input.stream.write_all(&bytes)?;
        Ok(number)
    }
}

fn listen(output: ChildStdout, heard: &Heard) {
    for message in BufReader::new(output).split(0) {
        let Ok(message) = message else { break };
        let Ok(message) = serde_json::from_slice::<Value>(&message) else { break };
        let mut messages = heard.lock();
        if let Some(number) = message["id"].as_u64() {
            messages.answers.insert(number, message);
        } else if message["method"].as_str().is_some_and(|method| KEPT.contains(&method)) {
            messages.events.push(message);
            if messages.events.len() > EVENTS_MAX {
                break;
            }
        }
        heard.changed.notify_all();
    }
    heard.lock().is_over = true;
    heard.changed.notify_all();
}

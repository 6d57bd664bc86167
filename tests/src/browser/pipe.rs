//! The two pipes to a browser, for calls, their responses, and events. A message is JSON, terminated by a zero byte.
//! This module knows only those events of the protocol that it records, and none of the methods.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{ChildStdin, ChildStdout};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

/// The time limit for a call to the browser, and for waiting for a condition in a page, on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(60);
/// The events that are recorded.
const RECORDED_EVENTS: [&str; 5] = [
    "Log.entryAdded",
    "Network.requestWillBeSent",
    "Network.webSocketCreated",
    "Runtime.consoleAPICalled",
    "Runtime.exceptionThrown",
];
/// The maximum number of recorded events. If exceeded, the connection is closed, and calls fail.
const EVENTS_MAX: usize = 100_000;

/// A connection to a browser, for calls from any thread.
#[derive(Debug)]
pub(super) struct Pipe {
    input: Mutex<Input>,
    inbox: Arc<Inbox>,
}

#[derive(Debug)]
struct Input {
    stream: ChildStdin,
    calls: u64,
}

#[derive(Debug, Default)]
struct Inbox {
    messages: Mutex<Messages>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Messages {
    answers: HashMap<u64, Value>,
    events: Vec<Value>,
    is_over: bool,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Messages> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pipe {
    /// Creates a connection and receives messages from `output` until it is closed.
    pub(super) fn new(input: ChildStdin, output: ChildStdout) -> Self {
        let inbox = Arc::new(Inbox::default());
        let listener = Arc::clone(&inbox);
        // The thread ends when the browser exits and thereby closes its end of the pipe.
        std::thread::spawn(move || listen(output, &listener));
        Self { input: Mutex::new(Input { stream: input, calls: 0 }), inbox }
    }

    /// Calls a method of the browser or, if `session` is given, of the page of that session.
    ///
    /// # Errors
    /// The call fails, or has no response within [`LIMIT`].
    pub(super) fn call(&self, session: Option<&str>, method: &str, params: Value) -> anyhow::Result<Value> {
        let number =
            self.send(session, method, params).with_context(|| format!("failed to call {method}"))?;
        let end = Instant::now() + LIMIT;
        let mut messages = self.inbox.lock();
        loop {
            if let Some(mut answer) = messages.answers.remove(&number) {
                if let Some(error) = answer.get("error") {
                    bail!("{method}: {error}");
                }
                return Ok(answer["result"].take());
            }
            let left = end.saturating_duration_since(Instant::now());
            if messages.is_over || left.is_zero() {
                bail!(
                    "no response to {method} within {LIMIT:?}, or the connection to the browser was closed"
                );
            }
            messages =
                self.inbox.changed.wait_timeout(messages, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The recorded events of a session.
    pub(super) fn events(&self, session: &str) -> Vec<Value> {
        let messages = self.inbox.lock();
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

fn listen(output: ChildStdout, inbox: &Inbox) {
    for message in BufReader::new(output).split(0) {
        let Ok(message) = message else { break };
        let Ok(message) = serde_json::from_slice::<Value>(&message) else { break };
        let mut messages = inbox.lock();
        if let Some(number) = message["id"].as_u64() {
            messages.answers.insert(number, message);
        } else if message["method"].as_str().is_some_and(|method| RECORDED_EVENTS.contains(&method)) {
            messages.events.push(message);
            if messages.events.len() > EVENTS_MAX {
                break;
            }
        }
        inbox.changed.notify_all();
    }
    inbox.lock().is_over = true;
    inbox.changed.notify_all();
}

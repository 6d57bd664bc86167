//! Forwards server-sent events, and adds an error event if the replica fails during a stream.
//!
//! An incomplete event of up to [`EVENT_BYTES_MAX`] bytes is held back, so that an error event can follow a whole event
//! at any time. Larger events are forwarded in parts. Only the usage and the sequence numbers in events are parsed, and
//! the usage is removed if only the router requested it. Everything else is forwarded unchanged.

use bytes::{Bytes, BytesMut};
use memchr::memmem;
use serde::Serialize;

use super::metering::without_usage;
use super::usage::{Usage, UsageScanner, usage};
use crate::endpoint::Endpoint;
use crate::error::ErrorObject;

/// Size of a server-sent event that the router buffers until it is complete.
///
/// If exceeded: the event is forwarded in parts.
const EVENT_BYTES_MAX: usize = 256 * 1024;

/// Processes the events of one stream.
#[derive(Debug)]
pub(super) struct Events {
    endpoint: Endpoint,
    /// The beginning of an event that is not complete.
    held: BytesMut,
    line: Line,
    /// Whether only a part of the last event has been forwarded.
    is_within_event: bool,
    /// The number of events so far, counted by their lines of data.
    pub(super) count: u64,
    /// The last usage that the replica reported.
    pub(super) usage: Option<Usage>,
    /// Whether to remove the usage, because the client did not request it.
    hides_usage: bool,
    /// The last forwarded `sequence_number`.
    sequence_number: Option<u64>,
}

/// The part of the current line that has been forwarded. Only large events are forwarded in parts that end within a
/// line.
#[derive(Debug)]
enum Line {
    /// No part of the line.
    Start,
    /// The beginning of a line of data.
    Data(UsageScanner),
    /// The beginning of any other line.
    Other,
}

impl Events {
    pub(super) fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            held: BytesMut::new(),
            line: Line::Start,
            is_within_event: false,
            count: 0,
            usage: None,
            hides_usage: false,
            sequence_number: None,
        }
    }

    /// Creates the state of a stream whose usage only the router requested.
    pub(super) fn hiding_usage(endpoint: Endpoint) -> Self {
        Self { hides_usage: true, ..Self::new(endpoint) }
    }

    /// Appends `bytes` to the bytes that were held back, and returns the whole events in them, or the part of an event
    /// that is too long to be held back. The result is empty if there is nothing to forward yet.
    pub(super) fn forward(&mut self, bytes: Bytes) -> Bytes {
        // Fast path: most pieces consist of whole events.
        let forwarded = if self.held.is_empty() && ends_event(&bytes) {
            bytes
        } else {
            self.held.extend_from_slice(&bytes);
            match last_end(&self.held) {
                Some(end) => self.held.split_to(end).freeze(),
                None if self.held.len() > EVENT_BYTES_MAX => self.held.split().freeze(),
                None => return Bytes::new(),
            }
        };
        self.read_lines(&forwarded);
        self.is_within_event = !forwarded.is_empty() && !ends_event(&forwarded);
        if self.endpoint == Endpoint::Responses {
            self.track_sequence_number(&forwarded);
        }
        if self.hides_usage { without_usage(forwarded) } else { forwarded }
    }

    /// Counts the events by their lines of data, and reads the usage in them. Only lines that begin with `data:` count,
    /// because the text within an event may contain `data:` too.
    fn read_lines(&mut self, forwarded: &[u8]) {
        let mut rest = forwarded;
        while !rest.is_empty() {
            let line_end = memchr::memchr(b'\n', rest);
            let (line, after) = rest.split_at(line_end.map_or(rest.len(), |end| end + 1));
            rest = after;
            let is_complete = line_end.is_some();
            match &mut self.line {
                Line::Start => match line.strip_prefix(b"data:") {
                    Some(data) => {
                        self.count += 1;
                        if is_complete {
                            self.usage = usage(data).or(self.usage);
                        } else {
                            let mut scanner = UsageScanner::default();
                            scanner.scan(data);
                            self.line = Line::Data(scanner);
                        }
                    }
                    None if is_complete => {}
                    None => self.line = Line::Other,
                },
                Line::Data(scanner) => {
                    scanner.scan(line);
                    if is_complete {
                        self.usage = scanner.usage().or(self.usage);
                        self.line = Line::Start;
                    }
                }
                Line::Other if is_complete => self.line = Line::Start,
                Line::Other => {}
            }
        }
    }

    /// The estimated number of events with tokens. The estimate assumes that three events, at the beginning and the end
    /// of an answer, have none.
    pub(super) fn token_events(&self) -> u32 {
        u32::try_from(self.count).unwrap_or(u32::MAX).saturating_sub(3)
    }

    /// Removes and returns the bytes that are held back. Called when the stream ends.
    pub(super) fn take_held_bytes(&mut self) -> Bytes {
        self.held.split().freeze()
    }

    /// The events that end a stream after its replica has failed. If only a part of the last event has been forwarded,
    /// a blank line ends that event first, so that the client can parse the error.
    pub(super) fn error_events(&self, message: &str) -> Bytes {
        const CODE: &str = "replica_failed";
        let error = ErrorObject { message, r#type: "server_error", param: None, code: Some(CODE) };
        let mut event = Vec::new();
        if self.is_within_event {
            event.extend_from_slice(b"\n\n");
        }
        let written = if self.endpoint == Endpoint::Responses {
            event.extend_from_slice(b"event: error\ndata: ");
            let sequence_number = self.sequence_number.map_or(0, |number| number.saturating_add(1));
            let body =
                ResponsesError { r#type: "error", code: CODE, message, param: None, sequence_number, error };
            serde_json::to_writer(&mut event, &body)
        } else {
            event.extend_from_slice(b"data: ");
            serde_json::to_writer(&mut event, &ChatError { error })
        };
        written.expect("invariant: an error is JSON");
        event.extend_from_slice(b"\n\n");
        if self.endpoint != Endpoint::Responses {
            event.extend_from_slice(b"data: [DONE]\n\n");
        }
        event.into()
    }

    fn track_sequence_number(&mut self, events: &[u8]) {
        const KEY: &[u8] = b"\"sequence_number\":";
        if let Some(at) = memmem::rfind(events, KEY) {
            self.sequence_number = super::usage::number(&events[at + KEY.len()..]);
        }
    }
}

#[derive(Serialize)]
struct ChatError<'a> {
    error: ErrorObject<'a>,
}

/// OpenAI's error event, with the additional error object that makes OpenAI's clients raise an exception.
#[derive(Serialize)]
struct ResponsesError<'a> {
    r#type: &'a str,
    code: &'a str,
    message: &'a str,
    param: Option<&'a str>,
    sequence_number: u64,
    error: ErrorObject<'a>,
}

fn ends_event(bytes: &[u8]) -> bool {
    bytes.ends_with(b"\n\n") || bytes.ends_with(b"\r\n\r\n")
}

/// The position after the last complete event.
fn last_end(bytes: &[u8]) -> Option<usize> {
    let after_lf = memmem::rfind(bytes, b"\n\n").map(|at| at + 2);
    let after_crlf = memmem::rfind(bytes, b"\r\n\r\n").map(|at| at + 4);
    after_lf.max(after_crlf)
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    #[test]
    fn only_whole_events_are_passed_on_however_they_are_split() {
        let text = b"data: {\"a\":1}\n\n: comment\n\nevent: x\ndata: {\"b\":\"\\n\"}\r\n\r\ndata: [DONE]\n\n";
        for first in 0..text.len() {
            for second in first..text.len() {
                let mut events = Events::new(Endpoint::Chat);
                let mut forwarded = Vec::new();
                for piece in [&text[..first], &text[first..second], &text[second..]] {
                    forwarded.extend_from_slice(&events.forward(Bytes::copy_from_slice(piece)));
                    assert!(forwarded.is_empty() || ends_event(&forwarded));
                }
                assert_eq!(forwarded, text);
                assert_eq!(events.count, 3);
                assert!(events.take_held_bytes().is_empty());
            }
        }
    }

    #[test]
    fn an_error_event_follows_a_part_of_a_large_event() {
        let mut events = Events::new(Endpoint::Chat);
        let part = [b"data: {\"a\":\"".to_vec(), vec![b'a'; EVENT_BYTES_MAX]].concat();
        assert_eq!(events.forward(part.clone().into()), part);
        assert!(events.error_events("it died").starts_with(b"\n\ndata: {\"error\":"));
        events.forward(Bytes::from_static(b"\"}\n\n"));
        assert!(events.error_events("it died").starts_with(b"data: {\"error\":"));
    }

    /// All bytes of random input are forwarded, each forwarded piece ends with a whole event, and an error event can
    /// follow.
    #[test]
    fn random_bytes_are_passed_on_unchanged_and_an_error_event_can_follow() {
        let seed = 14;
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let parts: [&[u8]; 9] = [
            b"data: {",
            b"\n",
            b"\r",
            b"\n\n",
            b"\r\n\r\n",
            b"event: error",
            b"\"sequence_number\":9",
            b"\0\xff",
            b"}",
        ];
        for round in 0..20_000 {
            let endpoint = if round % 2 == 0 { Endpoint::Chat } else { Endpoint::Responses };
            let mut events = Events::new(endpoint);
            let (mut given, mut forwarded) = (Vec::new(), Vec::new());
            for _ in 0..rng.random_range(0..8) {
                let piece: Vec<u8> = (0..rng.random_range(1..4))
                    .flat_map(|_| parts[rng.random_range(0..parts.len())])
                    .copied()
                    .collect();
                given.extend_from_slice(&piece);
                let now = events.forward(piece.into());
                assert!(now.is_empty() || ends_event(&now), "{now:?}");
                forwarded.extend_from_slice(&now);
            }
            assert!(given.starts_with(&forwarded));
            let broken = String::from_utf8(events.error_events("it died").to_vec()).unwrap();
            assert!(broken.ends_with("\n\n") && broken.contains("\"code\":\"replica_failed\""), "{broken}");
            forwarded.extend_from_slice(&events.take_held_bytes());
            assert_eq!(forwarded, given);
        }
    }

    /// However a stream is split, a client that did not request the usage receives the stream without it.
    #[test]
    fn a_random_stream_without_its_usage_equals_the_stream_that_the_client_requested() {
        let seed = 68;
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let chunks = [
            r#""choices":[{"delta":{"content":"\"usage\":null,"}}]"#,
            r#""choices":[{"delta":{"tool_calls":[{"usage":{"a":1}}]}}],"id":"x""#,
            r#""choices":[{"text":"\n\ndata: {}"}] , "usages":1"#,
        ];
        for _ in 0..5_000 {
            let (mut given, mut expected) = (String::new(), String::new());
            let end = ["\n\n", "\r\n\r\n"][rng.random_range(0..2)];
            for _ in 0..rng.random_range(0..4) {
                let chunk = chunks[rng.random_range(0..chunks.len())];
                let with = if rng.random() {
                    format!(r#"{chunk},"usage":null"#)
                } else {
                    format!(r#""usage": {{"prompt_tokens":1,"completion_tokens":1}},{chunk}"#)
                };
                given += &format!("data: {{{with}}}{end}");
                expected += &format!("data: {{{chunk}}}{end}");
            }
            given += &format!(
                r#"data: {{"choices":[],"usage":{{"prompt_tokens":7,"completion_tokens":3}}}}{end}"#
            );
            given += "data: [DONE]\n\n";
            expected += "data: [DONE]\n\n";
            let mut events = Events::hiding_usage(Endpoint::Chat);
            let mut forwarded = Vec::new();
            let mut rest = given.as_bytes();
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(rng.random_range(1..=rest.len()));
                forwarded.extend_from_slice(&events.forward(Bytes::copy_from_slice(piece)));
                rest = after;
            }
            forwarded.extend_from_slice(&events.take_held_bytes());
            assert_eq!(String::from_utf8(forwarded).unwrap(), expected);
            assert_eq!(events.usage.map(Usage::total), Some(10));
        }
    }

    #[test]
    fn only_lines_of_data_count_as_events() {
        let mut events = Events::new(Endpoint::Chat);
        events.forward(Bytes::from_static(b"event: data:\ndata: \"data: data:\"\n\ndata: x\n\n"));
        assert_eq!(events.count, 2);
        // The second part of a large event begins within a line.
        events.forward(Bytes::from(format!("data: {}", "x".repeat(EVENT_BYTES_MAX))));
        events.forward(Bytes::from_static(b"data: x\n\ndata: y\n\n"));
        assert_eq!(events.count, 4);
    }

    #[test]
    fn the_usage_in_an_event_that_is_forwarded_in_parts_is_read() {
        let text = "x".repeat(2 * EVENT_BYTES_MAX);
        let event = format!(
            "event: response.completed\ndata: {{\"response\":{{\"text\":\"{text}\",\
             \"usage\":{{\"input_tokens\":7,\"output_tokens\":3}}}}}}\n\n"
        );
        let mut events = Events::new(Endpoint::Responses);
        let pieces = event.as_bytes().chunks(EVENT_BYTES_MAX / 3);
        let forwarded: Vec<usize> =
            pieces.map(|piece| events.forward(Bytes::copy_from_slice(piece)).len()).collect();
        assert!(forwarded.iter().filter(|&&bytes| bytes > 0).count() > 1, "{forwarded:?}");
        assert_eq!(forwarded.iter().sum::<usize>(), event.len());
        assert_eq!((events.count, events.usage.map(Usage::total)), (1, Some(10)));
    }

    #[test]
    fn an_endless_event_is_passed_on_in_parts() {
        let mut events = Events::new(Endpoint::Chat);
        let mut forwarded = 0;
        for _ in 0..100 {
            forwarded += events.forward(Bytes::from(vec![b'x'; EVENT_BYTES_MAX / 10])).len();
            assert!(events.held.len() <= EVENT_BYTES_MAX);
        }
        assert_eq!(forwarded + events.take_held_bytes().len(), 100 * (EVENT_BYTES_MAX / 10));
    }

    #[test]
    fn a_broken_stream_ends_with_the_error_of_its_api() {
        let chat = Events::new(Endpoint::Chat).error_events("it \"died\"");
        let chat = std::str::from_utf8(&chat).unwrap();
        assert!(
            chat.starts_with(r#"data: {"error":{"message":"it \"died\"","type":"server_error""#),
            "{chat}"
        );
        assert!(chat.ends_with("}\n\ndata: [DONE]\n\n"), "{chat}");
        let mut events = Events::new(Endpoint::Responses);
        events.forward(Bytes::from_static(b"data: {\"sequence_number\": 41, \"x\":1}\n\n"));
        let responses = events.error_events("m");
        let responses = std::str::from_utf8(&responses).unwrap();
        assert!(responses.starts_with("event: error\ndata: {\"type\":\"error\""), "{responses}");
        assert!(responses.contains("\"sequence_number\":42") && !responses.contains("[DONE]"), "{responses}");
        // An answer can repeat parts of the request, which can contain any number.
        events.forward(Bytes::from(format!("data: {{\"sequence_number\":{}}}\n\n", u64::MAX)));
        let responses = events.error_events("m");
        assert!(memmem::find(&responses, u64::MAX.to_string().as_bytes()).is_some(), "{responses:?}");
    }
}

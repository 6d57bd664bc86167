//! Reads the fields that routing needs from a request body in one pass, without parsing nested values. The fields
//! borrow from the body; only strings with escape sequences are copied. The replica validates the body; this module
//! only requires that the body is an object and that its members can be separated.

use std::borrow::Cow;

use memchr::memchr2;

use crate::endpoint::Endpoint;

/// The fields of a body that routing uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Fields<'a> {
    /// The value of `model`, if it is a string.
    pub(crate) model: Option<Cow<'a, str>>,
    /// The raw value of `messages`, `prompt` or `input`, without its closing bracket or quotation mark. In a growing
    /// conversation, each value therefore begins with the previous one.
    pub(crate) prompt: &'a [u8],
    /// The raw value of `tools`, which chat templates insert before the messages.
    pub(crate) tools: &'a [u8],
    /// The raw value of `functions`, the deprecated form of `tools`.
    pub(crate) functions: &'a [u8],
    /// The raw value of `instructions`, which precede the conversation of a response.
    pub(crate) instructions: &'a [u8],
    /// The raw value of `documents`, which chat templates insert before the messages.
    pub(crate) documents: &'a [u8],
    /// The raw value of `suffix`, the text that follows a completion.
    pub(crate) suffix: &'a [u8],
    /// The value of `max_tokens`.
    max_tokens: Option<u32>,
    /// The value of `max_completion_tokens` or `max_output_tokens`.
    max_completion_tokens: Option<u32>,
    /// The value of `n`, if it is a non-negative integer.
    pub(crate) choices: Option<u32>,
    /// The value of `best_of`, which is the number of sequences to generate and choose from.
    pub(crate) best_of: Option<u32>,
    /// Whether the value of `stream` is true.
    pub(crate) is_stream: bool,
    /// The raw value of `user` without quotation marks, if it is a string that is not empty.
    pub(crate) user: Option<&'a [u8]>,
    /// The raw value of `cache_salt`. Prompts with different salts share no cached blocks.
    pub(crate) cache_salt: &'a [u8],
    /// The value of `previous_response_id`, if it is a string.
    pub(crate) previous_response_id: Option<Cow<'a, str>>,
    /// The raw value of `conversation` unless it is null: an ID, or an object with an ID.
    pub(crate) conversation: Option<&'a [u8]>,
    /// The value of `store`, if it is a boolean.
    pub(crate) store: Option<bool>,
    /// The raw value of `stream_options`.
    pub(crate) stream_options: Option<&'a [u8]>,
}

/// Length of a model name in an error message, in characters.
///
/// If exceeded: the name is truncated.
pub(crate) const MODEL_SHOWN_MAX: usize = 256;

/// The error for a body that is not a JSON object, or is truncated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the body is not a JSON object (invalid at byte {0})")]
pub(crate) struct MalformedBody(pub(crate) usize);

/// Reads the fields of a request to `endpoint`. If a member occurs more than once, the last value counts. The prompt,
/// the text that templates insert into it, and the limit on generated tokens are read only from members that the
/// endpoint uses. Otherwise, a member that the replica ignores could override one that it reads.
///
/// # Errors
/// The top level is not a valid object.
pub(crate) fn read(body: &[u8], endpoint: Endpoint) -> Result<Fields<'_>, MalformedBody> {
    let mut fields = Fields::default();
    members(body, |name, value| {
        // JSON allows escape sequences in names, and the replica decodes them.
        if memchr::memchr(b'\\', name).is_none() {
            fields.member(endpoint, name, value);
        } else if let Ok(decoded) = serde_json::from_slice::<String>(&[b"\"", name, b"\""].concat()) {
            fields.member(endpoint, decoded.as_bytes(), value);
        }
    })?;
    Ok(fields)
}

/// Calls `visit` with the raw name, without quotation marks, and the raw value of each member of a JSON object.
///
/// # Errors
/// The top level is not a valid object. `visit` was called for the members before the error.
pub(super) fn members<'a>(
    body: &'a [u8],
    mut visit: impl FnMut(&'a [u8], &'a [u8]),
) -> Result<(), MalformedBody> {
    let mut scanner = Scanner { body, at: 0 };
    scanner.skip_blanks();
    scanner.expect(b'{')?;
    scanner.skip_blanks();
    if scanner.peek() == Some(b'}') {
        scanner.at += 1;
    } else {
        loop {
            scanner.skip_blanks();
            let name = scanner.string()?;
            scanner.skip_blanks();
            scanner.expect(b':')?;
            scanner.skip_blanks();
            let value = scanner.value()?;
            visit(name, value);
            scanner.skip_blanks();
            match scanner.next()? {
                b',' => {}
                b'}' => break,
                _ => return Err(MalformedBody(scanner.at - 1)),
            }
        }
    }
    scanner.skip_blanks();
    if scanner.at == body.len() { Ok(()) } else { Err(MalformedBody(scanner.at)) }
}

impl<'a> Fields<'a> {
    /// The limit on the number of generated tokens.
    pub(crate) fn output_tokens_max(&self) -> Option<u32> {
        // The newer name of the parameter takes precedence.
        self.max_completion_tokens.or(self.max_tokens)
    }

    fn member(&mut self, endpoint: Endpoint, name: &[u8], value: &'a [u8]) {
        // Read all members for `Endpoint::Other`, because the endpoints in this group have different parameters. Most
        // of these endpoints are provided only by servers other than ovfleet's.
        let is_for = |endpoints: &[Endpoint]| endpoint == Endpoint::Other || endpoints.contains(&endpoint);
        match name {
            b"model" => self.model = text(value),
            b"messages" if is_for(&[Endpoint::Chat]) => self.prompt = without_end(value),
            b"prompt" if is_for(&[Endpoint::Completions]) => self.prompt = without_end(value),
            b"input" if is_for(&[Endpoint::Responses]) => self.prompt = without_end(value),
            b"tools" if is_for(&[Endpoint::Chat, Endpoint::Responses]) => self.tools = value,
            b"functions" if is_for(&[Endpoint::Chat]) => self.functions = value,
            b"instructions" if is_for(&[Endpoint::Responses]) => self.instructions = value,
            b"documents" if is_for(&[Endpoint::Chat, Endpoint::Responses]) => self.documents = value,
            b"suffix" if is_for(&[Endpoint::Completions]) => self.suffix = value,
            b"max_tokens" if is_for(&[Endpoint::Chat, Endpoint::Completions]) => {
                self.max_tokens = number(value);
            }
            b"max_completion_tokens" if is_for(&[Endpoint::Chat, Endpoint::Completions]) => {
                self.max_completion_tokens = number(value);
            }
            b"max_output_tokens" if is_for(&[Endpoint::Responses]) => {
                self.max_completion_tokens = number(value);
            }
            b"n" => self.choices = number(value),
            b"best_of" => self.best_of = number(value),
            b"stream" => self.is_stream = value == b"true",
            b"previous_response_id" => self.previous_response_id = text(value),
            b"cache_salt" => self.cache_salt = value,
            b"conversation" => self.conversation = (value != b"null").then_some(value),
            b"store" => {
                self.store = match value {
                    b"true" => Some(true),
                    b"false" => Some(false),
                    _ => None,
                }
            }
            b"stream_options" => self.stream_options = Some(value),
            b"user" => self.user = (value.len() > 2 && value[0] == b'"').then(|| &value[1..value.len() - 1]),
            _ => {}
        }
    }
}

/// A raw value without its last byte, which ends an array or a string.
fn without_end(value: &[u8]) -> &[u8] {
    &value[..value.len() - 1]
}

/// The text of a JSON string, if `value` is one.
pub(super) fn text(value: &[u8]) -> Option<Cow<'_, str>> {
    let inner = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    if memchr::memchr(b'\\', inner).is_some() {
        return serde_json::from_slice(value).ok().map(Cow::Owned);
    }
    std::str::from_utf8(inner).ok().map(Cow::Borrowed)
}

fn number(value: &[u8]) -> Option<u32> {
    std::str::from_utf8(value).ok()?.parse().ok()
}

/// Scans the bytes of a body.
struct Scanner<'a> {
    body: &'a [u8],
    at: usize,
}

impl<'a> Scanner<'a> {
    fn peek(&self) -> Option<u8> {
        self.body.get(self.at).copied()
    }

    fn next(&mut self) -> Result<u8, MalformedBody> {
        let byte = self.peek().ok_or(MalformedBody(self.at))?;
        self.at += 1;
        Ok(byte)
    }

    fn expect(&mut self, expected: u8) -> Result<(), MalformedBody> {
        if self.peek() != Some(expected) {
            return Err(MalformedBody(self.at));
        }
        self.at += 1;
        Ok(())
    }

    fn skip_blanks(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
    }

    /// The raw content of a string.
    fn string(&mut self) -> Result<&'a [u8], MalformedBody> {
        self.expect(b'"')?;
        let start = self.at;
        loop {
            let rest = &self.body[self.at..];
            let offset = memchr2(b'"', b'\\', rest).ok_or(MalformedBody(self.body.len()))?;
            self.at += offset;
            if self.body[self.at] == b'"' {
                self.at += 1;
                return Ok(&self.body[start..self.at - 1]);
            }
            // Skip the backslash and the escaped character.
            self.at += 2;
            if self.at > self.body.len() {
                return Err(MalformedBody(self.body.len()));
            }
        }
    }

    /// Reads a raw value of any type. The value is never empty.
    fn value(&mut self) -> Result<&'a [u8], MalformedBody> {
        let start = self.at;
        match self.peek() {
            Some(b'"') => {
                self.string()?;
            }
            Some(b'{' | b'[') => self.nested()?,
            _ => {
                while let Some(byte) = self.peek() {
                    if matches!(byte, b',' | b'}' | b']' | b' ' | b'\n' | b'\r' | b'\t') {
                        break;
                    }
                    self.at += 1;
                }
            }
        }
        if self.at == start { Err(MalformedBody(start)) } else { Ok(&self.body[start..self.at]) }
    }

    /// Skips an object or an array, including the bracket that closes it.
    fn nested(&mut self) -> Result<(), MalformedBody> {
        let mut depth = 0_usize;
        loop {
            match self.peek() {
                Some(b'"') => {
                    self.string()?;
                    continue;
                }
                Some(b'{' | b'[') => depth += 1,
                Some(b'}' | b']') => depth -= 1,
                Some(_) => {}
                None => return Err(MalformedBody(self.at)),
            }
            self.at += 1;
            if depth == 0 {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    #[test]
    fn reads_the_fields_of_a_chat_and_nothing_within_its_messages() {
        let body = br#" {"messages":[{"role":"user","content":"\"model\":\"x\" }]"}], "model" : "a\/b",
            "max_completion_tokens":9,"max_tokens":7,"n":2,"best_of":5,"stream":true,"user":"u1","tools":[{}]} "#;
        let fields = read(body, Endpoint::Chat).unwrap();
        assert_eq!(fields.model.as_deref(), Some("a/b"));
        assert_eq!(fields.prompt, br#"[{"role":"user","content":"\"model\":\"x\" }]"}"#);
        assert_eq!((fields.output_tokens_max(), fields.choices, fields.is_stream), (Some(9), Some(2), true));
        assert_eq!(fields.best_of, Some(5));
        assert_eq!((fields.user, fields.tools), (Some(&b"u1"[..]), &b"[{}]"[..]));
    }

    /// If the router did not decode these names, it would miss fields that the replica reads.
    #[test]
    fn names_with_escape_sequences_are_read() {
        let body = br#"{"\u006dodel":"m","str\u0065am":true,"m\u0065ssages":["x"],"store":false,"\ud800":1}"#;
        let fields = read(body, Endpoint::Chat).unwrap();
        assert_eq!((fields.model.as_deref(), fields.is_stream), (Some("m"), true));
        assert_eq!((fields.prompt, fields.store), (&b"[\"x\""[..], Some(false)));
    }

    #[test]
    fn members_that_the_endpoint_ignores_hide_nothing() {
        let body =
            br#"{"messages":["a"],"prompt":"b","input":"c","tools":[1],"instructions":"d","suffix":"e",
            "max_tokens":7,"max_output_tokens":1}"#;
        let of = |endpoint| {
            let fields = read(body, endpoint).unwrap();
            (fields.prompt, fields.tools, fields.instructions, fields.suffix, fields.output_tokens_max())
        };
        let (none, tools) = (&b""[..], &b"[1]"[..]);
        assert_eq!(of(Endpoint::Chat), (&b"[\"a\""[..], tools, none, none, Some(7)));
        assert_eq!(of(Endpoint::Completions), (&b"\"b"[..], none, none, &b"\"e\""[..], Some(7)));
        assert_eq!(of(Endpoint::Responses), (&b"\"c"[..], tools, &b"\"d\""[..], none, Some(1)));
        assert_eq!(of(Endpoint::Conversations), (none, none, none, none, None));
        let chat = read(br#"{"messages":["a"],"input":"a","max_output_tokens":1}"#, Endpoint::Chat).unwrap();
        assert_eq!((chat.prompt, chat.output_tokens_max()), (&b"[\"a\""[..], None));
        let embeddings = read(br#"{"input":"a"}"#, Endpoint::Other).unwrap();
        assert_eq!(embeddings.prompt, b"\"a");
    }

    #[test]
    fn the_last_value_of_a_repeated_member_counts() {
        let limit = |body: &str| read(body.as_bytes(), Endpoint::Chat).unwrap().output_tokens_max();
        assert_eq!(limit(r#"{"max_tokens":1,"max_tokens":900}"#), Some(900));
        assert_eq!(
            limit(r#"{"max_completion_tokens":1,"max_completion_tokens":null,"max_tokens":900}"#),
            Some(900)
        );
    }

    #[test]
    fn a_longer_conversation_begins_with_the_shorter_one() {
        let chat = |body: &'static str| read(body.as_bytes(), Endpoint::Chat).unwrap();
        let short = chat(r#"{"messages":[{"role":"user","content":"a"}]}"#);
        let long = chat(r#"{"messages":[{"role":"user","content":"a"},{"role":"x"}],"n":1}"#);
        assert!(long.prompt.starts_with(short.prompt));
        let text = read(br#"{"prompt":"once upon"}"#, Endpoint::Completions).unwrap();
        assert_eq!(text.prompt, b"\"once upon");
    }

    #[test]
    fn invalid_objects_are_rejected_and_invalid_values_are_left_to_the_replica() {
        for wrong in
            ["", "[]", "{", "{\"a\"}", "{\"a\":}", "{\"a\":1,}", "{\"a\":\"\\", "{} {}", "{\"a\":[}", "nul"]
        {
            // Nested values are not validated.
            assert!(read(wrong.as_bytes(), Endpoint::Chat).is_err() || wrong == "{\"a\":[}", "{wrong}");
        }
        assert_eq!(read(b"{}", Endpoint::Chat).unwrap(), Fields::default());
        let odd = br#"{"model":7,"n":-1,"max_tokens":"x","stream":"true"}"#;
        let odd = read(odd, Endpoint::Chat).unwrap();
        assert_eq!(odd, Fields::default());
    }

    /// The values of `model` and `stream` in random objects equal those that `serde_json` reads, and invalid objects
    /// cause no panic.
    #[test]
    fn agrees_with_serde_json_and_never_panics() {
        let seed = 9;
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let names = ["model", "messages", "prompt", "n", "stream", "user", "x\\\"y", "tools", "max_tokens"];
        let values = [
            "\"m\"",
            "\"a\\\\\"",
            "[1,{\"a\":\"}\"}]",
            "{\"b\":[\"]\"]}",
            "3",
            "true",
            "null",
            "-1.5e3",
            "\"\"",
        ];
        for _ in 0..20_000 {
            let members: Vec<String> = (0..rng.random_range(0..5))
                .map(|_| {
                    let name = names[rng.random_range(0..names.len())];
                    format!(
                        "{}\"{name}\" :{}",
                        [" ", "\n", ""][rng.random_range(0..3)],
                        values[rng.random_range(0..values.len())]
                    )
                })
                .collect();
            let mut body = format!("{{{}}}", members.join(",")).into_bytes();
            if rng.random_bool(0.5) && !body.is_empty() {
                let at = rng.random_range(0..body.len());
                match rng.random_range(0..3) {
                    0 => body.truncate(at),
                    1 => body[at] = rng.random(),
                    _ => body.insert(at, b"\"\\{}[],:"[rng.random_range(0..8)]),
                }
            }
            let fields = read(&body, Endpoint::Chat);
            if let Ok(serde_json::Value::Object(expected)) = serde_json::from_slice(&body) {
                let fields =
                    fields.unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&body)));
                assert_eq!(fields.model.as_deref(), expected.get("model").and_then(|model| model.as_str()));
                assert_eq!(fields.is_stream, expected.get("stream") == Some(&serde_json::Value::Bool(true)));
            }
        }
    }
}

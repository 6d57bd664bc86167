//! What routing needs of a request's body, found without building the body's tree: one pass over the bytes of
//! the top level, nested values and strings are stepped over. It decides nothing and copies nothing (but a
//! model's name with escapes in it). Whether the body makes sense is for the replica to say: here it only has
//! to be an object whose members can be told apart.

use std::borrow::Cow;

use memchr::memchr2;

/// The parts of a body that routing reads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fields<'a> {
    /// `model`, if it is a string.
    pub model: Option<Cow<'a, str>>,
    /// What the prompt is made of, as it stands in the body: the value of `messages`, `prompt` or `input`
    /// without the bracket or quote that ends it, so that a longer conversation begins with a shorter one.
    pub prompt: &'a [u8],
    /// The value of `tools`, which templates put before the messages.
    pub tools: &'a [u8],
    /// `max_completion_tokens`, `max_tokens` or `max_output_tokens`.
    pub output_tokens_max: Option<u32>,
    /// `n`, 1 if it is not there.
    pub choices: Option<u32>,
    /// `best_of`: so many are generated to choose from.
    pub best_of: Option<u32>,
    /// `stream` is true.
    pub is_stream: bool,
    /// `user`, as it stands in the body.
    pub user: Option<&'a [u8]>,
    /// The value of `cache_salt`: prompts with different salts share no cached blocks.
    pub cache_salt: &'a [u8],
    /// `previous_response_id`, if it is a string.
    pub previous_response_id: Option<Cow<'a, str>>,
    /// The value of `conversation`, `null` aside: a name, or an object that has one.
    pub conversation: Option<&'a [u8]>,
    /// `store`, if it is a Boolean.
    pub store: Option<bool>,
    /// `stream_options`, as it stands in the body.
    pub stream_options: Option<&'a [u8]>,
}

/// Length of a model name that an error message repeats, in characters.
///
/// Beyond it: the name is truncated.
pub const MODEL_SHOWN_MAX: usize = 256;

/// The body is no JSON object, or its end is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the body is no JSON object (from byte {0})")]
pub struct MalformedBody(pub usize);

/// Reads the fields of `body`. Of members that are there twice the last counts.
///
/// # Errors
/// The top level is not made as an object is.
pub fn read(body: &[u8]) -> Result<Fields<'_>, MalformedBody> {
    let mut fields = Fields::default();
    members(body, |name, value| {
        // JSON allows a name to be written with escapes, and the replica decodes it.
        if memchr::memchr(b'\\', name).is_none() {
            fields.member(name, value);
        } else if let Ok(decoded) = serde_json::from_slice::<String>(&[b"\"", name, b"\""].concat()) {
            fields.member(decoded.as_bytes(), value);
        }
    })?;
    Ok(fields)
}

/// Calls `visit` with the name, without its quotes, and the value of each member of a JSON object, as they stand in
/// `body`.
///
/// # Errors
/// The top level is not made as an object is; `visit` was called for the members before that place.
pub(super) fn members<'a>(
    body: &'a [u8],
    mut visit: impl FnMut(&'a [u8], &'a [u8]),
) -> Result<(), MalformedBody> {
    let mut scan = Scan { body, at: 0 };
    scan.blank();
    scan.expect(b'{')?;
    scan.blank();
    if scan.peek() == Some(b'}') {
        scan.at += 1;
    } else {
        loop {
            scan.blank();
            let name = scan.string()?;
            scan.blank();
            scan.expect(b':')?;
            scan.blank();
            let value = scan.value()?;
            visit(name, value);
            scan.blank();
            match scan.next()? {
                b',' => {}
                b'}' => break,
                _ => return Err(MalformedBody(scan.at - 1)),
            }
        }
    }
    scan.blank();
    if scan.at == body.len() { Ok(()) } else { Err(MalformedBody(scan.at)) }
}

impl<'a> Fields<'a> {
    fn member(&mut self, name: &[u8], value: &'a [u8]) {
        match name {
            b"model" => self.model = text(value),
            b"messages" | b"prompt" | b"input" => self.prompt = &value[..value.len() - 1],
            b"tools" => self.tools = value,
            b"max_completion_tokens" | b"max_output_tokens" => {
                self.output_tokens_max = number(value).or(self.output_tokens_max);
            }
            // The newer name counts where both are given.
            b"max_tokens" if self.output_tokens_max.is_none() => self.output_tokens_max = number(value),
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

/// A place in the body.
struct Scan<'a> {
    body: &'a [u8],
    at: usize,
}

impl<'a> Scan<'a> {
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

    fn blank(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
    }

    /// A string's inside, as it stands.
    fn string(&mut self) -> Result<&'a [u8], MalformedBody> {
        self.expect(b'"')?;
        let start = self.at;
        loop {
            let rest = &self.body[self.at..];
            let found = memchr2(b'"', b'\\', rest).ok_or(MalformedBody(self.body.len()))?;
            self.at += found;
            if self.body[self.at] == b'"' {
                self.at += 1;
                return Ok(&self.body[start..self.at - 1]);
            }
            // Whatever is escaped is stepped over with its backslash.
            self.at += 2;
            if self.at > self.body.len() {
                return Err(MalformedBody(self.body.len()));
            }
        }
    }

    /// Any value, as it stands; never empty.
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

    /// Over an object or an array, to behind the bracket that closes it.
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
    fn reads_what_routing_needs_of_a_chat_and_nothing_within_its_messages() {
        let body = br#" {"messages":[{"role":"user","content":"\"model\":\"x\" }]"}], "model" : "a\/b",
            "max_tokens":7,"max_completion_tokens":9,"n":2,"best_of":5,"stream":true,"user":"u1","tools":[{}]} "#;
        let fields = read(body).unwrap();
        assert_eq!(fields.model.as_deref(), Some("a/b"));
        assert_eq!(fields.prompt, br#"[{"role":"user","content":"\"model\":\"x\" }]"}"#);
        assert_eq!((fields.output_tokens_max, fields.choices, fields.is_stream), (Some(9), Some(2), true));
        assert_eq!(fields.best_of, Some(5));
        assert_eq!((fields.user, fields.tools), (Some(&b"u1"[..]), &b"[{}]"[..]));
    }

    /// Otherwise a client could hide from the router what the replica reads.
    #[test]
    fn names_that_are_written_with_escapes_are_read_too() {
        let body = br#"{"\u006dodel":"m","str\u0065am":true,"m\u0065ssages":["x"],"store":false,"\ud800":1}"#;
        let fields = read(body).unwrap();
        assert_eq!((fields.model.as_deref(), fields.is_stream), (Some("m"), true));
        assert_eq!((fields.prompt, fields.store), (&b"[\"x\""[..], Some(false)));
    }

    #[test]
    fn a_longer_conversation_begins_with_the_shorter_one() {
        let short = read(br#"{"messages":[{"role":"user","content":"a"}]}"#).unwrap();
        let long = read(br#"{"messages":[{"role":"user","content":"a"},{"role":"x"}],"n":1}"#).unwrap();
        assert!(long.prompt.starts_with(short.prompt));
        let text = read(br#"{"prompt":"once upon"}"#).unwrap();
        assert_eq!(text.prompt, b"\"once upon");
    }

    #[test]
    fn what_is_no_object_is_refused_and_what_is_odd_is_left_to_the_replica() {
        for wrong in
            ["", "[]", "{", "{\"a\"}", "{\"a\":}", "{\"a\":1,}", "{\"a\":\"\\", "{} {}", "{\"a\":[}", "nul"]
        {
            // An array closed by a brace is not looked into.
            assert!(read(wrong.as_bytes()).is_err() || wrong == "{\"a\":[}", "{wrong}");
        }
        assert_eq!(read(b"{}").unwrap(), Fields::default());
        let odd = read(br#"{"model":7,"n":-1,"max_tokens":"x","stream":"true"}"#).unwrap();
        assert_eq!(odd, Fields::default());
    }

    /// Any JSON object is read as `serde_json` reads it, and no bytes make it panic.
    #[test]
    fn agrees_with_a_real_parser_and_never_panics() {
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
            let ours = read(&body);
            if let Ok(serde_json::Value::Object(real)) = serde_json::from_slice(&body) {
                let ours = ours.unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&body)));
                assert_eq!(ours.model.as_deref(), real.get("model").and_then(|model| model.as_str()));
                assert_eq!(ours.is_stream, real.get("stream") == Some(&serde_json::Value::Bool(true)));
            }
        }
    }
}

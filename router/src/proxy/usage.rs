//! Reads the token usage that an answer reports. Only members of the answer itself count. A client could otherwise
//! forge the numbers that its quota depends on, because it controls the text of the answer and the parts of the request
//! that the answer repeats.

use std::sync::LazyLock;

use memchr::memchr2;
use memchr::memmem::Finder;
use serde::Deserialize;

use crate::served_model::ServedModel;

/// Size of the `usage` object in a response.
///
/// If exceeded: the router ignores the object, and charges its own estimate of the tokens.
const USAGE_BYTES_MAX: usize = 4096;

/// Number of bytes of a name that are stored. It exceeds the length of `response` by one, so that the stored part of a
/// longer name does not equal `response`.
const NAME_BYTES_MAX: usize = "response".len() + 1;

/// The name of the member with the usage.
static NAME: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\"usage\""));

/// The token usage of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Usage {
    /// The number of prompt tokens.
    #[serde(alias = "input_tokens", rename = "prompt_tokens")]
    pub(super) prompt: u32,
    /// The number of generated tokens, or `None` if nothing is generated, as with embeddings.
    #[serde(alias = "output_tokens", rename = "completion_tokens")]
    pub(super) completion: Option<u32>,
    /// The breakdown of the prompt tokens, if the answer reports it.
    #[serde(default, alias = "input_tokens_details", rename = "prompt_tokens_details")]
    details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
struct PromptDetails {
    image_tokens: Option<u32>,
}

impl Usage {
    /// Whether the prompt had images.
    fn has_images(self) -> bool {
        self.details.and_then(|details| details.image_tokens).is_some_and(|tokens| tokens > 0)
    }

    /// Improves the estimates for the next requests to the model. The prompt had `prompt_bytes` bytes, and the answer
    /// has `choices` sequences.
    pub(super) fn observe(self, served_model: &ServedModel, prompt_bytes: usize, choices: u32) {
        if !self.has_images() {
            served_model.observe_prompt(prompt_bytes, self.prompt);
        }
        if let Some(tokens) = self.completion {
            served_model.observe_output(tokens / choices.max(1));
        }
    }

    /// The total number of tokens.
    pub(super) fn total(self) -> u32 {
        self.prompt.saturating_add(self.completion.unwrap_or(0))
    }
}

/// Whether `bytes` may contain the usage. The check is cheaper than parsing the members.
pub(super) fn may_have_usage(bytes: &[u8]) -> bool {
    NAME.find(bytes).is_some()
}

/// The usage that a JSON answer reports, or that the response within an event of the Responses API reports.
pub(super) fn usage(json: &[u8]) -> Option<Usage> {
    if !may_have_usage(json) {
        return None;
    }
    let mut scanner = UsageScanner::default();
    scanner.scan(json);
    scanner.usage()
}

/// Reads the usage from the JSON of an answer or of an event, which may arrive in pieces. It stores nothing but the
/// usage and the beginning of a string.
#[derive(Debug, Default)]
pub(super) struct UsageScanner {
    /// The number of open brackets.
    depth: usize,
    string: StringState,
    /// The beginning of the last string, which is the name of a member if a colon follows.
    name: Vec<u8>,
    /// Whether the current member of the outermost object is `response`.
    is_in_response: bool,
    value: Option<UsageValue>,
    usage: Option<Usage>,
}

/// The beginning of the value of a `usage` member.
#[derive(Debug)]
struct UsageValue {
    /// The number of open brackets around the value.
    depth: usize,
    bytes: Vec<u8>,
}

/// Whether the next byte is part of a string.
#[derive(Clone, Copy, Debug, Default)]
enum StringState {
    #[default]
    Outside,
    Inside,
    /// The next byte follows a backslash.
    Escaped,
}

impl UsageScanner {
    /// Reads the next piece of the JSON.
    pub(super) fn scan(&mut self, piece: &[u8]) {
        let mut rest = piece;
        while let Some(&byte) = rest.first() {
            let is_within_value = self.value.is_some();
            let length = match self.string {
                StringState::Outside => {
                    self.read_outside_of_strings(byte);
                    1
                }
                StringState::Inside => self.read_string(rest),
                StringState::Escaped => {
                    self.string = StringState::Inside;
                    1
                }
            };
            let (read, after) = rest.split_at(length);
            rest = after;
            // The colon before the value and the byte after it are not part of the value.
            if is_within_value && let Some(value) = &mut self.value {
                value.bytes.extend_from_slice(read);
                if value.bytes.len() > USAGE_BYTES_MAX {
                    self.value = None;
                }
            }
        }
    }

    /// The last usage that was read completely.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Reads the rest of a string, up to its end or a backslash. Returns the number of bytes read.
    fn read_string(&mut self, rest: &[u8]) -> usize {
        let length = match memchr2(b'"', b'\\', rest) {
            Some(end) if rest[end] == b'"' => {
                self.string = StringState::Outside;
                end + 1
            }
            Some(backslash) => {
                self.string = StringState::Escaped;
                backslash + 1
            }
            None => rest.len(),
        };
        let room = NAME_BYTES_MAX - self.name.len();
        let text = rest[..length].strip_suffix(b"\"").unwrap_or(&rest[..length]);
        self.name.extend_from_slice(&text[..text.len().min(room)]);
        length
    }

    fn read_outside_of_strings(&mut self, byte: u8) {
        match byte {
            b'"' => {
                self.name.clear();
                self.string = StringState::Inside;
            }
            b'{' | b'[' => self.depth += 1,
            b':' => self.begin_member(),
            b',' => self.end_member(),
            b'}' | b']' => {
                self.end_member();
                self.depth = self.depth.saturating_sub(1);
            }
            _ => {}
        }
    }

    fn begin_member(&mut self) {
        if self.depth == 1 {
            self.is_in_response = self.name == b"response";
        }
        let is_of_answer = self.depth == 1 || self.depth == 2 && self.is_in_response;
        if is_of_answer && self.name == b"usage" {
            self.value = Some(UsageValue { depth: self.depth, bytes: Vec::new() });
        }
    }

    fn end_member(&mut self) {
        let depth = self.depth;
        if let Some(value) = self.value.take_if(|value| value.depth == depth) {
            self.usage = serde_json::from_slice(&value.bytes).ok().or(self.usage);
        }
    }
}

/// Parses the number at the beginning of `bytes`.
pub(super) fn number(bytes: &[u8]) -> Option<u64> {
    let bytes = bytes.trim_ascii_start();
    let end = bytes.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(bytes.len());
    std::str::from_utf8(&bytes[..end]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usage_of_both_apis_is_parsed_and_nothing_else_is() {
        let chat = br#"{"choices":[],"usage":{"prompt_tokens": 12,"completion_tokens":3,"total_tokens":15}}"#;
        let of_text = |prompt, completion| Some(Usage { prompt, completion, details: None });
        assert_eq!(usage(chat), of_text(12, Some(3)));
        let responses = br#"{"usage":{"input_tokens":1,"output_tokens":2}}"#;
        assert_eq!(usage(responses), of_text(1, Some(2)));
        let event =
            br#"{"type":"response.completed","response":{"usage":{"input_tokens":1,"output_tokens":2}}}"#;
        assert_eq!(usage(event), of_text(1, Some(2)));
        let embeddings = br#"{"data":[],"usage":{"prompt_tokens":8,"total_tokens":8}}"#;
        assert_eq!(usage(embeddings), of_text(8, None));
        for (details, has_images) in [
            ("null", false),
            (r#"{"cached_tokens":9}"#, false),
            (r#"{"cached_tokens":9,"image_tokens":0}"#, false),
            (r#"{"cached_tokens":9,"image_tokens":256}"#, true),
        ] {
            for (tokens, member) in
                [("prompt_tokens", "prompt_tokens_details"), ("input_tokens", "input_tokens_details")]
            {
                let answer = format!(r#"{{"usage":{{"{tokens}":300,"{member}":{details}}}}}"#);
                assert_eq!(usage(answer.as_bytes()).map(Usage::has_images), Some(has_images), "{answer}");
            }
        }
        for none in ["", "\"usage\"", "{\"usage\":null}", "{\"usage\":{\"prompt_tokens\":x}}"] {
            assert_eq!(usage(none.as_bytes()), None, "{none}");
        }
    }

    #[test]
    fn a_client_cannot_forge_its_usage() {
        let echoed = r#"{"usage":{"input_tokens":900,"output_tokens":2},
            "tools":[{"parameters":{"usage":{"input_tokens":0,"output_tokens":0}}}],"metadata":{"usage":"0"},
            "text":"\"usage\":{\"input_tokens\":0,\"output_tokens\":0}"}"#;
        assert_eq!(usage(echoed.as_bytes()).map(Usage::total), Some(902));
        let nested = r#"{"response":{"tools":[{"usage":{"input_tokens":0,"output_tokens":0}}]}}"#;
        assert_eq!(usage(nested.as_bytes()), None);
        let other = r#"{"metadata":{"usage":{"input_tokens":0,"output_tokens":0}}}"#;
        assert_eq!(usage(other.as_bytes()), None);
    }

    #[test]
    fn the_usage_of_an_answer_that_arrives_in_pieces_is_read() {
        let answer = br#"{"output":[{"text":"\\\"},\"usage\":{\"input_tokens\":0,\"output_tokens\":0}\\"}],
            "response":{"usage": {"input_tokens":900, "details":[{"a":"}"}],"output_tokens":2 } ,"us\\age":{}},
            "metadata":{"usage":{"input_tokens":0,"output_tokens":0}}}"#;
        for split in 0..=answer.len() {
            let mut scanner = UsageScanner::default();
            scanner.scan(&answer[..split]);
            scanner.scan(&answer[split..]);
            assert_eq!(scanner.usage().map(Usage::total), Some(902), "{split}");
        }
        let long = format!(
            r#"{{"usage":{{"input_tokens":1,"output_tokens":2,"x":"{}"}}}}"#,
            "x".repeat(USAGE_BYTES_MAX)
        );
        assert_eq!(usage(long.as_bytes()), None);
    }
}

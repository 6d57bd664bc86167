//! Reads the token usage that an answer reports. Only members of the answer itself count: the client, whose quota
//! depends on the numbers, controls the text of the answer and the parts of the request that it repeats.

use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;

use super::fields::members;
use crate::fleet::Fleet;

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
    /// The parts of the prompt, as far as the answer reports them.
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

    /// Improves the estimates for the next requests of the model with a prompt of `prompt_bytes` bytes and an answer of
    /// `choices` sequences.
    pub(super) fn observe(self, fleet: &Fleet, prompt_bytes: usize, choices: u32) {
        if !self.has_images() {
            fleet.observe_prompt(prompt_bytes, self.prompt);
        }
        if let Some(tokens) = self.completion {
            fleet.observe_output(tokens / choices.max(1));
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

/// The usage that a JSON answer reports, or the response within an event of the Responses API.
pub(super) fn usage(json: &[u8]) -> Option<Usage> {
    if !may_have_usage(json) {
        return None;
    }
    let (mut usage, mut response) = (None, None);
    members(json, |name, value| match name {
        b"usage" => usage = serde_json::from_slice(value).ok(),
        b"response" if value.starts_with(b"{") => response = Some(value),
        _ => {}
    })
    .ok()?;
    if usage.is_some() {
        return usage;
    }
    members(response?, |name, value| {
        if name == b"usage" {
            usage = serde_json::from_slice(value).ok();
        }
    })
    .ok()?;
    usage
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
    }
}

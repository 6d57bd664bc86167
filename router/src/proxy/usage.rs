//! The tokens that an answer says it has used, found without reading the rest of it.

use std::sync::LazyLock;

use memchr::memmem::{self, FinderRev};

/// What the object is called.
static NAME: LazyLock<FinderRev<'_>> = LazyLock::new(|| FinderRev::new(b"\"usage\""));

/// The tokens of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Usage {
    /// Of the prompt.
    pub(super) prompt: u32,
    /// Of all that was generated.
    pub(super) completion: u32,
}

/// The last `usage` object in `bytes`, if its numbers are there.
pub(super) fn usage(bytes: &[u8]) -> Option<Usage> {
    let at = NAME.rfind(bytes)?;
    let object = &bytes[at..];
    let find = |names: [&[u8]; 2]| {
        names.into_iter().find_map(|name| {
            let at = memmem::find(object, name)?;
            number(&object[at + name.len()..])
        })
    };
    let prompt = find([b"\"prompt_tokens\":", b"\"input_tokens\":"])?;
    let completion = find([b"\"completion_tokens\":", b"\"output_tokens\":"])?;
    Some(Usage { prompt: u32::try_from(prompt).ok()?, completion: u32::try_from(completion).ok()? })
}

/// The number at the beginning of `bytes`.
pub(super) fn number(bytes: &[u8]) -> Option<u64> {
    let bytes = bytes.trim_ascii_start();
    let end = bytes.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(bytes.len());
    std::str::from_utf8(&bytes[..end]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_usage_of_either_api_and_nothing_else() {
        let chat = br#"{"choices":[],"usage":{"prompt_tokens": 12,"completion_tokens":3,"total_tokens":15}}"#;
        assert_eq!(usage(chat), Some(Usage { prompt: 12, completion: 3 }));
        let responses = br#"{"usage":{"input_tokens":1,"output_tokens":2}}"#;
        assert_eq!(usage(responses), Some(Usage { prompt: 1, completion: 2 }));
        for none in ["", "\"usage\"", "{\"usage\":null}", "{\"usage\":{\"prompt_tokens\":x}}"] {
            assert_eq!(usage(none.as_bytes()), None, "{none}");
        }
    }
}

//! Parses the header of a message.

pub(super) const START: &str = "<|start|>";
pub(super) const CHANNEL: &str = "<|channel|>";
pub(super) const CONSTRAIN: &str = "<|constrain|>";

/// Largest number of words in a header: a role, a recipient, a channel and a content type, with some margin.
const WORDS_MAX: usize = 6;

/// The parts of a header.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header<'a> {
    pub(crate) channel: Option<&'a str>,
    /// The name of the called tool.
    pub(crate) recipient: Option<&'a str>,
}

impl<'a> Header<'a> {
    /// Parses a header. It begins with `<|start|>`, with the text after this marker or with `<|channel|>`, and ends
    /// before `<|message|>`. Returns `None` if `text` contains anything that is not allowed in a header.
    pub(crate) fn read(text: &'a str) -> Option<Self> {
        let words = text.split([' ', '\t', '<']).filter(|word| !word.is_empty()).map(|word| {
            let marker =
                [START, CHANNEL, CONSTRAIN].iter().find_map(|marker| word.strip_prefix(&marker[1..]));
            marker.unwrap_or(word)
        });
        let is_word =
            |word: &str| word.chars().all(|letter| letter.is_alphanumeric() || "_-.=:/".contains(letter));
        if words.clone().count() > WORDS_MAX || !words.clone().all(is_word) {
            return None;
        }
        let channel = text.split_once(CHANNEL).map(|(_, rest)| word(rest.trim_start()));
        let recipient = text
            .match_indices("to=")
            .find(|(at, _)| text[..*at].ends_with([' ', '>']) || *at == 0)
            .map(|(at, to)| word(&text[at + to.len()..]))
            .map(|name| name.strip_prefix("functions.").unwrap_or(name))
            .filter(|name| !name.is_empty() && *name != "assistant");
        Some(Self { channel: channel.filter(|channel| !channel.is_empty()), recipient })
    }
}

/// The word at the start of `text`.
fn word(text: &str) -> &str {
    text.split([' ', '\t', '<']).next().unwrap_or_default()
}

/// Whether the part of a header between `<|start|>assistant` and the next marker may begin with `text`. This part is
/// empty, or contains a recipient and optionally a content type.
pub(crate) fn may_begin_with(text: &str) -> bool {
    let mut words = text.split_ascii_whitespace();
    let Some(first) = words.next() else { return !text.contains('\n') };
    ("to=".starts_with(first) && words.next().is_none())
        || (first.starts_with("to=") && words.count() <= 1 && !text.contains('\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipient_is_found_before_and_after_the_channel() {
        for text in [
            "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json",
            "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json",
            " to=functions.f<|channel|>commentary json",
            "to=f<|channel|>commentary",
        ] {
            let header = Header { channel: Some("commentary"), recipient: Some("f") };
            assert_eq!(Header::read(text), Some(header), "{text}");
        }
    }

    #[test]
    fn missing_parts_of_a_header_are_none() {
        assert_eq!(Header::read("<|start|>assistant"), Some(Header { channel: None, recipient: None }));
        assert_eq!(
            Header::read("<|channel|>final"),
            Some(Header { channel: Some("final"), recipient: None })
        );
        let answer = "<|start|>functions.f to=assistant<|channel|>commentary";
        assert_eq!(Header::read(answer), Some(Header { channel: Some("commentary"), recipient: None }));
    }

    #[test]
    fn a_header_with_unexpected_text_is_rejected() {
        for text in
            ["<|channel|>final {}", "<|channel|>\u{1F600}", "<|channel|>a b c d e f g", "<|channel|>a|"]
        {
            assert_eq!(Header::read(text), None, "{text}");
        }
    }

    #[test]
    fn only_a_recipient_may_precede_the_first_marker() {
        for text in ["", " ", " t", "to=", " to=functions.f", "to=f code"] {
            assert!(may_begin_with(text), "{text:?}");
        }
        for text in ["x", "to x", "tom", "to=f in a text", "\n"] {
            assert!(!may_begin_with(text), "{text:?}");
        }
    }
}

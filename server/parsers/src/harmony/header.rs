//! What the header of a message says.

use super::{CHANNEL, CONSTRAIN, START};

/// Most words of a header: a role, a recipient, a channel and what the message is written in, and some to spare.
const WORDS_MAX: usize = 6;

/// A header.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header<'a> {
    pub(crate) channel: Option<&'a str>,
    /// The tool that is called.
    pub(crate) recipient: Option<&'a str>,
}

impl<'a> Header<'a> {
    /// Reads a header, from `<|start|>`, what follows it or `<|channel|>` up to `<|message|>`. None if it has
    /// what no header has.
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

/// The word that `text` begins with.
fn word(text: &str) -> &str {
    text.split([' ', '\t', '<']).next().unwrap_or_default()
}

/// Whether `text` may be a header, from after `<|start|>assistant`, before its first marker: nothing, or a
/// recipient and what the arguments are written in.
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
    fn a_recipient_is_found_on_either_side_of_the_channel() {
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
    fn what_a_header_does_not_say_is_none() {
        assert_eq!(Header::read("<|start|>assistant"), Some(Header { channel: None, recipient: None }));
        assert_eq!(
            Header::read("<|channel|>final"),
            Some(Header { channel: Some("final"), recipient: None })
        );
        let answer = "<|start|>functions.f to=assistant<|channel|>commentary";
        assert_eq!(Header::read(answer), Some(Header { channel: Some("commentary"), recipient: None }));
    }

    #[test]
    fn what_no_header_has_makes_none() {
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

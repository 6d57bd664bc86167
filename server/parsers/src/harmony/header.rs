//! What the header of a message says.

use super::CHANNEL;

/// A header.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header<'a> {
    pub(crate) channel: Option<&'a str>,
    /// The tool that is called.
    pub(crate) recipient: Option<&'a str>,
}

impl<'a> Header<'a> {
    /// Reads a header, from `<|start|>`, what follows it or `<|channel|>` up to `<|message|>`.
    pub(crate) fn read(text: &'a str) -> Self {
        let channel = text.split_once(CHANNEL).map(|(_, rest)| word(rest.trim_start()));
        let recipient = text
            .match_indices("to=")
            .find(|(at, _)| text[..*at].ends_with([' ', '>']) || *at == 0)
            .map(|(at, to)| word(&text[at + to.len()..]))
            .map(|name| name.strip_prefix("functions.").unwrap_or(name))
            .filter(|name| !name.is_empty() && *name != "assistant");
        Self { channel: channel.filter(|channel| !channel.is_empty()), recipient }
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
            assert_eq!(
                Header::read(text),
                Header { channel: Some("commentary"), recipient: Some("f") },
                "{text}"
            );
        }
    }

    #[test]
    fn what_a_header_does_not_say_is_none() {
        assert_eq!(Header::read("<|start|>assistant"), Header { channel: None, recipient: None });
        assert_eq!(Header::read("<|channel|>final"), Header { channel: Some("final"), recipient: None });
        let answer = "<|start|>functions.f to=assistant<|channel|>commentary";
        assert_eq!(Header::read(answer), Header { channel: Some("commentary"), recipient: None });
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

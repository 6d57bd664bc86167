//! Matches expected texts, one character at a time.

/// The rest of an expected text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Literal {
    rest: &'static str,
}

/// The effect of a character on an expected text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LiteralStep {
    /// The character matches, and more characters are expected.
    More,
    /// The character completes the text.
    Whole,
    /// The character does not match.
    Not,
}

impl Literal {
    /// Expects `text`, which must not be empty.
    pub(crate) fn new(text: &'static str) -> Self {
        debug_assert!(!text.is_empty());
        Self { rest: text }
    }

    pub(crate) fn step(&mut self, letter: char) -> LiteralStep {
        match self.rest.strip_prefix(letter) {
            None => LiteralStep::Not,
            Some("") => LiteralStep::Whole,
            Some(rest) => {
                self.rest = rest;
                LiteralStep::More
            }
        }
    }
}

/// Whether a character is whitespace between the parts of a call.
pub(crate) fn is_space(letter: char) -> bool {
    matches!(letter, ' ' | '\t' | '\n' | '\r')
}

/// Several expected texts, one of which must follow. No text may be a prefix of another.
#[derive(Clone, Debug)]
pub(crate) struct LiteralChoice {
    texts: &'static [&'static str],
    read: String,
}

/// The effect of a character on several expected texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChoiceStep {
    /// The character matches, and more characters are expected.
    More,
    /// The character completes the text with this index.
    Whole(usize),
    /// The character matches none of the texts.
    Not,
}

impl LiteralChoice {
    /// Expects one of `texts`.
    pub(crate) fn new(texts: &'static [&'static str]) -> Self {
        Self { texts, read: String::new() }
    }

    /// The number of bytes that matched before the last character, which did not. Call this only after
    /// [`ChoiceStep::Not`].
    pub(crate) fn matched_bytes(&self) -> usize {
        self.read.len() - self.read.chars().next_back().map_or(0, char::len_utf8)
    }

    /// Reads the next character. After [`ChoiceStep::Whole`] or `Not`, no more characters may follow.
    pub(crate) fn step(&mut self, letter: char) -> ChoiceStep {
        self.read.push(letter);
        if let Some(whole) = self.texts.iter().position(|text| *text == self.read) {
            return ChoiceStep::Whole(whole);
        }
        if self.texts.iter().any(|text| text.starts_with(&self.read)) {
            ChoiceStep::More
        } else {
            ChoiceStep::Not
        }
    }
}

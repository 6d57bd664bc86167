//! A text that has to come next, character by character.

/// How far a text that has to come next has come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Literal {
    rest: &'static str,
}

/// What a character made of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Matched {
    /// It fits; there is more to come.
    More,
    /// It was the last.
    Whole,
    /// It does not fit.
    Not,
}

impl Literal {
    /// Nothing of `text` has come. It is not empty.
    pub(crate) fn new(text: &'static str) -> Self {
        debug_assert!(!text.is_empty());
        Self { rest: text }
    }

    pub(crate) fn step(&mut self, letter: char) -> Matched {
        match self.rest.strip_prefix(letter) {
            None => Matched::Not,
            Some("") => Matched::Whole,
            Some(rest) => {
                self.rest = rest;
                Matched::More
            }
        }
    }
}

/// What counts as space between the parts of a call.
pub(crate) fn is_space(letter: char) -> bool {
    matches!(letter, ' ' | '\t' | '\n' | '\r')
}

/// One of several texts that has to come next, character by character. None is the beginning of another.
#[derive(Clone, Debug)]
pub(crate) struct OneOf {
    texts: &'static [&'static str],
    read: String,
}

/// What a character made of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chosen {
    /// It fits; there is more to come.
    More,
    /// It was the last of this one.
    Whole(usize),
    /// It fits none.
    Not,
}

impl OneOf {
    /// Nothing of `texts` has come.
    pub(crate) fn new(texts: &'static [&'static str]) -> Self {
        Self { texts, read: String::new() }
    }

    /// How many bytes fitted.
    pub(crate) fn fitted(&self) -> usize {
        self.read.len() - self.read.chars().next_back().map_or(0, char::len_utf8)
    }

    /// Takes the next character. After [`Chosen::Whole`] or `Not` nothing may follow.
    pub(crate) fn step(&mut self, letter: char) -> Chosen {
        self.read.push(letter);
        if let Some(whole) = self.texts.iter().position(|text| *text == self.read) {
            return Chosen::Whole(whole);
        }
        if self.texts.iter().any(|text| text.starts_with(&self.read)) { Chosen::More } else { Chosen::Not }
    }
}

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

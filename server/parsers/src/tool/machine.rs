//! The interface of tool formats: marks that begin calls, and the state machine that parses them.

use std::fmt::Debug;

use crate::out::Out;

/// A text that begins calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    pub(crate) text: &'static str,
    pub(crate) position: MarkPosition,
    /// Whether the machine reads the text of the mark too, because that text is part of the calls.
    pub(crate) is_read: bool,
}

/// The positions at which a mark counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkPosition {
    /// The mark counts everywhere.
    Anywhere,
    /// The mark counts only if nothing but whitespace precedes it: at the beginning, after reasoning or after a call.
    Start,
}

impl Mark {
    pub(crate) const fn anywhere(text: &'static str) -> Self {
        Self { text, position: MarkPosition::Anywhere, is_read: false }
    }

    pub(crate) const fn bare(text: &'static str) -> Self {
        Self { text, position: MarkPosition::Start, is_read: true }
    }
}

/// The effect of a character on the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The character belongs to the calls, which continue.
    More,
    /// The character ends the calls.
    Done,
    /// The character does not belong to the calls. The open text becomes content, except its last `again` bytes, which
    /// are processed again because another mark may begin in them.
    Stop { again: usize },
    /// The character belongs to the calls, which continue. The open text becomes content, except its last `kept` bytes.
    Skip { kept: usize },
}

impl Step {
    /// The open text becomes content.
    pub(crate) const TEXT: Self = Self::Stop { again: 0 };

    /// The open text, without the character that did not match, is processed again.
    pub(crate) fn reprocess(out: &Out, letter: char) -> Self {
        Self::Stop { again: out.open_bytes() - letter.len_utf8() }
    }
}

/// A state machine that parses calls one character at a time, starting at one of its marks.
pub(crate) trait Calls: Debug + Send + Sync {
    /// The marks that begin its calls.
    fn marks(&self) -> &'static [Mark];

    /// Begins at the mark with this index.
    fn enter(&mut self, mark: usize, out: &mut Out);

    /// Reads the next character, which is already in the open text of `out`.
    fn step(&mut self, letter: char, out: &mut Out) -> Step;

    /// Ends the text within the calls and adds the deltas that are certain.
    fn finish(&mut self, _out: &mut Out) {}
}

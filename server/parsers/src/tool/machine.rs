//! The interface of tool formats: the markers that begin calls, and the state machine that parses the calls.

use std::fmt::Debug;

use crate::delta_buffer::DeltaBuffer;

/// A text that begins calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallMarker {
    pub(crate) text: &'static str,
    pub(crate) position: MarkerPosition,
    /// Whether the machine reads the text of the marker too, because that text is part of the calls.
    pub(crate) is_read: bool,
}

/// The positions at which a marker is recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkerPosition {
    /// The marker is recognized everywhere.
    Anywhere,
    /// The marker is recognized only at the beginning, after reasoning or after a call. Whitespace may precede it
    /// there.
    Start,
}

impl CallMarker {
    pub(crate) const fn anywhere(text: &'static str) -> Self {
        Self { text, position: MarkerPosition::Anywhere, is_read: false }
    }

    pub(crate) const fn bare(text: &'static str) -> Self {
        Self { text, position: MarkerPosition::Start, is_read: true }
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
    /// are processed again because another marker may begin in them.
    Stop { again: usize },
    /// The character belongs to the calls, which continue. The open text becomes content, except its last `kept` bytes.
    Skip { kept: usize },
}

impl Step {
    /// The open text becomes content.
    pub(crate) const TEXT: Self = Self::Stop { again: 0 };

    /// The open text, without the character that did not match, is processed again.
    pub(crate) fn reprocess(out: &DeltaBuffer, letter: char) -> Self {
        Self::Stop { again: out.open_bytes() - letter.len_utf8() }
    }
}

/// A state machine that parses calls one character at a time, starting at one of its markers.
pub(crate) trait Calls: Debug + Send + Sync {
    /// The markers that begin calls in this format.
    fn markers(&self) -> &'static [CallMarker];

    /// Begins at the marker with this index.
    fn enter(&mut self, marker: usize, out: &mut DeltaBuffer);

    /// Reads the next character, which is already in the open text of `out`.
    fn step(&mut self, letter: char, out: &mut DeltaBuffer) -> Step;

    /// Ends the text within the calls and adds the deltas that are certain.
    fn finish(&mut self, _out: &mut DeltaBuffer) {}
}

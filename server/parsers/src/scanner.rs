//! Finds markers in text that arrives one character at a time. The scanner holds back only the longest suffix of the
//! text that may become a marker.

/// A recognized part of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScanEvent {
    /// The next character, which does not begin a marker.
    Letter(char),
    /// A marker, identified by its index in the list.
    Marker(usize),
}

/// The suffix of a text that may become a marker.
#[derive(Debug, Default)]
pub(crate) struct Scanner {
    held: String,
    work: usize,
}

impl Scanner {
    pub(crate) fn push(&mut self, letter: char) {
        self.work += 1;
        self.held.push(letter);
    }

    /// Returns the next recognized part of the text, if there is one. `markers` are the markers that are valid at the
    /// start of the suffix; if two match, the one that is complete first takes precedence.
    pub(crate) fn settle(
        &mut self,
        markers: impl Iterator<Item = (usize, &'static str)>,
    ) -> Option<ScanEvent> {
        let first = self.held.chars().next()?;
        let mut possible = false;
        for (index, marker) in markers {
            self.work += 1;
            if marker == self.held {
                self.held.clear();
                return Some(ScanEvent::Marker(index));
            }
            possible |= marker.starts_with(&self.held);
        }
        if possible {
            return None;
        }
        self.held.remove(0);
        Some(ScanEvent::Letter(first))
    }

    /// Returns the number of characters read and comparisons made since the last call.
    pub(crate) fn take_work(&mut self) -> usize {
        std::mem::take(&mut self.work)
    }

    /// Ends the text and returns the part that was held back.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

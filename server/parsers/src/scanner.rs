//! Finds markers in text that comes a character at a time. Holds back the longest end of the text that may
//! become a marker, and no more.

/// What is certain about the text so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The next character, which begins no marker.
    Letter(char),
    /// A marker, by the place it has in the list.
    Marker(usize),
}

/// The end of a text that may become a marker.
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

    /// The next certain thing, if there is one. `markers` are those that count where the held text begins;
    /// of two that fit, the first to be complete counts.
    pub(crate) fn settle(&mut self, markers: impl Iterator<Item = (usize, &'static str)>) -> Option<Found> {
        let first = self.held.chars().next()?;
        let mut possible = false;
        for (index, marker) in markers {
            self.work += 1;
            if marker == self.held {
                self.held.clear();
                return Some(Found::Marker(index));
            }
            possible |= marker.starts_with(&self.held);
        }
        if possible {
            return None;
        }
        self.held.remove(0);
        Some(Found::Letter(first))
    }

    /// How many characters were taken and comparisons made since this was last asked.
    pub(crate) fn take_work(&mut self) -> usize {
        std::mem::take(&mut self.work)
    }

    /// The text ends: what was held back.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

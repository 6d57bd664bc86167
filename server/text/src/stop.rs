//! Finds stop strings in text that arrives in pieces.

/// The result of filtering a piece of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopFilterOutput {
    /// The text is certain not to be part of a stop string.
    Text(String),
    /// No text can be returned yet. The text that is held back, if any, may be the beginning of a stop string.
    Held,
    /// A stop string is complete. No more text follows.
    Stopped {
        /// The text before the stop string, and the stop string itself if the filter includes it.
        text: String,
        /// The index of the stop string in the list that was passed to `StopFilter::new`.
        stop: usize,
    },
}

/// Finds the stop string that ends first, or the longest one if several end at the same position. The result does not
/// depend on how the text is split into pieces. The filter holds back at most the longest suffix of the text that may
/// begin a stop string. Stop strings that end while the filter is inactive are ordinary text.
#[derive(Clone, Debug)]
pub struct StopFilter {
    stops: Vec<Stop>,
    include_stop: bool,
    /// Text that is held back; between calls it is shorter than the longest stop string.
    held: String,
    stopped: Option<usize>,
    is_active: bool,
}

/// A stop string with its Knuth-Morris-Pratt automaton.
#[derive(Clone, Debug)]
struct Stop {
    index: usize,
    bytes: Vec<u8>,
    /// `fallback[n]`: the length of the longest proper border of the first `n + 1` bytes.
    fallback: Vec<usize>,
    /// The length of the longest prefix of the stop string that is a suffix of the text.
    matched: usize,
}

impl Stop {
    fn new(index: usize, text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut fallback = vec![0; bytes.len()];
        let mut border = 0;
        for at in 1..bytes.len() {
            while border > 0 && bytes[at] != bytes[border] {
                border = fallback[border - 1];
            }
            border += usize::from(bytes[at] == bytes[border]);
            fallback[at] = border;
        }
        Self { index, bytes, fallback, matched: 0 }
    }

    /// Consumes a byte. Returns true if the text now ends with the whole stop string.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }

    /// Continues after a match that is ignored. The next match may begin with the end of the ignored one.
    fn pass(&mut self) {
        self.matched = self.fallback[self.matched - 1];
    }
}

impl StopFilter {
    /// Creates a filter for one sequence. Empty stop strings never match.
    pub fn new<S: AsRef<str>>(stops: impl IntoIterator<Item = S>, include_stop: bool) -> Self {
        let stops = stops
            .into_iter()
            .enumerate()
            .filter(|(_, stop)| !stop.as_ref().is_empty())
            .map(|(index, stop)| Stop::new(index, stop.as_ref()))
            .collect();
        Self { stops, include_stop, held: String::new(), stopped: None, is_active: true }
    }

    /// Makes the filter ignore stop strings until [`activate`](Self::activate) is called.
    #[must_use]
    pub fn inactive(self) -> Self {
        Self { is_active: false, ..self }
    }

    /// Activates the filter: from now on, it stops at the end of a stop string, even if the stop string began while the
    /// filter was inactive.
    pub fn activate(&mut self) {
        self.is_active = true;
    }

    /// Adds the next piece of text. After a stop string, further text is dropped.
    pub fn push(&mut self, text: &str) -> StopFilterOutput {
        if let Some(stop) = self.stopped {
            return StopFilterOutput::Stopped { text: String::new(), stop };
        }
        let before = self.held.len();
        for (at, byte) in text.bytes().enumerate() {
            let mut complete: Option<(usize, usize)> = None;
            for stop in &mut self.stops {
                if !stop.advance(byte) {
                    continue;
                }
                if !self.is_active {
                    stop.pass();
                } else if complete.is_none_or(|(_, length)| stop.bytes.len() > length) {
                    complete = Some((stop.index, stop.bytes.len()));
                }
            }
            if let Some((stop, length)) = complete {
                let end = before + at + 1;
                self.held.push_str(text);
                self.held.truncate(if self.include_stop { end } else { end - length });
                self.stopped = Some(stop);
                return StopFilterOutput::Stopped { text: std::mem::take(&mut self.held), stop };
            }
        }
        self.held.push_str(text);
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        let certain = std::mem::replace(&mut self.held, rest);
        if certain.is_empty() { StopFilterOutput::Held } else { StopFilterOutput::Text(certain) }
    }

    /// Interrupts the text and returns the part that was held back. No stop string spans an interruption.
    pub fn interrupt(&mut self) -> String {
        self.stops.iter_mut().for_each(|stop| stop.matched = 0);
        std::mem::take(&mut self.held)
    }

    /// Ends the text and returns the part that was held back.
    pub fn finish(self) -> String {
        self.held
    }
}

#[cfg(test)]
mod tests;

//! Stop strings in text that arrives in pieces.

/// What became of a piece of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filtered {
    /// This text is certain not to begin a stop string.
    Text(String),
    /// Nothing is certain: all there is may be the beginning of a stop string.
    Held,
    /// A stop string is complete. Nothing more will come.
    Stopped {
        /// The text before it, and the stop string itself if it was to be included.
        text: String,
        /// Which stop string, as an index into the list the filter was made of.
        stop: usize,
    },
}

/// Finds the stop string that is complete first (of those complete at once: the longest), however the text
/// is cut into pieces, and holds back no more than the longest suffix of the text that begins a stop string. One that
/// is complete before the filter heeds any is text like any other.
#[derive(Clone, Debug)]
pub struct StopFilter {
    stops: Vec<Stop>,
    include_stop: bool,
    /// Text not given out yet: shorter than the longest stop string between calls.
    held: String,
    stopped: Option<usize>,
    heeds: bool,
}

/// A stop string with its Knuth-Morris-Pratt automaton.
#[derive(Clone, Debug)]
struct Stop {
    index: usize,
    bytes: Vec<u8>,
    /// `fallback[n]`: the length of the longest proper border of the first `n + 1` bytes.
    fallback: Vec<usize>,
    /// How many of its bytes the text ends with.
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

    /// Takes a byte; true if the text now ends with the whole stop string.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }

    /// Goes on as if it had not been complete: what ends it may begin the next.
    fn pass(&mut self) {
        self.matched = self.fallback[self.matched - 1];
    }
}

impl StopFilter {
    /// A filter for one sequence. Empty stop strings match nothing.
    pub fn new<S: AsRef<str>>(stops: impl IntoIterator<Item = S>, include_stop: bool) -> Self {
        let stops = stops
            .into_iter()
            .enumerate()
            .filter(|(_, stop)| !stop.as_ref().is_empty())
            .map(|(index, stop)| Stop::new(index, stop.as_ref()))
            .collect();
        Self { stops, include_stop, held: String::new(), stopped: None, heeds: true }
    }

    /// The same filter, for which no stop string counts until it is to [`heed`](Self::heed) them.
    #[must_use]
    pub fn heedless(self) -> Self {
        Self { heeds: false, ..self }
    }

    /// Stop strings that are complete from now on count, wherever they began.
    pub fn heed(&mut self) {
        self.heeds = true;
    }

    /// Takes the next piece of text. After a stop, further text is dropped.
    pub fn push(&mut self, text: &str) -> Filtered {
        if let Some(stop) = self.stopped {
            return Filtered::Stopped { text: String::new(), stop };
        }
        let before = self.held.len();
        for (at, byte) in text.bytes().enumerate() {
            let mut complete: Option<(usize, usize)> = None;
            for stop in &mut self.stops {
                if !stop.advance(byte) {
                    continue;
                }
                if !self.heeds {
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
                return Filtered::Stopped { text: std::mem::take(&mut self.held), stop };
            }
        }
        self.held.push_str(text);
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        let certain = std::mem::replace(&mut self.held, rest);
        if certain.is_empty() { Filtered::Held } else { Filtered::Text(certain) }
    }

    /// The text is interrupted: returns what was held back. No stop string reaches across.
    pub fn interrupt(&mut self) -> String {
        self.stops.iter_mut().for_each(|stop| stop.matched = 0);
        std::mem::take(&mut self.held)
    }

    /// The text ends: returns what was held back.
    pub fn finish(self) -> String {
        self.held
    }
}

#[cfg(test)]
mod tests;

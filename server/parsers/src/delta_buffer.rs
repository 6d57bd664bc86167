//! Collects the output of a format, and holds the text that has been read but not interpreted yet.

use std::mem;

use crate::Delta;

/// The deltas of a parser since the last call of [`DeltaBuffer::take`]. Adjacent text of the same kind is joined.
#[derive(Debug, Default)]
pub(crate) struct DeltaBuffer {
    deltas: Vec<Delta>,
    /// The text that has been read but not interpreted yet, which becomes content if it turns out to be plain text.
    raw: String,
    /// The number of bytes of the marker at the start of `raw`.
    marker: usize,
    calls: u32,
    /// The name of a call, and its arguments so far. The call begins once its arguments contain more than an opening
    /// brace and whitespace.
    prepared: Option<(String, String)>,
    ending: Ending,
    work: u64,
}

/// The way in which the text ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The model ended the text.
    #[default]
    Complete,
    /// The token limit cut the text off.
    Cut,
}

impl DeltaBuffer {
    /// Takes the collected deltas.
    pub(crate) fn take(&mut self) -> Vec<Delta> {
        mem::take(&mut self.deltas)
    }

    /// Sets the way in which the text will end.
    pub(crate) fn set_ending(&mut self, ending: Ending) {
        self.ending = ending;
    }

    /// Adds to the number of elementary steps.
    pub(crate) fn add_work(&mut self, steps: usize) {
        self.work += steps as u64;
    }

    pub(crate) fn work(&self) -> u64 {
        self.work
    }

    /// The number of calls that have begun.
    pub(crate) fn calls(&self) -> u32 {
        self.calls
    }

    pub(crate) fn content(&mut self, text: &str) {
        self.add_work(text.len());
        if text.is_empty() {
            return;
        }
        if let Some(Delta::Content(last)) = self.deltas.last_mut() {
            last.push_str(text);
        } else {
            self.deltas.push(Delta::Content(text.to_owned()));
        }
    }

    pub(crate) fn reasoning(&mut self, text: &str) {
        self.add_work(text.len());
        if text.is_empty() {
            return;
        }
        if let Some(Delta::Reasoning(last)) = self.deltas.last_mut() {
            last.push_str(text);
        } else {
            self.deltas.push(Delta::Reasoning(text.to_owned()));
        }
    }

    /// Begins the next call. All text read so far belongs to it.
    pub(crate) fn begin(&mut self, name: &str) {
        debug_assert!(!name.is_empty());
        self.deltas.push(Delta::ToolCallBegin { index: self.calls, name: name.to_owned() });
        self.calls += 1;
        self.commit();
    }

    /// Prepares the next call, which begins with the first non-whitespace character after the opening brace of its
    /// arguments. Until then, the call may turn out to be malformed, in which case it is text.
    pub(crate) fn prepare(&mut self, name: &str) {
        self.prepared = Some((name.to_owned(), String::new()));
    }

    /// Whether a call is prepared but has not begun.
    pub(crate) fn is_prepared(&self) -> bool {
        self.prepared.is_some()
    }

    /// Discards the prepared call.
    pub(crate) fn drop_prepared(&mut self) {
        self.prepared = None;
    }

    /// Begins the prepared call, because the text ends within it or its arguments have begun.
    pub(crate) fn begin_prepared(&mut self) {
        if let Some((name, text)) = self.prepared.take() {
            self.begin(&name);
            self.arguments(&text);
        }
    }

    /// Adds arguments to the prepared call or, if no call is prepared, to the call that began last. If the call has
    /// begun, all text read so far belongs to its arguments.
    pub(crate) fn arguments(&mut self, text: &str) {
        if let Some((_, before)) = &mut self.prepared {
            // Skip the opening brace, which is the first byte of the arguments.
            let mut more = text.bytes().skip(usize::from(before.is_empty()));
            before.push_str(text);
            if more.any(|byte| !byte.is_ascii_whitespace()) {
                self.begin_prepared();
            }
            return;
        }
        self.commit();
        self.add_work(text.len());
        if text.is_empty() {
            return;
        }
        let index = self.calls.saturating_sub(1);
        if let Some(Delta::ToolCallArguments { text: last, .. }) = self.deltas.last_mut() {
            last.push_str(text);
        } else {
            self.deltas.push(Delta::ToolCallArguments { index, text: text.to_owned() });
        }
    }

    /// Completes the arguments of the call that began last.
    pub(crate) fn end(&mut self) {
        self.commit();
        self.deltas.push(Delta::ToolCallEnd { index: self.calls.saturating_sub(1) });
    }

    pub(crate) fn call_without_arguments(&mut self, name: &str) {
        self.begin(name);
        self.arguments("{}");
        self.end();
    }

    /// Ends the text after the name of a call. If the text was cut off, the call remains incomplete; otherwise, it is a
    /// complete call without arguments.
    pub(crate) fn call_at_end(&mut self, name: &str) {
        match self.ending {
            Ending::Complete => self.call_without_arguments(name),
            Ending::Cut => self.begin(name),
        }
    }

    /// Ends the text at the last character of a call's name, or of `null` in place of the arguments. The call then has
    /// no arguments. If the text was cut off, this word may be incomplete, so there is no call.
    pub(crate) fn call_at_end_of_name(&mut self, name: &str) {
        if self.ending == Ending::Complete {
            self.call_without_arguments(name);
        }
    }

    /// Marks all text read so far as interpreted: it will not become content.
    pub(crate) fn commit(&mut self) {
        self.raw.clear();
        self.marker = 0;
    }

    /// Begins to collect uninterpreted text, starting with a marker.
    pub(crate) fn open(&mut self, marker: &str) {
        self.raw.clear();
        self.raw.push_str(marker);
        self.marker = marker.len();
    }

    /// Adds a character to the text that is not interpreted yet.
    pub(crate) fn read(&mut self, letter: char) {
        self.add_work(1);
        self.raw.push(letter);
    }

    /// Removes the last character, which does not belong to the format.
    pub(crate) fn unread(&mut self) {
        self.raw.pop();
    }

    /// Removes the last `bytes` bytes, which will be read again.
    pub(crate) fn unread_bytes(&mut self, bytes: usize) {
        self.raw.truncate(self.raw.len().saturating_sub(bytes));
    }

    /// Returns the text that is not interpreted yet, without its first `skipped` bytes, or `None` if it is shorter.
    pub(crate) fn open_from(&self, skipped: usize) -> Option<&str> {
        self.raw.get(skipped..)
    }

    /// Removes and returns the text that is not interpreted yet, except its last `kept` bytes.
    pub(crate) fn split_open(&mut self, kept: usize) -> String {
        let rest = self.raw.split_off(self.raw.len() - kept.min(self.raw.len()));
        self.marker = 0;
        mem::replace(&mut self.raw, rest)
    }

    /// The number of bytes that are not interpreted yet.
    pub(crate) fn open_bytes(&self) -> usize {
        self.raw.len()
    }

    /// Stops collecting. Returns the text that becomes content, and the text to process again: at most the last `again`
    /// bytes, but never the marker, which would be found again.
    pub(crate) fn close(&mut self, again: usize) -> (String, String) {
        self.prepared = None;
        let mut text = mem::take(&mut self.raw);
        let again = again.min(text.len() - self.marker);
        let rest = text.split_off(text.len() - again);
        self.marker = 0;
        (text, rest)
    }
}

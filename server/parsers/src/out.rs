//! Where a format puts what it has understood, and the account of what it has read and not understood yet.

use std::mem;

use crate::Delta;

/// The deltas of a parser since they were last taken. Adjacent text of a kind is joined.
#[derive(Debug, Default)]
pub(crate) struct Out {
    deltas: Vec<Delta>,
    /// What was read and has led to nothing yet: text, should it turn out to mean nothing.
    raw: String,
    /// How many bytes of `raw` are the marker that it began with.
    marker: usize,
    calls: u32,
    work: u64,
}

impl Out {
    /// What has gathered.
    pub(crate) fn take(&mut self) -> Vec<Delta> {
        mem::take(&mut self.deltas)
    }

    /// Counts elementary steps.
    pub(crate) fn worked(&mut self, steps: usize) {
        self.work += steps as u64;
    }

    pub(crate) fn work(&self) -> u64 {
        self.work
    }

    /// How many calls have begun.
    pub(crate) fn calls(&self) -> u32 {
        self.calls
    }

    pub(crate) fn content(&mut self, text: &str) {
        self.worked(text.len());
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
        self.worked(text.len());
        if text.is_empty() {
            return;
        }
        if let Some(Delta::Reasoning(last)) = self.deltas.last_mut() {
            last.push_str(text);
        } else {
            self.deltas.push(Delta::Reasoning(text.to_owned()));
        }
    }

    /// The next call begins; all that was read belongs to it.
    pub(crate) fn begin(&mut self, name: &str) {
        debug_assert!(!name.is_empty());
        self.deltas.push(Delta::ToolCallBegin { index: self.calls, name: name.to_owned() });
        self.calls += 1;
        self.commit();
    }

    /// More arguments of the call that began last; all that was read is in them.
    pub(crate) fn arguments(&mut self, text: &str) {
        self.commit();
        self.worked(text.len());
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

    /// The arguments of the call that began last are whole.
    pub(crate) fn end(&mut self) {
        self.commit();
        self.deltas.push(Delta::ToolCallEnd { index: self.calls.saturating_sub(1) });
    }

    /// A call without arguments of its own writing.
    pub(crate) fn call_without_arguments(&mut self, name: &str) {
        self.begin(name);
        self.arguments("{}");
        self.end();
    }

    /// What was read is understood: it will not come back as text.
    pub(crate) fn commit(&mut self) {
        self.raw.clear();
        self.marker = 0;
    }

    /// Reading begins at a marker.
    pub(crate) fn open(&mut self, marker: &str) {
        self.raw.clear();
        self.raw.push_str(marker);
        self.marker = marker.len();
    }

    /// A character was read.
    pub(crate) fn read(&mut self, letter: char) {
        self.worked(1);
        self.raw.push(letter);
    }

    /// The character read last is not the format's.
    pub(crate) fn unread(&mut self) {
        self.raw.pop();
    }

    /// How many bytes have been read and not been understood.
    pub(crate) fn open_bytes(&self) -> usize {
        self.raw.len()
    }

    /// Reading is over: the bytes that are text, and those to be looked at anew, at most the last `again`. The
    /// marker is never looked at anew, for it would be found again.
    pub(crate) fn close(&mut self, again: usize) -> (String, String) {
        let mut text = mem::take(&mut self.raw);
        let again = again.min(text.len() - self.marker);
        let rest = text.split_off(text.len() - again);
        self.marker = 0;
        (text, rest)
    }
}

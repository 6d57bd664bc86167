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
    /// A call that begins as soon as its arguments hold more than an opening brace: its name and the brace.
    prepared: Option<(String, String)>,
    ending: Ending,
    work: u64,
}

/// How the text ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The model has ended it.
    #[default]
    Complete,
    /// The limit of tokens cut it off.
    Cut,
}

impl Out {
    /// What has gathered.
    pub(crate) fn take(&mut self) -> Vec<Delta> {
        mem::take(&mut self.deltas)
    }

    /// The text is going to end like this.
    pub(crate) fn set_ending(&mut self, ending: Ending) {
        self.ending = ending;
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

    /// The next call begins with the first character of its arguments that follows the opening brace. Until
    /// then it may be broken, and a broken call is text.
    pub(crate) fn prepare(&mut self, name: &str) {
        self.prepared = Some((name.to_owned(), String::new()));
    }

    /// Whether a call is prepared that has not begun.
    pub(crate) fn is_prepared(&self) -> bool {
        self.prepared.is_some()
    }

    /// The call that is prepared does not begin.
    pub(crate) fn drop_prepared(&mut self) {
        self.prepared = None;
    }

    /// The text ends: a call that is prepared begins, and was cut off.
    pub(crate) fn begin_prepared(&mut self) {
        if let Some((name, text)) = self.prepared.take() {
            self.begin(&name);
            self.arguments(&text);
        }
    }

    /// More arguments of the call that began last, or is prepared; all that was read is in them.
    pub(crate) fn arguments(&mut self, text: &str) {
        if let Some((_, before)) = &mut self.prepared {
            // The brace is one byte, and the first.
            let mut more = text.bytes().skip(usize::from(before.is_empty()));
            before.push_str(text);
            if more.any(|byte| !byte.is_ascii_whitespace()) {
                self.begin_prepared();
            }
            return;
        }
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

    /// The text ends after the name of a call, where its arguments belong: it has none, unless it was cut off.
    pub(crate) fn call_at_end(&mut self, name: &str) {
        match self.ending {
            Ending::Complete => self.call_without_arguments(name),
            Ending::Cut => self.begin(name),
        }
    }

    /// The text ends within the name of a call without arguments. A name that was cut off is not certain.
    pub(crate) fn call_at_end_of_name(&mut self, name: &str) {
        if self.ending == Ending::Complete {
            self.call_without_arguments(name);
        }
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

    /// The last `bytes` that were read are going to be read again.
    pub(crate) fn unread_bytes(&mut self, bytes: usize) {
        self.raw.truncate(self.raw.len().saturating_sub(bytes));
    }

    /// What has been read and not been understood, from its first `skipped` bytes on; `None` if it is shorter.
    pub(crate) fn open_from(&self, skipped: usize) -> Option<&str> {
        self.raw.get(skipped..)
    }

    /// What was read is text, but for its last `kept` bytes, which stay read.
    pub(crate) fn split_open(&mut self, kept: usize) -> String {
        let rest = self.raw.split_off(self.raw.len() - kept.min(self.raw.len()));
        self.marker = 0;
        mem::replace(&mut self.raw, rest)
    }

    /// How many bytes have been read and not been understood.
    pub(crate) fn open_bytes(&self) -> usize {
        self.raw.len()
    }

    /// Reading is over: the bytes that are text, and those to be looked at anew, at most the last `again`. The
    /// marker is never looked at anew, for it would be found again.
    pub(crate) fn close(&mut self, again: usize) -> (String, String) {
        self.prepared = None;
        let mut text = mem::take(&mut self.raw);
        let again = again.min(text.len() - self.marker);
        let rest = text.split_off(text.len() - again);
        self.marker = 0;
        (text, rest)
    }
}

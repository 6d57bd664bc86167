//! The parser of one response, which selects the state machine of its formats.

use std::sync::Arc;

use crate::delta_buffer::{DeltaBuffer, Ending};
use crate::harmony::Harmony;
use crate::marked::MarkedText;
use crate::{Delta, Formats, Tools};

/// Parses the text of one response incrementally.
///
/// # Guarantees
/// - Parsing never fails. Text that is neither reasoning nor a call is content, including malformed calls with their
///   markers. Only markup, the whitespace around it, the members of a call object other than its name and its first
///   arguments, and the uncertain end of an incomplete call are dropped.
/// - After adjacent deltas are joined, the result does not depend on how the text was split.
/// - The work is linear in the length of the text. Only text whose meaning is not certain yet is held back.
/// - Calls have the indices 0, 1, 2 and so on. Deltas of a call that is cut off remain valid.
#[derive(Debug)]
pub struct Parser {
    machine: Machine,
    out: DeltaBuffer,
}

#[derive(Debug)]
enum Machine {
    Marked(Box<MarkedText>),
    Harmony(Box<Harmony>),
}

impl Parser {
    /// Creates a parser for the response to a request that offers `tools`. Without tools, the tool format is off, but
    /// reasoning is still parsed. `prompt` is the rendered prompt, or its last part. If it ends with a tag that opens
    /// reasoning, the response begins with reasoning.
    pub fn new(formats: Formats, tools: &Arc<Tools>, prompt: &str) -> Self {
        let formats = formats.with_tools(tools);
        let machine = if formats.is_harmony() {
            Machine::Harmony(Box::new(Harmony::new(formats)))
        } else {
            Machine::Marked(Box::new(MarkedText::new(formats, tools, prompt)))
        };
        Self { machine, out: DeltaBuffer::default() }
    }

    /// Adds the next piece of text. Returns the deltas that are now certain; often there are none.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        for letter in text.chars() {
            match &mut self.machine {
                Machine::Marked(marked) => marked.push(letter, &mut self.out),
                Machine::Harmony(harmony) => harmony.push(letter, &mut self.out),
            }
        }
        self.out.take()
    }

    /// Ends the text because the model ended it. Returns the deltas of the text that was held back.
    pub fn finish(self) -> Vec<Delta> {
        self.end(Ending::Complete)
    }

    /// Ends the text because the token limit cut it off. Returns the deltas of the text that was held back. In some
    /// formats, [`Self::finish`] completes a call whose arguments have not begun, with empty arguments; this function
    /// leaves it incomplete, or drops it if its name may be incomplete.
    pub fn finish_cut(self) -> Vec<Delta> {
        self.end(Ending::Cut)
    }

    fn end(mut self, ending: Ending) -> Vec<Delta> {
        self.out.set_ending(ending);
        match &mut self.machine {
            Machine::Marked(marked) => marked.finish(&mut self.out),
            Machine::Harmony(harmony) => harmony.finish(&mut self.out),
        }
        self.out.take()
    }

    /// Whether the next text is reasoning, unless a marker ends it.
    pub fn is_reasoning(&self) -> bool {
        match &self.machine {
            Machine::Marked(marked) => marked.is_reasoning(),
            Machine::Harmony(harmony) => harmony.is_reasoning(),
        }
    }

    /// The number of calls that have begun.
    pub fn calls(&self) -> u32 {
        self.out.calls()
    }

    /// The number of elementary steps so far: characters read, compared and emitted. Tests use it to show that the work
    /// is linear.
    pub fn work(&self) -> u64 {
        self.out.work()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parser_can_be_sent_and_shared_between_threads() {
        fn assert_send_and_sync<T: Send + Sync + 'static>() {}
        assert_send_and_sync::<Parser>();
        assert_send_and_sync::<Tools>();
    }
}

//! The parser of one answer: picks the machine for its formats and feeds it.

use std::sync::Arc;

use crate::harmony::Harmony;
use crate::marked::Marked;
use crate::out::{Ending, Out};
use crate::{Delta, Formats, Tools};

/// Takes the text of one answer as it comes and gives out what it means.
///
/// # Guarantees
/// - It is total: nothing is an error, and no text is lost. What is not a call is content, markers included.
/// - Joined, the deltas are the same however the text was cut into pieces.
/// - Work is linear in the text. What is held back is what cannot be told yet, and no more.
/// - Calls have the indices 0, 1, 2 and so on; of a call that was cut off, what was given out stands.
#[derive(Debug)]
pub struct Parser {
    machine: Machine,
    out: Out,
}

#[derive(Debug)]
enum Machine {
    Marked(Box<Marked>),
    Harmony(Box<Harmony>),
}

impl Parser {
    /// A parser for one answer to a request that offered `tools`. With none the tool format is off, and
    /// reasoning still works. `prompt` is the rendered prompt or its end: a tag in it that opens reasoning
    /// counts.
    pub fn new(formats: Formats, tools: &Arc<Tools>, prompt: &str) -> Self {
        let formats = formats.with_tools(tools);
        let machine = if formats.is_harmony() {
            Machine::Harmony(Box::new(Harmony::new(formats)))
        } else {
            Machine::Marked(Box::new(Marked::new(formats, tools, prompt)))
        };
        Self { machine, out: Out::default() }
    }

    /// Takes the next piece of text. Returns what is certain now, often nothing.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        for letter in text.chars() {
            match &mut self.machine {
                Machine::Marked(marked) => marked.push(letter, &mut self.out),
                Machine::Harmony(harmony) => harmony.push(letter, &mut self.out),
            }
        }
        self.out.take()
    }

    /// The model has ended the text. Returns what was held back.
    pub fn finish(self) -> Vec<Delta> {
        self.end(Ending::Complete)
    }

    /// The limit of tokens has cut the text off. Returns what was held back. A call whose arguments had not begun gets
    /// no arguments, where after [`Self::finish`] it is a call without any.
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

    /// Whether what comes next is reasoning, unless a marker ends it.
    pub fn is_reasoning(&self) -> bool {
        match &self.machine {
            Machine::Marked(marked) => marked.is_reasoning(),
            Machine::Harmony(harmony) => harmony.is_reasoning(),
        }
    }

    /// How many calls have begun.
    pub fn calls(&self) -> u32 {
        self.out.calls()
    }

    /// How many elementary steps the text has taken so far: characters read, compared and passed on. It is
    /// what shows that work is linear.
    pub fn work(&self) -> u64 {
        self.out.work()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parser_may_go_where_its_request_goes() {
        fn goes_anywhere<T: Send + Sync + 'static>() {}
        goes_anywhere::<Parser>();
        goes_anywhere::<Tools>();
    }
}

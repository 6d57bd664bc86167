//! Parses arguments that are a JSON object after the name of a call.

use crate::delta_buffer::DeltaBuffer;
use crate::json::{JsonValue, ValueEffect};
use crate::tool::Step;

/// The parser of the arguments.
#[derive(Debug)]
pub(crate) struct JsonArguments {
    value: JsonValue,
    written: String,
}

impl JsonArguments {
    /// Prepares a call; the `{` of its arguments has been read.
    pub(crate) fn begin(name: &str, out: &mut DeltaBuffer) -> Self {
        let mut arguments = Self { value: JsonValue::new(), written: String::new() };
        out.prepare(name);
        arguments.step('{', out);
        arguments
    }

    /// Reads the next character. Returns [`Step::Done`] if the character ends the call.
    pub(crate) fn step(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        let effect = self.value.step(letter, &mut self.written);
        if !matches!(effect, ValueEffect::Invalid | ValueEffect::AlreadyComplete) {
            out.arguments(&self.written);
        }
        self.written.clear();
        match effect {
            ValueEffect::Continues => Step::More,
            ValueEffect::Completes => {
                out.end();
                Step::Done
            }
            ValueEffect::AlreadyComplete | ValueEffect::Invalid => Step::TEXT,
        }
    }

    /// Ends the text within the arguments.
    pub(crate) fn finish(&mut self, out: &mut DeltaBuffer) {
        out.arguments(&self.value.held());
    }
}

/// Whether names of tools may contain `letter`.
pub(crate) fn is_of_name(letter: char) -> bool {
    letter.is_alphanumeric() || matches!(letter, '_' | '-' | '.' | ':' | '/')
}

//! The formats mistral and devstral: `[TOOL_CALLS]` before an array of objects, or before a name and its arguments.

use crate::delta_buffer::DeltaBuffer;
use crate::literal::{Literal, LiteralStep, is_space};
use crate::tool::json_arguments::is_of_name;
use crate::tool::{CallMarker, Calls, JsonArguments, JsonCalls, ObjectRule, Step};

/// The markers of a parser that also accepts a bare array. A bare array occurs if the marker of the old format, which
/// is a special token, was removed from the text.
static MISTRAL: [CallMarker; 2] = [CallMarker::anywhere(MARKER), CallMarker::bare("[{\"")];
static DEVSTRAL: [CallMarker; 1] = [CallMarker::anywhere(MARKER)];

/// The parser of calls in either form.
#[derive(Debug)]
pub(crate) struct Mistral {
    markers: &'static [CallMarker],
    array_rule: ObjectRule,
    state: State,
    name: String,
}

#[derive(Debug)]
enum State {
    Lead,
    Array(JsonCalls),
    Name,
    /// The parser has read the name and whitespace.
    AfterName,
    /// The parser has read `[`; `open` is the number of open bytes before it.
    Bracket {
        open: usize,
    },
    /// The parser is in `[ARGS]`, or in `[CALL_ID]` if `id` is set.
    Tag {
        rest: Literal,
        id: bool,
        open: usize,
    },
    /// The parser is in the identifier after `[CALL_ID]`.
    Id,
    /// The parser has read `[ARGS]`.
    Args,
    /// The parser is in `null` after `[ARGS]`.
    Null(Literal),
    /// The parser has read `null`.
    NullEnd,
    /// The parser is in a text after `[ARGS]` that may be the marker of the next call.
    Next {
        rest: Literal,
        open: usize,
    },
    Arguments(JsonArguments),
}

const MARKER: &str = "[TOOL_CALLS]";

impl Mistral {
    /// Creates a parser that also accepts a bare array.
    pub(crate) fn with_bare_array() -> Self {
        Self { markers: &MISTRAL, array_rule: ObjectRule::Marked, state: State::Lead, name: String::new() }
    }

    /// Creates a parser that accepts calls only after the marker.
    pub(crate) fn marked() -> Self {
        Self { markers: &DEVSTRAL, ..Self::with_bare_array() }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn lead(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        if matches!(letter, '[' | '{') {
            let mut array = JsonCalls::array_or_object(self.array_rule);
            let step = array.step(letter, out);
            self.state = State::Array(array);
            return step;
        }
        if !is_of_name(letter) {
            return Step::TEXT;
        }
        self.name.clear();
        self.name.push(letter);
        self.go(State::Name)
    }

    fn name(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match letter {
            letter if is_of_name(letter) => {
                self.name.push(letter);
                Step::More
            }
            letter if is_space(letter) => self.go(State::AfterName),
            letter => self.after_name(letter, out),
        }
    }

    fn after_name(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match letter {
            '[' => self.go(State::Bracket { open: out.open_bytes() - 1 }),
            // The special token `[ARGS]` may have been removed from the text.
            '{' => self.begin(out),
            _ => Step::TEXT,
        }
    }

    /// Reads the first character after `[ARGS]` that is not whitespace.
    fn args(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match letter {
            '{' => self.begin(out),
            'n' => self.go(State::Null(Literal::new("ull"))),
            '[' => {
                let mut rest = Literal::new(MARKER);
                rest.step(letter);
                self.go(State::Next { rest, open: out.open_bytes() - 1 })
            }
            _ => Step::TEXT,
        }
    }

    fn begin(&mut self, out: &mut DeltaBuffer) -> Step {
        self.state = State::Arguments(JsonArguments::begin(&self.name, out));
        Step::More
    }

    fn bracket(&mut self, letter: char, open: usize, out: &DeltaBuffer) -> Step {
        let (mut rest, id) = match letter {
            'A' => (Literal::new("ARGS]"), false),
            'C' => (Literal::new("CALL_ID]"), true),
            _ => return again(open, letter, out),
        };
        rest.step(letter);
        self.go(State::Tag { rest, id, open })
    }
}

/// Reprocesses a bracket that does not begin a tag, because another marker may begin there.
fn again(open: usize, letter: char, out: &DeltaBuffer) -> Step {
    Step::Stop { again: out.open_bytes() - letter.len_utf8() - open }
}

impl Calls for Mistral {
    fn markers(&self) -> &'static [CallMarker] {
        self.markers
    }

    fn enter(&mut self, marker: usize, _out: &mut DeltaBuffer) {
        self.array_rule = if self.markers[marker].is_read { ObjectRule::Bare } else { ObjectRule::Marked };
        self.state = State::Lead;
    }

    fn step(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match &mut self.state {
            State::Lead | State::Args | State::AfterName | State::Id if is_space(letter) => Step::More,
            State::Lead => self.lead(letter, out),
            State::Array(array) => array.step(letter, out),
            State::Name => self.name(letter, out),
            State::AfterName => self.after_name(letter, out),
            State::Bracket { open } => {
                let open = *open;
                self.bracket(letter, open, out)
            }
            State::Tag { rest, id, open } => match rest.step(letter) {
                LiteralStep::More => Step::More,
                LiteralStep::Whole => {
                    let state = if *id { State::Id } else { State::Args };
                    self.go(state)
                }
                LiteralStep::Not => again(*open, letter, out),
            },
            State::Id if is_of_name(letter) => Step::More,
            State::Id if letter == '[' => self.go(State::Bracket { open: out.open_bytes() - 1 }),
            State::Id if letter == '{' => self.begin(out),
            State::Id => Step::TEXT,
            State::Args => self.args(letter, out),
            State::Null(word) => match word.step(letter) {
                LiteralStep::More => Step::More,
                LiteralStep::Whole => self.go(State::NullEnd),
                LiteralStep::Not => Step::TEXT,
            },
            // The word is longer than `null`.
            State::NullEnd if is_of_name(letter) => Step::TEXT,
            State::NullEnd => {
                out.call_without_arguments(&self.name);
                Step::TEXT
            }
            State::Next { rest, open } => match rest.step(letter) {
                LiteralStep::More => Step::More,
                LiteralStep::Whole => {
                    out.call_without_arguments(&self.name);
                    out.open(MARKER);
                    self.go(State::Lead)
                }
                LiteralStep::Not => again(*open, letter, out),
            },
            State::Arguments(arguments) => arguments.step(letter, out),
        }
    }

    fn finish(&mut self, out: &mut DeltaBuffer) {
        match &mut self.state {
            State::Array(array) => array.finish(out),
            State::Arguments(arguments) => arguments.finish(out),
            State::Args => out.call_at_end(&self.name),
            State::NullEnd => out.call_at_end_of_name(&self.name),
            _ => {}
        }
    }
}

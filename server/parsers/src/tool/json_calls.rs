//! Formats whose calls are JSON objects after a marker, alone or in an array: hermes3, phi4, granite, and the
//! JSON forms of llama3 and mistral.

use crate::delta_buffer::DeltaBuffer;
use crate::json::{JsonValue, ValueEffect};
use crate::literal::{Literal, LiteralStep, is_space};
use crate::tool::{CallMarker, CallObject, Calls, ObjectRule, Step};

/// The notation in which a format writes calls as JSON objects.
#[derive(Debug)]
pub(crate) struct Rule {
    pub(crate) markers: &'static [CallMarker],
    /// Whether an object may occur outside of an array.
    pub(crate) alone: bool,
    /// Whether objects may occur in an array.
    pub(crate) array: bool,
    /// The optional marker after the last object or the array.
    pub(crate) close: Option<&'static str>,
    /// The separator between objects outside of an array; `None` if the first object ends the calls.
    pub(crate) between: Option<char>,
}

/// The parser of calls that are JSON objects.
#[derive(Debug)]
pub(crate) struct JsonCalls {
    rule: &'static Rule,
    object_rule: ObjectRule,
    state: State,
    in_array: bool,
}

#[derive(Debug)]
enum State {
    /// The parser is before the first object or array.
    Lead,
    /// The parser has read `[`; `open` is the number of open bytes before it.
    First {
        open: usize,
    },
    /// The parser is in an object. The number is how many bytes before the brace are open.
    Object(Box<CallObject>, usize),
    /// The parser is in an object of an array that is valid JSON but not a call.
    Skipped(JsonValue),
    /// The parser has read an object of an array that is valid JSON but not a call.
    AfterSkipped,
    /// The parser has read the comma after an object of an array that is valid JSON but not a call.
    SkippedItem,
    /// The parser has read a call in an array.
    Next,
    /// The parser has read the comma after a call in an array.
    Item,
    /// The parser has read the array, or a call outside of an array.
    Tail,
    Close(Literal),
}

/// Marks a separator that consists only of whitespace.
const SPACE: Option<char> = Some(' ');

static HERMES3: Rule = Rule {
    markers: &[CallMarker::anywhere("<tool_call>")],
    alone: true,
    array: true,
    close: Some("</tool_call>"),
    between: SPACE,
};

static PHI4: Rule = Rule {
    markers: &[CallMarker::anywhere("functools"), CallMarker::anywhere("<|tool_call|>")],
    alone: false,
    array: true,
    close: Some("<|/tool_call|>"),
    between: None,
};

static GRANITE: Rule = Rule {
    markers: &[CallMarker::anywhere("<|tool_call|>"), CallMarker::anywhere("<tool_call>")],
    alone: true,
    array: true,
    close: Some("</tool_call>"),
    between: SPACE,
};

/// The notation of JSON calls in formats that also have other forms. The caller has already found a marker, or text
/// that looks like a call.
static PLAIN: Rule = Rule { markers: &[], alone: true, array: true, close: None, between: Some(';') };

static ONE: Rule = Rule { markers: &[], alone: true, array: true, close: None, between: None };

impl JsonCalls {
    /// Creates a parser of `functools[{…}, …]` or `<|tool_call|>[{…}, …]<|/tool_call|>`.
    pub(crate) fn phi4() -> Self {
        Self::new(&PHI4)
    }

    /// Creates a parser of `<|tool_call|>[{…}, …]` or `<tool_call>{…}</tool_call>`.
    pub(crate) fn granite() -> Self {
        Self::new(&GRANITE)
    }

    /// Creates a parser of `{…}; {…}` or `[{…}, …]`, without a marker.
    pub(crate) fn plain(object_rule: ObjectRule) -> Self {
        Self { object_rule, ..Self::new(&PLAIN) }
    }

    /// Creates a parser of `[{…}, …]` or `{…}`, without a marker.
    pub(crate) fn array_or_object(object_rule: ObjectRule) -> Self {
        Self { object_rule, ..Self::new(&ONE) }
    }

    /// Creates a parser of `<tool_call>{…}</tool_call>`.
    pub(crate) fn hermes3() -> Self {
        Self::new(&HERMES3)
    }

    fn new(rule: &'static Rule) -> Self {
        Self { rule, object_rule: ObjectRule::Marked, state: State::Lead, in_array: false }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn begin_object(&self, out: &DeltaBuffer) -> State {
        State::Object(Box::new(CallObject::new(self.object_rule)), out.open_bytes().saturating_sub(1))
    }

    fn object(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        let State::Object(object, open) = &mut self.state else {
            unreachable!("invariant: within an object")
        };
        let open = *open;
        match object.step(letter, out) {
            Step::More => Step::More,
            Step::Done => {
                out.commit();
                self.object_is_over()
            }
            // The call is complete, but the closing brace of the object is missing: usually, a marker follows instead.
            Step::Stop { .. } if object.is_call() => {
                self.object_is_over();
                self.step(letter, out)
            }
            stop => self.skipped(open, out).unwrap_or(stop),
        }
    }

    /// Skips an object of a marked array that is valid JSON but not a call, by rereading it as JSON, so that its
    /// siblings can still be calls. Returns `None` if the object is outside of an array, is invalid JSON, or has begun
    /// a call.
    fn skipped(&mut self, open: usize, out: &DeltaBuffer) -> Option<Step> {
        if !self.in_array || self.object_rule != ObjectRule::Marked {
            return None;
        }
        let mut value = JsonValue::new();
        let mut effect = ValueEffect::Continues;
        for letter in out.open_from(open).filter(|text| text.starts_with('{'))?.chars() {
            if effect != ValueEffect::Continues {
                return None;
            }
            effect = value.step(letter, &mut String::new());
        }
        self.state = match effect {
            ValueEffect::Continues => State::Skipped(value),
            ValueEffect::Completes => State::AfterSkipped,
            ValueEffect::AlreadyComplete | ValueEffect::Invalid => return None,
        };
        Some(Step::More)
    }

    fn object_is_over(&mut self) -> Step {
        if self.in_array {
            return self.go(State::Next);
        }
        self.tail()
    }

    fn tail(&mut self) -> Step {
        self.state = State::Tail;
        if self.rule.close.is_none() && (self.in_array || self.rule.between.is_none()) {
            return Step::Done;
        }
        Step::More
    }

    fn in_tail(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        if is_space(letter) {
            return Step::More;
        }
        if let Some(between) = self.rule.between.filter(|_| !self.in_array) {
            if letter == between {
                return Step::More;
            }
            if letter == '{' {
                return self.go(self.begin_object(out));
            }
        }
        if let Some(close) = self.rule.close.filter(|close| close.starts_with(letter)) {
            let mut literal = Literal::new(close);
            literal.step(letter);
            return self.go(State::Close(literal));
        }
        Step::reprocess(out, letter)
    }
}

impl Calls for JsonCalls {
    fn markers(&self) -> &'static [CallMarker] {
        self.rule.markers
    }

    fn enter(&mut self, marker: usize, _out: &mut DeltaBuffer) {
        self.object_rule =
            if self.rule.markers[marker].is_read { ObjectRule::Bare } else { ObjectRule::Marked };
        self.in_array = false;
        self.state = State::Lead;
    }

    fn step(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match &mut self.state {
            State::Object(..) => self.object(letter, out),
            State::Skipped(value) => match value.step(letter, &mut String::new()) {
                ValueEffect::Continues => Step::More,
                ValueEffect::Completes => self.go(State::AfterSkipped),
                ValueEffect::AlreadyComplete | ValueEffect::Invalid => Step::TEXT,
            },
            State::Close(literal) => match literal.step(letter) {
                LiteralStep::More => Step::More,
                LiteralStep::Whole => Step::Done,
                LiteralStep::Not => Step::reprocess(out, letter),
            },
            State::Tail => self.in_tail(letter, out),
            _ if is_space(letter) => Step::More,
            State::Lead if letter == '{' && self.rule.alone => self.go(self.begin_object(out)),
            State::Lead if letter == '[' && self.rule.array => {
                self.in_array = true;
                self.go(State::First { open: out.open_bytes() - 1 })
            }
            State::Lead => Step::TEXT,
            State::First { .. } | State::Item if letter == '{' => self.go(self.begin_object(out)),
            State::First { open } => {
                Step::Stop { again: (out.open_bytes() - letter.len_utf8()).saturating_sub(*open) }
            }
            State::AfterSkipped if letter == ',' => self.go(State::SkippedItem),
            State::SkippedItem if letter == '{' => {
                // The skipped text becomes content.
                self.state = State::Object(Box::new(CallObject::new(self.object_rule)), 0);
                Step::Skip { kept: 1 }
            }
            // Parse no further calls in the list. The calls before the skipped object have already been emitted.
            State::AfterSkipped | State::SkippedItem => Step::TEXT,
            State::Next if letter == ',' => self.go(State::Item),
            State::Next if letter == ']' => {
                out.commit();
                self.tail()
            }
            State::Next | State::Item => Step::reprocess(out, letter),
        }
    }

    fn finish(&mut self, out: &mut DeltaBuffer) {
        if let State::Object(object, _) = &mut self.state {
            object.finish(out);
        }
    }
}
